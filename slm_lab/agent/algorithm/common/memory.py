"""The memory of an algorithm: rollout storage or replay buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from slm_lab.agent.ops import device as devices
from slm_lab.agent.replay.replay import REPLAYS, Replay
from slm_lab.agent.replay.sequences import SEQUENCE_REPLAYS
from slm_lab.agent.rollout.storage import RolloutStorage, build_memory, slab_bytes
from slm_lab.lib.clock import Clock
from slm_lab.lib.limits import memory_bytes
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.spec.models.memory import OnPolicyBatchReplaySpec
from slm_lab.spec.models.net import RecurrentNetSpec
from slm_lab.spec.models.spec import AgentSpec
from slm_lab.spec.report import Problem, SpecError


def agent_memory(
    agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, state_size: int, device: str = "cpu"
) -> RolloutStorage | Replay | None:
    """Build the memory that the spec names. Raises SpecError if it does not fit this machine.

    Returns None for an algorithm that does not learn. Args: state_size: of the hidden state. device: where the net computes.
    """
    algorithm: Any = agent.algorithm
    memory: Any = agent.memory
    if not algorithm.learns:
        return None
    if algorithm.on_policy:
        if isinstance(memory, OnPolicyBatchReplaySpec):
            check_rollout_memory(agent, info, device)
        return build_memory(memory, info, agent.rollout_len, state_size)
    options: dict[str, Any] = {"device": device} if getattr(memory, "on_device", False) else {}
    if isinstance(agent.net, RecurrentNetSpec):
        options |= {"state_size": state_size, "seq_len": agent.net.seq_len}
        kind: Any = SEQUENCE_REPLAYS[type(memory)]
    else:
        kind = REPLAYS.get(type(memory)) or type(memory).implementation()
    rng = np.random.default_rng(seeds.update)
    replay: Replay = kind(memory, info, clock, rng, algorithm.training_frequency, agent.training_start, **options)
    return replay


def check_rollout_memory(agent: AgentSpec, info: EnvInfo, device: str) -> None:
    """Raise SpecError if a rollout and its shuffled copy do not fit this machine, or the CUDA device to which they are moved."""
    needed, available = 2 * slab_bytes(info, agent.rollout_len), memory_bytes()
    where = "machine"
    if device != "cpu" and (on_device := devices.memory_bytes(device)) < available:
        available, where = on_device, f"device ({device})"
    if needed > available:
        lengths = [key for key in ("time_horizon", "num_step_returns", "training_frequency") if getattr(agent.algorithm, key, None)]
        path = f"agent.algorithm.{lengths[0]}" if lengths else "env.num_envs"
        sizes = f"need {needed / 2**30:,.1f} GiB, this {where} has {available / 2**30:,.1f}"
        message = f"rollouts of {agent.rollout_len} steps of {info.num_envs} envs {sizes}; shorten them, or use fewer envs"
        raise SpecError("agent", [Problem(path, message)])
