"""What the policy gradient algorithms share."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, Part
from slm_lab.agent.algorithm.common.meter import GradientMeter
from slm_lab.agent.algorithm.common.regression_losses import ValueLoss
from slm_lab.agent.algorithm.common.value_scale import TargetDeviation
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.direct import DirectActorCritic, DirectPass
from slm_lab.agent.net.validity import FastPass, Guard, add_gradient
from slm_lab.agent.ops.arrays import A, array, flat, like, silent, tensor
from slm_lab.agent.ops.distributions import ActionDistribution
from slm_lab.agent.ops.objective import Coefs, Objective, Terms
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.rollout.minibatch import Minibatch, Sequences, Values
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.rollout.storage import RolloutStorage
from slm_lab.spec.models.schedule import Schedule


class PolicyGradient(Algorithm):
    """Policy and value net, distribution and losses of a policy gradient algorithm."""

    net: ActorCriticNet
    distribution: ActionDistribution
    memory: RolloutStorage
    trainer: Trainer
    entropy_schedule: Schedule
    in_closed_form: tuple[str, ...] = ("scaled", "value_std")
    """Methods that `objective` replaces, or that need tensors: if a subclass of the class that sets this overrides one, autograd computes
    the gradients."""
    deviation: TargetDeviation | None
    """Standard deviation of the value targets, if the value loss is divided by it."""

    def build(self) -> None:
        self.meter, self.value_loss = GradientMeter(self.trainer, self.clock), ValueLoss(self.agent_spec.net.loss_spec)
        self.entropy_schedule = self.spec.entropy_coef_spec
        self.net.fast_values = self._fast_values
        self.deviation = TargetDeviation() if getattr(self.spec, "normalize_v_targets", False) else None

    @cached_property
    def objective(self) -> Objective | None:
        """The loss in closed form; None: through autograd. Known from the first update on, when subclasses have been built."""
        squared = self.value_loss.function is F.mse_loss and type(self.value_loss) is ValueLoss
        scaled = type(self.deviation) in (type(None), TargetDeviation)
        if not (squared and scaled and Objective.supports(self.distribution, self.device)) or self._overrides_closed_form():
            return None
        return Objective(self.distribution)

    def _overrides_closed_form(self) -> bool:
        """Return whether a subclass, or this object, has another method in place of one that the closed form replaces."""
        kind = type(self)
        owner = next(base for base in kind.__mro__ if "in_closed_form" in vars(base))
        return any(name in vars(self) or getattr(kind, name) is not getattr(owner, name) for name in self.in_closed_form)

    @property
    def value_std(self) -> float | None:
        """What the value loss divides values and targets by; None: nothing."""
        return None if self.deviation is None else self.deviation.std

    def scaled(self, value_B: Tensor) -> Tensor:
        """Return values or their targets as the value loss compares them."""
        return value_B if self.deviation is None else self.deviation.scale(value_B)

    def parts(self) -> dict[str, Part]:
        return super().parts() | ({} if self.deviation is None else {"deviation": self.deviation})

    @cached_property
    def _direct(self) -> FastPass[DirectActorCritic]:
        """Actor and critic without a graph. Built at first use: `products` is set after the net is built."""
        return FastPass(DirectActorCritic.of(self.net), Guard(self.net.modules(), self.trainer.flat))

    def record(self, obs_B: np.ndarray) -> DirectPass | None:
        """Return the outputs of actor and critic for `closed_form`; None if they need autograd."""
        direct = None if self.objective is None else self._direct.get()
        return None if direct is None else direct.record(obs_B)

    def _fast_values(self, obs_B: Tensor) -> Tensor | None:
        direct = self._direct.get(learn=False)
        if direct is None:
            return None
        with silent():
            return direct.values(obs_B)

    def closed_form(self, batch: Minibatch[Any], coefs: Coefs, weight: float = 1.0) -> Terms:
        """Return the objective of a minibatch. To be called inside `silent()`.

        If actor and critic run without autograd, `weight` times its gradient is added to `Parameter.grad` here, and the loss is a float.
        """
        assert self.objective is not None
        rows = (batch.action_B, batch.logp_B, batch.advantage_B, batch.target_B)
        recorded = batch.learnable
        if recorded is None and not isinstance(batch.inputs, Sequences):
            recorded = self.record(array(batch.inputs))
        if not isinstance(recorded, DirectPass):
            return self.objective(*batch.forward(self.net), *rows, coefs)
        result = self.objective.with_gradient(recorded.params_BP, recorded.value_B, *rows, coefs, weight)
        recorded.backward(result.grad_params_BP, result.grad_value_B)
        if result.grad_log_std_D is not None:
            add_gradient(self.distribution.log_std, torch.from_numpy(result.grad_log_std_D))  # type: ignore[attr-defined]  # a Normal
        return result.terms


@torch.no_grad()
def log_ratio(distribution: ActionDistribution, rollout: Rollout[A], values: Values[A]) -> A:
    """Return log π(a|s) − log μ(a|s) [T, N] of a rollout's actions: π by `values.params_TNP`, μ the policy that acted."""
    assert values.params_TNP is not None
    logp_B = distribution.log_prob(tensor(flat(values.params_TNP)), tensor(flat(rollout.action_TN)))
    log_ratio_TN = logp_B.view(rollout.logp_TN.shape) - tensor(rollout.logp_TN)
    # a row that is not a transition can hold anything, and NaN would spread even through a decay of 0; others stay, since a transition
    # that is masked for its lag is invalid too, and later ones are corrected through it
    return like(rollout.logp_TN, torch.where(log_ratio_TN.isnan() & ~tensor(rollout.valid_TN), 0.0, log_ratio_TN))
