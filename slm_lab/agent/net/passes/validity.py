"""Which implementation of a pass is used: the fast one, which calls no modules, or the modules themselves.

The passes without an autograd graph (direct.py) and acting in numpy (policy/policy.py) are built once from the modules of a
net, and compute what these did then. Afterwards, or before, a user may add hooks, freeze parameters, or
tie, parametrise and replace parameters and layers. Here is the one check of whether a pass still computes what its modules would. Where it
does not, the modules are called, and autograd computes the gradients.
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


class Watch:
    """Whether modules are unchanged, and compute by the `forward` of their class alone, without hooks.

    Args: modules: all those that a pass replaces, and those that contain them; empty: `holds` is always false. data: whether the memory of
    their parameters and buffers must be the same too, since the pass has views of it.
    """

    def __init__(self, modules: Iterable[nn.Module], data: bool = False) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._kinds = [type(module) for module in self._modules]
        self._attributes = [vars(module) for module in self._modules]
        self._attribute_counts = [] if self._has_own_forward() else list(map(len, self._attributes))
        self._containers = [vars(module) for module in self._modules if module._modules]
        self._modules_of = list(map(_children, self._containers))
        tensors = [held for module in self._modules for held in (module._parameters, module._buffers) if held]
        self._live: list[dict[str, Any]] = [*self._modules_of, *tensors]
        """The dictionaries in which modules keep layers, parameters and buffers. `kept`: copies, as they were."""
        self._kept: list[dict[str, Any]] = [dict(held) for held in self._live]
        self._tensors = list({id(one): one for held in tensors for one in held.values() if one is not None}.values())
        scalars = [(held, name, one) for held in tensors for name, one in held.items() if one is not None and one.numel() == 1]
        self._scalars_in, self._scalar_names, self._scalars = map(list, zip(*scalars, strict=True)) if scalars else ([], [], [])
        self._data = self._tensors if data else []
        self._places = [one.data_ptr() for one in self._data]
        self.handles = -1
        """torch's next hook id when there were no hooks; -1: there may be hooks."""

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        if RemovableHandle.next_id != self.handles:
            self.handles = -1 if self._any_hooks() or not self._modules else RemovableHandle.next_id
        return (
            self.handles >= 0
            and self._is_same_structure()
            and (list(map(len, self._attributes)) == self._attribute_counts or self._is_forward_of_class())
            and list(map(type, self._modules)) == self._kinds
            and list(map(_children, self._containers)) == self._modules_of  # `del` of a Sequential replaces the dictionary
            # tensors of one element compare as equal if their values are
            and (not self._scalars or all(map(is_, map(getitem, self._scalars_in, self._scalar_names), self._scalars)))
            and (not self._data or list(map(Tensor.data_ptr, self._data)) == self._places)
        )

    def _is_same_structure(self) -> bool:
        try:
            return self._live == self._kept
        except RuntimeError:  # another tensor: two of several elements cannot be compared
            return False

    def _has_own_forward(self) -> bool:
        return any("forward" in attributes for attributes in self._attributes)

    def _is_forward_of_class(self) -> bool:
        """Whether no module has a `forward` of its own. Looked up only if attributes were added: their number is cheaper to compare."""
        if self._has_own_forward():
            return False
        self._attribute_counts = list(map(len, self._attributes))
        return True

    def __reduce__(self) -> tuple[type[Watch], tuple[tuple[()]]]:
        """Return what makes a copy: it watches nothing and never holds, since it belongs to other modules."""
        return Watch, ((),)

    def _any_hooks(self) -> bool:
        own: Iterable[Any] = map(_module_hooks, self._modules)
        return any(_GLOBAL_HOOKS) or any(map(any, own)) or any(map(has_hooks, self._tensors))


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks, which autograd calls with its gradient."""
    return any(_tensor_hooks(tensor))


def add_gradient(parameter: Tensor, grad: Tensor) -> None:
    """Add to the gradient of a parameter what autograd would: nothing if it is frozen; and call its hooks."""
    if not parameter.requires_grad:
        return
    if has_hooks(parameter) or parameter.grad is None:
        torch.dot(parameter.reshape(-1), grad.reshape(-1)).backward()
    else:
        parameter.grad += grad


class Vector(Protocol):
    """The parameters of a net, kept in one vector (see FlatParams)."""

    update: int
    """Number of the update in progress, or of the last one before it that was to be checked; 0: no update."""
    frozen: tuple[int, ...]
    """The parameters that do not require a gradient."""

    def inspect(self) -> None:
        """Copy parameters whose `data` were replaced back into the vector, and find those that are frozen."""


class FastPass(Generic[F]):
    """An implementation of a pass that calls no modules, to be used while it computes what they would.

    This is checked once for each number of `Vector.update`, and at each call outside updates.

    Args: fast: None: there is none. vector: the parameters that are updated. Others: as of Watch.
    """

    def __init__(self, fast: F | None = None, modules: Iterable[nn.Module] = (), vector: Vector | None = None, data: bool = False) -> None:
        self.fast, self._vector, self._watch = fast, vector, Watch(modules, data)
        self._update, self._held = -1, False

    def get(self, learn: bool = True) -> F | None:
        """Return the implementation; None: the modules are to be called. Args: learn: gradients of all parameters are needed."""
        vector = self._vector
        if self.fast is None or vector is None:
            return None
        if vector.update != self._update or not vector.update:
            if not vector.update:
                vector.inspect()
            self._update, self._held = vector.update, self._watch.holds()
        return self.fast if self._held and not (learn and vector.frozen) else None
