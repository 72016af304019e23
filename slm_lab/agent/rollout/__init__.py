"""Rollouts: storages that collect the steps of envs, and minibatches for learning."""
