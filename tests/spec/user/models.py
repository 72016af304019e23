"""Examples of user-defined spec models: keys, capabilities and implementation. Importing this module does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from slm_lab.spec.models.algorithm import AlgorithmSpec, PPOSpec
from slm_lab.spec.models.base import SpecModel
from slm_lab.spec.models.memory import MemorySpec
from slm_lab.spec.models.net import NetSpec


class Bonus(SpecModel):
    """Section inside the algorithm section."""

    weight: float = 0.1


class EvolutionSpec(AlgorithmSpec):
    """Evolution strategies, declared off-policy for the tests."""

    on_policy = False
    has_target = True
    recurrent = False
    memories: ClassVar[tuple[str, ...]] = ("Replay",)
    samplers = ("async",)

    sigma: Annotated[float, Field(gt=0)] = 0.1
    """Noise."""
    population: int
    """Members."""
    bonus: Bonus = Bonus()

    @classmethod
    def implementation(cls) -> Any:
        import torch

        return torch.nn.Module


class EpisodicSpec(AlgorithmSpec):
    """On-policy algorithm with the defaults of AlgorithmSpec."""

    @classmethod
    def implementation(cls) -> Any:
        return object


class RingSpec(MemorySpec):
    """A replay buffer."""

    size: int = 100

    @classmethod
    def implementation(cls) -> Any:
        return object


class WideNet(NetSpec):
    """A net with a hidden state."""

    recurrent = True

    width: int = 8

    @classmethod
    def implementation(cls) -> Any:
        return object


class Unbuildable(NetSpec):
    """Lacks implementation()."""


class StillPPO(PPOSpec):
    """Inherits the name of a built-in algorithm."""

    @classmethod
    def implementation(cls) -> Any:
        return object


class Undefined(NetSpec):
    """Has an annotation with an undefined name."""

    width: Nonsense  # type: ignore[name-defined]  # noqa: F821

    @classmethod
    def implementation(cls) -> Any:
        return object
