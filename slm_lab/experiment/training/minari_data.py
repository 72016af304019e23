"""Read data sets in the format of Minari (https://minari.farama.org)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from slm_lab.env.agent_spaces import agent_spaces
from slm_lab.env.spaces import box_scale, space_from_dict, space_to_dict
from slm_lab.lib.demonstrations import Demonstrations
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.models.spec import Spec

PREFIX = "minari:"
"""Prefix that marks the id of a Minari data set in meta.demonstrations."""


def is_minari(where: str) -> bool:
    """Return whether a value of `meta.demonstrations` refers to a Minari data set: minari:ID, a folder, or an HDF5 file."""
    return where.startswith(PREFIX) or Path(where).expanduser().is_dir() or where.endswith((".hdf5", ".h5"))


def read_minari(where: str, spec: Spec, info: EnvInfo) -> tuple[Demonstrations, dict[str, Any]]:
    """Read a Minari data set. Returns (Demonstrations with observations and actions in the agent's format, header).

    The returned header has the entries "env" and "spaces", like the header of a file that `enjoy --record` writes. If the last step of an
    episode is neither terminated nor truncated, the episode counts as truncated. Raises OSError or ValueError if the data set cannot be
    used.

    Args:
        where: value of meta.demonstrations.
        info: info of the training env.
    """
    try:
        import minari
    except ImportError:
        raise ValueError(f"{where} needs the package minari: pip install 'slm-lab[minari]'") from None
    data = _open(minari, where)
    observation, action = data.observation_space, data.action_space
    if isinstance(action, spaces.Dict | spaces.Tuple):
        raise ValueError(f"{where} has actions {action}; allowed: Discrete, Box, MultiDiscrete, MultiBinary")
    env_id = None if data.env_spec is None else data.env_spec.id
    header = {"env": env_id, "spaces": {"observation": space_to_dict(observation), "action": space_to_dict(action)}}
    assert info.spaces is not None
    if space_to_dict(observation)["type"] != info.spaces["observation"]["type"]:
        raise ValueError(f"{where} has observations {observation}; this env has {space_from_dict(info.spaces['observation'])}")
    encode = agent_spaces(spec.env, observation, action, spec.agent.input).encode
    episodes = [episode for episode in data.iterate_episodes() if len(episode.rewards)]
    if not episodes:
        raise ValueError(f"{where} has no episodes")
    obs = [encode(episode.observations) for episode in episodes]
    actions = [encode_actions(action, np.asarray(episode.actions)) for episode in episodes]
    terminated = [np.asarray(episode.terminations, np.bool_) for episode in episodes]
    last_K = np.concatenate([np.arange(len(rows)) == len(rows) - 1 for rows in terminated])
    terminated_K = np.concatenate(terminated) & last_K
    rows_K = np.concatenate([rows[:-1] for rows in obs]), np.concatenate(actions)
    rewards_K = np.concatenate([np.asarray(episode.rewards, np.float32) for episode in episodes])
    return Demonstrations(*rows_K, rewards_K, terminated_K, last_K & ~terminated_K, np.stack([rows[-1] for rows in obs])), header


def _open(minari: Any, where: str) -> Any:
    """Open a Minari data set. Raises ValueError if the data set does not exist or cannot be read."""
    try:
        if where.startswith(PREFIX):
            return minari.load_dataset(where.removeprefix(PREFIX))
        path = Path(where).expanduser()
        folder = path.parent if path.is_file() else path
        return minari.MinariDataset(folder / "data" if (folder / "data").is_dir() else folder)
    except Exception as error:  # Minari and h5py raise errors of many types
        local = ", ".join(minari.list_local_datasets()) if where.startswith(PREFIX) else ""
        hint = f"; local data sets: {local or 'none'}" if where.startswith(PREFIX) else ""
        raise ValueError(f"{where} cannot be read by Minari: {type(error).__name__}: {error}{hint}") from None


def encode_actions(space: spaces.Space[Any], action_K: np.ndarray) -> np.ndarray:
    """Convert actions from the env's format to the agent's format (see ActionSpace).

    The function is the inverse of the conversion that `env.spaces.action_codec` returns.
    """
    match space:
        case spaces.Discrete():
            return np.asarray(action_K, np.int64) - int(space.start)
        case spaces.MultiDiscrete():
            return np.asarray(action_K, np.int64).reshape(len(action_K), -1) - space.start.ravel()
        case spaces.Box():
            scale = box_scale(space)
            clipped_K = np.clip(action_K.reshape(len(action_K), -1), scale.low, scale.high)  # as the env clips them
            scaled_K: np.ndarray = (clipped_K - scale.center) / np.where(scale.half > 0, scale.half, 1.0)
            return scaled_K.astype(np.float32)
    return np.asarray(action_K, np.int64).reshape(len(action_K), -1)
