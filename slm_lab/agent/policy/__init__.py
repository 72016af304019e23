"""Policies: what acts, without anything that learns."""
