"""The user's own algorithms, nets and memories: `name: "package.module:Class"` names a pydantic model outside this package.

The model is a subclass of AlgorithmSpec, NetSpec or MemorySpec. Its fields are the keys of the section, its ClassVars declare what rules
need to know, and its classmethod `implementation()` returns the class to build. Its module is imported to check a spec, so it should
import torch in `implementation()` only.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any, Literal, get_origin

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from slm_lab.spec.models.base import Component
from slm_lab.spec.report import nearest

PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""Form of a name that is not built in."""
ERROR = "extension"
"""Type of the pydantic error for a name that cannot be resolved."""


class ExtensionError(ValueError):
    """A "package.module:Class" does not name a usable spec model; the message says why."""


def is_extension(name: Any) -> bool:
    """Return whether a component's name refers to a class of the user's."""
    return isinstance(name, str) and ":" in name


def kind_of(model: type[Component]) -> type[Component]:
    """Return the base class of a kind of component: AlgorithmSpec, NetSpec or MemorySpec."""
    return next(base for base in model.__mro__ if Component in base.__bases__)


def import_class(name: str, base: type, expected: str = "") -> Any:
    """Import the subclass of `base` that "package.module:Class" refers to. Raises ExtensionError if there is none."""
    path, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(path)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        if isinstance(error, ModuleNotFoundError) and error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise ExtensionError(f"cannot import '{path}': no module '{error.name}' is installed or in the current folder") from None
        raise ExtensionError(f"importing '{path}' failed: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
        raise ExtensionError(f"'{path}' has no '{attribute}'{nearest(attribute, classes or [*vars(module)])}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ExtensionError(f"'{name}' is not a subclass of {base.__module__}.{base.__qualname__}{expected}")
    return found


def find_model(name: str, kind: type[Component]) -> type[Component]:
    """Import the spec model that `name` refers to.

    Raises: ExtensionError if there is none, or it is not a subclass of `kind` that can be built.
    """
    if not re.fullmatch(PATTERN, name):
        raise ExtensionError(f"invalid import path '{name}'; expected \"package.module:Class\"")
    found: type[Component] = import_class(name, kind, "; expected the pydantic model of its keys")
    if found.implementation.__func__ is Component.implementation.__func__:  # type: ignore[attr-defined]  # a bound classmethod
        raise ExtensionError(f"'{name}' has no classmethod implementation(), which returns the class to build")
    if get_origin(found.model_fields["name"].annotation) is Literal:
        raise ExtensionError(f"'{name}' inherits the name of a built-in model; declare `name: str` in it")
    try:
        found.model_rebuild()
    except Exception as error:  # an annotation that pydantic cannot resolve
        raise ExtensionError(f"'{name}' is not a valid pydantic model: {str(error).splitlines()[0]}") from error
    return found


@dataclass(frozen=True)
class Extensible:
    """Annotation of a union of built-in models: a "package.module:Class" as `name` is validated by that model."""

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
            model = find_model(name, self.kind)
        except ExtensionError as error:
            raise PydanticCustomError(ERROR, "{message}", {"message": str(error)}) from None
        return model.model_validate(value)

    def _dump(self, value: Any, dump: core_schema.SerializerFunctionWrapHandler, info: core_schema.SerializationInfo) -> Any:
        return value.model_dump(mode=info.mode) if is_extension(value.name) else dump(value)
