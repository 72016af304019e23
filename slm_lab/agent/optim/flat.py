"""A module whose parameters and gradients are views into one contiguous vector each.

The optimizer then steps one tensor, the gradient norm is one reduction, and weights are published, copied or shared
with one copy. What breaks the views is kept out of the project: deepcopy, `.to`, `zero_grad()` (it drops the gradient
views) and `load_state_dict(assign=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slm_lab.lib.heap import HERE, Heap, Place


class FlatParams:
    """Makes the parameters (and float buffers) of `module` views into flat vectors, in place.

    Args:
        module: any module whose parameters are float32 and materialised.
        groups: parameters in the order they shall lie, split into groups that are contiguous slices; parameters that
            several groups name belong to the first. Absent: one group of all.
        place: where the vectors lie.
        copy: where Sessions have the net in common the module computes on a copy of the parameters; False: on those in common themselves.

    Attributes: `param` and `grad`, float32 [P], and `buffer`, float32 [Q], which the module uses; `slices`, each group's part of the
    vectors. `master` and `master_grad`, what optimizers step, and `master_buffer`: where Sessions have the net in common, what they have
    in common, on the CPU; else the same vectors. A buffer is always a copy, for a forward pass writes to it whatever comes.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Sequence[nn.Parameter]] | None = None,
        place: Place = HERE,
        *,
        copy: bool = True,
    ) -> None:
        self.module = module
        device, heap = torch.device(place.device), place.heap
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
        self.master = placed(heap, _flatten([p.data for p in ordered], device))
        self.param = self.master.to(device, copy=heap.common and copy)
        self.grad = self.master_grad = torch.zeros_like(self.param)
        if self.master.device != self.param.device:
            self.master_grad = torch.zeros_like(self.master)
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.master_buffer = placed(heap, _flatten(buffers, device))
        self.buffer = self.master_buffer.to(device, copy=heap.common)
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
        """The parameters of a group in their shapes, as views of `master` with gradients in `master_grad`."""
        begin, end = self.slices[index].start, self.slices[index].stop
        out, offset = [], 0
        for p in self.params:
            if begin <= offset < end:
                part = slice(offset, offset + p.numel())
                shaped = nn.Parameter(self.master[part].view(p.shape))
                shaped.grad = self.master_grad[part].view(p.shape)
                out.append(shaped)
            offset += p.numel()
        return out

    def pull(self) -> None:
        """Bring what the module uses up to date with what Sessions have in common."""
        if self.param is not self.master:
            self.param.copy_(self.master)
        if self.buffer is not self.master_buffer:
            self.buffer.copy_(self.master_buffer)

    def clone(self) -> tuple[Tensor, Tensor]:
        """Copies of the parameter and buffer vectors on the CPU."""
        return self.param.detach().to("cpu", copy=True), self.buffer.detach().to("cpu", copy=True)

    def load(self, param: Tensor, buffer: Tensor) -> None:
        """Copy vectors in. Raises ValueError where sizes differ (another net)."""
        if param.shape != self.param.shape or buffer.shape != self.buffer.shape:
            raise ValueError(
                f"weights of another net: {len(param)} parameters, {len(buffer)} buffers; here {len(self.param)}, {len(self.buffer)}"
            )
        self.master.copy_(param)
        self.master_buffer.copy_(buffer)
        self.pull()


def placed(heap: Heap, values: Tensor) -> Tensor:
    """What takes the place of `values`: on the CPU where Sessions have it in common."""
    return torch.from_numpy(heap.array(values.cpu().numpy())) if heap.common else values


def _flatten(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros(0, device=device)
    return torch.cat([t.detach().reshape(-1).to(device=device, dtype=torch.float32) for t in tensors])
