"""Twin delayed deterministic policy gradient (TD3, arXiv:1802.09477), and DDPG (arXiv:1509.02971) as a special case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import TrainablePart
from slm_lab.agent.algorithm.replay_actor_critic import AnyBatch, CriticPass, ReplayActorCritic
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.ops.arrays import as_tensor, as_type_of
from slm_lab.agent.ops.distributions import Deterministic
from slm_lab.agent.ops.targets import smoothed_action
from slm_lab.spec.models.algorithm import TD3Spec


class TD3(ReplayActorCritic):
    """TD3, which learns a deterministic policy from replayed transitions (arXiv:1802.09477, Algorithm 1).

    DDPG is TD3 with one critic, target_noise 0 and policy_delay 1 (arXiv:1509.02971, Algorithm 1).
    """

    has_entropy = False

    spec: TD3Spec
    distribution: Deterministic
    actor_target: TargetNet[ActorCriticNet]

    def build(self) -> None:
        super().build()
        net = ActorCriticNet(self.agent_spec.net, self.info.observation, self.distribution.param_dim, critic=False)
        critic_spec = self.agent_spec.critic_net or self.agent_spec.net  # determines how all target nets are updated
        self.actor_target = TargetNet(net, self.actor_trainer.flat, critic_spec, self.device)
        net.enable_graph_free_pass(self.actor_trainer.flat, data=True)

    def values_and_targets(self, batch: AnyBatch) -> tuple[CriticPass, Tensor, Tensor]:
        assert self.target is not None
        next_action_BD = self._target_action(batch)
        outputs = self.critics.forward_pass(self.critic_inputs(self.critics, batch, learn=True), batch.action_B)
        target = self.target.net
        (next_q_CB,) = target.forward_pass(self.critic_inputs(target, batch, for_next_obs=True), next_action_BD, learn=False).values
        return outputs, outputs.values[0], self.td_target(batch, next_q_CB.amin(0))  # eq. 10

    def _target_action(self, batch: AnyBatch) -> Tensor:
        """Return the actions [B, D] of the target actor in the next states, smoothed by clipped noise (arXiv:1802.09477, section 5.3)."""
        action_BD: Any = self.distribution.mode(self.actor_forward_pass(batch, self.actor_target.net, learn=False).values[0])
        if self.spec.target_noise:
            noise_BD = self.spec.target_noise * self.sample_action_noise(len(action_BD), action_BD)
            action_BD = smoothed_action(action_BD, noise_BD, self.spec.target_noise_clip)
        return as_tensor(action_BD)

    def add_actor_gradient(self, batch: AnyBatch, q: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of the actor's loss −E[Q₁(s, πφ(s))] to `Parameter.grad`, and return this loss, and 0 as the entropy.

        The gradient of the actor's loss is the negative deterministic policy gradient (arXiv:1802.09477, Algorithm 1).
        """
        actor, B = self.actor_forward_pass(batch), len(batch.reward_B)
        action_BD: Any = self.distribution.mode(actor.values[0])
        inputs_B = self.critic_inputs(self.critics, batch)
        critic = self.critics.forward_pass(inputs_B, as_tensor(action_BD), for_action_grad=True, number=1)
        (q_1B,) = critic.values
        grad_action_BD = critic.input_grad(torch.full_like(q_1B, -1.0 / B))
        actor.backward(self.distribution.parameter_gradient(action_BD, as_type_of(action_BD, grad_action_BD)), None)
        return -q_1B.mean(), q_1B.new_zeros(())

    def target_nets(self) -> list[TargetNet[Any]]:
        return [*super().target_nets(), self.actor_target]

    def parts(self) -> dict[str, TrainablePart]:
        return {**super().parts(), "actor_target": self.actor_target}

    def copy_to_target(self) -> None:
        super().copy_to_target()
        self.actor_target.copy_source()
