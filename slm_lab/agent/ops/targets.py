"""Targets of action values, over a batch [B] or any leading axes. None of them carries a gradient back."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def one_step_target(reward: Tensor, next_value: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """r + γ (1 − terminated) V(s'). Truncated steps are bootstrapped; terminated steps are not. All of one shape, terminated 0 or 1.

    Raises ValueError if shapes differ.
    """
    if not reward.shape == next_value.shape == terminated.shape:
        raise ValueError(f"expected tensors of the same shape, got {[tuple(t.shape) for t in (reward, next_value, terminated)]}")
    return torch.addcmul(reward, torch.rsub(terminated, 1.0), next_value, value=gamma)


def action_value(q_BA: Tensor, action_B: Tensor) -> Tensor:
    """Q(s, a) of the actions taken: [..., A] and int64 [...] → [...]."""
    return q_BA.gather(-1, action_B.unsqueeze(-1)).squeeze(-1)


def by_component(q_BA: Tensor, nvec: tuple[int, ...]) -> Tensor:
    """Return the values of D discrete actions at a time, side by side [..., Σ nvec], as [..., D, max nvec]; −∞ where there is no action.

    Then the functions below give one value for each of the D actions.
    """
    if len(set(nvec)) == 1:
        return q_BA.unflatten(-1, (len(nvec), nvec[0]))
    most = max(nvec)
    return torch.stack([F.pad(part, (0, most - part.shape[-1]), value=-math.inf) for part in q_BA.split(nvec, dim=-1)], dim=-2)


def max_value(q_BA: Tensor) -> Tensor:
    """max_a Q(s, a), the value of Q-learning (Mnih et al. 2015): [..., A] → [...]."""
    return q_BA.amax(-1)


def double_q_value(selector_q_BA: Tensor, evaluator_q_BA: Tensor) -> Tensor:
    """Q_evaluator(s, argmax_a Q_selector(s, a)), the value of double Q-learning (arXiv:1509.06461, eq. 4): [..., A] each → [...]."""
    return action_value(evaluator_q_BA, selector_q_BA.argmax(-1))
