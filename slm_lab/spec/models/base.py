"""Types and base classes that several sections of a spec use: numbers, components, the user's own components, and schedules.

A spec can name a user's own algorithm, net or memory by `name: "package.module:Class"`. The named class is a pydantic model, a subclass of
AlgorithmSpec, NetSpec or MemorySpec. The fields of a user's model are the keys of the section of the spec, the ClassVars of the model
declare the properties that the rules (slm_lab.spec.rules) need, and the classmethod `implementation()` of the model returns the class to
build. The module that defines a user's model is imported when a spec is checked. This module should import torch only inside
`implementation()`.
"""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from slm_lab.lib.text import error_line
from slm_lab.spec.report import nearest_hint


def to_integer(value: Any) -> Any:
    """Return a float without a fraction, such as 1e6, as an integer, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


OUT_OF_RANGE = "float32_range"
"""Type of the pydantic error for a number outside of ±3.4e38, about the range of float32."""


def _check_float32(value: float) -> float:
    if abs(value) > 3.4e38:
        raise PydanticCustomError(OUT_OF_RANGE, "must be from -3.4e38 to 3.4e38 (float32), not {value}", {"value": value})
    return value


Float32 = AfterValidator(_check_float32)
# No coercion: "8" is not a number, 1 is not true.
Flag = Annotated[bool, Strict()]
Real = Annotated[float, Strict(), Float32]
Positive = Annotated[int, Strict(), Field(gt=0, lt=2**63), BeforeValidator(to_integer)]
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63), BeforeValidator(to_integer)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**32), BeforeValidator(to_integer)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1)]
NonNegative = Annotated[float, Strict(), Field(ge=0), Float32]
PositiveReal = Annotated[float, Strict(), Field(gt=0), Float32]
AboveOne = Annotated[float, Strict(), Field(gt=1), Float32]


class SpecModel(BaseModel):
    """Base class of the frozen sections of a spec. Unknown keys of a section are errors. Editors show the docstring below a key as the
    description of the key."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Component(SpecModel):
    """Base class of the sections of a spec whose key `name` selects a built-in model or, as "package.module:Class", a user's own model."""

    class_path: ClassVar[str]
    """Import path "package.module:Class" of the class that a built-in model configures. A subclass of a built-in model must set its own
    path."""

    name: str

    @classmethod
    def implementation(cls) -> Any:
        """Return the class that implements the component. A user's model must define this method, and should import torch only inside this
        method."""
        if "class_path" in vars(cls):
            module, _, name = cls.class_path.partition(":")
            return getattr(importlib.import_module(module), name)
        raise NotImplementedError(f"{cls.__module__}:{cls.__qualname__} must define the classmethod implementation()")


def models_by_name(union: Any) -> dict[str, Any]:
    """Return a dict from the name of each built-in component to its model.

    Args: union: annotated union of the models, such as `Algorithm`.
    """
    return {get_args(model.model_fields["name"].annotation)[0]: model for model in get_args(get_args(union)[0])}


PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""Regular expression for the name "package.module:Class" of a component that is not built in."""
ERROR = "extension"
"""Type of the pydantic error for a name "package.module:Class" that cannot be resolved."""


class ExtensionError(ValueError):
    """Raised if "package.module:Class" does not name a usable spec model. The message of the error says why the model is not usable."""


def is_extension(name: Any) -> bool:
    """Return whether the name of a component refers to a user's own class."""
    return isinstance(name, str) and ":" in name


def component_base(model: type[Component]) -> type[Component]:
    """Return the base class of a component's model: AlgorithmSpec, NetSpec or MemorySpec."""
    return next(base for base in model.__mro__ if Component in base.__bases__)


def import_class(name: str, base: type, expected: str = "", also: tuple[type, ...] = ()) -> Any:
    """Import and return the class at the path `name`, which has the form "package.module:Class".

    Args: expected: end of the error message for an object that is not a valid class.

    Raises ExtensionError if the class does not exist, or if the class is not a subclass of `base` or of a class in `also`.
    """
    path, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(path)
    except (Exception, SystemExit) as error:  # the user's module can raise any error
        if isinstance(error, ModuleNotFoundError) and error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise ExtensionError(f"cannot import '{path}': no module '{error.name}' is installed or in the current folder") from None
        raise ExtensionError(f"importing '{path}' failed: {type(error).__name__}: {error}") from error
    imported = getattr(module, attribute, None)
    if imported is None:
        classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
        fitting = [key for key, value in classes.items() if issubclass(value, (base, *also))]
        raise ExtensionError(f"'{path}' has no class '{attribute}'{nearest_hint(attribute, fitting or classes)}")
    if not (isinstance(imported, type) and issubclass(imported, (base, *also))):
        raise ExtensionError(f"'{name}' is not a subclass of {base.__module__}.{base.__qualname__}{expected}")
    return imported


def import_model(name: str, kind: type[Component]) -> type[Component]:
    """Import the spec model that `name` refers to.

    Raises: ExtensionError if `name` is not an import path of a subclass of `kind`, or if the subclass has no `implementation` of its own,
        inherits the name of a built-in model, or has annotations that pydantic cannot resolve.
    """
    if not re.fullmatch(PATTERN, name):
        raise ExtensionError(f"invalid import path '{name}'; expected \"package.module:Class\"")
    model: type[Component] = import_class(name, kind, "; expected the pydantic model of its keys")
    if model.implementation.__func__ is Component.implementation.__func__:  # type: ignore[attr-defined]  # a bound classmethod
        raise ExtensionError(f"'{name}' has no classmethod implementation(), which returns the class to build")
    if get_origin(model.model_fields["name"].annotation) is Literal:
        raise ExtensionError(f"'{name}' inherits the name of a built-in model; declare `name: str` in it")
    try:
        model.model_rebuild()
    except Exception as error:  # the model has an annotation that pydantic cannot resolve
        raise ExtensionError(f"'{name}' is not a valid pydantic model: {error_line(error)}") from error
    return model


@dataclass(frozen=True)
class Extensible:
    """Annotation of a union of built-in models. If the key `name` of a section is "package.module:Class", the model of this name validates
    the section."""

    kind: type[Component]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        inner = handler(source)
        serialization = core_schema.wrap_serializer_function_ser_schema(self._dump, info_arg=True, schema=inner)
        return core_schema.no_info_wrap_validator_function(self._validate, inner, serialization=serialization)

    def _validate(self, value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, self.kind) and is_extension(value.name):
            return value
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not is_extension(name):
            return validate(value)
        try:
            model = import_model(name, self.kind)
        except ExtensionError as error:
            raise PydanticCustomError(ERROR, "{message}", {"message": str(error)}) from None
        return model.model_validate(value)

    def _dump(self, value: Any, dump: core_schema.SerializerFunctionWrapHandler, info: core_schema.SerializationInfo) -> Any:
        return value.model_dump(mode=info.mode) if is_extension(value.name) else dump(value)


class NoDecay(SpecModel):
    """Schedule with the constant value start_val."""

    name: Literal["no_decay"]
    start_val: Real
    """Constant value of the schedule."""
    end_val: Real | None = None
    """Key of other schedules, without effect in no_decay."""
    start_step: NonNegative = 0
    """Key of other schedules, without effect in no_decay."""
    end_step: Real | None = None
    """Key of other schedules, without effect in no_decay."""

    def value(self, frame: int) -> float:
        return self.start_val

    @property
    def last(self) -> float:
        """Return the last value of the schedule."""
        return self.start_val


class _Decay(SpecModel):
    start_val: Real
    """Value of the schedule up to start_step."""
    end_val: Real
    """Value of the schedule from end_step on. end_val may be above start_val."""
    start_step: NonNegative = 0
    """Frame at which the value starts to change."""
    end_step: NonNegative
    """Frame at which the value reaches end_val."""

    def value(self, frame: int) -> float:
        if frame <= self.start_step:
            return self.start_val
        if frame >= self.end_step:
            return self.end_val
        return self._interpolate((frame - self.start_step) / (self.end_step - self.start_step), frame)

    @property
    def last(self) -> float:
        """Return the last value of the schedule."""
        return self.end_val

    def _interpolate(self, fraction: float, frame: int) -> float:
        raise NotImplementedError


class LinearDecay(_Decay):
    """Schedule that changes linearly from start_val at start_step to end_val at end_step."""

    name: Literal["linear_decay"]

    def _interpolate(self, fraction: float, frame: int) -> float:
        return self.start_val + fraction * (self.end_val - self.start_val)


class RateDecay(_Decay):
    """Schedule of exponential decay from start_val at start_step to end_val at end_step.

    The schedule consists of f decays by the factor r, where f is frequency and r is decay_rate. The value after k decays is end_val +
    (start_val − end_val) (rᵏ − rᶠ) / (1 − rᶠ).
    """

    name: Literal["rate_decay"]
    decay_rate: Annotated[float, Strict(), Field(gt=0, lt=1)] = 0.9
    """Factor r of each decay."""
    frequency: PositiveReal = 20.0
    """Number f of decays between start_step and end_step."""

    def _interpolate(self, fraction: float, frame: int) -> float:
        exponent = math.log(self.decay_rate) * self.frequency
        # expm1 keeps the quotient exact for few or weak decays, which are nearly linear
        return self.end_val + (self.start_val - self.end_val) * (1.0 - math.expm1(exponent * fraction) / math.expm1(exponent))


class PeriodicDecay(_Decay):
    """Schedule of a cosine wave between end_val and a peak that decreases linearly from start_val at start_step to end_val at end_step."""

    name: Literal["periodic_decay"]
    frequency: PositiveReal = 60.0
    """Number of periods of the cosine wave between start_step and end_step."""

    def _interpolate(self, fraction: float, frame: int) -> float:
        amplitude = (self.start_val - self.end_val) * (1.0 - fraction)
        return self.end_val + amplitude * 0.5 * (1.0 + math.cos(2.0 * math.pi * self.frequency * fraction))


Schedule = Annotated[NoDecay | LinearDecay | RateDecay | PeriodicDecay, Field(discriminator="name")]


def schedule_order_problem(schedule: object) -> str | None:
    """Return the error message for the key end_step of a schedule that ends before it starts, or None for other values."""
    if isinstance(schedule, _Decay) and schedule.end_step < schedule.start_step:
        return f"must be at least start_step ({schedule.start_step:g}), not {schedule.end_step:g}"
    return None


def constant_schedule(value: float) -> NoDecay:
    """Return a schedule with a constant value."""
    return NoDecay(name="no_decay", start_val=value)
