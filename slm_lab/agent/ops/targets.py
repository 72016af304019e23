"""Targets for learning action values, for a batch [B] or for any leading axes. Targets have no autograd graph."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.ops.arrays import A, clip


def one_step_target(reward: A, next_value: A, terminated: A, gamma: float | A) -> A:
    """Return the one-step target r + γ (1 − terminated) V(s'). Truncated steps are bootstrapped; terminated steps are not.

    If `reward` and `gamma` are the results of `n_step_return`, this function returns the n-step target. Raises ValueError if the shapes of
    `reward`, `next_value` and `terminated` differ.

    Args: terminated: 1 for terminated steps, otherwise 0.
    """
    if not reward.shape == next_value.shape == terminated.shape:
        raise ValueError(f"expected tensors of the same shape, got {[tuple(t.shape) for t in (reward, next_value, terminated)]}")
    if isinstance(reward, np.ndarray):
        target = 1.0 - terminated
        target *= next_value
        target *= gamma
        target += reward
        return target
    if isinstance(gamma, Tensor):
        return reward + gamma * (1.0 - terminated) * next_value
    return torch.addcmul(reward, torch.rsub(terminated, 1.0), next_value, value=gamma)


def n_step_return(reward_KB: A, steps_B: A, gamma: float) -> tuple[A, A]:
    """Return the sum R = Σ_{j<k} γ^j r_{t+j} [B] and the factor γ^k [B] (Sutton 1988).

    The n-step target is R + γ^k (1 − terminated) V(s_{t+k}).

    Args: reward_KB: rewards, float32 [n, B], which must be 0 after the first k steps. steps_B: number k of steps, float32 [B], which is n,
    or less than n at the end of an episode.
    """
    weight_K = gamma ** np.arange(len(reward_KB), dtype=np.float64)
    if isinstance(reward_KB, np.ndarray):
        return weight_K.astype(np.float32) @ reward_KB, np.float32(gamma) ** steps_B
    return torch.from_numpy(weight_K).to(reward_KB) @ reward_KB, gamma**steps_B


def smoothed_action(action_BD: A, noise_BD: A, noise_clip: float) -> A:
    """Return actions plus noise [B, D] for target policy smoothing (arXiv:1802.09477, section 5.3).

    The noise is clipped to ±`noise_clip`, and the sum of action and noise to [-1, 1].
    """
    return clip(action_BD + clip(noise_BD, -noise_clip, noise_clip), -1.0, 1.0)


def truncated_mixture(quantile_CBM: Tensor, dropped: int) -> Tensor:
    """Return the smallest quantiles of the pooled quantiles of C critics, in ascending order [B, K] (arXiv:2005.04269, equation 10).

    Of the C × M pooled quantiles, the K = C (M − `dropped`) smallest are returned.
    """
    critics, rows, number = quantile_CBM.shape
    pooled_BK = quantile_CBM.transpose(0, 1).reshape(rows, critics * number)
    return pooled_BK.sort(dim=1).values[:, : critics * (number - dropped)]


def action_value(q_BA: A, action_B: A) -> A:
    """Return the values Q(s, a) of the actions taken.

    Args: q_BA: values of all actions [..., A]. action_B: indices of the actions taken, int64 [...]. numpy arrays must have the shapes [B,
    A] and [B]. Returns the values of the actions taken, [...].
    """
    if isinstance(q_BA, np.ndarray):
        return q_BA[np.arange(len(q_BA)), action_B]
    return q_BA.gather(-1, action_B.unsqueeze(-1)).squeeze(-1)


def action_value_gradient(q_BA: A, action_B: A, grad_B: A) -> A:
    """Return the gradient of a loss with respect to q_BA, given the loss's gradient with respect to the result of `action_value`."""
    if isinstance(q_BA, np.ndarray):
        grad_BA = np.zeros_like(q_BA)
        grad_BA[np.arange(len(q_BA)), action_B] = grad_B
        return grad_BA
    return torch.zeros_like(q_BA).scatter_(-1, action_B.unsqueeze(-1), grad_B.unsqueeze(-1))


def action_atoms(atoms_BAZ: Tensor, action_B: Tensor) -> Tensor:
    """Return the outputs [B, Z] of the actions taken, given outputs [B, A, Z] of a distributional net for all actions."""
    return atoms_BAZ[torch.arange(len(atoms_BAZ), device=atoms_BAZ.device), action_B]


def action_atoms_gradient(atoms_BAZ: Tensor, action_B: Tensor, grad_BZ: Tensor) -> Tensor:
    """Return the gradient of a loss with respect to atoms_BAZ, given the loss's gradient with respect to the result of `action_atoms`."""
    grad_BAZ = torch.zeros_like(atoms_BAZ)
    grad_BAZ[torch.arange(len(atoms_BAZ), device=atoms_BAZ.device), action_B] = grad_BZ
    return grad_BAZ


def split_by_component(q_BA: Tensor, nvec: tuple[int, ...]) -> Tensor:
    """Split the values of a multi-discrete action by its D components: [..., Σ nvec] → [..., D, max nvec]. Unused entries are −∞.

    For an argument of shape [..., D, max nvec], `max_value` and `double_q_value` return one value for each component.
    """
    if len(set(nvec)) == 1:
        return q_BA.unflatten(-1, (len(nvec), nvec[0]))
    longest = max(nvec)
    return torch.stack([F.pad(part, (0, longest - part.shape[-1]), value=-math.inf) for part in q_BA.split(nvec, dim=-1)], dim=-2)


def join_component_gradients(grad: Tensor, nvec: tuple[int, ...]) -> Tensor:
    """Convert a gradient with the shape of a result of `split_by_component` to the shape [..., Σ nvec] of the action values."""
    return torch.cat([part[..., :size] for part, size in zip(grad.unbind(-2), nvec, strict=True)], dim=-1)


def max_value(q_BA: A) -> A:
    """Return max_a Q(s, a) [...], the value of a state in Q-learning (Mnih et al., 2015), for action values [..., A]."""
    return np.maximum.reduce(q_BA, axis=-1) if isinstance(q_BA, np.ndarray) else q_BA.amax(-1)


def double_q_value(selector_q_BA: A, evaluator_q_BA: A) -> A:
    """Return Q_evaluator(s, argmax_a Q_selector(s, a)) [...], as in double Q-learning (arXiv:1509.06461, equation 4).

    Args: selector_q_BA, evaluator_q_BA: values of all actions [..., A].
    """
    return action_value(evaluator_q_BA, selector_q_BA.argmax(-1))
