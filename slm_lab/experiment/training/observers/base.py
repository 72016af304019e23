"""The interface of observers, and the columns of the rows that they produce."""

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
"""Mean return of the policy as it is now, its standard error, and the number of episodes, see EpisodeWindow.current."""
EPISODE_COLUMNS = ("epi_len", "epi_len_max", "epi_truncated")
"""Mean and largest length, in steps, of the episodes of this Session that ended since its previous row; the share that was truncated."""
COLUMNS = (
    *("frame", "epi", "t", "wall_t", "fps", "opt_step", "total_reward", "total_reward_ma", "epi_new", "return_new"),
    *CURRENT_COLUMNS,
    *EPISODE_COLUMNS,
    *("loss", "lr", "grad_norm", "entropy", "explore_var", "entropy_coef"),
)
"""Columns of every table. total_reward is the mean return of the last 100 episodes; epi_new and return_new are the number and the mean
return of the episodes since the previous row; current_return, current_return_se and current_epi are those of the most recent episodes. All
cover the episodes of all Sessions that train the net. In an evaluation row, they cover the episodes of that evaluation."""
SHARED_COLUMNS = ("global_frame", "worker_reward", "staleness", "lock_wait", "bytes_pushed", "bytes_pulled")
"""Further columns if several Sessions train one net: frames of all Sessions; mean return of the last 100 episodes of this Session; means
per update of the number of global updates by other Sessions between pull and push, of the milliseconds of waiting for the lock, and of the
bytes sent to the parameter server and received from it (0 in shared memory)."""
SAMPLER_COLUMNS = (
    *("lag_min", "lag_mean", "lag_max", "lag_masked"),
    *("rollout_busy", "inference_busy", "learner_busy"),
)
"""Further columns with rollout workers: policy lag of the data trained on, in gradient steps, and the share of transitions above
max_policy_lag; shares of the time in which workers stepped envs, actions were computed, and the learner trained."""
SELF_PLAY_COLUMNS = ("elo", "elo_se", "score_random", "score_previous")
"""Further columns in self-play: the Elo rating of the newest snapshot, its standard error, and its mean scores (1 for a won game, 0.5 for a
drawn one) against random actions and the snapshot before it; then a column for each fixed opponent, see score_column."""
MEASURED = ("wall_t", "fps", "lock_wait", "rollout_busy", "inference_busy", "learner_busy")
"""Columns of times and speeds, which differ between runs that are otherwise equal."""


def info_column(key: str) -> str:
    """Return the column of an entry of the env's `info` (meta.track_info)."""
    return f"info_{key.replace(':', '_')}"


def score_column(path: str) -> str:
    """Return the column of the mean score against a fixed opponent of meta.self_play, "package.module:Class"."""
    return f"score_{path.rpartition(':')[2]}"


def schedule_column(key: str) -> str:
    """Return the column of a key of env.schedule: the mean of its values in the episodes since the previous row."""
    return f"env_{key}"


@dataclass(frozen=True)
class ObserverContext:
    """Context passed to a user observer."""

    spec: Spec
    """The spec of the run."""
    table: int
    """Number of the Session; with P policies, s · P + p for policy p of Session s."""
    agent: Agent
    """The agent that learns; must not be changed."""
    clock: Clock
    """Frames, episodes, optimizer steps and wall time."""


ObserverFactory = Callable[[ObserverContext], "Observer"]
"""A subclass of Observer, or another callable that returns an Observer."""


class Observer:
    """Hooks that a Session calls; an observer overrides those that it needs.

    A user's own observer is named in the spec (meta.observers: ["package.module:Class"]) or passed to Session or Trial (observers=[Class]).
    One is created for each policy that a Session trains, before the first step. An error in an observer ends the Session as
    failed.

    >>> class Printer(slm_lab.Observer):
    ...     def on_row(self, row):
    ...         print(self.context.table, row.mode, row.values["frame"], row.values["total_reward"])
    """

    def __init__(self, context: ObserverContext) -> None:
        self.context = context

    def on_step(self, episodes: list[Episode]) -> None:
        """Called after each vector step, and after the update that may follow the step, with the episodes that ended in the step."""

    def on_update(self, metrics: Metrics) -> None:
        """Called after each update."""

    def on_row(self, row: Row) -> None:
        """Called with each row."""

    def on_interrupt(self) -> None:
        """Called before on_end if a Session ends early."""

    def on_end(self) -> None:
        """Called after the last step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a continued run needs: tensors and plain Python objects."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


Hook = Literal["on_step", "on_update", "on_row", "on_interrupt", "on_end"]


def hooks(observers: Sequence[Observer], name: Hook) -> list[Callable[..., None]]:
    """Return the hook `name` of each observer that overrides it."""
    return [getattr(observer, name) for observer in observers if getattr(type(observer), name) is not getattr(Observer, name)]


def mean(values: Collection[float]) -> float | None:
    """Return the mean; None for no values."""
    return math.fsum(values) / len(values) if values else None


class Mean:
    """Mean of the values since the last `drain`."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    def drain(self) -> float | None:
        """Return the mean (None for no values) and reset it."""
        mean = self.total / self.count if self.count else None
        self.total, self.count = 0.0, 0
        return mean


class Largest(Mean):
    """Largest of the values since the last `drain`, in the form of a mean of one value."""

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = max(self.total, value) if self.count else value, 1


def load_observers(spec: Spec) -> list[ObserverFactory]:
    """Import the classes of meta.observers. Raises SpecError with a problem for each that cannot be imported or is not an Observer."""
    found: list[ObserverFactory] = []
    problems = []
    for index, name in enumerate(spec.meta.observers):
        try:
            found.append(import_class(name, Observer))
        except ExtensionError as error:
            problems.append(Problem(f"meta.observers[{index}]", str(error)))
    if problems:
        raise SpecError(spec.name, problems)
    return found


def check_factories(observers: Sequence[ObserverFactory], *, sent: bool = False) -> tuple[ObserverFactory, ...]:
    """Return the factories as a tuple. Raises UserError for one that makes no Observer or, with `sent`, cannot be sent to processes."""
    for one in observers:
        if not callable(one) or (isinstance(one, type) and not issubclass(one, Observer)):
            raise UserError(f"observers: {one!r} is not a subclass of slm_lab.Observer; expected the class, or a function that makes one")
        if sent:
            try:
                pickle.dumps(one)
            except Exception as error:
                raise UserError(f"observers: {one!r} cannot be sent to the processes of the sessions: {error}") from None
            if getattr(one, "__module__", "") == "__main__":
                where = "a script or notebook, which the processes of the sessions do not import"
                raise UserError(f"observers: {one!r} is defined in {where}; put it in a module")
    return tuple(observers)
