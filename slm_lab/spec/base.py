"""The parts every spec model shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class SpecModel(BaseModel):
    """A frozen section of a spec: unknown keys are refused, each key's docstring is its description in editors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a spec.

    `path` is the JSON path in the user's file ("agent.algorithm.gama"), "" for the file as a whole; `message` names
    what was seen, what is allowed and the nearest right thing.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(ValueError):
    """A spec cannot be used; carries every problem found, each with its path."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join([f"{source}: {len(problems)} problem{'s' * (len(problems) > 1)}", *(f"  {p}" for p in problems)]))
