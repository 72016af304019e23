"""Session: policies learn from one source of experience."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Self

import torch

from slm_lab.agent.net.matmul import resolve_matmul
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.env.vec import Env
from slm_lab.experiment.collect.local import LocalSource
from slm_lab.experiment.collect.workers.source import WorkerSource
from slm_lab.experiment.events import CheckpointWritten, RowValues
from slm_lab.experiment.execute.heartbeat import CLOSING, SAVING
from slm_lab.experiment.execute.local.failures import WorkerFailed
from slm_lab.experiment.execute.local.interrupt import Blocked
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.sink import MemorySink, RunSink
from slm_lab.experiment.plan import Plan, Stop, check_spec
from slm_lab.experiment.session.build import SessionBuilder, SessionProcess
from slm_lab.experiment.session.session_state import playable, session_state
from slm_lab.experiment.training.experience import ExperienceSource
from slm_lab.experiment.training.init_from import init_weights
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.experiment.training.observers.base import ObserverFactory
from slm_lab.experiment.training.observers.checkpointer import SaveTimer
from slm_lab.experiment.training.observers.user import check_factories
from slm_lab.experiment.training.population import Population
from slm_lab.lib.clock import Clock
from slm_lab.lib.garbage import freeze_objects
from slm_lab.lib.log import logger, notice
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.models.spec import Spec


@dataclass
class SessionResult:
    """How a Session ended."""

    index: int
    frame: int = 0
    interrupted: bool = False
    rows: list[RowValues] = field(default_factory=list)
    """Training rows of the first policy, see observers.COLUMNS; empty if a sink took them."""
    eval_rows: list[RowValues] = field(default_factory=list)
    """Evaluation rows, if meta.rigorous_eval is on."""


_ALONE = SessionProcess()


class Session:
    """Session number `index` of a trial: a source of experience, and a learner for each policy.

    `Session(spec).run()` keeps everything in memory: rows in its result, the trained agent in `agent`. A sink takes rows and state
    instead. `build()` makes envs and agents and writes nothing.

    Args:
        observers: subclasses of slm_lab.Observer (or functions that make one), beside those of meta.observers.
        process: what its process gives it.
    """

    def __init__(
        self,
        spec: Spec,
        index: int = 0,
        plan: Plan | None = None,
        *,
        trial: int = 0,
        stop: Stop | None = None,
        sink: RunSink | None = None,
        observers: Sequence[ObserverFactory] = (),
        process: SessionProcess = _ALONE,
    ) -> None:
        check_spec(spec)
        self.spec, self.index, self.plan, self.trial = spec, index, plan or Plan(), trial
        self._factories = [*self.plan.observers, *check_factories(observers)]
        self.stop, self.process = stop or Stop(), process
        self.sink = self._given_sink = sink
        self._timer = SaveTimer(spec.meta.save_interval)
        self._loaded: dict[str, Any] | None = None
        """The state that training continues from."""
        self._shared_loaded = False
        """The arrays that several Sessions share were restored."""
        self.source: ExperienceSource | None = None
        self.blocked = False
        """An env did not return: nothing more can be asked of it."""
        self._closing: list[Callable[[], None]] = []
        """What `close` calls, last first."""
        self.built = self._builder()

    def _builder(self) -> SessionBuilder:
        return SessionBuilder(self.spec, self.index, self.plan, self.trial, self.stop, self.process, self._closing)

    @property
    def learners(self) -> list[PolicyLearner]:
        """The learner of each policy."""
        return self.built.learners

    @property
    def info(self) -> EnvInfo:
        """What the env is like."""
        return self.built.info

    @property
    def device(self) -> str:
        """Where the nets compute."""
        return self.built.device

    @property
    def agent(self) -> Any:
        """The agent of the first policy."""
        return self.learners[0].agent

    @property
    def clock(self) -> Clock:
        """The clock of the first policy."""
        return self.learners[0].clock

    @property
    def env(self) -> Env:
        """The env of a Session that steps its own."""
        assert isinstance(self.source, LocalSource)
        return self.source.env

    @property
    def choices(self) -> dict[str, str | int]:
        """What was chosen for this machine: the env backend, what computes matrix products, and the threads of an update. It is recorded in
        meta.run."""
        assert self.source is not None
        matmul = resolve_matmul(self.spec.meta.matmul, self.device)
        return {"backend": self.source.backend, "matmul": matmul, "threads": self.agent.threads}

    def build(self) -> Self:
        """Make envs, agents and, with meta.sampler, rollout workers. Raises SpecError or UserError for what the user can correct."""
        self.built, self.blocked = self._builder(), False
        store = self.process.store
        try:
            self.built.build(self._factories)
            self.spec, self.source = self.built.spec, self.built.source
            if not self.process.resumed and (store is None or store.fresh):
                self.init_weights()
                if store is not None:
                    store.publish()
        except BaseException:
            self.close()
            raise
        return self

    def run(self, sink: RunSink | None = None) -> SessionResult:
        """Train, then release envs and processes; see `train`."""
        try:
            return self.train(sink)
        finally:
            self.close()

    def train(self, sink: RunSink | None = None) -> SessionResult:
        """Train until every policy has its frames, or until a stop is requested.

        Raises WorkerFailed, Blocked (an env did not return in time) or what the env raises. If a worker failed or an env blocks, what
        was learned until then is saved first.
        """
        if not self._closing:  # not built yet, or closed after an earlier run
            self.build()
        assert self.source is not None
        memory = MemorySink()
        self.sink = sink or self._given_sink or memory
        freeze_objects()
        try:
            self.begin()
            source, learners, timer = self.source, self.learners, self._timer
            for experience in source:
                learners[experience.policy].step(experience)
                if timer.wanted and source.between_rounds:
                    self.save()
        except (WorkerFailed, Blocked) as error:
            self._note_frame(error)
            self.blocked = isinstance(error, Blocked)
            self.end()
            if isinstance(error, WorkerFailed) or not self.stop.requested:
                raise
            notice(f"{error}; checkpoint saved without the env state")
        except BaseException as error:
            self._note_frame(error)
            raise
        else:
            self.end()
        finally:
            gc.unfreeze()
        first = self.learners[0]
        interrupted = any(learner.interrupted for learner in self.learners)
        rows, eval_rows = memory.table_rows(first.table, "train"), memory.table_rows(first.table, "eval")
        return SessionResult(self.index, first.clock.frame, interrupted, rows, eval_rows)

    def _note_frame(self, error: BaseException) -> None:
        """Tell where training was when it failed; see failures.cause."""
        frame = self.clock.frame + self.info.num_envs * (
            isinstance(error, InvalidOutcome) and error.call == "step"
        )  # of the step that raised it
        where = "" if isinstance(error, InvalidOutcome) else f" of {self.spec.env.name}"
        error.add_note(f"(at frame {frame}{where})")

    def load(self, bundle: dict[str, Any] | None, shared: dict[str, Any] | None = None) -> None:
        """Load the state that training is to continue from, after `build`. Raises ValueError, RuntimeError or KeyError if it does not fit.

        Args:
            bundle: the Session's last checkpoint; None if it had none.
            shared: the last checkpoint of the arrays that several Sessions share, if the Session has a store.
        """
        assert self.source is not None
        if self.process.store is not None:
            assert shared is not None
            saved = {name: tensor.numpy() for name, tensor in shared["arrays"].items()}
            self.process.store.restore(saved)
            self._shared_loaded = True
            bundle = shared["session"] or bundle
        self._loaded = bundle
        if bundle is None:
            self.clock.resume_shared({}, self.spec.env.num_envs)
            return
        for learner, saved in zip(self.learners, bundle["policies"], strict=True):
            learner.load_state_dict(saved, shares=self.process.shares)
        if self.process.store is not None:
            self.process.store.publish()
        if bundle["source"] is not None and not self.source.load_state_dict(bundle["source"], statistics=not self.process.shares):
            logger.info("open episodes are dropped; new ones begin")

    def init_weights(self) -> None:
        """Start from the weights of another run, if meta.init_from names one. Raises UserError if there are none that fit."""
        if self.spec.meta.init_from is not None:
            init_weights(self.learners, self.spec.meta.init_from, self.plan.data_dir)

    def begin(self) -> None:
        """Start the source, observers and clocks; continue from the state that was loaded, with the rows on disk cut back to it."""
        assert self.source is not None
        assert self.sink is not None
        loaded, sink = self._loaded, self.sink
        logger.info("begins: index %d, backend %s, device %s, frame %d", self.index, self.source.backend, self.device, self.clock.frame)
        if self._shared_loaded:
            self.agent.pull()
            self.learners[0].normalizers.pull()
        same_moment = loaded is not None and loaded["policies"][0]["clock"]["frame"] == self.clock.frame
        if self.process.resumed:
            sink.rewind(self.index, loaded["tables"] if loaded is not None and same_moment else None, self.clock.frame or -1)
        for number, learner in enumerate(self.learners):
            learner.begin(self.plan, sink, partial(playable, self.built, learner), self._timer, self.stop, self.process.beat)
            if loaded is not None:
                learner.load_observers(loaded["policies"][number]["observers"])
        if self.process.restart:
            self._restore_after_restart()
        sampler = self.spec.meta.sampler
        if sampler is not None and sampler.pbt is not None:
            assert isinstance(self.source, WorkerSource)
            population = None if loaded is None else loaded["population"]
            self.source.population = Population(sampler.pbt, self.learners, self.built.seeds(0).update, self.index, sink, population)
        self.source.begin()
        for learner in self.learners:
            learner.clock.begin()  # before the tables, since resume_tables may write a row, which contains the wall time
            if self.process.restart:
                learner.resume_tables()
            elif self._shared_loaded and not same_moment:
                learner.resume_tables(rebuild=True)
        if loaded is not None and not self.process.shares:
            state.set_rng_state(loaded["rng"], self.device)
            for learner in self.learners:
                learner.catch_up()
        self._loaded = None  # its arrays are read from a file that the next checkpoint replaces
        self._timer.restart()

    def _restore_after_restart(self) -> None:
        """Load counts and observers from the last checkpoint of the process that died, if there is one. The net is in shared memory."""
        assert self.sink is not None
        (learner,) = self.learners
        bundle = self.sink.load(learner.table, "last")
        if bundle is not None:
            learner.resume_counts(bundle["policies"][0])
            learner.load_observers(bundle["policies"][0]["observers"])

    def state_dict(self) -> dict[str, Any]:
        """Return everything stateful, in tensors and plain Python."""
        assert self.sink is not None
        return session_state(self.built, self.sink, blocked=self.blocked)

    def save(self, bundle: dict[str, Any] | None = None, *, done: bool = False) -> None:
        """Save the state of the Session, or a `bundle` of it. `done`: no frame is left to collect, and the last rows are written."""
        assert self.sink is not None
        begin = perf_counter()
        self.process.beat(SAVING)
        for learner in self.learners:  # first, since the state says which value is the best
            learner.checkpointer.save_best()
        ends = bundle is not None
        bundle = {**(bundle or self.state_dict()), "done": done}
        self.sink.save(self.learners[0].table, "last", bundle)
        if self.process.store is not None:
            with self.process.store.saving(None if ends else self._timer.interval / 2) as due:
                if due:
                    arrays = {name: torch.from_numpy(array) for name, array in self.process.store.snapshot().items()}
                    own = None if self.process.shares else bundle
                    self.sink.save_shared({"version": state.VERSION, "arrays": arrays, "session": own, "spec": bundle["spec"]})
        for learner in self.learners:
            self.sink(CheckpointWritten(learner.table, learner.clock.frame))
        self._timer.restart(perf_counter() - begin)

    def end(self) -> None:
        """Write the last rows and the state, which does not include them: a continued run has its own rows there."""
        assert self.sink is not None
        bundle = self.state_dict()
        try:
            for learner in self.learners:
                learner.end()
        finally:
            self.save(bundle, done=all(learner.finished for learner in self.learners))
        if isinstance(self.source, WorkerSource):
            self.sink.timeline(self.index, self.source.utilization.window())

    def close(self) -> None:
        """Release envs and processes. An env that fails to close, or not in time, is left behind, with a notice."""
        while self._closing:
            self.process.beat(CLOSING)
            close_env(self._closing.pop())
