"""Models of the key env.schedule of a spec: values of constructor arguments or attributes of the env that change during training."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from slm_lab.spec.models.base import Schedule, schedule_order_problem

EPISODES = 20
"""Default number of episodes whose mean return is compared with the return at which the value changes."""
_RETURN_KEYS = {"by", "start", "steps", "episodes"}


class StepRule(NamedTuple):
    """Rule with a sequence of values. Each value is used from a certain frame, or from a certain mean return, until the next value is
    used."""

    by: Literal["frame", "return"]
    bounds: tuple[float, ...]
    """Frames or returns from which the values are used. The first value is used from the start of training."""
    values: tuple[Any, ...]
    episodes: int = EPISODES
    """If by="return", the number of episodes whose mean return is compared with the bounds."""

    def at(self, frame: int) -> Any:
        """Return the value at a frame or, if by="return", the first value."""
        return self.values[max(0, bisect_right(self.bounds, frame) - 1)] if self.by == "frame" else self.values[0]

    def to_number(self, value: Any) -> float:
        """Return a value of the rule as a number for the log. For a value that is not a number, return its index in `values`."""
        return float(value) if isinstance(value, bool | int | float) else float(self.values.index(value))


class ScheduleRule(NamedTuple):
    """Rule with a numeric value that follows a Schedule over frames."""

    schedule: Any

    @property
    def values(self) -> tuple[float, float]:
        """The first and the last value that the schedule has during training."""
        return self.schedule.value(0), self.schedule.last

    def at(self, frame: int) -> float:
        value: float = self.schedule.value(frame)
        return value

    def to_number(self, value: Any) -> float:
        return float(value)


Rule = StepRule | ScheduleRule
"""Rule by which the value of an argument or attribute of the env changes."""
_SCHEDULE: TypeAdapter[Any] = TypeAdapter(Schedule)


def parse_rule(value: Any) -> Rule:
    """Return the rule that an entry of env.schedule describes. Raises ValueError if the entry is invalid."""
    if isinstance(value, list):
        steps = _check_pairs(value, "frame")
        if steps[0][0] != 0:
            raise ValueError(f"the first frame must be 0, not {steps[0][0]}: the first value is used from the start of training")
        _check_kinds([step[1] for step in steps])
        return StepRule("frame", *_split_pairs(steps))
    if isinstance(value, dict) and "by" in value:
        return _parse_return_rule(value)
    try:
        schedule = _SCHEDULE.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = ".".join(map(str, first["loc"][1:]))
        raise ValueError(f"{f'{what}: ' if what else ''}{_error_reason(first)}; must be {FORMS}") from None
    if (problem := schedule_order_problem(schedule)) is not None:
        raise ValueError(f"end_step {problem}")
    return ScheduleRule(schedule)


FORMS = (
    '[[frame, value], …], a schedule such as {"name": "linear_decay", …}, '
    'or {"by": "return", "start": value, "steps": [[return, value], …]}'
)


def _error_reason(error: Any) -> str:
    return "not one of these" if error["type"].startswith(("union_tag", "model_", "dict_")) else str(error["msg"]).lower()


def _parse_return_rule(value: dict[str, Any]) -> StepRule:
    unknown = sorted(value.keys() - _RETURN_KEYS)
    missing = [key for key in ("start", "steps") if key not in value]
    if value["by"] != "return":
        raise ValueError(f'"by" must be "return", not {json.dumps(value["by"])}; for frames use [[frame, value], …]')
    if unknown or missing:
        what = f'unknown key "{unknown[0]}"' if unknown else f'"{missing[0]}" is missing'
        raise ValueError(f"{what}; keys: by, start, steps, episodes")
    episodes = value.get("episodes", EPISODES)
    if type(episodes) is not int or episodes < 1:
        raise ValueError(f'"episodes" must be a whole number ≥ 1, not {json.dumps(episodes)}')
    bounds, values = _split_pairs(_check_pairs(value["steps"], "return"))
    _check_kinds([value["start"], *values])
    return StepRule("return", (-math.inf, *bounds), (value["start"], *values), episodes)


def _check_pairs(steps: Any, what: Literal["frame", "return"]) -> list[Any]:
    """Return `steps` if it is a valid list [[frame or return, value], …], else raise ValueError."""
    name = "" if what == "frame" else '"steps" '
    if not isinstance(steps, list) or not steps:
        raise ValueError(f"{name}must be a list of one or more pairs [{what}, value], not {json.dumps(steps)}")
    for index, step in enumerate(steps):
        if not isinstance(step, list) or len(step) != 2 or type(step[0]) not in (int, float):
            raise ValueError(f"{name}must be a list of pairs [{what}, value] with numbers as {what}s; item {index} is {json.dumps(step)}")
    if what == "frame" and any(later[0] <= step[0] for step, later in pairwise(steps)):  # a harder env may give lower returns
        raise ValueError("the frames must increase")
    return steps


def _check_kinds(values: Sequence[Any]) -> None:
    """Raise ValueError if some values of a schedule are numbers and others are strings, lists or objects. The value null and booleans can
    be combined with all values."""
    kinds = {_kind(value): value for value in values if value is not None and not isinstance(value, bool)}
    if len(kinds) > 1:
        (kind, value), (other, other_value), *_ = kinds.items()
        raise ValueError(f"the values must be of one kind; {value!r} is {kind}, and {other_value!r} is {other}")


def _kind(value: Any) -> str:
    match value:
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"


def _split_pairs(steps: list[Any]) -> tuple[tuple[float, ...], tuple[Any, ...]]:
    return tuple(float(step[0]) for step in steps), tuple(step[1] for step in steps)


def _check_rule(value: Any) -> Any:
    try:
        parse_rule(value)
    except ValueError as error:
        raise PydanticCustomError("value_error", "{message}", {"message": str(error)}) from None
    return value


_STEP = {"type": "array", "minItems": 2, "maxItems": 2}
_STEPS = {"type": "array", "items": _STEP, "minItems": 1}
_BY_RETURN = {"by": {"const": "return"}, "start": {}, "steps": _STEPS, "episodes": {"type": "integer", "minimum": 1, "default": EPISODES}}
_JSON_SCHEMA = {
    "anyOf": [
        _STEPS,
        {"type": "object", "properties": _BY_RETURN, "required": ["by", "start", "steps"], "additionalProperties": False},
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    ]
}
Scheduled = Annotated[Any, AfterValidator(_check_rule), WithJsonSchema(_JSON_SCHEMA)]
"""Type of an entry of env.schedule, as the entry is written in a spec file (see `parse_rule`)."""
