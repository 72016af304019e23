"""Hyperparameter search: an Experiment of Trials on Ray. Needs the extra `search`."""
