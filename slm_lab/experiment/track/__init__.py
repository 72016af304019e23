"""Adapters to experiment trackers such as Weights & Biases, and the process that runs one adapter."""
