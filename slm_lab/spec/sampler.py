"""meta.sampler: rollout workers that collect while a learner trains (arXiv:2006.11751)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from slm_lab.spec.base import Count, Flag, Fraction, NonNegative, Positive, SpecModel

Factor = Annotated[float, Strict(), Field(gt=1)]


class PBTSpec(SpecModel):
    """Population-based training (arXiv:1711.09846): poor policies take over weights of good ones, and hyperparameters mutate.

    Policy 0 never mutates, nor do the best. What mutates: learning rate, entropy coefficient and, if asked, gamma.
    """

    period: Positive = 5_000_000
    """Frames of a policy between two rounds."""
    start: Count = 20_000_000
    """Frames of a policy before its first round."""
    replace_fraction: Fraction = 0.3
    """Share of the population, the poorest, that may be replaced by one of as many of the best."""
    mutation_rate: Fraction = 0.15
    """Probability that a hyperparameter is perturbed in a round."""
    reward_gap: NonNegative = 0.1
    """A policy is replaced only by one whose total_reward is better by more than this share of its own."""
    reward_gap_absolute: NonNegative = 1e-6
    """... and by more than this."""
    perturb_min: Factor = 1.1
    """A perturbed hyperparameter is multiplied or divided by a factor between this …"""
    perturb_max: Factor = 1.5
    """… and this."""
    optimize_gamma: Flag = False
    """Perturb 1 − gamma too."""


class SamplerSpec(SpecModel):
    """Rollout workers step the envs, a learner trains."""

    async_rl: Flag = True
    """true: workers collect while the learner trains, on a policy that may be some updates old; false: both take turns, without any lag."""
    num_workers: Positive = 2
    """Processes that step envs."""
    num_envs_per_worker: Positive = 8
    """Envs of each."""
    worker_num_splits: Positive = 2
    """Groups of envs of a worker, for central inference: one steps while another waits for its actions. Local inference never waits, and
    steps them together."""
    num_batches_per_epoch: Positive = 1
    """Minibatches of a dataset: each epoch goes over minibatch_size × so many transitions."""
    num_batches_to_accumulate: Positive = 2
    """async_rl: collecting pauses while so many datasets wait for the learner."""
    max_policy_lag: Positive = 1000
    """Transitions whose policy is older than so many gradient steps are not trained on."""
    serial_mode: Flag = False
    """The same parts in one process, one after the other: for debugging and exact repetition."""
    inference: Literal["auto", "local", "central"] = "auto"
    """Who computes the actions: each worker for its own envs, or one process for all in batches. auto: central for nets on a GPU."""
    num_policies: Positive = 1
    """Policies trained at once, each on env.max_frame frames; every episode is played by one of them, drawn at random."""
    pbt: PBTSpec | None = None
    """Population-based training of the policies; absent: each learns by itself."""

    @property
    def num_envs(self) -> int:
        """Envs of all workers."""
        return self.num_workers * self.num_envs_per_worker
