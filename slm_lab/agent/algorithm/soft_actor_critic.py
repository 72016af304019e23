"""Soft actor-critic (arXiv:1812.05905, and arXiv:1910.07207 for discrete actions) and its temperature, the weight of the entropy.

CrossQ (arXiv:1902.05605) is soft actor-critic without target nets.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import TrainablePart
from slm_lab.agent.algorithm.replay_actor_critic import ActorReport, AnyBatch, CriticPass, ReplayActorCritic
from slm_lab.agent.net.passes.validity import add_gradient
from slm_lab.agent.net.q_nets import QCritics, build_critics
from slm_lab.agent.ops.arrays import as_tensor, as_type_of
from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.ops.distributions import SquashedNormal, SquashedSample
from slm_lab.agent.ops.objective import REDUCTIONS, discrete_actor_loss, discrete_soft_value, reduction_gradient
from slm_lab.agent.ops.targets import action_value, action_value_gradient
from slm_lab.agent.optim.optimizers import build_optimizer, shared_statistics
from slm_lab.agent.optim.trainer import OptimizerGroup
from slm_lab.lib.records import ActionSpace, EnvInfo, Metrics
from slm_lab.lib.store import Arrays, Named, SharedArray, Store, is_shared
from slm_lab.spec.models.algorithm import EntropyAnneal, SoftActorCriticSpec
from slm_lab.spec.models.net import SHAPED, NetSpec, OptimSpec

LARGEST_GRADIENT = 1e15
"""Maximum absolute gradient of log α. Steps with greater gradients are skipped, because the squares of these gradients could overflow in
the optimizer's statistics."""


class Temperature:
    """Temperature α of soft actor-critic, which is the weight of the entropy.

    The spec fixes α or a schedule of α, or α is tuned so that the entropy of the policy stays near a target entropy (arXiv:1812.05905,
    section 5). If the net is on a CUDA device, α is computed on this device, so that the host does not wait for the entropies. If several
    processes share α, α is on the CPU.

    Args: actor: optimizer group of the actor. log α uses the optimizer and the learning rate schedule of this group. The spec key alpha_lr
    replaces the initial learning rate of log α.
    """

    def __init__(self, spec: SoftActorCriticSpec, info: EnvInfo, actor: OptimizerGroup, device: str = "cpu") -> None:
        self.spec, anneal = spec, spec.entropy_anneal
        # Muon and Adafactor support only matrices
        self._optim = actor.optim if actor.optim.name not in SHAPED else OptimSpec(name="Adam", lr=actor.optim.learning_rate)
        self._actor, self._lr_at = actor, actor.schedule(spec.alpha_lr or actor.optim.learning_rate)
        frames = isinstance(anneal, EntropyAnneal) and anneal.frames
        self.anneal_frames = frames or info.max_frame
        """Number of global frames until the target entropy reaches its last value. The default is the number of frames of the run."""
        self._anneals_over_run = not frames
        self.begin, self.end = target_entropies(spec, info.action)
        self._store: Store | None = None
        self._initial = min(max(math.log(spec.initial_alpha), spec.log_alpha_min), spec.log_alpha_max)
        self._set_log_alpha(torch.full((1,), self._initial, device=device))

    def reset(self) -> None:
        """Reset α and the optimizer of log α to their initial state."""
        self._set_log_alpha(torch.full_like(self.log_alpha, self._initial))

    def _set_log_alpha(self, log_alpha: Tensor) -> None:
        self.log_alpha, self.grad = log_alpha, torch.zeros_like(log_alpha)
        self._deferred = self._store is None and is_asynchronous(log_alpha)
        self.optimizer = build_optimizer(self._optim, [log_alpha], self.grad, self._actor.path)

    def shared_arrays(self) -> Named:
        statistics = {f"optim/{name}": array for name, array in shared_statistics(self.optimizer.statistics).items()}
        return {"log_alpha": SharedArray(self.log_alpha.cpu().numpy(), "step"), **statistics}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._store = store
        self.anneal_frames *= store.workers if self._anneals_over_run else 1
        self._set_log_alpha(torch.from_numpy(arrays["log_alpha"]))
        self.optimizer.use_statistics({name.removeprefix("optim/"): array for name, array in arrays.items() if name != "log_alpha"})

    def value(self, frame: int) -> Tensor | float:
        """Return the temperature α at `frame`, the number of frames of all processes."""
        if self.spec.fixed_alpha is None:
            if self._deferred:
                return self.log_alpha[0].exp()
            return math.exp(self.log_alpha.item())
        remaining = 1.0 - frame / self.spec.alpha_anneal_frames if self.spec.alpha_anneal_frames else 1.0
        return self.spec.fixed_alpha * max(remaining, 0.0)

    def target_entropy(self, frame: int) -> float:
        """Return the target entropy in nats at `frame`, the number of frames of all processes."""
        return self.begin + (self.end - self.begin) * min(frame / self.anneal_frames, 1.0)

    def step(self, entropy: Tensor | float, frame: int, scale: Tensor | float = 1.0) -> None:
        """Take one gradient step on log α towards the target entropy times `scale`, unless the spec fixes α.

        Args: entropy: mean entropy of the policy, a scalar.
        """
        if self.spec.fixed_alpha is not None:
            return
        gap, lr = entropy - self.target_entropy(frame) * scale, self._actor.current_lr(self._lr_at)
        if isinstance(gap, Tensor):
            torch.mul(self.log_alpha.exp(), gap, out=self.grad)
            self.optimizer.lr = lr
            self.optimizer.step_unless(~(self.grad[0].abs() < LARGEST_GRADIENT))
            self.log_alpha.clamp_(self.spec.log_alpha_min, self.spec.log_alpha_max)
        elif self._store is None:
            self._step(gap, lr)
        else:
            self._store.run_locked("update", self._step, gap, lr)

    def _step(self, gap: float, lr: float) -> None:
        # eq. 18; optimising log α keeps α positive; the derivative with respect to log α is α times (entropy − target entropy)
        grad = math.exp(self.log_alpha.item()) * gap
        if not abs(grad) < LARGEST_GRADIENT:  # a gradient of NaN is skipped too
            return
        self.grad.fill_(grad)
        self.optimizer.lr = lr
        self.optimizer.step()
        self.log_alpha.clamp_(self.spec.log_alpha_min, self.spec.log_alpha_max)

    def state_dict(self) -> dict[str, Any]:
        """Return log α and the state of the optimizer of log α.

        If several processes train the net, only the state that the processes do not share is returned.
        """
        if self._store is not None and self._store.remote:
            return self._store.run_locked("update", self.state_dict)
        if is_shared(self._store):
            return {} if self.optimizer.statistics else {"optimizer": self.optimizer.state_dict()}
        return {"log_alpha": self.log_alpha.to("cpu", copy=True), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._store is not None and self._store.remote:
            self._store.run_locked("update", self.load_state_dict, state)
        if "log_alpha" in state:
            self.log_alpha.copy_(state["log_alpha"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])


def target_entropies(spec: SoftActorCriticSpec, action: ActionSpace) -> tuple[float, float]:
    """Return the target entropies at the first and the last frame of annealing, in nats."""
    discrete, anneal = action.kind == "discrete", spec.entropy_anneal
    if isinstance(anneal, EntropyAnneal) and not discrete:  # no effect, see policy.check_soft_actor_critic
        anneal = False
    if isinstance(anneal, EntropyAnneal):
        maximum = math.log(action.nvec[0])
        start = spec.target_entropy_ratio if anneal.start_ratio is None else anneal.start_ratio
        return start * maximum, (anneal.end_ratio if anneal.end_ratio is not None and anneal.frames else start) * maximum
    auto = spec.target_entropy_ratio * math.log(action.nvec[0]) if discrete else -float(action.dim)
    begin = auto if spec.target_entropy == "auto" else spec.target_entropy
    if anneal is False:
        return begin, begin
    return begin, (0.0 if discrete else -2.0 * action.dim) if anneal is True else anneal


class JointCriticPass:
    """Forward pass of the critics over states and next states in one batch. The values of next states have no gradient."""

    def __init__(self, joint: CriticPass) -> None:
        self._joint = joint

    def backward(self, grad: Tensor) -> None:
        self._joint.backward(torch.cat((grad, torch.zeros_like(grad)), dim=1))


class SoftActorCritic(ReplayActorCritic):
    """Soft actor-critic, which learns a policy that maximises both reward and entropy (arXiv:1812.05905, Algorithm 1).

    CrossQ differs from soft actor-critic only in its critics, which process states and next states in one batch, so that the batch
    statistics cover both. The critics of CrossQ need no target net (arXiv:1902.05605, equation 2).
    """

    diagnostics = ("critic_loss", "actor_loss", "alpha", "q_mean")

    spec: SoftActorCriticSpec

    def build(self) -> None:
        self.discrete = self.info.action.kind == "discrete"
        super().build()
        self.reduction: str = self.spec.critic_reduction or ("mean" if self.discrete else "min")
        self.reduce = REDUCTIONS[self.reduction]
        self.temperature = Temperature(self.spec, self.info, self.actor_trainer.groups[0], self.device)
        self.mean_entropy: Tensor | None = None
        """Moving average of the policy's entropy, a scalar, or None before the actor's first gradient step. The moving average is used only
        with the spec key entropy_penalty_coef."""

    def build_critics(self, spec: NetSpec) -> QCritics:
        return build_critics(spec, self.info.observation, self.info.action, self.spec.spectral_norm)

    def values_and_targets(self, batch: AnyBatch) -> tuple[CriticPass, Tensor, Tensor]:
        outputs, q, next_value_B = (self._discrete_values if self.discrete else self._continuous_values)(batch)
        return outputs, q, self.td_target(batch, next_value_B)  # eq. 6

    def _current_and_next_values(self, batch: AnyBatch, next_action_BD: Tensor | None) -> tuple[CriticPass, Tensor, Tensor]:
        """Return the critics' forward pass, and the critics' outputs for the states s and the next states s'.

        The critics' outputs are [C, B] for continuous actions, and [C, B, A] for discrete actions.
        """
        action_BD = None if next_action_BD is None else batch.action_B
        if self.target is not None:
            target = self.target.net
            outputs = self.critics.forward_pass(self.critic_inputs(self.critics, batch, learn=True), action_BD)
            (next_q,) = target.forward_pass(self.critic_inputs(target, batch, for_next_obs=True), next_action_BD, learn=False).values
            return outputs, outputs.values[0], next_q
        both_BD = None if action_BD is None or next_action_BD is None else torch.cat((action_BD, next_action_BD))
        outputs = self.critics.forward_pass(torch.cat((batch.obs_B, batch.next_obs_B)), both_BD)
        q, next_q = outputs.values[0].split(len(batch.obs_B), dim=1)
        return JointCriticPass(outputs), q, next_q

    def _continuous_values(self, batch: AnyBatch) -> tuple[CriticPass, Tensor, Tensor]:
        """Return the critics' forward pass, Q(s, a) [C, B] and V(s') [B], for continuous actions."""
        next_action = self._sample_actions(self.actor_forward_pass(batch, learn=False).values[0])
        outputs, q_CB, next_q_CB = self._current_and_next_values(batch, as_tensor(next_action.action_BD))
        return outputs, q_CB, self._soft_value(next_q_CB, self.alpha * as_tensor(next_action.logp_B))

    def _soft_value(self, next_q_CB: Tensor, cost_B: Tensor) -> Tensor:
        """Return the soft values V(s') [B] of the next states, given the critics' outputs next_q_CB.

        Args: cost_B: α log π(a'|s').
        """
        return self.reduce(next_q_CB) - cost_B  # eq. 3

    def _discrete_values(self, batch: AnyBatch) -> tuple[CriticPass, Tensor, Tensor]:
        """Return the critics' forward pass, Q(s, ·) [C, B, A] and V(s') [B], for discrete actions."""
        next_params_BA = as_tensor(self.actor_forward_pass(batch, learn=False).values[0])
        outputs, q_CBA, next_q_CBA = self._current_and_next_values(batch, None)
        return outputs, q_CBA, discrete_soft_value(next_params_BA, self.reduce(next_q_CBA), self.alpha)

    def critic_loss(self, batch: AnyBatch, q: Tensor, target_B: Tensor) -> tuple[Tensor, Any, Tensor]:
        action_CB = batch.action_B.expand(len(q), -1) if self.discrete else None
        q_CB = q if action_CB is None else action_value(q, action_CB)
        compare = self.value_loss.symlog_with_gradient if self.spec.symlog else self.value_loss.with_gradient
        loss, grad_q_CB = compare(q_CB, target_B.expand_as(q_CB), len(target_B), batch.weight_B)
        return q_CB, loss, grad_q_CB if action_CB is None else action_value_gradient(q, action_CB, grad_q_CB)

    def _actor_step(self, batch: AnyBatch, q: Tensor) -> ActorReport:
        report = super()._actor_step(batch, q)
        self.temperature.step(report[1], self.clock.global_frame, self._entropy_scale(batch))
        return report

    def add_actor_gradient(self, batch: AnyBatch, q: Tensor) -> tuple[Tensor, Tensor]:
        return self._add_discrete_actor_gradient(batch, q) if self.discrete else self._add_continuous_actor_gradient(batch)

    def _add_continuous_actor_gradient(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Add the actor's gradient (equation 9) to `Parameter.grad`, and return the actor's loss and the entropy of the policy."""
        actor, B, alpha = self.actor_forward_pass(batch), len(batch.reward_B), self.alpha
        sample = self._sample_actions(actor.values[0])
        inputs_B = self.critic_inputs(self.critics, batch)
        critics = self.critics.forward_pass(inputs_B, as_tensor(sample.action_BD), for_action_grad=True)
        (q_CB,) = critics.values
        grad_action_BD = critics.input_grad(reduction_gradient(self.reduce, q_CB).mul_(-1.0 / B))
        grad_params_BP, grad_log_std_D = sample.parameter_gradient(as_type_of(sample.action_BD, grad_action_BD), alpha / B)
        actor.backward(grad_params_BP, None)
        if grad_log_std_D is not None:
            add_gradient(self.distribution.log_std, as_tensor(grad_log_std_D))
        entropy = -as_tensor(sample.logp_B).mean()
        return -alpha * entropy - self.reduce(q_CB).mean(), entropy

    def _add_discrete_actor_gradient(self, batch: AnyBatch, q_CBA: Tensor) -> tuple[Tensor, Tensor]:
        """Add the actor's gradient (arXiv:1910.07207, equation 12) to `Parameter.grad`.

        Returns the actor's loss and the entropy of the policy.

        Args: q_CBA: action values before the critics' gradient step. (Another pass of the critics, which would compute action values after
        the gradient step, would take a fifth of the time of an update.)
        """
        actor, penalty = self.actor_forward_pass(batch), self.spec.entropy_penalty_coef
        result = discrete_actor_loss(as_tensor(actor.values[0]), self.reduce(q_CBA), self.alpha, penalty, self.mean_entropy)
        self.mean_entropy = result.mean_entropy
        actor.backward(result.grad_params_BA, None)
        return result.loss, result.entropy

    def _entropy_scale(self, batch: AnyBatch) -> Tensor | float:
        """Return the maximum entropy with action masks, divided by the maximum entropy without masks.

        The ratio of the maximum entropies is the batch mean of ln(number of valid actions) / ln|A|. The returned ratio is 1 without masks,
        and for a target entropy that the spec gives in nats (`target_entropy`).
        """
        mask = self.net.mask
        if mask is None or (self.spec.target_entropy != "auto" and not isinstance(self.spec.entropy_anneal, EntropyAnneal)):
            return 1.0
        scale = mask.valid_choices(batch.obs_B).sum(1).clamp(min=1).log().mean() / math.log(self.info.action.nvec[0])
        return scale if is_asynchronous(scale) else scale.item()

    def _sample_actions(self, params_BP: Any) -> SquashedSample:
        """Sample actions [B, D], given the distribution parameters [B, P]."""
        assert isinstance(self.distribution, SquashedNormal)
        return self.distribution.rsample(params_BP, self.sample_action_noise(len(params_BP), params_BP))

    def finish_update_metrics(self, reports: list[ActorReport]) -> Metrics:
        metrics = super().finish_update_metrics(reports)
        metrics.extra["alpha"] = self.entropy_coef
        return metrics

    def reset(self) -> None:
        super().reset()
        self.temperature.reset()
        self.mean_entropy = None

    @property
    def alpha(self) -> Tensor | float:
        """Current temperature α."""
        return self.temperature.value(self.clock.global_frame)

    @property
    def entropy_coef(self) -> float:
        """Current temperature α, which is the weight of the entropy."""
        return float(self.alpha)

    def parts(self) -> dict[str, TrainablePart]:
        return {**super().parts(), "temperature": self.temperature}

    def state_dict(self) -> dict[str, Any]:
        entropy = None if self.mean_entropy is None else self.mean_entropy.to("cpu", copy=True)
        return {**super().state_dict(), "mean_entropy": entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        entropy = state["mean_entropy"]
        self.mean_entropy = None if entropy is None else entropy.to(self.device, copy=True)
