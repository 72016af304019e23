"""Observers of a Session, which produce table rows, progress reports, checkpoints and checks.

The training loop does not depend on specific observers. A Session calls the hooks that its observers override, in the order of its list of
observers.
"""
