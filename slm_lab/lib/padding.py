"""Padding of observations and actions, so that one array can contain the observations or actions of agents whose spaces differ.

Each row of a padded array belongs to one agent (see EnvInfo.groups). The row begins with the observation or action of the agent, and is
padded with zeros to the size of the largest observation or action of all agents.
"""

from __future__ import annotations

import numpy as np

from slm_lab.lib.records import ActionSpace, ObservationSpace


def pad_rows(values_K: np.ndarray, common_space: ObservationSpace | ActionSpace) -> np.ndarray:
    """Return the observations or actions [K, …] of K agents, padded with zeros to the shape [K, *common_space.shape].

    Args: common_space: space of the padded observations or actions of all agents.
    """
    if values_K.shape[1:] == common_space.shape:
        return values_K.astype(common_space.dtype, copy=False)
    result = np.zeros((len(values_K), *common_space.shape), common_space.dtype)
    flat = values_K.reshape(len(values_K), -1)
    result[:, : flat.shape[1]] = flat
    return result


def remove_padding(values_K: np.ndarray, space: ObservationSpace | ActionSpace) -> np.ndarray:
    """Return observations or actions without the zeros that `pad_rows` added, [K, *space.shape].

    Args: space: space of the agents to which the values belong.
    """
    if values_K.shape[1:] == space.shape:
        return values_K.astype(space.dtype, copy=False)
    return np.ascontiguousarray(values_K[:, : space.shape[0]] if space.shape else values_K[:, 0], space.dtype)
