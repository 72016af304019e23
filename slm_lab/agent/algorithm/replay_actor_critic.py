"""Base class of algorithms that learn an actor and critics, in separate nets, from replayed transitions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, TrainablePart
from slm_lab.agent.algorithm.meter import GradientMeter
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.q_nets import QCritics, RecurrentCritics, SeparateCritics, build_critics
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.ops.autograd import ForwardPass, GraphPass
from slm_lab.agent.ops.device import to_floats, upload
from slm_lab.agent.ops.losses import ValueLoss
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.replay.replay import Replay, Transitions
from slm_lab.agent.replay.sequences import SequenceBatch, SequenceReplay
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import ReplayActorCriticSpec
from slm_lab.spec.models.net import NetSpec
from slm_lab.spec.models.spec import AgentSpec
from slm_lab.spec.report import Problem, SpecError

ActorReport = tuple[Tensor | float, Tensor | float, Tensor | float]
"""Loss, entropy and gradient norm of a gradient step on the actor."""


AnyBatch = Transitions | SequenceBatch
"""A batch of transitions, or of sequences if the actor is recurrent."""


class CriticPass(Protocol):
    """Forward pass of the critics over the observations and actions of a batch, through which gradients can be propagated back."""

    def backward(self, grad: Tensor, /) -> None:
        """Compute the gradients of the critics' parameters, and add these gradients to `Parameter.grad`.

        Args: grad: gradient of the loss with respect to the critics' outputs.
        """


class ReplayActorCritic(Algorithm, ABC):
    """Base class of algorithms that learn critics by regression on targets, from replayed transitions.

    After every policy_delay-th gradient step on the critics, the actor takes a gradient step. Subclasses define the targets of the critics
    (`values_and_targets`) and the gradient of the actor (`add_actor_gradient`).
    """

    diagnostics: tuple[str, ...] = ("critic_loss", "actor_loss", "q_mean")
    has_entropy = True
    """Whether updates report the entropy of the policy. This attribute is False for a deterministic actor."""

    spec: ReplayActorCriticSpec
    net: ActorCriticNet
    memory: Replay | SequenceReplay
    """Replay buffer of transitions, or of sequences if the actor is recurrent."""
    trainer: Trainer
    """Trainer of the critics."""
    actor_trainer: Trainer
    target: TargetNet[QCritics] | None = None
    rng: np.random.Generator
    """Random stream of action noise, which differs from the random stream of the memory."""

    def build(self) -> None:
        agent, device = self.agent_spec, self.device
        self.steps_per_update = self.spec.training_iter or self.info.num_envs
        self.actor_trainer = self.trainer
        self.net.enable_graph_free_pass(self.actor_trainer.flat)
        self.critic_spec = critic_spec = agent.critic_net or agent.net
        with relabel_critic_net_problems(agent):
            self.critics = self.build_critics(critic_spec)
            flat = FlatParams(self.critics, device=device)
            self.critics.enable_graph_free_pass(flat)
            self.trainer = Trainer(flat, critic_spec, ("critic",), gradients_per_critic(self.critics, flat))
            if self.spec.has_target:
                self.target = TargetNet(self.build_critics(critic_spec), flat, critic_spec, device)
                self.target.net.enable_graph_free_pass(flat, data=True)
            self.value_loss = ValueLoss(critic_spec.loss_spec)
        self.meter = GradientMeter(self.trainer, self.clock)
        self.rng = np.random.default_rng([self.seeds.update, 1])
        self.critic_steps = 0
        self.actor_report: tuple[float, float, float] | None = None
        """Loss, entropy and gradient norm of the last gradient step on the actor."""

    def build_critics(self, spec: NetSpec) -> QCritics:
        """Build a net that contains all critics."""
        return build_critics(spec, self.info.observation, self.info.action, number=self.spec.critics)

    @ignore_float_errors()
    def update(self) -> Metrics:
        frame = self.clock.global_frame
        self.meter.begin()
        self.actor_trainer.begin_update(frame)
        reports: list[ActorReport] = []
        due: bool | None = None
        for _ in range(self.steps_per_update):
            batch = self.memory.sample().to(self.device)
            q = self._critic_step(batch)
            if self.critic_steps % self.spec.policy_delay == 0:
                reports.append(self._actor_step(batch, q))
                if self.target is not None:
                    due = self.target.claim_due_update(frame) if due is None else due
                    if due:
                        self.update_targets()
        self.actor_trainer.end_update()
        return self.finish_update_metrics(reports or ([] if self.actor_report is None else [self.actor_report]))

    def _critic_step(self, batch: AnyBatch) -> Tensor:
        """Take a gradient step on the critics, and return the critics' outputs for the batch, computed before the gradient step."""
        self.trainer.pull_if_outdated()
        for net in self.target_nets():
            net.pull_if_outdated()
        outputs, q, target_B = self.values_and_targets(batch)
        q_CB, loss, grad_q = self.critic_loss(batch, q, target_B)
        outputs.backward(grad_q)
        if self.memory.prioritized:
            self.memory.update_priorities(batch.sampled_rows, self.priority_error(q_CB, target_B))
        self.meter.report_loss(loss, q_mean=q_CB.mean())
        self.meter.step()
        self.critic_steps += 1
        return q

    def actor_forward_pass(self, batch: AnyBatch, net: ActorCriticNet | None = None, learn: bool = True) -> ForwardPass:
        """Return the actor's forward pass over the observations of a batch, or over the next observations if `learn` is False.

        A recurrent actor starts from the stored hidden state of the policy, and processes the burn-in steps, as in R2D2 (see
        replay/sequences.py).

        Args:
            net: the net of another actor, such as the target actor, or None for the trained actor.
            learn: whether gradients are needed.
        """
        net = self.net if net is None else net
        if not isinstance(batch, SequenceBatch):
            return net.forward_pass(batch.obs_B if learn else batch.next_obs_B, learn)
        with torch.set_grad_enabled(learn):
            return GraphPass(*map(batch.current_outputs if learn else batch.next_outputs, batch.unroll(net)))

    def critic_inputs(self, critics: QCritics, batch: AnyBatch, for_next_obs: bool = False, learn: bool = False) -> Tensor:
        """Return the critics' input for a batch: observations, or features of the history of observations for recurrent critics.

        Recurrent critics start from a hidden state of zeros before the burn-in steps, because critics do not run while the agent acts.

        Args: for_next_obs: whether to return the input for the next instead of the current observations. learn: whether gradients are
        needed.
        """
        if not isinstance(critics, RecurrentCritics):
            return batch.next_obs_B if for_next_obs else batch.obs_B
        assert isinstance(batch, SequenceBatch)
        with torch.set_grad_enabled(learn):
            features, _ = batch.unroll(critics, batch.state_MS.new_zeros(len(batch.state_MS), critics.state_size))
        return (batch.next_outputs if for_next_obs else batch.current_outputs)(features)

    @abstractmethod
    def values_and_targets(self, batch: AnyBatch) -> tuple[CriticPass, Tensor, Tensor]:
        """Return the critics' forward pass, the critics' outputs ([C, B], or [C, B, K] with K outputs per transition), and the targets
        ([B], or [B, M] with M values per transition) of the critics."""

    def td_target(self, batch: AnyBatch, next_value_B: Tensor) -> Tensor:
        """Return the targets r + γ (1 − terminated) V(s') [B]. The targets of truncated episodes are bootstrapped."""
        return batch.reward_B + self.spec.gamma * (1.0 - batch.terminated_B) * next_value_B

    def critic_loss(self, batch: AnyBatch, q: Tensor, target_B: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Return Q(s, a) [C, B], the loss, and the gradient of the loss with respect to the critics' outputs.

        The loss is the sum of the critics' mean losses. The loss of each transition is multiplied by its importance weight
        (arXiv:1511.05952, Algorithm 1, line 13).
        """
        loss, grad_q = self.value_loss.with_gradient(q, target_B.expand_as(q), len(target_B), batch.weight_B)
        return q, loss, grad_q

    def priority_error(self, q_CB: Tensor, target_B: Tensor) -> Tensor:
        """Return the errors [B] that determine the priorities of transitions in prioritised replay."""
        return q_CB.amin(0) - target_B

    def _actor_step(self, batch: AnyBatch, q: Tensor) -> ActorReport:
        """Take a gradient step on the actor, and return the actor's loss, entropy and gradient norm.

        Args: q: the critics' outputs that `_critic_step` returned for this batch.
        """
        self.actor_trainer.pull_if_outdated()
        self.trainer.set_train_mode(False)
        self.actor_trainer.set_train_mode(True)
        loss, entropy = self.add_actor_gradient(batch, q)
        value = self.actor_trainer.check_finite(loss)
        norm = self.actor_trainer.step()
        self.actor_trainer.set_train_mode(False)
        self.trainer.set_train_mode(True)
        return value, entropy if self.actor_trainer.deferred else entropy.item(), norm

    @abstractmethod
    def add_actor_gradient(self, batch: AnyBatch, q: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of the actor's loss to `Parameter.grad`, and return the actor's loss and the entropy of the policy.

        Args: q: the critics' outputs for the batch, computed before the gradient step on the critics.
        """

    def fresh_params(self) -> dict[str, FlatParams]:
        return {**super().fresh_params(), "trainer": FlatParams(self.build_critics(self.critic_spec), device=self.device)}

    def target_nets(self) -> list[TargetNet[Any]]:
        """Return all target networks of the algorithm."""
        return [] if self.target is None else [self.target]

    def update_targets(self) -> None:
        """Copy each source net to its target network, or move the target network towards the source net."""
        for net in self.target_nets():
            net.update()

    def sample_action_noise(self, rows: int, example: Any) -> Any:
        """Draw standard normal noise [rows, D] for actions.

        The noise is a tensor on the device of the nets if `example` is a tensor, else a numpy array.
        """
        noise_BD = self.rng.standard_normal((rows, self.info.action.dim), np.float32)
        return upload(torch.from_numpy(noise_BD), self.device) if isinstance(example, Tensor) else noise_BD

    def finish_update_metrics(self, reports: list[ActorReport]) -> Metrics:
        """Return the metrics of an update, averaged over its gradient steps.

        The metric `loss` is the sum of critic loss and actor loss. The metric `grad_norm` is the norm of the critics' gradient and the
        actor's gradient combined.
        """
        critics = self.meter.end()
        extra = {"critic_loss": critics.loss, **critics.extra}
        if not reports:  # before the actor's first step
            return Metrics(critics.loss, critics.grad_norm, None, extra)
        values = iter(to_floats([value for report in reports for value in report]))
        numbers = list(zip(values, values, values, strict=True))
        self.actor_report = numbers[-1]
        loss, entropy, norm = (sum(column) / len(numbers) for column in zip(*numbers, strict=True))
        total_norm = math.hypot(critics.grad_norm or 0.0, norm)
        return Metrics(critics.loss + loss, total_norm, entropy if self.has_entropy else None, {"actor_loss": loss, **extra})

    @property
    def policy_trainer(self) -> Trainer:
        return self.actor_trainer

    def parts(self) -> dict[str, TrainablePart]:
        return {**super().parts(), "actor_trainer": self.actor_trainer}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "critic_steps": self.critic_steps, "actor_report": self.actor_report}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.critic_steps = int(state["critic_steps"])
        self.actor_report = None if state["actor_report"] is None else tuple(state["actor_report"])


def gradients_per_critic(critics: QCritics, flat: FlatParams) -> list[list[Tensor]]:
    """Return one list for each critic, with the gradients of the critic's parameters as views of `flat.grad`."""
    if isinstance(critics, SeparateCritics):
        return [[flat.grad[flat.param_slice(list(critic.parameters()))]] for critic in critics.critics]
    stacked = [flat.grad[flat.param_slice([parameter])].view_as(parameter) for parameter in critics.parameters()]
    return [[grad[index] for grad in stacked] for index in range(len(stacked[0]))]


@contextmanager
def relabel_critic_net_problems(agent: AgentSpec) -> Iterator[None]:
    """Return a context manager that reports spec problems of the critics' own net with the path agent.critic_net instead of agent.net."""
    try:
        yield
    except SpecError as error:
        if agent.critic_net is None:
            raise
        moved = [Problem(p.path.replace("agent.net", "agent.critic_net", 1), p.message) for p in error.problems]
        raise SpecError(error.source, moved) from error
