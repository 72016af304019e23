"""Memories: what an algorithm learns from. Each takes steps one at a time and yields rollouts or batches."""
