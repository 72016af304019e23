"""Self-imitation learning (arXiv:1806.05635) on top of A2C or PPO."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.algorithm.actor_critic import ActorCritic
from slm_lab.agent.algorithm.base import TunedHyperparameters
from slm_lab.agent.algorithm.on_policy import PolicyGradient
from slm_lab.agent.algorithm.ppo import PPO
from slm_lab.agent.algorithm.sil_replay import SILReplay
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.ops.losses import self_imitation_policy_loss, self_imitation_value_loss
from slm_lab.agent.replay.replay import Transitions
from slm_lab.agent.replay.sequences import SequenceBatch
from slm_lab.agent.rollout.minibatch import last_observation_values
from slm_lab.agent.rollout.rollout import Rollout, RolloutStorage
from slm_lab.lib.records import ActOut, Metrics, VecStep
from slm_lab.spec.models.algorithm import PPOSILSpec, SILSpec


class SelfImitation(PolicyGradient):
    """Base class that adds self-imitation learning to an on-policy algorithm.

    After each update of the on-policy algorithm, further gradient steps imitate past actions whose return exceeded V(s).
    """

    spec: SILSpec | PPOSILSpec
    replay: SILReplay

    def build(self) -> None:
        super().build()
        rng = np.random.default_rng([self.seeds.update, 1])  # separate from the stream of PPO's minibatch order
        sequences = {"state_size": self.policy.state_size, "seq_len": self.seq_len}
        replay = self.agent_spec.memory.sil_replay
        self.replay = SILReplay(replay, self.info, self.clock, rng, self.spec.gamma, self._bootstrap_value, **sequences)

    def observe(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        super().observe(obs_N, first_N, state_N, out, step)
        self.replay.add(obs_N, first_N, state_N, out, step)

    def learn(self, rollout: Rollout) -> Metrics:  # Algorithm 1; the replay buffer contains what this process observed
        metrics = super().learn(rollout)
        self.replay.add_finished_episodes()
        # if both loss coefficients are 0, take no step: the optimizer's momentum would still move the parameters
        if self.replay.ready and (self.spec.sil_policy_loss_coef or self.spec.sil_val_loss_coef):
            imitation = self._train_by_imitation()
            metrics.extra = {"sil_loss": imitation.loss, **imitation.extra, **metrics.extra}
        return metrics

    def _train_by_imitation(self) -> Metrics:
        for _ in range(self.spec.training_iter):
            batch = self.replay.sample().to(self.device)  # computes V, so layers must be in evaluation mode
            self.meter.begin()
            for _ in range(self.spec.training_batch_iter):
                better_B = self._imitation_step(batch)
            self.trainer.set_train_mode(False)
            self.replay.update_priorities(batch.sampled_rows, better_B)
        return self.meter.end()

    def _imitation_step(self, batch: Transitions | SequenceBatch) -> Tensor:
        """Take one gradient step on a batch, and return max(R − V(s), 0) [B], computed before the gradient step."""
        if isinstance(batch, SequenceBatch):
            params_BP, output_B = (batch.current_outputs(outputs) for outputs in batch.unroll(self.net))
        else:
            params_BP, output_B = self.net(batch.obs_B)
        logp_B = self.distribution.log_prob(params_BP, batch.action_B)
        return_B, value_B = batch.reward_B, output_B.detach()
        weight_B = torch.ones_like(return_B) if batch.weight_B is None else batch.weight_B
        policy_loss = self_imitation_policy_loss(logp_B, return_B, value_B, weight_B)  # eq. 2
        value_loss = self_imitation_value_loss(output_B, return_B, weight_B)  # eq. 3
        loss = self.spec.sil_policy_loss_coef * policy_loss + self.spec.sil_val_loss_coef * value_loss  # eq. 1
        better_B = (return_B - value_B).clamp(min=0.0)
        self.meter.add(loss, sil_policy_loss=policy_loss, sil_val_loss=value_loss, sil_share=(better_B > 0.0).float().mean())
        self.meter.step()
        return better_B

    @ignore_float_errors()
    def _bootstrap_value(self, obs_K: Tensor, state_KS: Tensor) -> Tensor:
        """Return the values V [K] of obs_K, the last observations of K episodes.

        Args: state_KS: hidden states [K, S] before the last observations.
        """
        return last_observation_values(self.net, obs_K.to(self.device), state_KS.to(self.device)).cpu()

    def apply_tuned_hyperparameters(self, tuning: TunedHyperparameters) -> None:
        super().apply_tuned_hyperparameters(tuning)
        self.replay.gamma = self.spec.gamma

    def rollout_storages(self) -> dict[str, RolloutStorage]:
        return {**super().rollout_storages(), "episodes": self.replay.episodes}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "sil_replay": self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.replay.load_state_dict(state["sil_replay"])


class SIL(SelfImitation, ActorCritic):
    """A2C with self-imitation learning."""

    spec: SILSpec


class PPOSIL(SelfImitation, PPO):
    """PPO with self-imitation learning."""

    spec: PPOSILSpec
