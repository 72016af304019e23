"""Hyperparameter search: draw values from a search space, run a trial with each combination, and compare the trials."""
