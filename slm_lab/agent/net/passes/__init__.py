"""Forward and backward passes of nets, computed by modules and autograd, or without an autograd graph."""
