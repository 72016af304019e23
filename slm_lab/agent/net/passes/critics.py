"""Passes of the critics of soft actor-critic without an autograd graph (see direct.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.net.passes.direct import DirectChain, DirectPass

APART = 2**22
"""Number of rows × weights of the largest layer from which critics are computed one after the other, not as a stack: the calls that a stack
saves no longer matter, and each critic then computes only the rows it has a gradient for."""


class CriticsPass(DirectPass):
    """A pass of C critics. The output is [C, B] of actions, [C, B, A] without any, as a tensor.

    Args: chains: of each critic, or one chain of a stack. x: [B, I], of a stack [C, B, I]. actions: number of columns of x, the last ones,
    that are actions.
    """

    def __init__(self, chains: Sequence[DirectChain], x: np.ndarray, actions: int) -> None:
        super().__init__(chains, x)
        self._is_stack, self._columns = x.ndim == 3, slice(x.shape[-1] - actions, x.shape[-1])
        out = self.values[0] if self._is_stack else np.stack(self.values)
        self.values = (torch.from_numpy(out[..., 0] if actions else out),)

    def backward(self, *grads: Tensor | np.ndarray | None) -> None:
        (grad,) = grads
        assert grad is not None
        super().backward(*((grad,) if self._is_stack else grad))

    def input_grad(self, grad_CB: Tensor) -> Tensor:
        """Return the gradient of the actions [B, D], given that of the output, in place of `backward`."""
        if self._is_stack:
            grad_CBD = self._chains[0].backward(self._values[0], grad_CB.numpy()[:, :, None], False, self._columns)
            assert grad_CBD is not None
            return torch.from_numpy(grad_CBD).sum(0)
        total_BD = np.zeros_like(self._values[0][0][:, self._columns])
        for chain, values, grad_B in zip(self._chains, self._values, grad_CB.numpy(), strict=True):
            row_K = np.flatnonzero(grad_B)  # with the minimum of two critics, each row has a gradient for one of them
            if not len(row_K):
                continue
            some = values if len(row_K) == len(grad_B) else [value.take(row_K, axis=0) for value in values]
            grad_KD = chain.backward(some, grad_B[row_K, None], False, self._columns)
            assert grad_KD is not None
            total_BD[row_K] += grad_KD
        return torch.from_numpy(total_BD)
