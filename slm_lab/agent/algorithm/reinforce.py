"""REINFORCE, the Monte Carlo policy gradient (Williams 1992)."""

from __future__ import annotations

from torch import Tensor

from slm_lab.agent.algorithm.on_policy import PolicyGradient
from slm_lab.agent.algorithm.value_scale import standardize_valid
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.ops.losses import policy_gradient_loss
from slm_lab.agent.ops.objective import ObjectiveCoefficients, ObjectiveTerms
from slm_lab.agent.ops.returns import discounted_returns
from slm_lab.agent.rollout.minibatch import Minibatch, RolloutBatch, compute_critic_outputs
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import ReinforceSpec


class Reinforce(PolicyGradient):
    """Monte Carlo policy gradient. The loss weights the log-probability of each action by the return that followed the action."""

    in_closed_form = ("_objective",)

    spec: ReinforceSpec

    @ignore_float_errors()
    def learn(self, rollout: Rollout) -> Metrics:
        return self.meter.train_on_rollout(rollout.to(self.device), self._batch_with_returns, self._add_loss)

    def _batch_with_returns(self, rollout: Rollout) -> RolloutBatch:
        # without a critic the bootstrap value is 0: returns of a truncated episode end at the truncation
        values = compute_critic_outputs(self.net, rollout, self.seq_len)
        return_TN = discounted_returns(rollout.reward_TN, values.next_output_TN, rollout.terminated_TN, rollout.done_TN, self.spec.gamma)
        if self.spec.center_return:
            return_TN = return_TN - return_TN[rollout.valid_TN].mean()
        advantage_TN = standardize_valid(return_TN, rollout.valid_TN) if self.spec.normalize_advantages else return_TN
        return RolloutBatch(rollout, values, advantage_TN, return_TN, self.seq_len)

    def _add_loss(self, batch: Minibatch, weight: float) -> None:
        entropy_coef = self.entropy_schedule.value(self.clock.global_frame)
        coefs = ObjectiveCoefficients(0.0, entropy_coef, self.spec.policy_loss_coef)
        terms = self.add_objective_gradient(lambda params_BP, _: self._objective(params_BP, batch, entropy_coef), batch, coefs, weight)
        self.meter.report_loss(terms.loss, weight, entropy=terms.entropy)

    def _objective(self, params_BP: Tensor, batch: Minibatch, entropy_coef: float) -> ObjectiveTerms:
        logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
        entropy = entropy_B.mean()
        policy_loss = policy_gradient_loss(logp_B, batch.advantage_B)
        loss = self.spec.policy_loss_coef * policy_loss - entropy_coef * entropy
        return ObjectiveTerms(loss, policy_loss, 0.0, entropy, logp_B)
