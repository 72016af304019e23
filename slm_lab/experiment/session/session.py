"""Session: policies learn from one source of experience."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from pydantic_core import PydanticSerializationError
from threadpoolctl import threadpool_limits

from slm_lab.agent.agent import Agent
from slm_lab.agent.build import build_agent, check_arithmetic
from slm_lab.agent.net.matmul import resolve_matmul
from slm_lab.agent.replay.replay import check_replay_memory
from slm_lab.env.make import make_env
from slm_lab.env.normalize import Normalizers, make_normalizers
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.env.vec import Env
from slm_lab.experiment.collect.local import LocalSource
from slm_lab.experiment.collect.workers.source import WorkerSource
from slm_lab.experiment.collect.workers.worker import log_info
from slm_lab.experiment.collect.workers.worker_pool import OpenPool, WorkerPool, open_pool
from slm_lab.experiment.events import CheckpointWritten, RowValues
from slm_lab.experiment.execute.heartbeat import BUILDING, CLOSING, SAVING
from slm_lab.experiment.execute.local.failures import WorkerFailed
from slm_lab.experiment.execute.local.fork_server import server_in_use, use_start_method
from slm_lab.experiment.execute.local.interrupt import Blocked
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.sink import MemorySink, RunSink
from slm_lab.experiment.plan import Plan, Stop, UserError, check_spec
from slm_lab.experiment.training.env_check import check_env
from slm_lab.experiment.training.experience import Beat, ExperienceSource, no_beat
from slm_lab.experiment.training.init_from import init_weights
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.experiment.training.observers.base import ObserverFactory
from slm_lab.experiment.training.observers.checkpointer import SaveTimer
from slm_lab.experiment.training.observers.user import check_factories, load_observers
from slm_lab.experiment.training.population import Population
from slm_lab.experiment.training.resolve import completed, resolve_inference, select_device, with_seed
from slm_lab.experiment.training.torch_settings import TorchSettings
from slm_lab.lib.clock import Clock
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.garbage import freeze_objects
from slm_lab.lib.limits import cores
from slm_lab.lib.log import logger, notice
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds, draw_seed, session_seeds
from slm_lab.lib.store import Shareable, Store
from slm_lab.spec.loader import dump_spec
from slm_lab.spec.spec import Spec


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


class Session:
    """Session number `index` of a trial: a source of experience, and a learner for each policy.

    `Session(spec).run()` keeps everything in memory: rows in its result, the trained agent in `agent`. A sink takes rows and state
    instead. `build()` makes envs and agents and writes nothing.

    Args:
        store: shared arrays of the Sessions that train one net (meta.distributed); without one a Session trains a net of its own.
        observers: subclasses of slm_lab.Observer (or functions that make one), beside those of meta.observers.
        restart: number of processes that died before this one in the same role.
        resumed: the run has been started before: either `load` or `init_weights` is to be called after `build`, and the tables in the
            sink are continued from the loaded state, or else removed.
        beat: called with each phase that begins, see process.heartbeat.
        pool: starts the rollout workers.
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
        store: Store | None = None,
        restart: int = 0,
        resumed: bool = False,
        beat: Beat = no_beat,
        observers: Sequence[ObserverFactory] = (),
        pool: OpenPool = open_pool,
    ) -> None:
        check_spec(spec)
        self.spec, self.index, self.plan, self.trial = spec, index, plan or Plan(), trial
        self._factories = [*self.plan.observers, *check_factories(observers)]
        self._observers: list[ObserverFactory] = []
        """The same after those of the spec."""
        self.stop, self.store, self.restart, self.resumed, self.beat = stop or Stop(), store, restart, resumed, beat
        self.sink = self._given_sink = sink
        self._open_pool = pool
        self._timer = SaveTimer(spec.meta.save_interval)
        self._dumped: dict[str, Any] = {}
        """The spec as checkpoints hold it."""
        self._loaded: dict[str, Any] | None = None
        """The state that training continues from."""
        self._shared_loaded = False
        """The arrays that several Sessions share were restored."""
        self.frames = spec.env.max_frame if store is None else spec.session_frames
        """Frames that each policy is to collect."""
        self.device = "cpu"
        self.learners: list[PolicyLearner] = []
        self.source: ExperienceSource | None = None
        self._blocked = False
        """An env did not return: nothing more can be asked of it."""
        self._closing: list[Callable[[], None]] = []
        """What `close` calls, last first."""

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
        if self.spec.meta.random_seed is None:
            seed = draw_seed()
            self.spec = with_seed(self.spec, seed)
            notice(f"{self.spec.name}: no meta.random_seed given; using {seed}")
        self.spec = completed(self.spec)
        with suppress(PydanticSerializationError):  # arguments of an env that are objects: such a spec is not saved either
            self._dumped = dump_spec(self.spec)
        self._observers = [*load_observers(self.spec), *self._factories]
        self.device = select_device(self.spec, self.plan, self.index)
        check_arithmetic(self.spec, self.device)
        use_start_method(self.spec.meta.start_method)
        processes = ExitStack()
        processes.enter_context(server_in_use())
        self._closing.append(processes.close)
        self._closing.append(partial(torch.set_num_threads, torch.get_num_threads()))
        # one core per Session, which also keeps the order of sums, and so results, the same whatever runs beside it
        torch.set_num_threads(1)
        self._closing.append(threadpool_limits(1, user_api="blas").restore_original_limits)  # numpy's
        self._torch = TorchSettings()
        self.learners, self._blocked = [], False
        try:
            self.beat(BUILDING)
            self.source = self._build_local() if self.spec.meta.sampler is None else self._build_workers()
            if not self.resumed and (self.store is None or self.store.fresh):
                self.init_weights()
                if self.store is not None:
                    self.store.publish()
        except BaseException:
            self.close()
            raise
        return self

    def _build_local(self) -> LocalSource:
        if not self.resumed and not self.restart:
            check_env(self.spec, self._seeds(0).env, self.beat, device=self.device)
        env = self._make_env(self._seed(0).env)
        self._closing.append(env.close)
        learner = self._build_learner(0, env.info, env.normalizers)
        if self.store is not None:
            self.store.attach(shared_parts(learner.clock, learner.window, env.normalizers, learner.agent))
        self._check_memory(learner)
        self._closing.pop()  # the source closes it
        source = LocalSource(env, learner, self.stop, self.beat)
        self._closing.append(source.close)
        return source

    def _build_workers(self) -> WorkerSource:
        self.spec = resolve_inference(self.spec, self.device)
        spec = self.spec
        assert spec.meta.sampler is not None
        seeds = self._seed(0)
        pool: WorkerPool = self._open_pool(spec, seeds, self.device, self.stop, self.beat)
        self._closing.append(pool.close)
        try:
            info = pool.info()
            self._torch.restore()
        except WorkerFailed as error:
            raise UserError(f"{spec.env.name} cannot be built: {error}") from None
        normalizers = make_normalizers(spec.env, info, spec.agent.algorithm.gamma)
        learners = [self._build_learner(policy, info, normalizers) for policy in range(spec.policies)]
        concurrent_sessions = self.plan.concurrent_sessions(spec.meta)
        source = WorkerSource(
            spec, pool, info, learners, normalizers, pool.store, self.stop, self.beat, concurrent_sessions=concurrent_sessions
        )
        self._closing.remove(pool.close)
        self._closing.append(source.close)
        return source

    def _seeds(self, policy: int) -> Seeds:
        """The seeds of a policy."""
        assert self.spec.meta.random_seed is not None
        return session_seeds(self.spec.meta.random_seed, self._seed_trial, self.index * self.spec.policies + policy, self.restart)

    @property
    def _seed_trial(self) -> int:
        """The trial whose seeds this Session uses."""
        return 0 if self.plan.common_seeds else self.trial

    def _seed(self, policy: int) -> Seeds:
        """The same; seeds the global generators of Python, numpy and torch with them."""
        seeds = self._seeds(policy)
        random.seed(seeds.env)
        np.random.seed(seeds.env)
        torch.manual_seed(seeds.net)
        return seeds

    def _initial_seeds(self) -> Seeds:
        """Return the seeds whose weights all Sessions of one net start with."""
        assert self.spec.meta.random_seed is not None
        return session_seeds(self.spec.meta.random_seed, self._seed_trial, 0)

    def _build_learner(self, policy: int, info: EnvInfo, normalizers: Normalizers) -> PolicyLearner:
        spec, seeds = self.spec, self._seed(policy)
        initial = seeds
        if self.store is not None:  # all Sessions start with the weights of the first
            initial = replace(seeds, net=self._initial_seeds().net)
        self.info = info
        clock = Clock()
        agent = build_agent(spec, info, initial, clock, self.device, self._learning_cores)
        if initial != seeds:
            torch.manual_seed(seeds.net)
        table = self.index * spec.policies + policy
        learner = PolicyLearner(
            spec, table, agent, clock, self.frames, normalizers, shared=self.store is not None, torch_settings=self._torch
        )
        learner.add_observers(self._observers)
        self.learners.append(learner)
        self._closing.append(learner.close)
        if spec.meta.rigorous_eval:
            learner.eval_env = self._make_env(seeds.eval_env, training=False)
        return learner

    def _make_env(self, seed: int, *, training: bool = True) -> Env:
        spec = self.spec
        env = make_env(
            spec.env.model_copy(update={"max_frame": self.frames}),
            seed,
            num_envs=None if training else spec.meta.rigorous_eval,
            gamma=spec.agent.algorithm.gamma,
            training=training,
            threads=self._cores,
            input=spec.agent.input,
            **log_info(spec.meta),
        )
        self.beat(BUILDING)
        self._torch.restore()
        return env

    @property
    def _cores(self) -> int:
        """Cores for each Session that runs at a time."""
        return max(1, cores() // self.plan.concurrent_sessions(self.spec.meta))

    @property
    def _learning_cores(self) -> int:
        """Cores for an update: one if other processes learn or act at the same time, or may."""
        sampler = self.spec.meta.sampler
        in_turns = sampler is None or sampler.serial_mode or not sampler.async_rl
        alone = self.store is None and in_turns and self.plan.jobs is None
        return self._cores if alone else 1

    def _check_memory(self, learner: PolicyLearner) -> None:
        """Raise SpecError if the replay memories of all Sessions that run at a time do not fit this machine."""
        replay, concurrent_sessions = learner.agent.replay, self.plan.concurrent_sessions(self.spec.meta)
        if replay is not None:
            fewer = "use fewer sessions (meta.max_session)" if self.store is not None else "run fewer sessions at a time (--jobs)"
            check_replay_memory(replay.capacity, replay.nbytes, concurrent_sessions, f"; or {fewer}", replay.device)

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
            self._blocked = isinstance(error, Blocked)
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
        if self.store is not None:
            assert shared is not None
            saved = {name: tensor.numpy() for name, tensor in shared["arrays"].items()}
            self.store.restore(saved)
            self._shared_loaded = True
            bundle = shared["session"] or bundle
        self._loaded = bundle
        if bundle is None:
            self.clock.resume_shared({}, self.spec.env.num_envs)
            return
        for learner, saved in zip(self.learners, bundle["policies"], strict=True):
            learner.load_state_dict(saved, shares=self._shares)
        if self.store is not None:
            self.store.publish()
        if bundle["source"] is not None and not self.source.load_state_dict(bundle["source"], statistics=not self._shares):
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
        if self.resumed:
            sink.rewind(self.index, loaded["tables"] if loaded is not None and same_moment else None, self.clock.frame or -1)
        for number, learner in enumerate(self.learners):
            learner.begin(self.plan, sink, partial(self.playable, learner), self._timer, self.stop, self.beat)
            if loaded is not None:
                learner.load_observers(loaded["policies"][number]["observers"])
        if self.restart:
            self._restore_after_restart()
        sampler = self.spec.meta.sampler
        if sampler is not None and sampler.pbt is not None:
            assert isinstance(self.source, WorkerSource)
            population = None if loaded is None else loaded["population"]
            self.source.population = Population(sampler.pbt, self.learners, self._seeds(0).update, self.index, sink, population)
        self.source.begin()
        for learner in self.learners:
            learner.clock.begin()  # before the tables, since resume_tables may write a row, which contains the wall time
            if self.restart:
                learner.resume_tables()
            elif self._shared_loaded and not same_moment:
                learner.resume_tables(rebuild=True)
        if loaded is not None and not self._shares:
            state.set_rng_state(loaded["rng"], self.device)
            for learner in self.learners:
                learner.catch_up()
        self._loaded = None  # its arrays are read from a file that the next checkpoint replaces
        self._timer.restart()

    @property
    def _shares(self) -> bool:
        """Other Sessions train the same net."""
        return self.store is not None and self.store.workers > 1

    def _restore_after_restart(self) -> None:
        """Load counts and observers from the last checkpoint of the process that died, if there is one. The net is in shared memory."""
        assert self.sink is not None
        (learner,) = self.learners
        bundle = self.sink.load(learner.table, "last")
        if bundle is not None:
            learner.resume_counts(bundle["policies"][0])
            learner.load_observers(bundle["policies"][0]["observers"])

    def save(self, bundle: dict[str, Any] | None = None, *, done: bool = False) -> None:
        """Save the state of the Session, or a `bundle` of it. `done`: no frame is left to collect, and the last rows are written."""
        assert self.sink is not None
        begin = perf_counter()
        self.beat(SAVING)
        for learner in self.learners:  # first, since the state says which value is the best
            learner.checkpointer.save_best()
        ends = bundle is not None
        bundle = {**(bundle or self.state_dict()), "done": done}
        self.sink.save(self.learners[0].table, "last", bundle)
        if self.store is not None:
            with self.store.saving(None if ends else self._timer.interval / 2) as due:
                if due:
                    arrays = {name: torch.from_numpy(array) for name, array in self.store.snapshot().items()}
                    own = None if self._shares else bundle
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
            self.beat(CLOSING)
            close_env(self._closing.pop())

    def state_dict(self) -> dict[str, Any]:
        """Return everything stateful, in tensors and plain Python."""
        assert self.source is not None
        assert self.sink is not None
        source = self.source.state_dict() if self.source.between_rounds and not self._blocked else None
        population = self.source.population if isinstance(self.source, WorkerSource) else None
        policies = [{**self.playable(learner), **learner.state_dict(shares=self._shares)} for learner in self.learners]
        return {
            "version": state.VERSION,
            "policies": policies,
            "source": source,
            "population": None if population is None else population.state_dict(),
            "rng": state.rng_state(self.device),
            "tables": self.sink.position(self.index),
            "lost": self._lost(source),
            "spec": self._dumped,
        }

    def _lost(self, source: dict[str, Any] | None) -> list[str]:
        """Return the reasons why a continued run will differ from an uninterrupted one; an empty list if it will not."""
        assert self.source is not None
        lost = []
        if source is None:
            lost.append("open episodes are dropped (the envs did not respond, or were in the middle of a rollout)")
        elif source["open"] is None:
            lost.append(f"open episodes are dropped ({self.source.lost_reason})")
        elif self.spec.meta.sampler is not None and self.spec.meta.sampler.inference == "central":
            lost.append("central inference groups observations by the time at which they arrive")
        if self.agent.replay is not None and not self.spec.meta.save_replay:
            lost.append("the replay buffer starts empty (meta.save_replay is false)")
        if self._shares:
            lost.append("sessions that share a net are not saved at the same moment")
        return lost

    def playable(self, learner: PolicyLearner) -> dict[str, Any]:
        """Return what it takes to act: weights, statistics of the normalizers, and the env's spaces."""
        return {
            "version": state.VERSION,
            "weights": learner.agent.weights(),
            "normalizers": learner.normalizers.state_dict(),
            "spaces": self.info.spaces,
            "explore_var": learner.agent.final_explore_var,
            "global_frame": learner.clock.global_frame,
        }


def shared_parts(clock: Clock, window: EpisodeWindow, normalizers: Normalizers, agent: Agent) -> dict[str, Shareable]:
    """Return the parts of a Session that it shares with others that train the same net."""
    return {"clock": clock, "episodes": window, "normalizers": normalizers, "agent": agent}
