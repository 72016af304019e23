"""PQN, the parallelised Q-network (arXiv:2407.04811): Q(λ) on rollouts of many envs, without a replay buffer and a target net."""

from __future__ import annotations

import numpy as np

from slm_lab.agent.algorithm.dqn import ValueLearning
from slm_lab.agent.net.noisy import NoiseSource
from slm_lab.agent.ops.arrays import as_type_of, ignore_float_errors
from slm_lab.agent.ops.objective import value_diagnostics
from slm_lab.agent.ops.returns import q_lambda_returns
from slm_lab.agent.ops.targets import action_value, action_value_gradient, max_value
from slm_lab.agent.rollout.minibatch import Minibatch, RolloutBatch, compute_critic_outputs
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import PQNSpec


class PQN(ValueLearning):
    """Q-learning on rollouts, each of which is used for several epochs of minibatches.

    Layer normalisation in the net keeps the values stable, so that no target net is needed (arXiv:2407.04811, theorem 2).
    """

    spec: PQNSpec
    rng: np.random.Generator
    """Random stream of the minibatch order and of a noisy net."""

    def build(self) -> None:
        super().build()
        self.net.enable_graph_free_pass(self.trainer.flat)
        self.rng = np.random.default_rng(self.seeds.update)
        self.noise = NoiseSource(self.net)

    def learn(self, rollout: Rollout) -> Metrics:  # Algorithm 2 after the rollouts are collected
        batch = self._batch_with_targets(rollout.to(self.device))
        self.meter.begin()
        with ignore_float_errors():
            for minibatch in batch.epoch_minibatches(self.spec.training_epoch, self.spec.minibatch_size, self.rng):
                self._step(minibatch)
        return self.meter.end()

    def _batch_with_targets(self, rollout: Rollout) -> RolloutBatch:
        """Return the rollout with λ-returns as value targets, computed with the parameters of the net before the update."""
        self.noise.draw(self.rng)
        with ignore_float_errors():
            values = compute_critic_outputs(self.net, rollout, self.seq_len)
        rows = (rollout.reward_TN, max_value(values.next_output_TN), rollout.terminated_TN, rollout.done_TN)
        target_TN = q_lambda_returns(*rows, self.spec.gamma, self.spec.lam)
        return RolloutBatch(rollout, values, target_TN, target_TN, self.seq_len)

    def _step(self, batch: Minibatch) -> None:
        self.noise.draw(self.rng)
        outputs = batch.forward_pass(self.net, graph=False)
        q_BA, *others = outputs.values  # a recurrent net returns the same values twice
        action_B, target_B = as_type_of(q_BA, batch.action_B), as_type_of(q_BA, batch.target_B)
        q_B = action_value(q_BA, action_B)
        loss, grad_q_B = self.value_loss.with_gradient(q_B, target_B, len(q_B))
        outputs.backward(action_value_gradient(q_BA, action_B, grad_q_B), *(None for _ in others))
        self.meter.report_loss(loss)
        td_error, q_mean = value_diagnostics(q_B, target_B)
        self.meter.report(td_error=td_error, q_mean=q_mean)
        self.meter.step()
