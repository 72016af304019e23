"""Tests of saved env states: the random streams of spaces, and states that do not fit the env."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from slm_lab.env.snapshot import NotSavable, env_state, load_env_state, seed_spaces


class Places(gym.Env[Any, Any]):
    """Has two equal spaces, a space that belongs to the class, and an inner env."""

    action_space = spaces.Discrete(10**6)

    def __init__(self, inner: gym.Env[Any, Any] | None = None) -> None:
        self.start, self.goal = (spaces.Box(0.0, 1.0, (2,), np.float64) for _ in range(2))
        self.observation_space = self.start
        self.moves = type(self).action_space
        self.inner = inner


def draws(env: Places) -> list[list[float]]:
    return [[float(value) for value in np.ravel(space.sample())] for space in (env.start, env.goal, env.action_space)]


def test_each_space_has_a_random_stream_of_its_own() -> None:
    first, again, other = (Places(Places()) for _ in range(3))
    for env, seed in ((first, 5), (again, 5), (other, 6)):
        seed_spaces(gym.wrappers.TimeLimit(env, 3), seed)
    start, goal, action = draws(first)
    assert start != goal
    assert start != np.random.default_rng(5).random(2).tolist()  # the stream of env.np_random
    assert draws(again) == [start, goal, action]
    assert all(one != two for one, two in zip(draws(other), (start, goal, action), strict=True))
    assert first.inner is not None
    assert again.inner is not None
    inner = draws(first.inner)
    assert inner == draws(again.inner)
    assert all(one != two for one, two in zip(inner, (start, goal, action), strict=True))


def test_a_space_of_the_class_is_saved_for_each_env() -> None:
    env, other = Places(), Places()
    for one in (env, other):
        seed_spaces(one, 5)
    state = env_state(env)
    expected = [draws(env) for _ in range(3)]
    load_env_state(other, state)
    assert [draws(other) for _ in range(3)] == expected
    assert other.moves is other.action_space is not env.action_space
    assert Places.action_space._np_random is None


@pytest.mark.parametrize("inner", [None, gym.make("CartPole-v1")])
def test_another_inner_env_is_refused(inner: gym.Env[Any, Any] | None) -> None:
    state = env_state(Places(Places()))
    with pytest.raises(NotSavable):
        load_env_state(Places(inner), state)
