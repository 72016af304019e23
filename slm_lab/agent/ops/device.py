"""Work on a CUDA device. It runs asynchronously: reading a result blocks until the device has finished."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ON_CPU = False
"""Whether the CPU takes the paths of a CUDA device, for tests."""


def is_asynchronous(place: Tensor | torch.device) -> bool:
    """Return whether a device, or that of a tensor, runs asynchronously: then results stay on it until the end of an update."""
    return ON_CPU or (place.is_cuda if isinstance(place, Tensor) else place.type == "cuda")


def upload(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return a tensor on `device`: from the CPU to a CUDA device through pinned memory, without waiting for the copy."""
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def read(values: Sequence[Tensor | float]) -> list[float]:
    """Return numbers and scalar tensors of one device as numbers, with one wait for all of them."""
    scalars = [value.detach().reshape(()) for value in values if isinstance(value, Tensor)]
    numbers = iter(torch.stack(scalars).tolist() if scalars else [])
    return [next(numbers) if isinstance(value, Tensor) else value for value in values]


def set_tf32(device: str, on: bool) -> None:
    """Let this process compute products and convolutions on a CUDA device in TensorFloat-32, or in full float32."""
    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def memory_bytes(device: str) -> int:
    """Return the bytes of a CUDA device that this process may use: those that are free, and those that it has taken."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
