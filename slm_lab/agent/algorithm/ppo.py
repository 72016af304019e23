"""Proximal policy optimisation (arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.algorithm.adaptive_lr import AdaptiveLearningRate
from slm_lab.agent.algorithm.base import TrainablePart
from slm_lab.agent.algorithm.on_policy import PolicyGradient, log_ratio
from slm_lab.agent.algorithm.value_scale import PercentileScale, ValueNormalizer, standardize_valid
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.ops.distributions import Normal
from slm_lab.agent.ops.losses import bounds_loss, clipped_surrogate_loss, clipped_value_loss, symlog
from slm_lab.agent.ops.objective import ObjectiveCoefficients, ObjectiveTerms, explained_variance, ratio_diagnostics
from slm_lab.agent.ops.returns import gae, standardize, vtrace
from slm_lab.agent.rollout.minibatch import Minibatch, RolloutBatch, compute_critic_outputs
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import PPOSpec
from slm_lab.spec.report import Problem, SpecError


@dataclass
class MinibatchLogProbs:
    """Log-probabilities log π(a|s) of the actions in the minibatches of an update, in one tensor [B] for each minibatch.

    `logps` were computed before the gradient step on the minibatch. `old_logps` were computed when the policy chose the actions.
    """

    logps: list[Tensor] = field(default_factory=list)
    old_logps: list[Tensor] = field(default_factory=list)
    last_epoch: int = 0
    """Index of the first minibatch of the last epoch."""

    def add(self, logp_B: Tensor, old_logp_B: Tensor) -> None:
        self.logps.append(logp_B)
        self.old_logps.append(old_logp_B)

    def diagnostics(self, clip_eps: float, begin: int = 0) -> tuple[float, float]:
        """Return the diagnostics (approx_kl, clip_fraction), computed over the minibatches from index `begin` on."""
        return ratio_diagnostics(self.logps[begin:], self.old_logps[begin:], clip_eps)


class PPO(PolicyGradient):
    """Proximal policy optimisation with the clipped objective, which keeps the policy close to the behaviour policy.

    Each rollout is used for several epochs of minibatches.
    """

    diagnostics: tuple[str, ...] = ("policy_loss", "value_loss", "approx_kl", "clip_fraction", "explained_variance")
    in_closed_form = ("_objective", "_value_loss", "scale_values", "value_std")

    spec: PPOSpec
    rng: np.random.Generator
    """Random stream of the minibatch order."""

    def build(self) -> None:
        super().build()
        spec, self.percentile = self.spec, PercentileScale()
        self.value_statistics = ValueNormalizer() if spec.normalize_values else None
        self.rate = None if spec.adaptive_lr is None else AdaptiveLearningRate(spec.adaptive_lr, self.trainer.groups[0].optim.learning_rate)
        self.rng = np.random.default_rng(self.seeds.update)
        if not spec.bounds_loss_coef:
            return
        self.diagnostics = (*self.diagnostics, "bounds_loss")
        if type(self.distribution) is not Normal or not self.info.action.bounded:
            message = "needs the distribution Normal over bounded continuous actions; set 0"
            raise SpecError("agent", [Problem("agent.algorithm.bounds_loss_coef", message)])

    def learn(self, rollout: Rollout) -> Metrics:  # Algorithm 1 after the rollouts are collected
        frame = self.clock.global_frame
        clip_eps, entropy_coef = self.spec.clip_eps_spec.value(frame), self.entropy_schedule.value(frame)
        rollout = rollout.to(self.device)
        batch, explained = self._batch_with_advantages(rollout)
        if self.rate is not None:
            self.trainer.lr_factor = self.tuning.lr * self.rate.factor
        steps = MinibatchLogProbs()
        self.meter.begin()
        with ignore_float_errors():
            for minibatch in self._minibatches(rollout, batch, steps):
                if not self._step(minibatch, clip_eps, entropy_coef, steps):
                    break
        metrics = self.meter.end()
        if self.rate is not None and len(steps.logps) > 1:  # before the first gradient step, the policy has not changed
            self.rate.adapt_lr(steps.diagnostics(clip_eps, steps.last_epoch)[0])
        approx_kl, clip_fraction = steps.diagnostics(clip_eps)
        metrics.extra |= {"approx_kl": approx_kl, "clip_fraction": clip_fraction, "explained_variance": explained}
        return metrics

    def _minibatches(self, rollout: Rollout, batch: RolloutBatch, steps: MinibatchLogProbs) -> Iterator[Minibatch]:
        """Yield the minibatches of all epochs.

        If the spec key recompute_advantages is true, advantages are recomputed before each epoch except the first.
        """
        for epoch in range(self.spec.training_epoch):
            if epoch and self.spec.recompute_advantages:
                self.trainer.set_train_mode(False)
                batch, _ = self._batch_with_advantages(rollout, again=True)
                self.trainer.set_train_mode(True)
            steps.last_epoch = len(steps.logps)
            yield from batch.epoch_minibatches(1, self.spec.minibatch_size, self.rng)

    def _batch_with_advantages(self, rollout: Rollout, again: bool = False) -> tuple[RolloutBatch, float]:
        """Return the rollout with advantages Â (equation 11) and value targets, and the explained variance of the critic.

        Args: again: whether this method was already called for the same rollout, so that the value normaliser is not updated again.
        """
        spec, valid_TN, normalizer = self.spec, rollout.valid_TN, self.value_statistics
        values = compute_critic_outputs(self.net, rollout, self.seq_len, actor=spec.with_vtrace)
        if normalizer is not None:
            outputs = normalizer.denormalize(values.output_TN), normalizer.denormalize(values.next_output_TN)
            values = replace(values, output_TN=outputs[0], next_output_TN=outputs[1])
        value_TN = values.output_TN
        rows = (rollout.reward_TN, value_TN, values.next_output_TN, rollout.terminated_TN, rollout.done_TN)
        if spec.with_vtrace:  # advantages are not weighted by ρ: the surrogate contains the ratio already
            ratio_TN = log_ratio(self.distribution, rollout, values)
            return_TN, advantage_TN, _ = vtrace(ratio_TN, *rows, spec.gamma, spec.lam, spec.rho_bar, spec.c_bar)
        else:
            advantage_TN = gae(*rows, spec.gamma, spec.lam)
            return_TN = advantage_TN + value_TN
        explained = explained_variance(value_TN, return_TN, valid_TN)
        if spec.normalize_advantages == "rollout":
            advantage_TN = standardize_valid(advantage_TN, valid_TN)
        if normalizer is not None:
            if not again:
                normalizer.update(return_TN[valid_TN])
            values, return_TN = replace(values, output_TN=normalizer.normalize(value_TN)), normalizer.normalize(return_TN)
        return RolloutBatch(rollout, values, advantage_TN, return_TN, self.seq_len), explained

    def _step(self, batch: Minibatch, clip_eps: float, entropy_coef: float, steps: MinibatchLogProbs) -> bool:
        """Take a gradient step on the loss (equation 9), unless the policy has changed more than target_kl allows.

        Returns whether the gradient step was taken.
        """
        spec = self.spec
        if spec.normalize_advantages in (True, "standardize"):
            batch = replace(batch, advantage_B=standardize(batch.advantage_B))
        elif spec.normalize_advantages == "percentile":
            batch = replace(batch, advantage_B=self.percentile(batch.advantage_B))
        if self.deviation is not None:
            self.deviation.update(symlog(batch.target_B) if spec.symlog else batch.target_B)
        coefs = ObjectiveCoefficients(
            spec.val_loss_coef, entropy_coef, 1.0, clip_eps, self.value_std, spec.dual_clip, spec.bounds_loss_coef
        )
        terms = self.add_objective_gradient(
            lambda params_BP, value_B: self._objective(params_BP, value_B, batch, clip_eps, entropy_coef), batch, coefs
        )
        steps.add(terms.logp_B, batch.logp_B)
        if spec.target_kl is not None and len(steps.logps) > 1 and steps.diagnostics(clip_eps, -1)[0] > 1.5 * spec.target_kl:
            self.trainer.discard_gradient()
            return False
        self.meter.report_loss(terms.loss, entropy=terms.entropy, policy_loss=terms.policy_loss, value_loss=terms.value_loss)
        if spec.bounds_loss_coef:
            self.meter.report(bounds_loss=terms.bounds_loss)
        self.meter.step()
        return True

    def _has_closed_form(self) -> bool:
        return super()._has_closed_form() and not self.spec.clip_vloss and not self.spec.symlog

    def _objective(self, params_BP: Tensor, value_B: Tensor, batch: Minibatch, clip_eps: float, entropy_coef: float) -> ObjectiveTerms:
        spec, (logp_B, entropy_B) = self.spec, self.distribution.evaluate(params_BP, batch.action_B)
        entropy = entropy_B.mean()
        policy_loss = clipped_surrogate_loss(logp_B, batch.logp_B, batch.advantage_B, clip_eps, spec.dual_clip)  # eq. 7
        value_loss = self._value_loss(value_B, batch, clip_eps)
        loss = torch.add(policy_loss, value_loss, alpha=spec.val_loss_coef)
        if entropy_coef:
            loss = torch.sub(loss, entropy, alpha=entropy_coef)
        if not spec.bounds_loss_coef:
            return ObjectiveTerms(loss, policy_loss, value_loss, entropy, logp_B)
        assert isinstance(self.distribution, Normal)
        outside = bounds_loss(self.distribution.loc_and_log_scale(params_BP)[0])
        return ObjectiveTerms(torch.add(loss, outside, alpha=spec.bounds_loss_coef), policy_loss, value_loss, entropy, logp_B, outside)

    def _value_loss(self, value_B: Tensor, batch: Minibatch, clip_eps: float) -> Tensor:
        old_value_B, target_B = batch.value_B, batch.target_B
        if self.spec.symlog:
            value_B, old_value_B, target_B = symlog(value_B), symlog(old_value_B), symlog(target_B)
        if self.spec.clip_vloss:
            return clipped_value_loss(value_B, old_value_B, target_B, clip_eps)
        return self.value_loss(self.scale_values(value_B), self.scale_values(target_B))

    def parts(self) -> dict[str, TrainablePart]:
        parts = {"percentile": self.percentile, "normalizer": self.value_statistics, "rate": self.rate}
        return super().parts() | {name: part for name, part in parts.items() if part is not None}
