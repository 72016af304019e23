"""agent.algorithm: which algorithm learns, and its hyperparameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slm_lab.spec.base import Flag, Fraction, NonNegative, Positive, SpecModel
from slm_lab.spec.schedule import Schedule, constant

ActionPdtype = Literal[
    "default",
    "Categorical",
    "Argmax",
    "GumbelSoftmax",
    "MultiCategorical",
    "Bernoulli",
    "Normal",
    "Beta",
    "Gumbel",
    "LogNormal",
    "MultivariateNormal",
]
ActionPolicy = Literal["default", "random", "epsilon_greedy", "boltzmann"]


class AlgorithmSpec(SpecModel):
    """Keys of every algorithm."""

    action_pdtype: ActionPdtype = "default"
    """Probability distribution of actions; default: Categorical, MultiCategorical, Bernoulli or Normal, by the action space."""
    action_policy: ActionPolicy = "default"
    """How an action is taken from the distribution; default samples it."""
    gamma: Fraction = 0.99
    """Discount factor γ."""
    explore_var_spec: Schedule | None = None
    """ε of epsilon_greedy, τ of boltzmann, over frames."""


class RandomSpec(AlgorithmSpec):
    """Uniformly random actions; learns nothing. The baseline of the metrics."""

    name: Literal["Random"]


class OnPolicySpec(AlgorithmSpec):
    """Keys of the policy-gradient algorithms."""

    entropy_coef_spec: Schedule = constant(0.0)
    """Weight of the entropy bonus, over frames."""


class ReinforceSpec(OnPolicySpec):
    """REINFORCE (Williams 1992): Monte Carlo policy gradient."""

    name: Literal["Reinforce"]
    center_return: Flag = False
    """Subtract the batch mean from the returns."""
    policy_loss_coef: NonNegative = 1.0
    """Weight of the policy loss."""
    training_frequency: Positive | None = None
    """Train after so many episodes (OnPolicyReplay, default 1) or vector steps (OnPolicyBatchReplay, default 32)."""


class ActorCriticSpec(OnPolicySpec):
    """Advantage actor-critic (arXiv:1602.01783): A2C; A3C with meta.distributed."""

    name: Literal["ActorCritic"]
    lam: Fraction | None = None
    """λ of generalised advantage estimation (arXiv:1506.02438); advantages are then standardised. Excludes num_step_returns."""
    num_step_returns: Positive | None = None
    """n of n-step returns; is then the training_frequency too. Excludes lam. With neither: plain returns."""
    policy_loss_coef: NonNegative = 1.0
    """Weight of the policy loss."""
    val_loss_coef: NonNegative = 1.0
    """Weight of the value loss."""
    normalize_v_targets: Flag = False
    """Train the critic on returns normalised by their running mean and standard deviation."""
    training_frequency: Positive | None = None
    """Train after so many episodes (OnPolicyReplay, default 1) or vector steps (OnPolicyBatchReplay, default 32)."""


class PPOSpec(OnPolicySpec):
    """Proximal policy optimisation with the clipped objective (arXiv:1707.06347)."""

    name: Literal["PPO"]
    lam: Fraction = 0.95
    """λ of generalised advantage estimation (arXiv:1506.02438)."""
    clip_eps_spec: Schedule = constant(0.2)
    """ε of the clipped objective, over frames."""
    val_loss_coef: NonNegative = 1.0
    """Weight of the value loss."""
    clip_vloss: Flag = False
    """Clip the change of the value prediction by ε too."""
    minibatch_size: Positive = 64
    """Transitions of one gradient step; at most time_horizon × num_envs."""
    time_horizon: Positive = 128
    """Vector steps of one rollout; training happens after each."""
    training_epoch: Positive = 4
    """Passes over each rollout."""
    training_frequency: Positive | None = None
    """Ignored: the same as time_horizon."""
    symlog: Flag = False
    """Train the critic on symlog(return) (arXiv:2301.04104, eq. 9)."""
    normalize_advantages: Literal["standardize", "percentile"] | Flag = "standardize"
    """standardize (or true): zero mean and unit deviation over the rollout; percentile: divided by max(1, the moving 5–95 % range of
    returns) (arXiv:2301.04104, eq. 11); false: as they are."""
    normalize_v_targets: Flag = False
    """Train the critic on returns normalised by their running mean and standard deviation."""


Algorithm = Annotated[RandomSpec | ReinforceSpec | ActorCriticSpec | PPOSpec, Field(discriminator="name")]
