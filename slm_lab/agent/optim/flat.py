"""Flat parameters: all parameters of a module are views of one contiguous vector, and all gradients are views of another vector.

With flat vectors, the optimizer steps a single tensor, a gradient norm is a single reduction, and weights are published by a single copy.
Calling deepcopy or `load_state_dict(assign=True)` on the module breaks the views, so this package calls neither function. Assigning
`parameter.data = …` and calling `zero_grad()` of the net also break the views, but the beginning of the next update restores the views with
the current values of the parameters.

On a CUDA device, every parameter begins at a multiple of 16 bytes, as required by the vectorised loads of matrix products. The zeros
between parameters, called padding, exist only in the vectors that the module uses. Vectors that are saved, shared or published have no
padding (see `FlatParams.without_padding`), and have the same layout for every device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.ops.linear import normalize_rows
from slm_lab.lib.store import Arrays, Division, Named, SharedArray

UPDATES_BETWEEN_CHECKS = 32
"""Number of updates between two checks for parameters that a user has changed, if `FlatParams.check_rarely` is true. A check takes 10 to 20
µs. Refilling the processor's caches after a check takes about as long."""
_ALIGNMENT = 4
"""Number of float32 values in 16 bytes."""
_requires_grad = attrgetter("requires_grad")


class FlatParams:
    """Flat vectors of the parameters and float buffers of a module. The module's tensors become views of the flat vectors.

    Args:
        module: any module whose parameters are float32 and initialised (not lazy).
        groups: parameters of each optimizer group. The flat vector contains the groups in the order of `groups`, each group as a contiguous
            slice. A parameter that several groups list belongs to the first group that lists the parameter. By default, all parameters form
            a single group.
        device: device to which the module is moved.

    Attributes: `param` and `grad`, float32 [P], and `buffer`, float32 [Q], are the vectors of the module, which are never reallocated, so
    that numpy views of the vectors stay valid. `slices` contains the slice of each optimizer group in `param`. Optimizers step the vector
    `master` with the gradient `master_grad`. If a single Session trains the net, `master` is `param` and `master_grad` is `grad`. If
    several Sessions train the net, `master` is the shared array on the CPU (see `use_shared_arrays`), `param` is a copy of `master`, and
    `buffer` is a copy of `master_buffer`. `size` is the number of parameters without padding. `param_indices` [size] contains the indices
    of the parameters in `param`, or is None if `param` has no padding. `division` describes how the processes of a parameter server divide
    the vector, or is None if each process has the full vector. `update` is 0 between updates. During an update, `update` is the number of
    the most recent update that began with a check for changed parameters, which is the current update if `check_rarely` is false. For the
    attribute `check_rarely`, see `Agent.set_rare_checks`. `frozen` contains the indices (in `params`) of the parameters that did not
    require a gradient at the last call of `sync_parameters`.
    """

    def __init__(self, module: nn.Module, groups: Sequence[Sequence[nn.Parameter]] | None = None, device: str = "cpu") -> None:
        self.module = module
        where = torch.device(device)
        module.to(where)
        ordered, bounds = _order_params(module, groups or [list(module.parameters())])
        self.params, self.size = ordered, sum(p.numel() for p in ordered)
        self.division: Division | None = None
        self._packed_parts = list(_flat_slices(ordered))
        self._parts = list(_flat_slices(ordered, _ALIGNMENT)) if is_asynchronous(where) else self._packed_parts
        self.slices, self._packed_slices = (
            [_spanning_slice(parts[part]) for part in bounds] for parts in (self._parts, self._packed_parts)
        )
        self.param = self.master = _flatten([p.data for p in ordered], self._parts, where)
        padded = len(self.param) > self.size
        self.param_indices = torch.cat([torch.arange(part.start, part.stop) for part in self._parts]).to(where) if padded else None
        self.grad = self.master_grad = torch.zeros_like(self.param)
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.buffer = self.master_buffer = _flatten(buffers, list(_flat_slices(buffers)), where)
        self.counters = [b for b in module.buffers() if not b.is_floating_point()]
        """Integer buffers of the module, such as `num_batches_tracked` of batch norm."""
        for p, part in zip(ordered, self._parts, strict=True):
            p.data, p.grad = self.param[part].view(p.shape), self.grad[part].view(p.shape)
        for b, part in zip(buffers, _flat_slices(buffers), strict=True):
            b.data = self.buffer[part].view(b.shape)
        self.unit_rows = [index for index, p in enumerate(ordered) if getattr(p, "unit_rows", False)]
        """Indices of the weights whose rows `normalize_unit_rows` scales to norm 1."""
        self._views = [*zip(ordered, self._parts, strict=True), *zip(buffers, _flat_slices(buffers), strict=True)]
        self._tensors: list[Tensor] = [*ordered, *buffers]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.update, self._updates, self._checked = 0, 0, 0
        self.check_rarely, self._next_hook = False, -1
        """`_next_hook` is the id that torch would have given to a new hook at the last check for changes."""
        self.frozen: tuple[int, ...] = ()
        self._saved_buffer = self.buffer.clone()
        self._saved_counters = [c.clone() for c in self.counters]
        if is_asynchronous(where):
            _disable_flatten_parameters(module)

    def begin_update(self) -> None:
        """Begin an update, and check whether a user changed parameters since the last check.

        If `check_rarely` is true, this check takes place only every UPDATES_BETWEEN_CHECKS updates, or if hooks were added.
        """
        self._updates += 1
        if not self.check_rarely or self._updates >= self._checked + UPDATES_BETWEEN_CHECKS or RemovableHandle.next_id != self._next_hook:
            self._checked, self._next_hook = self._updates, RemovableHandle.next_id
            self.sync_parameters()
        self.update = self._checked

    def sync_parameters(self) -> None:
        """Set `frozen`, and restore the view of each tensor whose `data` attribute was replaced.

        The new data of such a tensor are copied to its flat vector, and the tensor becomes a view of this vector again. Raises ValueError
        if the new data have another size, type or device.
        """
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses or (self._views and self.params and self.params[-1].grad is None):
            self._restore_views()
        all_trained = all(map(_requires_grad, self.params))
        self.frozen = () if all_trained else tuple(index for index, p in enumerate(self.params) if not p.requires_grad)

    def _restore_views(self) -> None:
        for index, ((tensor, part), address) in enumerate(zip(self._views, self._addresses, strict=True)):
            is_param = index < len(self.params)
            if tensor.data_ptr() != address:
                vector = self.param if is_param else self.buffer
                stored, new = vector[part], tensor.data
                if new.numel() != len(stored) or new.dtype != stored.dtype or new.device != stored.device:
                    raise ValueError(self._replaced_data_message(tensor, new, stored))
                stored.copy_(new.reshape(-1))
                tensor.data = stored.view(new.shape)
            if is_param and (tensor.grad is None or tensor.grad.data_ptr() != self.grad[part].data_ptr()):
                tensor.grad = self.grad[part].view(tensor.shape)

    def _replaced_data_message(self, tensor: Tensor, new: Tensor, stored: Tensor) -> str:
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        name = next((name for name, candidate in named if candidate is tensor), "a parameter")
        given = f"{new.numel()} numbers of type {new.dtype} on {new.device}"
        return (
            f"{name}: its data were replaced by {given}; expected {len(stored)} numbers of type {stored.dtype} on {stored.device}, for "
            "which the optimizer was built; assign data of the same size, type and device, or build another agent"
        )

    def without_padding(self, vector: Tensor) -> Tensor:
        """Return `vector`, which has the layout of `param`, without padding. If `param` has no padding, return `vector` itself."""
        return vector if self.param_indices is None else vector[self.param_indices]

    def copy_to_param(self, packed: Tensor) -> None:
        """Copy a parameter vector without padding into `param`."""
        if self.param_indices is None:
            self.param.copy_(packed)
        else:
            self.param[self.param_indices] = packed.to(self.param.device)

    @property
    def group_starts(self) -> list[int]:
        """Start index of each optimizer group in a vector without padding."""
        return [part.start for part in self._packed_slices]

    @property
    def _master_parts(self) -> list[slice]:
        """Slice of each parameter in `master`."""
        return self._parts if self.master is self.param else self._packed_parts

    def master_slice(self, index: int) -> slice:
        """Return the slice of `master` that contains the parameters of an optimizer group."""
        return (self.slices if self.master is self.param else self._packed_slices)[index]

    def indices_in_group(self, index: int) -> Tensor | None:
        """Return the positions of a group's parameters in the group's slice of `master`, or None if this slice has no padding."""
        part = self.slices[index]
        if self.param_indices is None or self.master is not self.param:
            return None
        inside = self.param_indices[self._packed_slices[index]] - part.start
        return inside if len(inside) < part.stop - part.start else None

    def param_slice(self, params: Sequence[nn.Parameter]) -> slice:
        """Return the slice of `param` that the consecutive parameters `params` occupy."""
        indices = [index for index, parameter in enumerate(self.params) if any(parameter is p for p in params)]
        return _spanning_slice(self._parts[indices[0] : indices[-1] + 1])

    def normalize_unit_rows(self, frozen: Sequence[int]) -> None:
        """Scale each row of the weights with the attribute `unit_rows` to norm 1, in `master`.

        Args: frozen: indices of the parameters to leave unchanged.
        """
        for index in self.unit_rows:
            if index not in frozen:
                normalize_rows(self.master[self._master_parts[index]].view(self.params[index].shape))

    def shared_arrays(self) -> Named:
        named = {"params": SharedArray(_to_numpy(self.without_padding(self.param)), "step", self.division)}
        return named | ({"buffers": SharedArray(_to_numpy(self.buffer), "step")} if self.buffer.numel() else {})

    def use_shared_arrays(self, arrays: Arrays, serves: int | None = None) -> None:
        """From now on, let optimizers step the shared arrays `arrays`. The module computes on a copy of the shared arrays.

        Call this method only once.

        Args: serves: index of this process among the processes of a parameter server, or None for all other processes. A process of a
        parameter server stores only its range of the parameter vector, and does not run the module.
        """
        master = torch.from_numpy(arrays["params"])
        if serves is not None:
            self._keep_served_range(master, slice(0, self.size) if self.division is None else self.division.process_range(serves))
        elif master.data_ptr() != self.param.data_ptr():  # else the store uses `param` itself as the copy of this process
            self.master = master
            if self.param.device != self.master.device or self.param_indices is not None:
                self.master_grad = torch.zeros_like(self.master)
        if self.buffer.numel():
            self.master_buffer = torch.from_numpy(arrays["buffers"])
        self.pull()

    def _keep_served_range(self, master: Tensor, part: slice) -> None:
        """Store only the elements `part` of the parameter vector, in `master`, and free the memory of the module's parameters."""
        assert self.param_indices is None
        self.param = self.master = master
        self.grad = self.master_grad = torch.zeros_like(master)  # takes memory only when it is written
        self.size = len(master)
        for p, where in zip(self.params, self._parts, strict=True):
            inside = part.start <= where.start and where.stop <= part.stop
            p.grad, p.data = None, master[_intersection(where, part)].view(p.shape) if inside else p.data.new_empty(0)
        self._packed_slices = self.slices = [_intersection(where, part) for where in self._packed_slices]
        self._packed_parts = self._parts = [_intersection(where, part) for where in self._parts]
        self._views, self._tensors, self._addresses = [], [], []  # the module is not used in this process

    def param_slices_in_group(self, index: int, params: Sequence[int]) -> list[slice]:
        """Return the slices of parameters in an optimizer group, relative to the start of the group in `master`, without empty slices.

        Args: index: index of the optimizer group. params: indices of the parameters in `self.params`.
        """
        group = self.master_slice(index)
        inside = [_intersection(self._master_parts[param], group) for param in params]
        return [part for part in inside if part.start < part.stop]

    def group_param_indices(self, index: int) -> list[int]:
        """Return the indices (in `self.params`) of the parameters in optimizer group `index`."""
        group = self.master_slice(index)
        return [number for number, part in enumerate(self._master_parts) if group.start <= part.start < group.stop]

    def group_params(self, index: int) -> list[nn.Parameter]:
        """Return the parameters of an optimizer group in their original shapes.

        The returned parameters are views of `master`, and their gradients are views of `master_grad`.
        """
        out = []
        for number in self.group_param_indices(index):
            p, part = self.params[number], self._master_parts[number]
            shaped = nn.Parameter(self.master[part].view(p.shape))
            shaped.grad = self.master_grad[part].view(p.shape)
            shaped.is_output = getattr(p, "is_output", False)  # type: ignore[attr-defined]  # see init_output
            out.append(shaped)
        return out

    def pull(self) -> None:
        """Copy `master` and `master_buffer` to the vectors that the module uses, `param` and `buffer`."""
        if self.param is not self.master:
            self.copy_to_param(self.master)
        if self.buffer is not self.master_buffer:
            self.buffer.copy_(self.master_buffer)

    def push(self) -> None:
        """Copy the vectors that the module uses, `param` and `buffer`, to `master` and `master_buffer`."""
        if self.param is not self.master:
            self.master.copy_(self.without_padding(self.param))
        if self.buffer is not self.master_buffer:
            self.master_buffer.copy_(self.buffer)

    def save_buffers(self) -> None:
        """Save copies of the buffers, which a forward pass may change, for `restore_buffers`."""
        if len(self._saved_buffer):
            self._saved_buffer.copy_(self.buffer)
        for saved, counter in zip(self._saved_counters, self.counters, strict=True):
            saved.copy_(counter)

    def restore_buffers(self) -> None:
        """Restore the buffers that the last call of `save_buffers` saved."""
        self.buffer.copy_(self._saved_buffer)
        for saved, counter in zip(self._saved_counters, self.counters, strict=True):
            counter.copy_(saved)

    def restore_buffers_where(self, bad: Tensor) -> None:
        """If `bad` is true, restore the buffers that `save_buffers` saved, otherwise save the current buffers.

        This method does not wait for the device.

        Args: bad: bool tensor of shape [], on the device of the buffers.
        """
        for saved, present in zip((self._saved_buffer, *self._saved_counters), (self.buffer, *self.counters), strict=True):
            present.copy_(torch.where(bad, saved, present))
        self.save_buffers()

    def copy_vectors(self) -> tuple[Tensor, Tensor]:
        """Return copies on the CPU of the parameter vector (without padding) and of the buffer vector."""
        self.sync_parameters()
        return self.without_padding(self.param).detach().to("cpu", copy=True), self.buffer.detach().to("cpu", copy=True)

    def load(self, param: Tensor, buffer: Tensor) -> None:
        """Load a parameter vector and a buffer vector that `copy_vectors` returned.

        Raises ValueError if the sizes of the vectors do not match this net.
        """
        if param.shape != (self.size,) or buffer.shape != self.buffer.shape:
            raise ValueError(
                f"incompatible weights: {len(param)} parameters, {len(buffer)} buffers; expected {self.size}, {len(self.buffer)}"
            )
        if self.master is self.param:
            self.copy_to_param(param)
        else:
            self.master.copy_(param)
        self.master_buffer.copy_(buffer)
        self.pull()

    def state_dict(self) -> dict[str, Tensor | list[Tensor]]:
        param, buffer = self.copy_vectors()
        return {"param": param, "buffer": buffer, "counters": [counter.to("cpu", copy=True) for counter in self.counters]}

    def load_state_dict(self, state: dict[str, Tensor | list[Tensor]]) -> None:
        """Load a result of `state_dict`. Raises ValueError if the sizes of the vectors in `state` do not match this net."""
        param, buffer = state["param"], state["buffer"]
        assert isinstance(param, Tensor)
        assert isinstance(buffer, Tensor)
        self.load(param, buffer)
        for counter, saved in zip(self.counters, state["counters"], strict=True):
            counter.copy_(saved)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _intersection(where: slice, part: slice) -> slice:
    """Return the intersection of two slices, `where` and `part`, relative to the start of `part`."""
    return slice(*(min(max(end, part.start), part.stop) - part.start for end in (where.start, where.stop)))


def _order_params(module: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> tuple[list[nn.Parameter], list[slice]]:
    """Return a list of the parameters of all groups without duplicates, and the slice of each group in this list.

    Raises ValueError if a parameter of the module is in no group.
    """
    seen: set[int] = set()
    ordered: list[nn.Parameter] = []
    bounds: list[slice] = []
    for group in groups:
        begin = len(ordered)
        for p in group:
            if id(p) not in seen:
                seen.add(id(p))
                ordered.append(p)
        bounds.append(slice(begin, len(ordered)))
    if missing := [name for name, p in module.named_parameters() if id(p) not in seen]:
        raise ValueError(f"parameters without an optimizer group: {', '.join(missing)}")
    return ordered, bounds


def _flat_slices(tensors: Sequence[Tensor], alignment: int = 1) -> Iterator[slice]:
    """Yield the slice of a flat vector that each tensor occupies. Each slice begins at a multiple of `alignment`."""
    end = 0
    for tensor in tensors:
        begin = -(-end // alignment) * alignment
        end = begin + tensor.numel()
        yield slice(begin, end)


def _spanning_slice(parts: Sequence[slice]) -> slice:
    """Return the slice from the start of the first slice to the stop of the last slice."""
    return slice(parts[0].start, parts[-1].stop) if parts else slice(0, 0)


def _flatten(tensors: list[Tensor], parts: list[slice], device: torch.device) -> Tensor:
    vector = torch.zeros(parts[-1].stop if parts else 0, device=device)
    for tensor, part in zip(tensors, parts, strict=True):
        vector[part] = tensor.detach().reshape(-1)
    return vector


def map_vectors(state: Any, length: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of the nested dict or list `state`, with `change` applied to every tensor of shape [length]."""
    if isinstance(state, dict):
        return {key: map_vectors(value, length, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map_vectors(value, length, change) for value in state)
    return change(state) if isinstance(state, Tensor) and state.shape == (length,) else state


def _disable_flatten_parameters(module: nn.Module) -> None:
    """Make recurrent layers keep their weights in the flat vector, by disabling `flatten_parameters`.

    cuDNN requires the weights of a recurrent layer in a separate vector, and `flatten_parameters` would move the weights to such a vector.
    Without `flatten_parameters`, cuDNN copies the weights at each call. The warning that torch would print at each call is suppressed.
    """
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters = _do_nothing  # type: ignore[method-assign]
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk of memory")


def _do_nothing() -> None:
    """Do nothing. This function replaces `flatten_parameters` in recurrent layers."""
