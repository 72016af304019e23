"""Observers: they watch a Session and turn what happens into rows, progress, checkpoints and checks.

The training loop knows none of them: a Session calls the hooks that an observer overrides, in the order of its list.
"""

from slm_lab.experiment.observers.base import COLUMNS, SAMPLER_COLUMNS, SHARED_COLUMNS, Hook, Observer, RowListeners, hooks, mean
from slm_lab.experiment.observers.checkpointer import Checkpointer
from slm_lab.experiment.observers.dev_checks import DevCheckError, DevChecks
from slm_lab.experiment.observers.progress import ProgressReporter
from slm_lab.experiment.observers.rows import Evaluator, Recorder, Table

__all__ = [
    "COLUMNS",
    "SAMPLER_COLUMNS",
    "SHARED_COLUMNS",
    "Checkpointer",
    "DevCheckError",
    "DevChecks",
    "Evaluator",
    "Hook",
    "Observer",
    "ProgressReporter",
    "Recorder",
    "RowListeners",
    "Table",
    "hooks",
    "mean",
]
