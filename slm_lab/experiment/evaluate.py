"""Let an agent play without learning: evaluation during training, and mode enjoy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from slm_lab.experiment.plan import Stop

if TYPE_CHECKING:
    from slm_lab.env.vec import Env

Act = Callable[[np.ndarray, np.ndarray], np.ndarray]


def play(env: Env, act: Act, stop: Stop) -> list[float]:
    """Raw returns of the first episode of each env, in their order; those finished so far if `stop` is requested.

    `act(obs_N, first_N) → action_N`. An env that has finished plays on, unseen, until the last one has.
    """
    obs_N, first_N = env.reset(), np.ones(env.info.num_envs, dtype=bool)
    returns: dict[int, float] = {}
    while len(returns) < env.info.num_envs and not stop.requested:
        step = env.step(act(obs_N, first_N))
        obs_N, first_N = step.obs_N, step.first_N
        for episode in step.episodes:
            returns.setdefault(episode.env, episode.total_reward)
    return [returns[index] for index in sorted(returns)]
