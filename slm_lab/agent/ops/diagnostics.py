"""Training diagnostics, without gradients: Python floats, or scalar tensors where a float would require waiting for a CUDA device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import A, array
from slm_lab.agent.ops.device import is_asynchronous, read


def explained_variance(value_TN: A, return_TN: A, valid_TN: A) -> float:
    """Return 1 − Var[return − value] / Var[return] over the valid rows: 1 for a perfect critic, 0 for a constant prediction.

    The result is 0 if all returns are equal, and NaN if a return or value is not finite.
    """
    value, target, valid = array(value_TN).ravel(), array(return_TN).ravel(), array(valid_TN)
    if b"\0" in valid.tobytes():  # a sixth of the time of .all()
        value, target = value[valid.ravel()], target[valid.ravel()]
        if not len(target):
            return 0.0
    if not math.isfinite(target.dot(target)) or not math.isfinite(value.dot(value)):  # cheaper than np.errstate
        return math.nan
    error, count = target - value, len(target)
    error -= np.add.reduce(error) / count
    target = target - np.add.reduce(target) / count
    spread = float(target.dot(target))
    return 1.0 - float(error.dot(error)) / spread if spread else 0.0


def ratio_diagnostics(logps: Sequence[Tensor], old_logps: Sequence[Tensor], clip_eps: float) -> tuple[float, float]:
    """Return approx_kl and clip_fraction over the minibatches [B] of an update.

    approx_kl is the mean of (r − 1) − log r, an estimate of KL[π_old, π] with r = π/π_old (http://joschu.net/blog/kl-approx.html);
    clip_fraction is the share of transitions with |r − 1| > ε.
    """
    log_ratio_B = torch.cat(list(logps)) - torch.cat(list(old_logps))
    change_B = torch.expm1(log_ratio_B.clamp(-20.0, 20.0))  # as in clipped_surrogate_loss
    clipped_B = (change_B.abs() > clip_eps).float()
    approx_kl, clip_fraction = read([(change_B - log_ratio_B).mean(), clipped_B.mean()])
    return approx_kl, clip_fraction


def value_diagnostics(q: Tensor | np.ndarray, target: Tensor | np.ndarray) -> tuple[Tensor | float, Tensor | float]:
    """Return the mean absolute temporal-difference error and the mean value."""
    if isinstance(q, Tensor) and isinstance(target, Tensor) and is_asynchronous(q):
        return (target - q.detach()).abs().mean(), q.detach().mean()
    q_B, target_B = array(q.detach() if isinstance(q, Tensor) else q), array(target)  # numpy's calls cost less
    if q_B.ndim > 1:
        q_B, target_B = q_B.reshape(-1), target_B.reshape(-1)
    return float(np.add.reduce(np.abs(target_B - q_B))) / len(q_B), float(np.add.reduce(q_B)) / len(q_B)
