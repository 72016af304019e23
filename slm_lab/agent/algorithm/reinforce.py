"""REINFORCE (Williams 1992)."""

from __future__ import annotations

from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, GradientMeter
from slm_lab.agent.rollout.minibatch import Batch, Minibatch, critic_outputs
from slm_lab.agent.algorithm.on_policy import build_parts
from slm_lab.agent.rollout.storage import RolloutStorage
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.ops.losses import policy_gradient_loss
from slm_lab.agent.ops.returns import discounted_returns
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import Place
from slm_lab.lib.records import EnvInfo, Metrics
from slm_lab.lib.rng import Seeds
from slm_lab.spec.algorithm import ReinforceSpec
from slm_lab.spec.schedule import Schedule
from slm_lab.spec.spec import AgentSpec


class Reinforce(Algorithm):
    """Monte Carlo policy gradient: each action is made likelier in proportion to the return that followed it."""

    memory: RolloutStorage
    entropy_schedule: Schedule

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, place: Place) -> None:
        assert isinstance(agent.algorithm, ReinforceSpec)
        self.spec = agent.algorithm
        self.clock, self.device, self.entropy_schedule = clock, place.device, self.spec.entropy_coef_spec
        parts = build_parts(agent, info, place, seeds, critic=False)
        self.net, self.policy, self.memory, self.trainer = parts.net, parts.policy, parts.memory, parts.trainer
        self.meter = GradientMeter(parts.trainer, clock)
        self.distribution, self.seq_len = parts.distribution, parts.seq_len

    def learn(self, rollout: Rollout) -> Metrics:
        return self.meter.step_on(rollout.to(self.device), self._with_returns, self._loss)

    def _with_returns(self, rollout: Rollout) -> Batch:
        # without a critic the bootstrap is 0: a truncated episode's return just ends there
        values = critic_outputs(self.net, rollout, self.seq_len)
        return_TN = discounted_returns(rollout.reward_TN, values.next_output_TN, rollout.terminated_TN, rollout.done_TN, self.spec.gamma)
        if self.spec.center_return:
            return_TN = return_TN - return_TN[rollout.valid_TN].mean()
        return Batch(rollout, values, return_TN, return_TN, self.seq_len)

    def _loss(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        params_BP, _ = batch.forward(self.net)
        logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
        entropy = entropy_B.mean()
        policy_loss = policy_gradient_loss(logp_B, batch.advantage_B)
        return self.spec.policy_loss_coef * policy_loss - self.entropy_schedule.value(self.clock.global_frame) * entropy, entropy
