"""Rewards of goals other than the desired one, for hindsight experience replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from slm_lab.env.make import find_target
from slm_lab.env.normalize import RewardNormalizer
from slm_lab.env.single import quiet_gymnasium
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import Problem, SpecError

KEY = "agent.memory.goal_threshold"


class GoalOutcome(NamedTuple):
    """What the env would have returned for K transitions with other goals."""

    reward_K: np.ndarray
    """float32 [K]: training rewards (env.reward_scale, env.clip_reward)."""
    terminated_K: np.ndarray | None
    """bool [K]; None: as recorded, since the env does not say."""


GoalReward = Callable[[np.ndarray, np.ndarray], GoalOutcome]
"""(achieved goals [K, G], desired goals [K, G]) → outcomes."""


def goal_reward(spec: EnvSpec, threshold: float | None) -> GoalReward:
    """Return the function that rewards goals.

    Args: threshold: distance up to which a goal is reached, with reward 0 there and −1 elsewhere; None: the env's own `compute_reward`
    and, if it has one, `compute_terminated`, as in Gymnasium-Robotics, called with a batch.

    Raises SpecError if the env has no `compute_reward`.
    """
    rewards = RewardNormalizer(spec, 1, 1.0)
    if threshold is not None:

        def by_distance(achieved_KG: np.ndarray, desired_KG: np.ndarray) -> GoalOutcome:
            near_K = np.linalg.norm(achieved_KG - desired_KG, axis=1) <= threshold
            return GoalOutcome(rewards(near_K - 1.0), None)

        return by_distance
    env = _unwrapped_env(spec)
    ends = getattr(env, "compute_terminated", None)

    def by_env(achieved_KG: np.ndarray, desired_KG: np.ndarray) -> GoalOutcome:
        reward_K = np.asarray(env.compute_reward(achieved_KG, desired_KG, {}), np.float64)
        if reward_K.shape != (len(achieved_KG),):
            raise ValueError(f"{spec.name}: compute_reward returned {list(reward_K.shape)} for a batch of {len(achieved_KG)} goals")
        terminated_K = None if ends is None else _terminations(ends, achieved_KG, desired_KG)
        return GoalOutcome(rewards(reward_K), terminated_K)

    return by_env


def _terminations(ends: Callable[..., Any], achieved_KG: np.ndarray, desired_KG: np.ndarray) -> np.ndarray:
    """Return the result of `compute_terminated` for a batch, bool [K]; the mazes of Gymnasium-Robotics take a single goal."""
    found = np.asarray(ends(achieved_KG, desired_KG, {}), np.bool_)
    if found.shape == (len(achieved_KG),):
        return found
    return np.array([bool(ends(one, goal, {})) for one, goal in zip(achieved_KG, desired_KG, strict=True)], np.bool_)


def _unwrapped_env(spec: EnvSpec) -> Any:
    """Return one env without wrappers, whose `compute_reward` can be called. Raises SpecError if it has none."""
    env: Any = None
    if find_target(spec, 1).registration is not None:
        with quiet_gymnasium():
            env = gym.make(spec.name, disable_env_checker=True, **spec.kwargs).unwrapped
    if not hasattr(env, "compute_reward"):
        message = f"missing; {spec.name} has no compute_reward: give the distance within which a goal is reached (Fetch: 0.05)"
        raise SpecError(spec.name, [Problem(KEY, message, "missing")])
    return env
