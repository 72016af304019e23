"""Reference for the env tests: single Gymnasium envs stepped by hand, and the transitions of a vector env in the same format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from slm_lab.env import Env
from slm_lab.lib.records import Episode, VecStep


class Transition(NamedTuple):
    """Transition of one env, with all values that a memory may store."""

    obs: np.ndarray
    reward: float
    terminated: bool
    truncated: bool
    next_obs: np.ndarray
    first: bool
    """Whether obs is the first observation of an episode."""


class Played(NamedTuple):
    transitions: list[list[Transition]]
    """One list per env."""
    episodes: list[list[tuple[float, int]]]
    """One list per env, of (return, length)."""
    steps: list[VecStep]


def play(env: Env, actions: Iterable[np.ndarray]) -> Played:
    """Step a vector env; return its transitions without the dummy rows, its episodes and its steps."""
    obs_N, count = env.reset(), env.info.num_envs
    first_N = np.ones(count, bool)
    transitions: list[list[Transition]] = [[] for _ in range(count)]
    episodes: list[list[Episode]] = [[] for _ in range(count)]
    steps = []
    for action_N in actions:
        step = env.step(action_N)
        for i in np.flatnonzero(step.valid_N):
            row = (
                obs_N[i],
                float(step.reward_N[i]),
                bool(step.terminated_N[i]),
                bool(step.truncated_N[i]),
                step.last_obs_N[i],
                bool(first_N[i]),
            )
            transitions[i].append(Transition(*row))
        for episode in step.episodes:
            episodes[episode.env].append(episode)
        steps.append(step)
        obs_N, first_N = step.obs_N, step.first_N
    return Played(transitions, [[(e.total_reward, e.length) for e in rows] for rows in episodes], steps)


def play_single(env: gym.Env[Any, Any], seed: int, actions: Iterable[Any]) -> tuple[list[Transition], list[tuple[float, int]]]:
    """Step a single env with the given actions; return its transitions and its episodes as (return, length)."""
    obs = np.array(env.reset(seed=seed)[0], np.float32)
    transitions, episodes = [], []
    first, total, length = True, 0.0, 0
    for action in actions:
        raw, reward, terminated, truncated, _ = env.step(action)
        next_obs = np.array(raw, np.float32)
        total, length = total + float(reward), length + 1
        transitions.append(Transition(obs, float(reward), terminated, truncated and not terminated, next_obs, first))
        first = terminated or truncated
        if first:
            episodes.append((total, length))
            total, length = 0.0, 0
            next_obs = np.array(env.reset()[0], np.float32)
        obs = next_obs
    return transitions, episodes


def assert_same(ours: list[Transition], theirs: list[Transition]) -> None:
    """Assert that two lists of transitions are equal up to the length of the shorter one."""
    assert min(len(ours), len(theirs)) > 0
    for a, b in zip(ours, theirs, strict=False):
        np.testing.assert_array_equal(a.obs, b.obs)
        np.testing.assert_array_equal(a.next_obs, b.next_obs)
        assert a.reward == np.float32(b.reward)
        assert (a.terminated, a.truncated, a.first) == (b.terminated, b.truncated, b.first)
