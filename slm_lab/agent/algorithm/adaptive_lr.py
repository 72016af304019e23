"""Adaptive learning rate, which keeps the change of the policy in each update near a target divergence."""

from __future__ import annotations

from slm_lab.agent.algorithm.value_scale import SharedStatistic
from slm_lab.spec.models.algorithm import AdaptiveLR


class AdaptiveLearningRate(SharedStatistic):
    """Learning rate of PPO, which is adapted to the Kullback-Leibler divergence of each update, as in rl_games and rsl_rl.

    Processes that train the same net share one learning rate.

    Args: spec: spec section of the adaptive learning rate. rate: initial learning rate.
    """

    def __init__(self, spec: AdaptiveLR, rate: float) -> None:
        super().__init__("rate", 1)
        self.spec, self.initial = spec, rate
        self.numbers[0] = rate

    @property
    def factor(self) -> float:
        """Current learning rate divided by the initial learning rate."""
        return float(self.numbers[0]) / self.initial

    def adapt_lr(self, kl: float) -> None:
        """Adapt the learning rate to `kl`, the Kullback-Leibler divergence of an update.

        The learning rate is lowered if `kl` is above twice the target divergence, and raised if `kl` is below half the target divergence.
        """
        self.run_exclusively(self._adapt_shared_lr, kl)

    def _adapt_shared_lr(self, kl: float) -> None:
        spec, rate = self.spec, float(self.numbers[0])
        if kl > 2.0 * spec.kl_target:
            self.numbers[0] = min(rate, max(rate / spec.factor, spec.min_lr))
        elif kl < 0.5 * spec.kl_target:
            self.numbers[0] = max(rate, min(rate * spec.factor, spec.max_lr))
