"""Arrays for the rows of agents whose spaces differ: each row is padded with zeros to the size of the widest row.

In this way, one array contains the observations, or the actions, of all agents of an env (see EnvInfo.groups). The first numbers of a row
are the agent's own.
"""

from __future__ import annotations

import numpy as np

from slm_lab.lib.records import ActionSpace, ObservationSpace


def padded(values_K: np.ndarray, form: ObservationSpace | ActionSpace) -> np.ndarray:
    """Pad the rows [K, …] of some agents to the common form [K, *form.shape] of all agents."""
    if values_K.shape[1:] == form.shape:
        return values_K.astype(form.dtype, copy=False)
    result = np.zeros((len(values_K), *form.shape), form.dtype)
    own = values_K.reshape(len(values_K), -1)
    result[:, : own.shape[1]] = own
    return result


def without_padding(values_K: np.ndarray, own: ObservationSpace | ActionSpace) -> np.ndarray:
    """Return the values [K, *own.shape] of rows, without the padding that `padded` added."""
    if values_K.shape[1:] == own.shape:
        return values_K.astype(own.dtype, copy=False)
    return np.ascontiguousarray(values_K[:, : own.shape[0]] if own.shape else values_K[:, 0], own.dtype)
