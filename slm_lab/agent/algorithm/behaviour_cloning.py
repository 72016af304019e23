"""Behaviour cloning: imitation as supervised learning (Pomerleau 1991)."""

from __future__ import annotations

import torch

from slm_lab.agent.algorithm.offline import OfflineAlgorithm
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.algorithm import BCSpec


class BehaviourCloning(OfflineAlgorithm):
    """Behaviour cloning: train the policy π to maximise the mean of log π(a|s) over the recorded states s and actions a."""

    spec: BCSpec

    def build(self) -> None:
        super().build()
        self.entropy_schedule = self.spec.entropy_coef_spec

    @ignore_float_errors()
    def update(self) -> Metrics:
        self.meter.begin()
        batch = self.memory.sample().to(self.device)
        equal_B = torch.ones_like(batch.reward_B)
        terms = self.add_imitation_gradient(self.net.forward_pass(batch.obs_B), batch, equal_B, self.entropy_coef or 0.0)
        self.meter.report_loss(terms.loss, entropy=terms.entropy)
        self.meter.step()
        return self.meter.end()
