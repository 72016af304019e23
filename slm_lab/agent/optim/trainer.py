"""Gradient steps on the flat parameters of a net."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.shared import SharedParams
from slm_lab.agent.optim.optimizers import SHAPED, build_optimizer
from slm_lab.agent.optim.schedule import build_lr_schedule
from slm_lab.lib.heap import HERE, Heap, Place
from slm_lab.spec.net import LRSchedulerSpec, NetSpec, OptimSpec


def has_modes(module: nn.Module) -> bool:
    """The layer behaves otherwise while learning: it has running statistics (batch norm) or draws at random (dropout)."""
    return bool(module._buffers) or isinstance(module, nn.RReLU) or hasattr(module, "p") or hasattr(module, "dropout")


class Group:
    """A slice of the flat parameters with its optimizer and learning rate schedule."""

    def __init__(self, flat: FlatParams, index: int, optim: OptimSpec, scheduler: LRSchedulerSpec | None, prefix: str, heap: Heap) -> None:
        part = flat.slices[index]
        self.grad = flat.grad[part]
        params = flat.group(index) if optim.name in SHAPED else [flat.master[part]]
        self.optimizer = build_optimizer(optim, params, flat.master_grad[part], f"agent.net.{prefix}optim_spec", heap)
        self.base_lr = optim.lr
        self.lr_at = None if scheduler is None else build_lr_schedule(scheduler, optim.lr, f"agent.net.{prefix}lr_scheduler_spec")

    def set_lr(self, frame: int, factor: float) -> None:
        """Set the learning rate that holds at `frame`, times `factor`."""
        self.optimizer.lr = factor * (self.base_lr if self.lr_at is None else self.lr_at(frame))


class Trainer:
    """Owns the parameters of `net`: gradient, clipping, optimizer steps and learning rates.

    Args:
        net: the module that learns.
        spec: its optimizer, schedule and clipping keys.
        parts: {"actor": parameters, "critic": parameters} where each has its own optimizer; None: one for all.
        place: where it computes, and whether other Sessions train the net too.
    """

    def __init__(self, net: nn.Module, spec: NetSpec, parts: dict[str, list[nn.Parameter]] | None = None, place: Place = HERE) -> None:
        self.net = net
        self.clip = spec.clip_grad_val
        self.lr_factor = 1.0
        self.flat = FlatParams(net, list(parts.values()) if parts else None, place)
        self.common = SharedParams(self.flat, place.heap) if place.heap.common else None
        """Where other Sessions train the net too."""
        net.eval()
        self.mode_layers = [module for module in net.modules() if has_modes(module)]
        """Layers that behave otherwise while learning."""
        if parts is None:
            self.groups = [Group(self.flat, 0, spec.optim_spec, spec.lr_scheduler_spec, "", place.heap)]
        else:
            self.groups = [
                Group(
                    self.flat,
                    index,
                    getattr(spec, f"{part}_optim_spec") or spec.optim_spec,
                    getattr(spec, f"{part}_lr_scheduler_spec") or spec.lr_scheduler_spec,
                    f"{part}_" if getattr(spec, f"{part}_optim_spec") else "",
                    place.heap,
                )
                for index, part in enumerate(parts)
            ]

    def set_train_mode(self, on: bool) -> None:
        """Switch the layers that have modes; between updates they are as for acting. (`net.train` walks through all: 3 % of A2C.)"""
        for module in self.mode_layers:
            module.train(on)

    @property
    def lr(self) -> float:
        """The (first group's) learning rate now."""
        return self.groups[0].optimizer.lr

    def begin(self, frame: int) -> None:
        """Before the steps of an update: the learning rates that hold at `frame`."""
        for group in self.groups:
            group.set_lr(frame, self.lr_factor)
        self.refresh()

    def refresh(self) -> None:
        """Before a read: what others have made of the net."""
        if self.common is not None:
            self.common.refresh()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar loss to what the next step takes."""
        loss.backward()
        if self.common is not None:
            self.common.check(loss)

    def step(self) -> float:
        """One step along the gradient added up since the last. Returns its L2 norm over all groups, before clipping."""
        squares = 0.0
        for group in self.groups:
            norm = float(torch.linalg.vector_norm(group.grad))
            squares += norm * norm
            if self.clip is not None and norm > self.clip:
                group.grad.mul_(self.clip / (norm + 1e-6))
        if self.common is None:
            self._step()
        else:
            self.common.push(self._step, squares)
        self.flat.grad.zero_()
        return math.sqrt(squares)

    def _step(self) -> None:
        for group in self.groups:
            group.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        self.refresh()
        param, buffer = self.flat.clone()
        return {"param": param, "buffer": buffer, "optimizers": [group.optimizer.state_dict() for group in self.groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.flat.load(state["param"], state["buffer"])
        for group, saved in zip(self.groups, state["optimizers"], strict=True):
            group.optimizer.load_state_dict(saved)
