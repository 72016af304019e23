"""Computation of rewards from achieved and desired goals, for hindsight experience replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from slm_lab.env.make import make_env_request
from slm_lab.env.normalize import RewardNormalizer
from slm_lab.env.single import quiet_gymnasium
from slm_lab.env.vec import Env
from slm_lab.env.wrappers import find_wraps
from slm_lab.lib.log import notice
from slm_lab.lib.records import VecStep
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import Problem, SpecError

KEY = "agent.memory.goal_threshold"
_REWARD_WRAPPERS = (gym.RewardWrapper, gym.wrappers.NormalizeReward)


class GoalOutcome(NamedTuple):
    """Rewards and terminations of K transitions, computed from their achieved and desired goals."""

    reward_K: np.ndarray
    """float32 [K]: rewards for training, after env.reward_scale and env.clip_reward."""
    terminated_K: np.ndarray | None
    """bool [K], or None if the env cannot compute terminations from goals, so that the recorded terminations remain valid."""


class GoalReward:
    """Function object that computes a GoalOutcome from achieved goals [K, G] and desired goals [K, G].

    Args: threshold: distance up to which a goal counts as reached. The reward is 0 for a reached goal, else −1. If `threshold` is None, a
    separate env is built, and its method `compute_reward` is called with a batch of goals, as in Gymnasium-Robotics. If the separate env
    has a method `compute_terminated`, this method is also called. `GoalReward.close` closes the separate env.

    Raises SpecError if the env has no `compute_reward`, or if a wrapper changes rewards.
    """

    def __init__(self, spec: EnvSpec, threshold: float | None) -> None:
        _reject_reward_wrappers(spec)
        self.threshold = threshold
        self._name, self._scale = spec.name, RewardNormalizer(spec, 1, 1.0)
        self._env: Any = _unwrapped_env(spec) if threshold is None else None

    def __call__(self, achieved_KG: np.ndarray, desired_KG: np.ndarray) -> GoalOutcome:
        if self.threshold is not None:
            near_K = np.linalg.norm(achieved_KG - desired_KG, axis=1) <= self.threshold
            return GoalOutcome(self._scale(near_K - 1.0), None)
        reward_K = np.asarray(self._env.compute_reward(achieved_KG, desired_KG, {}), np.float64)
        if reward_K.shape != (len(achieved_KG),):
            raise ValueError(f"{self._name}: compute_reward returned {list(reward_K.shape)} for a batch of {len(achieved_KG)} goals")
        ends = getattr(self._env, "compute_terminated", None)
        return GoalOutcome(self._scale(reward_K), None if ends is None else _compute_terminations(ends, achieved_KG, desired_KG))

    def close(self) -> None:
        """Close the separate env that was built to compute rewards, if `threshold` is None."""
        if self._env is not None:
            self._env.close()


def check_goal_rewards(spec: EnvSpec, rewards: GoalReward, env: Env, step: VecStep) -> None:
    """Compare the env's rewards in one step with the rewards computed from the goals.

    If `rewards.threshold` is a number, a difference causes only a notice, because training does not use the env's rewards: it computes all
    rewards of a batch from the threshold. If `rewards.threshold` is None, a difference raises SpecError, because rewards for other goals
    cannot be computed if `compute_reward` does not return the env's rewards.

    Args: step: an env step with unnormalized rewards and observations.
    """
    assert env.info.observation.goals is not None
    achieved_KG, desired_KG = (step.last_obs_N[step.valid_N, begin:end] for begin, end in env.info.observation.goals)
    given_K = RewardNormalizer(spec, 1, 1.0)(step.reward_N[step.valid_N])
    try:
        expected_K = rewards(achieved_KG, desired_KG).reward_K
    except Exception as error:  # an error of the env's own code
        message = f"missing; {spec.name}: compute_reward with a batch of goals and an empty info raised {type(error).__name__}: {error}"
        raise SpecError(spec.name, [Problem(KEY, f"{message}; give the distance within which a goal is reached", "missing")]) from error
    wrong_K = np.flatnonzero(~np.isclose(given_K, expected_K, rtol=1e-3, atol=1e-4))
    if not len(wrong_K):
        return
    given, expected = (f"{reward_K[wrong_K[0]]:g}" for reward_K in (given_K, expected_K))
    if rewards.threshold is not None:
        learned = f"rewards for this threshold ({expected} in the first step)"
        notice(f"{KEY}: the agent learns from {learned}, not from those of {spec.name} ({given})")
        return
    wrapped = f" without env.wrappers ({', '.join(wrap.name for wrap in spec.wrappers)})" if spec.wrappers else ""
    message = f"missing; {spec.name} returned the reward {given} where its compute_reward{wrapped} returns {expected}, so"
    why = "the rewards of other goals are unknown; give the distance within which a goal is reached"
    raise SpecError(spec.name, [Problem(KEY, f"{message} {why}", "missing")])


def _reject_reward_wrappers(spec: EnvSpec) -> None:
    """Raise SpecError if the spec has wrappers that change rewards, because hindsight experience replay computes the rewards for other
    goals without wrappers."""
    why = "changes rewards, which HindsightReplay computes without wrappers; use env.reward_scale or env.clip_reward"
    changing = [wrap for wrap in find_wraps(spec) if issubclass(wrap.wrapper, _REWARD_WRAPPERS)]
    if changing:
        raise SpecError(spec.name, [Problem(f"env.{wrap.key}", f"'{wrap.wrapper.__name__}' {why}") for wrap in changing])


def _compute_terminations(compute_terminated: Callable[..., Any], achieved_KG: np.ndarray, desired_KG: np.ndarray) -> np.ndarray:
    """Return whether each of K transitions ends the episode, bool [K], according to the env's method `compute_terminated`.

    Args: compute_terminated: this method.

    If the method supports only a single goal, as in the mazes of Gymnasium-Robotics, this function calls it once for each goal.
    """
    terminated_K = np.asarray(compute_terminated(achieved_KG, desired_KG, {}), np.bool_)
    if terminated_K.shape == (len(achieved_KG),):
        return terminated_K
    pairs = zip(achieved_KG, desired_KG, strict=True)
    return np.array([bool(compute_terminated(achieved, desired, {})) for achieved, desired in pairs], np.bool_)


def _unwrapped_env(spec: EnvSpec) -> Any:
    """Build one env without wrappers and return the env. Raises SpecError if the env has no method `compute_reward`."""
    env: Any = None
    if make_env_request(spec, 1).registration is not None:
        with quiet_gymnasium():
            env = gym.make(spec.name, disable_env_checker=True, **spec.kwargs).unwrapped
    if not hasattr(env, "compute_reward"):
        message = f"missing; {spec.name} has no compute_reward: give the distance within which a goal is reached (Fetch: 0.05)"
        raise SpecError(spec.name, [Problem(KEY, message, "missing")])
    return env
