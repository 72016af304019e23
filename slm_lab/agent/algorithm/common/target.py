"""What the algorithms that learn from a replay memory share: the memory itself, and target nets."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from slm_lab.agent.replay.replay import REPLAYS, Replay
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import Place
from slm_lab.lib.records import ActionSpace, EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.spec.algorithm import ReplayAlgorithmSpec
from slm_lab.spec.memory import PrioritizedReplaySpec, ReplaySpec
from slm_lab.spec.net import NetSpec
from slm_lab.spec.spec import AgentSpec


def algorithms_for(action: ActionSpace) -> str:
    """Names of the algorithms that learn such actions."""
    names = ["Reinforce", "ActorCritic", "PPO", "SIL", "PPOSIL"]
    if action.kind == "discrete":
        names += ["SARSA", "VanillaDQN", "DQN", "DoubleDQN"]
    if action.kind == "discrete" or (action.kind == "continuous" and action.bounded):
        names += ["SoftActorCritic", "CrossQ"]
    return ", ".join(names)


def build_replay(agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds) -> Replay:
    """The replay memory of an agent. Raises SpecError where it does not fit this machine."""
    algorithm, memory = agent.algorithm, agent.memory
    assert isinstance(algorithm, ReplayAlgorithmSpec)  # the spec room has seen to both
    assert isinstance(memory, ReplaySpec | PrioritizedReplaySpec)
    rng = np.random.default_rng(seeds.update)
    return REPLAYS[type(memory)](memory, info, clock, rng, algorithm.training_frequency, algorithm.training_start_step)


Net = TypeVar("Net", bound=nn.Module)


class TargetNet(Generic[Net]):
    """A net that follows another: a copy of it now and then (Mnih et al. 2015), or a moving average (arXiv:1509.02971, Algorithm 1).

    Args:
        net: a module built like the one it follows.
        source: the flat parameters that it follows.
        spec: update_type, update_frequency (frames) and polyak_coef (weight of the source).
    """

    def __init__(self, net: Net, source: FlatParams, spec: NetSpec, place: Place) -> None:
        self.net, self.source, self.spec = net, source, spec
        self.heap = place.heap
        self.flat = FlatParams(net, place=place, copy=False)
        if self.heap.fresh:
            self.flat.load(source.param, source.buffer)
        for parameter in net.parameters():
            parameter.requires_grad_(False)
        net.eval()
        self._followed = self.heap.array(np.zeros(1, np.int64))

    @property
    def followed(self) -> int:
        """Multiples of update_frequency that have been followed."""
        return int(self._followed[0])

    @torch.no_grad()
    def follow(self, frame: int) -> None:
        """Follow the source, once for each multiple of update_frequency frames that was crossed since the last call.

        Of several Sessions, one does it.
        """
        due = frame // self.spec.update_frequency
        if due > self._followed[0]:
            with self.heap.claim("target") as mine:
                if mine and due > self._followed[0]:
                    self._follow(due - self.followed)
                    self._followed[0] = due
        self.flat.pull()

    def _follow(self, times: int) -> None:
        if self.spec.update_type == "replace":
            self.flat.master.copy_(self.source.master)
        else:  # so many moving averages in one
            self.flat.master.lerp_(self.source.master, 1.0 - (1.0 - self.spec.polyak_coef) ** times)
        self.flat.master_buffer.copy_(self.source.master_buffer)

    def state_dict(self) -> dict[str, Any]:
        param, buffer = self.flat.clone()
        return {"param": param, "buffer": buffer, "followed": self.followed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.flat.load(state["param"], state["buffer"])
        self._followed[0] = int(state["followed"])
