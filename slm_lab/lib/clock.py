"""The one clock of a Session."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from slm_lab.lib.heap import PRIVATE, Heap


class Clock:
    """Counts frames, episodes, vector steps and optimizer steps, and wall time across resumes (seconds).

    Frames are counted where all Sessions that train one net see them; a Session that takes another's place goes on from its count.
    """

    __slots__ = ("_begun_S", "_frames_S", "_index", "_moment", "_started", "_wall_before", "epi", "frame", "opt_step", "prev_frame", "t")

    def __init__(self, heap: Heap = PRIVATE) -> None:
        self._index = heap.index
        self._frames_S = heap.array(np.zeros(heap.sessions, np.int64))
        self._begun_S = heap.array(np.zeros(heap.sessions))
        """When each Session began: perf_counter's seconds, which all processes of a machine share."""
        self.frame = int(self._frames_S[self._index])
        self.prev_frame = self.frame
        self.t = 0
        self.epi = 0
        self.opt_step = 0
        self._wall_before = 0.0
        self._started = perf_counter()
        self._moment: float | None = None

    @property
    def moment(self) -> float:
        """What is taken for now (perf_counter's seconds): steps that come in one lot are spread over the time since the last."""
        return perf_counter() if self._moment is None else self._moment

    @moment.setter
    def moment(self, value: float) -> None:
        self._moment = value

    @property
    def wall_t(self) -> float:
        """Seconds since the start, resumed parts included."""
        return self._wall_before + self.moment - self._started

    @property
    def global_frame(self) -> int:
        """Frames of all Sessions that train one net: what schedules go by."""
        return self.frame if len(self._frames_S) == 1 else int(self._frames_S.sum())

    def begin(self) -> None:
        """Wall time begins here, or began when the Session did whose place this one takes."""
        now = perf_counter()
        self._begun_S[self._index] = self._begun_S[self._index] or now
        self._wall_before, self._started = now - float(self._begun_S[self._index]), now

    def tick(self, frames: int) -> None:
        """Count one vector step of `frames` frames."""
        self.prev_frame = self.frame
        self.frame += frames
        self.t += 1
        self._frames_S[self._index] = self.frame

    def due(self, every: int) -> bool:
        """True once per crossing of a multiple of `every` frames, also where the step does not divide it."""
        return self.frame // every > self.prev_frame // every

    def state_dict(self) -> dict[str, float]:
        return {
            "frame": self.frame,
            "prev_frame": self.prev_frame,
            "t": self.t,
            "epi": self.epi,
            "opt_step": self.opt_step,
            "wall_t": self.wall_t,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name in ("frame", "prev_frame", "t", "epi", "opt_step"):
            setattr(self, name, int(state[name]))
        self._frames_S[self._index] = self.frame
        self._wall_before = float(state["wall_t"])
        self._started = perf_counter()
