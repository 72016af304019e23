"""Base class of the offline algorithms, which learn only from recorded episodes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm, add_log_std_gradient
from slm_lab.agent.algorithm.meter import GradientMeter
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.ops.autograd import ForwardPass
from slm_lab.agent.ops.distributions import ActionDistribution, NormalTanh, SquashedNormal
from slm_lab.agent.ops.losses import policy_gradient_loss
from slm_lab.agent.ops.objective import Objective, ObjectiveCoefficients, ObjectiveTerms, differentiate
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.replay.demonstration_replay import build_demonstration_replay
from slm_lab.agent.replay.replay import Replay, Transitions
from slm_lab.lib.demonstrations import Demonstrations
from slm_lab.lib.records import ActOut, VecStep
from slm_lab.spec.report import Problem, SpecError


class OfflineAlgorithm(Algorithm):
    """Base class of offline algorithms, which learn from the memory that `use_demonstrations` builds.

    Each update takes one gradient step on each net.
    """

    net: ActorCriticNet
    distribution: ActionDistribution
    memory: Replay
    trainer: Trainer

    def build(self) -> None:
        normal = self.distribution.gaussian_part
        if isinstance(normal, NormalTanh) and not isinstance(normal, SquashedNormal):
            message = f"'NormalTanh' learns from samples before tanh, which recordings lack; allowed for {self.spec.name}: default"
            raise SpecError("agent", [Problem("agent.algorithm.action_pdtype", message)])
        self.net.enable_graph_free_pass(self.trainer.flat)
        self.meter = GradientMeter(self.trainer, self.clock)

    def use_demonstrations(self, data: Demonstrations) -> None:
        memory, rng = self.agent_spec.memory, np.random.default_rng(self.seeds.update)
        self.memory = build_demonstration_replay(
            data, self.info, memory.batch_size, self.clock, rng, self.device if memory.on_device else None
        )

    def observe(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Do nothing, because an offline algorithm does not store steps of the env."""

    def ready(self) -> bool:
        return True

    @cached_property
    def _closed_form(self) -> Objective | None:
        return Objective(self.distribution) if Objective.supports(self.distribution, self.device) else None

    def add_imitation_gradient(self, actor: ForwardPass, batch: Transitions, weight_B: Any, entropy_coef: float = 0.0) -> ObjectiveTerms:
        """Add the gradient of −E[w log π(a|s)] − c H with respect to the actor's parameters to `Parameter.grad`.

        The expectation E is the mean over the actions of the batch. Returns the terms of the objective −E[w log π(a|s)] − c H.

        Args:
            actor: the actor's forward pass over the observations of the batch.
            weight_B: w, the weight of each action, float32 [B].
            entropy_coef: c, the weight of the entropy H.
        """
        if self._closed_form is None:
            terms, grads, _ = differentiate(
                lambda params_BP, _: self._imitation_objective(params_BP, batch, weight_B, entropy_coef), actor.values
            )
        else:  # the policy gradient with weights in place of advantages
            rows = (batch.action_B, batch.logp_B, weight_B, actor.values[1])
            terms, grads, grad_log_std_D = self._closed_form(actor.values, *rows, ObjectiveCoefficients(0.0, entropy_coef))
            add_log_std_gradient(self.distribution, grad_log_std_D)
        actor.backward(grads[0], None)
        return terms

    def _imitation_objective(self, params_BP: Tensor, batch: Transitions, weight_B: Tensor, entropy_coef: float) -> ObjectiveTerms:
        logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
        policy_loss, entropy = policy_gradient_loss(logp_B, weight_B), entropy_B.mean()
        return ObjectiveTerms(policy_loss - entropy_coef * entropy, policy_loss, 0.0, entropy, logp_B)
