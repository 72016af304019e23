"""Rollouts: storage that collects them step by step, and minibatches to learn from."""
