"""The one clock of a Session."""

from __future__ import annotations

from time import perf_counter


class Clock:
    """Counts frames, episodes, vector steps and optimizer steps, and wall time across resumes (seconds)."""

    __slots__ = ("_started", "_wall_before", "epi", "frame", "opt_step", "prev_frame", "t")

    def __init__(self) -> None:
        self.frame = 0
        self.prev_frame = 0
        self.t = 0
        self.epi = 0
        self.opt_step = 0
        self._wall_before = 0.0
        self._started = perf_counter()

    @property
    def wall_t(self) -> float:
        """Seconds since the start, resumed parts included."""
        return self._wall_before + perf_counter() - self._started

    def tick(self, frames: int) -> None:
        """Count one vector step of `frames` frames."""
        self.prev_frame = self.frame
        self.frame += frames
        self.t += 1

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
        self._wall_before = float(state["wall_t"])
        self._started = perf_counter()
