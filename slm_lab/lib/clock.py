"""Clock of a Session (a training run with one seed), which counts frames, episodes and steps, and measures wall time."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import numpy as np

from slm_lab.lib.store import MOMENT, Arrays, Named, SharedArray, Store

_COUNTS = ("frame", "prev_frame", "t", "epi", "opt_step")


class Clock:
    """Clock that counts frames, episodes, vector steps and optimizer steps, and that measures wall time in seconds.

    The wall time of a resumed run includes the time before the interruption, but not the interruption itself.

    If several processes train the same net, each process counts its frames in shared memory (`attach`), and a restarted process continues
    with its previous number of frames.
    """

    __slots__ = ("_frames_W", "_index", "_started_W", "_time", "_wall_before", "epi", "frame", "opt_step", "prev_frame", "t")

    def __init__(self) -> None:
        self._index = 0
        self._frames_W = np.zeros(1, np.int64)
        """Number of frames of each process that trains the net, [W] for W processes."""
        self._started_W = np.zeros(1)
        """[W]: time at which each process first started, in seconds of perf_counter, which is the same clock for all processes of a
        machine. In a resumed run, the start time is shifted by the duration of the interruption. The start time is 0 for a process that has
        not started."""
        self.frame = self.prev_frame = 0
        self.t = 0
        self.epi = 0
        self.opt_step = 0
        self._wall_before = 0.0
        """Wall time in seconds before the interruption of a resumed run, which is used until `begin` is called."""
        self._time: float | None = None

    def shared_arrays(self) -> Named:
        return {
            "frames": SharedArray(self._frames_W[[self._index]], "own"),
            f"started{MOMENT}": SharedArray(self._started_W[[self._index]], "own"),
        }

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._index = store.index
        self._frames_W, self._started_W = arrays["frames"][:, 0], arrays[f"started{MOMENT}"][:, 0]
        if not store.fresh:
            self.frame = self.prev_frame = int(self._frames_W[self._index])

    @property
    def time(self) -> float:
        """Current time in seconds of perf_counter.

        The setter of `time` replaces the current time by another time, in order to spread the steps of a batch over the time since the last
        batch.
        """
        return perf_counter() if self._time is None else self._time

    @time.setter
    def time(self, value: float) -> None:
        self._time = value

    @property
    def wall_t(self) -> float:
        """Wall time in seconds since the start of the run, without interruptions.

        Before `begin` is called, `wall_t` is the wall time of a resumed run before the interruption, or 0 for a new run.
        """
        started = float(self._started_W[self._index])
        return self.time - started if started else self._wall_before

    @property
    def global_frame(self) -> int:
        """Number of frames of all processes that train the same net.

        Schedules, for example of the learning rate, are functions of `global_frame`.
        """
        return self.frame if len(self._frames_W) == 1 else int(self._frames_W.sum())

    def begin(self) -> None:
        """Start or continue the measurement of wall time.

        In a restarted process, wall time continues as if the process had never stopped.
        """
        if not self._started_W[self._index]:
            self._started_W[self._index] = perf_counter() - self._wall_before

    def advance_wall_time_to(self, wall_t: float) -> None:
        """Increase the wall time to at least `wall_t` seconds.

        A run may have written metrics after it saved the state from which it is restarted. With this method, later metrics never have a
        smaller wall time than the metrics that the run wrote before the restart.
        """
        missing = max(0.0, wall_t - self.wall_t)
        self._wall_before += missing
        if self._started_W[self._index]:
            self._started_W[self._index] -= missing

    def load_unshared_state(self, state: Mapping[str, float], num_envs: int) -> None:
        """Load a state that `state_dict` returned, except the number of frames, which is in shared memory.

        Entries that are missing in `state` count as 0.
        """
        self.frame = self.prev_frame = int(self._frames_W[self._index])
        self.t, self.epi, self.opt_step = self.frame // num_envs, int(state.get("epi", 0)), int(state.get("opt_step", 0))
        self._wall_before = float(state.get("wall_t", 0.0))

    def tick(self, frames: int) -> None:
        """Count one step of the vector env, in which the envs made `frames` steps in total."""
        self.prev_frame = self.frame
        self.frame += frames
        self.t += 1
        self._frames_W[self._index] = self.frame

    def is_multiple_crossed(self, every: int, ahead: int = 0) -> bool:
        """Return whether the frame count reached or passed a multiple of `every` in the last vector step.

        Args: ahead: number of frames before each multiple of `every` at which the result already becomes True.
        """
        return (self.frame + ahead) // every > (self.prev_frame + ahead) // every

    def state_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in (*_COUNTS, "wall_t")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name in _COUNTS:
            setattr(self, name, int(state[name]))
        self._frames_W[self._index] = self.frame
        self._wall_before = float(state["wall_t"])
