"""Implicit Q-learning (arXiv:2110.06169): learn values and a policy only from the actions in recorded episodes."""

from __future__ import annotations

import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import TrainablePart
from slm_lab.agent.algorithm.offline import OfflineAlgorithm
from slm_lab.agent.algorithm.replay_actor_critic import gradients_per_critic, relabel_critic_net_problems
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.agent.net.q_nets import QCritics, build_critics
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.ops.losses import ValueLoss, expectile_loss
from slm_lab.agent.ops.targets import action_value, action_value_gradient, one_step_target
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.replay.replay import Transitions
from slm_lab.lib.records import ActionSpace, Metrics
from slm_lab.spec.models.algorithm import IQLSpec

MAX_WEIGHT = 100.0
"""Maximum of exp(β A), the weight of an action in the loss of the policy (arXiv:2110.06169, appendix B)."""


class IQL(OfflineAlgorithm):
    """Implicit Q-learning, with gradient steps on state values V, critics Q and the policy in each update.

    V is learned as an expectile of Q over the recorded actions. Q is learned from rewards and V. The policy is learned by
    advantage-weighted regression.
    """

    diagnostics = ("critic_loss", "value_loss", "actor_loss", "q_mean")

    spec: IQLSpec
    trainer: Trainer
    """Trainer of the critics Q."""
    target: TargetNet[QCritics]

    def build(self) -> None:
        super().build()
        agent, info, device = self.agent_spec, self.info, self.device
        self.actor_trainer, spec = self.trainer, agent.critic_net or agent.net
        self.discrete = info.action.kind == "discrete"
        with relabel_critic_net_problems(agent):
            self.critics, self.trainer = self._build_critics(info.action)
            target = build_critics(spec, info.observation, info.action)
            self.target = TargetNet(target, self.trainer.flat, spec, device)
            target.enable_graph_free_pass(self.trainer.flat, data=True)
            # V(s) is the output of a critic for an action space with a single action
            self.value, self.value_trainer = self._build_critics(ActionSpace("discrete", (1,)), 1)
            self.value_loss = ValueLoss(spec.loss_spec)
        self.meter.trainer = self.trainer

    def _build_critics(self, action: ActionSpace, number: int = 2) -> tuple[QCritics, Trainer]:
        spec = self.agent_spec.critic_net or self.agent_spec.net
        critics = build_critics(spec, self.info.observation, action, number=number)
        flat = FlatParams(critics, device=self.device)
        critics.enable_graph_free_pass(flat)
        return critics, Trainer(flat, spec, ("critic",), gradients_per_critic(critics, flat))

    @ignore_float_errors()
    def update(self) -> Metrics:  # Algorithm 1
        frame = self.clock.global_frame
        self.meter.begin()
        for trainer in (self.value_trainer, self.actor_trainer):
            trainer.begin_update(frame)
        batch = self.memory.sample().to(self.device)
        advantage_B = self._value_step(batch)
        self._actor_step(batch, advantage_B)
        self._critic_step(batch)
        if self.target.claim_due_update(frame):
            self.target.update()
        for trainer in (self.value_trainer, self.actor_trainer):
            trainer.end_update()
        return self.meter.end()

    def _value_step(self, batch: Transitions) -> Tensor:
        """Take a gradient step on V (equation 5), and return the advantages Q̄(s, a) − V(s) [B].

        The advantages are computed with the target critics Q̄, before the gradient step.
        """
        self.target.pull_if_outdated()
        self.value_trainer.pull_if_outdated()
        (q,) = self.target.net.forward_pass(batch.obs_B, None if self.discrete else batch.action_B, learn=False).values
        self.value_trainer.set_train_mode(True)
        outputs = self.value.forward_pass(batch.obs_B, None)
        advantage_B = self._recorded_action_values(q, batch).amin(0) - outputs.values[0][0, :, 0]
        loss_B, slope_B = expectile_loss(advantage_B, self.spec.expectile)
        outputs.backward((-slope_B / len(slope_B)).view(1, -1, 1))
        self.meter.report(value_loss=self.value_trainer.check_finite(loss_B.mean()))
        self.value_trainer.step()
        self.value_trainer.set_train_mode(False)
        return advantage_B

    def _actor_step(self, batch: Transitions, advantage_B: Tensor) -> None:
        """Take a gradient step on the policy that increases E[exp(β A) log π(a|s)] (equation 7)."""
        self.actor_trainer.pull_if_outdated()
        self.actor_trainer.set_train_mode(True)
        weight_B = torch.exp(self.spec.beta * advantage_B).clamp(max=MAX_WEIGHT)
        terms = self.add_imitation_gradient(self.net.forward_pass(batch.obs_B), batch, weight_B)
        self.meter.report(actor_loss=self.actor_trainer.check_finite(terms.loss), entropy=terms.entropy)
        self.actor_trainer.step()
        self.actor_trainer.set_train_mode(False)

    def _critic_step(self, batch: Transitions) -> None:
        """Take a gradient step that moves Q(s, a) towards r + γ V(s') (equation 6)."""
        self.trainer.pull_if_outdated()
        next_value_B = self.value.forward_pass(batch.next_obs_B, None, learn=False).values[0][0, :, 0]
        target_B = one_step_target(batch.reward_B, next_value_B, batch.terminated_B, self.spec.gamma)
        outputs = self.critics.forward_pass(batch.obs_B, None if self.discrete else batch.action_B)
        (q,) = outputs.values
        q_CB = self._recorded_action_values(q, batch)
        loss, grad_CB = self.value_loss.with_gradient(q_CB, target_B.expand_as(q_CB), len(target_B))
        outputs.backward(action_value_gradient(q, batch.action_B.expand(len(q), -1), grad_CB) if self.discrete else grad_CB)
        self.meter.report_loss(loss, critic_loss=loss, q_mean=q_CB.mean())
        self.meter.step()

    def _recorded_action_values(self, q: Tensor, batch: Transitions) -> Tensor:
        """Return Q(s, a) [C, B] of the recorded actions, given the critics' outputs."""
        return action_value(q, batch.action_B.expand(len(q), -1)) if self.discrete else q

    @property
    def policy_trainer(self) -> Trainer:
        return self.actor_trainer

    def parts(self) -> dict[str, TrainablePart]:
        return {**super().parts(), "actor_trainer": self.actor_trainer, "value_trainer": self.value_trainer}
