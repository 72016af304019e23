"""Optimizers by the names that specs use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slm_lab.lib.log import notice
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.net import OptimSpec


class Lookahead(Optimizer):
    """k steps forward, one step back (arXiv:1907.08610, Algorithm 1) around another optimizer.

    Args: optimizer: name of the inner one; k: its steps between two pulls; alpha: how far the slow weights follow.
    The rest goes to the inner optimizer.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, optimizer: str = "RAdam", k: int = 5, alpha: float = 0.5, **kwargs: Any) -> None:
        if not 0.0 < alpha <= 1.0 or k < 1:
            raise ValueError(f"Lookahead needs k ≥ 1 and 0 < alpha ≤ 1, got k={k}, alpha={alpha}")
        if optimizer not in OPTIMIZERS or optimizer == "Lookahead":
            raise ValueError(f"Lookahead's optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.inner = OPTIMIZERS[optimizer](params, lr=lr, **kwargs)
        self.param_groups = self.inner.param_groups
        self.k, self.alpha, self.steps = k, alpha, 0
        self.slow = [p.detach().clone() for p in params]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        loss = self.inner.step() if closure is None else self.inner.step(closure)
        self.steps += 1
        if self.steps % self.k == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow += self.alpha * (p - slow)
                p.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": [s.clone() for s in self.slow], "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups = self.inner.param_groups
        self.steps = int(state["steps"])
        for slow, saved in zip(self.slow, state["slow"], strict=True):
            slow.copy_(saved)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    name: vars(torch.optim)[name]
    for name in ("Adafactor", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
} | {"Lookahead": Lookahead, "GlobalAdam": torch.optim.Adam, "GlobalRMSprop": torch.optim.RMSprop}
"""Name → optimizer. The Global ones are Adam and RMSprop until several Sessions share them."""

FUSED = {"Adam", "AdamW", "SGD", "Adagrad", "GlobalAdam"}
"""Those that have one kernel for the whole step."""

SHAPED = {"Muon", "Adafactor"}
"""Those that look at the shapes of parameters: they get the originals instead of one flat vector."""


def build_optimizer(spec: OptimSpec, params: list[Tensor], path: str) -> Optimizer:
    """The optimizer over `params`. Raises SpecError where it does not take its arguments."""
    if spec.name not in OPTIMIZERS:
        raise SpecError("agent", [Problem(f"{path}.name", f"{spec.name!r} is none of {', '.join(OPTIMIZERS)}")])
    if spec.name.startswith("Global"):
        notice(f"{path}: {spec.name} without meta.distributed is plain {spec.name.removeprefix('Global')}")
    kwargs = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.kwargs.items()}
    if spec.name in FUSED:
        kwargs.setdefault("fused", True)
    try:
        return OPTIMIZERS[spec.name](params, lr=spec.lr, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError("agent", [Problem(path, f"{spec.name}: {error}")]) from error
