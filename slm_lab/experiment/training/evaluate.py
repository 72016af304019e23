"""Play episodes without learning: evaluation during training, and mode enjoy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from slm_lab.experiment.execute.heartbeat import EVALUATING
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat, no_beat
from slm_lab.lib.log import notice

if TYPE_CHECKING:
    from slm_lab.env.vec import Env

MAX_STEPS = 100_000
"""Maximum length of an episode: four times ALE's longest game."""
Act = Callable[[np.ndarray, np.ndarray], np.ndarray]


def play(env: Env, act: Act, stop: Stop, beat: Beat = no_beat, episodes: int | None = None) -> list[float]:
    """Return raw returns of `episodes` episodes (None: one per env) in the order of envs; [] if `stop` is requested before the end.

    `act(obs_N, first_N) → action_N`. The number of episodes per env is fixed before the first step: the episodes that end first are the
    shortest, and their mean would be biased. If one does not end within MAX_STEPS, it and all later episodes of its env are left out.
    """
    count = env.info.num_envs
    quota, rest = divmod(count if episodes is None else episodes, count)
    left_N = np.full(count, quota) + (np.arange(count) < rest)
    wanted = int(left_N.sum())
    returns: list[list[float]] = [[] for _ in range(count)]
    obs_N, first_N = env.reset(), np.ones(count, dtype=bool)
    steps, begin_N, deadline = 0, np.zeros(count, np.int64), MAX_STEPS
    while left_N.any():
        if stop.requested:
            return []
        if steps == deadline:
            left_N[steps - begin_N >= MAX_STEPS] = 0
            deadline = int(begin_N[left_N > 0].min(initial=steps)) + MAX_STEPS
            continue
        steps += 1
        beat(EVALUATING)
        step = env.step(act(obs_N, first_N))
        obs_N, first_N = step.obs_N, step.first_N
        for episode in step.episodes:
            begin_N[episode.env] = steps
            if left_N[episode.env]:
                left_N[episode.env] -= 1
                returns[episode.env].append(episode.total_reward)
    played = [value for of_env in returns for value in of_env]
    if len(played) < wanted:
        notice(f"evaluation: {wanted - len(played)} of {wanted} episodes did not end within {MAX_STEPS:,} steps; set env.max_t")
    return played
