"""Benchmarks: speed, scores, and comparisons of two checkouts."""
