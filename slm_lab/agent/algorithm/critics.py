"""The two critics of soft actor-critic, and of CrossQ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.algorithm.common.target import TargetNet
from slm_lab.agent.net.q_critics import QCritics, build_critics
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.lib.heap import Place
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.algorithm import SoftActorCriticSpec
from slm_lab.spec.net import NetSpec
from slm_lab.spec.spec import AgentSpec


class Critics:
    """Two critics that learn, and how they value a transition. `net` values alone, for the actor."""

    target: TargetNet[QCritics] | None = None

    def __init__(self, agent: AgentSpec, info: EnvInfo, place: Place) -> None:
        assert isinstance(agent.algorithm, SoftActorCriticSpec)
        spec = agent.critic_net or agent.net
        assert spec is not None
        self.spec: NetSpec = spec
        self.net = self.build(agent.algorithm, info)
        self.trainer = Trainer(self.net, self.spec, {"critic": list(self.net.parameters())}, place)

    def build(self, algorithm: SoftActorCriticSpec, info: EnvInfo) -> QCritics:
        """Critics with fresh weights."""
        return build_critics(self.spec, info.observation, info.action, algorithm.spectral_norm)

    def __call__(
        self, obs_B: Tensor, next_obs_B: Tensor, action_B: Tensor | None = None, next_action_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values to learn, with gradients, and values to bootstrap from, without: [C, B] of actions, [C, B, A] without any."""
        raise NotImplementedError

    def follow(self, frame: int) -> None:
        """After each gradient step, taken at `frame`."""

    def state_dict(self) -> dict[str, Any]:
        """What there is beside the trainer's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class TargetCritics(Critics):
    """SoftActorCritic's: the next state is valued by target nets that follow."""

    target: TargetNet[QCritics]

    def __init__(self, agent: AgentSpec, info: EnvInfo, place: Place) -> None:
        super().__init__(agent, info, place)
        assert isinstance(agent.algorithm, SoftActorCriticSpec)
        self.target = TargetNet(self.build(agent.algorithm, info), self.trainer.flat, self.spec, place)

    def __call__(
        self, obs_B: Tensor, next_obs_B: Tensor, action_B: Tensor | None = None, next_action_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.net(obs_B, action_B), self.target.net(next_obs_B, next_action_B)

    def follow(self, frame: int) -> None:
        self.target.follow(frame)

    def state_dict(self) -> dict[str, Any]:
        return {"target": self.target.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.target.load_state_dict(state["target"])


class JointCritics(Critics):
    """CrossQ's: both states go through at once, so that the batch statistics are those of both, and no target net is needed (eq. 2)."""

    def __call__(
        self, obs_B: Tensor, next_obs_B: Tensor, action_B: Tensor | None = None, next_action_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        both_B = None if action_B is None or next_action_B is None else torch.cat((action_B, next_action_B))
        q_CB, next_q_CB = self.net(torch.cat((obs_B, next_obs_B)), both_B).split(len(obs_B), dim=1)
        return q_CB, next_q_CB.detach()
