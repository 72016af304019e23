"""Random streams: every consumer draws from its own, so that none disturbs another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from secrets import randbits
from typing import Any

import numpy as np


def draw_seed() -> int:
    """A fresh random_seed for a spec that has none."""
    return randbits(31)


@dataclass(frozen=True)
class Seeds:
    """32-bit seeds of one Session, each for one consumer."""

    net: int
    act: int
    update: int
    env: int
    eval_env: int


def session_seeds(random_seed: int, trial: int, session: int, restart: int = 0) -> Seeds:
    """Seeds of a Session, from SeedSequence([random_seed, trial, session]); others for each process that takes its place."""
    words = np.random.SeedSequence([random_seed, trial, session, *([restart] if restart else [])]).generate_state(5)
    return Seeds(*(int(word) & 0x7FFFFFFF for word in words))


def worker_seeds(seeds: Seeds, worker: int, restart: int = 0) -> Seeds:
    """Seeds of a rollout worker: the Session's own for the first, so that one worker collects what the Session would by itself."""
    if worker == 0 and restart == 0:
        return seeds
    env, act = (int(word) & 0x7FFFFFFF for word in np.random.SeedSequence([seeds.env, seeds.act, worker, restart]).generate_state(2))
    return replace(seeds, env=env, act=act)


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """The state of a Generator as plain Python numbers and strings."""
    return dict(rng.bit_generator.state)


def set_generator_state(rng: np.random.Generator, state: dict[str, Any]) -> None:
    rng.bit_generator.state = state
