"""REINFORCE (Williams 1992)."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, Meter
from slm_lab.agent.algorithm.batch import Batch, Minibatch, critic_outputs
from slm_lab.agent.algorithm.on_policy import build_parts
from slm_lab.agent.memory.rollout import Rollout
from slm_lab.agent.ops.losses import policy_gradient_loss
from slm_lab.agent.ops.returns import discounted_returns
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, EnvInfo, Metrics, VecStep
from slm_lab.lib.rng import Seeds
from slm_lab.spec.algorithm import ReinforceSpec
from slm_lab.spec.spec import AgentSpec


class Reinforce(Algorithm):
    """Monte Carlo policy gradient: each action is made likelier in proportion to the return that followed it."""

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, device: str) -> None:
        assert isinstance(agent.algorithm, ReinforceSpec)
        self.spec = agent.algorithm
        self.clock, self.device, self.meter = clock, device, Meter()
        parts = build_parts(agent, info, clock, device, seeds.act, seeds.update, critic=False)
        self.net, self.policy, self.memory, self.trainer = parts.net, parts.policy, parts.memory, parts.trainer
        self.distribution, self.seq_len = parts.distribution, parts.seq_len

    def observe(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        self.memory.add(obs_N, first_N, state_N, out, step)

    def ready(self) -> bool:
        return self.memory.ready

    def update(self) -> Metrics:
        self.trainer.set_lr(self.clock.frame)
        batch = self._with_returns(self.memory.rollout().to(self.device)).whole()
        self.trainer.learning(True)
        loss, entropy = self._loss(batch)
        grad_norm = self.trainer.step(loss)
        self.trainer.learning(False)
        self.clock.opt_step += 1
        self.meter.add(loss=loss.item(), entropy=entropy, grad_norm=grad_norm)
        return self.meter.drain()

    def _with_returns(self, rollout: Rollout) -> Batch:
        # without a critic the bootstrap is 0: a truncated episode's return just ends there
        values = critic_outputs(self.net, rollout, self.seq_len)
        return_TN = discounted_returns(rollout.reward_TN, values.next_output_TN, rollout.terminated_TN, rollout.done_TN, self.spec.gamma)
        if self.spec.center_return:
            return_TN = return_TN - return_TN[rollout.valid_TN].mean()
        return Batch(rollout, values, return_TN, return_TN, self.seq_len)

    def _loss(self, batch: Minibatch) -> tuple[Tensor, float]:
        params_BP, _ = batch.forward(self.net)
        logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
        entropy = entropy_B.mean()
        policy_loss = policy_gradient_loss(logp_B, batch.advantage_B)
        return self.spec.policy_loss_coef * policy_loss - self.entropy_coef * entropy, entropy.item()

    @property
    def lr(self) -> float:
        return self.trainer.lr

    @property
    def entropy_coef(self) -> float:
        return self.spec.entropy_coef_spec.value(self.clock.frame)

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": self.trainer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state["trainer"])
