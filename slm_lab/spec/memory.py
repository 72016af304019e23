"""agent.memory: what an algorithm learns from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Strict

from slm_lab.spec.base import Component, Flag, Fraction, NonNegative, Positive, PositiveReal, SpecModel
from slm_lab.spec.schedule import Schedule, constant


class MemorySpec(Component):
    """Keys of every memory, and what rules need to know of it."""

    on_policy: ClassVar[bool] = False
    """Each transition is used once; else it is drawn again and again."""
    episodes: ClassVar[bool] = False
    """Holds whole episodes: training_frequency counts these; else vector steps."""


class ReplayKeys(SpecModel):
    """Keys of every memory that transitions are drawn from again and again."""

    batch_size: Positive = 32
    """Transitions of one batch."""
    max_size: Positive = 100_000
    """Transitions kept at most; the oldest make room. No more is reserved than the Session can still collect."""
    use_cer: Flag = False
    """Combined experience replay (arXiv:1712.01275): the newest transition is in every batch."""


class PriorityKeys(SpecModel):
    """Keys of prioritised replay (arXiv:1511.05952)."""

    alpha: NonNegative = 0.6
    """How far priorities count: 0 is uniform."""
    epsilon: PositiveReal = 1e-4
    """Added to each priority, so that none is 0."""
    beta: Fraction | Schedule = constant(0.4)
    """How far importance weights undo the prioritised sampling: 1 is wholly; a number, or a schedule over frames."""


class SILReplayKeys(SpecModel):
    """Keys of the replay that SIL and PPOSIL have beside their on-policy memory; absent ones are as in Replay and PrioritizedReplay."""

    sil_replay_name: Literal["Replay", "PrioritizedReplay", "SILReplay", "SILPrioritizedReplay"] | None = None
    """SIL, PPOSIL: the memory of past episodes, uniform or prioritised by the clipped advantage; absent: PrioritizedReplay."""
    batch_size: Positive | None = None
    """SIL, PPOSIL: transitions of one batch."""
    max_size: Positive | None = None
    """SIL, PPOSIL: transitions kept at most."""
    use_cer: Flag | None = None
    """SIL, PPOSIL: the newest transition is in every batch."""
    alpha: NonNegative | None = None
    """SIL, PPOSIL: how far priorities count."""
    epsilon: PositiveReal | None = None
    """SIL, PPOSIL: added to each priority."""
    beta: Fraction | Schedule | None = None
    """SIL, PPOSIL: how far importance weights undo the prioritised sampling."""

    @property
    def sil_replay(self) -> ReplaySpec | PrioritizedReplaySpec:
        """The memory of past episodes."""
        given = {key: value for key in SILReplayKeys.model_fields if (value := getattr(self, key)) is not None}
        if given.pop("sil_replay_name", "PrioritizedReplay").endswith("PrioritizedReplay"):
            return PrioritizedReplaySpec(name="PrioritizedReplay", **given)
        return ReplaySpec(name="Replay", **{key: value for key, value in given.items() if key in ReplayKeys.model_fields})


class RolloutMemorySpec(MemorySpec, SILReplayKeys):
    """Keys of the on-policy memories."""

    on_policy = True


class OnPolicyReplaySpec(RolloutMemorySpec):
    """Whole episodes, used once; training_frequency counts episodes."""

    episodes = True

    name: Literal["OnPolicyReplay"]


class OnPolicyBatchReplaySpec(RolloutMemorySpec):
    """A fixed number of vector steps, used once; training_frequency counts vector steps."""

    name: Literal["OnPolicyBatchReplay"]


class OnPolicyCrossEntropySpec(RolloutMemorySpec):
    """Whole episodes, used once, of which only the best are learned from (the cross-entropy method, Rubinstein 1999)."""

    episodes = True

    name: Literal["OnPolicyCrossEntropy"]
    cross_entropy: Annotated[float, Strict(), Field(gt=0, le=1)] = 1.0
    """Share of the episodes that is kept, by total reward."""


class ReplaySpec(MemorySpec, ReplayKeys):
    """Transitions, drawn uniformly (Lin 1992)."""

    name: Literal["Replay"]


class PrioritizedReplaySpec(MemorySpec, ReplayKeys, PriorityKeys):
    """Transitions, drawn in proportion to their temporal-difference error (arXiv:1511.05952)."""

    name: Literal["PrioritizedReplay"]


Memory = Annotated[
    OnPolicyReplaySpec | OnPolicyBatchReplaySpec | OnPolicyCrossEntropySpec | ReplaySpec | PrioritizedReplaySpec,
    Field(discriminator="name"),
]
