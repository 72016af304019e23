"""The whole spec, and quantities that depend on several sections."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.algorithm import Algorithm, PPOSpec
from slm_lab.spec.base import SpecModel
from slm_lab.spec.env import EnvSpec
from slm_lab.spec.memory import Memory, OnPolicyBatchReplaySpec
from slm_lab.spec.meta import MetaSpec
from slm_lab.spec.net import Net

REPLAY_ROWS = 16
"""Vector steps of a worker's rollout for a replay buffer: short, because workers update their policy after each."""


class AgentSpec(SpecModel):
    """The agent: algorithm, memory and networks."""

    name: str = ""
    """A label (A2C, PPO, …)."""
    algorithm: Algorithm
    """Algorithm and its hyperparameters."""
    memory: Memory = OnPolicyBatchReplaySpec(name="OnPolicyBatchReplay")
    """Memory that the algorithm learns from."""
    net: Net | None = None
    """Networks, optimizers and learning rates; Random needs none."""
    critic_net: Net | None = None
    """SoftActorCritic, CrossQ: the critics' network; absent: the same as `net`."""

    @property
    def rollout_len(self) -> int:
        """Return the interval between trainings: vector steps, or episodes for a memory of episodes."""
        if not self.algorithm.learns:
            return 1
        return self.algorithm.rollout_len(1 if self.memory.episodes else 32)


class Spec(SpecModel):
    """A spec: agent, env, meta and search."""

    name: str
    """Name of the spec in its file."""
    agent: AgentSpec
    """Algorithm, memory and networks."""
    env: EnvSpec
    """Environment."""
    meta: MetaSpec = MetaSpec()
    """Sessions, logging, checkpoints, distribution."""
    search: dict[str, Any] | None = None
    """Search space: "key__distribution": [arguments], nested like the spec."""

    @property
    def session_frames(self) -> int:
        """Return the frames of each Session and policy: env.max_frame, or with meta.distributed the Session's share of it."""
        if not self.meta.distributed:
            return self.env.max_frame
        return -(-self.env.max_frame // (self.meta.max_session * self.env.num_envs)) * self.env.num_envs

    @property
    def rollout_rows(self) -> int:
        """Return the vector steps of a rollout worker's rollout."""
        return self.agent.rollout_len if self.agent.algorithm.on_policy else REPLAY_ROWS

    @property
    def dataset_columns(self) -> int:
        """Return the number of rollouts, each of one env, in a dataset of meta.sampler."""
        algorithm, sampler = self.agent.algorithm, self.meta.sampler
        assert sampler is not None
        if isinstance(algorithm, PPOSpec):
            return algorithm.minibatch_size * sampler.num_batches_per_epoch // self.rollout_rows
        return sampler.num_envs

    @property
    def policies(self) -> int:
        """Return the number of policies that a Session trains."""
        return 1 if self.meta.sampler is None else self.meta.sampler.num_policies
