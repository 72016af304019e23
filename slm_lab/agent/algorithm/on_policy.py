"""Base class of the policy-gradient algorithms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, TrainablePart, add_log_std_gradient
from slm_lab.agent.algorithm.meter import GradientMeter
from slm_lab.agent.algorithm.value_scale import ValueTargetDeviation
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.ops.arrays import A, as_tensor, as_type_of, flatten_time_and_envs
from slm_lab.agent.ops.distributions import ActionDistribution
from slm_lab.agent.ops.losses import ValueLoss
from slm_lab.agent.ops.objective import Objective, ObjectiveCoefficients, ObjectiveTerms, differentiate
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.rollout.minibatch import Minibatch, RolloutOutputs
from slm_lab.agent.rollout.rollout import Rollout, RolloutStorage
from slm_lab.spec.models.base import Schedule


class PolicyGradient(Algorithm):
    """Base class of algorithms that learn a policy, and usually a critic, from rollouts. Subclasses define the objective.

    If the property `closed_form` is not None, the gradient of the objective is computed in closed form. If `closed_form` is None, a method
    of the subclass computes the objective, and autograd computes the gradient of the objective.
    """

    net: ActorCriticNet
    distribution: ActionDistribution
    memory: RolloutStorage
    trainer: Trainer
    entropy_schedule: Schedule
    in_closed_form: tuple[str, ...] = ("scale_values", "value_std")
    """Names of methods that `closed_form` replaces, or that need tensors. If a subclass of the class that defines this tuple overrides one
    of these methods, the override is used, and autograd computes the gradients."""
    deviation: ValueTargetDeviation | None
    """Running standard deviation of the value targets, or None to use values and targets unchanged. The value loss divides values and
    targets by this standard deviation."""

    def build(self) -> None:
        self.meter, self.value_loss = GradientMeter(self.trainer, self.clock), ValueLoss(self.agent_spec.net.loss_spec)
        self.net.enable_graph_free_pass(self.trainer.flat)
        self.entropy_schedule = self.spec.entropy_coef_spec
        self.deviation = ValueTargetDeviation() if getattr(self.spec, "normalize_v_targets", False) else None

    @cached_property
    def closed_form(self) -> Objective | None:
        """Objective whose gradient is computed in closed form, or None if autograd computes the gradient.

        Whether the closed form is used is decided at the first update, when subclasses are fully built.
        """
        return Objective(self.distribution) if self._has_closed_form() and not self._overrides_closed_form() else None

    def _has_closed_form(self) -> bool:
        """Return whether the objective that the spec describes has a closed form."""
        squared = self.value_loss.function is F.mse_loss and type(self.value_loss) is ValueLoss
        scaled = type(self.deviation) in (type(None), ValueTargetDeviation)
        return squared and scaled and Objective.supports(self.distribution, self.device)

    def _overrides_closed_form(self) -> bool:
        """Return whether a method named in `in_closed_form` is overridden.

        A method counts as overridden if this object has an attribute with the method's name, or if a subclass of the class that defines
        `in_closed_form` overrides the method.
        """
        kind = type(self)
        owner = next(base for base in kind.__mro__ if "in_closed_form" in vars(base))
        return any(name in vars(self) or getattr(kind, name) is not getattr(owner, name) for name in self.in_closed_form)

    @property
    def value_std(self) -> float | None:
        """Number by which values and targets are divided in the value loss, or None if values and targets are not divided."""
        return None if self.deviation is None else self.deviation.std

    def scale_values(self, value_B: Tensor) -> Tensor:
        """Return values or targets [B], divided by `value_std` and clamped, or unchanged if `value_std` is None."""
        return value_B if self.deviation is None else self.deviation.scale(value_B)

    def parts(self) -> dict[str, TrainablePart]:
        return super().parts() | ({} if self.deviation is None else {"deviation": self.deviation})

    def add_objective_gradient(
        self,
        objective: Callable[[Tensor, Tensor], ObjectiveTerms],
        batch: Minibatch[Any],
        coefs: ObjectiveCoefficients,
        weight: float = 1.0,
    ) -> ObjectiveTerms:
        """Compute the objective of a minibatch, add `weight` times its gradient to `Parameter.grad`, and return the terms of the objective.

        Call this method inside `ignore_float_errors()`.

        Args: objective: function that computes the objective from distribution parameters [B, P] and values [B], used if `closed_form` is
        None. coefs: coefficients of the objective, used if `closed_form` is not None.
        """
        closed_form = self.closed_form
        outputs = batch.forward_pass(self.net, graph=closed_form is None)
        if closed_form is None:
            terms, grads, _ = differentiate(objective, outputs.values, weight)
        else:
            rows = (batch.action_B, batch.logp_B, batch.advantage_B, batch.target_B)
            terms, grads, grad_log_std_D = closed_form(outputs.values, *rows, coefs, weight)
            add_log_std_gradient(self.distribution, grad_log_std_D)
        outputs.backward(*grads)
        return terms


@torch.no_grad()
def log_ratio(distribution: ActionDistribution, rollout: Rollout[A], values: RolloutOutputs[A]) -> A:
    """Return log π(a|s) − log μ(a|s) [T, N] for the actions of a rollout.

    The distribution parameters of the policy π are in `values.params_TNP`. The behaviour policy μ collected the rollout.
    """
    assert values.params_TNP is not None
    logp_B = distribution.log_prob(as_tensor(flatten_time_and_envs(values.params_TNP)), as_tensor(flatten_time_and_envs(rollout.action_TN)))
    log_ratio_TN = logp_B.view(rollout.logp_TN.shape) - as_tensor(rollout.logp_TN)
    # rows that are not transitions can contain any values: replace NaN, which would spread even through a decay of 0; keep other values,
    # because transitions masked for their lag are invalid too, and V-trace propagates corrections of later rows through them
    return as_type_of(rollout.logp_TN, torch.where(log_ratio_TN.isnan() & ~as_tensor(rollout.valid_TN), 0.0, log_ratio_TN))
