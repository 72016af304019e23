"""The whole spec, and the checks that look across its sections."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.algorithm import Algorithm, PPOSpec
from slm_lab.spec.base import SpecModel
from slm_lab.spec.env import EnvSpec
from slm_lab.spec.memory import Memory, OnPolicyBatchReplaySpec
from slm_lab.spec.meta import MetaSpec
from slm_lab.spec.net import Net

REPLAY_ROWS = 16
"""Vector steps of a rollout that goes into a replay memory: short, for the policy that acts is brought up to date after each."""


class AgentSpec(SpecModel):
    """Who learns."""

    name: str = ""
    """A label (A2C, PPO, …)."""
    algorithm: Algorithm
    """Which algorithm learns, and its hyperparameters."""
    memory: Memory = OnPolicyBatchReplaySpec(name="OnPolicyBatchReplay")
    """What it learns from."""
    net: Net | None = None
    """The networks; Random needs none."""
    critic_net: Net | None = None
    """SoftActorCritic, CrossQ: the critics' network; absent: as `net`."""

    @property
    def rollout_len(self) -> int:
        """training_frequency as it applies: vector steps for OnPolicyBatchReplay, episodes for OnPolicyReplay."""
        if not self.algorithm.learns:
            return 1
        return self.algorithm.rollout_len(1 if self.memory.episodes else 32)


class Spec(SpecModel):
    """A spec: who learns (agent), in what (env), how (meta), and what to search over (search)."""

    name: str
    """Its name in the spec file."""
    agent: AgentSpec
    """Who learns."""
    env: EnvSpec
    """In what."""
    meta: MetaSpec = MetaSpec()
    """How the experiment runs."""
    search: dict[str, Any] | None = None
    """Which keys to search over, "key__distribution": [arguments], nested where the keys stand."""

    @property
    def session_frames(self) -> int:
        """Frames of each Session (of each of its policies): env.max_frame, or its share of it where all train one net."""
        if not self.meta.distributed:
            return self.env.max_frame
        return -(-self.env.max_frame // (self.meta.max_session * self.env.num_envs)) * self.env.num_envs

    @property
    def rollout_rows(self) -> int:
        """Vector steps that a rollout worker collects at a time, for meta.sampler."""
        return self.agent.rollout_len if self.agent.algorithm.on_policy else REPLAY_ROWS

    @property
    def dataset_columns(self) -> int:
        """Rollouts, of one env each, that a dataset is made of, for meta.sampler."""
        algorithm, sampler = self.agent.algorithm, self.meta.sampler
        assert sampler is not None
        if isinstance(algorithm, PPOSpec):
            return algorithm.minibatch_size * sampler.num_batches_per_epoch // self.rollout_rows
        return sampler.num_envs

    @property
    def policies(self) -> int:
        """Policies that a Session trains."""
        return 1 if self.meta.sampler is None else self.meta.sampler.num_policies
