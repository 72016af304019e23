"""Functions for CUDA devices, which run asynchronously: reading a result blocks until the device has computed the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ON_CPU = False
"""Whether tests run the code for CUDA devices on the CPU."""


def is_asynchronous(location: Tensor | torch.device) -> bool:
    """Return whether a device, or the device of a tensor, runs asynchronously, as CUDA devices do.

    On an asynchronous device, the results of an update stay on the device until the update ends.
    """
    return ON_CPU or (location.is_cuda if isinstance(location, Tensor) else location.type == "cuda")


def upload(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return the tensor on `device`. A copy from the CPU to a CUDA device uses pinned memory and does not block."""
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_floats(values: Sequence[Tensor | float]) -> list[float]:
    """Convert numbers and scalar tensors to floats. All tensors must be on the same device, for which the function waits only once."""
    scalars = [value.detach().reshape(()) for value in values if isinstance(value, Tensor)]
    numbers = iter(torch.stack(scalars).tolist() if scalars else [])
    return [next(numbers) if isinstance(value, Tensor) else value for value in values]


def set_tf32(device: str, on: bool) -> None:
    """Set whether this process computes matrix products and convolutions on CUDA devices in TensorFloat-32 instead of float32."""
    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def memory_bytes(device: str) -> int:
    """Return how many bytes of a CUDA device's memory this process can use: free memory plus memory that this process has reserved."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
