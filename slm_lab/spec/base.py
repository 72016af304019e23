"""Types and base classes that every spec model uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict


def whole(value: Any) -> Any:
    """Accept 1e6 as a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# No coercion: "8" is not a number, 1 is not true.
Flag = Annotated[bool, Strict()]
Real = Annotated[float, Strict()]
Positive = Annotated[int, Strict(), Field(gt=0, lt=2**63), BeforeValidator(whole)]
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63), BeforeValidator(whole)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**32), BeforeValidator(whole)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1)]
NonNegative = Annotated[float, Strict(), Field(ge=0)]
PositiveReal = Annotated[float, Strict(), Field(gt=0)]


class SpecModel(BaseModel):
    """A frozen section of a spec. Unknown keys are errors; the docstring below a key is its description in editors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Component(SpecModel):
    """A section that is chosen by `name`: one of the built-in models, or the user's own by "package.module:Class" (see extension.py)."""

    name: str

    @classmethod
    def implementation(cls) -> Any:
        """Return the class to build. A user's model must define this; it imports torch here, not at the top of its module."""
        raise NotImplementedError(f"{cls.__module__}:{cls.__qualname__} must define the classmethod implementation()")


def by_name(union: Any) -> dict[str, Any]:
    """Return name → model of an annotated union of built-in components."""
    return {get_args(model.model_fields["name"].annotation)[0]: model for model in get_args(get_args(union)[0])}


ProblemCode = Literal["unknown", "missing", "invalid"]
"""Kind of error: a key that no section has, a key that is required, a value that is not allowed here."""


@dataclass(frozen=True)
class Problem:
    """One error in a spec."""

    path: str
    """JSON path in the user's file ("agent.algorithm.gama"); "" for the file as a whole."""
    message: str
    """The value found, the values allowed, and the nearest of these."""
    code: ProblemCode = "invalid"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(ValueError):
    """A spec is invalid; `problems` has every error found, each with its path."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        lines = [f"{source}: {len(problems)} problem{'s' * (len(problems) > 1)}", *(f"  {p}" for p in problems)]
        # A lone surrogate (from "\ud800") cannot be encoded, and an error must be printable.
        super().__init__("\n".join(lines).encode("utf-8", "backslashreplace").decode())

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, list[Problem]]]:
        """Pickle the problems too."""
        return SpecError, (self.source, self.problems)
