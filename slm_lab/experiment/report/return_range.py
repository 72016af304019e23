"""Ranges of possible returns of envs. The confidence interval of a mean return is clipped to the range of possible returns of the env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slm_lab.spec.compat.env_ids import envpool_envs

RANGES: dict[str, tuple[float, float]] = {
    "CartPole-v0": (0.0, 200.0),
    "CartPole-v1": (0.0, 500.0),
    "MaskedCartPole-v1": (0.0, 500.0),
    "Acrobot-v1": (-500.0, 0.0),
    "MountainCar-v0": (-200.0, 0.0),
    "MountainCarContinuous-v0": (-99.9, 100.0),
    "Pendulum-v1": (-3254.72, 0.0),  # 200 steps of at most π² + 0.1 · 8² + 0.001 · 2²
    "InvertedPendulum-v4": (0.0, 1000.0),
    "InvertedPendulum-v5": (0.0, 1000.0),
    "FrozenLake-v1": (0.0, 1.0),
    "FrozenLake8x8-v1": (0.0, 1.0),
    "Blackjack-v1": (-1.0, 1.0),
    "Taxi-v3": (-2000.0, 20.0),
    "Taxi-v4": (-2000.0, 20.0),
    "ALE/Pong-v5": (-21.0, 21.0),
    "Pong-v5": (-21.0, 21.0),
    "ALE/Boxing-v5": (-100.0, 100.0),
    "ALE/Bowling-v5": (0.0, 300.0),
}
"""Env id → lowest and highest possible return of an episode, according to the rewards and the time limit in the env's definition."""
_PREFIXES = {"MiniGrid-": (-1.0, 1.0), "BabyAI-": (0.0, 1.0)}
"""Prefix of the ids of a family of envs → lowest and highest possible return of an episode."""
_DM_CONTROL = (0.0, 1000.0)
"""Lowest and highest possible return of the tasks of DeepMind Control except LQR tasks: 1,000 steps with rewards from 0 to 1."""
_HARMLESS = {
    "name", "num_envs", "max_frame", "normalize_obs", "normalize_reward", "clip_obs", "clip_reward", "reward_scale", "backend", "channels",
    "obs_keys", "schedule", "stagger_episodes",
}  # fmt: skip
"""Keys of the spec section env that do not change the range of returns, since a return is the sum of the rewards that the env itself
gives."""


def return_range(settings: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the lowest and the highest possible return of the env in a spec.

    Returns None if the range is unknown, or if env arguments, max_t or wrappers of the spec may change the range.

    Args: settings: path of each spec key → value, such as {"env.name": "CartPole-v1"} (see Run.settings).
    """
    name = str(settings.get("env.name", "")).rpartition(":")[2]
    changed = any(_changes_returns(path, value) for path, value in settings.items())
    return None if changed and not name.startswith("ALE/") else _range_of(name)


def _range_of(name: str) -> tuple[float, float] | None:
    if name in RANGES:
        return RANGES[name]
    env = envpool_envs().get(name)
    if name.startswith("dm_control/") or (env is not None and env.suite == "dm_control"):
        return None if "lqr" in name.lower() else _DM_CONTROL
    return next((own for prefix, own in _PREFIXES.items() if name.startswith(prefix)), None)


def _changes_returns(path: str, value: Any) -> bool:
    section, _, key = path.partition(".")
    return section == "env" and key.partition(".")[0] not in _HARMLESS and value not in (None, [], {})
