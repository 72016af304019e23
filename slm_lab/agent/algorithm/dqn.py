"""Learning action values: SARSA (Rummery & Niranjan 1994), and Q-learning with nets (DQN, Mnih et al. 2015) and its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, GradientMeter
from slm_lab.agent.rollout.minibatch import Batch, critic_outputs
from slm_lab.agent.algorithm.on_policy import build_distribution, build_on_policy_memory, build_value_loss
from slm_lab.agent.algorithm.common.target import TargetNet, algorithms_for, build_replay
from slm_lab.agent.rollout.storage import RolloutStorage
from slm_lab.agent.replay.replay import Replay, Transitions
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.net.fast import fast_values
from slm_lab.agent.net.q_net import QNet
from slm_lab.agent.ops.targets import chosen_value, double_value, max_value, one_step_target
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import Place
from slm_lab.lib.records import EnvInfo, Metrics
from slm_lab.lib.rng import Seeds
from slm_lab.spec.algorithm import DoubleDQNSpec, DQNSpec, QLearningSpec, SARSASpec, VanillaDQNSpec
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.net import NetSpec, RecurrentNetSpec
from slm_lab.spec.spec import AgentSpec


def build_net(agent: AgentSpec, info: EnvInfo) -> QNet:
    """The Q-net. Raises SpecError where the env's actions have no values to list."""
    assert agent.net is not None  # the spec room refuses a learner without one
    if info.action.kind != "discrete":
        needs = f"needs one discrete action, this env's are {info.action.kind.replace('_', '-')}"
        raise SpecError(
            "agent", [Problem("agent.algorithm.name", f"{agent.algorithm.name!r} {needs}; allowed: {algorithms_for(info.action)}")]
        )
    return QNet(agent.net, info.observation, info.action.nvec[0])


def build_policy(agent: AgentSpec, info: EnvInfo, net: QNet, seeds: Seeds) -> Policy:
    """Acts on the values of `net`; to be built after the trainer, whose flat parameters its fast path views."""
    algorithm = agent.algorithm
    distribution = build_distribution(algorithm, info.action)
    return Policy(info.action, np.random.default_rng(seeds.act), net, distribution, algorithm.action_policy, algorithm.needs_logp)


class Sarsa(Algorithm):
    """Values of the policy that acts, exploration included: the target takes the next action that was taken."""

    memory: RolloutStorage

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, place: Place) -> None:
        assert isinstance(agent.algorithm, SARSASpec)
        assert agent.net is not None
        self.spec, self.clock, self.device = agent.algorithm, clock, place.device
        self.net = build_net(agent, info)
        self.trainer = Trainer(self.net, agent.net, place=place)
        self.policy = build_policy(agent, info, self.net, seeds)
        self.memory = build_on_policy_memory(agent, info, self.net.state_size)
        self.meter, self.value_loss = GradientMeter(self.trainer, clock), build_value_loss(agent.net.loss_spec)
        self.seq_len = agent.net.seq_len if isinstance(agent.net, RecurrentNetSpec) else 1

    def learn(self, rollout: Rollout) -> Metrics:
        rollout = rollout.to(self.device)
        values = critic_outputs(self.net, rollout, self.seq_len)
        next_value_TN = chosen_value(values.next_output_TN, self._next_actions(rollout, values.next_output_TN))
        target_TN = one_step_target(rollout.reward_TN, next_value_TN, rollout.terminated_TN.float(), self.spec.gamma)
        self.meter.begin()
        for piece, share in Batch(rollout, values, target_TN, target_TN, self.seq_len).pieces():
            q_BA, _ = piece.forward(self.net)
            self.meter.add(self.value_loss(chosen_value(q_BA, piece.action_B), piece.target_B), share)
        self.meter.step()
        return self.meter.end()

    def _next_actions(self, rollout: Rollout, next_q_TNA: Tensor) -> Tensor:
        """a' [T, N]: the action of the next row; drawn from the policy where there is none, at truncations and after the last row."""
        next_action_TN = torch.cat([rollout.action_TN[1:], rollout.action_TN[-1:]])
        drawn_TN = rollout.truncated_TN.clone()
        drawn_TN[-1] = True
        next_action_TN[drawn_TN] = torch.from_numpy(self.policy.choose(next_q_TNA[drawn_TN].cpu().numpy())).to(self.device)
        return next_action_TN


NextValue = Callable[[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor], Tensor]
"""(the net's values, the target net's, next_obs_B) → V(s') [B]."""

NEXT_VALUES: dict[type[QLearningSpec], NextValue] = {
    VanillaDQNSpec: lambda q, target_q, next_obs_B: max_value(q(next_obs_B)),
    DQNSpec: lambda q, target_q, next_obs_B: max_value(target_q(next_obs_B)),
    DoubleDQNSpec: lambda q, target_q, next_obs_B: double_value(q(next_obs_B), target_q(next_obs_B)),
}
"""What each algorithm takes the next state to be worth: all that they differ in."""


class QLearning(Algorithm):
    """VanillaDQN, DQN and DoubleDQN. Prioritised replay comes with the memory, the dueling form with the net."""

    memory: Replay
    trainer: Trainer

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, place: Place) -> None:
        assert isinstance(agent.algorithm, QLearningSpec)
        assert agent.net is not None
        self.spec, self.clock, self.device = agent.algorithm, clock, place.device
        self.next_value = NEXT_VALUES[type(agent.algorithm)]
        self.net = build_net(agent, info)
        self.trainer = Trainer(self.net, agent.net, place=place)
        self.target = self._build_target(agent, info, agent.net, place)
        self.policy = build_policy(agent, info, self.net, seeds)
        self.memory = build_replay(agent, info, clock, seeds)
        self.meter, self.value_loss = GradientMeter(self.trainer, clock), build_value_loss(agent.net.loss_spec)
        # without gradients, for targets
        self.values = fast_values(self.net, self.memory.batch_size)
        self.target_values = self.values if self.target is None else fast_values(self.target.net, self.memory.batch_size)

    def _build_target(self, agent: AgentSpec, info: EnvInfo, net: NetSpec, place: Place) -> TargetNet[QNet] | None:
        return None if isinstance(self.spec, VanillaDQNSpec) else TargetNet(build_net(agent, info), self.trainer.flat, net, place)

    def update(self) -> Metrics:  # Mnih et al. 2015, Algorithm 1
        self.meter.begin()
        for _ in range(self.spec.training_iter):
            batch = self.memory.sample().to(self.device)
            for _ in range(self.spec.training_batch_iter):
                self._step(batch)
        if self.target is not None:
            self.target.follow(self.clock.global_frame)
        return self.meter.end()

    def _step(self, batch: Transitions) -> None:
        """One gradient step on the temporal-difference errors of a batch."""
        target_B = self._targets(batch)
        q_B = chosen_value(self.net.critic(batch.obs_B), batch.action_B)
        if batch.weight_B is None:
            loss = self.value_loss(q_B, target_B)
        else:  # arXiv:1511.05952, Algorithm 1, line 13
            loss = (batch.weight_B * self.value_loss(q_B, target_B, reduction="none")).mean()
            self.memory.update_priorities(batch.row_B, target_B - q_B)
        self.meter.add(loss)
        self.meter.step()

    @torch.no_grad()
    def _targets(self, batch: Transitions) -> Tensor:
        self.trainer.set_train_mode(False)  # the next states are valued as they would be met
        next_value_B = self.next_value(self.values, self.target_values, batch.next_obs_B)
        self.trainer.set_train_mode(True)
        return one_step_target(batch.reward_B, next_value_B, batch.terminated_B, self.spec.gamma)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "target": None if self.target is None else self.target.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.target is not None:
            self.target.load_state_dict(state["target"])
