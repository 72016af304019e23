"""Types and base classes that every spec model uses."""

from __future__ import annotations

from typing import Annotated, Any, get_args

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
