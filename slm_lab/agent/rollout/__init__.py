"""Rollouts: storage that collects steps, and minibatches for learning."""
