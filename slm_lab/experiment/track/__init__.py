"""Adapters to experiment trackers, and the process that runs one of them."""
