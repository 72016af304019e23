"""Experience that sources collect and learners train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from slm_lab.experiment.files.sink import Spans
from slm_lab.lib.records import ActOut, Episode, VecStep

if TYPE_CHECKING:
    from slm_lab.agent.rollout.rollout import Rollout

Beat = Callable[[int], None]
"""beat(phase): a heartbeat with the phase that begins now, see execute.heartbeat."""


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
    """Episodes that ended in this step."""
    transition: Transition | None
    """None if no env was stepped: the frames are gradient steps on recorded episodes."""
    time: float | None = None
    """Time of collection, in seconds of perf_counter; None: now."""
    report: Callable[[], dict[str, float]] | None = None
    """Called after an update: returns what the source reports about the data trained on (policy lag, utilization)."""


class CollectedRollout(NamedTuple):
    """A rollout of a policy, collected by workers."""

    policy: int
    steps: list[tuple[int, list[Episode], float]]
    """For each vector step: frames, episodes that ended in it, and the time, as in Experience."""
    rollout: Rollout | None = None
    """Rollout to learn from at the last step; None if no transitions are left to learn from."""
    report: Callable[[], dict[str, float]] | None = None
    """As in Experience."""


class ExperienceSource(Protocol):
    """Collects experience until every policy has its frames, or until a stop is requested."""

    backend: str
    """The resolved env backend."""

    @property
    def between_rounds(self) -> bool:
        """Whether the state can be saved now, once the last yielded experience has been learned from."""

    @property
    def lost_reason(self) -> str:
        """Reason why `state_dict` has no open episodes, if it has none."""

    def __iter__(self) -> Iterator[Experience | CollectedRollout]:
        """Yield the experience step by step, or as rollouts. Each item is consumed before the next one is requested."""

    def begin(self) -> None:
        """Prepare for collection; call after load_state_dict if there is a state to load. Raises WorkerFailed."""

    def spans(self) -> Spans | None:
        """Return what each process did in a window of time; None if there is only one process."""

    def close(self) -> None:
        """Release envs and processes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of envs and random streams. Its "open" contains the open episodes, None if they cannot be saved."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load what `state_dict` returned. Returns whether open episodes continue."""
