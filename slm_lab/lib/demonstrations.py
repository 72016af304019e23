"""Recorded episodes for offline learning.

The command `slm-lab enjoy --record` writes recorded episodes to a file, which the spec key `meta.demonstrations` names.

Recorded observations and actions have the form in which agents store observations and actions (see ObservationSpace and ActionSpace).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from slm_lab.lib.records import ActionSpace, ActOut, VecStep


@dataclass(frozen=True)
class Demonstrations:
    """Recorded transitions for offline learning: K transitions of E complete episodes, one episode after another."""

    obs_K: np.ndarray
    """[K, *shape]: observations in the form of ObservationSpace, before normalisation."""
    action_K: np.ndarray
    """[K] or [K, dim]: actions in the form of ActionSpace. If all continuous components have bounds, they are in [-1, 1]."""
    reward_K: np.ndarray
    """float32 [K]: raw rewards in a recorded file, or scaled and clipped rewards for training in the result of `load_demonstrations`."""
    terminated_K: np.ndarray
    """bool [K]: whether the transition terminated the episode."""
    truncated_K: np.ndarray
    """bool [K]: whether the episode was truncated after the transition. The last transition of each episode, and no other transition, is
    terminated or truncated."""
    last_obs_E: np.ndarray
    """[E, *shape]: the observation after the last action of each episode."""

    def __len__(self) -> int:
        return len(self.reward_K)

    @cached_property
    def end_E(self) -> np.ndarray:
        """int64 [E]: index of the last transition of each episode."""
        return np.flatnonzero(self.terminated_K | self.truncated_K)

    @property
    def first_K(self) -> np.ndarray:
        """bool [K]: whether each transition is the first transition of an episode."""
        return np.concatenate([[True], (self.terminated_K | self.truncated_K)[:-1]])

    @property
    def return_E(self) -> np.ndarray:
        """float64 [E]: sum of the rewards of each episode."""
        sums = np.cumsum(self.reward_K, dtype=np.float64)[self.end_E]
        return np.diff(sums, prepend=0.0)

    def steps(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, None, ActOut, VecStep]:
        """Return the transitions [begin, end) as arguments of `Algorithm.observe`, as if (end − begin) envs had taken one step."""
        rows = slice(begin, end)
        # last_obs_E[-1] is used only if `end` is the number of all transitions
        next_obs = np.concatenate([self.obs_K[begin + 1 : end + 1], self.last_obs_E[-1:]])[: end - begin]
        ended_E = self.end_E[(self.end_E >= begin) & (self.end_E < end)]
        next_obs[ended_E - begin] = self.last_obs_E[np.searchsorted(self.end_E, ended_E)]
        unknown_K = np.full(end - begin, np.nan, np.float32)
        valid_K = np.ones(end - begin, np.bool_)
        next_first_K = self.terminated_K[rows] | self.truncated_K[rows]
        step = VecStep(self.reward_K[rows], self.terminated_K[rows], self.truncated_K[rows], next_obs, next_obs, next_first_K, valid_K, [])
        return self.obs_K[rows], self.first_K[rows], None, ActOut(self.action_K[rows], unknown_K), step


class RecordedStep(NamedTuple):
    """A recorded transition of one env."""

    obs: np.ndarray
    action: np.ndarray
    reward: float
    terminated: bool
    truncated: bool
    next_obs: np.ndarray


def join_episodes(episodes: Iterable[list[RecordedStep]]) -> Demonstrations:
    """Return the Demonstrations that consist of the episodes `episodes`.

    An episode counts as truncated if the episode's last step is not terminated.
    """
    done = list(episodes)
    rows = [row for episode in done for row in episode]
    terminated_K = np.array([row.terminated for row in rows])
    truncated_K = np.zeros(len(rows), np.bool_)
    truncated_K[np.cumsum([len(episode) for episode in done]) - 1] = True
    return Demonstrations(
        np.stack([row.obs for row in rows]),
        np.stack([row.action for row in rows]),
        np.array([row.reward for row in rows], np.float32),
        terminated_K,
        truncated_K & ~terminated_K,
        np.stack([episode[-1].next_obs for episode in done]),
    )


class EpisodeRecorder:
    """Recorder of the steps of a vector env. The attribute `episodes` contains the episodes that have ended.

    If all continuous components of actions have bounds, these components are clipped to [-1, 1], as the env clips them.

    Args: num_envs: number of envs. action: action space of the env.
    """

    def __init__(self, num_envs: int, action: ActionSpace) -> None:
        continuous = action.parts[-1]
        self.clipped = continuous.dim if continuous.kind == "continuous" and continuous.bounded else 0
        """Number of components at the end of an action that are clipped."""
        self.episodes: list[list[RecordedStep]] = []
        self._open: list[list[RecordedStep]] = [[] for _ in range(num_envs)]

    def add(self, obs_N: np.ndarray, action_N: np.ndarray, step: VecStep, kept_N: np.ndarray) -> None:
        """Record a step of the vector env.

        Args: obs_N: observations before the step. action_N: actions that were passed to the env. kept_N: bool [N], whether to record the
        step of each env.
        """
        if self.clipped:
            action_N = action_N.astype(np.float32)
            action_N[:, -self.clipped :] = np.clip(action_N[:, -self.clipped :], -1.0, 1.0)
        for n in np.flatnonzero(step.valid_N & kept_N):
            flags = bool(step.terminated_N[n]), bool(step.truncated_N[n])
            row = RecordedStep(obs_N[n], action_N[n], float(step.reward_N[n]), *flags, step.last_obs_N[n])
            self._open[n].append(row)
            if any(flags):
                self.episodes.append(self._open[n])
                self._open[n] = []
