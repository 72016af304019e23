"""agent.memory: what an algorithm learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slm_lab.spec.base import SpecModel


class OnPolicyReplaySpec(SpecModel):
    """Whole episodes, used once; training_frequency counts episodes."""

    name: Literal["OnPolicyReplay"]


class OnPolicyBatchReplaySpec(SpecModel):
    """A fixed number of vector steps, used once; training_frequency counts vector steps."""

    name: Literal["OnPolicyBatchReplay"]


Memory = Annotated[OnPolicyReplaySpec | OnPolicyBatchReplaySpec, Field(discriminator="name")]
