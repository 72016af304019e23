"""Uniformly random actions, with which agents explore before they learn."""

from __future__ import annotations

import math

import numpy as np

from slm_lab.lib.masks import draw_valid_actions, uniform_logp
from slm_lab.lib.records import ActionSpace


def draw_uniform_actions(
    action: ActionSpace, count: int, rng: np.random.Generator, valid_NA: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` uniformly random actions in the form of ActionSpace.

    If any continuous component is unbounded, all continuous components are drawn from a standard normal distribution.

    Args: valid_NA: bool [N, A], whether each choice of the discrete components is valid, or None if all choices are valid.

    Returns: the actions [N] or [N, dim], and the log-probabilities of the actions, float32 [N].
    """
    if action.kind == "hybrid":
        drawn = [draw_uniform_actions(part, count, rng, valid_NA if part.nvec else None) for part in action.parts]
        return np.concatenate([one for one, _ in drawn], axis=1, dtype=np.float32), np.sum([logp_N for _, logp_N in drawn], axis=0)
    if valid_NA is not None:
        action_ND = draw_valid_actions(valid_NA, action.nvec, rng)
        return action_ND[:, 0] if action.kind == "discrete" else action_ND, uniform_logp(valid_NA, action.nvec)
    if action.kind == "continuous":
        shape = (count, action.dim)
        if action.bounded:
            return rng.uniform(-1.0, 1.0, shape).astype(np.float32), np.full(count, -action.dim * np.log(2.0), np.float32)
        noise_ND = rng.standard_normal(shape, dtype=np.float32)
        return noise_ND, (-0.5 * (noise_ND**2 + np.log(2.0 * np.pi))).sum(axis=1).astype(np.float32)
    nvec = np.array(action.nvec or (2,) * action.dim)
    logp_N = np.full(count, -math.log(float(nvec.prod(dtype=np.float64))), np.float32)
    if action.kind == "discrete":
        return rng.integers(nvec[0], size=count), logp_N
    return rng.integers(nvec, size=(count, len(nvec))), logp_N
