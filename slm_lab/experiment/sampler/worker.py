"""A rollout worker: steps its envs and writes what happens into slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.build import build_agent
from slm_lab.agent.policy import Policy
from slm_lab.env.make import make_env
from slm_lab.env.normalize import Moments
from slm_lab.env.vec import Env
from slm_lab.experiment.sampler.batcher import Ended, Gathered
from slm_lab.experiment.sampler.shared import Common, Slot, Weights, splits
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import Heap
from slm_lab.lib.records import ActOut, EnvInfo
from slm_lab.lib.rng import Seeds, worker_seeds
from slm_lab.spec.memory import PrioritizedReplaySpec, ReplaySpec
from slm_lab.spec.spec import Spec

EXPLORE_VAR = 0
"""Of the notes that go with weights: which one explore_var is. The others are the statistics for normalising."""


class Collected(NamedTuple):
    """What a worker tells of a rollout; the transitions themselves lie in the slot."""

    gathered: list[Gathered]
    """Of each group."""
    news: list[list[Moments]]
    """Of each group: what its envs add to the statistics for normalising."""
    begin: float
    """perf_counter's seconds, which all processes of a machine share."""
    end: float
    env_seconds: float
    """Spent in env steps, and in writing."""
    act_seconds: float
    """Spent on choosing actions; with central inference, on waiting for them."""


@dataclass(frozen=True)
class Setting:
    """What a worker is built from."""

    spec: Spec
    info: EnvInfo
    """Of all workers' envs."""
    seeds: Seeds
    """The Session's."""
    index: int = 0
    restart: int = 0
    """Processes that died in this worker's place."""
    notes: int = 0
    """Numbers that go with weights."""
    address: str = ""
    """Of central inference; empty where each worker computes its own actions."""
    device: str = "cpu"
    """Of central inference."""


class Inference(Protocol):
    """Who computes the parameters of action distributions."""

    def ask(self, group: Group) -> None:
        """Begin to compute those of the group's next actions."""

    def answer(self, group: Group) -> ActOut:
        """The group's next actions."""


class Group:
    """Envs that step together, which policy plays in each, and what carries over from step to step."""

    def __init__(self, index: int, env: Env, policies: Sequence[Policy], active_P: np.ndarray, rng: np.random.Generator) -> None:
        self.index, self.env, self.policies, self.active_P, self.rng = index, env, policies, active_P, rng
        count = env.info.num_envs
        self.obs_N = env.reset()
        self.first_N = np.ones(count, np.bool_)
        self.over_N = np.ones(count, np.bool_)
        """The episode is over, in Atari the game and not only a life: the next may be another policy's."""
        self.state_NS = policies[0].initial_state(count)
        self.policy_N = np.zeros(count, np.int64)
        self._draw()

    def step(self, slot: Slot, out: ActOut, ended: list[Ended]) -> None:
        """Act, and write what came of it."""
        memory = slot.memory
        t = memory.t
        step = self.env.step(out.action_N)
        slot.policy_TN[t] = self.policy_N
        memory.add(self.obs_N, self.first_N, self.state_NS, out, step)
        ended += [Ended(t, episode.env, int(self.policy_N[episode.env]), episode) for episode in step.episodes]
        self.obs_N, self.first_N = step.obs_N, step.first_N
        if out.state_N is not None:
            self.state_NS = np.where(step.first_N[:, None], np.float32(0.0), out.state_N)
        if len(self.policies) > 1:
            for episode in step.episodes:
                self.over_N[episode.env] = True
            self._draw()

    def _draw(self) -> None:
        """Give each episode that begins to a policy."""
        playing, begins_N = np.flatnonzero(self.active_P), self.first_N & self.over_N
        if len(self.policies) > 1 and len(playing) and begins_N.any():
            self.policy_N = np.where(begins_N, self.rng.choice(playing, len(begins_N)), self.policy_N)
            self.over_N &= ~begins_N


class LocalInference:
    """The worker computes them itself, by the newest weights."""

    def __init__(self, newest: Newest) -> None:
        self.newest = newest

    def ask(self, group: Group) -> None: ...

    def answer(self, group: Group) -> ActOut:
        self.newest.pull()
        policies = group.policies
        if len(policies) == 1:
            return policies[0].act(group.obs_N, group.state_NS)
        rows = [np.flatnonzero(group.policy_N == p) for p in range(len(policies))]
        state_NS = group.state_NS
        return merged(
            [
                (row_K, policy.act(group.obs_N[row_K], None if state_NS is None else state_NS[row_K]))
                for row_K, policy in zip(rows, policies, strict=True)
                if len(row_K)
            ]
        )


def merged(parts: Sequence[tuple[np.ndarray, ActOut]]) -> ActOut:
    """What each of several policies chose for its rows, in one."""
    count = sum(len(row_K) for row_K, _ in parts)

    def joined(name: str) -> np.ndarray:
        first = np.asarray(getattr(parts[0][1], name))
        whole = np.empty((count, *first.shape[1:]), first.dtype)
        for row_K, out in parts:
            whole[row_K] = getattr(out, name)
        return whole

    state_N = None if parts[0][1].state_N is None else joined("state_N")
    return ActOut(joined("action_N"), joined("logp_N"), state_N, joined("version"))


class Newest:
    """Keeps policies and envs of a worker up to date with what the learner has published."""

    def __init__(self, weights: Sequence[Weights], policies: Sequence[Policy], envs: Sequence[Env]) -> None:
        self.weights, self.policies, self.envs = weights, policies, envs
        self.seen = 0.0
        """Samples that the newest statistics are of."""

    def pull(self) -> None:
        for weights, policy in zip(self.weights, self.policies, strict=True):
            if weights.pull():
                policy.version, policy.explore_var = weights.version, float(weights.notes[EXPLORE_VAR])
                statistics = weights.notes[EXPLORE_VAR + 1 :]
                if len(statistics) and statistics[0] > self.seen:  # another policy's may be older
                    self.seen = float(statistics[0])
                    for env in self.envs:
                        env.statistics = statistics


class RolloutWorker:
    """Worker number `index`: its groups of envs, and the policies that play in them."""

    def __init__(self, setting: Setting, heap: Heap) -> None:
        spec, sampler = setting.spec, setting.spec.meta.sampler
        assert sampler is not None
        self.rows, self.stopping = spec.rollout_rows, False
        seeds = worker_seeds(setting.seeds, setting.index, setting.restart)
        algorithms = build_algorithms(setting, sampler.num_policies)
        self.policies = [algorithm.policy for algorithm in algorithms]
        for p, policy in enumerate(self.policies):
            policy.rng = np.random.default_rng(seeds.act if p == 0 else [seeds.act, p])
        envs = [self._make_env(setting, seeds, group) for group in range(splits(sampler))]
        self.common = Common(heap, spec, setting.info, algorithms, setting.notes)
        self.slots = self.common.slots[setting.index]
        self.newest = Newest(self.common.weights, self.policies, envs)
        self.newest.pull()
        for env in envs:
            env.keep_statistics_apart()
        self.groups = [
            Group(index, env, self.policies, self.common.active_P, np.random.default_rng([seeds.act, index, 1]))
            for index, env in enumerate(envs)
        ]
        self.inference: Inference = LocalInference(self.newest)

    @staticmethod
    def _make_env(setting: Setting, seeds: Seeds, group: int) -> Env:
        spec, sampler = setting.spec, setting.spec.meta.sampler
        assert sampler is not None
        count = sampler.num_envs_per_worker // splits(sampler)
        seed = seeds.env if group == 0 else int(np.random.SeedSequence([seeds.env, group]).generate_state(1)[0]) & 0x7FFFFFFF
        return make_env(spec.env, seed, num_envs=count, gamma=spec.agent.algorithm.gamma)

    def collect(self, slot: int) -> Collected:
        """Gather a rollout of every group."""
        slots, groups, inference = self.slots[slot], self.groups, self.inference
        ended: list[list[Ended]] = [[] for _ in groups]
        for place in slots:
            place.memory.t = 0
            place.memory.truncations.clear()
        begin = now = perf_counter()
        env_seconds = act_seconds = 0.0
        for group in groups:
            inference.ask(group)
        for t in range(self.rows):
            for group, place, episodes in zip(groups, slots, ended, strict=True):
                out = inference.answer(group)
                acted = perf_counter()
                group.step(place, out, episodes)
                if t + 1 < self.rows:  # the first action of the next rollout is for newer weights to choose
                    inference.ask(group)
                act_seconds += acted - now
                now = perf_counter()
                env_seconds += now - acted
            if self.stopping:
                break
        gathered = [Gathered(list(place.memory.truncations), episodes) for place, episodes in zip(slots, ended, strict=True)]
        return Collected(gathered, [group.env.take_news() for group in groups], begin, now, env_seconds, act_seconds)

    def close(self) -> None:
        for group in self.groups:
            group.env.close()


def note_count(env: Env) -> int:
    """Numbers that go with weights."""
    return EXPLORE_VAR + 1 + len(env.statistics)


def build_algorithms(setting: Setting, count: int, device: str = "cpu") -> list[Algorithm]:
    """What has the nets of the policies; their weights will be pulled, and their memories stay empty."""
    agent = setting.spec.agent
    if isinstance(agent.memory, (ReplaySpec, PrioritizedReplaySpec)):
        agent = agent.model_copy(update={"memory": agent.memory.model_copy(update={"max_size": agent.memory.batch_size})})
    spec = setting.spec.model_copy(update={"agent": agent})
    info = replace(setting.info, num_envs=1)
    return [build_agent(spec, info, setting.seeds, Clock(), device).algorithm for _ in range(count)]
