"""Forward and backward passes of nets: through modules and autograd, or without a graph."""
