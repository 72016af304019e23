"""The weight of the entropy in soft actor-critic, and what it is tuned to."""

from __future__ import annotations

import math
from typing import Any

import torch

from slm_lab.agent.optim.flat import placed
from slm_lab.agent.optim.optimizers import FlatAdam
from slm_lab.lib.heap import PRIVATE, Heap
from slm_lab.lib.records import ActionSpace, EnvInfo
from slm_lab.spec.algorithm import SoftActorCriticSpec


class Temperature:
    """α, the weight of the entropy: tuned until the policy has the target entropy (arXiv:1812.05905, section 5), or fixed."""

    def __init__(self, spec: SoftActorCriticSpec, info: EnvInfo, heap: Heap = PRIVATE) -> None:
        self.spec, self.max_frame = spec, info.max_frame * heap.sessions
        self.begin, self.end = target_entropies(spec, info.action)
        self.log_alpha = placed(heap, torch.zeros(1).clamp_(spec.log_alpha_min, spec.log_alpha_max))
        self.grad = torch.zeros(1)
        self.optimizer = FlatAdam(self.log_alpha, self.grad, spec.alpha_lr or 1e-3)
        self.optimizer.share(heap)
        self.heap = heap

    def value(self, frame: int) -> float:
        """α now."""
        if self.spec.fixed_alpha is None:
            return math.exp(self.log_alpha.item())
        left = 1.0 - frame / self.spec.alpha_anneal_frames if self.spec.alpha_anneal_frames else 1.0
        return self.spec.fixed_alpha * max(left, 0.0)

    def target_entropy(self, frame: int) -> float:
        """In nats."""
        return self.begin + (self.end - self.begin) * min(frame / self.max_frame, 1.0)

    def step(self, entropy: float, frame: int, lr: float) -> None:
        """One gradient step towards the target entropy, given the policy's own. `lr`: where alpha_lr does not say."""
        if self.spec.fixed_alpha is not None or not math.isfinite(entropy):
            return
        # eq. 18, by log α in place of α: the derivative of -log α · (log π + H) is the distance to the target
        self.grad.fill_(entropy - self.target_entropy(frame))
        self.optimizer.lr = self.spec.alpha_lr or lr
        with self.heap.update():
            self.optimizer.step()
            self.log_alpha.clamp_(self.spec.log_alpha_min, self.spec.log_alpha_max)

    def state_dict(self) -> dict[str, Any]:
        return {"log_alpha": self.log_alpha.clone(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log_alpha.copy_(state["log_alpha"])
        self.optimizer.load_state_dict(state["optimizer"])


def target_entropies(spec: SoftActorCriticSpec, action: ActionSpace) -> tuple[float, float]:
    """The target entropy at the first frame and at the last, in nats."""
    discrete = action.kind == "discrete"
    auto = 0.98 * math.log(action.nvec[0]) if discrete else -float(action.dim)
    begin = auto if spec.target_entropy == "auto" else spec.target_entropy
    if spec.entropy_anneal is False:
        return begin, begin
    return begin, (0.0 if discrete else -2.0 * action.dim) if spec.entropy_anneal is True else spec.entropy_anneal
