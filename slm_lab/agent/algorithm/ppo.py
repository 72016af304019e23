"""Proximal policy optimisation (arXiv:1707.06347)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, GradientMeter
from slm_lab.agent.rollout.minibatch import Batch, Minibatch, critic_outputs
from slm_lab.agent.algorithm.on_policy import build_parts, log_ratio, value_scale
from slm_lab.agent.algorithm.common.value_scale import PercentileScale, standardize_valid
from slm_lab.agent.rollout.storage import RolloutStorage
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.ops.losses import clipped_surrogate_loss, clipped_value_loss
from slm_lab.agent.ops.returns import gae, vtrace
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import Place
from slm_lab.lib.records import EnvInfo, Metrics
from slm_lab.lib.rng import Seeds, generator_state, set_generator_state
from slm_lab.spec.algorithm import PPOSpec
from slm_lab.spec.schedule import Schedule
from slm_lab.spec.spec import AgentSpec


class PPO(Algorithm):
    """Several epochs over each rollout; the clipped objective keeps the policy near the one that acted."""

    memory: RolloutStorage
    entropy_schedule: Schedule

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, place: Place) -> None:
        assert isinstance(agent.algorithm, PPOSpec)
        self.spec = agent.algorithm
        self.scale = value_scale(self.spec.symlog, self.spec.normalize_v_targets, place.heap)
        self.percentile = PercentileScale(place.heap)
        self.clock, self.device, self.entropy_schedule = clock, place.device, self.spec.entropy_coef_spec
        parts = build_parts(agent, info, place, seeds, critic=True)
        self.net, self.policy, self.memory, self.trainer = parts.net, parts.policy, parts.memory, parts.trainer
        self.meter = GradientMeter(parts.trainer, clock)
        self.distribution, self.value_loss, self.seq_len, self.rng = parts.distribution, parts.value_loss, parts.seq_len, parts.rng

    def learn(self, rollout: Rollout) -> Metrics:  # Algorithm 1
        frame = self.clock.global_frame
        clip_eps, entropy_coef = self.spec.clip_eps_spec.value(frame), self.entropy_schedule.value(frame)
        batch = self._with_advantages(rollout.to(self.device))
        self.meter.begin()
        for minibatch in batch.epochs(self.spec.training_epoch, self.spec.minibatch_size, self.rng):
            loss, entropy = self._loss(minibatch, clip_eps, entropy_coef)  # eq. 9
            self.meter.add(loss, entropy=entropy)
            self.meter.step()
        return self.meter.end()

    def _with_advantages(self, rollout: Rollout) -> Batch:
        spec, valid_TN = self.spec, rollout.valid_TN
        values = critic_outputs(self.net, rollout, self.seq_len, actor=spec.with_vtrace)
        value_TN, next_value_TN = self.scale.decode(values.output_TN), self.scale.decode(values.next_output_TN)
        rows = (rollout.reward_TN, value_TN, next_value_TN, rollout.terminated_TN, rollout.done_TN)
        if spec.with_vtrace:  # not weighed by ρ: the surrogate brings the ratio to the policy that acted
            ratio_TN = log_ratio(self.distribution, rollout, values)
            return_TN, advantage_TN, _ = vtrace(ratio_TN, *rows, spec.gamma, spec.lam, spec.rho_bar, spec.c_bar)
        else:
            advantage_TN = gae(*rows, spec.gamma, spec.lam)
            return_TN = advantage_TN + value_TN
        self.scale.update(return_TN, valid_TN)
        if spec.normalize_advantages == "percentile":
            advantage_TN = self.percentile(advantage_TN, return_TN[valid_TN])
        elif spec.normalize_advantages:
            advantage_TN = standardize_valid(advantage_TN, valid_TN)
        return Batch(rollout, values, advantage_TN, self.scale.encode(return_TN), self.seq_len)

    def _loss(self, batch: Minibatch, clip_eps: float, entropy_coef: float) -> tuple[Tensor, Tensor]:
        params_BP, value_B = batch.forward(self.net)
        logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
        entropy = entropy_B.mean()
        policy_loss = clipped_surrogate_loss(logp_B, batch.logp_B, batch.advantage_B, clip_eps)
        if self.spec.clip_vloss:
            value_loss = clipped_value_loss(value_B, batch.value_B, batch.target_B, clip_eps, self.value_loss)
        else:
            value_loss = self.value_loss(value_B, batch.target_B)
        loss = torch.add(policy_loss, value_loss, alpha=self.spec.val_loss_coef)
        return (torch.sub(loss, entropy, alpha=entropy_coef) if entropy_coef else loss), entropy

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "scale": self.scale.state_dict(),
            "advantage_range": self.percentile.range,
            "rng": generator_state(self.rng),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.scale.load_state_dict(state["scale"])
        self.percentile.range = state["advantage_range"]
        set_generator_state(self.rng, state["rng"])
