"""Models of the section agent.algorithm of a spec: the algorithm and its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Strict

from slm_lab.spec.models.base import (
    AboveOne,
    Component,
    Count,
    Extensible,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    PositiveReal,
    Real,
    Schedule,
    SpecModel,
    constant_schedule,
    models_by_name,
)

ActionPdtype = Literal[
    "default",
    "Categorical",
    "Argmax",
    "GumbelSoftmax",
    "MultiCategorical",
    "Bernoulli",
    "Normal",
    "NormalTanh",
    "Beta",
    "Gumbel",
    "LogNormal",
    "MultivariateNormal",
]
ActionPolicy = Literal["default", "random", "epsilon_greedy", "boltzmann"]
Exploration = Literal["gaussian", "random"]
"""Names of the action policies of deterministic actors."""
EXPLORING = ("epsilon_greedy", "boltzmann", "gaussian")
"""Names of the action policies that use the exploration variable."""

StandardizeAdvantages = Literal["standardize"] | Flag
ROLLOUT_MEMORIES = ("OnPolicyBatchReplay", "OnPolicyReplay", "OnPolicyCrossEntropy")
REPLAY_MEMORIES = ("Replay", "PrioritizedReplay", "HindsightReplay")
_FOR_DISCRETE = "the algorithm has continuous actions only"
ALL_ACTIONS = ("discrete", "continuous", "multi_discrete", "multi_binary", "hybrid")
"""All kinds of action spaces (lib.records.ActionKind)."""


class AlgorithmSpec(Component):
    """Base class of the models of algorithms: the keys of every algorithm, and class attributes that describe the capabilities of the
    algorithm."""

    on_policy: ClassVar[bool] = True
    """Whether the algorithm learns from each transition once, in the order of collection, and not from a replay buffer."""
    offline: ClassVar[bool] = False
    """Whether the algorithm learns only from meta.demonstrations. For an offline algorithm, a frame is a gradient step, and envs are
    stepped only in evaluations."""
    learns: ClassVar[bool] = True
    """Whether the algorithm has weights to train, and therefore needs a net."""
    has_critic: ClassVar[bool] = False
    """Whether the algorithm learns values in addition to its policy."""
    has_target: ClassVar[bool] = False
    """Whether the algorithm has target networks."""
    values: ClassVar[bool] = False
    """Whether the policy chooses actions by action values, which a Q-network computes."""
    own_critics: ClassVar[bool] = False
    """Whether actor and critics have separate networks (agent.net, agent.critic_net)."""
    soft: ClassVar[bool] = False
    """Whether values contain an entropy bonus (soft actor-critic)."""
    recurrent: ClassVar[bool] = True
    """Whether the algorithm can train a RecurrentNet."""
    noisy: ClassVar[bool] = False
    """Whether the algorithm can explore with a noisy net."""
    self_imitation: ClassVar[bool] = False
    """Whether the algorithm also learns from a replay buffer of past episodes, in addition to its on-policy memory."""
    action_kinds: ClassVar[tuple[str, ...]] = ALL_ACTIONS
    """Kinds of action spaces that the algorithm supports."""
    bounded_only: ClassVar[bool] = False
    """Whether continuous actions must have finite bounds."""
    memories: ClassVar[tuple[str, ...]] = ROLLOUT_MEMORIES
    """Names of the built-in memories from which the algorithm can learn. The first name is the default memory."""
    batch_size: ClassVar[int | None] = None
    """Number of transitions per batch of a replay buffer if the spec has no section agent.memory."""
    samplers: ClassVar[tuple[str, ...]] = ()
    """Modes of meta.sampler (rollout workers), "sync" and "async", that the algorithm supports."""
    unused_keys: ClassVar[Mapping[str, str]] = {}
    """Inherited keys that have no effect in the algorithm, and the reason for each."""

    action_pdtype: ActionPdtype = "default"
    """Probability distribution of actions. The default distribution depends on the action space: Categorical, MultiCategorical, Bernoulli
    or Normal. NormalTanh is a Normal distribution whose samples pass through tanh, and the policy learns from the samples before tanh."""
    action_policy: ActionPolicy = "default"
    """How actions are chosen. "default" samples from the action distribution, and "random" chooses all actions with equal probability.
    "epsilon_greedy" chooses a random action with probability ε, and otherwise the most probable action. "boltzmann" divides the logits of
    the distribution by τ before it samples."""
    gamma: Fraction = 0.99
    """Discount factor γ."""
    explore_var_spec: Schedule | None = None
    """Schedule, over frames, of the exploration variable: ε for action_policy epsilon_greedy, τ for boltzmann."""

    def actor_distribution(self, kind: str) -> tuple[str, dict[str, Any]] | None:
        """Return a tuple (name, arguments) if the actor supports only one action distribution for action spaces of the kind `kind`, else
        None.

        The name of the action distribution is a key of ops.distributions.ACTOR_DISTRIBUTIONS. If the return value is None, the spec key
        action_pdtype names the distribution.
        """
        return None

    def value_distribution(self) -> tuple[str, dict[str, Any]] | None:
        """Return a tuple (kind, arguments) if the net outputs distributions of returns, or None if the net outputs action values.

        The kind of the distributions is a key of net.distributional.HEADS.
        """
        return None

    @property
    def explores(self) -> bool:
        """Return whether actions depend on the exploration variable, whose schedule is explore_var_spec."""
        return self.action_policy in EXPLORING

    @property
    def uses_loss_spec(self) -> bool:
        """Return whether the algorithm learns values with the loss that the key loss_spec of the net names."""
        return not (self.on_policy or self.offline) or self.has_critic or self.values

    @property
    def needs_logp(self) -> bool:
        """Return whether training needs log π(a|s) under the policy π that chose the action a."""
        return False

    def rollout_len(self, default: int) -> int:
        """Return the number of vector steps (or episodes) between two trainings of the agent, or `default` if the spec does not give this
        number."""
        return getattr(self, "training_frequency", None) or default


class RandomSpec(AlgorithmSpec):
    """Uniformly random actions without learning, as the baseline for the metrics of other algorithms."""

    class_path = "slm_lab.agent.algorithm.base:Random"
    learns = False
    memories = ROLLOUT_MEMORIES + REPLAY_MEMORIES

    name: Literal["Random"]


class OnPolicySpec(AlgorithmSpec):
    """Keys of the policy-gradient algorithms."""

    entropy_coef_spec: Schedule = constant_schedule(0.0)
    """Schedule, over frames, of the weight of the entropy bonus."""


class ReinforceSpec(OnPolicySpec):
    """REINFORCE (Williams 1992): Monte Carlo policy gradient."""

    class_path = "slm_lab.agent.algorithm.reinforce:Reinforce"
    memories = ("OnPolicyReplay", "OnPolicyBatchReplay", "OnPolicyCrossEntropy")

    name: Literal["Reinforce"]
    center_return: Flag = False
    """Whether to subtract the batch mean from the returns."""
    normalize_advantages: StandardizeAdvantages = "standardize"
    """With standardize (or true), returns get zero mean and unit standard deviation over the batch. With false, returns are not changed."""
    policy_loss_coef: NonNegative = 1.0
    """Weight of the policy loss."""
    training_frequency: Positive | None = None
    """Number of episodes (with OnPolicyReplay, default 1) or vector steps (with OnPolicyBatchReplay, default 32) between updates."""


class VTraceSpec(OnPolicySpec):
    """Keys of algorithms that support V-trace (arXiv:1802.01561), the off-policy correction for rollouts by an older policy."""

    with_vtrace: Flag = False
    """Whether V-trace corrects values and advantages of rollouts that an older policy has collected. λ of V-trace is the key lam, by
    default 1."""
    rho_bar: PositiveReal = 1.0
    """ρ̄ of V-trace: maximum importance weight of a temporal difference. With a higher ρ̄, the learned values are closer to the values of
    the current policy, with more variance."""
    c_bar: PositiveReal = 1.0
    """c̄ of V-trace: maximum trace coefficient. c̄ affects how fast values are learned, but not the fixed point of the values."""

    @property
    def needs_logp(self) -> bool:
        return self.with_vtrace


class ActorCriticSpec(VTraceSpec):
    """Advantage actor-critic (arXiv:1602.01783). The algorithm is A2C or, with meta.distributed, A3C."""

    class_path = "slm_lab.agent.algorithm.actor_critic:ActorCritic"
    has_critic = True
    samplers: ClassVar[tuple[str, ...]] = ("sync", "async")

    name: Literal["ActorCritic"]
    lam: Fraction | None = None
    """λ of generalised advantage estimation (arXiv:1506.02438)."""
    num_step_returns: Positive | None = None
    """n of n-step returns. If the spec gives num_step_returns without lam, num_step_returns also replaces training_frequency. With lam,
    num_step_returns has no effect. If the spec gives neither num_step_returns nor lam, returns extend to the end of the episode, and the
    critic's value is added where the end of the rollout or a time limit cuts the episode."""
    normalize_advantages: StandardizeAdvantages = "standardize"
    """With standardize (or true), advantages get zero mean and unit standard deviation over the batch. With false, advantages are not
    normalised."""
    policy_loss_coef: NonNegative = 1.0
    """Weight of the policy loss."""
    val_loss_coef: NonNegative = 1.0
    """Weight of the value loss."""
    normalize_v_targets: Flag = False
    """Whether the value loss divides values and their targets by the running standard deviation of targets (at least 1), and clamps the
    quotients to ±10."""
    training_frequency: Positive | None = None
    """Number of episodes (with OnPolicyReplay, default 1) or vector steps (with OnPolicyBatchReplay, default 32) between updates."""

    def rollout_len(self, default: int) -> int:
        return (self.num_step_returns if self.lam is None else None) or super().rollout_len(default)


class AdaptiveLR(SpecModel):
    """Adaptive learning rate that depends on the KL divergence of the policies before and after an update, as in rl_games and rsl_rl."""

    kl_target: PositiveReal = 0.01
    """Target of the divergence KL(π_old, π) per update. After each rollout, the learning rate is divided by `factor` if approx_kl of the
    last epoch is above 2 · kl_target, and multiplied by `factor` if approx_kl is below kl_target / 2. An initial learning rate outside of
    the interval from min_lr to max_lr remains until an adaptation moves it towards the interval."""
    factor: AboveOne = 1.5
    """Factor by which one adaptation changes the learning rate."""
    min_lr: PositiveReal = 1e-5
    """Lowest learning rate."""
    max_lr: PositiveReal = 1e-2
    """Highest learning rate."""


class PPOSpec(VTraceSpec):
    """Proximal policy optimisation with the clipped objective (arXiv:1707.06347)."""

    class_path = "slm_lab.agent.algorithm.ppo:PPO"
    has_critic = True
    memories = ("OnPolicyBatchReplay",)
    samplers: ClassVar[tuple[str, ...]] = ("sync", "async")

    name: Literal["PPO"]
    lam: Fraction = 0.95
    """λ of generalised advantage estimation (arXiv:1506.02438)."""
    clip_eps_spec: Schedule = constant_schedule(0.2)
    """Schedule, over frames, of ε in the clipped objective."""
    val_loss_coef: NonNegative = 1.0
    """Weight of the value loss."""
    clip_vloss: Flag = False
    """Whether to clip the change of value predictions to ±ε. With clip_vloss, the value loss is half the mean of the larger of two squared
    errors (with and without clipping), and the keys loss_spec and normalize_v_targets have no effect."""
    dual_clip: AboveOne | None = None
    """c of the dual clip (arXiv:1912.09729). Where the advantage is negative, the clipped objective is at least c times the advantage, so
    that a ratio π/π_old above c has no gradient. By default, the dual clip is not used."""
    bounds_loss_coef: NonNegative = 0.0
    """Weight of the loss Σ (|μ| − 1.1)₊², averaged over the batch, where μ are the means of the action distribution and actions are scaled
    to [−1, 1]. This loss keeps the means μ within or near the bounds of the actions (as in rl_games). bounds_loss_coef is available only
    for the distribution Normal with bounded actions."""
    target_kl: PositiveReal | None = None
    """Threshold for early stopping: the epochs of a rollout stop as soon as approx_kl of the next minibatch is above 1.5 · target_kl (as in
    Stable-Baselines3). The first gradient step of a rollout is always taken. By default, epochs do not stop early."""
    adaptive_lr: AdaptiveLR | None = None
    """Adaptive learning rate, given as {kl_target (0.01), factor (1.5), min_lr (1e-5), max_lr (0.01)}. After each rollout, the learning
    rate is divided by factor if approx_kl of the last epoch is above 2 · kl_target, and multiplied by factor if approx_kl is below
    kl_target / 2. A rollout with a single gradient step does not change the learning rate. The initial learning rate is the learning rate
    of optim_spec. The adapted learning rate stays between min_lr and max_lr. The learning rate of a separate critic optimizer is scaled by
    the same factors. With a schedule (lr_scheduler_spec, also of the actor or the critic), an update uses the adapted learning rate times
    the current value of the schedule divided by the learning rate of optim_spec; min_lr and max_lr do not limit this product. By default,
    the learning rate is not adapted."""
    recompute_advantages: Flag = False
    """Whether values and advantages are computed again, with the current critic, before each epoch except the first (arXiv:2006.05990,
    section 3.5)."""
    normalize_values: Flag = False
    """Whether the critic learns normalised returns, as with `normalize_value` of rl_games. The critic's output is then the value minus the
    running mean of the returns, divided by the running standard deviation of the returns."""
    minibatch_size: Positive = 64
    """Approximate number of transitions per gradient step. A rollout of n transitions is divided into round(n / minibatch_size) parts of
    equal size, so that a part can have more transitions than minibatch_size."""
    time_horizon: Positive = 128
    """Number of vector steps per rollout. The agent trains after each rollout."""
    training_epoch: Positive = 4
    """Number of epochs over each rollout."""
    training_frequency: Positive | None = None
    """Key without effect, because PPO trains every time_horizon steps."""
    symlog: Flag = False
    """Whether the value loss compares the symlog (arXiv:2301.04104, equation 9) of values with the symlog of their targets. All other
    computations use the values themselves."""
    normalize_advantages: Literal["standardize", "rollout", "percentile"] | Flag = "standardize"
    """With standardize (or true), advantages get zero mean and unit standard deviation over each minibatch. With rollout, advantages get
    zero mean and unit standard deviation over the complete rollout. With percentile, advantages are divided by max(1, m), where m is the
    moving average of the range from the 5th to the 95th percentile of a minibatch (after arXiv:2301.04104, equation 11). With false,
    advantages are not normalised."""
    normalize_v_targets: Flag = False
    """Whether the value loss divides values and their targets by the running standard deviation of targets (at least 1), and clamps the
    quotients to ±10."""

    @property
    def needs_logp(self) -> bool:
        return True

    def rollout_len(self, default: int) -> int:
        return self.time_horizon


class SILKeys(SpecModel):
    """Keys of the algorithms with self-imitation learning (arXiv:1806.05635)."""

    sil_policy_loss_coef: NonNegative = 1.0
    """Weight of the self-imitation policy loss."""
    sil_val_loss_coef: NonNegative = 0.01
    """Weight of the self-imitation value loss."""
    training_batch_iter: Positive = 1
    """Number of self-imitation gradient steps per batch."""
    training_iter: Positive = 4
    """Number of self-imitation batches after each training on an on-policy rollout."""


class SILSpec(ActorCriticSpec, SILKeys):
    """Self-imitation learning (arXiv:1806.05635) on top of ActorCritic."""

    class_path = "slm_lab.agent.algorithm.sil:SIL"
    self_imitation = True
    samplers = ()

    name: Literal["SIL"]  # type: ignore[assignment]  # narrower: the tag of the union


class PPOSILSpec(PPOSpec, SILKeys):
    """Self-imitation learning (arXiv:1806.05635) on top of PPO."""

    class_path = "slm_lab.agent.algorithm.sil:PPOSIL"
    self_imitation = True
    samplers = ()

    name: Literal["PPOSIL"]  # type: ignore[assignment]  # narrower: the tag of the union
    normalize_values: Literal[False] = False
    """Must be false, because self-imitation compares returns with the outputs of the critic. Use normalize_v_targets instead."""


class EpsilonGreedySpec(AlgorithmSpec):
    """Keys of algorithms that act greedily on action values, except for the random actions of exploration."""

    values = True
    noisy = True

    action_pdtype: ActionPdtype = "Argmax"
    """Probability distribution of actions, which is computed from the action values. The default distribution is Argmax or, with
    action_policy boltzmann, Categorical."""
    action_policy: ActionPolicy = "epsilon_greedy"
    """How actions are chosen. "default" samples from the action distribution, and "random" chooses all actions with equal probability.
    "epsilon_greedy" chooses a random action with probability ε, and otherwise the most probable action. "boltzmann" divides the logits of
    the distribution by τ before it samples."""
    explore_var_spec: Schedule | None = None
    """Schedule, over frames, of ε (for epsilon_greedy) or τ (for boltzmann). The default schedule of ε decreases from 1 to 0.05 over the
    first tenth of env.max_frame or, with a noisy net, is constantly 0."""


class PQNSpec(EpsilonGreedySpec):
    """Parallelised Q-network (PQN, arXiv:2407.04811): Q(λ) on rollouts of many envs, without a replay buffer and without a target net."""

    class_path = "slm_lab.agent.algorithm.pqn:PQN"
    action_kinds = ("discrete",)
    memories = ("OnPolicyBatchReplay",)
    samplers: ClassVar[tuple[str, ...]] = ("sync", "async")

    name: Literal["PQN"]
    lam: Fraction = 0.65
    """λ of the returns from which PQN learns. λ = 0 is one-step Q-learning, and λ = 1 uses the rewards up to the end of the episode or
    rollout."""
    minibatch_size: Positive = 64
    """Approximate number of transitions per gradient step. A rollout of n transitions is divided into round(n / minibatch_size) parts of
    equal size, so that a part can have more transitions than minibatch_size."""
    time_horizon: Positive = 32
    """Number of vector steps per rollout. The agent trains after each rollout."""
    training_epoch: Positive = 2
    """Number of epochs over each rollout."""

    def rollout_len(self, default: int) -> int:
        return self.time_horizon


class SARSASpec(AlgorithmSpec):
    """SARSA (Rummery & Niranjan 1994), which learns the action values of the acting policy, including its exploration."""

    class_path = "slm_lab.agent.algorithm.dqn:Sarsa"
    values = True
    action_kinds = ("discrete",)

    name: Literal["SARSA"]
    training_frequency: Positive | None = None
    """Number of episodes (with OnPolicyReplay, default 1) or vector steps (with OnPolicyBatchReplay, default 32) between updates."""


class ReplayAlgorithmSpec(AlgorithmSpec):
    """Keys of every algorithm that learns from a replay buffer."""

    on_policy = False
    recurrent = False
    memories = REPLAY_MEMORIES
    samplers = ("async",)
    min_start: ClassVar[int] = 0
    """Minimum number of transitions before the first training if the spec does not give training_start_step."""
    random_start: ClassVar[bool] = False
    """Whether the agent acts uniformly at random before training_start_step."""

    training_frequency: Positive = 1
    """Number of transitions between updates. At most one update is made per vector step."""
    training_start_step: Count | None = None
    """Number of transitions to collect before the first update. The default number is memory.batch_size, but at least 1,000 for algorithms
    with an actor and separate critics (SoftActorCritic, TD3, …). If training_start_step is smaller than memory.batch_size, the first
    batches contain some transitions more than once. With a RecurrentNet, the first update also waits until the memory contains a batch of
    sequences. Algorithms with an actor and separate critics choose actions uniformly at random during the first training_start_step frames
    of the Session."""

    def rollout_len(self, default: int) -> int:
        return 1


class ResetKeys(SpecModel):
    """Keys that say when an algorithm resets its nets."""

    reset_frequency: Positive | None = None
    """Number of gradient steps between resets (arXiv:2205.07802). A reset gives new random weights to all nets, copies these weights to the
    target nets, and returns optimizers and temperature to their initial state. A reset does not change the replay buffer. By default, nets
    are not reset. Resets are not supported with meta.distributed."""


class QLearningSpec(EpsilonGreedySpec, ReplayAlgorithmSpec, ResetKeys):
    """Keys of the Q-learning algorithms."""

    has_target = True
    recurrent = True
    action_kinds: ClassVar[tuple[str, ...]] = ("discrete", "multi_discrete")
    batch_size = 128

    training_iter: Positive = 1
    """Number of batches per training."""
    training_batch_iter: Positive = 1
    """Number of gradient steps per batch."""
    num_step_returns: Positive = 1
    """n of n-step returns. The targets of action values use the rewards of n steps, or of fewer steps at the end of an episode or of the
    collected data. After a truncation, targets bootstrap from the last observation of the episode. With a RecurrentNet, returns also end at
    the end of a sequence. As in Rainbow (arXiv:1710.02298), n-step returns have no off-policy correction: stored rewards are used even if
    the current policy would choose other actions."""


class VanillaDQNSpec(QLearningSpec):
    """Deep Q-learning with a replay buffer, without a target network (arXiv:1312.5602)."""

    class_path = "slm_lab.agent.algorithm.dqn:QLearning"
    has_target = False

    name: Literal["VanillaDQN"]


class DQNSpec(QLearningSpec):
    """Deep Q-learning with a target network (Mnih et al., 2015)."""

    class_path = "slm_lab.agent.algorithm.dqn:QLearning"
    name: Literal["DQN"]


class DoubleDQNSpec(QLearningSpec):
    """Double Q-learning (arXiv:1509.06461): the network selects the next action, and the target network evaluates this action."""

    class_path = "slm_lab.agent.algorithm.dqn:QLearning"
    name: Literal["DoubleDQN"]


class DistributionalSpec(QLearningSpec):
    """Keys of algorithms that learn distributions of returns."""

    action_kinds = ("discrete",)

    double_q: Flag = False
    """Whether to use double Q-learning (arXiv:1509.06461), in which the network selects the next action and the target network evaluates
    this action. With false, the target network selects and evaluates the next action."""


class QRDQNSpec(DistributionalSpec):
    """QR-DQN: learn quantiles of the return of each action by quantile regression (arXiv:1710.10044)."""

    class_path = "slm_lab.agent.algorithm.distributional_dqn:QRDQN"
    name: Literal["QRDQN"]
    num_quantiles: Positive = 50
    """Number of quantiles of each action's return. The paper (arXiv:1710.10044) uses 200 quantiles for Atari."""

    def value_distribution(self) -> tuple[str, dict[str, Any]]:
        return "quantiles", {"number": self.num_quantiles}


class C51Spec(DistributionalSpec):
    """C51: learn the probabilities of fixed returns (atoms) for each action (arXiv:1707.06887)."""

    class_path = "slm_lab.agent.algorithm.distributional_dqn:C51"
    name: Literal["C51"]
    num_atoms: Positive = 51
    """Number of atoms, at least 2."""
    v_min: Real = -10.0
    """Return of the lowest atom. Discounted returns below v_min count as v_min."""
    v_max: Real = 10.0
    """Return of the highest atom, above v_min. Discounted returns above v_max count as v_max. The default value of v_max is suitable for
    rewards that are clipped to ±1, as in Atari."""

    def value_distribution(self) -> tuple[str, dict[str, Any]]:
        return "categorical", {"number": self.num_atoms, "low": self.v_min, "high": self.v_max}


class OfflineSpec(AlgorithmSpec):
    """Keys of the algorithms that learn only from recorded episodes."""

    on_policy = False
    offline = True
    recurrent = False
    memories = ("Replay",)
    batch_size = 256


class BCSpec(OfflineSpec):
    """Behaviour cloning (Pomerleau 1991): maximum likelihood of the actions in meta.demonstrations."""

    class_path = "slm_lab.agent.algorithm.behaviour_cloning:BehaviourCloning"

    name: Literal["BC"]
    entropy_coef_spec: Schedule = constant_schedule(0.0)
    """Schedule over frames (gradient steps) of the weight of the entropy bonus."""


class IQLSpec(OfflineSpec):
    """Implicit Q-learning (arXiv:2110.06169): values and a policy from meta.demonstrations."""

    class_path = "slm_lab.agent.algorithm.implicit_q:IQL"
    has_critic = True
    has_target = True
    own_critics = True
    action_kinds = ("discrete", "continuous")

    name: Literal["IQL"]
    expectile: Annotated[float, Strict(), Field(gt=0, lt=1)] = 0.7
    """τ of implicit Q-learning, in which V is the τ-expectile of the values of the recorded actions. τ = 0.5 gives the mean of the recorded
    actions' values (the value of the recorded policy), and a τ near 1 gives the maximum of these values. A greater τ (0.9 in the paper) is
    needed if a good episode must be combined from parts of several recorded episodes."""
    beta: NonNegative = 3.0
    """β of implicit Q-learning: the policy learns recorded actions with the weight exp(β A), where A is the advantage of the action. β = 0
    is behaviour cloning."""


class EntropyAnneal(SpecModel):
    """Linear annealing of the automatic target entropy of a policy with discrete actions."""

    start_ratio: Fraction | None = None
    """Target entropy at the first frame, as a fraction of ln|A|, by default target_entropy_ratio."""
    end_ratio: Fraction | None = None
    """Target entropy after `frames` frames, as a fraction of ln|A|, by default start_ratio."""
    frames: Count = 0
    """Number of frames (of all workers together) over which the target entropy changes. With 0, the target entropy stays at start_ratio."""


class ReplayActorCriticSpec(ReplayAlgorithmSpec, ResetKeys):
    """Keys of algorithms that learn an actor and separate critics from a replay buffer."""

    has_critic = True
    has_target = True
    own_critics = True
    recurrent = True
    bounded_only = True
    batch_size = 256
    min_start = 1000
    random_start = True
    critics: ClassVar[int] = 2
    """Number of critics of the algorithm."""

    training_iter: Positive | None = None
    """Number of gradient steps per training, each of which uses a new batch. The default is one gradient step per transition of a vector
    step: env.num_envs times the number of agents that the policy controls."""
    policy_delay: Positive = 1
    """Number of critic updates per update of the actor, of the target networks and, in soft actor-critic, of the temperature."""


class SoftActorCriticSpec(ReplayActorCriticSpec):
    """Soft actor-critic with two critics and automatic temperature (arXiv:1812.05905, for discrete actions arXiv:1910.07207)."""

    class_path = "slm_lab.agent.algorithm.soft_actor_critic:SoftActorCritic"
    soft = True
    action_kinds: ClassVar[tuple[str, ...]] = ("discrete", "continuous")
    unused_keys: ClassVar[Mapping[str, str]] = {"explore_var_spec": "actions are sampled from the policy"}

    name: Literal["SoftActorCritic"]
    action_pdtype: Literal["default", "Categorical", "GumbelSoftmax", "Normal"] = "default"
    """Probability distribution of actions. The distribution depends only on the action space: with discrete actions, "default",
    "Categorical" and "GumbelSoftmax" all mean Categorical; with continuous actions, "default" and "Normal" mean the tanh of a Normal
    distribution."""
    action_policy: Literal["default", "random"] = "default"
    """How actions are chosen. "default" samples from the action distribution, and "random" chooses all actions with equal probability."""
    critic_reduction: Literal["min", "mean"] | None = None
    """How to combine the values of the two critics. "min" (arXiv:1802.09477, equation 10) underestimates rare actions, and "mean" (double
    average Q-learning, arXiv:2209.10081, without its clip) does not. The default is "mean" for discrete actions and "min" for continuous
    actions."""
    target_entropy: Real | Literal["auto"] = "auto"
    """Target entropy (in nats) for the automatic temperature. "auto" stands for −dim(A) with continuous actions, and for
    target_entropy_ratio · ln|A| with discrete actions."""
    target_entropy_ratio: Fraction = 0.6
    """For discrete actions with target_entropy "auto", the target entropy as a fraction of the maximum entropy, which is ln|A| or, with
    action masks, the mean of ln(number of valid actions)."""
    entropy_anneal: EntropyAnneal | Flag | Real = False
    """Annealing of the target entropy. An object {start_ratio, end_ratio, frames} anneals the automatic target entropy of discrete actions.
    A number anneals the target entropy linearly to this number (in nats) until env.max_frame. With true, the target entropy is annealed
    linearly to 0 for discrete actions and to −2 dim(A) for continuous actions."""
    entropy_penalty_coef: NonNegative = 0.0
    """Weight β of the penalty ½ (H̄ − H)² for discrete actions (after arXiv:2209.10081, equation 11), where H is the entropy of the policy
    and H̄ is the moving average of H (decay 0.99 per gradient step of the policy)."""
    symlog: Flag = False
    """Whether the critics' loss compares the symlog (arXiv:2301.04104, equation 9) of values with the symlog of their targets. All other
    computations use the values themselves."""
    log_alpha_min: Real = -5.0
    """Minimum log of the temperature α."""
    log_alpha_max: Real = 2.0
    """Maximum log of the temperature α."""
    initial_alpha: PositiveReal = 1.0
    """Initial value of the temperature α if α is tuned automatically. The value must be in the interval from exp(log_alpha_min) to
    exp(log_alpha_max). If the default value is outside of this interval, the nearest bound is used."""
    alpha_lr: PositiveReal | None = None
    """Initial learning rate of the temperature, by default the actor's learning rate. The temperature has the same optimizer and learning
    rate schedule as the actor (but Adam if the actor has Muon or Adafactor)."""
    fixed_alpha: PositiveReal | None = None
    """Fixed temperature α. By default, α is tuned automatically, so that the entropy of the policy approaches target_entropy."""
    alpha_anneal_frames: Count | None = None
    """Number of frames over which fixed_alpha is annealed linearly to 0. By default and with 0, fixed_alpha is constant."""
    spectral_norm: Flag = False
    """Whether to apply spectral normalisation (arXiv:1802.05957) to the last fully connected hidden layer of the critics and of their
    target networks (arXiv:2105.05246)."""

    def actor_distribution(self, kind: str) -> tuple[str, dict[str, Any]]:
        return ("Categorical" if kind == "discrete" else "SquashedNormal"), {}


class CrossQSpec(SoftActorCriticSpec):
    """CrossQ (arXiv:1902.05605): soft actor-critic without target networks. The critics batch-normalise states and next states jointly."""

    class_path = "slm_lab.agent.algorithm.soft_actor_critic:SoftActorCritic"
    has_target = False
    recurrent = False

    name: Literal["CrossQ"]  # type: ignore[assignment]  # narrower: the tag of the union


class TQCSpec(SoftActorCriticSpec):
    """Truncated quantile critics (arXiv:2005.04269): soft actor-critic whose critics learn quantiles of the return, and whose targets leave
    out the greatest quantiles."""

    class_path = "slm_lab.agent.algorithm.tqc:TQC"
    action_kinds = ("continuous",)
    unused_keys = {
        **SoftActorCriticSpec.unused_keys,
        "critic_reduction": "targets are the smallest quantiles of all critics",
        "symlog": "quantiles are compared as they are",
        "target_entropy_ratio": _FOR_DISCRETE,
        "entropy_penalty_coef": _FOR_DISCRETE,
    }

    name: Literal["TQC"]  # type: ignore[assignment]  # narrower: the tag of the union
    action_pdtype: Literal["default", "Normal"] = "default"
    """Probability distribution of actions. Both values mean the tanh of a Normal distribution."""
    num_critics: Positive = 5
    """Number of critics N."""
    num_quantiles: Positive = 25
    """Number of quantiles M of each critic."""
    dropped_quantiles: Count = 2
    """Number of quantiles per critic that targets leave out. Targets leave out the greatest quantiles of all critics together. A higher
    number of dropped quantiles reduces overestimation further."""

    @property
    def uses_loss_spec(self) -> bool:
        return False  # the critics learn quantiles with their own loss


class DistributionalSACSpec(SoftActorCriticSpec):
    """Soft actor-critic whose critics learn the probabilities of fixed returns (atoms), as in SimbaV2 (arXiv:2502.15280)."""

    class_path = "slm_lab.agent.algorithm.distributional_sac:DistributionalSAC"
    action_kinds = ("continuous",)
    unused_keys = {
        **SoftActorCriticSpec.unused_keys,
        "symlog": "distributions are compared, not values",
        "target_entropy_ratio": _FOR_DISCRETE,
        "entropy_penalty_coef": _FOR_DISCRETE,
    }

    name: Literal["DistributionalSAC"]  # type: ignore[assignment]  # narrower: the tag of the union
    action_pdtype: Literal["default", "Normal"] = "default"
    """Probability distribution of actions. Both values mean the tanh of a Normal distribution."""
    log_alpha_min: Real = -10.0
    """Minimum log of the temperature α."""
    initial_alpha: PositiveReal = 0.01
    """Initial value of the temperature α if α is tuned automatically. The value must be in the interval from exp(log_alpha_min) to
    exp(log_alpha_max). If the default value is outside of this interval, the nearest bound is used."""
    num_atoms: Positive = 101
    """Number of atoms, at least 2."""
    v_min: Real = -5.0
    """Return of the lowest atom. Soft discounted returns below v_min count as v_min."""
    v_max: Real = 5.0
    """Return of the highest atom, above v_min. Soft discounted returns above v_max count as v_max. The default value of v_max is suitable
    for rewards that are scaled by env.normalize_reward or env.reward_scale."""

    @property
    def uses_loss_spec(self) -> bool:
        return False  # the critics learn distributions with their own loss


class TD3Spec(ReplayActorCriticSpec):
    """Twin delayed deterministic policy gradient (arXiv:1802.09477)."""

    class_path = "slm_lab.agent.algorithm.td3:TD3"
    action_kinds = ("continuous",)

    name: Literal["TD3"]
    action_pdtype: Literal["default"] = "default"
    """Distribution of actions. The only value, "default", means that the output of the actor is the action."""
    action_policy: Exploration = "gaussian"  # type: ignore[assignment]  # the actor has no distribution to sample
    """How to explore. With gaussian, Gaussian noise is added to the actor's action, and the sum is clipped to the bounds. With random,
    actions are uniformly random."""
    explore_var_spec: Schedule | None = constant_schedule(0.1)
    """Schedule, over frames, of the standard deviation of the exploration noise. The standard deviation refers to actions scaled to
    [−1, 1], regardless of the bounds of actions in the environment."""
    policy_delay: Positive = 2
    """Number of critic updates per update of the actor and of the target networks."""
    target_noise: NonNegative = 0.2
    """Standard deviation of the noise that is added to the target actor's actions, which range from −1 to 1 (target policy smoothing). With
    0, no noise is added."""
    target_noise_clip: NonNegative = 0.5
    """Maximum absolute value of the noise of the target actor's actions."""

    def actor_distribution(self, kind: str) -> tuple[str, dict[str, Any]]:
        return "Deterministic", {}


class DDPGSpec(TD3Spec):
    """Deep deterministic policy gradient (arXiv:1509.02971): TD3 with one critic, no target noise and no delayed updates of the policy."""

    class_path = "slm_lab.agent.algorithm.td3:TD3"
    critics = 1

    name: Literal["DDPG"]  # type: ignore[assignment]  # narrower: the tag of the union
    policy_delay: Positive = 1
    """Number of critic updates per update of the actor and of the target networks."""
    target_noise: NonNegative = 0.0
    """Standard deviation of the noise that is added to the target actor's actions, which range from −1 to 1 (target policy smoothing of
    TD3). With 0, no noise is added."""


Algorithm = Annotated[
    RandomSpec
    | ReinforceSpec
    | ActorCriticSpec
    | PPOSpec
    | SILSpec
    | PPOSILSpec
    | SARSASpec
    | VanillaDQNSpec
    | DQNSpec
    | DoubleDQNSpec
    | QRDQNSpec
    | C51Spec
    | PQNSpec
    | SoftActorCriticSpec
    | CrossQSpec
    | TQCSpec
    | DistributionalSACSpec
    | TD3Spec
    | DDPGSpec
    | BCSpec
    | IQLSpec,
    Field(discriminator="name"),
    Extensible(AlgorithmSpec),
]
EPOCHS = (PPOSpec, PQNSpec)
"""Models of those algorithms that learn from rollouts of time_horizon steps, in epochs of minibatches."""
ALGORITHMS: dict[str, type[AlgorithmSpec]] = models_by_name(Algorithm)
"""Maps the names of algorithms to their models."""
