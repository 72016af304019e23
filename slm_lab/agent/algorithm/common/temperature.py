"""The temperature of soft actor-critic: the weight of the entropy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.optim.optimizers import build_optimizer, shared_statistics
from slm_lab.agent.optim.trainer import Group
from slm_lab.lib.records import ActionSpace, EnvInfo
from slm_lab.lib.store import Arrays, Named, SharedArray, Store, several
from slm_lab.spec.models.algorithm import EntropyAnneal, SoftActorCriticSpec
from slm_lab.spec.models.net import SHAPED, OptimSpec

LARGEST_GRADIENT = 1e15
"""Gradient beyond which a step is skipped: its square would overflow in the optimizer's statistics."""


class Temperature:
    """α, the weight of the entropy: tuned until the policy has the target entropy (arXiv:1812.05905, section 5), or fixed.

    On a CUDA device it is computed there, so that nothing waits for the entropies; shared by several processes it is on the CPU.

    Args: actor: its optimizer and learning rate schedule are those of log α too, with the initial learning rate alpha_lr if that is given.
    """

    def __init__(self, spec: SoftActorCriticSpec, info: EnvInfo, actor: Group, device: str = "cpu") -> None:
        self.spec, anneal = spec, spec.entropy_anneal
        # Muon and Adafactor need matrices
        self._optim = actor.optim if actor.optim.name not in SHAPED else OptimSpec(name="Adam", lr=actor.optim.rate)
        self._actor, self._lr_at = actor, actor.schedule(spec.alpha_lr or actor.optim.rate)
        own = isinstance(anneal, EntropyAnneal) and anneal.frames
        self.anneal_frames = own or info.max_frame
        """Frames until the target entropy has its last value: a number of global frames, or those of the run."""
        self._of_run = not own
        self.begin, self.end = target_entropies(spec, info.action)
        self._store: Store | None = None
        self._use(torch.zeros(1, device=device).clamp_(spec.log_alpha_min, spec.log_alpha_max))

    def _use(self, log_alpha: Tensor) -> None:
        self.log_alpha, self.grad = log_alpha, torch.zeros_like(log_alpha)
        self._deferred = self._store is None and is_asynchronous(log_alpha)
        self.optimizer = build_optimizer(self._optim, [log_alpha], self.grad, self._actor.path)

    def shared_arrays(self) -> Named:
        statistics = {f"optim/{name}": array for name, array in shared_statistics(self.optimizer.statistics).items()}
        return {"log_alpha": SharedArray(self.log_alpha.cpu().numpy(), "step"), **statistics}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._store = store
        self.anneal_frames *= store.workers if self._of_run else 1
        self._use(torch.from_numpy(arrays["log_alpha"]))
        self.optimizer.use_statistics({name.removeprefix("optim/"): array for name, array in arrays.items() if name != "log_alpha"})

    def value(self, frame: int) -> Tensor | float:
        """Return α at a frame."""
        if self.spec.fixed_alpha is None:
            if self._deferred:
                return self.log_alpha[0].exp()
            return math.exp(self.log_alpha.item())
        left = 1.0 - frame / self.spec.alpha_anneal_frames if self.spec.alpha_anneal_frames else 1.0
        return self.spec.fixed_alpha * max(left, 0.0)

    def target_entropy(self, frame: int) -> float:
        """Return the target entropy at a frame, in nats."""
        return self.begin + (self.end - self.begin) * min(frame / self.anneal_frames, 1.0)

    def step(self, entropy: Tensor | float, frame: int) -> None:
        """Take one gradient step towards the target entropy, given the policy's entropy []."""
        if self.spec.fixed_alpha is not None:
            return
        gap, lr = entropy - self.target_entropy(frame), self._actor.rate(self._lr_at)
        if isinstance(gap, Tensor):
            torch.mul(self.log_alpha.exp(), gap, out=self.grad)
            self.optimizer.lr = lr
            self.optimizer.step_unless(~(self.grad[0].abs() < LARGEST_GRADIENT))
            self.log_alpha.clamp_(self.spec.log_alpha_min, self.spec.log_alpha_max)
        elif self._store is None:
            self._step(gap, lr)
        else:
            self._store.run("update", self._step, gap, lr)

    def _step(self, gap: float, lr: float) -> None:
        # eq. 18; its derivative by log α, with which α stays positive, is α times the distance to the target
        grad = math.exp(self.log_alpha.item()) * gap
        if not abs(grad) < LARGEST_GRADIENT:  # NaN too
            return
        self.grad.fill_(grad)
        self.optimizer.lr = lr
        self.optimizer.step()
        self.log_alpha.clamp_(self.spec.log_alpha_min, self.spec.log_alpha_max)

    def state_dict(self) -> dict[str, Any]:
        """Return log α and the optimizer; if several processes train, what they do not share of the optimizer."""
        if self._store is not None and self._store.remote:
            return self._store.run("update", self.state_dict)
        if several(self._store):
            return {} if self.optimizer.statistics else {"optimizer": self.optimizer.state_dict()}
        return {"log_alpha": self.log_alpha.to("cpu", copy=True), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._store is not None and self._store.remote:
            self._store.run("update", self.load_state_dict, state)
        if "log_alpha" in state:
            self.log_alpha.copy_(state["log_alpha"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])


def target_entropies(spec: SoftActorCriticSpec, action: ActionSpace) -> tuple[float, float]:
    """Return the target entropy at the first frame and at the last, in nats."""
    discrete, anneal = action.kind == "discrete", spec.entropy_anneal
    if isinstance(anneal, EntropyAnneal) and not discrete:  # no effect, see fit.check_soft_actor_critic
        anneal = False
    if isinstance(anneal, EntropyAnneal):
        most = math.log(action.nvec[0])
        start = spec.target_entropy_ratio if anneal.start_ratio is None else anneal.start_ratio
        return start * most, (anneal.end_ratio if anneal.end_ratio is not None and anneal.frames else start) * most
    auto = spec.target_entropy_ratio * math.log(action.nvec[0]) if discrete else -float(action.dim)
    begin = auto if spec.target_entropy == "auto" else spec.target_entropy
    if anneal is False:
        return begin, begin
    return begin, (0.0 if discrete else -2.0 * action.dim) if anneal is True else anneal
