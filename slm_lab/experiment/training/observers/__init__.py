"""Observers: they watch a Session and turn what happens into rows, progress, checkpoints and checks.

The training loop knows none of them: a Session calls the hooks that an observer overrides, in the order of its list.
"""
