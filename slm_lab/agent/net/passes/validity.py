"""Choice between a fast pass, which computes a net without calling its modules, and a pass that calls the modules.

There are two kinds of fast passes: passes without an autograd graph (direct.py), and actions computed in numpy (policy/policy.py). A fast
pass is built once from the modules of a net, and reproduces what these modules computed at that time. A user may add hooks, freeze
parameters, or tie, parametrise and replace parameters and layers, before or after a fast pass is built. This Python module checks whether a
fast pass still gives the same results as the net's modules. If the results of the fast pass and of the modules may differ, the modules are
called, and autograd computes the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

F = TypeVar("F")

_GLOBAL_HOOKS = [vars(torch_module)[f"_global_{kind}_hooks"] for kind in ("forward", "forward_pre", "backward", "backward_pre")]
_module_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_tensor_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_children = itemgetter("_modules")


class ModuleMonitor:
    """Monitor that checks whether modules are unchanged since construction, have no hooks, and use the `forward` of their class.

    Args: modules: all modules that a fast pass replaces, and their parents. If `modules` is empty, `is_unchanged` always returns False.
    data: whether `is_unchanged` also requires that the parameters and buffers keep their memory addresses, because the fast pass has views
    of this memory.
    """

    def __init__(self, modules: Iterable[nn.Module], data: bool = False) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._kinds = [type(module) for module in self._modules]
        self._attributes = [vars(module) for module in self._modules]
        self._attribute_counts = [] if self._has_own_forward() else list(map(len, self._attributes))
        self._containers = [vars(module) for module in self._modules if module._modules]
        self._modules_of = list(map(_children, self._containers))
        dicts = [tensors for module in self._modules for tensors in (module._parameters, module._buffers) if tensors]
        self._current: list[dict[str, Any]] = [*self._modules_of, *dicts]
        """Dictionaries in which modules store layers, parameters and buffers. `_saved` contains copies of these dictionaries, made at
        construction."""
        self._saved: list[dict[str, Any]] = [dict(tensors) for tensors in self._current]
        self._tensors = list({id(tensor): tensor for tensors in dicts for tensor in tensors.values() if tensor is not None}.values())
        scalars = [(tensors, name, x) for tensors in dicts for name, x in tensors.items() if x is not None and x.numel() == 1]
        self._scalars_in, self._scalar_names, self._scalars = map(list, zip(*scalars, strict=True)) if scalars else ([], [], [])
        self._data = self._tensors if data else []
        self._addresses = [tensor.data_ptr() for tensor in self._data]
        self.handles = -1
        """Id that torch would have given to a new hook at the last check that found no hooks, or −1 if hooks may exist."""

    def is_unchanged(self) -> bool:
        """Return whether the monitored modules are unchanged since construction and have no hooks."""
        if RemovableHandle.next_id != self.handles:
            self.handles = -1 if self._any_hooks() or not self._modules else RemovableHandle.next_id
        return (
            self.handles >= 0
            and self._is_same_structure()
            and (list(map(len, self._attributes)) == self._attribute_counts or self._is_forward_of_class())
            and list(map(type, self._modules)) == self._kinds
            and list(map(_children, self._containers)) == self._modules_of  # `del` on a Sequential replaces its dictionary
            # compare by identity: two different tensors with one element are equal if their values are equal
            and (not self._scalars or all(map(is_, map(getitem, self._scalars_in, self._scalar_names), self._scalars)))
            and (not self._data or list(map(Tensor.data_ptr, self._data)) == self._addresses)
        )

    def _is_same_structure(self) -> bool:
        try:
            return self._current == self._saved
        except RuntimeError:  # a tensor was replaced: the result of == for tensors with several elements has no truth value
            return False

    def _has_own_forward(self) -> bool:
        return any("forward" in attributes for attributes in self._attributes)

    def _is_forward_of_class(self) -> bool:
        """Return whether each module uses the `forward` of its class.

        Call this method only if the number of attributes of a module has changed.
        """
        if self._has_own_forward():
            return False
        self._attribute_counts = list(map(len, self._attributes))
        return True

    def __reduce__(self) -> tuple[type[ModuleMonitor], tuple[tuple[()]]]:
        """Make each copy of this object an empty ModuleMonitor, whose `is_unchanged` returns False.

        (The modules of a copied net are other objects than the monitored modules.)
        """
        return ModuleMonitor, ((),)

    def _any_hooks(self) -> bool:
        module_hooks: Iterable[Any] = map(_module_hooks, self._modules)
        return any(_GLOBAL_HOOKS) or any(map(any, module_hooks)) or any(map(has_hooks, self._tensors))


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks that autograd calls with the tensor's gradient."""
    return any(_tensor_hooks(tensor))


def add_gradient(parameter: Tensor, grad: Tensor) -> None:
    """Add `grad` to the parameter's gradient as autograd does, and call the parameter's hooks. A frozen parameter is left unchanged."""
    if not parameter.requires_grad:
        return
    if has_hooks(parameter) or parameter.grad is None:
        torch.dot(parameter.reshape(-1), grad.reshape(-1)).backward()
    else:
        parameter.grad += grad


class ParameterVector(Protocol):
    """Interface of FlatParams, which holds the parameters of a net in one vector."""

    update: int
    """Number of the last update that began with a check for changed parameters, or 0 between updates."""
    frozen: tuple[int, ...]
    """Indices of the frozen parameters, which do not require a gradient."""

    def sync_parameters(self) -> None:
        """Set `frozen`, and make parameters with a replaced `data` attribute views of the vector with the new data (see FlatParams)."""


class FastPass(Generic[F]):
    """Holder of a fast pass. The method `get` returns the fast pass as long as its results are the same as those of the net's modules.

    The method `get` checks the modules for changes once for each value of `ParameterVector.update`, and at each call between updates.

    Args: fast: the fast pass, or None if the net has none. vector: the parameters of the net. modules, data: see ModuleMonitor.
    """

    def __init__(
        self, fast: F | None = None, modules: Iterable[nn.Module] = (), vector: ParameterVector | None = None, data: bool = False
    ) -> None:
        self.fast, self._vector, self._monitor = fast, vector, ModuleMonitor(modules, data)
        self._update, self._is_valid = -1, False

    def get(self, learn: bool = True) -> F | None:
        """Return the fast pass if it gives the same results as the modules. If None is returned, the caller must call the modules.

        Args: learn: whether gradients of all parameters are needed. With `learn=True`, the result is None if any parameter is frozen.
        """
        vector = self._vector
        if self.fast is None or vector is None:
            return None
        if vector.update != self._update or not vector.update:
            if not vector.update:
                vector.sync_parameters()
            self._update, self._is_valid = vector.update, self._monitor.is_unchanged()
        return self.fast if self._is_valid and not (learn and vector.frozen) else None

    def __reduce__(self) -> tuple[type[FastPass[F]], tuple[()]]:
        """Make each copy of this object empty. (The modules of a copied or pickled net are other objects than the modules of this pass.)"""
        return FastPass, ()
