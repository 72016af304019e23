"""The Session, which trains one or several policies on experience from one source."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Self

from slm_lab.experiment.events import RowValues
from slm_lab.experiment.execute.local.interrupt import UserCodeBlocked
from slm_lab.experiment.execute.local.user_code import WorkerFailed
from slm_lab.experiment.files.bundle import set_rng_state
from slm_lab.experiment.files.sink import MemorySink, RunSink
from slm_lab.experiment.plan import Plan, check_spec
from slm_lab.experiment.session.build import SessionContext, SessionParts
from slm_lab.experiment.session.restore import PendingRestore, load_initial_weights, restore_session, save_session, state_dict
from slm_lab.experiment.training.experience import ExperienceSource
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.experiment.training.observers.base import ObserverFactory
from slm_lab.lib.clock import Clock
from slm_lab.lib.log import logger, notice
from slm_lab.lib.process import freeze_objects
from slm_lab.spec.models.spec import Spec


@dataclass
class SessionResult:
    """Result of a Session."""

    index: int
    frame: int = 0
    interrupted: bool = False
    rows: list[RowValues] = field(default_factory=list)
    """Training rows of the first policy (see observers.base.COLUMNS), or [] if the rows were written to a given sink."""
    eval_rows: list[RowValues] = field(default_factory=list)
    """Evaluation rows of the first policy, or [] if the rows were written to a given sink."""


class Session:
    """One training run of a spec with one random seed.

    A Session consists of a source of experience and a learner for each policy.

    `Session(spec).run()` writes no files. The returned SessionResult contains the rows, and the attribute `agent` is the trained agent. If
    a sink is given, rows and checkpoints are written to the sink, and the SessionResult contains no rows. The method `build` creates envs
    and agents and writes no files.

    Args:
        index: index of the Session in its trial, which determines the random seed.
        plan: options of the run, such as the device.
        trial: index of the trial.
        sink: object to which rows and checkpoints are written, or None to keep rows in memory.
        observers: subclasses of slm_lab.Observer, or functions that return an Observer, in addition to the observers in meta.observers.
        context: objects that the process provides, such as the stop request, the shared arrays and the run to continue.
    """

    def __init__(
        self,
        spec: Spec,
        index: int = 0,
        plan: Plan | None = None,
        *,
        trial: int = 0,
        sink: RunSink | None = None,
        observers: Sequence[ObserverFactory] = (),
        context: SessionContext | None = None,
    ) -> None:
        check_spec(spec)
        self.spec, self.index, self.plan, self.trial = spec, index, plan or Plan(), trial
        self.context = context or SessionContext()
        self.sink = self._given_sink = sink
        self._observers = observers
        self.parts = self._new_parts()
        self.pending_restore = PendingRestore()
        self.blocked = False
        """Whether an env did not return in time, so that the envs cannot be used any more."""

    def _new_parts(self) -> SessionParts:
        return SessionParts(self.spec, self.index, self.plan, self.trial, self.context, self._observers)

    @property
    def learners(self) -> list[PolicyLearner]:
        """The learner of each policy."""
        return self.parts.learners

    @property
    def agent(self) -> Any:
        """The agent of the first policy, which is available after `build`."""
        return self.learners[0].agent

    @property
    def clock(self) -> Clock:
        """The clock of the first policy, which counts frames, episodes and optimizer steps."""
        return self.learners[0].clock

    @property
    def source(self) -> ExperienceSource:
        """The source of experience, which is available after `build`."""
        assert self.parts.source is not None
        return self.parts.source

    def build(self) -> Self:
        """Build envs, agents and, with meta.sampler, rollout workers, and load the state or the weights from which training starts.

        Raises SpecError or UserError for errors that the user can correct.
        """
        self.parts, self.pending_restore, self.blocked = self._new_parts(), PendingRestore(), False
        try:
            self.parts.build()
            self.spec = self.parts.spec
            if self.context.resumed is not None:
                restore_session(self, self.context.resumed)
            elif not self.context.joins_running_sessions:
                load_initial_weights(self)
        except BaseException:
            self.close()
            raise
        return self

    def run(self, sink: RunSink | None = None) -> SessionResult:
        """Train the policies (see `train`), and then release envs and processes."""
        try:
            return self.train(sink)
        finally:
            self.close()

    def train(self, sink: RunSink | None = None) -> SessionResult:
        """Train until every policy has collected its frames, or until a stop is requested.

        Raises WorkerFailed if a rollout worker has failed, UserCodeBlocked if an env did not return in time, or any exception that an env
        raises. The training state is saved before WorkerFailed or UserCodeBlocked is raised.
        """
        if not self.parts.is_open:  # not built yet, or closed after an earlier run
            self.build()
        memory = MemorySink()
        self.sink = sink or self._given_sink or memory
        freeze_objects()
        learners = self.learners
        try:
            self.begin()
            for learner in learners:
                learner.agent.set_rare_checks(not learner.runs_user_code)
            self._train()
        except (WorkerFailed, UserCodeBlocked) as error:
            learners[0].add_frame_note(error, self.parts.env_info.frames)
            self.blocked = isinstance(error, UserCodeBlocked)
            self.end()
            if isinstance(error, WorkerFailed) or not self.context.stop.requested:
                raise
            notice(f"{error}; checkpoint saved without the env state")
        except BaseException as error:
            learners[0].add_frame_note(error, self.parts.env_info.frames)
            raise
        else:
            self.end()
        finally:
            gc.unfreeze()
            for learner in learners:
                learner.agent.set_rare_checks(False)
        first = self.learners[0]
        interrupted = any(learner.interrupted for learner in self.learners)
        rows, eval_rows = memory.table_rows(first.table, "train"), memory.table_rows(first.table, "eval")
        return SessionResult(self.index, first.clock.frame, interrupted, rows, eval_rows)

    def _train(self) -> None:
        """Train on all experience of the source, and log the times that were spent on collecting and on learning."""
        source, learners, timer = self.source, self.learners, self.parts.timer
        collecting = learning = 0.0
        begin = perf_counter()
        for experience in source:
            arrived = perf_counter()
            collecting += arrived - begin
            learners[experience.policy].step(experience)
            if timer.wanted and source.between_rounds:
                save_session(self)
            begin = perf_counter()
            learning += begin - arrived
        logger.info("time: %.2f s collecting, %.2f s learning", collecting, learning)

    def begin(self) -> None:
        """Start the source, the observers and the clocks. If the Session is continued, also restore the tables and random generators."""
        assert self.sink is not None
        source, sink, loaded = self.source, self.sink, self.pending_restore
        logger.info("begins: index %d, backend %s, device %s, frame %d", self.index, source.backend, self.parts.device, self.clock.frame)
        if loaded.truncate_tables:
            sink.truncate_tables(self.index, loaded.tables, self.clock.frame or -1)
        for learner in self.learners:
            learner.begin(self.plan.mode, sink, self.context.stop, self.context.beat)
        if self.parts.population is not None:
            self.parts.population.begin(sink)
        if self.parts.self_play is not None:
            self.parts.self_play.begin(sink)
        source.begin()
        for learner in self.learners:
            learner.clock.begin()  # before resume_tables, which may write a row with the wall time
            if loaded.read_tables:
                learner.resume_tables(rebuild=loaded.truncate_tables)
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self.parts.device)
        for learner in self.learners:
            learner.repeat_interrupted_evaluation()
        self.parts.timer.restart()
        self.pending_restore = PendingRestore()

    def end(self) -> None:
        """Write the last rows and save the state of the Session.

        The saved state does not include the last rows, since a run that continues from the saved state writes new rows at the same frame.
        """
        assert self.sink is not None
        bundle = state_dict(self)
        try:
            for learner in self.learners:
                learner.end()
        finally:
            save_session(self, bundle, done=all(learner.has_finished for learner in self.learners))
        if (spans := self.source.recent_busy_spans()) is not None:
            self.sink.save_timeline(self.index, spans)

    def close(self) -> None:
        """Release envs and processes. If an env fails to close or does not close in time, the env is abandoned with a notice."""
        self.parts.close()
