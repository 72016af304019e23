"""Types and base classes that every spec model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict


def _whole(value: Any) -> Any:
    """1e6 is a whole number too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON says what a value is, so nothing is coerced: "8" is no number, 1 is not true.
Flag = Annotated[bool, Strict()]
Real = Annotated[float, Strict()]
Positive = Annotated[int, Strict(), Field(gt=0, lt=2**63), BeforeValidator(_whole)]
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63), BeforeValidator(_whole)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**32), BeforeValidator(_whole)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1)]
NonNegative = Annotated[float, Strict(), Field(ge=0)]
PositiveReal = Annotated[float, Strict(), Field(gt=0)]


class SpecModel(BaseModel):
    """A frozen section of a spec: unknown keys are refused, each key's docstring is its description in editors (see schema.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Component(SpecModel):
    """A section that is chosen by `name`: one of the built-in models, or the user's own by "package.module:Class" (see extension.py)."""

    name: str

    @classmethod
    def implementation(cls) -> Any:
        """Return the class to build. A user's model must define this; it imports torch here, not at the top of its module."""
        raise NotImplementedError(f"{cls.__module__}:{cls.__qualname__} must define the classmethod implementation()")


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
        lines = [f"{source}: {len(problems)} problem{'s' * (len(problems) > 1)}", *(f"  {p}" for p in problems)]
        # A lone surrogate (from "\ud800") has no UTF-8 form, and an error must be printable anywhere.
        super().__init__("\n".join(lines).encode("utf-8", "backslashreplace").decode())

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, list[Problem]]]:
        """A SpecError crosses process borders whole."""
        return SpecError, (self.source, self.problems)
