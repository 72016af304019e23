"""Replay buffers: storage of transitions that are sampled many times."""
