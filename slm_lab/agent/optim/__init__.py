"""Training of parameters: flat parameter vectors, optimizers, learning rate schedules and the Trainer."""
