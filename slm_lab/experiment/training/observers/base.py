"""The interface of observers, and the names of the columns of table rows."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slm_lab.experiment.events import Row
from slm_lab.experiment.plan import UserError
from slm_lab.lib.records import Episode, Metrics
from slm_lab.spec.models.base import ExtensionError, import_class
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

if TYPE_CHECKING:
    from slm_lab.agent.agent import Agent
    from slm_lab.lib.clock import Clock


EmitRow = Callable[[Row], None]

CURRENT_COLUMNS = ("current_return", "current_return_se", "current_epi")
"""Columns with the mean return of the current policy, the standard error of the mean, and the number of episodes from which the mean and
the standard error are computed (see EpisodeWindow.current_return)."""
EPISODE_COLUMNS = ("epi_len", "epi_len_max", "epi_truncated")
"""Columns about the episodes of this Session that ended since the previous row: mean length in steps, maximum length in steps, and share of
truncated episodes."""
COLUMNS = (
    *("frame", "epi", "t", "wall_t", "fps", "opt_step", "total_reward", "total_reward_ma", "epi_new", "return_new"),
    *CURRENT_COLUMNS,
    *EPISODE_COLUMNS,
    *("loss", "lr", "grad_norm", "entropy", "explore_var", "entropy_coef"),
)
"""Columns of every table. The column total_reward is the mean return of the last 100 episodes. The columns epi_new and return_new are the
number and the mean return of the episodes since the previous row. In a training row, total_reward, epi_new, return_new and the
CURRENT_COLUMNS are computed from the episodes of all Sessions that train the net. In an evaluation row, total_reward, epi_new, return_new
and the CURRENT_COLUMNS are computed from the episodes of the evaluation."""
SHARED_COLUMNS = ("global_frame", "worker_reward", "staleness", "lock_wait", "bytes_pushed", "bytes_pulled")
"""Additional table columns if several Sessions train one net. The column global_frame is the number of frames of all Sessions, and
worker_reward is the mean return of the last 100 episodes of this Session. The columns staleness, lock_wait, bytes_pushed and bytes_pulled
are means per update: updates by other Sessions between pull and push, milliseconds of waiting for the lock, bytes sent to the parameter
server, and bytes received from the parameter server (0 in shared memory)."""
SAMPLER_COLUMNS = (
    *("lag_min", "lag_mean", "lag_max", "lag_masked"),
    *("rollout_busy", "inference_busy", "learner_busy"),
)
"""Additional table columns with rollout workers. lag_min, lag_mean and lag_max are the policy lag of the training data in gradient steps,
and lag_masked is the fraction of transitions whose policy lag exceeds max_policy_lag. rollout_busy, inference_busy and learner_busy are the
fractions of the time in which workers stepped envs, actions were computed, and the learner trained, respectively."""
SELF_PLAY_COLUMNS = ("elo", "elo_se", "score_random", "score_previous")
"""Additional table columns in self-play: the Elo rating of the newest snapshot, the standard error of the rating, and the snapshot's mean
scores (1 for a won game, 0.5 for a drawn game) against random actions and against the previous snapshot. In self-play, a table also has a
column for each fixed opponent (see score_column)."""
MEASURED = ("wall_t", "fps", "lock_wait", "rollout_busy", "inference_busy", "learner_busy")
"""Columns with times and speeds, whose values differ even between runs whose other results are equal."""


def info_column(key: str) -> str:
    """Return the name of the table column for an entry of the env's `info` (meta.track_info)."""
    return f"info_{key.replace(':', '_')}"


def score_column(path: str) -> str:
    """Return the name of the table column with the mean score against a fixed opponent of meta.self_play.

    Args: path: import path of the opponent, "package.module:Class".
    """
    return f"score_{path.rpartition(':')[2]}"


def schedule_column(key: str) -> str:
    """Return the name of the table column for a key of env.schedule. The column contains the key's mean value over the episodes since the
    previous row."""
    return f"env_{key}"


@dataclass(frozen=True)
class ObserverContext:
    """Objects that a user's observer may access."""

    spec: Spec
    """The spec of the run."""
    table: int
    """Number of the policy's table: s · P + p for policy p of Session s if each Session trains P policies."""
    agent: Agent
    """The agent that learns. An observer must not change the agent."""
    clock: Clock
    """Counters of frames, episodes, optimizer steps and wall time."""


ObserverFactory = Callable[[ObserverContext], "Observer"]
"""A subclass of Observer, or another callable that returns an Observer."""


class Observer:
    """Base class of observers. A Session calls the hooks (the methods `on_…`), and a subclass overrides the hooks that it needs.

    To use an observer, name its class in the spec (meta.observers: ["package.module:Class"]) or pass it to Session or Trial
    (observers=[Class]). Before the first step of training, one instance of the observer is created for each policy that a Session trains.
    If an observer raises an error, the Session ends as failed.

    >>> class Printer(slm_lab.Observer):
    ...     def on_row(self, row):
    ...         print(self.context.table, row.mode, row.values["frame"], row.values["total_reward"])
    """

    def __init__(self, context: ObserverContext) -> None:
        self.context = context

    def on_step(self, episodes: list[Episode]) -> None:
        """Called after each vector step, and after the update that the step may cause.

        Args: episodes: episodes that ended in the step.
        """

    def on_update(self, metrics: Metrics) -> None:
        """Called after each update of the agent."""

    def on_row(self, row: Row) -> None:
        """Called with each training row and each evaluation row."""

    def on_interrupt(self) -> None:
        """Called before `on_end` if a Session ends early because a stop was requested."""

    def on_end(self) -> None:
        """Called after the last step of training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the observer that a continued run needs, as tensors and plain Python objects."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state returned by `state_dict`."""


Hook = Literal["on_step", "on_update", "on_row", "on_interrupt", "on_end"]


def hooks(observers: Sequence[Observer], name: Hook) -> list[Callable[..., None]]:
    """Return the bound method `name` of each observer that overrides the hook `name`."""
    return [getattr(observer, name) for observer in observers if getattr(type(observer), name) is not getattr(Observer, name)]


def mean(values: Collection[float]) -> float | None:
    """Return the mean of the values, or None if there are no values."""
    return math.fsum(values) / len(values) if values else None


class Mean:
    """Mean of the values that were added since the last call of `take_mean`."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    def take_mean(self) -> float | None:
        """Return the mean of the added values, or None if no value was added. The values are then forgotten."""
        mean = self.total / self.count if self.count else None
        self.total, self.count = 0.0, 0
        return mean


class RunningMax(Mean):
    """Maximum of the values that were added since the last call of `take_mean`, stored as the mean of a single value."""

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = max(self.total, value) if self.count else value, 1


def load_observers(spec: Spec) -> list[ObserverFactory]:
    """Import and return the observer classes that meta.observers names.

    Raises SpecError with a problem for each class that cannot be imported or is not an Observer.
    """
    factories: list[ObserverFactory] = []
    problems = []
    for index, name in enumerate(spec.meta.observers):
        try:
            factories.append(import_class(name, Observer))
        except ExtensionError as error:
            problems.append(Problem(f"meta.observers[{index}]", str(error)))
    if problems:
        raise SpecError(spec.name, problems)
    return factories


def check_factories(observers: Sequence[ObserverFactory], *, sent: bool = False) -> tuple[ObserverFactory, ...]:
    """Check observer factories, and return the factories as a tuple.

    Raises UserError if a factory does not create an Observer, or if a factory must be sent but cannot be sent.

    Args: sent: whether the factories must be sent to other processes.
    """
    for factory in observers:
        if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, Observer)):
            expected = "expected such a class, or a function that returns an Observer"
            raise UserError(f"observers: {factory!r} is not a subclass of slm_lab.Observer; {expected}")
        if sent:
            try:
                pickle.dumps(factory)
            except Exception as error:
                raise UserError(f"observers: {factory!r} cannot be sent to the processes of the sessions: {error}") from None
            if getattr(factory, "__module__", "") == "__main__":
                where = "a script or notebook, which the processes of the sessions do not import"
                raise UserError(f"observers: {factory!r} is defined in {where}; put it in a module")
    return tuple(observers)
