"""Random actions: the baseline."""

from __future__ import annotations

import numpy as np

from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import Place
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.spec.spec import AgentSpec


class Random(Algorithm):
    """Uniformly random actions; learns nothing."""

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, place: Place) -> None:
        self.clock = clock
        self.policy = Policy(info.action, np.random.default_rng(seeds.act))
