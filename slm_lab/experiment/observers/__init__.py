"""Observers: what watches a Session and turns what happens into rows, files, checkpoints and messages.

The loop knows none of them: a Session calls the hooks that an observer overrides, in the order of its list.
"""

from slm_lab.experiment.observers.base import COLUMNS, GLOBAL_COLUMNS, SAMPLER_COLUMNS, Hook, Observer, Row, hooks
from slm_lab.experiment.observers.checkpointer import Checkpointer
from slm_lab.experiment.observers.dev_checks import DevCheckError, DevChecks
from slm_lab.experiment.observers.rows import Evaluator, Recorder, Table
from slm_lab.experiment.observers.writers import CSVWriter, Reporter, TensorBoard, complete_rows

__all__ = [
    "COLUMNS",
    "GLOBAL_COLUMNS",
    "SAMPLER_COLUMNS",
    "CSVWriter",
    "Checkpointer",
    "DevCheckError",
    "DevChecks",
    "Evaluator",
    "Hook",
    "Observer",
    "Recorder",
    "Reporter",
    "Row",
    "Table",
    "TensorBoard",
    "complete_rows",
    "hooks",
]
