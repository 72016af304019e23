"""Population-based training (arXiv:1711.09846), as it goes with many policies in one run (arXiv:2006.11751, appendix)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.base import Tuning
from slm_lab.lib.rng import generator_state, set_generator_state
from slm_lab.spec.sampler import PBTSpec

COLUMNS = ("frame", "policy", "total_reward", "lr", "entropy_coef", "gamma", "source")
GAMMA_MAX = 0.99999


@dataclass
class Member:
    """A policy of the population, as it stands."""

    agent: Agent
    frame: int = 0
    total_reward: float | None = None
    """Mean return of the last episodes; None before the first."""


class Population:
    """In a round, a policy of the poorest may take over weights and hyperparameters of one of the best; then its hyperparameters mutate,
    unless it is one of the best itself.

    Each policy has its rounds by its own frames. Policy 0 stays as the spec says, for comparison.

    Args: path: of the table of rounds; None: none is written.
    """

    def __init__(self, spec: PBTSpec, members: Sequence[Member], seed: int, path: Path | None = None) -> None:
        self.spec, self.members, self.path = spec, list(members), path
        self.rng = np.random.default_rng([seed, 2])
        self.rounds = [0] * len(members)
        for policy in range(len(members)):
            self._note(policy, None)

    def due(self, policy: int) -> bool:
        """Whether a round of this policy is due."""
        begun = self.members[policy].frame - self.spec.start
        return begun >= 0 and begun // self.spec.period >= self.rounds[policy]

    def step(self, policy: int) -> None:
        """A round of this policy."""
        self.rounds[policy] = (self.members[policy].frame - self.spec.start) // self.spec.period + 1
        poorest, best = self._ranked()
        source = None
        if policy > 0 and policy not in best:
            source = self._better(policy, best) if policy in poorest else None
            if source is not None:
                take_over(self.members[policy].agent, self.members[source].agent)
            algorithm = self.members[policy].agent.algorithm
            algorithm.tune(self._mutated(algorithm.tuning, algorithm.spec.gamma))
        self._note(policy, source)

    def _ranked(self) -> tuple[list[int], list[int]]:
        """The poorest and the best, replace_fraction of the population each."""
        reward = {p: member.total_reward for p, member in enumerate(self.members) if member.total_reward is not None}
        count = int(np.ceil(self.spec.replace_fraction * len(self.members)))
        ranked = sorted(reward, key=lambda p: reward[p])
        return ranked[:count], [p for p in ranked[-count:] if p not in ranked[:count]]

    def _better(self, policy: int, best: Sequence[int]) -> int | None:
        """One of the best, where this policy is far enough behind it; else None."""
        if not best:
            return None
        source = int(self.rng.choice(best))
        own, other = self.members[policy].total_reward, self.members[source].total_reward
        assert own is not None
        assert other is not None
        gap = other - own
        return source if gap > self.spec.reward_gap_absolute and gap > self.spec.reward_gap * abs(own) else None

    def _mutated(self, tuning: Tuning, gamma: float) -> Tuning:
        lr, entropy_coef = (value * self._factor() for value in (tuning.lr, tuning.entropy_coef))
        if not self.spec.optimize_gamma:
            return Tuning(lr, entropy_coef, tuning.gamma)
        # by its distance from 1, which is what the horizon goes by
        return Tuning(lr, entropy_coef, min(max(0.0, 1.0 - (1.0 - gamma) * self._factor()), GAMMA_MAX))

    def _factor(self) -> float:
        """1, or with probability mutation_rate one by which a hyperparameter grows or shrinks."""
        if self.rng.random() >= self.spec.mutation_rate:
            return 1.0
        factor = float(self.rng.uniform(self.spec.perturb_min, self.spec.perturb_max))
        return factor if self.rng.random() < 0.5 else 1.0 / factor

    def _note(self, policy: int, source: int | None) -> None:
        if self.path is None:
            return
        member = self.members[policy]
        agent = member.agent
        values = [member.frame, policy, member.total_reward, agent.lr, agent.entropy_coef, agent.algorithm.spec.gamma, source]
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                writer.writerow(COLUMNS)
            writer.writerow(["" if value is None else f"{value:.8g}" if isinstance(value, float) else value for value in values])

    def state_dict(self) -> dict[str, Any]:
        """The agents keep their hyperparameters themselves."""
        return {"rng": generator_state(self.rng), "rounds": list(self.rounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_generator_state(self.rng, state["rng"])
        self.rounds = list(state["rounds"])


def take_over(agent: Agent, source: Agent) -> None:
    """Give `agent` weights, optimizer, scales and hyperparameters of `source`; its random streams stay its own."""
    own, taken = agent.algorithm.state_dict(), deepcopy(source.algorithm.state_dict())  # optimizers of torch give no copies
    agent.algorithm.load_state_dict({key: own[key] if key == "rng" else value for key, value in taken.items()})
