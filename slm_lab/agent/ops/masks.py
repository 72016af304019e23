"""Action masks: the part of an observation that tells which actions are valid.

The net's outputs for invalid actions (logits, or action values) are replaced by MASKED. The probability of an invalid action and its
gradient are then exactly 0, and the action never has the greatest value. Formulas for logits or action values need no changes, since
π(a|s) log π(a|s) is 0 · MASKED = 0 (Huang & Ontañón 2020, arXiv:2006.14171).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slm_lab.agent.ops.arrays import A, as_kind_of, copy, where
from slm_lab.agent.ops.autograd import Pass
from slm_lab.lib.records import ObservationSpace

MASKED = -1e30
"""Output for an invalid action. It is finite, since 0 · ∞ is NaN, and stays finite and very small after division by a temperature."""


class ActionMask:
    """Columns [begin, end) of observations, one for each choice of each discrete component; a column is not 0 if the choice is valid."""

    def __init__(self, begin: int, end: int) -> None:
        self._columns = slice(begin, end)

    @staticmethod
    def of(obs: ObservationSpace) -> ActionMask | None:
        """Return the mask of an observation space; None if the space has no mask."""
        return None if obs.mask is None else ActionMask(*obs.mask)

    def valid(self, obs: A) -> A:
        """Return which choices of the discrete components are valid, bool [..., A]."""
        return obs[..., self._columns] != 0

    def __call__(self, outputs: A, obs: A) -> A:
        """Return outputs [..., P] in which the outputs of invalid discrete choices (among the first A outputs) are replaced by MASKED."""
        return masked(outputs, self.valid(obs))


def masked(outputs: A, valid: A) -> A:
    """Return outputs [..., P] in which each of the first A outputs is replaced by MASKED where `valid`, bool [..., A], is false."""
    choices, size = valid.shape[-1], outputs.shape[-1]
    if choices == size:
        return where(valid, outputs, MASKED)
    replaced, others = where(valid, outputs[..., :choices], MASKED), outputs[..., choices:]
    if isinstance(replaced, np.ndarray):
        return np.concatenate((replaced, others), axis=-1, dtype=outputs.dtype)
    return torch.cat((replaced, others), -1)


def valid_outputs(outputs_NA: np.ndarray) -> np.ndarray:
    """Return which actions are valid, bool [N, A], given masked outputs."""
    return outputs_NA > MASKED / 2


class MaskedPass:
    """A pass whose first output is masked. Implements `ops.autograd.Pass`."""

    def __init__(self, inner: Pass, valid_BA: Any) -> None:
        first, *others = inner.values
        self._inner, self._valid_BA = inner, as_kind_of(first, valid_BA)
        self.values: tuple[Any, ...] = (masked(first, self._valid_BA), *others)

    def select(self, rows: Any) -> MaskedPass:
        return MaskedPass(self._inner.select(rows), self._valid_BA[rows])

    def backward(self, *grads: Any) -> None:
        first, *others = grads
        self._inner.backward(None if first is None else self._kept(as_kind_of(self._valid_BA, first)), *others)

    def _kept(self, grad_BP: A) -> A:
        """Return the gradient, set to 0 for invalid choices."""
        choices = self._valid_BA.shape[1]
        if choices == grad_BP.shape[1]:
            return grad_BP * self._valid_BA
        kept = copy(grad_BP)
        kept[:, :choices] *= self._valid_BA
        return kept
