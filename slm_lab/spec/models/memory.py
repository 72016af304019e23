"""agent.memory: the rollout storage or replay buffer that an algorithm learns from."""

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
    """Keys of every memory, and the properties that rules need."""

    on_policy: ClassVar[bool] = False
    """Whether each transition is used once; if False, transitions are sampled repeatedly."""
    episodes: ClassVar[bool] = False
    """Whether the memory stores complete episodes, so that training_frequency counts episodes; if False, it counts vector steps."""


class Sequences(NamedTuple):
    """Form of the sequences of transitions in a replay buffer."""

    burn_in: int
    """Number of steps before the steps that the net learns from."""
    window: int
    """Total number of steps, including burn_in."""
    stride: int
    """Number of steps of an env from the start of one sequence to the start of the next. Sequences overlap by half of the steps that the
    net learns from, as in R2D2."""

    def number(self, steps: int) -> int:
        """Return the number of complete sequences of one env after `steps` transitions."""
        return max(0, (steps - self.window) // self.stride + 1)


class ReplayKeys(SpecModel):
    """Keys of every replay buffer."""

    batch_size: Positive = 32
    """Transitions per batch; with a RecurrentNet, sequences (of seq_len transitions) per batch."""
    max_size: Positive = 100_000
    """Maximum number of transitions; when the buffer is full, the oldest are overwritten. Memory is allocated for at most as many
    transitions as the Session has frames."""
    use_cer: Flag = False
    """Combined experience replay (arXiv:1712.01275): the last rows of a batch are the transitions that were added since the previous
    batch, oldest first and at most batch_size of them; the priorities of transitions in these rows are not updated. With a RecurrentNet,
    the last item of a batch is the newest sequence."""
    burn_in: Count | None = None
    """RecurrentNet: number of steps before each sequence over which the net only updates the stored hidden state with its present weights;
    it does not learn from these steps (R2D2, Kapturowski et al. 2019). Default: half of seq_len."""
    on_device: Flag = False
    """Keep the transitions in the memory of the CUDA device that the agent uses, instead of uploading each batch. An error if the device is
    the CPU."""

    def sequences(self, seq_len: int) -> Sequences:
        """Return the form of the sequences that a recurrent net learns from."""
        burn_in = seq_len // 2 if self.burn_in is None else self.burn_in
        return Sequences(burn_in, burn_in + seq_len, max(1, seq_len // 2))


class PriorityKeys(SpecModel):
    """Keys of prioritised replay (arXiv:1511.05952)."""

    alpha: NonNegative = 0.6
    """Priority exponent; 0 is uniform sampling."""
    epsilon: NonNegative = 1e-4
    """Added to each error, so that no priority is 0. With epsilon 0, a transition with error 0 is hardly ever sampled again."""
    beta: Fraction | Schedule | None = None
    """Exponent of importance-sampling weights (1: full correction), as a number or a schedule over frames. Default: no weights; with a
    RecurrentNet, 0.4."""
    initial_error: PositiveReal | Literal["greatest"] | None = None
    """Error that determines the priority of a new transition until it is first sampled. "greatest": use the greatest priority so far, as in
    the paper. Default: 100,000; with a RecurrentNet, "greatest"."""
    eta: Fraction = 0.9
    """RecurrentNet: weight η of the maximum in the priority of a sequence, which is η max |error| + (1 − η) mean |error| over the
    transitions of the sequence (Kapturowski et al. 2019)."""


class SILReplayKeys(SpecModel):
    """Keys of the replay buffer that SIL and PPOSIL use besides their on-policy memory; defaults as in Replay and PrioritizedReplay."""

    sil_replay_name: Literal["Replay", "PrioritizedReplay", "SILReplay", "SILPrioritizedReplay"] | None = None
    """SIL, PPOSIL: replay buffer of past episodes, uniform or prioritised by the clipped advantage; default: PrioritizedReplay."""
    batch_size: Positive | None = None
    """SIL, PPOSIL: transitions per batch; with a RecurrentNet, sequences (of seq_len transitions) per batch."""
    max_size: Positive | None = None
    """SIL, PPOSIL: maximum number of transitions."""
    use_cer: Flag | None = None
    """SIL, PPOSIL: the last rows of a batch are the transitions that were added since the previous batch."""
    burn_in: Count | None = None
    """SIL, PPOSIL with a RecurrentNet: number of steps before each sequence over which the net only updates its hidden state."""
    alpha: NonNegative | None = None
    """SIL, PPOSIL: priority exponent."""
    epsilon: NonNegative | None = None
    """SIL, PPOSIL: added to each error."""
    beta: Fraction | Schedule | None = None
    """SIL, PPOSIL: exponent of importance-sampling weights."""
    initial_error: PositiveReal | Literal["greatest"] | None = None
    """SIL, PPOSIL: error that determines the priority of a new transition."""
    eta: Fraction | None = None
    """SIL, PPOSIL with a RecurrentNet: weight η of the maximum error in the priority of a sequence."""

    @property
    def sil_replay(self) -> ReplaySpec | PrioritizedReplaySpec:
        """Return the spec of the replay buffer of past episodes."""
        given = {key: value for key in SILReplayKeys.model_fields if (value := getattr(self, key)) is not None}
        if given.pop("sil_replay_name", "PrioritizedReplay").endswith("PrioritizedReplay"):
            return PrioritizedReplaySpec(name="PrioritizedReplay", **given)
        return ReplaySpec(name="Replay", **{key: value for key, value in given.items() if key in ReplayKeys.model_fields})


class RolloutMemorySpec(MemorySpec, SILReplayKeys):
    """Keys of the on-policy memories."""

    on_policy = True


class OnPolicyReplaySpec(RolloutMemorySpec):
    """Complete episodes, each used once; training_frequency counts episodes."""

    class_path = "slm_lab.agent.rollout.rollout:OnPolicyReplay"
    episodes = True

    name: Literal["OnPolicyReplay"]


class OnPolicyBatchReplaySpec(RolloutMemorySpec):
    """Rollouts of a fixed number of vector steps, each used once; training_frequency counts vector steps."""

    class_path = "slm_lab.agent.rollout.rollout:OnPolicyBatchReplay"
    name: Literal["OnPolicyBatchReplay"]


class OnPolicyCrossEntropySpec(RolloutMemorySpec):
    """Complete episodes, of which only the best are kept; each is used once (the cross-entropy method, Rubinstein 1999)."""

    class_path = "slm_lab.agent.rollout.rollout:OnPolicyCrossEntropy"
    episodes = True

    name: Literal["OnPolicyCrossEntropy"]
    cross_entropy: Fraction = 1.0
    """Keep the episodes whose total training reward is at or above this quantile of all episodes (linear interpolation): with 0.8, the best
    fifth; with 0 or 1, all."""


class ReplaySpec(MemorySpec, ReplayKeys):
    """Replay buffer with uniform sampling (Lin 1992)."""

    class_path = "slm_lab.agent.replay.replay:Replay"
    name: Literal["Replay"]
    demonstration_fraction: Fraction | None = None
    """With meta.demonstrations: share of each batch that is drawn from the recorded episodes, above 0 and below 1 (RLPD,
    arXiv:2302.02948); default: 0.5."""


class PrioritizedReplaySpec(MemorySpec, ReplayKeys, PriorityKeys):
    """Replay buffer with sampling in proportion to the temporal-difference error (arXiv:1511.05952)."""

    class_path = "slm_lab.agent.replay.replay:PrioritizedReplay"
    name: Literal["PrioritizedReplay"]


class HindsightReplaySpec(MemorySpec, ReplayKeys):
    """Hindsight experience replay (arXiv:1707.01495): transitions are replayed with goals that were achieved later."""

    class_path = "slm_lab.agent.replay.hindsight:HindsightReplay"
    name: Literal["HindsightReplay"]
    goal_strategy: Literal["future", "final", "episode"] = "future"
    """The goal that replaces the real goal of a replayed transition: a goal achieved later in the same episode (future), at the end of the
    episode (final), or at any time in the episode (episode)."""
    goals: Positive = 4
    """k: average number of replayed transitions with a replaced goal for each replayed transition with the real goal."""
    goal_threshold: PositiveReal | None = None
    """Distance up to which a goal counts as reached. All replayed rewards are then 0 if the goal is reached and −1 otherwise, regardless of
    the env's own rewards. Default: rewards are computed by the env's compute_reward (and terminations by its compute_terminated, if it has
    this method)."""


Memory = Annotated[
    OnPolicyReplaySpec | OnPolicyBatchReplaySpec | OnPolicyCrossEntropySpec | ReplaySpec | PrioritizedReplaySpec | HindsightReplaySpec,
    Field(discriminator="name"),
    Extensible(MemorySpec),
]
MEMORIES: dict[str, type[MemorySpec]] = models_by_name(Memory)
"""Name → model."""
SEQUENCE_MEMORIES = ("Replay", "PrioritizedReplay")
"""Replay buffers that can sample sequences."""
