"""Checkpoints: one bundle of everything stateful, written atomically: a reader finds the old one or the new one, never a part."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import numpy as np

from slm_lab.experiment.storage import Location, StoredPath

VERSION = 3
"""Version of the bundle's layout: that of runs that can be continued."""
READABLE = (1, 2, 3)
"""Versions whose weights and normaliser statistics can be used."""


class BundleError(Exception):
    """A checkpoint cannot be used; the message names the file and says why."""


def save(path: Location, bundle: dict[str, Any]) -> None:
    """Write `bundle` (tensors and plain Python) to `path` atomically. Raises OSError; `path` is then as it was.

    The temporary file lies in the same folder, under a hidden name that matches no pattern of a checkpoint. A process
    killed while writing leaves it behind; the next save overwrites it.
    """
    if isinstance(path, StoredPath):
        path.replace(lambda file: _write(bundle, file))
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            _write(bundle, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems refuse to sync a folder; the file itself is on disk
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write(bundle: dict[str, Any], file: IO[bytes]) -> None:
    try:
        _torch().save(bundle, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None  # a full disk, which torch.save reports as "unexpected pos"
        raise


def load(path: Location, *, mapped: bool = False) -> dict[str, Any]:
    """Read a bundle onto the CPU. Raises BundleError if the file is missing, damaged, or of another program or version.

    With `mapped`, tensors are read from the file when they are used: it must not be overwritten until then (`save` replaces it). No effect
    on a StoredPath.
    """
    import torch

    try:
        if isinstance(path, StoredPath):
            with path.reading() as file:
                bundle = torch.load(file, map_location="cpu", weights_only=True)
        else:
            bundle = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        raise BundleError(f"{path} is damaged or not a checkpoint: {type(error).__name__}") from None
    if not isinstance(bundle, dict) or "version" not in bundle:
        raise BundleError(f"{path} is not an slm_lab checkpoint")
    if bundle["version"] not in READABLE:
        known = ", ".join(map(str, READABLE))
        raise BundleError(f"{path} has version {bundle['version']} of the checkpoint format; this slm_lab reads versions {known}")
    return bundle


def rng_state(device: str) -> dict[str, Any]:
    """Return the states of the process-wide generators of python, numpy, torch and, on cuda, the device."""
    import torch

    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest], "torch": torch.get_rng_state()}
    if device.startswith("cuda"):
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: str) -> None:
    """Restore the states of `rng_state`."""
    import torch

    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.startswith("cuda"):
        torch.cuda.set_rng_state(state["cuda"], device)


def to_tensors(tree: Any) -> Any:
    """Return nested dicts, lists and tuples with each array as a tensor, as a bundle can hold it."""
    return _mapped(tree, np.ndarray, lambda array: _torch().from_numpy(array))


def to_arrays(tree: Any) -> Any:
    """Return nested dicts, lists and tuples with each tensor as an array, which processes send as bytes (a tensor takes a descriptor)."""
    return _mapped(tree, _torch().Tensor, lambda tensor: tensor.numpy().copy())


def _mapped(tree: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    match tree:
        case dict():
            return {key: _mapped(value, kind, convert) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(_mapped(value, kind, convert) for value in tree)
    return convert(tree) if isinstance(tree, kind) else tree


def _torch() -> Any:
    import torch

    return torch
