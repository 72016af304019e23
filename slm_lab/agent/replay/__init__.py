"""Replay buffers, which store transitions that are sampled many times."""
