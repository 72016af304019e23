"""Proximal policy optimisation (arXiv:1707.06347)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import Part
from slm_lab.agent.algorithm.on_policy import PolicyGradient, log_ratio
from slm_lab.agent.algorithm.value_scale import PercentileScale, standardize_valid
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.ops.losses import clipped_surrogate_loss, clipped_value_loss, symlog
from slm_lab.agent.ops.objective import Coefs, Terms, explained_variance, ratio_diagnostics
from slm_lab.agent.ops.returns import gae, standardize, vtrace
from slm_lab.agent.rollout.minibatch import Batch, Minibatch, critic_outputs
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import PPOSpec


class PPO(PolicyGradient):
    """Several epochs over each rollout; the clipped objective keeps the policy close to the behaviour policy."""

    diagnostics = ("policy_loss", "value_loss", "approx_kl", "clip_fraction", "explained_variance")
    in_closed_form = ("_objective", "_value_loss", "scaled", "value_std")

    spec: PPOSpec
    rng: np.random.Generator
    """Random stream of the minibatch order."""

    def build(self) -> None:
        super().build()
        self.percentile = PercentileScale()
        self.rng = np.random.default_rng(self.seeds.update)

    def learn(self, rollout: Rollout) -> Metrics:  # Algorithm 1 after the rollouts are collected
        frame = self.clock.global_frame
        clip_eps, entropy_coef = self.spec.clip_eps_spec.value(frame), self.entropy_schedule.value(frame)
        batch, explained = self._with_advantages(rollout.to(self.device))
        logps: list[Tensor] = []
        old_logps: list[Tensor] = []
        self.meter.begin()
        with ignore_float_errors():
            for minibatch in batch.epochs(self.spec.training_epoch, self.spec.minibatch_size, self.rng):
                logps.append(self._step(minibatch, clip_eps, entropy_coef))
                old_logps.append(minibatch.logp_B)
        metrics = self.meter.end()
        approx_kl, clip_fraction = ratio_diagnostics(logps, old_logps, clip_eps)
        metrics.extra |= {"approx_kl": approx_kl, "clip_fraction": clip_fraction, "explained_variance": explained}
        return metrics

    def _with_advantages(self, rollout: Rollout) -> tuple[Batch, float]:
        """Return the rollout with advantages Â (eq. 11) and value targets, and the critic's explained variance."""
        spec, valid_TN = self.spec, rollout.valid_TN
        values = critic_outputs(self.net, rollout, self.seq_len, actor=spec.with_vtrace)
        value_TN = values.output_TN
        rows = (rollout.reward_TN, value_TN, values.next_output_TN, rollout.terminated_TN, rollout.done_TN)
        if spec.with_vtrace:  # not weighted by ρ: the surrogate contains the ratio to the behaviour policy
            ratio_TN = log_ratio(self.distribution, rollout, values)
            return_TN, advantage_TN, _ = vtrace(ratio_TN, *rows, spec.gamma, spec.lam, spec.rho_bar, spec.c_bar)
        else:
            advantage_TN = gae(*rows, spec.gamma, spec.lam)
            return_TN = advantage_TN + value_TN
        explained = explained_variance(value_TN, return_TN, valid_TN)
        if spec.normalize_advantages == "rollout":
            advantage_TN = standardize_valid(advantage_TN, valid_TN)
        return Batch(rollout, values, advantage_TN, return_TN, self.seq_len), explained

    def _step(self, batch: Minibatch, clip_eps: float, entropy_coef: float) -> Tensor:
        """Take a gradient step on eq. 9; return log π(a|s) [B] from before the step."""
        spec = self.spec
        if spec.normalize_advantages in (True, "standardize"):
            batch = replace(batch, advantage_B=standardize(batch.advantage_B))
        elif spec.normalize_advantages == "percentile":
            batch = replace(batch, advantage_B=self.percentile(batch.advantage_B))
        if self.deviation is not None:
            self.deviation.update(symlog(batch.target_B) if spec.symlog else batch.target_B)
        coefs = Coefs(spec.val_loss_coef, entropy_coef, clip_eps=clip_eps, value_std=self.value_std)
        terms = self.propagate(lambda params_BP, value_B: self._objective(params_BP, value_B, batch, clip_eps, entropy_coef), batch, coefs)
        self.meter.report_loss(terms.loss, entropy=terms.entropy, policy_loss=terms.policy_loss, value_loss=terms.value_loss)
        self.meter.step()
        return terms.logp_B

    def _has_closed_form(self) -> bool:
        return super()._has_closed_form() and not self.spec.clip_vloss and not self.spec.symlog

    def _objective(self, params_BP: Tensor, value_B: Tensor, batch: Minibatch, clip_eps: float, entropy_coef: float) -> Terms:
        logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
        entropy = entropy_B.mean()
        policy_loss = clipped_surrogate_loss(logp_B, batch.logp_B, batch.advantage_B, clip_eps)  # eq. 7
        value_loss = self._value_loss(value_B, batch, clip_eps)
        loss = torch.add(policy_loss, value_loss, alpha=self.spec.val_loss_coef)
        if entropy_coef:
            loss = torch.sub(loss, entropy, alpha=entropy_coef)
        return Terms(loss, policy_loss, value_loss, entropy, logp_B)

    def _value_loss(self, value_B: Tensor, batch: Minibatch, clip_eps: float) -> Tensor:
        old_value_B, target_B = batch.value_B, batch.target_B
        if self.spec.symlog:
            value_B, old_value_B, target_B = symlog(value_B), symlog(old_value_B), symlog(target_B)
        if self.spec.clip_vloss:
            return clipped_value_loss(value_B, old_value_B, target_B, clip_eps)
        return self.value_loss(self.scaled(value_B), self.scaled(target_B))

    def parts(self) -> dict[str, Part]:
        return {**super().parts(), "percentile": self.percentile}
