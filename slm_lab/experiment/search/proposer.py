"""TEMPORARY, until the proposers are merged: random sampling only."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from slm_lab.experiment.search.space import SearchSpace, Values
from slm_lab.lib.rng import generator_state, set_generator_state


class Proposer(Protocol):
    def ask(self, trial: int) -> Values | None: ...

    def report(self, trial: int, frame: int, metric: float) -> None: ...

    def tell(self, trial: int, metric: float | None) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Random:
    def __init__(self, space: SearchSpace, seed: int, grid: bool) -> None:
        self.space, self.rng, self.next, self.grid = space, np.random.default_rng(seed), 0, grid

    def ask(self, trial: int) -> Values | None:
        if self.grid:
            self.next += 1
            return dict(self.space.grid[self.next - 1]) if self.next <= len(self.space.grid) else None
        return self.space.sample(self.rng)

    def report(self, trial: int, frame: int, metric: float) -> None: ...

    def tell(self, trial: int, metric: float | None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"rng": generator_state(self.rng), "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_generator_state(self.rng, state["rng"])
        self.next = state["next"]


def make_proposer(space: SearchSpace, algorithm: str, seed: int) -> Proposer:
    return _Random(space, seed, algorithm == "grid" or set(space.grid[0]) == set(space.keys))
