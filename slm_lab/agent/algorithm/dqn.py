"""Algorithms that learn action values: SARSA (Rummery & Niranjan 1994), DQN (Mnih et al., 2015) and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.algorithm.meter import GradientMeter
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.agent.net.distributional import build_q_net
from slm_lab.agent.net.noisy import NoiseSource
from slm_lab.agent.net.q_nets import QNet
from slm_lab.agent.ops.arrays import A, as_tensor, as_type_of, ignore_float_errors
from slm_lab.agent.ops.autograd import ForwardPass, GraphPass
from slm_lab.agent.ops.losses import ValueLoss
from slm_lab.agent.ops.objective import value_diagnostics
from slm_lab.agent.ops.targets import (
    action_value,
    action_value_gradient,
    double_q_value,
    join_component_gradients,
    max_value,
    n_step_return,
    one_step_target,
    split_by_component,
)
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.replay.replay import Replay, Transitions
from slm_lab.agent.replay.sequences import SequenceBatch, SequenceReplay
from slm_lab.agent.rollout.minibatch import RolloutBatch, compute_critic_outputs
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import DoubleDQNSpec, DQNSpec, QLearningSpec, SARSASpec, VanillaDQNSpec


class ValueLearning(Algorithm):
    """Base class of algorithms that choose actions by learned action values. ValueLearning defines the value loss and the diagnostics."""

    diagnostics = ("td_error", "q_mean")

    net: QNet
    trainer: Trainer

    def build(self) -> None:
        self.meter, self.value_loss = GradientMeter(self.trainer, self.clock), ValueLoss(self.agent_spec.net.loss_spec)


class Sarsa(ValueLearning):
    """SARSA, which learns the action values of the acting policy, including its exploration.

    The temporal-difference target contains the value of the next action that the policy took.
    """

    spec: SARSASpec

    def learn(self, rollout: Rollout) -> Metrics:
        rollout = rollout.to(self.device)
        values = compute_critic_outputs(self.net, rollout, self.seq_len)
        next_value_TN = action_value(values.next_output_TN, self._next_actions(rollout, values.next_output_TN))
        target_TN = one_step_target(rollout.reward_TN, next_value_TN, rollout.terminated_TN.float(), self.spec.gamma)
        self.meter.begin()
        for microbatch, weight in RolloutBatch(rollout, values, target_TN, target_TN, self.seq_len).microbatches():
            q_BA, _ = microbatch.forward(self.net)
            q_B = action_value(q_BA, microbatch.action_B)
            self.meter.add(self.value_loss(q_B, microbatch.target_B), weight)
            td_error, q_mean = value_diagnostics(q_B, microbatch.target_B)
            self.meter.report(td_error=weight * td_error, q_mean=weight * q_mean)
        self.meter.step()
        return self.meter.end()

    def _next_actions(self, rollout: Rollout, next_q_TNA: Tensor) -> Tensor:
        """Return the next actions a' [T, N], which are the actions of the next time step.

        At truncations and in the last time step, the next actions are drawn from the policy.
        """
        next_action_TN = torch.cat([rollout.action_TN[1:], rollout.action_TN[-1:]])
        drawn_TN = rollout.truncated_TN.clone()
        drawn_TN[-1] = True
        drawn = self.policy.act_from_params(next_q_TNA[drawn_TN].cpu().numpy(), None)
        next_action_TN[drawn_TN] = torch.from_numpy(drawn.action_N).to(self.device)
        return next_action_TN


NextValue = Callable[[Callable[[], Any], Callable[[], Any]], Any]
"""Function (q, target_q) → V(s') [B]. Both arguments are functions without arguments. `q` returns the action values of s' [B, A] computed
by the net, and `target_q` returns the action values of s' computed by the target net. All values are tensors, or numpy arrays for small
nets."""

NEXT_VALUES: dict[type[QLearningSpec], NextValue] = {
    VanillaDQNSpec: lambda q, target_q: max_value(q()),
    DQNSpec: lambda q, target_q: max_value(target_q()),
    DoubleDQNSpec: lambda q, target_q: double_q_value(q(), target_q()),
}
"""Spec class of an algorithm → function that computes the value of the next state. DQN, VanillaDQN and DoubleDQN differ only in this
function."""


class DeepQLearning(ValueLearning):
    """Base class of the DQN family, which samples batches from a replay buffer and takes gradient steps towards value targets.

    Value targets are computed with the target net, or with the net itself for an algorithm without a target net.
    """

    spec: QLearningSpec
    memory: Replay | SequenceReplay
    """Replay buffer of transitions, or of sequences if the net is recurrent."""

    def build(self) -> None:
        super().build()
        self.net.enable_graph_free_pass(self.trainer.flat)
        if self.spec.has_target:
            target = build_q_net(self.agent_spec.net, self.info.observation, self.info.action.nvec, self.spec.value_distribution())
            self.target = TargetNet(target, self.trainer.flat, self.agent_spec.net, self.device)
            target.enable_graph_free_pass(self.trainer.flat, data=True)
        self.noise = NoiseSource(self.net, None if self.target is None else self.target.net)
        if self.noise:
            self.rng = np.random.default_rng([self.seeds.update, 1])

    @ignore_float_errors()
    def update(self) -> Metrics:  # Mnih et al., 2015, Algorithm 1
        self.meter.begin()
        for _ in range(self.spec.training_iter):
            batch = self.memory.sample().to(self.device)  # sequences if the net is recurrent
            for _ in range(self.spec.training_batch_iter):
                if self.rng is not None:
                    self.noise.draw(self.rng)
                self._step(batch)
        return self.meter.end()

    def end_step(self) -> None:
        if self.target is not None and self.target.claim_due_update(self.clock.global_frame):
            self.target.update()

    def _step(self, batch: Transitions | SequenceBatch) -> None:
        """Take one gradient step on a batch."""
        raise NotImplementedError

    def _returns_and_discount(self, batch: Transitions | SequenceBatch) -> tuple[Tensor, float | Tensor]:
        """Return the rewards [B] and the discount factor γ for one-step returns.

        For n-step returns, return the discounted sums [B] of the rewards of k ≤ n steps, and the discount factors γ^k [B].
        """
        if batch.reward_KB is None or batch.steps_B is None:
            return batch.reward_B, self.spec.gamma
        return n_step_return(batch.reward_KB, batch.steps_B, self.spec.gamma)


class QLearning(DeepQLearning):
    """Q-learning with the targets of VanillaDQN, DQN or DoubleDQN.

    The spec selects prioritised replay in agent.memory, and the dueling architecture in agent.net.
    """

    def build(self) -> None:
        super().build()
        self.next_value = next(value for model, value in NEXT_VALUES.items() if isinstance(self.spec, model))
        self.values, self.target_values = self.net.values, self.net.values if self.target is None else self.target.net.values

    def _step(self, batch: Transitions | SequenceBatch) -> None:
        """Take one gradient step on the temporal-difference errors of a batch, [B], or [B, D] for actions with D components."""
        if isinstance(batch, SequenceBatch):
            outputs, target_B = self._sequence_pass_and_targets(batch)
        else:
            target_B = self._targets(batch)
            outputs = self.net.forward_pass(batch.obs_B)
        (q_BA,) = outputs.values
        q_components = self._split_components(q_BA)
        action_B = as_type_of(q_components, batch.action_B)
        q_B: Any = action_value(q_components, action_B)
        weight_B = batch.weight_B  # arXiv:1511.05952, Algorithm 1, line 13
        if weight_B is not None and q_B.ndim > 1:
            weight_B = weight_B.unsqueeze(1)
        weights = None if weight_B is None else as_type_of(q_B, weight_B)
        loss, grad_q_B = self.value_loss.with_gradient(q_B, as_type_of(q_B, target_B), math.prod(q_B.shape), weights)
        outputs.backward(self._join_components(action_value_gradient(q_components, action_B, grad_q_B)))
        if self.memory.prioritized:
            error_B = as_tensor(target_B) - as_tensor(q_B)
            self.memory.update_priorities(batch.sampled_rows, error_B if error_B.ndim == 1 else error_B.abs().mean(1))
        self.meter.report_loss(loss)
        td_error, q_mean = value_diagnostics(q_B, target_B)
        self.meter.report(td_error=td_error, q_mean=q_mean)
        self.meter.step()

    def _targets(self, batch: Transitions) -> Any:
        if self.target is not None:
            self.target.pull_if_outdated()
        self.trainer.set_train_mode(False)  # next states are evaluated in the same mode as when acting
        next_obs_B = batch.next_obs_B
        next_value_B = self.next_value(
            lambda: self._split_components(self.values(next_obs_B)), lambda: self._split_components(self.target_values(next_obs_B))
        )
        self.trainer.set_train_mode(True)
        return self._td_targets(batch, next_value_B)

    def _split_components(self, q_BA: Any) -> Any:
        """Reshape the action values of multi-discrete actions with D components to [..., D, A].

        The action values of discrete actions are returned unchanged.
        """
        return q_BA if self.info.action.kind == "discrete" else split_by_component(as_tensor(q_BA), self.info.action.nvec)

    def _join_components(self, grad: Any) -> Any:
        """Convert a gradient with the shape of a result of `_split_components` to the shape [..., A] of the net's outputs."""
        return grad if self.info.action.kind == "discrete" else join_component_gradients(grad, self.info.action.nvec)

    def _td_targets(self, batch: Transitions | SequenceBatch, next_value_B: A) -> A:
        """Return the temporal-difference targets [B], or [B, D] for actions with D components.

        The target of an action component is the sum of the full reward and the discounted next value of this component.
        """
        reward, discount = self._returns_and_discount(batch)
        terminated = batch.terminated_B
        if isinstance(next_value_B, Tensor) and next_value_B.ndim > 1:
            reward, terminated = (item.unsqueeze(1).expand_as(next_value_B) for item in (reward, terminated))
            discount = discount.unsqueeze(1) if isinstance(discount, Tensor) else discount
        gamma = as_type_of(next_value_B, discount) if isinstance(discount, Tensor) else discount
        return one_step_target(as_type_of(next_value_B, reward), next_value_B, as_type_of(next_value_B, terminated), gamma)

    def _sequence_pass_and_targets(self, batch: SequenceBatch) -> tuple[ForwardPass, Tensor]:
        """Return the forward pass over the sequences, which outputs Q(s, ·) [B, A], and the temporal-difference targets [B].

        The net and the target net start from the same stored hidden states, and process the burn-in steps separately, as in R2D2 (see
        replay/sequences.py). Unlike in R2D2, values are not rescaled, and n-step returns end at the end of a sequence.
        """
        _, q_SA = batch.unroll(self.net)
        target_net = self.net if self.target is None else self.target.net
        with torch.no_grad():
            if self.target is not None:
                self.target.pull_if_outdated()
            next_value_B = self.next_value(
                lambda: self._split_components(batch.next_outputs(q_SA)),
                lambda: self._split_components(batch.next_outputs(batch.unroll(target_net)[1])),
            )
        return GraphPass(batch.current_outputs(q_SA)), self._td_targets(batch, next_value_B)
