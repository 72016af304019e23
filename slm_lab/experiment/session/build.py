"""Build a Session: envs, agents and rollout workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from pydantic_core import PydanticSerializationError
from threadpoolctl import threadpool_limits

from slm_lab.agent.agent import Agent
from slm_lab.agent.build import build_agent, check_arithmetic
from slm_lab.agent.replay.replay import check_replay_memory
from slm_lab.env.make import make_env
from slm_lab.env.normalize import Normalizers, make_normalizers
from slm_lab.env.vec import Env
from slm_lab.experiment.collect.local import LocalSource
from slm_lab.experiment.collect.workers.source import WorkerSource
from slm_lab.experiment.collect.workers.worker import log_info
from slm_lab.experiment.collect.workers.worker_pool import OpenPool, WorkerPool, open_pool
from slm_lab.experiment.execute.heartbeat import BUILDING
from slm_lab.experiment.execute.local.failures import WorkerFailed
from slm_lab.experiment.execute.local.fork_server import server_in_use, use_start_method
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.training.env_check import check_env
from slm_lab.experiment.training.experience import Beat, no_beat
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.experiment.training.observers.base import ObserverFactory
from slm_lab.experiment.training.observers.user import load_observers
from slm_lab.experiment.training.resolve import completed, resolve_inference, select_device, with_seed
from slm_lab.experiment.training.torch_settings import TorchSettings
from slm_lab.lib.clock import Clock
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.limits import cores
from slm_lab.lib.log import notice
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds, draw_seed, session_seeds
from slm_lab.lib.store import Shareable, Store
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import Spec


@dataclass(frozen=True)
class SessionProcess:
    """What the process that runs a Session gives it.

    Attributes:
        store: shared arrays of the Sessions that train one net (meta.distributed); without one a Session trains a net of its own.
        restart: number of processes that died before this one in the same role.
        resumed: the run has been started before: either `load` or `init_weights` is to be called after `build`, and the tables in the
            sink are continued from the loaded state, or else removed.
        beat: called with each phase that begins, see execute.heartbeat.
        open_pool: starts the rollout workers.
    """

    store: Store | None = None
    restart: int = 0
    resumed: bool = False
    beat: Beat = no_beat
    open_pool: OpenPool = open_pool

    @property
    def shares(self) -> bool:
        """Whether other Sessions train the same net."""
        return self.store is not None and self.store.workers > 1


class SessionBuilder:
    """Builds what Session number `index` of a trial consists of.

    Args:
        closing: functions that release what was built; those of the parts are appended, to be called last first.

    Attributes: of the Session, once `build` has returned.
        spec: with what follows from the env and this machine.
        dumped: the spec as checkpoints hold it.
        frames: those that each policy is to collect.
    """

    info: EnvInfo
    source: LocalSource | WorkerSource

    def __init__(
        self, spec: Spec, index: int, plan: Plan, trial: int, stop: Stop, process: SessionProcess, closing: list[Callable[[], None]]
    ) -> None:
        self.spec, self.index, self.plan, self.trial, self.stop, self.process = spec, index, plan, trial, stop, process
        self.store, self.beat, self._closing = process.store, process.beat, closing
        self.frames = spec.env.max_frame if self.store is None else spec.session_frames
        self.dumped: dict[str, Any] = {}
        self.device = "cpu"
        self.learners: list[PolicyLearner] = []

    def build(self, factories: Sequence[ObserverFactory]) -> Self:
        """Make envs, agents and, with meta.sampler, rollout workers. Raises SpecError or UserError for what the user can correct.

        Args: factories: of the observers that come after those of the spec.
        """
        if self.spec.meta.random_seed is None:
            seed = draw_seed()
            self.spec = with_seed(self.spec, seed)
            notice(f"{self.spec.name}: no meta.random_seed given; using {seed}")
        self.spec = completed(self.spec)
        with suppress(PydanticSerializationError):  # arguments of an env that are objects: such a spec is not saved either
            self.dumped = dump_spec(self.spec)
        self._observers = [*load_observers(self.spec), *factories]
        self.device = select_device(self.spec, self.plan, self.index)
        check_arithmetic(self.spec, self.device)
        self._limit_threads()
        self._torch = TorchSettings()
        self.beat(BUILDING)
        self.source = self._build_local() if self.spec.meta.sampler is None else self._build_workers()
        return self

    def _limit_threads(self) -> None:
        """Let the Session compute with one core, which also keeps the order of sums, and so results, the same whatever runs beside it."""
        use_start_method(self.spec.meta.start_method)
        processes = ExitStack()
        processes.enter_context(server_in_use())
        self._closing.append(processes.close)
        self._closing.append(partial(torch.set_num_threads, torch.get_num_threads()))
        torch.set_num_threads(1)
        self._closing.append(threadpool_limits(1, user_api="blas").restore_original_limits)  # numpy's

    def _build_local(self) -> LocalSource:
        if not self.process.resumed and not self.process.restart:
            check_env(self.spec, self.seeds(0).env, self.beat, device=self.device)
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
        pool: WorkerPool = self.process.open_pool(spec, seeds, self.device, self.stop, self.beat)
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

    def seeds(self, policy: int) -> Seeds:
        """The seeds of a policy."""
        assert self.spec.meta.random_seed is not None
        return session_seeds(self.spec.meta.random_seed, self._seed_trial, self.index * self.spec.policies + policy, self.process.restart)

    @property
    def _seed_trial(self) -> int:
        """The trial whose seeds this Session uses."""
        return 0 if self.plan.common_seeds else self.trial

    def _seed(self, policy: int) -> Seeds:
        """The same; seeds the global generators of Python, numpy and torch with them."""
        seeds = self.seeds(policy)
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


def shared_parts(clock: Clock, window: EpisodeWindow, normalizers: Normalizers, agent: Agent) -> dict[str, Shareable]:
    """Return the parts of a Session that it shares with others that train the same net."""
    return {"clock": clock, "episodes": window, "normalizers": normalizers, "agent": agent}
