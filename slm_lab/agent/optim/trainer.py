"""Trainer of a net, which takes gradient steps on the net's flat parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.optim.flat import FlatParams, map_vectors
from slm_lab.agent.optim.optimizers import PartitionedOptimizer, ShapedOptimizer, build_optimizer, shared_statistics
from slm_lab.agent.optim.schedule import LRSchedule, build_lr_schedule
from slm_lab.agent.optim.shared import SharedParams
from slm_lab.lib.log import notice
from slm_lab.lib.store import Arrays, Named, SharedArray, Store, attach_parts, divide_vector, is_shared, prefixed_arrays
from slm_lab.spec.models.net import SHAPED, NetSpec


def has_training_mode(module: nn.Module) -> bool:
    """Return whether a module may behave differently in training mode, because of running statistics (batch norm) or randomness (dropout).

    The result is True for all modules of user-defined classes, because their behaviour is unknown.
    """
    if type(module).__module__.partition(".")[0] not in ("torch", "slm_lab"):
        return True
    return bool(module._buffers) or isinstance(module, nn.RReLU) or hasattr(module, "p") or hasattr(module, "dropout")


class OptimizerGroup:
    """Optimizer group: a slice of the flat parameters with its own optimizer and learning rate schedule."""

    def __init__(self, flat: FlatParams, index: int, spec: NetSpec, part: str) -> None:
        self.flat, self.index = flat, index
        self.grad = flat.grad[flat.slices[index]]
        part_optim, part_scheduler = f"{part}_optim_spec", f"{part}_lr_scheduler_spec"
        key = part_optim if getattr(spec, part_optim, None) else "optim_spec"
        self.path, self.optim = f"agent.net.{key}", getattr(spec, key)
        self._shares = False
        """Whether processes share the statistics of the optimizer."""
        self.build_optimizer()
        key = part_scheduler if getattr(spec, part_scheduler, None) else "lr_scheduler_spec"
        self._scheduler, self._scheduler_path = getattr(spec, key), f"agent.net.{key}"
        self.counts_calls = self._scheduler is not None and self._scheduler.counts_training_calls
        """Whether the learning rate depends on the number of training calls instead of the frame."""
        self.lr_at = self.schedule(self.optim.learning_rate)
        self._now, self._factor = 0, 1.0
        self._store: Store | None = None

    def schedule(self, lr: float) -> LRSchedule:
        """Return the learning rate schedule of this optimizer group, with the initial learning rate `lr`."""
        return (lambda now: lr) if self._scheduler is None else build_lr_schedule(self._scheduler, lr, self._scheduler_path)

    def build_optimizer(self) -> None:
        """Build a new optimizer with initial statistics, which steps the current `flat.master`."""
        flat, part = self.flat, self.flat.master_slice(self.index)
        self._param_indices = flat.indices_in_group(self.index)
        params = flat.group_params(self.index) if self.optim.name in SHAPED else [flat.master[part]]
        self.frozen: Sequence[int] | None = ()
        """Indices of the frozen parameters, which are not stepped, or None if `set_frozen` must be called before the next step."""
        self.optimizer = build_optimizer(self.optim, params, flat.master_grad[part], self.path)

    def set_frozen(self, frozen: Sequence[int]) -> None:
        """From now on, exclude the parameters with the indices `frozen` from optimizer steps, and include all other parameters."""
        if frozen == self.frozen:
            return
        self.frozen, optimizer = frozen, self.optimizer
        if isinstance(optimizer, ShapedOptimizer) and optimizer.shaped:
            optimizer.freeze([position for position, param in enumerate(self.flat.group_param_indices(self.index)) if param in frozen])
            return
        parts = self.flat.param_slices_in_group(self.index, frozen)
        if parts or isinstance(optimizer, PartitionedOptimizer):
            self._ensure_partitioned().freeze(parts)

    def _ensure_partitioned(self) -> PartitionedOptimizer:
        """Replace the optimizer by a PartitionedOptimizer, unless the optimizer is one already, and return the PartitionedOptimizer."""
        if not isinstance(self.optimizer, PartitionedOptimizer):
            self.optimizer = PartitionedOptimizer(self.optimizer, self._shares)
        return self.optimizer

    def set_lr(self, frame: int, calls: int, factor: float) -> None:
        """Set the learning rate to `factor` times the value of the schedule.

        Args:
            frame: number of frames, at which a schedule over frames is evaluated.
            calls: number of training calls, at which a schedule over training calls is evaluated.
        """
        self._now, self._factor = calls if self.counts_calls else frame, factor
        self.optimizer.lr = self.current_lr(self.lr_at)

    def current_lr(self, schedule: LRSchedule) -> float:
        """Return the current learning rate for a schedule that the method `schedule` returned."""
        return self._factor * schedule(self._now)

    @property
    def shares_full_state(self) -> bool:
        """Whether all processes that train the net share the complete state of the optimizer."""
        return self.optim.name.startswith("Global") and bool(self.optimizer.statistics)

    def shared_arrays(self) -> Named:
        if not self.shares_full_state:
            return {}
        named, begin = shared_statistics(self._remove_padding(self.optimizer.statistics)), self.flat.group_starts[self.index]
        return {
            name: array._replace(division=self.flat.division, begin=begin) if array.values.ndim else array for name, array in named.items()
        }

    def _remove_padding(self, state: Any, part: slice | None = None) -> Any:
        """Return optimizer statistics without the padding between parameters.

        Args: part: slice of the group's vector to which the statistics belong. By default, the statistics belong to the full vector.
        """
        part = part or slice(0, len(self.grad))
        if (indices := self._unpadded_indices_in(part)) is None:
            return state
        return map_vectors(state, part.stop - part.start, lambda vector: vector[indices.to(vector.device)])

    def _add_padding(self, state: Any, part: slice) -> Any:
        """Return optimizer statistics with padding between parameters (the inverse of `_remove_padding`)."""
        if (indices := self._unpadded_indices_in(part)) is None:
            return state
        zeros = torch.zeros(part.stop - part.start)
        return map_vectors(state, len(indices), lambda vector: zeros.index_copy(0, indices.cpu(), vector.cpu()))

    def _unpadded_indices_in(self, part: slice) -> Tensor | None:
        if self._param_indices is None or part == slice(0, len(self.grad)):
            return self._param_indices
        return self._param_indices[(self._param_indices >= part.start) & (self._param_indices < part.stop)] - part.start

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of the optimizer.

        If parameters were ever frozen, the result is {"parts": [{"begin": first index, "state": statistics}, …]}, with one entry for each
        part of the vector.
        """
        if self._store is not None and self._store.remote:
            self._store.pull()
        optimizer = self.optimizer
        if isinstance(optimizer, PartitionedOptimizer):
            indices = self._param_indices
            begins = [part.start if indices is None else int((indices < part.start).sum()) for part, _ in optimizer.parts]
            states = [self._remove_padding(part_optimizer.state_dict(), part) for part, part_optimizer in optimizer.parts]
            return {"parts": [{"begin": begin, "state": state} for begin, state in zip(begins, states, strict=True)]}
        state: dict[str, Any] = self._remove_padding(optimizer.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state.get("parts", [{"begin": 0, "state": state}])
        if len(saved) == 1 and not isinstance(self.optimizer, PartitionedOptimizer):
            self.optimizer.load_state_dict(self._add_padding(saved[0]["state"], slice(0, len(self.grad))))
            return
        optimizer, indices = self._ensure_partitioned(), self._param_indices
        size = len(optimizer.param)
        begins = [entry["begin"] if indices is None else int(indices[entry["begin"]]) for entry in saved]
        for begin in begins[1:]:
            optimizer.split_part_at(begin)
        for begin, end, entry in zip([0, *begins[1:]], [*begins[1:], size], saved, strict=True):
            padded = self._add_padding(entry["state"], slice(begin, end))
            for part, part_optimizer in optimizer.parts:
                if begin <= part.start < end:
                    inside = slice(part.start - begin, part.stop - begin)
                    part_optimizer.load_state_dict(map_vectors(padded, end - begin, itemgetter(inside)))
        self.frozen = None

    def attach(self, store: Store, arrays: Arrays) -> None:
        state = self.state_dict()
        self._store, self._shares = store, bool(arrays)
        self.build_optimizer()
        if arrays:
            self.optimizer.use_statistics(arrays)
            return
        if store.fresh:  # otherwise this process's statistics belong to weights that were just replaced
            self.load_state_dict(state)
        if self.optim.name.startswith("Global"):
            notice(f"{self.path}: {self.optim.name} with {', '.join(self.optim.kwargs)} does not share its statistics between sessions")


class Trainer:
    """Trainer that takes gradient steps on the parameters of a net, with gradient clipping, optimizers and learning rate schedules.

    If a gradient or loss is not finite, the gradient step is skipped, and the attribute `skipped` is incremented.

    Args:
        flat: flat parameters of the net.
        spec: spec of the net, which contains the keys of optimizers, schedules and clipping.
        parts: names of the parameter groups of `flat` ("actor", "critic"), for which the spec may have separate optimizer keys. If `parts`
            is empty, the net has a single group.
        net_grads: a list of gradients, as views of `flat.grad`, for each net in `flat`. The gradient of each net is clipped separately. By
            default, all parameters form one net.
    """

    def __init__(
        self, flat: FlatParams, spec: NetSpec, parts: Sequence[str] = (), net_grads: Sequence[Sequence[Tensor]] | None = None
    ) -> None:
        self.flat, self.clip = flat, spec.clip_grad_val
        self.lr_factor = 1.0
        self.shared: SharedParams | None = None
        """Synchronisation of the parameters with other processes, or None if only this process trains the net."""
        self.skipped = 0
        """Number of gradient steps that were skipped because a loss or gradient was not finite."""
        flat.module.eval()
        self.mode_layers = [module for module in flat.module.modules() if has_training_mode(module)]
        """Modules that may behave differently in training mode."""
        self._finite = True
        self.deferred = is_asynchronous(flat.param)
        """Whether losses, gradient norms and the check for finite values stay on the CUDA device until the update ends. `deferred` is False
        for shared parameters, which are on the CPU."""
        self._losses: list[Tensor] = []
        self._skipped_on_device = torch.zeros((), device=flat.param.device)
        self.groups = [OptimizerGroup(flat, index, spec, part) for index, part in enumerate(parts or [""])]
        if self._shares_all and not flat.unit_rows:  # an optimizer that does not share its statistics may depend on the full vector
            flat.division = divide_vector(flat.size, flat.group_starts)
        self._net_grads = [[flat.grad]]
        if net_grads is not None and self.clip is not None:
            self._net_grads = [[grad.view(-1) for grad in grads] for grads in net_grads]
        """Gradients of each net, which are clipped separately. If gradients are not clipped, the list has a single entry for all nets."""
        arrays: list[list[Any]] = self._net_grads if self.deferred else [[grad.numpy() for grad in grads] for grads in self._net_grads]
        self._net_arrays = arrays
        """The gradients in `_net_grads`, as numpy arrays if they are on the CPU, where numpy takes half the time of torch."""
        self.counts_calls = any(group.counts_calls for group in self.groups)
        self._index, self._calls_W = 0, np.zeros(1, np.int64)
        """Index of this process among the processes that train the net, and number of training calls by each of these processes."""

    @property
    def _shares_all(self) -> bool:
        return all(group.shares_full_state for group in self.groups)

    @property
    def _remote_optimizer_store(self) -> Store | None:
        """Return the store if its process alone holds the optimizer statistics, otherwise None."""
        return self.shared.store if self.shared is not None and self.shared.store.remote and not self._shares_all else None

    def _groups_by_name(self) -> dict[str, OptimizerGroup]:
        return {f"optim{group.index}": group for group in self.groups}

    def shared_arrays(self) -> Named:
        updates = {"updates": SharedArray(np.zeros(1, np.int64), "own")}
        calls = {"calls": SharedArray(self._calls_W[[self._index]], "own")} if self.counts_calls else {}
        return self.flat.shared_arrays() | updates | calls | prefixed_arrays(self._groups_by_name())

    def attach(self, store: Store, arrays: Arrays) -> None:
        self.flat.use_shared_arrays(arrays, store.serves)
        if self.counts_calls:
            self._index, self._calls_W = store.index, arrays["calls"][:, 0]
        attach_parts(self._groups_by_name(), store, arrays)
        self.shared, self.deferred = SharedParams(self.flat, store, arrays["updates"][:, 0]), False

    def set_train_mode(self, on: bool) -> None:
        """Set training or evaluation mode of the modules in `mode_layers`, which are in evaluation mode between updates.

        `net.train` would visit all modules of the net, which takes 3 % of the training time of A2C.
        """
        for module in self.mode_layers:
            if type(module).train is nn.Module.train and not module._modules:
                vars(module)["training"] = on  # `train` takes 20 times as long: 5 % of an update of a net with batch norm
            else:
                module.train(on)

    @property
    def lr(self) -> float:
        """Current learning rate of the first optimizer group."""
        return self.groups[0].optimizer.lr

    def refresh_stored_parameters(self) -> None:
        """Update the copies of the parameters that some optimizers store.

        Call this method if the parameters were changed by anything other than a gradient step or `load_state_dict`.
        """
        for group in self.groups:
            group.optimizer.refresh_stored_parameters()

    def reset(self, fresh: FlatParams) -> None:
        """Copy the parameters of `fresh` to this net, and rebuild the optimizers with initial statistics.

        The net must not be trained by several processes.

        Args: fresh: parameters of a net with the same structure as this net.
        """
        assert self.shared is None
        self.flat.load_state_dict(fresh.state_dict())
        self.flat.save_buffers()
        for group in self.groups:
            group.build_optimizer()

    def begin_update(self, frame: int) -> None:
        """Begin an update: set the learning rates for `frame`, exclude frozen parameters from steps, and copy newer shared parameters."""
        calls = int(self._calls_W.sum()) if self.counts_calls else 0
        self.flat.begin_update()
        for group in self.groups:
            group.set_lr(frame, calls, self.lr_factor)
            if group.frozen != self.flat.frozen:
                group.set_frozen(self.flat.frozen)
        if self.shared is None:
            if self.mode_layers:
                self.flat.save_buffers()
        else:
            self.shared.pull_if_outdated()

    def count_training_call(self) -> None:
        """Count a completed training call, for learning rate schedules that depend on the number of training calls."""
        self._calls_W[self._index] += 1

    def pull_if_outdated(self) -> None:
        """Copy newer shared parameters to this process, if several processes train the net. Call this method before parameters are read."""
        if self.shared is not None:
            self.shared.pull_if_outdated()

    def backward(self, loss: Tensor, weight: float = 1.0) -> Tensor | float:
        """Accumulate the gradient of `weight` times a scalar loss for the next gradient step. Return the result of `check_finite`."""
        # no gradient argument: torch would import sympy (0.5 s) to check the argument
        if loss.requires_grad:  # false if all parameters are frozen
            (loss if weight == 1.0 else weight * loss).backward()
        return self.check_finite(loss.detach())

    def check_finite(self, loss: Tensor | float) -> Tensor | float:
        """Let the next gradient step be skipped if `loss` is not finite. The gradient of `loss` has already been accumulated.

        Returns the loss as a float, or as a tensor if the attribute `deferred` is true.
        """
        if isinstance(loss, Tensor):
            if self.deferred:
                self._losses.append(loss)
                return loss
            loss = loss.item()
        if not math.isfinite(loss):
            self._finite = False
        return loss

    def discard_gradient(self) -> None:
        """Discard the gradient that was accumulated since the last step, and the changes that forward passes made to buffers."""
        self.flat.grad.zero_()
        if self.shared is not None:
            self.shared.discard_update()
        elif self.mode_layers:
            self.flat.restore_buffers()

    def step(self) -> Tensor | float:
        """Take a gradient step with the accumulated gradient. Return the L2 norm of the gradient of all parameters, before clipping."""
        if self.deferred:
            return self._step_on_device()
        square_of_each = [sum([float(grad.dot(grad)) for grad in grads]) for grads in self._net_arrays]
        squares = sum(square_of_each)
        is_finite = self._finite and math.isfinite(squares)
        if is_finite and self.clip is not None:
            for grads, square in zip(self._net_arrays, square_of_each, strict=True):
                if (norm := math.sqrt(square)) > self.clip:
                    for grad in grads:
                        grad *= self.clip / (norm + 1e-6)
        if not is_finite:
            self._skip_step()
        elif self.shared is None:
            self._step()
            if self.mode_layers:
                self.flat.save_buffers()
        elif self.shared.store.remote:
            self.shared.push(self.step_with_remote_gradient, [group.optimizer.lr for group in self.groups], self.flat.frozen)
        else:
            with self.shared.update_context():
                self._step()
        self.flat.grad.zero_()
        return math.sqrt(squares)

    def _step_on_device(self) -> Tensor:
        """Take a gradient step on a CUDA device as `step` does, without waiting for the device.

        Return the norm of the gradient as a tensor.
        """
        norms = [torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])) for grads in self._net_grads]
        bad = ~torch.stack([*norms, *self._losses]).isfinite().all()
        self._losses.clear()
        if self.clip is not None:
            for grads, norm in zip(self._net_grads, norms, strict=True):
                for grad in grads:
                    grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1.0))
        for group in self.groups:
            group.optimizer.step_unless(bad)
        self.flat.normalize_unit_rows(self.flat.frozen)
        if self.mode_layers:
            self.flat.restore_buffers_where(bad)
        self._skipped_on_device += bad
        self.flat.grad.zero_()
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def end_update(self) -> None:
        """End an update: copy the number of gradient steps that were skipped on the CUDA device."""
        self.flat.update = 0
        if self.deferred:
            before, self.skipped = self.skipped, int(self._skipped_on_device)
            if self.skipped > before == 0:
                self._report_skipped()

    def _step(self) -> None:
        for group in self.groups:
            group.optimizer.step()
        self.flat.normalize_unit_rows(self.flat.frozen)

    def step_with_remote_gradient(
        self, grad: np.ndarray, lr_G: Sequence[float], frozen: Sequence[int], pulled: int, *buffers: np.ndarray
    ) -> float:
        """Take a gradient step with the gradient that another process computed.

        Return the staleness of the received gradient: the number of updates since the parameters of the gradient were pulled.

        Args: grad: gradient of the other process, a read-only array. frozen: indices of the parameters that are frozen in the other
        process. pulled, buffers: see SharedParams.apply_remote_update.
        """
        assert self.shared is not None
        received = torch.from_numpy(grad)

        def step() -> None:
            for group, lr in zip(self.groups, lr_G, strict=True):
                group.set_frozen(frozen)
                group.optimizer.lr = lr
                group.optimizer.step_with_gradient(received[self.flat.master_slice(group.index)])
            self.flat.normalize_unit_rows(frozen)

        return self.shared.apply_remote_update(step, pulled, buffers)

    def _skip_step(self) -> None:
        self._finite = True
        self.skipped += 1
        if self.shared is None:
            self.flat.restore_buffers()
        else:
            self.shared.discard_update()
        if self.skipped == 1:
            self._report_skipped()

    def _report_skipped(self) -> None:
        notice("a loss or gradient is not finite; gradient steps with such values are skipped (the learning rate may be too high)")

    @property
    def _is_shared(self) -> bool:
        return self.shared is not None and is_shared(self.shared.store)

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters, the states of the optimizers and the learning rates.

        If several processes train the net, return only those optimizer states that the processes do not share.
        """
        if (store := self._remote_optimizer_store) is not None:
            return store.run_locked("update", self._pull_and_return_state)
        if self._is_shared:
            return {"optimizers": [None if group.shared_arrays() else group.state_dict() for group in self.groups]}
        self.pull_if_outdated()
        optimizers = [group.state_dict() for group in self.groups]
        calls = {"calls": int(self._calls_W[self._index])} if self.counts_calls else {}
        return {**self.flat.state_dict(), **calls, "optimizers": optimizers, "lr": [group.optimizer.lr for group in self.groups]}

    def _pull_and_return_state(self) -> dict[str, Any]:
        self.flat.pull()
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`. Raises ValueError if the sizes of the vectors in `state` do not match this net."""
        if (store := self._remote_optimizer_store) is not None:
            store.run_locked("update", self.load_state_dict, state)
        if self._is_shared:
            for group, saved in zip(self.groups, state["optimizers"], strict=True):
                if saved is not None:
                    group.load_state_dict(saved)
            return
        self.flat.load_state_dict(state)
        self._calls_W[self._index] = state.get("calls", 0)
        for group, saved, lr in zip(self.groups, state["optimizers"], state["lr"], strict=True):
            group.load_state_dict(saved)
            group.optimizer.lr = lr
        self.flat.save_buffers()

    def pull(self) -> None:
        if self.shared is not None:
            self.shared.pull()
