"""Find the entries in which the contents of two checkpoints differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_RECORDS = ("version", "wall_t", "resumes", "restarts", "tables", "done", "lost", "spec")
"""Keys of a checkpoint that are not compared, since they contain times, numbers of continuations and restarts, and descriptions."""
_OBSERVERS = "observers/user/"


class PartDifference(NamedTuple):
    """An entry of nested dicts, such as a tensor or a number, in which two checkpoints differ."""

    name: str
    """Path of the entry in the checkpoint, such as "policies/0/weights/layers.0.weight"."""
    largest: float | None
    """The largest absolute difference between two numbers of the entry, or None if shape or type differ, or if a number is not finite."""


def differing_parts(a: Any, b: Any) -> list[PartDifference]:
    """Return the entries of two checkpoints that differ in at least one bit, weights first. Entries with keys in _RECORDS are not compared.

    The states of the user's observers are compared only if both checkpoints contain these states.
    """
    found = list(_find_differing_parts(a, b, ""))
    return sorted(found, key=lambda part: "weights/" not in part.name)


def count_arrays(tree: Any) -> int:
    """Return the number of tensors and arrays in nested dicts and lists, without the entries in _RECORDS."""
    if isinstance(tree, Mapping):
        return sum(count_arrays(value) for key, value in tree.items() if key not in _RECORDS)
    return sum(map(count_arrays, tree)) if isinstance(tree, list | tuple) else int(hasattr(tree, "shape"))


def _find_differing_parts(a: Any, b: Any, path: str) -> Iterator[PartDifference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            name = f"{path}{key}"
            if key in _RECORDS or "_busy" in str(key) or ((key in a) + (key in b) == 1 and _OBSERVERS in f"{name}/"):
                continue
            yield from _find_differing_parts(a.get(key), b.get(key), f"{name}/")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b, strict=True)):
            yield from _find_differing_parts(*pair, f"{path}{index}/")
    elif not _is_equal(a, b):
        yield PartDifference(path.rstrip("/"), _largest_difference(a, b))


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two entries have the same type and value. Tensors are compared bit by bit, and NaN equals NaN."""
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return alike and bool(_tensor_bytes(a).equal(_tensor_bytes(b)))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _tensor_bytes(tensor: Any) -> Any:
    """Return a view of a tensor's bytes as a contiguous 1-D tensor."""
    import torch

    flat = tensor.contiguous()  # even then, the stride of an axis of length 1 may be 0
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _largest_difference(a: Any, b: Any) -> float | None:
    """Return the largest absolute difference between two tensors or two numbers, or None if the difference is undefined."""
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
        value = float((a.double() - b.double()).abs().max())
    elif isinstance(a, int | float) and isinstance(b, int | float):
        value = abs(float(a) - float(b))
    else:
        return None
    return value if math.isfinite(value) else None
