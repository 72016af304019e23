"""Play episodes without learning: evaluation during training, and mode enjoy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from slm_lab.experiment.experience import Beat, no_beat
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.process.heartbeat import EVALUATING
from slm_lab.lib.log import notice

if TYPE_CHECKING:
    from slm_lab.env.vec import Env

MAX_STEPS = 100_000
"""Maximum length of an episode: four times ALE's longest game."""
Act = Callable[[np.ndarray, np.ndarray], np.ndarray]


def play(env: Env, act: Act, stop: Stop, beat: Beat = no_beat) -> list[float]:
    """Return the raw returns of the first episode of each env, in the order of envs; none if `stop` is requested before all have ended.

    `act(obs_N, first_N) → action_N`. Every env plays until all first episodes have ended: those that end first are the shortest, and
    their mean would be biased. An env whose episode does not end within MAX_STEPS is left out.
    """
    obs_N, first_N = env.reset(), np.ones(env.info.num_envs, dtype=bool)
    returns: dict[int, float] = {}
    steps = 0
    while len(returns) < (count := env.info.num_envs):
        if stop.requested:
            return []
        if steps == MAX_STEPS:
            notice(f"evaluation: {count - len(returns)} of {count} episodes did not end within {MAX_STEPS:,} steps; set env.max_t")
            break
        steps += 1
        beat(EVALUATING)
        step = env.step(act(obs_N, first_N))
        obs_N, first_N = step.obs_N, step.first_N
        for episode in step.episodes:
            returns.setdefault(episode.env, episode.total_reward)
    return [returns[index] for index in sorted(returns)]
