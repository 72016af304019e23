"""Q-learning of distributions of returns: C51 (arXiv:1707.06887) and QR-DQN (arXiv:1710.10044)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slm_lab.agent.algorithm.dqn import DeepQLearning
from slm_lab.agent.net.distributional import DistributionalQNet
from slm_lab.agent.ops.arrays import as_tensor, as_type_of
from slm_lab.agent.ops.autograd import ForwardPass, GraphPass
from slm_lab.agent.ops.objective import value_diagnostics
from slm_lab.agent.ops.projection import categorical_loss, project_distribution
from slm_lab.agent.ops.quantiles import quantile_huber_loss
from slm_lab.agent.ops.targets import action_atoms, action_atoms_gradient
from slm_lab.agent.replay.replay import Transitions
from slm_lab.agent.replay.sequences import SequenceBatch
from slm_lab.spec.models.algorithm import C51Spec, DistributionalSpec, QRDQNSpec


class DistributionLoss(NamedTuple):
    """Loss of a batch of predicted return distributions, its gradient, and values for diagnostics and priorities."""

    loss: Tensor | float
    grad_BZ: Tensor
    """Gradient of the loss with respect to the net's outputs for the chosen actions."""
    error_B: Tensor
    """Errors that determine the priorities in prioritised replay."""
    mean_B: Tensor
    target_mean_B: Tensor


class DistributionalQLearning(DeepQLearning):
    """Base class of distributional Q-learning.

    An update moves the predicted distribution Z(s, a) towards the distribution of r + γ Z(s', a'), where a' is the action with the greatest
    mean return.
    """

    spec: DistributionalSpec
    net: DistributionalQNet

    def distribution_loss(
        self, atoms_BZ: Tensor, next_BZ: Tensor, return_B: Tensor, discount_B: Tensor, weight_B: Tensor | None
    ) -> DistributionLoss:
        """Return the loss of the predicted distributions atoms_BZ, given the distributions next_BZ of the next states.

        Args: return_B: rewards, or discounted sums of the rewards of k steps. discount_B: discount factors, which are γ or γ^k, or 0 after
        a termination. weight_B: importance weights.
        """
        raise NotImplementedError

    def _step(self, batch: Transitions | SequenceBatch) -> None:
        outputs, next_BZ = self._sequence_pass_and_targets(batch) if isinstance(batch, SequenceBatch) else self._pass_and_targets(batch)
        (atoms_BX,) = outputs.values
        atoms_BAZ = self._reshape_per_action(as_tensor(atoms_BX))
        return_B, gamma = self._returns_and_discount(batch)
        rows = (action_atoms(atoms_BAZ, batch.action_B), next_BZ, return_B, gamma * (1.0 - batch.terminated_B))
        result = self.distribution_loss(*rows, batch.weight_B)
        outputs.backward(as_type_of(atoms_BX, action_atoms_gradient(atoms_BAZ, batch.action_B, result.grad_BZ).flatten(1)))
        if self.memory.prioritized:
            self.memory.update_priorities(batch.sampled_rows, result.error_B)
        self.meter.report_loss(result.loss)
        td_error, q_mean = value_diagnostics(result.mean_B, result.target_mean_B)
        self.meter.report(td_error=td_error, q_mean=q_mean)
        self.meter.step()

    def _reshape_per_action(self, atoms_BX: Tensor) -> Tensor:
        """Reshape the net's output, [B, A · Z], to the distributions of all actions, [B, A, Z]."""
        return atoms_BX.unflatten(1, (-1, self.net.actor_head.number))

    def _pass_and_targets(self, batch: Transitions) -> tuple[ForwardPass, Tensor]:
        """Return the forward pass, whose output is [B, A · Z], and the predicted return distributions [B, Z] of the next states."""
        assert self.target is not None
        self.target.pull_if_outdated()
        self.trainer.set_train_mode(False)  # next states are evaluated in the same mode as when acting
        q_BA, atoms_BX = self.target.net.distributions(batch.next_obs_B)
        if self.spec.double_q:
            q_BA = self.net.values(batch.next_obs_B)
        self.trainer.set_train_mode(True)
        return self.net.forward_pass(batch.obs_B), action_atoms(self._reshape_per_action(atoms_BX), q_BA.argmax(1))

    def _sequence_pass_and_targets(self, batch: SequenceBatch) -> tuple[ForwardPass, Tensor]:
        """Return the results of `_pass_and_targets` for a batch of sequences.

        The net and the target net start from the same stored hidden states, and process the burn-in steps separately.
        """
        assert self.target is not None
        q_SA, atoms_SX = batch.unroll(self.net)
        with torch.no_grad():
            self.target.pull_if_outdated()
            target_q_SA, next_SX = batch.unroll(self.target.net)
            action_B = batch.next_outputs(q_SA if self.spec.double_q else target_q_SA).argmax(1)
            next_BZ = action_atoms(self._reshape_per_action(batch.next_outputs(next_SX)), action_B)
        return GraphPass(batch.current_outputs(atoms_SX)), next_BZ


class QRDQN(DistributionalQLearning):
    """QR-DQN, which learns quantiles of the return by quantile regression (arXiv:1710.10044, Algorithm 1)."""

    spec: QRDQNSpec

    def distribution_loss(
        self, atoms_BZ: Tensor, next_BZ: Tensor, return_B: Tensor, discount_B: Tensor, weight_B: Tensor | None
    ) -> DistributionLoss:
        target_BZ = return_B.unsqueeze(1) + discount_B.unsqueeze(1) * next_BZ
        loss, grad_BZ = quantile_huber_loss(atoms_BZ, target_BZ, weight_B)
        mean_B, target_mean_B = atoms_BZ.mean(1), target_BZ.mean(1)
        return DistributionLoss(loss, grad_BZ, target_mean_B - mean_B, mean_B, target_mean_B)


class C51(DistributionalQLearning):
    """C51, which minimises the cross-entropy to the projected target distribution (arXiv:1707.06887, Algorithm 1)."""

    spec: C51Spec

    def distribution_loss(
        self, atoms_BZ: Tensor, next_BZ: Tensor, return_B: Tensor, discount_B: Tensor, weight_B: Tensor | None
    ) -> DistributionLoss:
        low, high = self.spec.v_min, self.spec.v_max
        target_BZ = project_distribution(next_BZ.softmax(1), return_B, discount_B, low, high)
        loss, grad_BZ, divergence_B = categorical_loss(atoms_BZ, target_BZ, weight_B)
        atom_Z = torch.linspace(low, high, atoms_BZ.shape[1], device=atoms_BZ.device)
        return DistributionLoss(loss, grad_BZ, divergence_B, atoms_BZ.softmax(1) @ atom_Z, target_BZ @ atom_Z)
