"""agent.memory: the rollout storage or replay buffer that an algorithm learns from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Strict

from slm_lab.spec.base import Component, Flag, Fraction, NonNegative, Positive, PositiveReal, SpecModel, by_name
from slm_lab.spec.extension import Extensible
from slm_lab.spec.schedule import Schedule, constant


class MemorySpec(Component):
    """Keys of every memory, and what rules need to know of it."""

    on_policy: ClassVar[bool] = False
    """Each transition is used once; else sampled repeatedly."""
    episodes: ClassVar[bool] = False
    """Holds whole episodes: training_frequency counts these; else vector steps."""


class ReplayKeys(SpecModel):
    """Keys of every replay buffer."""

    batch_size: Positive = 32
    """Transitions per batch."""
    max_size: Positive = 100_000
    """Maximum number of transitions; the oldest are overwritten. Memory is allocated for at most the frames of the Session."""
    use_cer: Flag = False
    """Combined experience replay (arXiv:1712.01275): include the newest transition in every batch."""
    on_device: Flag = False
    """Keep the transitions in the memory of the CUDA device that computes, instead of uploading each batch. On the CPU it is an error."""


class PriorityKeys(SpecModel):
    """Keys of prioritised replay (arXiv:1511.05952)."""

    alpha: NonNegative = 0.6
    """Priority exponent; 0 is uniform sampling."""
    epsilon: PositiveReal = 1e-4
    """Added to each priority, so that none is 0."""
    beta: Fraction | Schedule = constant(0.4)
    """Exponent of importance-sampling weights, 1 corrects fully; a number, or a schedule over frames."""


class SILReplayKeys(SpecModel):
    """Keys of the replay buffer that SIL and PPOSIL have beside their on-policy memory; defaults as in Replay and PrioritizedReplay."""

    sil_replay_name: Literal["Replay", "PrioritizedReplay", "SILReplay", "SILPrioritizedReplay"] | None = None
    """SIL, PPOSIL: replay buffer of past episodes, uniform or prioritised by the clipped advantage; absent: PrioritizedReplay."""
    batch_size: Positive | None = None
    """SIL, PPOSIL: transitions per batch."""
    max_size: Positive | None = None
    """SIL, PPOSIL: maximum number of transitions."""
    use_cer: Flag | None = None
    """SIL, PPOSIL: include the newest transition in every batch."""
    alpha: NonNegative | None = None
    """SIL, PPOSIL: priority exponent."""
    epsilon: PositiveReal | None = None
    """SIL, PPOSIL: added to each priority."""
    beta: Fraction | Schedule | None = None
    """SIL, PPOSIL: exponent of importance-sampling weights."""

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
    """Whole episodes, each used once; training_frequency counts episodes."""

    episodes = True

    name: Literal["OnPolicyReplay"]


class OnPolicyBatchReplaySpec(RolloutMemorySpec):
    """Rollouts of a fixed number of vector steps, each used once; training_frequency counts vector steps."""

    name: Literal["OnPolicyBatchReplay"]


class OnPolicyCrossEntropySpec(RolloutMemorySpec):
    """Whole episodes, each used once, of which only the best are kept (the cross-entropy method, Rubinstein 1999)."""

    episodes = True

    name: Literal["OnPolicyCrossEntropy"]
    cross_entropy: Annotated[float, Strict(), Field(gt=0, le=1)] = 1.0
    """Fraction of episodes to keep, by total reward."""


class ReplaySpec(MemorySpec, ReplayKeys):
    """Replay buffer with uniform sampling (Lin 1992)."""

    name: Literal["Replay"]


class PrioritizedReplaySpec(MemorySpec, ReplayKeys, PriorityKeys):
    """Replay buffer with sampling in proportion to the temporal-difference error (arXiv:1511.05952)."""

    name: Literal["PrioritizedReplay"]


Memory = Annotated[
    OnPolicyReplaySpec | OnPolicyBatchReplaySpec | OnPolicyCrossEntropySpec | ReplaySpec | PrioritizedReplaySpec,
    Field(discriminator="name"),
    Extensible(MemorySpec),
]
MEMORIES: dict[str, type[MemorySpec]] = by_name(Memory)
"""Name → model."""
