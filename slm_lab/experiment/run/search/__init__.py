"""Hyperparameter search: propose values from a search space, run a trial with each proposal, and compare the trials."""
