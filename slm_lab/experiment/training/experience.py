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
"""beat(phase): sends a heartbeat, with the phase that begins now, see execute.heartbeat."""


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
    """The transition to learn from. None if no env was stepped, since each frame is a gradient step on recorded episodes."""
    time: float | None = None
    """Time at which the step was collected, in seconds of perf_counter; None: now."""
    report: Callable[[], dict[str, float]] | None = None
    """Called after an update. Returns values that the source reports about the training data, such as policy lag and utilization."""


class CollectedRollout(NamedTuple):
    """A rollout of a policy, collected by workers."""

    policy: int
    steps: list[tuple[int, list[Episode], float]]
    """For each vector step: number of frames, episodes that ended in the step, and time, as in Experience."""
    rollout: Rollout | None = None
    """Rollout on which the policy is trained at the last step; None if no transitions are left to train on."""
    report: Callable[[], dict[str, float]] | None = None
    """As in Experience."""


class ExperienceSource(Protocol):
    """Collects experience until every policy has its frames, or until a stop is requested."""

    backend: str
    """The resolved env backend."""

    @property
    def between_rounds(self) -> bool:
        """Whether the state can be saved now, provided that the learner has trained on the last yielded experience."""

    @property
    def lost_reason(self) -> str:
        """Reason why `state_dict` does not contain the open episodes, if it does not contain them."""

    def __iter__(self) -> Iterator[Experience | CollectedRollout]:
        """Yield the experience step by step, or as rollouts. Each item is consumed before the next one is requested."""

    def begin(self) -> None:
        """Prepare for collection. If a state is loaded, `load_state_dict` must be called first. Raises WorkerFailed."""

    def recent_spans(self) -> Spans | None:
        """Return when each process was busy during a few recent updates; None without rollout workers."""

    def close(self) -> None:
        """Release envs and processes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of envs and random streams. The entry "open" contains the open episodes; None if they cannot be saved."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load a state returned by `state_dict`. Returns whether the open episodes continue."""
