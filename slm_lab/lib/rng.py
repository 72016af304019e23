"""Seeds and states of random number generators.

Each part of a Session that consumes random numbers (such as the env, the net, the policy) has its own generator, so that no part affects
the random numbers of another part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Seeds:
    """Seeds of one Session, of 31 bits each. Each part of the Session that consumes random numbers has its own seed."""

    net: int
    act: int
    update: int
    env: int
    eval_env: int


def session_seeds(random_seed: int, trial: int, session: int, restart: int = 0) -> Seeds:
    """Return the seeds of a Session, derived from SeedSequence([random_seed, trial, session]).

    After each restart of the Session's process (`restart` > 0), the seeds of the Session are different.
    """
    words = np.random.SeedSequence([random_seed, trial, session, *([restart] if restart else [])]).generate_state(5)
    return Seeds(*(int(word) & 0x7FFFFFFF for word in words))


def worker_seeds(seeds: Seeds, worker: int, restart: int = 0) -> Seeds:
    """Return the seeds of a rollout worker. The first rollout worker of a Session has the seeds of the Session.

    A Session with a single rollout worker collects the same data as a Session without rollout workers.
    """
    if worker == 0 and restart == 0:
        return seeds
    env, act = (int(word) & 0x7FFFFFFF for word in np.random.SeedSequence([seeds.env, seeds.act, worker, restart]).generate_state(2))
    return replace(seeds, env=env, act=act)


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return the state of a numpy Generator, as a dict of Python numbers and strings."""
    return dict(rng.bit_generator.state)


def set_generator_state(rng: np.random.Generator, state: dict[str, Any]) -> None:
    rng.bit_generator.state = state
