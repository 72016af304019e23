"""Padding of observations and actions, so that one array can contain the observations or actions of agents whose spaces differ.

Each row of a padded array belongs to one agent (see EnvInfo.groups). The row begins with the observation or action of the agent, and is
padded with zeros to the size of the largest observation or action of all agents.
"""

from __future__ import annotations

import numpy as np

from slm_lab.lib.records import ActionSpace, ObservationSpace


def pad_rows(values_K: np.ndarray, form: ObservationSpace | ActionSpace) -> np.ndarray:
    """Return the observations or actions [K, …] of K agents, padded with zeros to the common shape [K, *form.shape] of all agents."""
    if values_K.shape[1:] == form.shape:
        return values_K.astype(form.dtype, copy=False)
    result = np.zeros((len(values_K), *form.shape), form.dtype)
    own = values_K.reshape(len(values_K), -1)
    result[:, : own.shape[1]] = own
    return result


def remove_padding(values_K: np.ndarray, own: ObservationSpace | ActionSpace) -> np.ndarray:
    """Return observations or actions without the zeros that `pad_rows` added, [K, *own.shape].

    Args: own: space of the agents to which the values belong.
    """
    if values_K.shape[1:] == own.shape:
        return values_K.astype(own.dtype, copy=False)
    return np.ascontiguousarray(values_K[:, : own.shape[0]] if own.shape else values_K[:, 0], own.dtype)
