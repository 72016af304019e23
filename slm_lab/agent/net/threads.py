"""In how many threads a net learns on the CPU: a choice by net and cores, the same whenever it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import nn

MOST_THREADS = 8
"""Of "auto". Minibatches of 256 images have no work for more."""


def resolve_threads(asked: int | Literal["auto"], nets: Iterable[nn.Module], cores: int, device: str = "cpu") -> int:
    """Return the number of threads of an update: on the CPU `asked`, or all `cores` for nets with convolutions and one for others.

    Fully connected layers of usual sizes take microseconds, as long as waking a thread. Results differ by rounding with the number.

    Args: asked: meta.threads. cores: those that the Session has for itself.
    """
    if device != "cpu":
        return 1
    if asked != "auto":
        return asked
    convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for net in nets for module in net.modules())
    return min(cores, MOST_THREADS) if convolutions else 1
