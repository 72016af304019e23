"""Observers of a Session, which produce rows, progress, checkpoints and checks.

The training loop does not depend on specific observers: a Session calls the hooks that the observers override, in the order of its list of
observers.
"""
