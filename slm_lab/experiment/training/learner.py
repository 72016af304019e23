"""One policy of a Session: it learns from experience, makes rows, and is saved and evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from slm_lab.agent.agent import Agent
from slm_lab.agent.replay.replay import Replay
from slm_lab.env.normalize import Normalizers
from slm_lab.env.vec import Env
from slm_lab.experiment.events import Mode, Progress
from slm_lab.experiment.execute.heartbeat import SAVING
from slm_lab.experiment.files.sink import CheckpointKind, RunSink
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.training.evaluate import play
from slm_lab.experiment.training.experience import Beat, Experience, no_beat
from slm_lab.experiment.training.observers.base import (
    COLUMNS,
    SAMPLER_COLUMNS,
    SHARED_COLUMNS,
    Hook,
    Observer,
    ObserverContext,
    ObserverFactory,
    RowListeners,
    hooks,
    info_column,
    mean,
)
from slm_lab.experiment.training.observers.checkpointer import Checkpointer, Playable, SaveTimer
from slm_lab.experiment.training.observers.dev_checks import DevChecks
from slm_lab.experiment.training.observers.frame_progress import ProgressReporter, TimeLimit
from slm_lab.experiment.training.observers.rows import Evaluator, Recorder
from slm_lab.experiment.training.torch_settings import TorchSettings
from slm_lab.lib.clock import Clock
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.log import logger
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.spec import Spec


class PolicyLearner:
    """Learns one policy.

    Args:
        table: number of its tables and checkpoints, see events.Row.
        frames: that it is to collect.
        normalizers: of the envs that it acts in.
        shared: several Sessions train its net.
        torch_settings: with which it learns; by default those of this moment.
    """

    def __init__(
        self,
        spec: Spec,
        table: int,
        agent: Agent,
        clock: Clock,
        frames: int,
        normalizers: Normalizers,
        *,
        shared: bool = False,
        torch_settings: TorchSettings | None = None,
    ) -> None:
        self.spec, self.table, self.agent, self.clock, self.frames = spec, table, agent, clock, frames
        self.normalizers, self.shared = normalizers, shared
        self.window = EpisodeWindow()
        self.torch = torch_settings or TorchSettings()
        self.eval_env: Env | None = None
        """For meta.rigorous_eval."""
        self._eval_state: dict[str, Any] | None = None
        """State of the evaluation env before an evaluation that was broken off."""
        self._update_times: tuple[float, float] | None = None
        self.interrupted = False
        self._observers: dict[str, Observer] = {}
        self.user_observers: list[Observer] = []
        self._on_step: list[Callable[..., None]] = []
        self._on_update: list[Callable[..., None]] = []

    def add_observers(self, factories: Sequence[ObserverFactory]) -> None:
        """Make the user's observers. Raises UserError for what is not an Observer."""
        context = ObserverContext(self.spec, self.table, self.agent, self.clock)
        self.user_observers = [factory(context) for factory in factories]
        for factory, made in zip(factories, self.user_observers, strict=True):
            if not isinstance(made, Observer):
                raise UserError(f"observers: {factory!r} returned {made!r}; expected a slm_lab.Observer")

    @property
    def finished(self) -> bool:
        """It has all its frames."""
        return self.clock.frame >= self.frames

    @property
    def total_reward(self) -> float | None:
        """Mean return of the last episodes; None before the first."""
        return mean(self.window.returns)

    def _end_here(self) -> None:
        """End training at the present frame (meta.max_seconds)."""
        self.frames = min(self.frames, self.clock.frame)

    def take_update_times(self) -> tuple[float, float] | None:
        """Begin and end of the last update, in seconds of perf_counter; None if there was none since the last call."""
        times, self._update_times = self._update_times, None
        return times

    @property
    def recorder(self) -> Recorder:
        recorder = self._observers["recorder"]
        assert isinstance(recorder, Recorder)
        return recorder

    def begin(self, plan: Plan, sink: RunSink, playable: Playable, timer: SaveTimer, stop: Stop, beat: Beat = no_beat) -> None:
        """Make the observers. `playable` returns what it takes to act; `timer` says when the state is saved."""
        self.sink, self.stop, self.beat = sink, stop, beat
        sink.open(self.table, self.clock.frame)
        meta, clock, agent = self.spec.meta, self.clock, self.agent
        sources = (*(SHARED_COLUMNS if self.shared else ()), *(SAMPLER_COLUMNS if meta.sampler else ()))
        extra = (*sources, *agent.diagnostics, *map(info_column, meta.log_info))
        columns = (*COLUMNS, *dict.fromkeys(extra))
        rows = RowListeners([sink])
        recorder = Recorder(clock, agent, meta.log_frequency, rows, columns, self.table, meta.log_info, self.window)
        learns, limit = self.spec.agent.algorithm.learns, meta.max_seconds
        observers: dict[str, Observer] = {}
        if limit is not None:  # before the recorder, so that the time of the last row is not below the limit
            observers["time_limit"] = TimeLimit(clock, limit, self._end_here)
        observers["recorder"] = recorder
        if meta.rigorous_eval:
            observers["evaluator"] = Evaluator(clock, agent, meta.eval_frequency, rows, self.evaluate, columns, self.table)
        observers["progress"] = ProgressReporter(
            clock, lambda *report: sink(Progress(self.table, *report)), learns=learns, max_seconds=limit
        )
        if plan.mode == "dev":
            observers["dev_checks"] = DevChecks(agent.weights, agent.target)
        for observer in self.user_observers:
            name = f"user/{type(observer).__module__}:{type(observer).__qualname__}"
            observers[name if name not in observers else f"{name}/{len(observers)}"] = observer
        best_mode: Mode = "eval" if meta.rigorous_eval else "train"
        observers["checkpointer"] = Checkpointer(playable, clock, timer, best_mode, self._save, meta.checkpoint_frequency)
        self._observers = observers
        self._on_step, self._on_update = self._hooks("on_step"), self._hooks("on_update")
        rows += self._hooks("on_row")

    def step(self, experience: Experience) -> None:
        """Count one vector step and learn from it."""
        clock, agent = self.clock, self.agent
        clock.tick(experience.frames)
        clock.epi += len(experience.episodes)
        metrics: Metrics | None = None
        if experience.transition is not None:
            agent.observe(*experience.transition)
            if agent.ready():
                self.torch.restore()
                begin = perf_counter()
                metrics = agent.update()
                self._update_times = (begin, perf_counter())
            agent.end_step()
        elif experience.rollout is not None:
            self.torch.restore()
            begin = perf_counter()
            metrics = agent.learn(experience.rollout)
            self._update_times = (begin, perf_counter())
        if metrics is not None:
            if experience.report is not None:
                metrics.extra |= experience.report()
            for hook in self._on_update:
                hook(metrics)
        for hook in self._on_step:
            hook(experience.episodes)

    def end(self) -> None:
        """Write the last row."""
        self.interrupted = not self.finished
        if self.interrupted:
            self._call("on_interrupt")
        self._call("on_end")
        logger.info("ends at frame %d%s", self.clock.frame, ", as requested" if self.interrupted else "")

    def evaluate(self) -> list[float]:
        """Return of one episode in each evaluation env; none if a stop is requested before all have ended."""
        assert self.eval_env is not None
        self.eval_env.normalizers.copy_obs_statistics(self.normalizers.state_dict())
        act = self.agent.evaluator(deterministic=self.spec.meta.eval_deterministic)
        before = self.eval_env.state_dict()
        returns = play(self.eval_env, act, self.stop, self.beat)
        if not returns:  # broken off: a continued run evaluates again, from the state before
            self._eval_state = before
        return returns

    def close(self) -> None:
        """Release the evaluation env."""
        if self.eval_env is not None:
            self.eval_env.close()

    def state_dict(self, *, shares: bool = False) -> dict[str, Any]:
        """Return everything learned, counted and observed; with meta.save_replay the replay memory too.

        With `shares`, without what lies in memory that other Sessions share.
        """
        replay = self.agent.replay if self.spec.meta.save_replay else None
        eval_env = self._eval_state or (None if self.eval_env is None else self.eval_env.state_dict())
        return {
            "agent": self.agent.own_state() if shares else self.agent.state_dict(),
            "clock": self.clock.state_dict(),
            "observers": {name: observer.state_dict() for name, observer in self._observers.items()},
            "eval_env": eval_env,
            "replay": None if replay is None else replay.contents(),
        }

    def load_state_dict(self, state: dict[str, Any], *, shares: bool = False) -> None:
        """Load what `state_dict` returned, but for the observers. Raises ValueError or RuntimeError if it does not fit."""
        if shares:
            self.agent.load_own_state(state["agent"])
            self.clock.resume_shared(state["clock"], self.spec.env.num_envs)
        else:
            self.agent.load_state_dict(state["agent"])
            self.normalizers.load_state_dict(state["normalizers"])
            self.clock.load_state_dict(state["clock"])
        if self.agent.replay is not None and state["replay"] is not None:
            self.agent.replay.load_contents(state["replay"])
        elif isinstance(self.agent.replay, Replay):
            self.agent.replay.collect_batch()
        if self.eval_env is not None and state["eval_env"] is not None:
            self.eval_env.load_state_dict(state["eval_env"])
            self.eval_env.resume()  # an evaluation begins with a reset; wrappers may keep more than an episode

    def resume_counts(self, state: dict[str, Any]) -> None:
        """Load counts and replay memory of a process that died, whose net lives on in shared memory."""
        self.clock.resume_shared(state["clock"], self.spec.env.num_envs)
        if self.agent.replay is not None and state["replay"] is not None:
            self.agent.replay.load_contents(state["replay"])
        elif isinstance(self.agent.replay, Replay):
            self.agent.replay.collect_batch()

    def load_observers(self, state: dict[str, Any]) -> None:
        """Load what the observers had counted, and which weights on disk are the best."""
        for name, observer in self._observers.items():
            if name in state:
                observer.load_state_dict(state[name])
        self.checkpointer.resume_best(self.sink.load(self.table, "best"))

    def resume_tables(self, *, rebuild: bool = False) -> None:
        """Continue the tables on disk after their last complete row; with `rebuild`, forget rows that are not there."""
        for observer in self._observers.values():
            if isinstance(observer, Recorder | Evaluator):
                observer.resume(self.sink.rows(self.table, observer.mode), rebuild=rebuild)

    def catch_up(self) -> None:
        """Make up for an evaluation that was broken off."""
        for observer in self._observers.values():
            if isinstance(observer, Evaluator):
                observer.catch_up()

    @property
    def checkpointer(self) -> Checkpointer:
        checkpointer = self._observers["checkpointer"]
        assert isinstance(checkpointer, Checkpointer)
        return checkpointer

    def _save(self, which: CheckpointKind, bundle: dict[str, Any]) -> None:
        self.beat(SAVING)
        self.sink.save(self.table, which, bundle)

    def _hooks(self, name: Hook) -> list[Callable[..., None]]:
        return hooks(list(self._observers.values()), name)

    def _call(self, name: Hook) -> None:
        for hook in self._hooks(name):
            hook()
