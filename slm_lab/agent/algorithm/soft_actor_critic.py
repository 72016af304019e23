"""Soft actor-critic (arXiv:1812.05905; discrete actions arXiv:1910.07207), and CrossQ (arXiv:1902.05605): the same without target nets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slm_lab.agent.algorithm.base import Algorithm, GradientMeter
from slm_lab.agent.algorithm.critics import Critics, JointCritics, TargetCritics
from slm_lab.agent.algorithm.on_policy import build_value_loss, value_scale
from slm_lab.agent.algorithm.common.target import algorithms_for, build_replay
from slm_lab.agent.algorithm.common.temperature import Temperature
from slm_lab.agent.replay.replay import Replay, Transitions
from slm_lab.agent.net.actor_critic import ActorCriticNet
from slm_lab.agent.ops.distributions import Categorical, SquashedNormal
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import Place
from slm_lab.lib.log import notice
from slm_lab.lib.records import ActionSpace, EnvInfo, Metrics
from slm_lab.lib.rng import Seeds, generator_state, set_generator_state
from slm_lab.spec.algorithm import CrossQSpec, SoftActorCriticSpec
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.net import NetSpec
from slm_lab.spec.spec import AgentSpec

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda q_CX: torch.minimum(*q_CX),
    "mean": lambda q_CX: q_CX.mean(0),
}
"""The values of the two critics [2, …] as one […], by critic_reduction."""


class SoftActorCritic(Algorithm):
    """Learns the policy of greatest reward and entropy from old transitions. CrossQ differs only in how its critics value."""

    memory: Replay
    trainer: Trainer
    """The critics'."""

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, place: Place) -> None:
        assert isinstance(agent.algorithm, SoftActorCriticSpec)
        assert agent.net is not None  # the spec room refuses a learner without one
        check_fit(agent, agent.algorithm, agent.net, info.action)
        self.spec, self.clock, self.device = agent.algorithm, clock, place.device
        self.discrete, self.action_dim = info.action.kind == "discrete", info.action.dim
        self.steps_per_update = self.spec.training_iter or info.num_envs
        self.longest_gap = max(self.spec.training_frequency, info.num_envs) * place.heap.sessions
        """Frames between two trainings, at most."""
        self.distribution, self.net = build_actor(agent.net, info)
        self.actor_trainer = Trainer(self.net, agent.net, {"actor": self.net.actor_parameters()}, place)
        # the policy comes after the trainer: its fast path holds views of the flat parameters
        act_rng = np.random.default_rng(seeds.act)
        self.policy = Policy(info.action, act_rng, self.net, self.distribution, self.spec.action_policy, self.spec.needs_logp)
        with _named_critic_net(agent):
            self.critics: Critics = (JointCritics if isinstance(self.spec, CrossQSpec) else TargetCritics)(agent, info, place)
            self.value_loss = build_value_loss((agent.critic_net or agent.net).loss_spec)
        self.trainer, self.target = self.critics.trainer, self.critics.target
        self.meter = GradientMeter(self.trainer, clock)
        self.reduce = REDUCTIONS[self.spec.critic_reduction]
        self.scale = value_scale(self.spec.symlog, normalize=False)
        self.temperature = Temperature(self.spec, info, place.heap)
        self.memory = build_replay(agent, info, clock, seeds)
        self.rng = np.random.default_rng([seeds.update, 1])
        """Draws the noise of actions; the memory's own is seeds.update's."""
        self.critic_steps = 0
        self.frame = 0
        """Of the last update."""
        self.actor_report: tuple[float, float, float] | None = None
        """The actor's last loss, entropy and gradient norm."""

    def update(self) -> Metrics:  # arXiv:1812.05905, Algorithm 1
        self.meter.begin()
        self.actor_trainer.begin(self.clock.global_frame)
        reports = [] if self.actor_report is None else [self.actor_report]
        fresh = []
        for frame in self._frames():
            batch = self.memory.sample().to(self.device)
            alpha = self.temperature.value(frame)
            self._critic_step(batch, alpha)
            if self.critic_steps % self.spec.policy_delay == 0:
                self.actor_report = self._actor_step(batch, alpha)
                self.temperature.step(self.actor_report[1], frame, self.actor_trainer.lr)
                fresh.append(self.actor_report)
            self.critics.follow(frame)
        return self._metrics(fresh or reports)

    def _frames(self) -> list[int]:
        """The frames since the last update, shared out evenly over the gradient steps: the frame at which each one is taken."""
        # after a pause (until training_start_step) no further back than one training is from the next
        now = self.clock.global_frame
        before, self.frame = max(self.frame, now - self.longest_gap), now
        return [before + (self.frame - before) * (i + 1) // self.steps_per_update for i in range(self.steps_per_update)]

    def _critic_step(self, batch: Transitions, alpha: float) -> None:
        self.trainer.refresh()
        q_CB, next_value_B = (self._discrete_values if self.discrete else self._continuous_values)(batch, alpha)
        # eq. 6, with r + γ V(s') on the critics' scale; a truncated episode keeps its bootstrap
        target_B = self.scale.encode(batch.reward_B + self.spec.gamma * (1.0 - batch.terminated_B) * next_value_B)
        target_CB = target_B.expand_as(q_CB)
        if batch.weight_B is None:
            loss = len(q_CB) * self.value_loss(q_CB, target_CB)
        else:  # arXiv:1511.05952, Algorithm 1, line 13
            loss = (batch.weight_B * self.value_loss(q_CB, target_CB, reduction="none")).sum(0).mean()
            self.memory.update_priorities(batch.row_B, (q_CB.detach() - target_CB).abs().mean(0))
        self.meter.add(loss)
        self.meter.step()
        self.critic_steps += 1

    def _continuous_values(self, batch: Transitions, alpha: float) -> tuple[Tensor, Tensor]:
        """Q(s, a) [C, B], on the critics' scale, and V(s') [B]."""
        with torch.no_grad():
            next_action_BD, next_logp_B = self._act(batch.next_obs_B)
        q_CB, next_q_CB = self.critics(batch.obs_B, batch.next_obs_B, batch.action_B, next_action_BD)
        return q_CB, self.reduce(self.scale.decode(next_q_CB)) - alpha * next_logp_B  # eq. 3

    def _discrete_values(self, batch: Transitions, alpha: float) -> tuple[Tensor, Tensor]:
        """Q(s, a) [C, B], on the critics' scale, and V(s') [B]."""
        with torch.no_grad():
            next_logp_BA = F.log_softmax(self.net.actor(batch.next_obs_B), dim=1)
        q_CBA, next_q_CBA = self.critics(batch.obs_B, batch.next_obs_B)
        q_CB = q_CBA.gather(2, batch.action_B.expand(len(q_CBA), -1).unsqueeze(2)).squeeze(2)
        next_q_BA = self.reduce(self.scale.decode(next_q_CBA))
        return q_CB, (next_logp_BA.exp() * (next_q_BA - alpha * next_logp_BA)).sum(1)  # arXiv:1910.07207, eq. 10

    def _actor_step(self, batch: Transitions, alpha: float) -> tuple[float, float, float]:
        """A step of the actor against the critics as they stand; its loss, its entropy and the norm of the gradient."""
        self.actor_trainer.refresh()
        self.trainer.set_train_mode(False)
        self.actor_trainer.set_train_mode(True)
        self._freeze_critics(True)
        loss, entropy = (self._discrete_loss if self.discrete else self._continuous_loss)(batch, alpha)
        self.actor_trainer.backward(loss)
        norm = self.actor_trainer.step()
        self._freeze_critics(False)
        self.actor_trainer.set_train_mode(False)
        self.trainer.set_train_mode(True)
        return loss.item(), entropy.item(), norm

    def _freeze_critics(self, frozen: bool) -> None:
        """Spare a backward pass the gradients of the critics' weights."""
        for parameter in self.trainer.flat.params:
            parameter.requires_grad_(not frozen)

    def _continuous_loss(self, batch: Transitions, alpha: float) -> tuple[Tensor, Tensor]:
        action_BD, logp_B = self._act(batch.obs_B)
        q_B = self.reduce(self.scale.decode(self.critics.net(batch.obs_B, action_BD)))
        return (alpha * logp_B - q_B).mean(), -logp_B.detach().mean()  # eq. 9

    def _discrete_loss(self, batch: Transitions, alpha: float) -> tuple[Tensor, Tensor]:
        logp_BA = F.log_softmax(self.net.actor(batch.obs_B), dim=1)
        with torch.no_grad():
            q_BA = self.reduce(self.scale.decode(self.critics.net(batch.obs_B)))
        p_BA = logp_BA.exp()
        entropy_B = -(p_BA * logp_BA).sum(1)
        loss = -(p_BA * q_BA).sum(1).mean() - alpha * entropy_B.mean()  # arXiv:1910.07207, eq. 12
        if self.spec.entropy_penalty_coef:
            # -log of the probability of the action taken has the behaviour's entropy as its mean, so that the gradient has the right one
            jump_B = -batch.logp_B - entropy_B
            loss = loss + self.spec.entropy_penalty_coef * 0.5 * jump_B.square().mean()  # arXiv:2209.10081, eq. 11
        return loss, entropy_B.detach().mean()

    def _act(self, obs_B: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, D] of the policy as it stands, and their log-probabilities [B]."""
        assert isinstance(self.distribution, SquashedNormal)
        noise_BD = torch.from_numpy(self.rng.standard_normal((len(obs_B), self.action_dim), np.float32)).to(self.device)
        return self.distribution.rsample(self.net.actor(obs_B), noise_BD)

    def _metrics(self, reports: list[tuple[float, float, float]]) -> Metrics:
        """Means over the gradient steps, the critics' and the actor's losses and gradients together."""
        critics = self.meter.end()
        extra = {**critics.extra, "alpha": self.temperature.value(self.frame)}
        if not reports:
            return Metrics(critics.loss, critics.grad_norm, None, extra)
        loss, entropy, norm = (sum(values) / len(reports) for values in zip(*reports, strict=True))
        return Metrics(critics.loss + loss, math.hypot(critics.grad_norm or 0.0, norm), entropy, extra)

    @property
    def acting(self) -> Trainer:
        return self.actor_trainer

    @property
    def entropy_coef(self) -> float:
        """α: the temperature is the weight of the entropy."""
        return self.temperature.value(self.clock.global_frame)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "actor_trainer": self.actor_trainer.state_dict(),
            "critics": self.critics.state_dict(),
            "temperature": self.temperature.state_dict(),
            "rng": generator_state(self.rng),
            "critic_steps": self.critic_steps,
            "frame": self.frame,
            "actor_report": self.actor_report,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.actor_trainer.load_state_dict(state["actor_trainer"])
        self.critics.load_state_dict(state["critics"])
        self.temperature.load_state_dict(state["temperature"])
        set_generator_state(self.rng, state["rng"])
        self.critic_steps, self.frame = int(state["critic_steps"]), int(state["frame"])
        self.actor_report = None if state["actor_report"] is None else tuple(state["actor_report"])


@contextmanager
def _named_critic_net(agent: AgentSpec) -> Iterator[None]:
    """What is wrong with a net of the critics' own is told at agent.critic_net."""
    try:
        yield
    except SpecError as error:
        if agent.critic_net is None:
            raise
        moved = [Problem(p.path.replace("agent.net", "agent.critic_net", 1), p.message) for p in error.problems]
        raise SpecError(error.source, moved) from error


def build_actor(spec: NetSpec, info: EnvInfo) -> tuple[Categorical | SquashedNormal, ActorCriticNet]:
    """The policy's distribution and net."""
    log_std = None if spec.log_std_init is None else nn.Parameter(torch.full((info.action.dim,), spec.log_std_init))
    distribution = Categorical(info.action) if info.action.kind == "discrete" else SquashedNormal(info.action, log_std)
    return distribution, ActorCriticNet(spec, info.observation, distribution.params, log_std, critic=False)


def check_fit(agent: AgentSpec, spec: SoftActorCriticSpec, net: NetSpec, action: ActionSpace) -> None:
    """Raise SpecError with every key that does not fit the env's actions."""
    if action.kind not in ("discrete", "continuous") or not action.bounded:
        space = f"{'' if action.bounded else 'unbounded '}{action.kind.replace('_', '-')} actions"
        message = (
            f"{spec.name!r} needs one discrete action or bounded continuous ones, this env has {space}; allowed: {algorithms_for(action)}"
        )
        raise SpecError("agent", [Problem("agent.algorithm.name", message)])
    discrete = action.kind == "discrete"
    problems = []
    names = ("default", "Categorical", "GumbelSoftmax") if discrete else ("default", "Normal")
    if spec.action_pdtype not in names:
        message = f"{spec.action_pdtype!r}, but {spec.name} learns {action.kind} actions; allowed: {', '.join(names)}"
        problems.append(Problem("agent.algorithm.action_pdtype", message))
    if discrete:
        problems += _entropy_problems(spec, action.nvec[0])
        if net.log_std_init is not None:
            message = f"{net.log_std_init:g}, but this env's actions are discrete and have no standard deviation; leave it out"
            problems.append(Problem("agent.net.log_std_init", message))
    elif spec.entropy_penalty_coef > 0:
        message = f"{spec.entropy_penalty_coef:g}, but the penalty is for discrete actions, this env's are continuous; leave it out"
        problems.append(Problem("agent.algorithm.entropy_penalty_coef", message))
    if problems:
        raise SpecError("agent", problems)
    if net.shared:
        notice(f"agent.net.shared: no effect in {spec.name}, whose actor and critics have bodies of their own")


def _entropy_problems(spec: SoftActorCriticSpec, actions: int) -> list[Problem]:
    """Entropies that no policy over so many discrete actions can have."""
    greatest = math.log(actions)
    bounds = f"the entropy of {actions} discrete actions lies between 0 and ln {actions} = {greatest:.3g} nats"
    given = {"target_entropy": spec.target_entropy, "entropy_anneal": spec.entropy_anneal}
    return [
        Problem(f"agent.algorithm.{key}", f"{value:g}, but {bounds}; give one of these, or {'auto' if key == 'target_entropy' else 'true'}")
        for key, value in given.items()
        if isinstance(value, float) and not 0.0 <= value <= greatest
    ]
