"""Experiment, Trial and Session: the layer that manages files, processes and the terminal."""
