"""The rollout worker, which steps envs and writes the transitions into slots (storage for one rollout)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from slm_lab.agent.policy.policy import Policy, build_policy
from slm_lab.agent.torch_settings import TorchSettings, set_matmul_library
from slm_lab.env.make import make_env
from slm_lab.env.normalize import Moments
from slm_lab.env.vec import Env
from slm_lab.experiment.collect.turns import TurnTransitionBuilder
from slm_lab.experiment.collect.workers.dataset import EndedEpisode, GroupRolloutReport
from slm_lab.experiment.collect.workers.shared import (
    PublishedWeights,
    RolloutSlot,
    WorkerArrays,
    WorkerConfig,
    acting_state_size,
    fixed_policy_indices,
    get_sampler_spec,
    num_env_groups,
)
from slm_lab.experiment.execute.heartbeat import BUILDING, RESETTING, STEPPING
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files.bundle import rng_state, set_rng_state, to_arrays, to_tensors
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.env_check import check_env
from slm_lab.experiment.training.experience import Beat, no_beat
from slm_lab.lib.records import ActOut, EnvInfo
from slm_lab.lib.rng import generator_state, set_generator_state, worker_seeds


class RolloutReport(NamedTuple):
    """Report of a worker on the rollouts of all its env groups (vector envs). The transitions of the rollouts are in slots and not in the
    report."""

    rollouts: list[GroupRolloutReport]
    deltas: list[list[Moments]]
    """Moments of the data that each env group has collected, which are merged into the statistics of the learner's normalizers."""
    begin: float
    """Time at which the rollout began, in seconds of perf_counter. All processes of a machine use the same clock."""
    end: float
    env_seconds: float
    """Time in seconds that the worker spent on env steps and on writing transitions."""
    act_seconds: float
    """Time in seconds that the worker spent on choosing actions or, with central inference, on waiting for actions."""


class Inference(Protocol):
    """Interface of the objects that compute the next actions of an env group."""

    def request_actions(self, group: EnvGroup) -> None:
        """Start the computation of the next actions for the env group (vector env) `group`."""

    def wait_for_actions(self, group: EnvGroup) -> ActOut:
        """Wait for the next actions of the env group (vector env) `group`, and return these actions."""


_GROUP_ARRAYS = ("obs_N", "first_N", "over_N", "state_NS", "policy_N")
"""Attributes of EnvGroup that are kept from step to step and that `EnvGroup.state_dict` saves."""


class EnvGroup:
    """A vector env of a worker, the assignment of policies to its rows, and the state that is kept between steps.

    Args:
        index: index of the group in the worker.
        active_P: whether each policy still needs frames, bool [P].
        fixed_N: index of the policy that plays each row, int64 [N], or None to draw a policy for each episode of a row.
    """

    def __init__(
        self,
        index: int,
        env: Env,
        policies: Sequence[Policy],
        active_P: np.ndarray,
        rng: np.random.Generator,
        fixed_N: np.ndarray | None = None,
    ) -> None:
        self.index, self.env, self.policies, self.active_P, self.rng, self.fixed_N = index, env, policies, active_P, rng, fixed_N
        self.draws = len(policies) > 1 and fixed_N is None
        self.begin()

    def begin(self) -> None:
        """Reset the envs, which begins a new episode in each env."""
        info = self.env.info
        count = info.num_envs
        self.obs_N = self.env.reset()
        self.first_N = np.ones(count, np.bool_)
        self.over_N = np.ones(count, np.bool_)
        """Whether the episode of each row is over, bool [N], so that another policy may play the next episode. In Atari, an episode is over
        when the game is over, and not when a life is lost."""
        self.state_NS = self.policies[0].initial_state(count)
        self.turns = TurnTransitionBuilder(count, self.policies[0].state_size) if info.agents else None
        """Builder that joins env steps into the transitions of agents that take turns, or None if the env has no named agents."""
        self.policy_N = np.zeros(count, np.int64) if self.fixed_N is None else self.fixed_N
        self._draw_policies()

    @property
    def policy_inputs_N(self) -> np.ndarray:
        """Observations on which the policies act next, [N, *shape] (see Env.policy_inputs)."""
        return self.env.policy_inputs(self.obs_N)

    @property
    def acting_policy_N(self) -> np.ndarray:
        """Index of the policy that acts next for each row, int64 [N], or −1 if the agent of the row waits for its turn or is absent."""
        acts_N = self.env.acts_N
        return self.policy_N if acts_N is None else np.where(acts_N, self.policy_N, -1)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the envs and their unfinished episodes, or None if the backend of the envs cannot save unfinished
        episodes."""
        env = self.env.state_dict()
        if env["episodes"]["backend"] is None:
            return None
        arrays = {name: getattr(self, name) for name in _GROUP_ARRAYS}
        saved = {name: None if array is None else np.array(array) for name, array in arrays.items()}
        turns = None if self.turns is None else to_arrays(self.turns.state_dict())
        return {"env": env, "rng": generator_state(self.rng), "arrays": saved, "turns": turns}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load a state returned by `state_dict`. Returns True if the unfinished episodes continue, and False if new episodes have begun."""
        self.env.load_state_dict(state["env"])
        set_generator_state(self.rng, state["rng"])
        if not self.env.resume():
            self.begin()
            return False
        for name, array in state["arrays"].items():
            setattr(self, name, array)
        if self.turns is not None:
            self.turns.load_state_dict(to_tensors(state["turns"]))
        return True

    def step(self, slot: RolloutSlot, out: ActOut, ended: list[EndedEpisode]) -> None:
        """Step the envs, and write the transitions that end in this step to `slot`.

        Args:
            out: output of the policies for the current observations.
            ended: list to which the episodes that end in this step are appended.
        """
        t, acts_N = slot.t, self.env.acts_N
        step = self.env.step(self.policies[0].env_action(out.action_N))
        transition = (self.obs_N, self.first_N, self.state_NS, out, step)
        slot.add(self.policy_N, transition if self.turns is None else self.turns.finish_transitions(*transition, acts_N))
        ended += [EndedEpisode(t, episode.env, int(self.policy_N[episode.env]), episode) for episode in step.episodes]
        self.obs_N, self.first_N = step.obs_N, step.first_N
        if out.state_N is not None:
            self.state_NS = np.where(step.first_N[:, None], np.float32(0.0), out.state_N)
        if self.draws:
            for episode in step.episodes:
                self.over_N[episode.env] = True
            self._draw_policies()

    def _draw_policies(self) -> None:
        """Draw an active policy at random for each row in which an episode begins."""
        playing, begins_N = np.flatnonzero(self.active_P), self.first_N & self.over_N
        if self.draws and len(playing) and begins_N.any():
            self.policy_N = np.where(begins_N, self.rng.choice(playing, len(begins_N)), self.policy_N)
            self.over_N &= ~begins_N


class LocalInference:
    """Inference that computes actions in the process of the worker, with the newest weights."""

    def __init__(self, subscriber: WeightSubscriber) -> None:
        self.subscriber = subscriber

    def request_actions(self, group: EnvGroup) -> None: ...

    def wait_for_actions(self, group: EnvGroup) -> ActOut:
        self.subscriber.pull()
        policies = group.policies
        if len(policies) == 1 and group.env.acts_N is None:
            return policies[0].act(group.policy_inputs_N, group.state_NS)
        acting_N, state_NS, inputs_N = group.acting_policy_N, group.state_NS, group.policy_inputs_N
        rows = [np.flatnonzero(acting_N == p) for p in range(len(policies))]
        return merge_outputs(
            group,
            [
                (row_K, policy.act(inputs_N[row_K], None if state_NS is None else state_NS[row_K]))
                for row_K, policy in zip(rows, policies, strict=True)
                if len(row_K)
            ],
        )


def merge_outputs(group: EnvGroup, parts: Sequence[tuple[np.ndarray, ActOut]]) -> ActOut:
    """Combine the outputs of several policies into one output for all rows of an env group.

    Rows for which no policy acts get zero actions and keep their hidden states.

    Args: parts: pair (indices of rows, int64 [K], and output of a policy for these rows) for each policy that acts.
    """
    action, count = group.policies[0].action, len(group.policy_N)
    action_N, logp_N, version_N = np.zeros((count, *action.shape), action.dtype), np.zeros(count, np.float32), np.zeros(count, np.int64)
    state_NS = None if group.state_NS is None else group.state_NS.copy()
    for row_K, out in parts:
        action_N[row_K], logp_N[row_K], version_N[row_K] = out.action_N, out.logp_N, out.version
        if state_NS is not None:
            state_NS[row_K] = out.state_N
    return ActOut(action_N, logp_N, state_NS, version_N)


class WeightSubscriber:
    """Object that updates the policies and envs of a worker with the weights and normalizer statistics that the learner publishes."""

    def __init__(self, weights: Sequence[PublishedWeights], policies: Sequence[Policy], envs: Sequence[Env]) -> None:
        self.weights, self.policies, self.envs = weights, policies, envs
        self.seen = 0.0
        """Number of samples in the normalizer statistics that were copied last."""

    def pull(self) -> None:
        """Copy published weights and normalizer statistics to the worker if the published values are newer than the worker's values."""
        for weights, policy in zip(self.weights, self.policies, strict=True):
            if weights.pull():
                (explore_var, uniform, frame), statistics = weights.acting_state[:3].tolist(), weights.acting_state[3:]
                for env in self.envs:
                    if env.curriculum is not None:  # this policy may have collected fewer frames than another policy
                        env.set_frame(max(env.curriculum.frame, int(frame)))
                policy.version, policy.explore_var, policy.uniform = weights.version, explore_var, bool(uniform)
                if len(statistics) and statistics[0] > self.seen:  # the statistics of another policy may be older
                    self.seen = float(statistics[0])
                    for env in self.envs:
                        env.normalizers.statistics_vector = statistics

    def forget_pulled(self) -> None:
        """Make the next `pull` copy the published values even if they were already copied."""
        self.seen = 0.0
        for weights in self.weights:
            weights.forget_pulled()


class RolloutWorker:
    """A rollout worker, which owns one or several env groups and copies of the policies that act in the envs."""

    def __init__(self, config: WorkerConfig, beat: Beat = no_beat) -> None:
        spec, sampler = config.spec, get_sampler_spec(config.spec)
        self.config, self.beat, self.rollout_len, self.stop = config, beat, spec.worker_rollout_len, Stop()
        self.seeds = worker_seeds(config.seeds, config.index, config.restart)
        beat(BUILDING)
        self.torch = TorchSettings()
        if config.index == config.restart == 0:
            check_env(spec, self.seeds.env, beat, sampler.num_envs_per_worker // num_env_groups(sampler))
        self.envs = [self._make_env(group) for group in range(num_env_groups(sampler))]
        self.torch.restore()
        self.groups: list[EnvGroup] = []

    @property
    def info(self) -> EnvInfo:
        """EnvInfo of one vector env that contains the envs of all workers."""
        return self.envs[0].info.with_num_envs(self.config.spec.env.num_envs)

    def connect_and_reset(self, connect: Callable[[WorkerArrays], None]) -> None:
        """Build the policies, load the learner's weights, and reset the envs.

        Args: connect: function that receives the arrays of this worker and connects them to the arrays of the learner.
        """
        spec, self.policies = self.config.spec, build_policies(self.config, self.info)
        for p, policy in enumerate(self.policies):
            policy.rng = np.random.default_rng(self.seeds.act if p == 0 else [self.seeds.act, p])
        self.arrays = arrays = WorkerArrays(spec, self.info, self.policies, acting_state_size(self.envs[0].normalizers))
        connect(arrays)
        self.slots = arrays.slots[self.config.index]
        self.subscriber = WeightSubscriber(arrays.weights, self.policies, self.envs)
        self.subscriber.pull()
        for env in self.envs:
            env.normalizers.accumulate_deltas()
        self.beat(RESETTING)
        self.groups = [
            EnvGroup(
                index,
                env,
                self.policies,
                arrays.active_P,
                np.random.default_rng([self.seeds.act, index, 1]),
                fixed_policy_indices(spec, env.info),
            )
            for index, env in enumerate(self.envs)
        ]
        self.inference: Inference = LocalInference(self.subscriber)

    def _env_seed(self, group: int) -> int:
        env = self.seeds.env
        return env if group == 0 else int(np.random.SeedSequence([env, group]).generate_state(1)[0]) & 0x7FFFFFFF

    def _make_env(self, group: int) -> Env:
        spec, sampler = self.config.spec, get_sampler_spec(self.config.spec)
        count = sampler.num_envs_per_worker // num_env_groups(sampler)
        agent = spec.agent
        return make_env(
            spec.env,
            self._env_seed(group),
            num_envs=count,
            gamma=agent.algorithm.gamma,
            input=agent.input,
            track_info=spec.meta.track_info,
            defer_normalization=spec.defers_normalization,
        )

    def collect(self, slot: int) -> RolloutReport:
        """Collect a rollout of each env group into the slot with the index `slot`, and return the report on the rollouts."""
        slots, groups, inference, beat = self.slots[slot], self.groups, self.inference, self.beat
        self.torch.restore()
        ended: list[list[EndedEpisode]] = [[] for _ in groups]
        for group_slot in slots:
            group_slot.begin()
        begin = now = perf_counter()
        env_seconds = act_seconds = 0.0
        for group in groups:
            inference.request_actions(group)
        for t in range(self.rollout_len):
            for group, group_slot, episodes in zip(groups, slots, ended, strict=True):
                out = inference.wait_for_actions(group)
                act_end = perf_counter()
                beat(STEPPING)
                group.step(group_slot, out, episodes)
                if t + 1 < self.rollout_len:  # the first actions of the next rollout are chosen later, with newer weights
                    inference.request_actions(group)
                act_seconds += act_end - now
                now = perf_counter()
                env_seconds += now - act_end
            if self.stop.requested:
                break
        rollouts = [
            GroupRolloutReport(list(group_slot.storage.truncations), episodes) for group_slot, episodes in zip(slots, ended, strict=True)
        ]
        deltas = [group.env.normalizers.take_deltas() for group in groups]
        return RolloutReport(rollouts, deltas, begin, now, env_seconds, act_seconds)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the worker between two rollouts, or None if the backend of the envs cannot save unfinished episodes."""
        groups = [group.state_dict() for group in self.groups]
        if None in groups:
            return None
        rngs = [generator_state(policy.rng) for policy in self.policies]
        return {"groups": groups, "policies": rngs, "rng": to_arrays(rng_state("cpu"))}

    def load_state(self, state: dict[str, Any] | None, resumes: int) -> bool:
        """Load a state returned by `state_dict`, except the states of the process-wide random generators. Returns whether the unfinished
        episodes of the state continue.

        Args:
            state: the state, or None. If `state` is None and the run was continued, new episodes begin with new random streams.
            resumes: number of times that the run was continued.
        """
        if state is None:
            self._reseed(resumes)
            return False
        for policy, rng in zip(self.policies, state["policies"], strict=True):
            set_generator_state(policy.rng, rng)
        continued = True
        for group, saved in zip(self.groups, state["groups"], strict=True):
            group.env.normalizers.take_deltas()
            if group.load_state_dict(saved):
                group.env.normalizers.take_deltas()  # drop the observations of the reset, since the unfinished episodes continue
            else:
                continued = False
        self.subscriber.forget_pulled()  # the saved statistics and curriculum may be older than the values that were pulled before
        return continued

    def load_process_state(self, state: dict[str, Any] | None, resumes: int) -> None:
        """Load a state as `load_state` does, and restore the process-wide random generators.

        This method may be called only in a process that runs no other worker.
        """
        if self.load_state(state, resumes):
            assert state is not None
            set_rng_state(to_tensors(state["rng"]), "cpu")

    def _reseed(self, resumes: int) -> None:
        """Begin new episodes with random streams that no earlier start of the run has used. If `resumes` is 0, do nothing."""
        if not resumes:
            return
        self.seeds = worker_seeds(self.config.seeds, self.config.index, self.config.restart + 1000 * resumes)
        for p, policy in enumerate(self.policies):
            policy.rng = np.random.default_rng([self.seeds.act, p])
        for index, group in enumerate(self.groups):
            group.env.normalizers.take_deltas()
            group.rng = np.random.default_rng([self.seeds.act, index, 1])
            group.env.reseed(self._env_seed(index))
            group.begin()

    def close(self) -> None:
        for env in self.envs:
            close_env(env.close)


def seed_process(config: WorkerConfig) -> None:
    """Seed the global random generators of Python, numpy and torch in the process of a worker, since envs may use these generators."""
    seed = worker_seeds(config.seeds, config.index, config.restart).env
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_policies(config: WorkerConfig, info: EnvInfo, device: str = "cpu") -> list[Policy]:
    """Build every policy that the Session trains, with initial weights that the learner's weights replace later."""
    rng = np.random.default_rng(0)  # replaced later by the generator of the worker
    policies = [build_policy(config.spec.agent, replace(info, num_envs=1), rng, device) for _ in range(config.spec.policies)]
    for policy in policies:
        policy.acts_noisily = True
        if policy.net is not None:
            set_matmul_library(policy.net, config.spec.meta.matmul, device)
    return policies
