"""Replay buffer of recorded episodes, which is filled once and then only sampled from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slm_lab.agent.replay.frames import FrameStore
from slm_lab.agent.replay.replay import Replay
from slm_lab.lib.clock import Clock
from slm_lab.lib.demonstrations import Demonstrations
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.models.memory import ReplaySpec


def build_demonstration_replay(
    data: Demonstrations, info: EnvInfo, batch_size: int, clock: Clock, rng: np.random.Generator, device: str | None = None
) -> Replay:
    """Return a replay buffer that contains all transitions of `data`, and that samples batches of batch_size transitions uniformly.

    Args: rng, device: see Replay.

    Raises SpecError if the transitions do not fit into memory.
    """
    rows = len(data) + len(data.last_obs_E) * (info.observation.stack + 1)  # each episode of images begins with a stack of frames
    spec = ReplaySpec(name="Replay", batch_size=batch_size, max_size=rows)
    memory = Replay(spec, replace(info, num_envs=1, max_frame=rows, agents=()), clock, rng, device=device)
    stride = 1 if isinstance(memory.store, FrameStore) else len(data)
    for begin in range(0, len(data), stride):
        memory.add(*data.steps(begin, begin + stride))
    return memory
