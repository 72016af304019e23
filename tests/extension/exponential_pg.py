"""A user's algorithm in one file: a policy gradient whose transitions are weighted by exp(advantage / β) (arXiv:1910.00177, eq. 9)."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.models.algorithm import ActorCriticSpec
from slm_lab.spec.models.base import PositiveReal


class ExponentialPGSpec(ActorCriticSpec):
    """Keys of ActorCritic, and the temperature and maximum of the weights."""

    name: str
    beta: PositiveReal = 1.0
    """Temperature β of the weights."""
    weight_max: PositiveReal = 20.0
    """Maximum weight."""

    @classmethod
    def implementation(cls) -> Any:
        import torch

        from slm_lab.agent.algorithm.actor_critic import ActorCritic
        from slm_lab.agent.rollout.minibatch import Minibatch

        class ExponentialPG(ActorCritic):
            """ActorCritic with exponential weights in place of advantages."""

            spec: ExponentialPGSpec

            def _add_loss(self, batch: Minibatch, weight: float) -> None:
                params_BP, value_B = batch.forward(self.net)
                logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
                weight_B = torch.exp(batch.advantage_B / self.spec.beta).clamp(max=self.spec.weight_max)
                policy_loss = -(weight_B * logp_B).mean()
                value_loss = self.value_loss(value_B, batch.target_B)
                self.meter.add(policy_loss + self.spec.val_loss_coef * value_loss, weight, entropy=entropy_B.mean())

        return ExponentialPG
