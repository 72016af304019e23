"""Self-imitation learning (arXiv:1806.05635) on top of A2C or PPO."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.algorithm.actor_critic import ActorCritic
from slm_lab.agent.algorithm.base import Algorithm, Tuning
from slm_lab.agent.algorithm.common.meter import GradientMeter
from slm_lab.agent.algorithm.common.sil_replay import SILReplay
from slm_lab.agent.algorithm.ppo import PPO
from slm_lab.agent.ops.losses import self_imitation_policy_loss, self_imitation_value_loss
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import Policy
from slm_lab.agent.replay.replay import Transitions
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.rollout.storage import RolloutStorage
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, EnvInfo, Metrics, VecStep
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import Shareable
from slm_lab.spec.algorithm import PPOSILSpec, SILSpec
from slm_lab.spec.memory import SILReplayKeys
from slm_lab.spec.spec import AgentSpec

ON_POLICY: dict[type[SILSpec | PPOSILSpec], type[ActorCritic | PPO]] = {SILSpec: ActorCritic, PPOSILSpec: PPO}
"""The algorithm that learns from fresh experience."""


class SIL(Algorithm):
    """An on-policy algorithm, and after each of its updates steps towards past actions that turned out better than V."""

    memory: RolloutStorage
    replay: SILReplay
    trainer: Trainer

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, policy: Policy, device: str = "cpu") -> None:
        super().__init__(agent, info, clock, seeds, policy, device)
        assert isinstance(agent.memory, SILReplayKeys)  # checked by the rules of specs
        kind = next(kind for model, kind in ON_POLICY.items() if isinstance(agent.algorithm, model))
        self.on_policy = kind(agent, info, clock, seeds, policy, device)
        self.diagnostics = self.on_policy.diagnostics
        self.memory, self.trainer, self.entropy_schedule = self.on_policy.memory, self.on_policy.trainer, self.on_policy.entropy_schedule
        self.net, self.distribution, self.scale = self.on_policy.net, self.on_policy.distribution, self.on_policy.scale
        self.meter = GradientMeter(self.trainer, clock)
        rng = np.random.default_rng([seeds.update, 1])  # not the stream that orders PPO's minibatches
        self.replay = SILReplay(agent.memory.sil_replay, info, clock, rng, self.spec.gamma, self._value)

    def observe(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        super().observe(obs_N, first_N, state_N, out, step)
        self.replay.add(obs_N, first_N, state_N, out, step)

    def learn(self, rollout: Rollout) -> Metrics:  # Algorithm 1; the replay buffer holds what was observed here
        metrics = self.on_policy.learn(rollout)
        self.replay.take_in()
        # without a loss a step would still follow the optimizer's momentum
        if self.replay.ready and (self.spec.sil_policy_loss_coef or self.spec.sil_val_loss_coef):
            imitation = self._imitate()
            metrics.extra = {"sil_loss": imitation.loss, **imitation.extra, **metrics.extra}
        return metrics

    def _imitate(self) -> Metrics:
        for _ in range(self.spec.training_iter):
            batch = self.replay.sample().to(self.device)  # computes V, with layers in evaluation mode
            self.meter.begin()
            for _ in range(self.spec.training_batch_iter):
                better_B = self._step(batch)
            self.trainer.set_train_mode(False)
            self.replay.update_priorities(batch.row_B, better_B)
        return self.meter.end()

    def _step(self, batch: Transitions) -> Tensor:
        """Take one gradient step on a batch; return (R − V)₊ [B] before it, in reward units.

        The policy loss weighs in reward units. The critic learns on its own scale, as it does from fresh experience; where V is above R,
        it is so on either.
        """
        params_BP, output_B = self.net(batch.obs_B)
        logp_B = self.distribution.log_prob(params_BP, batch.action_B)
        return_B, value_B = batch.reward_B, self.scale.decode(output_B.detach())
        weight_B = torch.ones_like(return_B) if batch.weight_B is None else batch.weight_B
        policy_loss = self_imitation_policy_loss(logp_B, return_B, value_B, weight_B)  # eq. 2
        value_loss = self_imitation_value_loss(output_B, self.scale.encode(return_B), weight_B)  # eq. 3
        loss = self.spec.sil_policy_loss_coef * policy_loss + self.spec.sil_val_loss_coef * value_loss  # eq. 1
        better_B = (return_B - value_B).clamp(min=0.0)
        self.meter.add(loss, sil_policy_loss=policy_loss, sil_val_loss=value_loss, sil_share=(better_B > 0.0).float().mean())
        self.meter.step()
        return better_B

    @torch.no_grad()
    def _value(self, obs_K: Tensor) -> Tensor:
        """Return V of observations, in reward units."""
        return self.scale.decode(self.net.critic(obs_K.to(self.device))).cpu()

    def tune(self, tuning: Tuning) -> None:
        self.on_policy.tune(tuning)
        self.tuning, self.spec, self.entropy_schedule = tuning, self.on_policy.spec, self.on_policy.entropy_schedule
        self.replay.gamma = self.spec.gamma

    def shared_parts(self) -> dict[str, Shareable]:
        return self.on_policy.shared_parts()

    def storages(self) -> dict[str, RolloutStorage]:
        return {**super().storages(), "episodes": self.replay.episodes}

    def state_dict(self) -> dict[str, Any]:
        return {**self.on_policy.state_dict(), "sil_replay": self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (tuning := Tuning(*state["tuning"])) != self.tuning:
            self.tune(tuning)
        self.on_policy.load_state_dict(state)
        self.replay.load_state_dict(state["sil_replay"])
