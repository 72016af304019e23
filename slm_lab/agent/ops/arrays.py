"""Functions that accept either tensors or numpy arrays, for formulas that are computed in torch or in numpy.

Small nets learn in numpy, because a numpy call has less overhead than a torch call. In an update on a batch of 32, torch's dispatch takes
longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

A = TypeVar("A", Tensor, np.ndarray, default=Tensor)
"""Type variable for Tensor or np.ndarray. A function with arguments of type A returns the type of its arguments."""


def as_tensor(x: Tensor | np.ndarray) -> Tensor:
    """Return x as a tensor. If x is an array, the tensor shares the memory of x."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def as_array(x: Tensor | np.ndarray) -> np.ndarray:
    """Return x as an array. If x is a tensor on the CPU, the array shares the memory of x."""
    return x if isinstance(x, np.ndarray) else (x if x.is_cpu else x.cpu()).numpy()


def as_type_of(example: A, x: Tensor | np.ndarray) -> A:
    """Return x as an array if `example` is an array, otherwise as a tensor."""
    return as_array(x) if isinstance(example, np.ndarray) else as_tensor(x)


def copy(x: A) -> A:
    """Return a copy of an array or tensor."""
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


def full_like(x: A, value: float) -> A:
    """Return an array or tensor of x's shape and dtype, filled with `value`."""
    return np.full_like(x, value) if isinstance(x, np.ndarray) else torch.full_like(x, value)


def where(condition: A, x: A | float, y: A | float) -> A:
    """Return the elements of x where `condition` is true, and the elements of y where `condition` is false."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, x, y)
    return torch.where(condition, x, y)


def exp(x: A) -> A:
    return np.exp(x) if isinstance(x, np.ndarray) else torch.exp(x)


def tanh(x: A) -> A:
    return np.tanh(x) if isinstance(x, np.ndarray) else torch.tanh(x)


def stack(xs: Sequence[A], axis: int) -> A:
    """Return a stack of arrays or tensors along a new axis."""
    if isinstance(xs[0], np.ndarray):
        return np.stack(xs, axis)
    return torch.stack(list(xs), axis)


def clip(x: A, low: Any, high: Any) -> A:
    """Return x clipped to [low, high]. The bounds are floats, or have the type of x."""
    if isinstance(x, np.ndarray):
        return np.minimum(np.maximum(x, low), high)  # np.clip takes three times as long
    return torch.clamp(x, low, high)


def flatten_time_and_envs(x_TN: A) -> A:
    """Return an array or tensor [T, N, …], reshaped to [T · N, …]."""
    return x_TN.reshape((-1, *x_TN.shape[2:]))


def ignore_float_errors() -> np.errstate:
    """Return a context in which numpy does not warn about overflows and invalid values.

    (The Trainer reports losses that are not finite.)
    """
    return np.errstate(all="ignore")


def where_true(x_B: A) -> A:
    """Return the indices of the elements of x [B] that are true, int64 [K]."""
    return np.flatnonzero(x_B) if isinstance(x_B, np.ndarray) else x_B.nonzero().squeeze(1)


@lru_cache(maxsize=256)
def filled_vector(value: float, size: int) -> np.ndarray:
    """Return a float32 vector [size] filled with `value`. The vector is cached and must not be modified."""
    return np.full(size, value, np.float32)
