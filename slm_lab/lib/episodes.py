"""Returns of a policy's most recent training episodes, which are collected from all processes that train the policy's net."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, sqrt
from typing import Any, NamedTuple

import numpy as np

from slm_lab.lib.store import Arrays, Named, SharedArray, Store

EPISODES = 100
"""Maximum number of finished episodes in an EpisodeWindow."""
RECENT_SHARE, MIN_EPISODES, MAX_AGE = 0.05, 20, 0.2
"""Definition of a policy's current return (`EpisodeWindow.current_return`). The current return is the mean return of the episodes that
ended in the last fraction RECENT_SHARE of the training frames, or of the last MIN_EPISODES episodes if fewer episodes ended in this
fraction. All episodes that ended at the same frame as the oldest included episode are also included. The mean includes at most EPISODES
episodes, and only episodes that ended in the last fraction MAX_AGE of the training frames."""
_RING = 256
"""Number of entries in the ring buffer of each process. A ring buffer has more than EPISODES entries, so that a reader can copy the last
EPISODES entries before the writer overwrites the oldest of these entries."""
_FRAME, _RETURN, _TOTAL = range(3)
"""Columns of a ring buffer's entry for one episode: global frame at the end of the episode, return of the episode, and sum of the returns
of this and all earlier episodes of the process."""


class CurrentReturn(NamedTuple):
    """Mean return of a policy over recent episodes, or over the episodes of an evaluation."""

    mean: float
    error: float | None
    """Standard error of the mean return, or None for a single episode."""
    episodes: int

    @staticmethod
    def from_independent_returns(returns: Sequence[float] | np.ndarray) -> CurrentReturn | None:
        """Return the mean of returns that are assumed to be independent, with the standard error of the mean.

        If `returns` is empty, return None.
        """
        if not len(returns):
            return None
        error = float(np.std(returns, ddof=1)) / sqrt(len(returns)) if len(returns) > 1 else None
        return CurrentReturn(float(np.mean(returns)), error, len(returns))

    @staticmethod
    def from_training_returns(returns: np.ndarray) -> CurrentReturn | None:
        """Return the mean of training returns in chronological order, as an estimate of the return of the current policy.

        The standard error takes into account that the policy changes during training. If `returns` is empty, return None.

        The n returns are divided into √n groups of consecutive returns. If the variance between the means of the groups exceeds the
        variance that is expected for independent returns, the excess is added to the squared standard error (random effects of a one-way
        analysis of variance).
        """
        found, groups = CurrentReturn.from_independent_returns(returns), isqrt(len(returns))
        if found is None or found.error is None or groups < 2:
            return found
        start_G = np.arange(groups) * len(returns) // groups
        size_G = np.diff(start_G, append=len(returns))
        mean_G = np.add.reduceat(returns, start_G) / size_G
        within = np.sum((returns - np.repeat(mean_G, size_G)) ** 2) / (len(returns) - groups)
        between = np.var(mean_G, ddof=1)
        excess = max(float(between - within * groups / len(returns)), 0.0)
        error = sqrt(max(found.error**2, float(between) / groups) + excess)
        return found._replace(error=error)


class EpisodeWindow:
    """Returns of the last EPISODES episodes, in the order of the global frames at which they ended, and number of episodes since metrics
    were last written.

    If several processes train the same net, the episodes of all processes are in shared memory (`attach`). Each process writes only to its
    own ring buffer, first the entry of an episode and then the number of episodes, so that no lock is needed. A reader merges the ring
    buffers of all processes. A process that replaces a dead process continues the ring buffer of the dead process.
    """

    def __init__(self) -> None:
        self._index = 0
        self._store: Store | None = None
        self._count_W = np.zeros(1, np.int64)
        """Number of episodes that each process has finished, [W] for W processes."""
        self._mark_WX = np.zeros((1, 2))
        """[W, 2]: number of episodes of all processes, and sum of their returns, at the time when each process last called
        `take_new_episodes`."""
        self._ring_WRX = np.zeros((1, _RING, 3))

    def shared_arrays(self) -> Named:
        # a snapshot copies these arrays in the order of their names: `count` before the entries in `ring` that are counted
        return {
            "count": SharedArray(self._count_W[[self._index]], "own"),
            "mark": SharedArray(self._mark_WX[self._index], "own"),
            "ring": SharedArray(self._ring_WRX[self._index], "own"),
        }

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._index, self._store = store.index, store
        self._count_W, self._mark_WX, self._ring_WRX = arrays["count"][:, 0], arrays["mark"], arrays["ring"]

    def record(self, returns: Sequence[float], frame: int) -> None:
        """Add the returns of episodes of this process that ended at the global frame `frame`."""
        ring, count = self._ring_WRX[self._index], int(self._count_W[self._index])
        total = float(ring[(count - 1) % _RING, _TOTAL])
        for value in returns:
            total += value
            ring[count % _RING] = frame, value, total
            count += 1
            self._barrier()
            self._count_W[self._index] = count

    @property
    def returns(self) -> list[float]:
        """Returns of the last EPISODES episodes of all processes, in the order of the global frames at which the episodes ended."""
        self._exchange()
        return list(map(float, self._entries()[:, _RETURN]))

    def current_return(self, frame: int) -> CurrentReturn | None:
        """Return the current return at the global frame `frame`, or None if no episode ended recently enough.

        The comment on RECENT_SHARE defines the current return.

        If the shared arrays are stored in another process, episodes of other processes are included up to the last use of `returns` or
        `take_new_episodes`.
        """
        entries = self._entries()
        if not len(entries):
            return None
        frames = entries[:, _FRAME]
        # include all episodes that ended at the frame of the oldest episode; some of them would not be a random sample of the envs
        begin = min((1.0 - RECENT_SHARE) * frame, frames[-MIN_EPISODES:][0] - 1)
        return CurrentReturn.from_training_returns(entries[(frames > begin) & (frames > (1.0 - MAX_AGE) * frame), _RETURN])

    @property
    def own_returns(self) -> list[float]:
        """Returns of the last EPISODES episodes of this process."""
        return list(map(float, self._last_entries(self._index)[1][:, _RETURN]))

    def take_new_episodes(self, *, count_again: bool = False) -> tuple[int, float | None]:
        """Return the number and the mean return of the episodes that ended in all processes since this process last called
        `take_new_episodes`.

        The mean return is None if no episode ended since the last call.

        Args: count_again: whether the next call of `take_new_episodes` includes these episodes again.
        """
        self._exchange()
        episodes, total = 0, 0.0
        for worker in range(len(self._count_W)):
            count, entries = self._last_entries(worker)
            if count:
                episodes, total = episodes + count, total + float(entries[-1, _TOTAL])
        mark = self._mark_WX[self._index]
        count = episodes - int(mark[0])
        mean = (total - float(mark[1])) / count if count > 0 else None
        if not count_again:
            mark[:] = episodes, total
        return max(count, 0), mean

    def clear(self) -> None:
        """Remove all episodes of this process. Call this method before another policy begins to act."""
        self._count_W[self._index] = 0
        self._mark_WX[self._index] = 0.0
        self._ring_WRX[self._index] = 0.0

    def state_dict(self) -> dict[str, Any] | None:
        """Return the episodes as plain Python objects, or None if the episodes are in shared memory, because a snapshot of the shared
        memory contains the episodes."""
        if self._store is not None:
            return None
        count, entries = self._last_entries(0)
        return {"last": entries.tolist(), "count": count, "mark": self._mark_WX[0].tolist()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            count, last = state["count"], state["last"]
            self._count_W[0], self._mark_WX[0] = count, state["mark"]
            self._ring_WRX[0, np.arange(count - len(last), count) % _RING] = np.reshape(last, (-1, 3))

    def _entries(self) -> np.ndarray:
        """Return the ring buffer entries of the last EPISODES episodes of all processes, [≤ EPISODES, 3], in the order of the global frames
        at which the episodes ended."""
        entries = np.concatenate([self._last_entries(worker)[1] for worker in range(len(self._count_W))])
        return np.asarray(entries[np.argsort(entries[:, _FRAME], kind="stable")][-EPISODES:])

    def _last_entries(self, worker: int) -> tuple[int, np.ndarray]:
        """Return the number of episodes of a process, and the last EPISODES entries of the process's ring buffer, [≤ EPISODES, 3], oldest
        first."""
        while True:
            count = int(self._count_W[worker])
            self._barrier()
            entries: np.ndarray = self._ring_WRX[worker, np.arange(max(count - EPISODES, 0), count) % _RING]
            self._barrier()
            if int(self._count_W[worker]) - count < _RING - EPISODES:  # the writer has not overwritten the entries meanwhile
                return count, entries

    def _exchange(self) -> None:
        if self._store is not None:
            self._store.exchange()

    def _barrier(self) -> None:
        if self._store is not None:
            self._store.barrier()
