"""Build an agent from a spec, and choose the agent's device and number of threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import nn

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import build_policy
from slm_lab.agent.torch_settings import has_bfloat16, resolve_matmul_library, set_matmul_library
from slm_lab.lib.clock import Clock
from slm_lab.lib.limits import processor_description
from slm_lab.lib.log import notice
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.lib.text import first_line
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError


def build_agent(spec: Spec, info: EnvInfo, seeds: Seeds, clock: Clock, device: str = "cpu", cores: int = 1) -> Agent:
    """Build the agent of a spec for an env, with initial weights that depend on the random seed `seeds.net`.

    Raises SpecError if algorithm, net and env do not fit each other, if this machine does not support the value of meta.matmul, or if the
    free memory is too small.

    Args: cores: number of cores that updates may use.
    """
    if device == "cpu" and spec.agent.net is not None and spec.agent.net.tf32:
        message = "invalid value true: the net computes on the CPU; set agent.net.gpu or remove it"
        raise SpecError("agent", [Problem("agent.net.tf32", message)])
    torch.manual_seed(seeds.net)
    try:
        return _build_agent(spec, info, seeds, clock, device, cores)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        where = "this machine" if device == "cpu" else f"the device {device}"
        reason = f": {text}" if (text := first_line(str(error))) else ""
        message = f"nets, optimizers and replay buffer do not fit into the free memory of {where}{reason}"
        raise SpecError("agent", [Problem("agent", message)]) from None


def _build_agent(spec: Spec, info: EnvInfo, seeds: Seeds, clock: Clock, device: str, cores: int) -> Agent:
    model = spec.agent.algorithm
    policy = build_policy(spec.agent, info, np.random.default_rng(seeds.act), device)
    algorithm: Algorithm = type(model).implementation()(spec.agent, info, clock, seeds, policy, device)
    nets: list[nn.Module] = []
    for part in algorithm.parts().values():
        if isinstance(part, Trainer | TargetNet):
            set_matmul_library(part.flat.module, spec.meta.matmul, device)
            nets.append(part.flat.module)
    random_frames = spec.agent.training_start if getattr(model, "random_start", False) else 0
    agent = Agent(policy, algorithm, clock, model.explore_var_spec if model.explores else None, seeds.eval_env, random_frames)
    agent.threads = resolve_threads(spec.meta.threads, nets, cores, device)
    return agent


def resolve_device(spec: Spec, session: int = 0) -> str:
    """Return the device that agent.net.gpu and agent.net.cuda_id select: "cpu" or "cuda:i".

    Raises SpecError if this machine has CUDA devices, but none with the number cuda_id.

    Args: session: index of the Session. Without cuda_id, successive Sessions use the CUDA devices in turn.
    """
    net = spec.agent.net
    if net is None or net.gpu is False:
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if net.gpu is True and session == 0:  # print this notice only once
            notice("agent.net.gpu is true, and this machine has no CUDA device: the net computes on the CPU")
        return "cpu"
    if net.cuda_id is not None and net.cuda_id >= count:
        raise SpecError("agent", [Problem("agent.net.cuda_id", f"invalid device {net.cuda_id}; this machine has devices 0 to {count - 1}")])
    return f"cuda:{session % count if net.cuda_id is None else net.cuda_id}"


def check_matmul_settings(spec: Spec, device: str) -> None:
    """Raise SpecError if the value of the spec key meta.matmul cannot be used on a device.

    Print a notice if the spec uses bfloat16 on a CPU without instructions for bfloat16.
    """
    resolve_matmul_library(spec.meta.matmul, device)
    keys = [key for key in ("net", "critic_net") if getattr(getattr(spec.agent, key), "dtype", "float32") == "bfloat16"]
    if keys and device == "cpu" and not has_bfloat16(processor_description()):
        notice(f"agent.{keys[0]}.dtype bfloat16: about ten times slower than float32 on this processor, which has no instructions for it")


MAX_THREADS = 8
"""Maximum number of threads that meta.threads "auto" selects. Minibatches of 256 images are too small for more threads."""


def resolve_threads(requested: int | Literal["auto"], nets: Iterable[nn.Module], cores: int, device: str = "cpu") -> int:
    """Return the number of torch threads of an update, which is 1 if the nets are on a CUDA device.

    On the CPU, the number of threads is `requested`. If `requested` is "auto", the number of threads is `cores` (at most 8) for nets with
    convolutions, and 1 for other nets. Fully connected layers of usual sizes take microseconds, which is as long as waking a thread.
    Results with different numbers of threads differ by rounding.

    Args: requested: value of meta.threads. cores: number of cores reserved for the Session.
    """
    if device != "cpu":
        return 1
    if requested != "auto":
        return requested
    convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for net in nets for module in net.modules())
    return min(cores, MAX_THREADS) if convolutions else 1
