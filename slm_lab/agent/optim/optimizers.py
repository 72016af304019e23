"""Optimizers, selected by their names in a spec.

FlatAdam, FlatAdamW and FlatRMSprop step one flat vector with one or two kernels, in half the time of torch.optim. The statistics of a
FlatOptimizer are vectors that processes can share. Unlike torch.optim, FlatAdam, FlatAdamW and FlatRMSprop do not load torch's compiler,
which takes one second. All other optimizers except Lookahead use torch.optim.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.optim.flat import map_vectors
from slm_lab.lib.store import Arrays, Named, SharedArray
from slm_lab.spec.models.net import SHAPED, OptimSpec
from slm_lab.spec.report import Problem, SpecError


class FlatOptimizer(ABC):
    """Base class of optimizers that step a flat parameter vector by a flat gradient, which are float32 [P] tensors without autograd."""

    def __init__(self, param: Tensor, grad: Tensor, lr: float) -> None:
        self.param, self.grad, self.lr = param, grad, lr
        """`lr` is the learning rate, which may be changed between steps."""
        self.statistics: dict[str, Tensor] = {}
        """Statistics of the optimizer, such as moving averages, by name. Several processes can share the statistics."""

    @abstractmethod
    def step(self) -> None:
        """Take one optimizer step with the gradient in `grad`."""

    def refresh_stored_parameters(self) -> None:  # noqa: B027  # most optimizers store no copy of the parameters
        """Update the copies of the parameters that the optimizer stores.

        Call this method if the parameters were replaced after the optimizer was built.
        """

    def step_with_gradient(self, grad: Tensor) -> None:
        """Take one optimizer step with the gradient `grad` [P] instead of the accumulated gradient."""
        self.grad.copy_(grad)
        self.step()

    def step_unless(self, bad: Tensor) -> None:
        """Take one optimizer step unless `bad`, a bool tensor [] on the device, is true.

        Optimizers other than FlatAdam and FlatRMSprop wait until the device has computed `bad`.
        """
        if not bad.item():
            self.step()

    def for_slice(self, where: slice) -> FlatOptimizer:
        """Return an optimizer for a slice of the parameter vector.

        The statistics of the returned optimizer are views of this optimizer's statistics. The step count of the returned optimizer is a
        copy.
        """
        sliced = copy(self)
        sliced.param, sliced.grad = self.param[where], self.grad[where]
        sliced.statistics = {name: tensor[where] if tensor.ndim else tensor.clone() for name, tensor in self.statistics.items()}
        return sliced

    def use_statistics(self, arrays: Arrays) -> None:
        """From now on, use `arrays` as the statistics. The names in `arrays` are those of `shared_statistics`."""
        self.statistics = {name: torch.from_numpy(arrays[name]) for name in self.statistics}

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of the optimizer, as tensors and Python numbers."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.statistics.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self.statistics.items():
            tensor.copy_(state[name])


class _NoCopyOptimizer(FlatOptimizer):
    """Base class of optimizers whose `step_with_gradient` does not copy its argument."""

    def step_with_gradient(self, grad: Tensor) -> None:
        previous, self.grad = self.grad, grad
        try:
            self.step()
        finally:
            self.grad = previous


class FlatAdam(_NoCopyOptimizer):
    """Adam (arXiv:1412.6980, Algorithm 1), with the same results as torch.optim.Adam(fused=True).

    Args: weight_decay: factor of the L2 penalty (`weight_decay` times the parameters is added to the gradient). Raises ValueError if an
    argument is out of range.
    """

    kernel: Callable[..., Any] = staticmethod(torch._fused_adam_)

    def __init__(
        self, param: Tensor, grad: Tensor, lr: float, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(param, grad, lr)
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas) or eps < 0.0 or weight_decay < 0.0:
            raise ValueError(f"expected betas in [0, 1), eps and weight_decay ≥ 0; got {list(betas)}, {eps}, {weight_decay}")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.statistics = {
            "first": torch.zeros_like(param),
            "second": torch.zeros_like(param),
            "step": torch.zeros((), device=param.device),
        }

    def step(self) -> None:
        self.statistics["step"] += 1
        self._run_kernel(None)

    def step_unless(self, bad: Tensor) -> None:
        self.statistics["step"] += ~bad
        self._run_kernel(bad.float())

    def _run_kernel(self, found_inf: Tensor | None) -> None:
        """Take one step by torch's fused kernel.

        Args: found_inf: if this tensor is 1, the kernel changes neither parameters nor statistics. If `found_inf` is None, the kernel
        always takes a step.
        """
        statistics = self.statistics
        self.kernel(
            [self.param],
            [self.grad],
            [statistics["first"]],
            [statistics["second"]],
            [],
            [statistics["step"]],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )


class FlatAdamW(FlatAdam):
    """Adam with decoupled weight decay (arXiv:1711.05101, Algorithm 2), with the same results as torch.optim.AdamW(fused=True)."""

    kernel = staticmethod(torch._fused_adamw_)

    def __init__(
        self, param: Tensor, grad: Tensor, lr: float, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
    ) -> None:
        super().__init__(param, grad, lr, betas, eps, weight_decay)


class FlatRMSprop(_NoCopyOptimizer):
    """RMSprop (Tieleman & Hinton 2012), with the same results as torch.optim.RMSprop.

    Args: alpha: decay rate of the moving averages. The other arguments are those of torch.optim.RMSprop. Raises ValueError if an argument
    is negative.
    """

    def __init__(
        self,
        param: Tensor,
        grad: Tensor,
        lr: float,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
    ) -> None:
        super().__init__(param, grad, lr)
        if min(alpha, eps, weight_decay, momentum) < 0.0:
            raise ValueError(f"expected alpha, eps, weight_decay and momentum ≥ 0; got {alpha}, {eps}, {weight_decay}, {momentum}")
        self.alpha, self.eps, self.weight_decay, self.momentum = alpha, eps, weight_decay, momentum
        self.statistics = {"square": torch.zeros_like(param)}
        if centered:
            self.statistics["mean"] = torch.zeros_like(param)
        if momentum > 0.0:
            self.statistics["velocity"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self) -> None:
        grad, square = self.grad, self.statistics["square"]
        if self.weight_decay:
            grad = grad.add(self.param, alpha=self.weight_decay)
        square.mul_(self.alpha).addcmul_(grad, grad, value=1.0 - self.alpha)
        mean, velocity = self.statistics.get("mean"), self.statistics.get("velocity")
        if mean is not None:
            mean.lerp_(grad, 1.0 - self.alpha)
            # the difference is negative only if another process steps at the same time
            denominator = square.addcmul(mean, mean, value=-1.0).clamp_(min=0.0).sqrt_().add_(self.eps)
        else:
            denominator = square.sqrt().add_(self.eps)
        if velocity is not None:
            velocity.mul_(self.momentum).addcdiv_(grad, denominator)
            self.param.add_(velocity, alpha=-self.lr)
        else:
            self.param.addcdiv_(grad, denominator, value=-self.lr)

    @torch.no_grad()
    def step_unless(self, bad: Tensor) -> None:
        before = [(tensor, tensor.clone()) for tensor in (self.param, *self.statistics.values())]
        self.step()
        for tensor, previous in before:
            tensor.copy_(torch.where(bad, previous, tensor))


class Lookahead(FlatOptimizer):
    """Lookahead optimizer (arXiv:1907.08610, Algorithm 1): after each k steps of an inner optimizer, slow weights are updated.

    Args: optimizer: name of the inner optimizer. k: number of inner steps per step of the slow weights. alpha: step size of the slow
    weights.
    Additional keyword arguments are passed to the inner optimizer.
    """

    def __init__(
        self, param: Tensor, grad: Tensor, lr: float, optimizer: str = "Adam", k: int = 5, alpha: float = 0.5, **kwargs: Any
    ) -> None:
        if not 0.0 < alpha <= 1.0 or k < 1:
            raise ValueError(f"expected k ≥ 1 and 0 < alpha ≤ 1; got k={k}, alpha={alpha}")
        if optimizer in SHAPED:
            raise ValueError(f"the inner optimizer {optimizer} depends on the shapes of parameters, which Lookahead flattens")
        super().__init__(param, grad, lr)
        self.inner = make_optimizer(optimizer, [param], grad, lr, kwargs)
        self.k, self.alpha, self.steps = k, alpha, 0
        self.slow = param.detach().clone()

    @torch.no_grad()
    def step(self) -> None:
        self.inner.lr = self.lr
        self.inner.step()
        self.steps += 1
        if self.steps % self.k == 0:
            self.slow.lerp_(self.param, self.alpha)
            self.param.copy_(self.slow)

    def for_slice(self, where: slice) -> Lookahead:
        sliced = super().for_slice(where)
        assert isinstance(sliced, Lookahead)
        sliced.inner, sliced.slow = self.inner.for_slice(where), self.slow[where]
        return sliced

    def refresh_stored_parameters(self) -> None:
        self.slow.copy_(self.param)
        self.inner.refresh_stored_parameters()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow.to("cpu", copy=True), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.slow.copy_(state["slow"])
        self.steps = int(state["steps"])


class ShapedOptimizer(FlatOptimizer):
    """Base class of optimizers that step parameters in their original shapes with one or more optimizers of torch."""

    shaped: Sequence[tuple[Tensor, Tensor | None]] = ()
    """Pairs (tensor to step, gradient), one for each parameter. The sequence is empty if the optimizer steps the flat vector."""

    def freeze(self, indices: Collection[int]) -> None:
        """From now on, exclude the parameters with the indices `indices` in `shaped` from steps, and include all other parameters.

        (The gradient of an excluded parameter is set to None, because torch's optimizers skip parameters without a gradient.)
        """
        for index, (p, grad) in enumerate(self.shaped):
            p.grad = None if index in indices else grad


class Muon(ShapedOptimizer):
    """Muon (https://kellerjordan.github.io/posts/muon) for the weights of hidden layers, and AdamW for biases, gains and output layers.

    Muon treats the weights of convolutions as matrices with one row per output channel. By default, Muon's updates are scaled to the size
    of AdamW's updates (torch's adjust_lr_fn="match_rms_adamw"), so that Muon and AdamW can use the same learning rate. The argument
    `weight_decay` applies to Muon and to AdamW.
    """

    def __init__(self, params: Sequence[Tensor], grad: Tensor, lr: float, **kwargs: Any) -> None:
        super().__init__(params[0], grad, lr)
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        shaped: list[Tensor] = []
        for p in params:
            if p.dim() < 2 or getattr(p, "is_output", False):
                others.append(p)
                shaped.append(p)
            else:
                matrix = torch.nn.Parameter(p.detach().view(len(p), -1))
                matrix.grad = None if p.grad is None else p.grad.view_as(matrix)
                matrices.append(matrix)
                shaped.append(matrix)
        if not matrices:
            raise ValueError("requires a net with at least one hidden layer; use AdamW")
        decay = {key: value for key, value in kwargs.items() if key == "weight_decay"}
        self.inner: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=lr, **{"adjust_lr_fn": "match_rms_adamw", **kwargs})]
        if others:
            self.inner.append(torch.optim.AdamW(others, lr=lr, **decay))
        self.shaped = [(p, p.grad) for p in shaped]

    def step(self) -> None:
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                group["lr"] = self.lr
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [optimizer.state_dict() for optimizer in self.inner]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.inner, state["inner"], strict=True):
            optimizer.load_state_dict(saved)


class TorchOptimizer(ShapedOptimizer):
    """Optimizer of torch.optim for the flat vector or, if the optimizer depends on shapes, for the separate parameters."""

    def __init__(
        self, kind: Callable[..., torch.optim.Optimizer], params: Sequence[Tensor], grad: Tensor, lr: float, **kwargs: Any
    ) -> None:
        super().__init__(params[0], grad, lr)
        if len(params) == 1 and params[0].grad is None:
            self.inner = self._build_for_vector(kind, kwargs)
        else:
            self.shaped, self.inner = [(p, p.grad) for p in params], kind(params, lr=lr, **kwargs)
        self._build = kind, kwargs

    def _build_for_vector(self, kind: Callable[..., torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> torch.optim.Optimizer:
        vector = torch.nn.Parameter(self.param)
        vector.grad = self.grad
        return kind([vector], lr=self.lr, **kwargs)

    def for_slice(self, where: slice) -> TorchOptimizer:
        sliced = super().for_slice(where)
        assert isinstance(sliced, TorchOptimizer)
        sliced.inner = sliced._build_for_vector(*self._build)
        state = map_vectors(deepcopy(self.inner.state_dict()), len(self.param), lambda vector: vector[where].clone())
        sliced.inner.load_state_dict(state)
        return sliced

    def step(self) -> None:
        for group in self.inner.param_groups:
            group["lr"] = self.lr
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class PartitionedOptimizer(FlatOptimizer):
    """Optimizer that consists of one optimizer for each part of the parameter vector, so that parts can be frozen.

    While a part of the parameter vector is frozen, neither the parameters nor the statistics of this part change.

    As in torch, the optimizer of each part counts its own steps. If processes share the statistics, all parts have a common step count.

    Args: whole: optimizer of the complete vector. shared: whether processes share the statistics of `whole`.
    """

    def __init__(self, whole: FlatOptimizer, shared: bool = False) -> None:
        super().__init__(whole.param, whole.grad, whole.lr)
        self.statistics, self.shared = whole.statistics, shared
        everything = slice(0, len(whole.param))
        self.parts: list[tuple[slice, FlatOptimizer]] = [(everything, whole.for_slice(everything))]
        self._active = [optimizer for _, optimizer in self.parts]

    def split_part_at(self, index: int) -> None:
        """Split a part of the parameter vector in two, so that a part begins at element `index` of the vector."""
        for number, (part, optimizer) in enumerate(self.parts):
            if part.start < index < part.stop:
                halves = slice(0, index - part.start), slice(index - part.start, part.stop - part.start)
                new_parts = [(slice(part.start + half.start, part.start + half.stop), optimizer.for_slice(half)) for half in halves]
                self.parts[number : number + 1] = new_parts
                return

    def freeze(self, frozen: Sequence[slice]) -> None:
        """From now on, exclude the slices `frozen` of the parameter vector from steps, and include all other elements."""
        for where in frozen:
            self.split_part_at(where.start)
            self.split_part_at(where.stop)
        frozen_parts = [any(where.start <= part.start < where.stop for where in frozen) for part, _ in self.parts]
        self._active = [optimizer for (_, optimizer), is_frozen in zip(self.parts, frozen_parts, strict=True) if not is_frozen]

    def step(self) -> None:
        self._for_each_part(lambda optimizer, part: optimizer.step())

    def step_unless(self, bad: Tensor) -> None:
        self._for_each_part(lambda optimizer, part: optimizer.step_unless(bad))

    def step_with_gradient(self, grad: Tensor) -> None:
        self._for_each_part(lambda optimizer, part: optimizer.step_with_gradient(grad[part]))

    def _for_each_part(self, step: Callable[[FlatOptimizer, slice], None]) -> None:
        counts = {name: (tensor, tensor.clone()) for name, tensor in self.statistics.items() if not tensor.ndim}
        for part, optimizer in self.parts:
            if optimizer not in self._active:
                continue
            optimizer.lr = self.lr
            for name, (_, before) in counts.items() if self.shared else ():
                optimizer.statistics[name].copy_(before)
            step(optimizer, part)
        for name, (total, before) in counts.items():
            latest = torch.stack([before, *(optimizer.statistics[name] for optimizer in self._active)]).amax()
            total += latest - before

    def refresh_stored_parameters(self) -> None:
        for _, optimizer in self.parts:
            optimizer.refresh_stored_parameters()


FLAT: dict[str, Callable[..., FlatOptimizer]] = {
    "Adam": FlatAdam,
    "GlobalAdam": FlatAdam,
    "AdamW": FlatAdamW,
    "RMSprop": FlatRMSprop,
    "GlobalRMSprop": FlatRMSprop,
}
"""Mapping from name to FlatOptimizer class. If this class does not support an argument in the spec, the optimizer of torch.optim is
used."""

TORCH: dict[str, type[torch.optim.Optimizer]] = {
    name: vars(torch.optim)[name]
    for name in ("Adafactor", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Names of the optimizers of torch.optim that have a fused kernel for a complete step."""


def make_optimizer(name: str, params: Sequence[Tensor], grad: Tensor, lr: float, kwargs: dict[str, Any]) -> FlatOptimizer:
    """Build an optimizer by its name.

    Args: params: the flat vector as the only element, or the parameters in their original shapes. grad: the flat gradient. kwargs:
    additional arguments of the optimizer.

    Raises TypeError, ValueError or RuntimeError if the optimizer does not accept the arguments.
    """
    if name == "Lookahead":
        return Lookahead(params[0], grad, lr, **kwargs)
    if name in FLAT and inspect.signature(FLAT[name]).parameters.keys() >= kwargs.keys():
        return FLAT[name](params[0], grad, lr, **kwargs)
    plain = name.removeprefix("Global")
    kwargs = {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}
    if plain == "Muon":
        return Muon(params, grad, lr, **kwargs)
    if plain in FUSED and not {"foreach", "fused", "differentiable"}.intersection(kwargs):
        kwargs["fused"] = True
    return TorchOptimizer(TORCH[plain], params, grad, lr, **kwargs)


def build_optimizer(spec: OptimSpec, params: Sequence[Tensor], grad: Tensor, path: str) -> FlatOptimizer:
    """Build the optimizer that a spec describes. Raises SpecError if the arguments in the spec are invalid."""
    try:
        return make_optimizer(spec.name, params, grad, spec.learning_rate, spec.kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError("agent", [Problem(path, f"{spec.name}: {error}")]) from error


def shared_statistics(statistics: Mapping[str, Tensor]) -> Named:
    """Return the statistics of an optimizer, including its step count, as arrays that processes can share."""
    return {name: SharedArray(tensor.detach().cpu().numpy(), "step") for name, tensor in statistics.items()}
