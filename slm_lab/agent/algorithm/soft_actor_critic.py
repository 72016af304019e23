"""Soft actor-critic (arXiv:1812.05905; discrete actions arXiv:1910.07207), and CrossQ (arXiv:1902.05605): the same without target nets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, Part
from slm_lab.agent.algorithm.common.meter import GradientMeter
from slm_lab.agent.algorithm.common.regression_losses import LossAndGradient, ValueLoss
from slm_lab.agent.algorithm.common.target import TargetNet
from slm_lab.agent.algorithm.common.temperature import Temperature
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.critic_passes import CriticOutputs, DirectCritics, GraphCritics, direct_critics
from slm_lab.agent.net.direct import DirectMLP, DirectOutputs, GraphOutputs, Outputs, direct_actor
from slm_lab.agent.net.q_critics import QCritics, SeparateCritics, build_critics
from slm_lab.agent.net.validity import FastPass, Guard, add_gradient
from slm_lab.agent.ops.arrays import like, silent, tensor
from slm_lab.agent.ops.device import read, upload
from slm_lab.agent.ops.distributions import SquashedNormal, SquashedSample
from slm_lab.agent.ops.losses import symlog
from slm_lab.agent.ops.targets import action_value
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.replay.replay import Replay, Transitions
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import SoftActorCriticSpec
from slm_lab.spec.models.spec import AgentSpec
from slm_lab.spec.report import Problem, SpecError

ActorReport = tuple[Tensor | float, Tensor | float, Tensor | float]
"""Loss, entropy and gradient norm of a step of the actor."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda q_CX: torch.minimum(*q_CX),
    "mean": lambda q_CX: q_CX.mean(0),
}
"""The values of the two critics [2, …] as one […], by critic_reduction."""

REDUCTION_GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda q_CX: torch.stack((lower_X := (q_CX[0] <= q_CX[1]).float(), 1.0 - lower_X)),
    "mean": lambda q_CX: torch.full_like(q_CX, 1.0 / len(q_CX)),
}
"""Their derivatives with respect to the values of each critic [2, …]."""


class SoftActorCritic(Algorithm):
    """Learn the policy of greatest reward and entropy from replayed transitions.

    CrossQ differs only in its critics: they value states and next states in one batch, so that batch statistics are those of both, and
    need no target net (arXiv:1902.05605, eq. 2).
    """

    diagnostics = ("critic_loss", "actor_loss", "alpha", "q_mean")

    spec: SoftActorCriticSpec
    net: ActorCriticNet
    memory: Replay
    trainer: Trainer
    """Steps the critics."""
    actor_trainer: Trainer
    target: TargetNet[QCritics] | None = None
    rng: np.random.Generator
    """Draws the noise of actions; seeds.update itself is the stream of the memory."""

    def build(self) -> None:
        agent, info, device = self.agent_spec, self.info, self.device
        self.discrete, self.action_dim = info.action.kind == "discrete", info.action.dim
        self.steps_per_update = self.spec.training_iter or info.num_envs
        self.actor_trainer = self.trainer
        critic_spec = agent.critic_net or agent.net
        with _problems_of_critic_net(agent):
            self.critics = build_critics(critic_spec, info.observation, info.action, self.spec.spectral_norm)
            flat = FlatParams(self.critics, device=device)
            self.trainer = Trainer(flat, critic_spec, ("critic",), gradients_of_each(self.critics, flat))
            if self.spec.has_target:
                target = build_critics(critic_spec, info.observation, info.action, self.spec.spectral_norm)
                self.target = TargetNet(target, self.trainer.flat, critic_spec, device)
            self.value_loss = ValueLoss(critic_spec.loss_spec)
        self._graph = GraphCritics(self.critics)
        self.meter = GradientMeter(self.trainer, self.clock)
        self.reduction = self.spec.critic_reduction or ("mean" if self.discrete else "min")
        self.reduce = REDUCTIONS[self.reduction]
        self.temperature = Temperature(self.spec, info, self.actor_trainer.groups[0], device)
        self.rng = np.random.default_rng([self.seeds.update, 1])
        self.critic_steps = 0
        self.mean_entropy: Tensor | None = None
        """Moving average of the policy's entropy []; None before its first gradient step. Only for entropy_penalty_coef."""
        self.actor_report: tuple[float, float, float] | None = None
        """Loss, entropy and gradient norm of the last step of the actor."""

    def update(self) -> Metrics:
        with silent():
            return self._update()

    def _update(self) -> Metrics:  # arXiv:1812.05905, Algorithm 1
        frame = self.clock.global_frame
        self.meter.begin()
        self.actor_trainer.begin(frame)
        reports: list[ActorReport] = []
        due: bool | None = None
        for _ in range(self.steps_per_update):
            batch = self.memory.sample().to(self.device)
            alpha = self.temperature.value(frame)
            q = self._critic_step(batch, alpha)
            if self.critic_steps % self.spec.policy_delay == 0:
                reports.append(self._actor_step(batch, q, alpha))
                self.temperature.step(reports[-1][1], frame)
                if self.target is not None:
                    due = self.target.due(frame) if due is None else due
                    if due:
                        self.target.update()
        self.actor_trainer.end()
        return self._metrics(reports or ([] if self.actor_report is None else [self.actor_report]))

    @cached_property
    def _direct(self) -> tuple[FastPass[DirectMLP], FastPass[DirectCritics], FastPass[DirectCritics] | None]:
        """Actor, critics and target critics without a graph. Built at first use: `products` is set after the nets are built."""
        guard = Guard(self.net.modules(), self.actor_trainer.flat)
        actor = FastPass(direct_actor(self.net.actor_body, self.net.actor_head), guard)
        critics = direct_critics(self.critics, self.trainer.flat)
        return actor, critics, None if self.target is None else direct_critics(self.target.net, self.trainer.flat, data=True)

    def _actor(self, obs_B: Tensor) -> Outputs:
        """Return the pass whose outputs are the distribution's parameters [B, P]."""
        direct = self._direct[0].get()
        return GraphOutputs(self.net.actor(obs_B)) if direct is None else DirectOutputs(direct, obs_B)

    def _q(self, obs_B: Tensor, action_B: Tensor | None, for_action_grad: bool = False) -> CriticOutputs:
        """Return the pass whose outputs are the critics' values: [C, B] of actions, [C, B, A] without any."""
        return (self._direct[1].get() or self._graph).record(obs_B, action_B, for_action_grad)

    @torch.no_grad()
    def _next_q(self, obs_B: Tensor, action_B: Tensor | None) -> Tensor:
        """Return the target critics' values."""
        target, fast = self.target, self._direct[2]
        assert target is not None
        assert fast is not None
        direct = fast.get(learn=False)
        return target.net(obs_B, action_B) if direct is None else tensor(direct.record(obs_B, action_B).out)

    def _critic_step(self, batch: Transitions, alpha: Tensor | float) -> Tensor:
        """Take a gradient step of the critics. Returns their outputs from before the step: Q(s, a) [C, B], or Q(s, ·) [C, B, A]."""
        self.trainer.refresh()
        if self.target is not None:
            self.target.refresh()
        passed, q, next_value_B = (self._discrete_values if self.discrete else self._continuous_values)(batch, alpha)
        # eq. 6; a truncated episode keeps its bootstrap
        target_B = batch.reward_B + self.spec.gamma * (1.0 - batch.terminated_B) * next_value_B
        action_CB = batch.action_B.expand(len(q), -1) if self.discrete else None
        q_CB = q if action_CB is None else action_value(q, action_CB)
        loss, grad_q_CB = self._critic_loss(q_CB, target_B, batch.weight_B)
        grad_q = grad_q_CB if action_CB is None else torch.zeros_like(q).scatter_(2, action_CB.unsqueeze(2), grad_q_CB.unsqueeze(2))
        # the values of next states, which CrossQ computes in the same pass, carry no gradient
        passed.backward(grad_q if self.target is not None else torch.cat((grad_q, torch.zeros_like(grad_q)), dim=1))
        if self.memory.prioritized:
            self.memory.update_priorities(batch.row_B, q_CB.amin(0) - target_B)
        self.meter.report_loss(loss, q_mean=q_CB.mean())
        self.meter.step()
        self.critic_steps += 1
        return q

    def _critic_loss(self, q_CB: Tensor, target_B: Tensor, weight_B: Tensor | None) -> LossAndGradient:
        """Return the sum of the critics' mean losses, weighted (arXiv:1511.05952, Algorithm 1, line 13), and its gradient [C, B]."""
        if not self.spec.symlog:
            return self.value_loss.with_gradient(q_CB, target_B.expand_as(q_CB), len(target_B), weight_B)
        loss, grad_CB = self.value_loss.with_gradient(symlog(q_CB), symlog(target_B).expand_as(q_CB), len(target_B), weight_B)
        return LossAndGradient(loss, grad_CB / (1.0 + q_CB.abs()))  # the derivative of symlog

    def _values(self, batch: Transitions, next_action_BD: Tensor | None) -> tuple[CriticOutputs, Tensor, Tensor]:
        """Return the critics' pass, and its outputs for s and those for s': [C, B] of actions, [C, B, A] without any."""
        action_BD = None if next_action_BD is None else batch.action_B
        if self.target is not None:
            passed = self._q(batch.obs_B, action_BD)
            return passed, tensor(passed.out), self._next_q(batch.next_obs_B, next_action_BD)
        both_BD = None if action_BD is None or next_action_BD is None else torch.cat((action_BD, next_action_BD))
        passed = self._q(torch.cat((batch.obs_B, batch.next_obs_B)), both_BD)
        q, next_q = tensor(passed.out).split(len(batch.obs_B), dim=1)
        return passed, q, next_q

    def _continuous_values(self, batch: Transitions, alpha: Tensor | float) -> tuple[CriticOutputs, Tensor, Tensor]:
        """Return the critics' pass, Q(s, a) [C, B] and V(s') [B]."""
        with torch.no_grad():
            next_action = self._sample(self._actor(batch.next_obs_B).out)
        passed, q_CB, next_q_CB = self._values(batch, tensor(next_action.action_BD))
        return passed, q_CB, self.reduce(next_q_CB) - alpha * tensor(next_action.logp_B)  # eq. 3

    def _discrete_values(self, batch: Transitions, alpha: Tensor | float) -> tuple[CriticOutputs, Tensor, Tensor]:
        """Return the critics' pass, Q(s, ·) [C, B, A] and V(s') [B]."""
        with torch.no_grad():
            next_logp_BA = F.log_softmax(tensor(self._actor(batch.next_obs_B).out), dim=1)
        passed, q_CBA, next_q_CBA = self._values(batch, None)
        next_q_BA = self.reduce(next_q_CBA)
        return passed, q_CBA, (next_logp_BA.exp() * (next_q_BA - alpha * next_logp_BA)).sum(1)  # arXiv:1910.07207, eq. 10

    def _actor_step(self, batch: Transitions, q: Tensor, alpha: Tensor | float) -> ActorReport:
        """Take a gradient step of the actor, given the result of `_critic_step`. Returns the actor's loss, entropy and gradient norm."""
        self.actor_trainer.refresh()
        self.trainer.set_train_mode(False)
        self.actor_trainer.set_train_mode(True)
        loss, entropy = self._discrete_gradient(batch, q, alpha) if self.discrete else self._continuous_gradient(batch, alpha)
        value = self.actor_trainer.check(loss)
        norm = self.actor_trainer.step()
        self.actor_trainer.set_train_mode(False)
        self.trainer.set_train_mode(True)
        return value, entropy if self.actor_trainer.deferred else entropy.item(), norm

    def _continuous_gradient(self, batch: Transitions, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
        """Accumulate the actor's gradient of eq. 9; return the loss and the entropy."""
        actor = self._actor(batch.obs_B)
        sample = self._sample(actor.out)
        critics, B = self._q(batch.obs_B, tensor(sample.action_BD), for_action_grad=True), len(batch.obs_B)
        q_CB = tensor(critics.out)
        grad_action_BD = critics.action_grad(self._reduction_gradient(q_CB).mul_(-1.0 / B))
        grad_params_BP, grad_log_std_D = sample.gradient(like(sample.action_BD, grad_action_BD), alpha / B)
        actor.backward(grad_params_BP)
        if grad_log_std_D is not None:
            add_gradient(self.distribution.log_std, tensor(grad_log_std_D))
        entropy = -tensor(sample.logp_B).mean()
        return -alpha * entropy - self.reduce(q_CB).mean(), entropy

    def _reduction_gradient(self, q_CB: Tensor) -> Tensor:
        """Return the derivative of `reduce` with respect to the values of each critic [C, B]."""
        if self.reduce is REDUCTIONS[self.reduction]:
            return REDUCTION_GRADIENTS[self.reduction](q_CB)
        leaf_CB = q_CB.detach().requires_grad_()
        return torch.autograd.grad(self.reduce(leaf_CB).sum(), leaf_CB)[0]

    def _discrete_gradient(self, batch: Transitions, q_CBA: Tensor, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
        """Accumulate the actor's gradient of arXiv:1910.07207, eq. 12; return the loss and the entropy.

        q_CBA are the values before the critics' step: another pass through the critics would take a fifth of an update.
        """
        actor, B = self._actor(batch.obs_B), len(batch.obs_B)
        logp_BA, q_BA = F.log_softmax(tensor(actor.out), dim=1), self.reduce(q_CBA)
        p_BA = logp_BA.exp()
        entropy_B = -(p_BA * logp_BA).sum(1)
        cost_BA = alpha * logp_BA - q_BA
        cost_B = (p_BA * cost_BA).sum(1)
        loss, entropy = cost_B.mean(), entropy_B.mean()
        grad_params_BA = p_BA * (cost_BA - cost_B.unsqueeze(1))
        if self.spec.entropy_penalty_coef:
            mean = entropy if self.mean_entropy is None else self.mean_entropy
            before = torch.where(mean.isfinite(), mean, entropy)
            loss = loss + self.spec.entropy_penalty_coef * 0.5 * (before - entropy).square()  # after arXiv:2209.10081, eq. 11
            change = self.spec.entropy_penalty_coef * (before - entropy)
            # ∂ H / ∂ z = −π (log π + H), with logits z
            grad_params_BA += change * p_BA * (logp_BA + entropy_B.unsqueeze(1))
            self.mean_entropy = torch.where(entropy.isfinite(), torch.lerp(before, entropy, 0.01), before)
        actor.backward(grad_params_BA.div_(B))
        return loss, entropy

    def _sample(self, params_BP: Any) -> SquashedSample:
        """Sample actions [B, D], given the distribution's parameters."""
        assert isinstance(self.distribution, SquashedNormal)
        noise_BD: Any = self.rng.standard_normal((len(params_BP), self.action_dim), np.float32)
        if isinstance(params_BP, Tensor):
            noise_BD = upload(torch.from_numpy(noise_BD), self.device)
        return self.distribution.rsample(params_BP, noise_BD)

    def _metrics(self, reports: list[ActorReport]) -> Metrics:
        """Return means over the gradient steps: the sum of both losses, and the norm of both gradients together."""
        critics = self.meter.end()
        extra = {"critic_loss": critics.loss, "alpha": self.entropy_coef, **critics.extra}
        if not reports:  # before the actor's first step
            return Metrics(critics.loss, critics.grad_norm, None, extra)
        values = iter(read([value for report in reports for value in report]))
        numbers = list(zip(values, values, values, strict=True))
        self.actor_report = numbers[-1]
        loss, entropy, norm = (sum(column) / len(numbers) for column in zip(*numbers, strict=True))
        return Metrics(critics.loss + loss, math.hypot(critics.grad_norm or 0.0, norm), entropy, {"actor_loss": loss, **extra})

    @property
    def policy_trainer(self) -> Trainer:
        return self.actor_trainer

    @property
    def entropy_coef(self) -> float:
        """α: the temperature is the weight of the entropy."""
        return float(self.temperature.value(self.clock.global_frame))

    def parts(self) -> dict[str, Part]:
        return {**super().parts(), "actor_trainer": self.actor_trainer, "temperature": self.temperature}

    def state_dict(self) -> dict[str, Any]:
        entropy = None if self.mean_entropy is None else self.mean_entropy.to("cpu", copy=True)
        counts = {"critic_steps": self.critic_steps, "actor_report": self.actor_report, "mean_entropy": entropy}
        return {**super().state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.critic_steps = int(state["critic_steps"])
        self.actor_report = None if state["actor_report"] is None else tuple(state["actor_report"])
        entropy = state["mean_entropy"]
        self.mean_entropy = None if entropy is None else entropy.to(self.device, copy=True)


def gradients_of_each(critics: QCritics, flat: FlatParams) -> list[list[Tensor]]:
    """Return the gradients of each critic, as parts of `flat.grad`."""
    if isinstance(critics, SeparateCritics):
        return [[flat.grad[flat.span(list(critic.parameters()))]] for critic in critics.critics]
    stacked = [flat.grad[flat.span([parameter])].view_as(parameter) for parameter in critics.parameters()]
    return [[grad[index] for grad in stacked] for index in range(len(stacked[0]))]


@contextmanager
def _problems_of_critic_net(agent: AgentSpec) -> Iterator[None]:
    """Report problems of the critics' own net at agent.critic_net."""
    try:
        yield
    except SpecError as error:
        if agent.critic_net is None:
            raise
        moved = [Problem(p.path.replace("agent.net", "agent.critic_net", 1), p.message) for p in error.problems]
        raise SpecError(error.source, moved) from error
