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
"""Function beat(phase), which sends a heartbeat with the phase that begins now (see execute.heartbeat)."""


def no_beat(phase: int) -> None:
    """Do nothing. `no_beat` is the heartbeat function if heartbeats are not monitored."""


Transition = tuple[np.ndarray, np.ndarray, np.ndarray | None, ActOut, VecStep]
"""One step of a vector env as a tuple (obs_N, first_N, state_N, out, step). The flags first_N, bool [N], tell whether obs_N begins an
episode. state_N contains the hidden states before the step, or is None for a policy that is not recurrent. `out` is the policy's output,
and `step` is the result of the env step."""


class Experience(NamedTuple):
    """Experience of one policy from one step of a vector env."""

    policy: int
    frames: int
    episodes: list[Episode]
    """Episodes that ended in the step of the vector env."""
    transition: Transition | None
    """Transition to learn from. If the algorithm is offline, `transition` is None, no env is stepped, and each frame is a gradient step."""
    time: float | None = None
    """Time at which the step was collected, in seconds of perf_counter, or None for the current time."""
    report: Callable[[], dict[str, float]] | None = None
    """Function that is called after an update and returns metrics of the training data, such as policy lag and utilization."""


class CollectedRollout(NamedTuple):
    """A rollout of one policy that rollout workers have collected."""

    policy: int
    steps: list[tuple[int, list[Episode], float]]
    """(number of frames, episodes that ended in the step, time of the step) for each vector step, as in Experience."""
    rollout: Rollout | None = None
    """Rollout on which the policy is trained after the last step, or None if no transitions are left to train on."""
    report: Callable[[], dict[str, float]] | None = None
    """Function that is called after the update and returns metrics of the training data, as in Experience."""


class ExperienceSource(Protocol):
    """Interface of the sources of experience, which collect experience until every policy has collected all its frames, or until a stop is
    requested."""

    backend: str
    """The env backend that was selected."""

    @property
    def between_rounds(self) -> bool:
        """Whether the state of the source can be saved now, provided that the learner has trained on the last yielded experience."""

    @property
    def unsaved_episodes_reason(self) -> str:
        """Reason why `state_dict` does not contain the unfinished episodes. If `state_dict` contains them, the reason is meaningless."""

    def __iter__(self) -> Iterator[Experience | CollectedRollout]:
        """Yield the experience step by step or as rollouts. The learner trains on each item before it requests the next item."""

    def begin(self) -> None:
        """Prepare for collection, for example reset the envs. To continue from a saved state, call `load_state_dict` before `begin`.

        Raises WorkerFailed if a rollout worker cannot start.
        """

    def recent_busy_spans(self) -> Spans | None:
        """Return the time spans in which each process was busy during a few recent updates, or None if there are no rollout workers."""

    def close(self) -> None:
        """Release envs and processes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of envs and random streams.

        The entry "open" of the returned dict contains the state of the unfinished episodes, or None if unfinished episodes cannot be saved.
        """

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load a state returned by `state_dict`. Returns whether the unfinished episodes continue."""
