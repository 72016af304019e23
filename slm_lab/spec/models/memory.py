"""Models of the section agent.memory of a spec: the rollout storage or replay buffer from which an algorithm learns."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from slm_lab.spec.models.base import (
    Component,
    Count,
    Extensible,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    PositiveReal,
    Schedule,
    SpecModel,
    models_by_name,
)


class MemorySpec(Component):
    """Base class of the models of memories: the keys of every memory, and class attributes that describe the kind of memory."""

    on_policy: ClassVar[bool] = False
    """Whether the algorithm learns from each transition once, and not from repeatedly sampled transitions."""
    episodes: ClassVar[bool] = False
    """Whether the memory stores complete episodes. If the memory stores complete episodes, the key training_frequency counts episodes
    instead of vector steps."""


class SequenceLayout(NamedTuple):
    """Length and overlap of the sequences of transitions that are sampled from a replay buffer to train a recurrent net."""

    burn_in: int
    """Number of steps at the start of a sequence that only update the hidden state, before the steps from which the net learns."""
    window: int
    """Total number of steps of a sequence, including burn_in."""
    stride: int
    """Number of steps of an env from the start of one sequence to the start of the next sequence. As in R2D2, consecutive sequences overlap
    by half of the steps from which the net learns."""

    def count_sequences(self, steps: int) -> int:
        """Return the number of complete sequences in `steps` consecutive transitions of one env."""
        return max(0, (steps - self.window) // self.stride + 1)


class ReplayKeys(SpecModel):
    """Keys of every replay buffer in agent.memory."""

    batch_size: Positive = 32
    """Number of transitions per batch or, with a RecurrentNet, number of sequences (of seq_len transitions) per batch."""
    max_size: Positive = 100_000
    """Maximum number of transitions. When the replay buffer is full, new transitions overwrite the oldest transitions. Memory is allocated
    for at most as many transitions as the Session has frames."""
    use_cer: Flag = False
    """Whether to use combined experience replay (arXiv:1712.01275): each new transition replaces a sampled transition in one batch,
    the oldest new transitions first. If at least batch_size new transitions are waiting, for example at training_start_step, the batch
    contains only new transitions, as in SLM Lab. The priorities of these new transitions are not updated. With a RecurrentNet, the last
    item of a batch is the newest sequence."""
    burn_in: Count | None = None
    """With a RecurrentNet, the number of steps before each sequence in which the net, with its current weights, only updates the stored
    hidden state. The net does not learn from these steps (R2D2, Kapturowski et al., 2019). The default number is half of seq_len."""
    on_device: Flag = False
    """Whether to keep the transitions in the memory of the CUDA device that the agent uses, instead of uploading each batch. With
    env.normalize_obs or normalize_reward, the observations or rewards of a batch are normalised on the CPU, so that on_device has no
    advantage. on_device=true is an error if the agent uses the CPU."""

    def sequence_layout(self, seq_len: int) -> SequenceLayout:
        """Return the length and the overlap of the sequences of transitions from which a recurrent net learns."""
        burn_in = seq_len // 2 if self.burn_in is None else self.burn_in
        return SequenceLayout(burn_in, burn_in + seq_len, max(1, seq_len // 2))


class PriorityKeys(SpecModel):
    """Keys of prioritised replay (arXiv:1511.05952)."""

    alpha: NonNegative = 0.6
    """Exponent of priorities. With 0, transitions are sampled uniformly."""
    epsilon: NonNegative = 1e-4
    """Number that is added to each temporal-difference error, so that no priority is 0. With epsilon 0, a transition with error 0 is hardly
    ever sampled again."""
    beta: Fraction | Schedule | None = None
    """Exponent of importance-sampling weights (1 is the full correction), as a number or a schedule over frames. By default, the exponent
    is 0.4 with a RecurrentNet, and importance-sampling weights are not used with other nets."""
    initial_error: PositiveReal | Literal["greatest"] | None = None
    """Error that determines the priority of a new transition until the transition is first sampled. With "greatest", new transitions get
    the greatest priority so far, as in the paper. The default is "greatest" with a RecurrentNet, and 100,000 with other nets."""
    eta: Fraction = 0.9
    """With a RecurrentNet, the weight η of the maximum error in the priority of a sequence. The priority is η max |error| + (1 − η) mean
    |error| over the transitions of the sequence (Kapturowski et al., 2019)."""


class SILReplayKeys(SpecModel):
    """Keys of the replay buffer that the algorithms SIL and PPOSIL use in addition to their on-policy memory.

    The default values of these keys are the default values of the memories Replay and PrioritizedReplay.
    """

    sil_replay_name: Literal["Replay", "PrioritizedReplay", "SILReplay", "SILPrioritizedReplay"] | None = None
    """SIL, PPOSIL: replay buffer of past episodes, with sampling that is uniform or prioritised by the clipped advantage. The default is
    PrioritizedReplay."""
    batch_size: Positive | None = None
    """SIL, PPOSIL: number of transitions per batch or, with a RecurrentNet, number of sequences (of seq_len transitions) per batch."""
    max_size: Positive | None = None
    """SIL, PPOSIL: maximum number of transitions."""
    use_cer: Flag | None = None
    """SIL, PPOSIL: whether to use combined experience replay (arXiv:1712.01275): each new transition replaces a sampled transition in one
    batch, the oldest new transitions first."""
    burn_in: Count | None = None
    """SIL, PPOSIL with a RecurrentNet: number of steps before each sequence in which the net only updates the hidden state."""
    alpha: NonNegative | None = None
    """SIL, PPOSIL: exponent of priorities."""
    epsilon: NonNegative | None = None
    """SIL, PPOSIL: number that is added to each error."""
    beta: Fraction | Schedule | None = None
    """SIL, PPOSIL: exponent of importance-sampling weights."""
    initial_error: PositiveReal | Literal["greatest"] | None = None
    """SIL, PPOSIL: error that determines the priority of a new transition."""
    eta: Fraction | None = None
    """SIL, PPOSIL with a RecurrentNet: weight η of the maximum error in the priority of a sequence."""

    @property
    def sil_replay(self) -> ReplaySpec | PrioritizedReplaySpec:
        """Return the spec of the replay buffer of past episodes that SIL and PPOSIL use."""
        given = {key: value for key in SILReplayKeys.model_fields if (value := getattr(self, key)) is not None}
        if given.pop("sil_replay_name", "PrioritizedReplay").endswith("PrioritizedReplay"):
            return PrioritizedReplaySpec(name="PrioritizedReplay", **given)
        return ReplaySpec(name="Replay", **{key: value for key, value in given.items() if key in ReplayKeys.model_fields})


class RolloutMemorySpec(MemorySpec, SILReplayKeys):
    """Base class of the models of on-policy memories."""

    on_policy = True


class OnPolicyReplaySpec(RolloutMemorySpec):
    """On-policy memory of complete episodes. Each episode is used once. With this memory, the key training_frequency counts episodes."""

    class_path = "slm_lab.agent.rollout.rollout:OnPolicyReplay"
    episodes = True

    name: Literal["OnPolicyReplay"]


class OnPolicyBatchReplaySpec(RolloutMemorySpec):
    """On-policy memory of rollouts with a fixed number of vector steps. Each rollout is used once. With this memory, the key
    training_frequency counts vector steps."""

    class_path = "slm_lab.agent.rollout.rollout:OnPolicyBatchReplay"
    name: Literal["OnPolicyBatchReplay"]


class OnPolicyCrossEntropySpec(RolloutMemorySpec):
    """On-policy memory of complete episodes that keeps only the best episodes, each of which is used once (cross-entropy method, Rubinstein
    1999)."""

    class_path = "slm_lab.agent.rollout.rollout:OnPolicyCrossEntropy"
    episodes = True

    name: Literal["OnPolicyCrossEntropy"]
    cross_entropy: Fraction = 1.0
    """Quantile (with linear interpolation) of the total training rewards of all episodes: an episode is kept if its total training reward
    is at or above this quantile. With 0.8, the best fifth of the episodes is kept. With 0 or 1, all episodes are kept."""


class ReplaySpec(MemorySpec, ReplayKeys):
    """Replay buffer of the newest max_size transitions, with uniform sampling (Lin 1992)."""

    class_path = "slm_lab.agent.replay.replay:Replay"
    name: Literal["Replay"]
    demonstration_fraction: Fraction | None = None
    """With meta.demonstrations, the fraction of each batch that is drawn from the recorded episodes, above 0 and below 1 (RLPD,
    arXiv:2302.02948). The default fraction is 0.5."""


class PrioritizedReplaySpec(MemorySpec, ReplayKeys, PriorityKeys):
    """Replay buffer with sampling in proportion to the temporal-difference error (arXiv:1511.05952, proportional variant)."""

    class_path = "slm_lab.agent.replay.replay:PrioritizedReplay"
    name: Literal["PrioritizedReplay"]


class HindsightReplaySpec(MemorySpec, ReplayKeys):
    """Hindsight experience replay (arXiv:1707.01495): transitions are replayed with goals that were achieved later."""

    class_path = "slm_lab.agent.replay.hindsight:HindsightReplay"
    name: Literal["HindsightReplay"]
    goal_strategy: Literal["future", "final", "episode"] = "future"
    """Which goal replaces the real goal of a replayed transition: a goal that was achieved later in the same episode (future), at the end
    of the episode (final), or at any time in the episode (episode)."""
    goals: Positive = 4
    """Average number k of replayed transitions with a replaced goal for each replayed transition with the real goal."""
    goal_threshold: PositiveReal | None = None
    """Distance up to which a goal counts as reached. With goal_threshold, each replayed reward is 0 if the goal is reached and −1
    otherwise, regardless of the env's own rewards. By default, the env's method compute_reward computes rewards (and the env's method
    compute_terminated, if it exists, computes terminations)."""


Memory = Annotated[
    OnPolicyReplaySpec | OnPolicyBatchReplaySpec | OnPolicyCrossEntropySpec | ReplaySpec | PrioritizedReplaySpec | HindsightReplaySpec,
    Field(discriminator="name"),
    Extensible(MemorySpec),
]
MEMORIES: dict[str, type[MemorySpec]] = models_by_name(Memory)
"""Maps the names of memories to their models."""
SEQUENCE_MEMORIES = ("Replay", "PrioritizedReplay")
"""Names of the replay buffers that can sample sequences of transitions."""
