"""What the policy gradient algorithms share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.algorithm.common.losses import build_value_loss
from slm_lab.agent.algorithm.common.memory import build_rollout_storage
from slm_lab.agent.algorithm.common.meter import GradientMeter
from slm_lab.agent.net.actor_critic import ActorCriticNet
from slm_lab.agent.net.learning_twin import add_learning_twins
from slm_lab.agent.ops.distributions import ActionDistribution
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.build import optimizer_parts
from slm_lab.agent.policy.policy import Policy
from slm_lab.agent.rollout.minibatch import Values
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.rollout.storage import RolloutStorage
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.spec.net import RecurrentNetSpec
from slm_lab.spec.schedule import Schedule
from slm_lab.spec.spec import AgentSpec


class PolicyGradient(Algorithm):
    """Net, rollout storage and trainer of a policy gradient algorithm."""

    memory: RolloutStorage
    trainer: Trainer
    entropy_schedule: Schedule

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, policy: Policy, device: str = "cpu") -> None:
        super().__init__(agent, info, clock, seeds, policy, device)
        assert isinstance(policy.net, ActorCriticNet)
        assert policy.flat is not None
        assert policy.distribution is not None
        assert agent.net is not None
        self.net, self.distribution = policy.net, policy.distribution
        self.trainer = Trainer(policy.flat, agent.net, optimizer_parts(agent))
        add_learning_twins(self.net)
        self.meter = GradientMeter(self.trainer, clock)
        self.memory = build_rollout_storage(agent, info, policy.state_size)
        self.value_loss = build_value_loss(agent.net.loss_spec)
        self.seq_len = agent.net.seq_len if isinstance(agent.net, RecurrentNetSpec) else 1
        self.entropy_schedule = self.spec.entropy_coef_spec
        self.rng = np.random.default_rng(seeds.update)
        """Orders minibatches."""


@torch.no_grad()
def log_ratio(distribution: ActionDistribution, rollout: Rollout, values: Values) -> Tensor:
    """Return log π(a|s) − log μ(a|s) [T, N] of a rollout's actions: π by `values.params_TNP`, μ the policy that acted."""
    assert values.params_TNP is not None
    logp_B = distribution.log_prob(values.params_TNP.flatten(0, 1), rollout.action_TN.flatten(0, 1))
    log_ratio_TN = logp_B.view_as(rollout.logp_TN) - rollout.logp_TN
    # a row that is no transition can hold anything, and NaN would spread even through a decay of 0; other ratios stay, since a transition
    # that is masked for its lag is invalid too, and later ones are corrected through it
    return torch.where(log_ratio_TN.isnan() & ~rollout.valid_TN, 0.0, log_ratio_TN)
