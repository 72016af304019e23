"""Soft actor-critic whose critics learn categorical distributions of the return, as in SimbaV2 (arXiv:2502.15280)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.algorithm.replay_actor_critic import AnyBatch, CriticPass
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic
from slm_lab.agent.net.q_nets import QCritics, build_critics
from slm_lab.agent.ops.arrays import as_tensor
from slm_lab.agent.ops.projection import categorical_loss, lowest_mean_distribution, project_distribution
from slm_lab.spec.models.algorithm import DistributionalSACSpec
from slm_lab.spec.models.net import NetSpec


class DistributionalSAC(SoftActorCritic):
    """Soft actor-critic with two critics that learn categorical distributions of the return, as logits [C, B, Z] for Z atoms.

    The actor maximises the means of the critics' distributions.
    """

    spec: DistributionalSACSpec

    def build(self) -> None:
        keys = self.spec
        self.atom_Z = torch.linspace(keys.v_min, keys.v_max, keys.num_atoms, device=self.device)
        super().build()
        reduce = self.reduce
        self.reduce = lambda logit_CBZ: reduce(self.distribution_means(logit_CBZ))

    def build_critics(self, spec: NetSpec) -> QCritics:
        return build_critics(spec, self.info.observation, self.info.action, self.spec.spectral_norm, outputs=self.spec.num_atoms)

    def distribution_means(self, logit_CBZ: Tensor) -> Tensor:
        """Return the means [C, B] of the categorical distributions with the logits logit_CBZ [C, B, Z]."""
        return logit_CBZ.softmax(-1) @ self.atom_Z

    def values_and_targets(self, batch: AnyBatch) -> tuple[CriticPass, Tensor, Tensor]:
        """Return the critics' forward pass, the critics' logits [C, B, Z], and the target distributions [B, Z].

        The targets are the distributions of r + γ (Z(s', a') − α log π(a'|s')), projected onto the atoms.
        """
        next_action = self._sample_actions(self.actor_forward_pass(batch, learn=False).values[0])
        outputs, logit_CBZ, next_CBZ = self._current_and_next_values(batch, as_tensor(next_action.action_BD))
        discount_B = self.spec.gamma * (1.0 - batch.terminated_B)
        return_B = batch.reward_B - discount_B * self.alpha * as_tensor(next_action.logp_B)
        next_BZ = self._combine_critics(next_CBZ.softmax(-1))
        return outputs, logit_CBZ, project_distribution(next_BZ, return_B, discount_B, self.spec.v_min, self.spec.v_max)

    def _combine_critics(self, p_CBZ: Tensor) -> Tensor:
        """Combine the distributions of the two critics, [C, B, Z], to one distribution [B, Z], by the spec key critic_reduction.

        For critic_reduction="mean", the result is the mixture of the two critics' distributions. For critic_reduction="min", the result is
        the distribution with the lower mean.
        """
        return p_CBZ.mean(0) if self.reduction == "mean" else lowest_mean_distribution(p_CBZ, self.atom_Z)

    def critic_loss(self, batch: AnyBatch, logit_CBZ: Tensor, target_BZ: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Return the critics' means [C, B], the sum of the critics' cross-entropies, and the sum's gradient with respect to the logits."""
        critics, rows, number = logit_CBZ.shape
        target = target_BZ.expand(critics, -1, -1).reshape(critics * rows, number)
        weight = None if batch.weight_B is None else batch.weight_B.repeat(critics)
        loss, grad, _ = categorical_loss(logit_CBZ.reshape(critics * rows, number), target, weight)
        return self.distribution_means(logit_CBZ), loss * critics, (grad * critics).view_as(logit_CBZ)

    def priority_error(self, q_CB: Tensor, target_BZ: Tensor) -> Tensor:
        return q_CB.amin(0) - target_BZ @ self.atom_Z
