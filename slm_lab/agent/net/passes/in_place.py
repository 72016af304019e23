"""Activations of numpy arrays, in place: small nets act and learn in numpy, whose calls cost less than torch's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

InPlace = Callable[[np.ndarray, np.ndarray], object]
"""activation(x, x), as a ufunc of numpy is called with its output: x is changed in place."""


def _elu(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(x, np.expm1(np.minimum(x, 0.0)), where=x < 0)


def _selu(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(x, 1.6732632423543772 * np.expm1(np.minimum(x, 0.0)), where=x < 0)
    np.multiply(x, 1.0507009873554805, out=x)


def _silu(x: np.ndarray, out: np.ndarray) -> None:
    np.divide(x, 1.0 + np.exp(np.minimum(-x, 80.0)), out=x)  # no overflow


def _relu(x: np.ndarray, out: np.ndarray) -> None:
    if x.size < 16384:
        np.maximum(x, 0.0, out=x)
    else:  # torch takes a third of numpy's time
        torch.relu_(torch.from_numpy(x))


def _sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    np.divide(1.0, 1.0 + np.exp(np.minimum(-x, 80.0)), out=x)


IN_PLACE: dict[type[nn.Module], InPlace] = {
    nn.Tanh: np.tanh,
    nn.ReLU: _relu,
    nn.ELU: _elu,
    nn.SELU: _selu,
    nn.SiLU: _silu,
    nn.Sigmoid: _sigmoid,
}
"""Activations with default arguments; a net with another one acts in torch."""
