"""Observers of a Session, which produce rows, progress, checkpoints and checks.

The training loop depends on no specific observer: a Session calls the hooks that each observer overrides, in the order of its list.
"""
