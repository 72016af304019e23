"""Truncated quantile critics (TQC, arXiv:2005.04269): soft actor-critic with critics that learn the distribution of the return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slm_lab.agent.algorithm.replay_actor_critic import AnyBatch
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic
from slm_lab.agent.net.q_nets import QCritics, build_critics
from slm_lab.agent.ops.objective import REDUCTIONS
from slm_lab.agent.ops.quantiles import quantile_huber_loss
from slm_lab.agent.ops.targets import truncated_mixture
from slm_lab.spec.models.algorithm import TQCSpec
from slm_lab.spec.models.net import NetSpec


class TQC(SoftActorCritic):
    """Soft actor-critic with truncated quantile critics: each of the C critics returns M quantiles of the return, [C, B, M].

    The actor maximises the mean of all quantiles (Algorithm 1).
    """

    spec: TQCSpec

    def build(self) -> None:
        super().build()
        self.reduction = "quantiles"
        self.reduce = REDUCTIONS[self.reduction]

    def build_critics(self, spec: NetSpec) -> QCritics:
        keys, space = self.spec, self.info
        return build_critics(spec, space.observation, space.action, keys.spectral_norm, keys.num_critics, keys.num_quantiles)

    def _soft_value(self, next_q_CBM: Tensor, cost_B: Tensor) -> Tensor:
        """Return the soft value of s' as K quantiles, [B, K], after the greatest quantiles were dropped (equations 10 and 11)."""
        return truncated_mixture(next_q_CBM, self.spec.dropped_quantiles) - cost_B.unsqueeze(1)

    def td_target(self, batch: AnyBatch, next_value_BK: Tensor) -> Tensor:
        return super().td_target(batch, next_value_BK.T).T

    def critic_loss(self, batch: AnyBatch, q_CBM: Tensor, target_BK: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Return the means of the quantiles [C, B], the loss, and the gradient of the loss with respect to the quantiles.

        The loss is the sum over critics of the mean quantile Huber loss over transitions, quantiles and targets (equation 12).
        """
        critics, rows, number = q_CBM.shape
        target = target_BK.expand(critics, -1, -1).reshape(critics * rows, -1)
        weight = None if batch.weight_B is None else batch.weight_B.repeat(critics)
        loss, grad = quantile_huber_loss(q_CBM.reshape(critics * rows, number), target, weight)
        return q_CBM.mean(2), loss * (critics / number), (grad * (critics / number)).view_as(q_CBM)

    def priority_error(self, q_CB: Tensor, target_BK: Tensor) -> Tensor:
        return q_CB.mean(0) - target_BK.mean(1)
