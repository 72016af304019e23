"""Activations of numpy arrays, in place, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

LARGE = 16384
"""Number of elements from which torch, whose calls cost more than numpy's, computes a ReLU or a derivative faster."""


class Activation(NamedTuple):
    """An activation of a float32 array, and its derivative as a function of the output."""

    forward: Callable[[np.ndarray, np.ndarray], object]
    """forward(x, x) changes x in place, as a ufunc of numpy does."""
    backward: Callable[[np.ndarray, np.ndarray], object] | None = None
    """backward(grad, out) multiplies a gradient, in place, by the derivative at an output; None: the output does not determine it."""


def _relu(x: np.ndarray, out: np.ndarray) -> None:
    if x.size < LARGE:
        np.maximum(x, 0.0, out=x)
    else:
        torch.relu_(torch.from_numpy(x))


def _relu_backward(grad: np.ndarray, out: np.ndarray) -> None:
    if grad.size < LARGE:
        np.multiply(grad, out > 0.0, out=grad)
    else:
        grad_out = torch.from_numpy(grad)
        _aten.threshold_backward.grad_input(grad_out, torch.from_numpy(out), 0.0, grad_input=grad_out)


def _tanh_backward(grad: np.ndarray, out: np.ndarray) -> None:
    if grad.size < LARGE:
        np.multiply(grad, 1.0 - out * out, out=grad)
    else:
        grad_out = torch.from_numpy(grad)
        _aten.tanh_backward.grad_input(grad_out, torch.from_numpy(out), grad_input=grad_out)


def _sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    np.divide(1.0, 1.0 + np.exp(np.minimum(-x, 80.0)), out=x)  # no overflow


def _sigmoid_backward(grad: np.ndarray, out: np.ndarray) -> None:
    np.multiply(grad, out * (1.0 - out), out=grad)


def _elu(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(x, np.expm1(np.minimum(x, 0.0)), where=x < 0)


def _selu(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(x, 1.6732632423543772 * np.expm1(np.minimum(x, 0.0)), where=x < 0)
    np.multiply(x, 1.0507009873554805, out=x)


def _silu(x: np.ndarray, out: np.ndarray) -> None:
    np.divide(x, 1.0 + np.exp(np.minimum(-x, 80.0)), out=x)


_aten: Any = torch.ops.aten
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Tanh: Activation(np.tanh, _tanh_backward),  # on the CPU, numpy takes a seventh of torch's time with AVX-512, half with AVX2
    nn.ReLU: Activation(_relu, _relu_backward),
    nn.Sigmoid: Activation(_sigmoid, _sigmoid_backward),
    nn.ELU: Activation(_elu),
    nn.SELU: Activation(_selu),
    nn.SiLU: Activation(_silu),
}
_PLAIN = {repr(kind()) for kind in ACTIVATIONS} | {repr(kind(inplace=True)) for kind in (nn.ReLU, nn.ELU, nn.SELU, nn.SiLU)}


def array_activation(module: nn.Module) -> Activation | None:
    """Return the activation of a module with default arguments, in numpy; None if there is none."""
    return ACTIVATIONS.get(type(module)) if repr(module) in _PLAIN else None
