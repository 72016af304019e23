"""Soft actor-critic (arXiv:1812.05905; discrete actions arXiv:1910.07207), and CrossQ (arXiv:1902.05605): the same without target nets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, Part
from slm_lab.agent.algorithm.common.losses import build_value_loss
from slm_lab.agent.algorithm.common.meter import GradientMeter
from slm_lab.agent.algorithm.common.target import TargetNet
from slm_lab.agent.algorithm.common.temperature import Temperature
from slm_lab.agent.net.actor_critic import ActorCriticNet
from slm_lab.agent.net.q_critics import QCritics, build_critics
from slm_lab.agent.ops.device import read, upload
from slm_lab.agent.ops.distributions import SquashedNormal
from slm_lab.agent.ops.losses import symlog
from slm_lab.agent.ops.targets import action_value
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.replay.replay import Replay, Transitions
from slm_lab.lib.records import Metrics
from slm_lab.spec.algorithm import SoftActorCriticSpec
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.spec import AgentSpec

ActorReport = tuple[Tensor | float, Tensor | float, Tensor | float]
"""Loss, entropy and gradient norm of a step of the actor."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda q_CX: torch.minimum(*q_CX),
    "mean": lambda q_CX: q_CX.mean(0),
}
"""The values of the two critics [2, …] as one […], by critic_reduction."""


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
            self.trainer = Trainer(FlatParams(self.critics, device=device), critic_spec, ("critic",))
            if self.spec.has_target:
                target = build_critics(critic_spec, info.observation, info.action, self.spec.spectral_norm)
                self.target = TargetNet(target, self.trainer.flat, critic_spec, device)
            self.value_loss = build_value_loss(critic_spec.loss_spec)
        self.meter = GradientMeter(self.trainer, self.clock)
        self.reduce = REDUCTIONS[self.spec.critic_reduction or ("mean" if self.discrete else "min")]
        self.squash: Callable[[Tensor], Tensor] = symlog if self.spec.symlog else lambda value: value
        """What the critics' loss compares: the values, or their symlog."""
        self.temperature = Temperature(self.spec, info, device)
        self.rng = np.random.default_rng([self.seeds.update, 1])
        self.critic_steps = 0
        self.mean_entropy: Tensor | None = None
        """Moving average of the policy's entropy []; None before its first gradient step. Only for entropy_penalty_coef."""
        self.actor_report: tuple[float, float, float] | None = None
        """Loss, entropy and gradient norm of the last step of the actor."""

    def update(self) -> Metrics:  # arXiv:1812.05905, Algorithm 1
        frame = self.clock.global_frame
        self.meter.begin()
        self.actor_trainer.begin(frame)
        reports: list[ActorReport] = []
        due: bool | None = None
        for _ in range(self.steps_per_update):
            batch = self.memory.sample().to(self.device)
            alpha = self.temperature.value(frame)
            self._critic_step(batch, alpha)
            if self.critic_steps % self.spec.policy_delay == 0:
                reports.append(self._actor_step(batch, alpha))
                self.temperature.step(reports[-1][1], frame, self.actor_trainer.lr)
                if self.target is not None:
                    due = self.target.due(frame) if due is None else due
                    if due:
                        self.target.update()
        self.actor_trainer.end()
        return self._metrics(reports or ([] if self.actor_report is None else [self.actor_report]))

    def _critic_step(self, batch: Transitions, alpha: Tensor | float) -> None:
        self.trainer.refresh()
        if self.target is not None:
            self.target.refresh()
        q_CB, next_value_B = (self._discrete_values if self.discrete else self._continuous_values)(batch, alpha)
        # eq. 6; a truncated episode keeps its bootstrap
        target_B = batch.reward_B + self.spec.gamma * (1.0 - batch.terminated_B) * next_value_B
        squashed_CB, target_CB = self.squash(q_CB), self.squash(target_B).expand_as(q_CB)
        if batch.weight_B is None:
            loss = len(q_CB) * self.value_loss(squashed_CB, target_CB)
        else:  # arXiv:1511.05952, Algorithm 1, line 13
            loss = (batch.weight_B * self.value_loss(squashed_CB, target_CB, reduction="none")).sum(0).mean()
        if self.memory.prioritized:
            self.memory.update_priorities(batch.row_B, q_CB.detach().amin(0) - target_B)
        self.meter.add(loss, q_mean=q_CB.detach().mean())
        self.meter.step()
        self.critic_steps += 1

    def _values(self, batch: Transitions, next_action_BD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the critics' outputs for s, with gradients, and for s', without: [C, B] of actions, [C, B, A] without any."""
        action_BD = None if next_action_BD is None else batch.action_B
        if self.target is not None:
            return self.critics(batch.obs_B, action_BD), self.target.net(batch.next_obs_B, next_action_BD)
        both_BD = None if action_BD is None or next_action_BD is None else torch.cat((action_BD, next_action_BD))
        q_CB, next_q_CB = self.critics(torch.cat((batch.obs_B, batch.next_obs_B)), both_BD).split(len(batch.obs_B), dim=1)
        return q_CB, next_q_CB.detach()

    def _continuous_values(self, batch: Transitions, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return Q(s, a) [C, B] and V(s') [B]."""
        with torch.no_grad():
            next_action_BD, next_logp_B = self._act(batch.next_obs_B)
        q_CB, next_q_CB = self._values(batch, next_action_BD)
        return q_CB, self.reduce(next_q_CB) - alpha * next_logp_B  # eq. 3

    def _discrete_values(self, batch: Transitions, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return Q(s, a) [C, B] and V(s') [B]."""
        with torch.no_grad():
            next_logp_BA = F.log_softmax(self.net.actor(batch.next_obs_B), dim=1)
        q_CBA, next_q_CBA = self._values(batch, None)
        q_CB = action_value(q_CBA, batch.action_B.expand(len(q_CBA), -1))
        next_q_BA = self.reduce(next_q_CBA)
        return q_CB, (next_logp_BA.exp() * (next_q_BA - alpha * next_logp_BA)).sum(1)  # arXiv:1910.07207, eq. 10

    def _actor_step(self, batch: Transitions, alpha: Tensor | float) -> ActorReport:
        """Take a gradient step of the actor; return its loss, entropy and gradient norm."""
        self.actor_trainer.refresh()
        self.trainer.set_train_mode(False)
        self.actor_trainer.set_train_mode(True)
        self._freeze_critics(True)
        loss, entropy = (self._discrete_loss if self.discrete else self._continuous_loss)(batch, alpha)
        value = self.actor_trainer.backward(loss)
        norm = self.actor_trainer.step()
        self._freeze_critics(False)
        self.actor_trainer.set_train_mode(False)
        self.trainer.set_train_mode(True)
        return value, entropy if self.actor_trainer.deferred else entropy.item(), norm

    def _freeze_critics(self, frozen: bool) -> None:
        """Leave the critics' weights out of a backward pass, or not."""
        for parameter in self.trainer.flat.params:
            parameter.requires_grad_(not frozen)

    def _continuous_loss(self, batch: Transitions, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
        action_BD, logp_B = self._act(batch.obs_B)
        q_B = self.reduce(self.critics(batch.obs_B, action_BD))
        return (alpha * logp_B - q_B).mean(), -logp_B.detach().mean()  # eq. 9

    def _discrete_loss(self, batch: Transitions, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
        logp_BA = F.log_softmax(self.net.actor(batch.obs_B), dim=1)
        with torch.no_grad():
            q_BA = self.reduce(self.critics(batch.obs_B))
        p_BA = logp_BA.exp()
        entropy = -(p_BA * logp_BA).sum(1).mean()
        loss = -(p_BA * q_BA).sum(1).mean() - alpha * entropy  # arXiv:1910.07207, eq. 12
        if self.spec.entropy_penalty_coef:
            now = entropy.detach()
            before = now if self.mean_entropy is None else self.mean_entropy
            loss = loss + self.spec.entropy_penalty_coef * 0.5 * (before - entropy).square()  # after arXiv:2209.10081, eq. 11
            self.mean_entropy = torch.lerp(before, now, 0.01)
        return loss, entropy.detach()

    def _act(self, obs_B: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions [B, D] of the present policy, with their log-probabilities [B]."""
        assert isinstance(self.distribution, SquashedNormal)
        noise_BD = torch.from_numpy(self.rng.standard_normal((len(obs_B), self.action_dim), np.float32))
        return self.distribution.rsample(self.net.actor(obs_B), upload(noise_BD, self.device))

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
        return {**super().state_dict(), **self._counts()}

    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), **self._counts()}

    def _counts(self) -> dict[str, Any]:
        entropy = None if self.mean_entropy is None else self.mean_entropy.to("cpu", copy=True)
        return {"critic_steps": self.critic_steps, "actor_report": self.actor_report, "mean_entropy": entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._load_counts(state)

    def load_own_state(self, state: dict[str, Any]) -> None:
        super().load_own_state(state)
        self._load_counts(state)

    def _load_counts(self, state: dict[str, Any]) -> None:
        self.critic_steps = int(state["critic_steps"])
        self.actor_report = None if state["actor_report"] is None else tuple(state["actor_report"])
        entropy = state.get("mean_entropy")  # absent in checkpoints of older versions
        self.mean_entropy = None if entropy is None else entropy.to(self.device, copy=True)


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
