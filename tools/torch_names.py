"""Generate slm_lab/spec/models/torch_names.json: the names in torch that specs may use, with their arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

LOSSES = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")
"""Regression losses."""
NO_OPTIMIZER = ("Optimizer", "LBFGS", "SparseAdam")
NO_SCHEDULER = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR")
NO_ACTIVATION = ("MultiheadAttention", "Threshold", "GLU", "Softmax2d")
"""Activations that are not allowed, because they need arguments, change the number of units, or accept only images."""


def arguments(function: Callable[..., Any], skip: tuple[str, ...] = ("self",)) -> dict[str, bool]:
    """Return {argument name: whether the argument is required}; the name ** means that any argument is accepted."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.name not in skip and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    more = {"**": False} if any(p.kind == p.VAR_KEYWORD for p in parameters) else {}
    return {p.name: p.default is p.empty for p in named} | more


def names() -> dict[str, dict[str, dict[str, bool]]]:
    """Return {table: {name: {argument: whether the argument is required}}}."""
    import torch
    from torch import nn
    from torch.optim import lr_scheduler

    optimizers = {n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    schedulers = {n: getattr(lr_scheduler, n) for n in lr_scheduler.__all__ if n not in NO_SCHEDULER}
    activations = {n: getattr(nn, n) for n in (*nn.modules.activation.__all__, "Identity") if n not in NO_ACTIVATION}
    init = {n: f for n, f in vars(nn.init).items() if n.endswith("_") and not n.startswith("_") and inspect.isfunction(f)}
    layers = {n: c for n, c in vars(nn).items() if inspect.isclass(c) and issubclass(c, nn.Module) and c is not nn.Module}
    return {
        "OPTIMIZERS": {n: arguments(c, ("params",)) for n, c in optimizers.items() if n not in NO_OPTIMIZER},
        "SCHEDULERS": {n: arguments(c, ("optimizer", "last_epoch", "verbose")) for n, c in schedulers.items()},
        "LOSSES": {n: arguments(getattr(nn, n)) for n in LOSSES},
        "ACTIVATIONS": {n: arguments(c) for n, c in activations.items()},
        "INIT_FUNCTIONS": {n: arguments(f, ("tensor", "generator")) for n, f in init.items()},
        "LAYERS": {n: arguments(c) for n, c in layers.items()},
    }


def learning_rates() -> dict[str, float]:
    """Return {optimizer: default learning rate}."""
    import torch

    defaults = {name: inspect.signature(vars(torch.optim)[name]).parameters["lr"].default for name in names()["OPTIMIZERS"]}
    return {name: float(rate) for name, rate in sorted(defaults.items())}


def text() -> str:
    """Return the text of the file. Its keys begin with _, since they are not the names of specs."""
    tables: dict[str, Any] = {
        f"_{table.lower()}": {name: _words(args) for name, args in sorted(entries.items())} for table, entries in names().items()
    }
    return json.dumps({**tables, "_learning_rates": learning_rates()}, indent=1) + "\n"


def _words(args: dict[str, bool]) -> str:
    """Return the argument names, in which required arguments are marked with "!"."""
    return " ".join(name + "!" * must for name, must in args.items())
