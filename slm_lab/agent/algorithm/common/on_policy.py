"""Base class of the policy-gradient algorithms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, Part
from slm_lab.agent.algorithm.common.meter import GradientMeter
from slm_lab.agent.algorithm.common.value_scale import TargetDeviation
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.passes.validity import add_gradient
from slm_lab.agent.ops.arrays import A, flat, like, tensor
from slm_lab.agent.ops.distributions import ActionDistribution
from slm_lab.agent.ops.losses import ValueLoss
from slm_lab.agent.ops.objective import Coefs, Objective, Terms, differentiate
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.rollout.minibatch import Minibatch, Values
from slm_lab.agent.rollout.rollout import Rollout, RolloutStorage
from slm_lab.spec.models.base import Schedule


class PolicyGradient(Algorithm):
    """Learn a policy and a value net from rollouts; subclasses define the objective.

    The objective is computed in closed form where that is possible, and else by a method of the subclass and autograd.
    """

    net: ActorCriticNet
    distribution: ActionDistribution
    memory: RolloutStorage
    trainer: Trainer
    entropy_schedule: Schedule
    in_closed_form: tuple[str, ...] = ("scaled", "value_std")
    """Methods that `closed_form` replaces, or that need tensors: if a subclass of the class that sets this overrides one, it is used, and
    autograd computes the gradients."""
    deviation: TargetDeviation | None
    """Standard deviation of the value targets, if the value loss is divided by it."""

    def build(self) -> None:
        self.meter, self.value_loss = GradientMeter(self.trainer, self.clock), ValueLoss(self.agent_spec.net.loss_spec)
        self.net.use_direct(self.trainer.flat)
        self.entropy_schedule = self.spec.entropy_coef_spec
        self.deviation = TargetDeviation() if getattr(self.spec, "normalize_v_targets", False) else None

    @cached_property
    def closed_form(self) -> Objective | None:
        """The objective in closed form; None: through autograd. Known from the first update on, when subclasses have been built."""
        return Objective(self.distribution) if self._has_closed_form() and not self._overrides_closed_form() else None

    def _has_closed_form(self) -> bool:
        """Return whether the objective of the spec has a closed form."""
        squared = self.value_loss.function is F.mse_loss and type(self.value_loss) is ValueLoss
        scaled = type(self.deviation) in (type(None), TargetDeviation)
        return squared and scaled and Objective.supports(self.distribution, self.device)

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

    def propagate(self, objective: Callable[[Tensor, Tensor], Terms], batch: Minibatch[Any], coefs: Coefs, weight: float = 1.0) -> Terms:
        """Compute the objective of a minibatch, and add `weight` times its gradient to `Parameter.grad`. To be called inside `silent()`.

        Args: objective: of distribution parameters [B, P] and values [B]. coefs: with which `closed_form` computes the same.
        """
        closed_form = self.closed_form
        outputs = batch.forward_pass(self.net, graph=closed_form is None)
        if closed_form is None:
            terms, grads, _ = differentiate(objective, outputs.values, weight)
        else:
            rows = (batch.action_B, batch.logp_B, batch.advantage_B, batch.target_B)
            terms, grads, grad_log_std_D = closed_form(outputs.values, *rows, coefs, weight)
            if grad_log_std_D is not None:
                add_gradient(self.distribution.log_std, torch.from_numpy(grad_log_std_D))  # type: ignore[attr-defined]  # a Normal
        outputs.backward(*grads)
        return terms


@torch.no_grad()
def log_ratio(distribution: ActionDistribution, rollout: Rollout[A], values: Values[A]) -> A:
    """Return log π(a|s) − log μ(a|s) [T, N] of a rollout's actions: π by `values.params_TNP`, μ the policy that acted."""
    assert values.params_TNP is not None
    logp_B = distribution.log_prob(tensor(flat(values.params_TNP)), tensor(flat(rollout.action_TN)))
    log_ratio_TN = logp_B.view(rollout.logp_TN.shape) - tensor(rollout.logp_TN)
    # a row that is not a transition can hold anything, and NaN would spread even through a decay of 0; others stay, since a transition
    # that is masked for its lag is invalid too, and later ones are corrected through it
    return like(rollout.logp_TN, torch.where(log_ratio_TN.isnan() & ~tensor(rollout.valid_TN), 0.0, log_ratio_TN))
