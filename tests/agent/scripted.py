"""Recorded episodes of scripted policies, which are quick to create."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slm_lab.env.make import make_env
from slm_lab.env.vec import Env
from slm_lab.lib.demonstrations import Demonstrations, EpisodeRecorder, join_episodes
from slm_lab.spec.models.env import EnvSpec


def played(name: str, act: Callable[[np.ndarray], np.ndarray], episodes: int, **keys: Any) -> tuple[Demonstrations, Env]:
    """Play episodes with the policy `act`, a function of the observations [N, D]; return the recorded episodes and the closed env."""
    env = make_env(EnvSpec(name=name, max_frame=1, **keys), 0, num_envs=2, training=False)
    recorder = EpisodeRecorder(2, env.info.action)
    obs_N, all_N = env.reset(), np.ones(2, np.bool_)
    while len(recorder.episodes) < episodes:
        action_N = act(obs_N)
        step = env.step(action_N)
        recorder.add(obs_N, action_N, step, all_N)
        obs_N = step.obs_N
    env.close()
    return join_episodes(recorder.episodes[:episodes]), env


def balance(obs_N: np.ndarray) -> np.ndarray:
    """Push the cart in the direction in which the pole falls: returns of about 200 to 500 in CartPole."""
    return (obs_N[:, 2] + 0.5 * obs_N[:, 3] + 0.1 * obs_N[:, 1] > 0).astype(np.int64)


def swing_up(obs_N: np.ndarray) -> np.ndarray:
    """Swing the pendulum up by controlling its energy, then balance it: returns of about −200 in Pendulum."""
    cos, sin, speed = obs_N.T
    angle, energy = np.arctan2(sin, cos), speed**2 / 6.0 + 5.0 * (cos - 1.0)
    hold = (cos > 0.9) & (np.abs(speed) < 3.0)
    torque = np.where(hold, -8.0 * angle - 2.0 * speed, np.where(energy < 0, np.sign(speed + 1e-9) * 2.0, 0.0))
    return np.clip(torque / 2.0, -1.0, 1.0).astype(np.float32)[:, None]
