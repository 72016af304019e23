"""User observers: named in the spec, or handed to Session or Trial."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from slm_lab.experiment.plan import UserError
from slm_lab.experiment.training.observers.base import Observer, ObserverFactory
from slm_lab.spec.models.extension import ExtensionError, import_class
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError


def load_observers(spec: Spec) -> list[ObserverFactory]:
    """Import the classes of meta.observers. Raises SpecError with a problem for each that cannot be imported or is not an Observer."""
    found: list[ObserverFactory] = []
    problems = []
    for index, name in enumerate(spec.meta.observers):
        try:
            found.append(import_class(name, Observer))
        except ExtensionError as error:
            problems.append(Problem(f"meta.observers[{index}]", str(error)))
    if problems:
        raise SpecError(spec.name, problems)
    return found


def check_factories(observers: Sequence[ObserverFactory], *, sent: bool = False) -> tuple[ObserverFactory, ...]:
    """Return them as a tuple. Raises UserError for what makes no Observer, or, if they are `sent` to processes, cannot be sent."""
    for one in observers:
        if not callable(one) or (isinstance(one, type) and not issubclass(one, Observer)):
            raise UserError(f"observers: {one!r} is not a subclass of slm_lab.Observer; expected the class, or a function that makes one")
        if sent:
            try:
                pickle.dumps(one)
            except Exception as error:
                raise UserError(f"observers: {one!r} cannot be sent to the processes of the sessions: {error}") from None
            if getattr(one, "__module__", "") == "__main__":
                where = "a script or notebook, which the processes of the sessions do not import"
                raise UserError(f"observers: {one!r} is defined in {where}; put it in a module")
    return tuple(observers)
