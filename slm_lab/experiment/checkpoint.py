"""Checkpoints: one bundle of everything stateful, written so that a reader finds the old one or the new one, never a part."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
"""Of the bundle's layout."""


def save(path: Path, bundle: dict[str, Any]) -> None:
    """Write `bundle` (tensors and plain Python) to `path` atomically. Raises OSError; `path` is then as it was.

    The temporary file lies in the same folder, under a hidden name that matches no pattern of a checkpoint. A process
    killed while writing leaves it behind; the next save takes it over.
    """
    import torch

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(bundle, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # a full disk, which torch.save reports as "unexpected pos"
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> dict[str, Any]:
    """Read a bundle onto the CPU. Raises OSError, or RuntimeError or pickle.UnpicklingError for a file that is none."""
    import torch

    bundle = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(bundle, dict)
    return bundle


def rng_state(device: str) -> dict[str, Any]:
    """States of the process-wide generators of python, numpy, torch and, on cuda, the device."""
    import torch

    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest], "torch": torch.get_rng_state()}
    if device.startswith("cuda"):
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: str) -> None:
    """Take up the states of `rng_state`."""
    import torch

    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.startswith("cuda"):
        torch.cuda.set_rng_state(state["cuda"], device)
