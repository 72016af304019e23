"""Find the entries in which the contents of two checkpoints differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_RECORDS = ("version", "wall_t", "resumes", "tables", "done", "lost", "spec")
"""Keys of a checkpoint that are not compared, since they contain times, the number of continuations and descriptions, and no results."""
_OBSERVERS = "observers/user/"


class PartDifference(NamedTuple):
    """An entry of nested dicts, such as a tensor or a number, in which two checkpoints differ."""

    name: str
    """Path of the entry in the checkpoint, such as "policies/0/weights/layers.0.weight"."""
    largest: float | None
    """The largest absolute difference between two numbers of the entry, or None if shape or type differ, or if a number is not finite."""


def differing_parts(one: Any, other: Any) -> list[PartDifference]:
    """Return the entries of two checkpoints that differ in at least one bit, weights first. Entries with keys in _RECORDS are not compared.

    The states of the user's observers are compared only if both checkpoints contain these states.
    """
    found = list(_find_differing_parts(one, other, ""))
    return sorted(found, key=lambda part: "weights/" not in part.name)


def count_arrays(tree: Any) -> int:
    """Return the number of tensors and arrays in nested dicts and lists, without the entries in _RECORDS."""
    if isinstance(tree, Mapping):
        return sum(count_arrays(value) for key, value in tree.items() if key not in _RECORDS)
    return sum(map(count_arrays, tree)) if isinstance(tree, list | tuple) else int(hasattr(tree, "shape"))


def _find_differing_parts(one: Any, other: Any, path: str) -> Iterator[PartDifference]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            name = f"{path}{key}"
            if key in _RECORDS or "_busy" in str(key) or ((key in one) + (key in other) == 1 and _OBSERVERS in f"{name}/"):
                continue
            yield from _find_differing_parts(one.get(key), other.get(key), f"{name}/")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _find_differing_parts(*pair, f"{path}{index}/")
    elif not _same(one, other):
        yield PartDifference(path.rstrip("/"), _largest_difference(one, other))


def _same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and bool(_tensor_bytes(one).equal(_tensor_bytes(other)))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _tensor_bytes(tensor: Any) -> Any:
    """Return a view of a tensor's bytes as a contiguous 1-D tensor."""
    import torch

    flat = tensor.contiguous()  # even then, the stride of an axis of length 1 may be 0
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _largest_difference(one: Any, other: Any) -> float | None:
    """Return the largest absolute difference between two tensors or two numbers, or None if the difference is undefined."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        value = float((one.double() - other.double()).abs().max())
    elif isinstance(one, int | float) and isinstance(other, int | float):
        value = abs(float(one) - float(other))
    else:
        return None
    return value if math.isfinite(value) else None
