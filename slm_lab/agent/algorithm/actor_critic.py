"""Advantage actor-critic: A2C, or A3C if several processes train one net (arXiv:1602.01783)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.algorithm.on_policy import PolicyGradient, log_ratio
from slm_lab.agent.algorithm.value_scale import standardize_valid
from slm_lab.agent.ops.arrays import A, as_tensor, ignore_float_errors
from slm_lab.agent.ops.losses import policy_gradient_loss
from slm_lab.agent.ops.objective import ObjectiveCoefficients, ObjectiveTerms, explained_variance
from slm_lab.agent.ops.returns import gae, nstep_returns, vtrace
from slm_lab.agent.rollout.minibatch import Minibatch, RolloutBatch, RolloutOutputs, compute_critic_outputs, single_pass_outputs
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import ActorCriticSpec


class ActorCritic(PolicyGradient):
    """Advantage actor-critic, which takes one gradient step for each rollout.

    The policy loss weights the log-probabilities of actions by advantages. The critic is fitted to returns.
    """

    diagnostics = ("policy_loss", "value_loss", "explained_variance")
    in_closed_form = ("_objective", "_add_loss", "_advantages_and_targets", "scale_values", "value_std")

    spec: ActorCriticSpec

    @ignore_float_errors()
    def learn(self, rollout: Rollout) -> Metrics:  # Algorithm S3, with parallel envs in place of threads
        return self.meter.train_on_rollout(rollout.to(self.device), self._batch_with_advantages, self._add_loss)

    def _batch_with_advantages(self, rollout: Rollout) -> RolloutBatch:
        # advantages are computed in evaluation mode; a net with layers that behave differently in training mode needs a second pass
        result = None if self.trainer.mode_layers else single_pass_outputs(self.net, rollout, graph=self.closed_form is None)
        if result is None:
            result = rollout, compute_critic_outputs(self.net, rollout, self.seq_len, actor=self.spec.with_vtrace)
        steps, values = result
        return RolloutBatch(steps, values, *self._advantages_and_targets(steps, values), self.seq_len)

    def _advantages_and_targets(self, rollout: Rollout[A], values: RolloutOutputs[A]) -> tuple[A, A]:
        """Return the advantages [T, N] for the policy loss, and the targets [T, N] of the critic."""
        spec = self.spec
        value_TN, next_value_TN = values.output_TN, values.next_output_TN
        reward_TN, terminated_TN, done_TN = rollout.reward_TN, rollout.terminated_TN, rollout.done_TN
        rows = (reward_TN, value_TN, next_value_TN, terminated_TN, done_TN)
        rho_TN: A | None = None
        if spec.with_vtrace:
            lam = 1.0 if spec.lam is None else spec.lam
            ratio_TN = log_ratio(self.distribution, rollout, values)
            return_TN, advantage_TN, rho_TN = vtrace(ratio_TN, *rows, spec.gamma, lam, spec.rho_bar, spec.c_bar)
        elif spec.lam is not None:
            advantage_TN = gae(*rows, spec.gamma, spec.lam)
            return_TN = advantage_TN + value_TN
        else:
            steps = spec.num_step_returns or len(reward_TN)  # by default: returns to the end of the episode or rollout
            return_TN = nstep_returns(reward_TN, next_value_TN, terminated_TN, done_TN, spec.gamma, steps)
            advantage_TN = return_TN - value_TN
        self.meter.report(explained_variance=explained_variance(value_TN, return_TN, rollout.valid_TN))
        if spec.normalize_advantages:
            advantage_TN = standardize_valid(advantage_TN, rollout.valid_TN)
        if rho_TN is not None:  # multiply by ρ after the mean was subtracted: a baseline is unbiased only if it is weighted too
            advantage_TN = rho_TN * advantage_TN
        if self.deviation is not None:
            self.deviation.update(as_tensor(return_TN[rollout.valid_TN]))
        return advantage_TN, return_TN

    def _add_loss(self, batch: Minibatch[Any], weight: float) -> None:
        entropy_coef = self.entropy_schedule.value(self.clock.global_frame)
        coefs = ObjectiveCoefficients(self.spec.val_loss_coef, entropy_coef, self.spec.policy_loss_coef, value_std=self.value_std)
        terms = self.add_objective_gradient(
            lambda params_BP, value_B: self._objective(params_BP, value_B, batch, entropy_coef), batch, coefs, weight
        )
        self.meter.report_loss(terms.loss, weight, entropy=terms.entropy, policy_loss=terms.policy_loss, value_loss=terms.value_loss)

    def _objective(self, params_BP: Tensor, value_B: Tensor, batch: Minibatch, entropy_coef: float) -> ObjectiveTerms:
        logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
        entropy = entropy_B.mean()
        policy_loss = policy_gradient_loss(logp_B, batch.advantage_B)
        value_loss = self.value_loss(self.scale_values(value_B), self.scale_values(batch.target_B))
        loss = torch.add(self.spec.policy_loss_coef * policy_loss, value_loss, alpha=self.spec.val_loss_coef)
        return ObjectiveTerms(torch.sub(loss, entropy, alpha=entropy_coef), policy_loss, value_loss, entropy, logp_B)
