"""meta.sampler: rollout workers that collect while a learner trains (arXiv:2006.11751)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from slm_lab.spec.models.base import Count, Flag, Fraction, NonNegative, Positive, SpecModel

Factor = Annotated[float, Strict(), Field(gt=1)]


class PBTSpec(SpecModel):
    """Population-based training (arXiv:1711.09846): replace the worst policies by copies of the best, and perturb hyperparameters.

    Learning rate, entropy coefficient and, with optimize_gamma, gamma are perturbed; never those of policy 0 and of the best policies.
    """

    period: Positive = 5_000_000
    """Frames of a policy between rounds."""
    start: Count = 20_000_000
    """Frames of a policy before its first round."""
    replace_fraction: Fraction = 0.3
    """Fraction of the population that counts as worst, and may be replaced by policies of an equally large best fraction."""
    mutation_rate: Fraction = 0.15
    """Probability of perturbing a hyperparameter in a round."""
    reward_gap: NonNegative = 0.1
    """Minimum relative difference in total_reward for a replacement."""
    reward_gap_absolute: NonNegative = 1e-6
    """Minimum absolute difference in total_reward for a replacement."""
    perturb_min: Factor = 1.1
    """Minimum factor by which a perturbed hyperparameter is multiplied or divided."""
    perturb_max: Factor = 1.5
    """Maximum factor by which a perturbed hyperparameter is multiplied or divided."""
    optimize_gamma: Flag = False
    """Perturb 1 − gamma too."""


class SamplerSpec(SpecModel):
    """Rollout workers step envs, and a learner trains, synchronously or asynchronously."""

    async_rl: Flag = True
    """true: asynchronous, workers collect while the learner trains, with policy lag; false: synchronous, collecting and training alternate,
    without lag."""
    num_workers: Positive = 2
    """Number of worker processes."""
    num_envs_per_worker: Positive = 8
    """Envs of each worker."""
    worker_num_splits: Positive = 2
    """Groups of envs of a worker for central inference: one group steps while another waits for its actions. No effect on local
    inference."""
    num_batches_per_epoch: Positive = 1
    """Minibatches per dataset: an epoch has minibatch_size × this many transitions."""
    num_batches_to_accumulate: Positive = 2
    """async_rl: pause collection while this many datasets wait for the learner."""
    max_policy_lag: Positive = 1000
    """Maximum policy lag in gradient steps; older transitions are discarded."""
    serial_mode: Flag = False
    """Run workers and learner synchronously in one process: for debugging and exact reproducibility."""
    inference: Literal["auto", "local", "central"] = "auto"
    """Compute actions in each worker (local), or batched in one process for all (central); auto: central for nets on a GPU."""
    num_policies: Positive = 1
    """Number of policies, each trained for env.max_frame frames; each episode is played by a random one."""
    pbt: PBTSpec | None = None
    """Population-based training; absent: policies learn independently."""

    @property
    def num_envs(self) -> int:
        """Return the number of envs of all workers."""
        return self.num_workers * self.num_envs_per_worker
