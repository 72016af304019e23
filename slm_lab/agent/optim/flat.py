"""A module whose parameters and gradients are views into one contiguous vector each.

The optimizer then steps one tensor, the gradient norm is one reduction, and weights are published, copied or shared
with one copy. What breaks the views is kept out of the project: deepcopy, `.to`, `zero_grad()` (it drops the gradient
views) and `load_state_dict(assign=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlatParams:
    """Makes the parameters (and float buffers) of `module` views into flat vectors, in place.

    Args:
        module: any module whose parameters are float32 and materialised.
        groups: parameters in the order they shall lie, split into groups that are contiguous slices; parameters that
            several groups name belong to the first. Absent: one group of all.
        device: where the vectors lie.

    Attributes: `param` and `grad`, float32 [P]; `buffer`, float32 [Q]; `slices`, each group's part of the vectors.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[Sequence[nn.Parameter]] | None = None, device: str | torch.device = "cpu"
    ) -> None:
        self.module = module
        module.to(device)
        taken: set[int] = set()
        ordered: list[nn.Parameter] = []
        self.slices: list[slice] = []
        for group in groups or [list(module.parameters())]:
            begin = sum(p.numel() for p in ordered)
            for p in group:
                if id(p) not in taken:
                    taken.add(id(p))
                    ordered.append(p)
            self.slices.append(slice(begin, sum(p.numel() for p in ordered)))
        missing = [name for name, p in module.named_parameters() if id(p) not in taken]
        if missing:
            raise ValueError(f"parameters in no group: {', '.join(missing)}")
        self.params = ordered
        self.param = _flatten([p.data for p in ordered], device)
        self.grad = torch.zeros_like(self.param)
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.buffer = _flatten(buffers, device)
        offset = 0
        for p in ordered:
            end = offset + p.numel()
            p.data = self.param[offset:end].view(p.shape)
            p.grad = self.grad[offset:end].view(p.shape)
            offset = end
        offset = 0
        for b in buffers:
            b.data = self.buffer[offset : offset + b.numel()].view(b.shape)
            offset += b.numel()

    def group(self, index: int) -> list[nn.Parameter]:
        """The original parameters of a group, for optimizers that need their shapes."""
        begin, end = self.slices[index].start, self.slices[index].stop
        out, offset = [], 0
        for p in self.params:
            if begin <= offset < end:
                out.append(p)
            offset += p.numel()
        return out

    def clone(self) -> tuple[Tensor, Tensor]:
        """Copies of the parameter and buffer vectors on the CPU."""
        return self.param.detach().to("cpu", copy=True), self.buffer.detach().to("cpu", copy=True)

    def load(self, param: Tensor, buffer: Tensor) -> None:
        """Copy vectors in. Raises ValueError where sizes differ (another net)."""
        if param.shape != self.param.shape or buffer.shape != self.buffer.shape:
            raise ValueError(
                f"weights of another net: {len(param)} parameters, {len(buffer)} buffers; here {len(self.param)}, {len(self.buffer)}"
            )
        self.param.copy_(param)
        self.buffer.copy_(buffer)

    def share_memory(self) -> None:
        """Move the vectors to shared memory, in place: the views follow."""
        self.param.share_memory_()
        self.buffer.share_memory_()


def _flatten(tensors: list[Tensor], device: str | torch.device) -> Tensor:
    if not tensors:
        return torch.zeros(0, device=device)
    return torch.cat([t.detach().reshape(-1).to(device=device, dtype=torch.float32) for t in tensors])
