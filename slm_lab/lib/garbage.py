"""Garbage collection while modules are imported.

Most objects that an import makes stay. To search them for garbage again and again takes a tenth of the time of `import torch`.
"""

from __future__ import annotations

import gc

_OBJECTS = 200_000
"""New objects between two collections while they are postponed; `import torch` leaves some 250,000."""
_thresholds: tuple[int, int, int] | None = None


def postpone_collection() -> None:
    """Let many objects be made before they are searched for garbage, until `freeze_objects`."""
    global _thresholds
    if _thresholds is None and gc.isenabled():
        _thresholds = gc.get_threshold()
        gc.set_threshold(_OBJECTS, *_thresholds[1:])


def freeze_objects() -> None:
    """Exclude the objects that exist from later collections, which take 1.5 % of A2C's time otherwise, and end `postpone_collection`."""
    global _thresholds
    gc.freeze()
    if _thresholds is not None:
        gc.set_threshold(*_thresholds)
        _thresholds = None
