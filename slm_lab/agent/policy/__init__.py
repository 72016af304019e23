"""Policies, which choose actions. This package contains no learning code."""
