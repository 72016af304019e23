"""A forward pass and the backward pass that follows it.

An algorithm learns in three lines: a pass gives outputs without a graph, an objective gives a loss and its gradient with respect to the
outputs, and the pass takes the gradient back to the weights:

    outputs = ...                                # a Pass
    loss, *grads = objective(*outputs.values, ...)
    outputs.backward(*grads)

GraphPass does so through autograd. Passes without a graph are in net/passes.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import tensor


class Pass(Protocol):
    """Outputs of one forward pass of one net or several."""

    values: tuple[Any, ...]
    """The outputs, tensors or arrays [B, …]. They carry no graph."""

    def backward(self, *grads: Any) -> None:
        """Add the gradients of the weights, given those of the outputs, which may be modified. Call at most once."""


class RowPass(Pass, Protocol):
    """A Pass of which some rows can be selected."""

    def select(self, rows: Any, /) -> RowPass:
        """Return the pass with the outputs of some rows, a slice or int64 [K]. The gradient of the other rows is 0."""


class GraphPass:
    """Outputs of an autograd graph."""

    def __init__(self, *outputs: Tensor) -> None:
        self.graph = outputs
        self.values: tuple[Any, ...] = tuple(out.detach() for out in outputs)

    def select(self, rows: Any) -> GraphPass:
        return GraphPass(*(out[rows] if isinstance(rows, slice) else out.index_select(0, rows) for out in self.graph))

    def backward(self, *grads: Any) -> None:
        out = with_gradients(self.graph, [tensor(grad) for grad in grads])
        if out.requires_grad:  # else all parameters are frozen
            out.backward()


def with_gradients(outputs: tuple[Tensor, ...], grads: list[Tensor]) -> Tensor:
    """Return a scalar 0 whose gradients with respect to the outputs are `grads`. (Given to `backward`, they make torch import sympy.)"""
    out: Tensor = _KnownGradients.apply(grads, *outputs)
    return out


class _KnownGradients(torch.autograd.Function):
    """A scalar whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.grads)


def leaves(values: tuple[Any, ...]) -> list[Tensor]:
    """Return the values of a pass as tensors from which an objective can be differentiated."""
    return [tensor(value).detach().requires_grad_() for value in values]


def gradients(loss: Tensor, of: list[Tensor], weight: float = 1.0) -> list[Tensor]:
    """Return `weight` times the gradients of a loss [] with respect to `leaves`, through autograd.

    The gradients of parameters that the loss depends on besides are added to them.
    """
    if loss.requires_grad:
        (loss if weight == 1.0 else weight * loss).backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in of]
