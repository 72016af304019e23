"""Build the components of a Session: envs or rollout workers, and a learner for each policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic_core import PydanticSerializationError
from threadpoolctl import threadpool_limits

from slm_lab.agent.agent import Agent
from slm_lab.agent.build import build_agent, check_matmul_settings
from slm_lab.agent.policy.policy import Policy, build_policy
from slm_lab.agent.replay.hindsight import HindsightReplay
from slm_lab.agent.replay.replay import Replay, check_replay_memory
from slm_lab.agent.torch_settings import TorchSettings, cpu_name, resolve_matmul_library
from slm_lab.env.goals import GoalReward
from slm_lab.env.make import make_env
from slm_lab.env.normalize import Normalizers, make_normalizers
from slm_lab.env.vec import Env
from slm_lab.experiment.collect.agents import AgentsSource
from slm_lab.experiment.collect.local import LocalSource
from slm_lab.experiment.collect.offline import OfflineSource
from slm_lab.experiment.collect.workers.source import WorkerSource
from slm_lab.experiment.collect.workers.worker_pool import OpenPool, WorkerPool, open_pool
from slm_lab.experiment.execute.heartbeat import BUILDING, CLOSING
from slm_lab.experiment.execute.local.fork_server import server_in_use, use_start_method
from slm_lab.experiment.execute.local.user_code import WorkerFailed, build_error, close_env
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.experiment.training.agent_groups import find_space_problems
from slm_lab.experiment.training.demonstrations import load_demonstrations
from slm_lab.experiment.training.env_check import check_env
from slm_lab.experiment.training.evaluate import plan_evaluation
from slm_lab.experiment.training.experience import Beat, ExperienceSource, no_beat
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.experiment.training.observers.base import ObserverFactory, check_factories, load_observers
from slm_lab.experiment.training.observers.builtin import SaveTimer
from slm_lab.experiment.training.population import PopulationBasedTraining
from slm_lab.experiment.training.resolve import complete_spec, resolve_inference, select_device
from slm_lab.experiment.training.self_play import RATING_ENVS, SelfPlay
from slm_lab.lib.clock import Clock
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.limits import cores
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds, session_seeds
from slm_lab.lib.store import Shareable, Store
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError, nearest_hint


class SessionParts:
    """Builder and owner of the components of one Session: the source of experience, the learners, and the objects that must be closed.

    Args:
        index: index of the Session in its trial.
        trial: index of the trial.
        observers: the user's observers, in addition to the observers in meta.observers.
    """

    def __init__(
        self, spec: Spec, index: int, plan: Plan, trial: int, context: SessionContext, observers: Sequence[ObserverFactory] = ()
    ) -> None:
        self.spec, self.index, self.plan, self.trial, self.context = spec, index, plan, trial, context
        self._factories = (*plan.observers, *check_factories(observers))
        self.timer = SaveTimer(spec.meta.save_interval)
        self.device = "cpu"
        self.dumped: dict[str, Any] = {}
        """The spec as a dict, as it is saved in checkpoints."""
        self.learners: list[PolicyLearner] = []
        self.source: ExperienceSource | None = None
        self.population: PopulationBasedTraining | None = None
        """Population-based training as configured by meta.sampler.pbt, or None if the spec has no section meta.sampler.pbt."""
        self.self_play: SelfPlay | None = None
        """Self-play as configured by meta.self_play, or None if the spec has no section meta.self_play."""
        self._info: EnvInfo | None = None
        self._closing: list[Callable[[], None]] = []
        """Functions that release envs and processes, to be called in reverse order."""

    @property
    def env_info(self) -> EnvInfo:
        """EnvInfo of the training envs. With rollout workers, `env_info` describes one vector env that contains the envs of all workers."""
        assert self._info is not None
        return self._info

    @property
    def is_open(self) -> bool:
        """Whether envs or processes have been created and must be closed."""
        return bool(self._closing)

    @property
    def chosen_settings(self) -> dict[str, str | int]:
        """Settings that were chosen for this machine, to be recorded in meta.run.

        The dict contains the env backends, the matrix product backend, the number of threads of an update, the name of the CPU and, with
        meta.eval_episodes="auto", the number of evaluation episodes and the time limit of an episode (0 if there is no limit), on which
        this number depends.
        """
        assert self.source is not None
        matmul = resolve_matmul_library(self.spec.meta.matmul, self.device)
        learner = self.learners[0]
        episodes = learner.evaluation.envs if learner.evaluation is not None and not self.spec.meta.rigorous_eval else 0
        chosen: dict[str, str | int] = {
            "backend": self.source.backend,
            "matmul": matmul,
            "threads": learner.agent.threads,
            "cpu": cpu_name(),
        }
        if learner.eval_env is not None:
            chosen["eval_backend"] = learner.eval_env.info.backend
        if self.spec.meta.eval_episodes == "auto":
            chosen |= {"eval_episodes": episodes, "time_limit": self.env_info.time_limit or 0}
        return chosen

    def close(self) -> None:
        """Release envs and processes. If an env fails to close or does not close in time, the env is abandoned with a notice."""
        while self._closing:
            self.context.beat(CLOSING)
            close_env(self._closing.pop())

    def build(self) -> None:
        """Build envs, agents and, with meta.sampler, rollout workers. Raises SpecError or UserError for errors that the user can correct.

        The method `close` must be called even if `build` raises an error.
        """
        self.spec = complete_spec(self.spec)
        with suppress(PydanticSerializationError):  # some env arguments are objects; such a spec cannot be saved in the run folder either
            self.dumped = dump_spec(self.spec)
        self._factories = (*load_observers(self.spec), *self._factories)
        self.device = select_device(self.spec, self.plan, self.index)
        check_matmul_settings(self.spec, self.device)
        self._prepare_process()
        self.context.beat(BUILDING)
        self.source = self._build_local() if self.spec.meta.sampler is None else self._build_workers()

    def _prepare_process(self) -> None:
        use_start_method(self.spec.meta.start_method)
        processes = ExitStack()
        processes.enter_context(server_in_use())
        self._closing.append(processes.close)
        self._closing.append(partial(torch.set_num_threads, torch.get_num_threads()))
        # one thread per Session; the order of summation, and thus the results, then do not depend on other processes
        torch.set_num_threads(1)
        self._closing.append(threadpool_limits(1, user_api="blas").restore_original_limits)  # the threads of numpy's BLAS
        self._torch = TorchSettings()

    def _build_local(self) -> ExperienceSource:
        context = self.context
        if context.resumed is None and not context.restart:
            check_env(self.spec, self.seeds(0).env, context.beat, device=self.device)
        env = self._make_env(self._seed_generators(0).env)
        self._closing.append(env.close)
        learners = [self._build_learner(i, info, env.normalizers_of(info.agents)) for i, info in enumerate(self._policy_infos(env.info))]
        self._info, learner = env.info, learners[0]
        if context.store is not None:
            context.store.attach(shared_components(learner.clock, learner.window, env.normalizers, learner.agent))
        self._check_memory(learners)
        self._closing.remove(env.close)  # the source now closes the env
        source = self._local_source(env, learners)
        self._closing.append(source.close)
        return source

    def _policy_infos(self, info: EnvInfo) -> list[EnvInfo]:
        """Return, for each policy, the EnvInfo of the env rows for which the policy may act.

        Raises SpecError if the policies do not fit the env's agents.
        """
        check_agents(self.spec, info)
        policies = self.spec.agent.policies
        if policies is None:
            return [info] * self.spec.policies
        return [info.for_agents(names) for names in policies.values()]

    def _local_source(self, env: Env, learners: list[PolicyLearner]) -> ExperienceSource:
        stop, beat = self.context.stop, self.context.beat
        if self.spec.agent.algorithm.offline:
            return OfflineSource(env, learners[0], stop, beat)
        if not env.info.agents:
            return LocalSource(env, learners[0], stop, beat)
        self.self_play = self._build_self_play(env, learners[0])
        self._set_partners(learners)
        return AgentsSource(env, learners, stop, beat, policies=self.spec.agent.policies, self_play=self.self_play)

    def _set_partners(self, learners: list[PolicyLearner]) -> None:
        """Set the attribute `partners` of each learner, so that the policies of agent.policies are evaluated together in the same env."""
        if self.spec.agent.policies is not None:
            for learner in learners:
                learner.partners = list(zip(self.spec.agent.policies.values(), learners, strict=True))

    def _build_self_play(self, env: Env, learner: PolicyLearner) -> SelfPlay | None:
        spec, meta = self.spec, self.spec.meta
        if meta.self_play is None:
            return None
        seeds, games = self.seeds(0), max(1, meta.self_play.rating_games)
        rated = self._make_env(seeds.eval_env + 1, min(games, RATING_ENVS))

        def build(rng: np.random.Generator) -> Policy:
            with torch.random.fork_rng(devices=[]):  # the initial weights are replaced
                return build_policy(spec.agent, env.info, rng, self.device)

        context = self.context
        return SelfPlay(meta.self_play, learner, build, rated, env.info.frames, seeds.act, self.index, context.stop, context.beat)

    def _build_workers(self) -> WorkerSource:
        context = self.context
        self.spec = resolve_inference(self.spec, self.device)
        spec, sampler = self.spec, self.spec.meta.sampler
        assert sampler is not None
        pool: WorkerPool = context.open_pool(spec, self._seed_generators(0), self.device, context.stop, context.beat)
        self._closing.append(pool.close)
        try:
            info = pool.wait_for_env_info()
            infos = self._policy_infos(info)
            self._torch.restore()
        except WorkerFailed as error:
            raise build_error(spec, str(error)) from None
        normalizers = make_normalizers(spec.env, info, spec.agent.algorithm.gamma)
        learners = [self._build_learner(policy, policy_info, normalizers) for policy, policy_info in enumerate(infos)]
        self._info = info
        self._check_memory(learners)
        self._set_partners(learners)
        concurrent_sessions = self.plan.concurrent_sessions(spec.meta)
        source = WorkerSource(spec, pool, info, learners, context.stop, context.beat, concurrent_sessions=concurrent_sessions)
        if sampler.pbt is not None:
            self.population = source.population = PopulationBasedTraining(sampler.pbt, learners, self.seeds(0).update, self.index)
        self._closing.remove(pool.close)
        self._closing.append(source.close)
        return source

    def seeds(self, policy: int) -> Seeds:
        """Return the seeds of the policy with index `policy`."""
        return self._table_seeds(self.index * self.spec.policies + policy, self.context.restart)

    def _table_seeds(self, table: int, restart: int = 0) -> Seeds:
        return session_seeds(self.spec.meta.random_seed, 0 if self.plan.common_seeds else self.trial, table, restart)

    def _seed_generators(self, policy: int) -> Seeds:
        """Seed the global random generators of Python, numpy and torch with the seeds of a policy, and return the seeds."""
        seeds = self.seeds(policy)
        random.seed(seeds.env)
        np.random.seed(seeds.env)
        torch.manual_seed(seeds.net)
        return seeds

    def _build_learner(self, policy: int, info: EnvInfo, normalizers: Normalizers) -> PolicyLearner:
        spec, seeds, shared = self.spec, self._seed_generators(policy), self.context.store is not None
        initial = (
            replace(seeds, net=self._table_seeds(0).net) if shared else seeds
        )  # all Sessions that train one net start with the same weights
        agent = build_agent(spec, info, initial, Clock(), self.device, self._learning_cores)
        if initial != seeds:
            torch.manual_seed(seeds.net)
        self._attach_extra_data(agent, info, normalizers)
        table = self.index * spec.policies + policy
        learner = PolicyLearner(
            spec,
            table,
            agent,
            self.frames,
            normalizers,
            self.timer,
            info.spaces,
            evaluation=plan_evaluation(spec, self.frames, info.time_limit),
            shared=shared,
            torch_settings=self._torch,
        )
        learner.add_observers(self._factories)
        self.learners.append(learner)
        self._closing.append(learner.close)
        if learner.evaluation is not None:
            learner.eval_env = self._make_eval_env(seeds.eval_env, learner.evaluation.envs)
        return learner

    def _attach_extra_data(self, agent: Agent, info: EnvInfo, normalizers: Normalizers) -> None:
        """Give an agent the data that it needs in addition to its own experience.

        The algorithm receives the recorded episodes of meta.demonstrations. A replay buffer receives the normalisers of the data
        that it stores without normalisation. A HindsightReplay receives the reward function of the env's goals.
        """
        spec = self.spec
        if spec.meta.demonstrations is not None:
            data = load_demonstrations(spec, info)
            if spec.agent.algorithm.offline and normalizers.obs is not None:
                normalizers.obs.update(data.obs_K)
            if normalizers.obs is not None and not spec.defers_normalization:  # env.clip_obs without statistics
                data = replace(data, obs_K=normalizers.obs(data.obs_K), last_obs_E=normalizers.obs(data.last_obs_E))
            agent.algorithm.use_demonstrations(data)
        memory = agent.algorithm.memory
        if spec.defers_normalization and isinstance(memory, Replay):
            reward = normalizers.reward
            memory.set_normalizers(normalizers.obs, None if reward is None or reward.stats is None else reward.normalize)
        if isinstance(memory, HindsightReplay):
            memory.goal_reward = rewards = GoalReward(spec.env, memory.threshold)
            self._closing.append(rewards.close)

    def _make_eval_env(self, seed: int, num_envs: int) -> Env:
        """Build the evaluation env.

        If the spec does not request evaluation explicitly (meta.eval_episodes="auto"), the message of an error names the key that disables
        evaluation.
        """
        try:
            return self._make_env(seed, num_envs)
        except SpecError as error:
            if self.spec.meta.eval_episodes != "auto" or self.spec.meta.rigorous_eval:
                raise
            hint = f"; it is one of {num_envs} envs for evaluation: meta.eval_episodes=0 trains without evaluation"
            raise SpecError(error.source, [replace(problem, message=f"{problem.message}{hint}") for problem in error.problems]) from None

    @property
    def frames(self) -> int:
        """Number of frames that each policy of the Session collects."""
        return self.spec.env.max_frame if self.context.store is None else self.spec.session_frames

    def _make_env(self, seed: int, eval_envs: int | None = None) -> Env:
        """Build the vector env for training or, if `eval_envs` is given, a vector env with `eval_envs` envs for evaluation."""
        spec, training = self.spec, eval_envs is None
        env = make_env(
            spec.env.model_copy(update={"max_frame": self.frames}),
            seed,
            num_envs=eval_envs,
            gamma=spec.agent.algorithm.gamma,
            training=training,
            threads=self._cores,
            input=spec.agent.input,
            track_info=spec.meta.track_info,
            defer_normalization=training and spec.defers_normalization,
        )
        self.context.beat(BUILDING)
        self._torch.restore()
        return env

    @property
    def _cores(self) -> int:
        """Number of cores available to each of the concurrent Sessions."""
        return max(1, cores() // self.plan.concurrent_sessions(self.spec.meta))

    @property
    def _learning_cores(self) -> int:
        """Number of cores that an update of a learner may use: 1 if other processes may learn or act at the same time, else `_cores`."""
        sampler = self.spec.meta.sampler
        synchronous = sampler is None or sampler.serial_mode or not sampler.async_rl
        alone = self.context.store is None and synchronous and self.plan.jobs is None
        return self._cores if alone else 1

    def _check_memory(self, learners: Sequence[PolicyLearner]) -> None:
        """Raise SpecError if the replay memories of all policies and concurrent Sessions together do not fit into the device's memory."""
        replays = [learner.agent.replay for learner in learners if learner.agent.replay is not None]
        if not replays:
            return
        sessions, shared = self.plan.concurrent_sessions(self.spec.meta), self.context.store is not None
        fewer = "use fewer sessions (meta.max_session)" if shared else "run fewer sessions at a time (--jobs)"
        mean_bytes = sum(replay.nbytes for replay in replays) // len(replays)  # the sizes differ if the policies have different spaces
        hint = f"; or {fewer}" if sessions > 1 or len(replays) == 1 else ""
        check_replay_memory(replays[0].capacity, mean_bytes, len(replays) * sessions, hint, replays[0].device)


def check_agents(spec: Spec, info: EnvInfo) -> None:
    """Raise SpecError if agent.policies or meta.self_play does not fit the agents of the env.

    The key meta.self_play needs an env with several agents. The key agent.policies must assign each named agent of the env to a policy.
    """
    meta, name, agents = spec.meta, spec.env.name, info.agents
    if problems := find_space_problems(spec, info):
        raise SpecError(name, problems)
    if meta.self_play is not None and len(agents) < 2:
        problems.append(Problem("meta.self_play", f"needs an env with several agents, such as ConnectFour-v1; {name} has one; remove it"))
    if spec.agent.policies is not None and not agents:
        problems.append(Problem("agent.policies", f"{name} has one agent without a name; remove it"))
    for policy, names in (spec.agent.policies or {}).items() if agents else ():
        for i, agent in enumerate(names):
            if agent not in agents:
                message = f"unknown agent {agent!r}{nearest_hint(agent, agents)}; {name} has {', '.join(agents)}"
                problems.append(Problem(f"agent.policies.{policy}[{i}]", message, "unknown"))
    assigned = {agent for names in (spec.agent.policies or {}).values() for agent in names}
    if spec.agent.policies is not None and not problems and (left := [agent for agent in agents if agent not in assigned]):
        problems.append(Problem("agent.policies", f"no policy acts for {', '.join(left)}; each agent of {name} needs one"))
    if problems:
        raise SpecError(name, problems)


def shared_components(clock: Clock, window: EpisodeWindow, normalizers: Normalizers, agent: Agent) -> dict[str, Shareable]:
    """Return the components of a Session whose arrays are shared with other Sessions of the same net, as a dict: name → component."""
    return {"clock": clock, "episodes": window, "normalizers": normalizers, "agent": agent}


@dataclass(frozen=True)
class SessionContext:
    """Objects that a process provides to its Session. The defaults suit a single Session that runs in the current process."""

    stop: Stop = field(default_factory=Stop)
    """Stop request, which ends training early."""
    beat: Beat = no_beat
    """Heartbeat function, which is called with each phase that begins (see execute.heartbeat)."""
    store: Store | None = None
    """Shared arrays of the Sessions that train one net (meta.distributed), or None if the Session trains a separate net."""
    restart: int = 0
    """Number of earlier processes of this Session that died."""
    resumed: RunPaths | None = None
    """The run from whose last checkpoint the Session continues: an earlier run, or this run if the process of the Session was restarted.
    If `resumed` is None, the Session starts from the beginning."""
    open_pool: OpenPool = open_pool
    """Function that starts the rollout workers."""

    @property
    def joins_running_sessions(self) -> bool:
        """Whether the Session joins other Sessions that already train its net, so that the shared arrays are newer than any checkpoint."""
        return self.store is not None and not self.store.fresh
