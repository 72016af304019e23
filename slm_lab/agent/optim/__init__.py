"""Flat parameters, optimizers and learning rate schedules."""
