"""Check before a search that env and agent can be built with each searched value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.training.resolve import with_seed
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.search import SearchKey, settings, walk
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import KeyPath, Problem, SpecError, show, show_path

_MOST_VALUES = 20
"""Maximum number of values of a choice that are checked."""


def check_builds(space: SearchSpace, plan: Plan) -> None:
    """Build env and agent with each value of each key (for a range: both ends), while other searched keys have their first value.

    Raises SpecError with a problem for each value that can be loaded but not built. A value is skipped if it is valid only together with
    other values of other keys. No processes are started: rollout workers and shared nets are disabled.
    """
    from slm_lab.experiment.session.session import Session  # loads torch

    problems: list[Problem] = []
    built: set[str] = set()
    for key, value, spec in _variants(space):
        lone = spec.model_copy(update={"meta": spec.meta.model_copy(update={"sampler": None, "distributed": False, "max_session": 1})})
        text = json.dumps({part: body for part, body in dump_spec(lone)[lone.name].items() if part != "meta"}, sort_keys=True, default=str)
        if text in built:
            continue
        built.add(text)
        shown, place = show(key.args[value] if key.has_options else value), f"search.{show_path(key.where)}"
        try:
            Session(with_seed(lone, 0), plan=plan).build().close()
        except SpecError as error:
            problems += [Problem(place, f"invalid value {shown}: {problem}", problem.code) for problem in error.problems]
        except UserError as error:
            problems.append(Problem(place, f"invalid value {shown}: {error}"))
    if problems:
        raise SpecError(space.spec.name, problems)


def _variants(space: SearchSpace) -> Iterator[tuple[SearchKey, Any, Spec]]:
    for key, above in walk(space.search_keys):
        for value in key.candidates()[:_MOST_VALUES]:
            pins = {**above, key.where: value}
            roots = [root for root in space.search_keys if root.where in pins]
            choose = partial(_pinned_or_first, pins)
            try:
                yield key, value, space.apply({one.text: chosen for one, chosen in settings(roots, choose)})
            except SpecError:  # valid with other values of other keys, see search_check
                continue


def _pinned_or_first(pins: Mapping[KeyPath, Any], key: SearchKey) -> Any:
    return pins.get(key.where, key.candidates()[0])


def check_in_process(context: Context, spec: Spec, plan: Plan, known: bool) -> None:
    """Run check_builds in a task, since the process of the search does not load torch. Args: known: the builds were checked before.

    Messages: ("valid", number of GPUs), or ("user_error", SpecError).
    """
    import torch

    if not known:
        try:
            check_builds(SearchSpace(spec), plan)
        except SpecError as error:
            context.send("user_error", error)
            return
    context.send("valid", torch.cuda.device_count() if plan.device != "cpu" and torch.cuda.is_available() else 0)
