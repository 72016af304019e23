"""Hyperparameter search: a search space, proposers of values, and trials that are run and compared."""
