"""Arrays for the rows of agents whose spaces differ: each row is padded with zeros to the widest.

So one array has the observations, or the actions, of all agents of an env (see EnvInfo.groups), and the first numbers of a row are those of
its agent.
"""

from __future__ import annotations

import numpy as np

from slm_lab.lib.records import ActionSpace, ObservationSpace


def padded(values_K: np.ndarray, form: ObservationSpace | ActionSpace) -> np.ndarray:
    """Return rows [K, …] of some agents in the form [K, *form.shape] of all."""
    if values_K.shape[1:] == form.shape:
        return values_K.astype(form.dtype, copy=False)
    result = np.zeros((len(values_K), *form.shape), form.dtype)
    own = values_K.reshape(len(values_K), -1)
    result[:, : own.shape[1]] = own
    return result


def without_padding(values_K: np.ndarray, own: ObservationSpace | ActionSpace) -> np.ndarray:
    """Return the values [K, *own.shape] of rows that `padded` has padded."""
    if values_K.shape[1:] == own.shape:
        return values_K.astype(own.dtype, copy=False)
    return np.ascontiguousarray(values_K[:, : own.shape[0]] if own.shape else values_K[:, 0], own.dtype)
