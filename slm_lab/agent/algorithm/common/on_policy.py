"""Base class of the policy gradient algorithms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, Part
from slm_lab.agent.algorithm.common.meter import GradientMeter
from slm_lab.agent.algorithm.common.regression_losses import ValueLoss
from slm_lab.agent.algorithm.common.value_scale import TargetDeviation
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.passes.direct import DirectActorCritic
from slm_lab.agent.net.passes.validity import FastPass, Guard, add_gradient
from slm_lab.agent.ops.arrays import A, array, flat, like, silent, tensor
from slm_lab.agent.ops.distributions import ActionDistribution
from slm_lab.agent.ops.objective import Coefs, Objective, Terms
from slm_lab.agent.ops.passes import GraphPass, RowPass, gradients, leaves
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.rollout.minibatch import Minibatch, Sequences, Values, one_pass
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
        self.deviation = TargetDeviation() if getattr(self.spec, "normalize_v_targets", False) else None

    @cached_property
    def objective(self) -> Objective | None:
        """The loss in closed form; None: through autograd. Known from the first update on, when subclasses have been built."""
        squared = self.value_loss.function is F.mse_loss and type(self.value_loss) is ValueLoss
        scaled = type(self.deviation) in (type(None), TargetDeviation)
        supported = squared and scaled and Objective.supports(self.distribution, self.device)
        if not (self.has_closed_form and supported) or self._overrides_closed_form():
            return None
        return Objective(self.distribution)

    @property
    def has_closed_form(self) -> bool:
        """Whether `ops.objective` has the loss of the spec."""
        return True

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

    def state_values(self, obs_B: Tensor) -> Tensor:
        """Return the critic's values [B], without gradients; feed-forward nets only."""
        direct = self._direct.get(learn=False)
        if direct is None or direct.critic is None:
            return self.net.critic(obs_B)
        with silent():
            return direct.values(obs_B)

    def one_pass(self, rollout: Rollout) -> Values[Any] | None:
        """Return the outputs over a rollout from the pass that is learned from; None if values need a pass of their own.

        That is so with layers that have modes: advantages are computed in evaluation mode.
        """
        if self.trainer.mode_layers:
            return None
        direct = None if self.objective is None else self._direct.get()
        if direct is not None:
            return one_pass(self.net, rollout.arrays, direct.record, self.state_values)
        return one_pass(self.net, rollout, lambda obs_B: GraphPass(*self.net(obs_B)), self.state_values)

    def forward(self, batch: Minibatch[Any]) -> RowPass:
        """Return the pass of actor and critic over a minibatch, whose values are distribution parameters [B, P] and values [B]."""
        if batch.outputs is not None:
            return batch.outputs
        if self.objective is not None and not isinstance(batch.inputs, Sequences) and (direct := self._direct.get()) is not None:
            return direct.record(array(batch.inputs))
        return GraphPass(*batch.forward(self.net))

    def accumulate_gradient(
        self, batch: Minibatch[Any], objective: Callable[[Tensor, Tensor], Terms], coefs: Coefs, weight: float = 1.0
    ) -> Terms:
        """Add `weight` times the gradient of the objective of a minibatch to `Parameter.grad`; return its terms, to be reported.

        To be called inside `silent()`.

        Args:
            objective: from distribution parameters [B, P] and values [B] to the terms, for autograd: it is called where they have no
                closed form.
            coefs: weights of the closed form.
        """
        outputs = self.forward(batch)
        if self.objective is None:
            values = leaves(outputs.values)
            terms = objective(*values)
            assert isinstance(terms.loss, Tensor)
            outputs.backward(*gradients(terms.loss, values, weight))
            return terms._replace(loss=terms.loss.detach())
        params_BP, value_B = map(array, outputs.values)
        rows = (batch.action_B, batch.logp_B, batch.advantage_B, batch.target_B)
        result = self.objective(params_BP, value_B, *rows, coefs, weight)
        outputs.backward(result.grad_params_BP, result.grad_value_B)
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
