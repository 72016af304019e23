"""Returns and advantages over rollouts [T, N].

Most functions of this module compute the backward recursion y_t = x_t + c_t · y_{t+1}. In all functions, `terminated_TN` prevents
bootstrapping, and `done_TN` (terminated or truncated) ends the episode. `next_value_TN` is the value V of the true next observation (not of
the first observation after a reset), so that truncated episodes are bootstrapped correctly. All functions accept tensors or numpy arrays.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import A, as_tensor, as_type_of, copy, full_like, ignore_float_errors, where
from slm_lab.agent.ops.device import is_asynchronous

MEAN_ROUNDING = 1e-6
"""Tolerance for the rounding error of a float32 mean, relative to the mean. A smaller standard deviation counts as 0."""


def _check_shapes(*rows: A) -> None:
    shape = rows[0].shape
    if len(shape) != 2 or any(x.shape != shape for x in rows):
        raise ValueError(f"expected the same shape [T, N], got {[tuple(x.shape) for x in rows]}")


def discounted_scan(x_TN: A, decay_TN: A) -> A:
    """Return y [T, N] with y_t = x_t + decay_t · y_{t+1} and y_T = 0.

    The recursion is computed in ⌈log2 T⌉ operations on the full array (Hillis & Steele 1986).

    Args: x_TN, decay_TN: float [T, N]. Raises ValueError if the shapes differ or are not [T, N].
    """
    _check_shapes(x_TN, decay_TN)
    result_TN = copy(x_TN)
    with ignore_float_errors():
        _scan(*_as_numpy_on_cpu(result_TN, copy(decay_TN)))
    return result_TN


def _scan(y_TN: Any, c_TN: Any) -> None:
    """Compute `discounted_scan` of y_TN with the decays c_TN, in place. The result overwrites y_TN, and c_TN is modified."""
    shift = 1
    while shift < len(y_TN):
        # after each iteration y_t covers 2·shift terms and c_t is the product of 2·shift decays
        head_TN, decay_TN = y_TN[:-shift], c_TN[:-shift]
        head_TN += decay_TN * y_TN[shift:]
        c_TN[:-shift] = decay_TN * c_TN[shift:]
        shift *= 2


def _as_numpy_on_cpu(*rows: Tensor | np.ndarray) -> list[Any]:
    """Return tensors on the CPU as numpy views, and other tensors and arrays unchanged.

    A numpy call has less overhead than a torch call: for a rollout of 32 steps × 4 envs, `gae` takes a third of torch's time.
    """
    return [x if isinstance(x, np.ndarray) or is_asynchronous(x) else x.numpy() for x in rows]


def discounted_returns(reward_TN: A, next_value_TN: A, terminated_TN: A, done_TN: A, gamma: float) -> A:
    """Return discounted returns until the end of each episode. Truncated episodes and the end of the rollout are bootstrapped.

    The return is R_t = r_t + γ R_{t+1}, where R_{t+1} is replaced by V(s_{t+1}) at a truncation and in the last step of the rollout, and by
    0 at a termination (arXiv:1602.01783, Algorithm S3).

    Args: arrays [T, N], of which `terminated_TN` and `done_TN` are bool and the others are float32. Returns float32 [T, N].
    """
    _check_shapes(reward_TN, next_value_TN, terminated_TN, done_TN)
    cut_TN, decay_TN = copy(done_TN), full_like(reward_TN, gamma)
    cut_TN[-1] = True
    decay_TN[cut_TN] = 0.0
    bootstrap_TN = where(cut_TN & ~terminated_TN, next_value_TN, 0.0)
    return discounted_scan(reward_TN + gamma * bootstrap_TN, decay_TN)


def nstep_returns(reward_TN: A, next_value_TN: A, terminated_TN: A, done_TN: A, gamma: float, n: int) -> A:
    """Return n-step returns Σ_{k<n} γ^k r_{t+k} + γ^n V(s_{t+n}).

    A return contains fewer than n steps if the episode or the rollout ends earlier (arXiv:1602.01783, section 4).

    Args: arrays [T, N], of which `terminated_TN` and `done_TN` are bool and the others are float32. The number of steps `n` must be at
    least 1. Returns float32 [T, N].
    """
    _check_shapes(reward_TN, next_value_TN, terminated_TN, done_TN)
    if n >= len(reward_TN):
        return discounted_returns(reward_TN, next_value_TN, terminated_TN, done_TN, gamma)
    one_step_TN = reward_TN + gamma * where(terminated_TN, 0.0, next_value_TN)
    return_TN = one_step_TN
    for _ in range(n - 1):
        longer_TN = copy(one_step_TN)
        longer_TN[:-1] = where(done_TN[:-1], one_step_TN[:-1], reward_TN[:-1] + gamma * return_TN[1:])
        return_TN = longer_TN
    return return_TN


def gae(reward_TN: A, value_TN: A, next_value_TN: A, terminated_TN: A, done_TN: A, gamma: float, lam: float) -> A:
    """Return generalised advantage estimates [T, N] (arXiv:1506.02438, equation 16).

    Args: arrays [T, N], of which `terminated_TN` and `done_TN` are bool and the others are float32. `next_value_TN` is V of the true next
    observation.
    """
    _check_shapes(reward_TN, value_TN, next_value_TN, terminated_TN, done_TN)
    advantage_TN, decay_TN = gamma * next_value_TN, full_like(reward_TN, gamma * lam)
    delta_TN, decays_TN, reward, value, terminated, done = _as_numpy_on_cpu(
        advantage_TN, decay_TN, reward_TN, value_TN, terminated_TN, done_TN
    )
    delta_TN[terminated] = 0.0  # the term γ V(s')
    decays_TN[done] = 0.0
    with ignore_float_errors():
        delta_TN += reward
        delta_TN -= value
        _scan(delta_TN, decays_TN)
    return advantage_TN


def q_lambda_returns(reward_TN: A, next_value_TN: A, terminated_TN: A, done_TN: A, gamma: float, lam: float) -> A:
    """Return the λ-returns of Q-learning (Peng & Williams 1994, and arXiv:2407.04811, section 4),

        R_t = r_t + γ [(1 − λ) max_a Q(s_{t+1}, a) + λ R_{t+1}],

    where R_{t+1} is replaced by max_a Q(s_{t+1}, a) at a truncation and in the last step of the rollout. At a termination, R_t = r_t.

    Args: arrays [T, N], of which `terminated_TN` and `done_TN` are bool and the others are float32. `next_value_TN` is max_a Q of the true
    next observation. Returns float32 [T, N].
    """
    _check_shapes(reward_TN, next_value_TN, terminated_TN, done_TN)
    cut_TN, decay_TN = copy(done_TN), full_like(reward_TN, gamma * lam)
    cut_TN[-1] = True
    decay_TN[cut_TN] = 0.0
    weight_TN = where(cut_TN, gamma, gamma * (1.0 - lam))
    return discounted_scan(reward_TN + where(terminated_TN, 0.0, weight_TN * next_value_TN), decay_TN)


class VTrace(NamedTuple, Generic[A]):
    """V-trace targets, advantages and clipped ratios, float32 [T, N] each."""

    target_TN: A
    """Target of the critic, v_s in arXiv:1802.01561: an estimate of the current policy's state value."""
    advantage_TN: A
    """Advantage Â, not multiplied by the clipped ratio ρ. The policy gradient is the gradient of ρ Â log π, or of (π/μ) Â if a surrogate
    loss contains the ratio."""
    rho_TN: A
    """Ratio ρ = min(ρ̄, π/μ)."""


def vtrace(
    log_ratio_TN: A,
    reward_TN: A,
    value_TN: A,
    next_value_TN: A,
    terminated_TN: A,
    done_TN: A,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> VTrace[A]:
    """Return V-trace targets and advantages of the policy π from transitions collected by an older policy μ (arXiv:1802.01561).

    With ρ_t = min(ρ̄, π/μ) and c_t = λ min(c̄, π/μ),

        δ_t = r_t + γ V(s_{t+1}) − V(s_t)
        vs_t = V(s_t) + ρ_t δ_t + γ c_t (vs_{t+1} − V(s_{t+1}))        equation 1, with the recursion of remark 1 and λ of remark 2
        Â_t = r_t + γ [(1 − λ) V(s_{t+1}) + λ vs_{t+1}] − V(s_t)       section 4.2, which has λ = 1

    where vs_{t+1} is replaced by V(s_{t+1}) at the end of an episode or of the rollout, and both vs_{t+1} and V(s_{t+1}) are 0 at a
    termination. If π = μ and ρ̄, c̄ ≥ 1, then Â equals the result of `gae`. If π = μ, ρ̄, c̄ ≥ 1 and λ = 1, then vs equals the result of
    `discounted_returns`.

    Args: arrays [T, N], of which `terminated_TN` and `done_TN` are bool and the others are float32. `log_ratio_TN` is log π(a|s) − log
    μ(a|s), `next_value_TN` is V of the true next observation, and `rho_bar` and `c_bar` are ρ̄ and c̄. A log ratio of +inf is clipped like
    any large ratio. NaN in an argument makes the results of earlier steps NaN too.
    """
    _check_shapes(log_ratio_TN, reward_TN, value_TN, next_value_TN, terminated_TN, done_TN)
    ratio, reward, value, next_value = as_tensor(log_ratio_TN).exp(), as_tensor(reward_TN), as_tensor(value_TN), as_tensor(next_value_TN)
    decay, rho = gamma * lam * (~as_tensor(done_TN)).to(reward.dtype), ratio.clamp(max=rho_bar)
    delta = reward + gamma * torch.where(as_tensor(terminated_TN), 0.0, next_value) - value
    correction = discounted_scan(rho * delta, decay * ratio.clamp(max=c_bar))  # vs − V
    advantage = delta.clone()
    advantage[:-1] += decay[:-1] * correction[1:]
    return VTrace(*(as_type_of(reward_TN, x) for x in (value + correction, advantage, rho)))


def standardize(x_B: A) -> A:
    """Return x, of any shape, scaled to zero mean and unit standard deviation. If all values are equal, the result is 0.

    A single value is returned unchanged, because an advantage of 0 (the value minus its mean) would have no effect on learning.
    """
    tensor_B = as_tensor(x_B)
    if tensor_B.numel() < 2:
        return x_B
    mean, std = tensor_B.mean(), tensor_B.std()
    scale = std + 1e-8
    # the mean of equal values can have a rounding error, which must not be scaled to 1
    if is_asynchronous(tensor_B):
        scale = torch.where(std > MEAN_ROUNDING * mean.abs(), scale, torch.inf)
    elif float(std) <= MEAN_ROUNDING * abs(float(mean)):
        return full_like(x_B, 0.0)
    return (x_B - as_type_of(x_B, mean)) / as_type_of(x_B, scale)
