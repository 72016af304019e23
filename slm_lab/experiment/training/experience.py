"""Experience, as sources collect it and learners use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from slm_lab.experiment.files.sink import Spans
from slm_lab.lib.records import ActOut, Episode, VecStep

if TYPE_CHECKING:
    from slm_lab.agent.rollout.rollout import Rollout

Beat = Callable[[int], None]
"""beat(phase): a heartbeat with the phase that begins now, see process.heartbeat."""


def no_beat(phase: int) -> None:
    """Ignore the heartbeat."""


Transition = tuple[np.ndarray, np.ndarray, np.ndarray | None, ActOut, VecStep]
"""One step of N envs, as an algorithm observes it: obs_N; first_N, bool [N]: obs_N begins an episode; the hidden state before obs_N, None
for a policy without memory; the policy's output; the env's step."""


class Experience(NamedTuple):
    """One vector step of a policy."""

    policy: int
    frames: int
    episodes: list[Episode]
    """Those that ended in it."""
    transition: Transition
    moment: float | None = None
    """When it was collected, in seconds of perf_counter; None: now."""
    report: Callable[[], dict[str, float]] | None = None
    """Called after an update: returns what the source reports about the data trained on (policy lag, utilization)."""


class CollectedRollout(NamedTuple):
    """A rollout of a policy, which workers have collected."""

    policy: int
    steps: list[tuple[int, list[Episode], float]]
    """Of each vector step: frames, episodes that ended in it, and the moment, as in Experience."""
    rollout: Rollout | None = None
    """To learn from after the last step; None: nothing of it is left to learn from."""
    report: Callable[[], dict[str, float]] | None = None
    """As in Experience."""


class ExperienceSource(Protocol):
    """Collects experience until every policy has its frames, or until a stop is requested."""

    backend: str
    """The resolved env backend."""

    @property
    def between_rounds(self) -> bool:
        """Whether the state can be saved now, after the experience that was yielded last was learned from."""

    @property
    def lost_reason(self) -> str:
        """Why `state_dict` has no open episodes, if it has none."""

    def __iter__(self) -> Iterator[Experience | CollectedRollout]:
        """Yield the experience step by step, or as rollouts. Each item is consumed before the next one is asked for."""

    def begin(self) -> None:
        """Prepare for collection, after load_state_dict if there is something to load. Raises WorkerFailed."""

    def spans(self) -> Spans | None:
        """Return what each process did in a window of time; None if there is one process only."""

    def close(self) -> None:
        """Release envs and processes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of envs and random streams, with all that belongs to open episodes in "open": None if it cannot be saved."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load what `state_dict` returned. Returns whether open episodes continue."""
