"""A module whose parameters and gradients are views into one contiguous vector each.

The optimizer then steps one tensor, the gradient norm is one reduction, and weights are published, copied or shared with one copy. Three
calls break the views and are not used in this package: deepcopy, `zero_grad()` (it drops the gradient views) and
`load_state_dict(assign=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.lib.store import Arrays, Named, SharedArray


class FlatParams:
    """Turn the parameters and float buffers of `module` into views of flat vectors, in place.

    Args:
        module: any module whose parameters are float32 and materialised.
        groups: parameters in their order in the vector, split into groups that are contiguous slices; a parameter that several groups
            name belongs to the first. Absent: one group of all.
        device: where the module computes.

    Attributes: `param` and `grad`, float32 [P], and `buffer`, float32 [Q], which the module uses; `slices`, the part of each group.
    Optimizers step `master` by `master_grad`: the same vectors for a lone Session, else the shared array on the CPU (`attach`), of which
    `param` is then a copy. `master_buffer` likewise. The module's own vectors never move, so views of them (numpy fast paths) stay valid.
    """

    def __init__(self, module: nn.Module, groups: Sequence[Sequence[nn.Parameter]] | None = None, device: str = "cpu") -> None:
        self.module = module
        where = torch.device(device)
        module.to(where)
        seen: set[int] = set()
        ordered: list[nn.Parameter] = []
        self.slices: list[slice] = []
        for group in groups or [list(module.parameters())]:
            begin = sum(p.numel() for p in ordered)
            for p in group:
                if id(p) not in seen:
                    seen.add(id(p))
                    ordered.append(p)
            self.slices.append(slice(begin, sum(p.numel() for p in ordered)))
        missing = [name for name, p in module.named_parameters() if id(p) not in seen]
        if missing:
            raise ValueError(f"parameters without an optimizer group: {', '.join(missing)}")
        self.params = ordered
        self.param = self.master = _flatten([p.data for p in ordered], where)
        self.grad = self.master_grad = torch.zeros_like(self.param)
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.buffer = self.master_buffer = _flatten(buffers, where)
        self.counters = [b for b in module.buffers() if not b.is_floating_point()]
        """Integer buffers, such as the batches that batch norm has seen."""
        for p, part in zip(ordered, _slices(ordered), strict=True):
            p.data, p.grad = self.param[part].view(p.shape), self.grad[part].view(p.shape)
        for b, part in zip(buffers, _slices(buffers), strict=True):
            b.data = self.buffer[part].view(b.shape)
        self._kept = self.buffer.clone()
        self._kept_counters = [c.clone() for c in self.counters]

    def shared_arrays(self) -> Named:
        named = {"params": SharedArray(_array(self.param), "step")}
        return named | ({"buffers": SharedArray(_array(self.buffer), "step")} if self.buffer.numel() else {})

    def use_master(self, arrays: Arrays) -> None:
        """Let optimizers step these shared arrays from now on; the module computes on a copy of them. To be called once."""
        self.master = torch.from_numpy(arrays["params"])
        if self.param.device != self.master.device:
            self.master_grad = torch.zeros_like(self.master)
        if self.buffer.numel():
            self.master_buffer = torch.from_numpy(arrays["buffers"])
        self.pull()

    def group(self, index: int) -> list[nn.Parameter]:
        """Return the parameters of a group in their shapes, as views of `master` with gradients in `master_grad`."""
        out, group = [], self.slices[index]
        for p, part in zip(self.params, _slices(self.params), strict=True):
            if group.start <= part.start < group.stop:
                shaped = nn.Parameter(self.master[part].view(p.shape))
                shaped.grad = self.master_grad[part].view(p.shape)
                shaped.is_output = getattr(p, "is_output", False)  # type: ignore[attr-defined]  # a mark, see init_output
                out.append(shaped)
        return out

    def pull(self) -> None:
        """Copy `master` to what the module uses."""
        if self.param is not self.master:
            self.param.copy_(self.master)
        if self.buffer is not self.master_buffer:
            self.buffer.copy_(self.master_buffer)

    def push(self) -> None:
        """Copy what the module uses to `master`."""
        if self.param is not self.master:
            self.master.copy_(self.param)
        if self.buffer is not self.master_buffer:
            self.master_buffer.copy_(self.buffer)

    def keep_buffers(self) -> None:
        """Remember the buffers, which a forward pass changes, for `restore_buffers`."""
        if len(self._kept):
            self._kept.copy_(self.buffer)
        for kept, counter in zip(self._kept_counters, self.counters, strict=True):
            kept.copy_(counter)

    def restore_buffers(self) -> None:
        """Bring back the buffers of the last `keep_buffers`."""
        self.buffer.copy_(self._kept)
        for kept, counter in zip(self._kept_counters, self.counters, strict=True):
            counter.copy_(kept)

    def clone(self) -> tuple[Tensor, Tensor]:
        """Return copies of the parameter and buffer vectors on the CPU."""
        return self.param.detach().to("cpu", copy=True), self.buffer.detach().to("cpu", copy=True)

    def load(self, param: Tensor, buffer: Tensor) -> None:
        """Copy vectors in. Raises ValueError if sizes differ (another net)."""
        if param.shape != self.param.shape or buffer.shape != self.buffer.shape:
            raise ValueError(
                f"incompatible weights: {len(param)} parameters, {len(buffer)} buffers; expected {len(self.param)}, {len(self.buffer)}"
            )
        self.master.copy_(param)
        self.master_buffer.copy_(buffer)
        self.pull()

    def state_dict(self) -> dict[str, Tensor | list[Tensor]]:
        param, buffer = self.clone()
        return {"param": param, "buffer": buffer, "counters": [counter.to("cpu", copy=True) for counter in self.counters]}

    def load_state_dict(self, state: dict[str, Tensor | list[Tensor]]) -> None:
        """Load what `state_dict` returned. Raises ValueError if it does not match the network."""
        param, buffer = state["param"], state["buffer"]
        assert isinstance(param, Tensor)
        assert isinstance(buffer, Tensor)
        self.load(param, buffer)
        for counter, saved in zip(self.counters, state["counters"], strict=True):
            counter.copy_(saved)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _slices(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield the part of the flat vector that each tensor occupies."""
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.numel()
        yield slice(begin, end)


def _flatten(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros(0, device=device)
    return torch.cat([t.detach().reshape(-1).to(device=device, dtype=torch.float32) for t in tensors])
