"""Values of a search that are valid in the spec but of which no agent or env can be made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_lab.experiment.search.space import SearchSpace, Values
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.spec import Spec

_SAMPLES, _MOST = 200, 32
"""Draws from the space; those of them that are built."""


def covering_values(space: SearchSpace, seed: int = 0) -> list[Values]:
    """Return draws in which every option of the keys occurs, and of every key with a range about its smallest and largest value.

    All searched keys of a draw are set, so also options that exist only together with others are covered.
    """
    rng = np.random.default_rng(seed)
    draws = [*space.grid[:_SAMPLES], *(space.sample(rng) for _ in range(_SAMPLES))]
    draws = [draw for draw in draws if draw]
    seen: set[tuple[str, str]] = set()
    chosen: list[Values] = []
    ends = {id(draw) for key in space.keys for draw in _ends(key, draws)}
    for draw in draws:
        options = {(key, _shown(value)) for key, value in draw.items() if _is_option(value)}
        if id(draw) in ends or not options <= seen or not chosen:
            seen |= options
            chosen.append(draw)
    return chosen[:_MOST]


def _ends(key: str, draws: Sequence[Values]) -> list[Values]:
    ranged = [draw for draw in draws if isinstance(draw.get(key), int | float)]
    return [pick(ranged, key=lambda draw: draw[key]) for pick in (min, max)] if ranged else []


def valid_specs(space: SearchSpace, draws: Sequence[Values]) -> list[tuple[Values, Spec]]:
    """Return draws with their specs, without those that are invalid together: such a trial fails by itself."""
    found = []
    for values in draws:
        try:
            found.append((values, space.apply(values)))
        except SpecError:
            continue
    return found


def build_error(spec: Spec, values: Sequence[Values], problems: Sequence[Sequence[Problem]]) -> SpecError | None:
    """Return the error for values that cannot be built, each problem once; None if there is none.

    A problem belongs to the searched key at its path; else to the spec, if all draws have it; else to an option with which every draw has
    it. A problem of some combinations only is none of the search: those trials fail by themselves.
    """
    found: list[Problem] = []
    for problem in dict.fromkeys(problem for of_draw in problems for problem in of_draw):
        failing = [draw for draw, of_draw in zip(values, problems, strict=True) if problem in of_draw]
        everywhere = len(failing) == len(values)
        key = _searched(problem.path, failing[0]) or (None if everywhere else _option(failing, values))
        if key is not None:
            found.append(Problem(f"search.{key}", f"invalid value {_shown(failing[0][key])}: {problem}", problem.code))
        elif everywhere:
            found.append(problem)
    return SpecError(spec.name, found) if found else None


def _searched(path: str, values: Values) -> str | None:
    """Return the searched key that a problem at `path` is about, if any."""
    return next((key for key in values if path and (path == key or path.startswith((f"{key}.", f"{key}[")))), None)


def _option(failing: Sequence[Values], values: Sequence[Values]) -> str | None:
    """Return the key of an option that occurs in draws that fail, in all of them, and in no other."""
    for key, value in failing[0].items():
        if _is_option(value):
            having = [draw for draw in values if draw.get(key) == value]
            if all(draw in failing for draw in having):
                return key
    return None


def _is_option(value: Any) -> bool:
    """Return whether a value is one of a few, rather than a number of a range."""
    return isinstance(value, bool) or not isinstance(value, int | float)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
