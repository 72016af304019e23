"""Policies, which choose actions, without any learning code."""
