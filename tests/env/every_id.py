"""Step every env of one EnvPool suite in a separate process: python -m tests.env.every_id SUITE [STEPS]"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from slm_lab.env import make_env
from slm_lab.env.vec import Env
from slm_lab.spec.compat.env_ids import POOL, envpool_envs
from slm_lab.spec.models.env import EnvSpec

ENVS = 2


def names(suite: str) -> list[str]:
    """Return the first id of each supported env of a suite."""
    return list(dict.fromkeys(env.ids[0] for env in envpool_envs().values() if env.suite == suite and not env.unsupported_reason))


def stepped(name: str, steps: int) -> str:
    """Make, reset, step and close an env; return a description of its faults, or "" if there are none."""
    if name == "VizdoomCustom-v1":
        return ""  # needs the user's files
    env = make_env(EnvSpec(name=POOL + name, num_envs=ENVS, max_frame=1), 0)
    try:
        return "; ".join(dict.fromkeys(_faults(env, steps)))
    finally:
        env.close()


def _faults(env: Env, steps: int) -> Iterator[str]:
    raw: Any = env._backend
    known, rows = env.info.observation, env.info.num_envs
    obs, ended = env.reset(), 0
    for _ in range(steps):
        step = env.step(env.sample())
        ended += len(step.episodes)
        for name, batch in (("obs", step.obs_N), ("last_obs", step.last_obs_N)):
            if batch.shape != (rows, *known.shape) or str(batch.dtype) != known.dtype:
                yield f"{name} {batch.shape} {batch.dtype}, not {known.shape} {known.dtype}"
        if known.dtype == "float32" and not np.isfinite(step.obs_N[step.valid_N]).all():
            yield "an observation is not finite"
        if (step.terminated_N & step.truncated_N).any():
            yield "terminated and truncated"
        limit = raw.max_steps
        for episode in step.episodes:
            if limit is not None and episode.length > limit:
                yield f"an episode of {episode.length} steps, limit {limit}"
            if episode.truncated and limit is not None and episode.length != limit:
                yield f"truncated after {episode.length} steps, limit {limit}"
    numbers = {key: value for key, value in raw.episode_info(0).items() if np.ndim(value) == 0}
    if "env_id" not in numbers:
        yield f"no info: {sorted(numbers)}"
    if obs.shape[0] != rows or rows != ENVS * max(1, len(env.info.agents)):
        yield "reset"


def main(suite: str, steps: int = 100) -> None:
    found = {}
    for name in names(suite):
        try:
            found[name] = stepped(name, steps)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"{name} {found[name]}\n")
    sys.stdout.write(f"\n{json.dumps(found)}\n")  # C++ libraries print warnings before and after this line


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
