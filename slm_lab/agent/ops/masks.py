"""Action masks: columns of observations that say which actions are valid.

The net's outputs for invalid actions (logits, or action values) are replaced by MASKED. Therefore the probability of an invalid action and
the gradient of this probability are exactly 0, and an invalid action never has the greatest value. Formulas for logits or action values
remain correct with masked outputs, because π(a|s) log π(a|s) is 0 · MASKED = 0 (Huang & Ontañón 2020, arXiv:2006.14171).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slm_lab.agent.ops.arrays import A, as_type_of, copy, where
from slm_lab.agent.ops.autograd import ForwardPass
from slm_lab.lib.records import ObservationSpace

MASKED = -1e30
"""Logit or value of an invalid action. MASKED is finite, because 0 · ∞ would be NaN. After division by a usual temperature, the result is
still finite and far below every other value."""


class ActionMask:
    """Action mask in the columns [begin, end) of observations.

    The mask has one column for each choice of each discrete action component. A choice is valid if the choice's column is not 0.
    """

    def __init__(self, begin: int, end: int) -> None:
        self._columns = slice(begin, end)

    @staticmethod
    def from_observation_space(obs: ObservationSpace) -> ActionMask | None:
        """Return the action mask of an observation space, or None if the space has no mask."""
        return None if obs.mask is None else ActionMask(*obs.mask)

    def valid_choices(self, obs: A) -> A:
        """Return whether each choice of each discrete component is valid, bool [..., A]."""
        return obs[..., self._columns] != 0

    def __call__(self, outputs: A, obs: A) -> A:
        """Return `outputs` [..., P] with the outputs for choices that are invalid in `obs` replaced by MASKED.

        The first A of the P outputs belong to the A discrete choices.
        """
        return mask_outputs(outputs, self.valid_choices(obs))


def mask_outputs(outputs: A, valid: A) -> A:
    """Return `outputs` [..., P] with each of the first A outputs replaced by MASKED where `valid`, bool [..., A], is false."""
    choices, size = valid.shape[-1], outputs.shape[-1]
    if choices == size:
        return where(valid, outputs, MASKED)
    replaced, others = where(valid, outputs[..., :choices], MASKED), outputs[..., choices:]
    if isinstance(replaced, np.ndarray):
        return np.concatenate((replaced, others), axis=-1, dtype=outputs.dtype)
    return torch.cat((replaced, others), -1)


def valid_actions(outputs_NA: np.ndarray) -> np.ndarray:
    """Return whether each action is valid, bool [N, A], given outputs [N, A], which are MASKED for invalid actions."""
    return outputs_NA > MASKED / 2


class MaskedPass:
    """Forward pass whose first output is masked, with the interface `ops.autograd.ForwardPass`.

    Args: inner: pass without the mask. valid_BA: whether each action is valid, bool [B, A].
    """

    def __init__(self, inner: ForwardPass, valid_BA: Any) -> None:
        first, *others = inner.values
        self._inner, self._valid_BA = inner, as_type_of(first, valid_BA)
        self.values: tuple[Any, ...] = (mask_outputs(first, self._valid_BA), *others)

    def select_rows(self, rows: Any) -> MaskedPass:
        return MaskedPass(self._inner.select_rows(rows), self._valid_BA[rows])

    def backward(self, *grads: Any) -> None:
        first, *others = grads
        self._inner.backward(None if first is None else self._mask_gradient(as_type_of(self._valid_BA, first)), *others)

    def _mask_gradient(self, grad_BP: A) -> A:
        """Return the gradient `grad_BP` with the columns of invalid choices set to 0."""
        choices = self._valid_BA.shape[1]
        if choices == grad_BP.shape[1]:
            return grad_BP * self._valid_BA
        masked_BP = copy(grad_BP)
        masked_BP[:, :choices] *= self._valid_BA
        return masked_BP
