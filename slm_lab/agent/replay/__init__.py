"""Replay buffers: transitions that are sampled many times."""
