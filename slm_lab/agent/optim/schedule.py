"""Learning rate schedules: functions of the frame (number of env steps), or of the number of training calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from slm_lab.spec.models.net import LRSchedulerSpec
from slm_lab.spec.report import Problem, SpecError

LRSchedule = Callable[[int], float]
"""Function that maps the frame, or the number of training calls so far, to the learning rate."""

SCHEDULERS: dict[str, type[lr_scheduler.LRScheduler]] = {
    name: vars(lr_scheduler)[name]
    for name in lr_scheduler.__all__
    if name not in ("LRScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")
}
"""Schedulers of torch whose learning rate depends only on the step count and whose arguments are numbers."""


def linear_to_min(base_lr: float, frame: float, min_factor: float = 0.0) -> LRSchedule:
    """Return a schedule that decreases linearly from base_lr at frame 0 to base_lr · min_factor at `frame`, and is constant afterwards."""

    def lr(now: int) -> float:
        return base_lr * max(min_factor, 1.0 - (1.0 - min_factor) * now / frame)

    return lr


def torch_schedule(scheduler: lr_scheduler.LRScheduler) -> LRSchedule:
    """Return the learning rate of a torch scheduler as a function of the number of steps.

    OneCycleLR raises an error if it is stepped beyond `total_steps`. For steps beyond `total_steps`, the returned function gives the
    learning rate of the last step. At `total_steps`, the learning rate of OneCycleLR can be negative. A negative learning rate is replaced
    by 0.
    """
    last = getattr(scheduler, "total_steps", None)
    scheduler._get_lr_called_within_step = True  # suppresses a warning meant for training loops

    def lr(now: int) -> float:
        if isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts):
            scheduler.step(now)
            return float(scheduler.get_last_lr()[0])
        scheduler.last_epoch = now if last is None or now <= last else int(last) - 1
        rates: Any = scheduler._get_closed_form_lr() if hasattr(scheduler, "_get_closed_form_lr") else scheduler.get_lr()
        return float(rates[0]) if last is None else max(float(rates[0]), 0.0)

    return lr


def build_lr_schedule(spec: LRSchedulerSpec, base_lr: float, path: str) -> LRSchedule:
    """Build the learning rate schedule that a spec describes.

    The schedule is a function of the frame, or of the number of training calls (see LRSchedulerSpec.counts_training_calls).

    Raises SpecError if the scheduler does not accept the arguments in the spec.
    """
    try:
        schedule = _build_schedule(spec, base_lr)
        schedule(0), schedule(1)  # a length of zero raises an error only when the schedule is called
    except ArithmeticError as error:
        why = f"{spec.name} {spec.kwargs}: the learning rate cannot be computed ({error}); give arguments greater than 0"
        raise SpecError("agent", [Problem(path, why)]) from error
    except (TypeError, ValueError) as error:
        raise SpecError("agent", [Problem(path, f"{spec.name} {spec.kwargs}: {error}")]) from error
    return schedule


def _build_schedule(spec: LRSchedulerSpec, base_lr: float) -> LRSchedule:
    if spec.name == "LinearToZero":
        return linear_to_min(base_lr, **spec.kwargs)
    if spec.name == "LinearToMin":
        return linear_to_min(base_lr, **{"min_factor": 0.1, **spec.kwargs})
    if spec.name not in SCHEDULERS:
        raise ValueError(f"unknown scheduler; expected one of {', '.join([*SCHEDULERS, 'LinearToZero', 'LinearToMin'])}")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base_lr)
    return torch_schedule(SCHEDULERS[spec.name](optimizer, **spec.kwargs))
