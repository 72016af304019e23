"""Action masks in numpy. A mask is an array, bool [N, A], that is true for valid choices. The row of an env concatenates the masks of all
action components."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def draw_valid_actions(valid_NA: np.ndarray, nvec: Sequence[int] | np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw uniformly random valid actions, int64 [N, D]. An action has D components. Component i has nvec[i] choices."""
    key_NA = np.where(valid_NA, rng.random(valid_NA.shape), -1.0)
    action_ND: np.ndarray = np.stack([part.argmax(axis=1) for part in _components(key_NA, nvec)], axis=1)
    return action_ND


def uniform_logp(valid_NA: np.ndarray, nvec: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the log-probability of each action that `draw_valid_actions` draws, float32 [N].

    All valid actions of an env have the same probability.
    """
    counts_ND = np.stack([part.sum(axis=1) for part in _components(valid_NA, nvec)], axis=1)
    logp_N: np.ndarray = -np.log(np.maximum(counts_ND, 1)).sum(axis=1)
    return logp_N.astype(np.float32)


def has_valid_action(valid_NA: np.ndarray, nvec: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return whether each env has a valid action, bool [N]. A valid action requires at least one valid choice for every action
    component."""
    if len(nvec) == 1:
        return np.asarray(valid_NA.any(axis=1))
    found_N: np.ndarray = np.logical_and.reduce([part.any(axis=1) for part in _components(valid_NA, nvec)])
    return found_N


def _components(x_NA: np.ndarray, nvec: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    return [x_NA] if len(nvec) == 1 else np.split(x_NA, np.cumsum(nvec)[:-1], axis=1)
