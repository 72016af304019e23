"""The search space of a spec: the searched keys with their distributions, and the spec of a trial with given values."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from slm_lab.spec.load.loader import dump_spec, load_with_notices
from slm_lab.spec.load.search_check import set_value
from slm_lab.spec.models.search import SearchKey, is_for_search, parse_search, settings, walk
from slm_lab.spec.models.spec import Spec, models_at
from slm_lab.spec.report import Problem, Report, SpecError, show_path, value_at

Values = dict[str, Any]
"""Values of the active keys, by dotted path: {"agent.algorithm.gamma": 0.97}."""
KeyChoices = dict[str, Any]
"""Name of a search key (see SearchSpace.named) → its value, or for choice and grid_search the index of its value."""


class SearchSpace:
    """The keys that the search section of `spec` varies, with their distributions. Raises SpecError if it varies no keys."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.search_keys = tuple(parse_search(spec.search))
        if not self.search_keys:
            raise SpecError(spec.name, [Problem("search", "nothing to search: the spec has no keys here")])
        self.named = {show_path(key.where): key for key, _ in walk(self.search_keys)}
        """All search keys, including nested keys, by a unique name."""
        self.keys = tuple(dict.fromkeys(key.text for key in self.named.values()))
        """Paths of all keys, in file order."""

    @property
    def trials(self) -> int:
        """Number of trials: meta.max_trial; if all keys are grid_search, the size of the grid, limited by a max_trial above 1."""
        count = self.spec.meta.max_trial
        if not self.is_grid:
            return count
        return len(self.grid) if count == 1 else min(count, len(self.grid))

    @property
    def is_grid(self) -> bool:
        """Whether all keys are grid_search keys."""
        return all(key.distribution == "grid_search" for key in self.named.values())

    def sample(self, rng: np.random.Generator) -> Values:
        """Draw a value of every active key from its distribution; values of grid_search keys have equal probability."""
        return self.values(lambda _, key: draw(key, rng.random()))

    @cached_property
    def grid(self) -> tuple[Values, ...]:
        """All combinations of values of grid_search keys, except keys inside other distributions; one empty dict if there are none."""
        return tuple(self.values_from(choices) for choices in self.grid_choices)

    @cached_property
    def grid_choices(self) -> tuple[KeyChoices, ...]:
        """The combinations of `grid` as choices (see KeyChoices)."""
        return tuple(_combinations(self.search_keys))

    def values(self, choose: Callable[[str, SearchKey], Any]) -> Values:
        """Return the values of the active keys. Args: choose: function of a key's name and the key that returns its choice (KeyChoices)."""
        return {key.text: value for key, value in settings(self.search_keys, lambda key: choose(show_path(key.where), key))}

    def values_from(self, choices: KeyChoices) -> Values:
        """Return the values for choices (see KeyChoices); keys without a choice are omitted."""
        keys = [key for key in self.search_keys if show_path(key.where) in choices]
        return {key.text: value for key, value in settings(keys, lambda key: choices[show_path(key.where)])}

    def choices_of(self, values: Mapping[str, Any]) -> KeyChoices:
        """Return the choices for given values; a key without a value, or with a value that is not one of its options, is omitted."""
        return dict(_known_choices(self.search_keys, values))

    def apply(self, values: Mapping[str, Any]) -> Spec:
        """Return the spec of a trial with these values, without a search section.

        Raises SpecError if the combination is invalid, and KeyError for a key that is not searched.
        """
        paths = {key.text: key.path for key in self.named.values()}
        body, report = copy.deepcopy(self._base), Report()
        for text in sorted(values, key=lambda text: len(paths[text])):
            set_value(body, paths[text], copy.deepcopy(values[text]), report)
        if report.problems:
            raise SpecError(self.spec.name, report.problems)
        return load_with_notices({self.spec.name: body}, self.spec.name, ()).specs[0]

    @cached_property
    def _base(self) -> dict[str, Any]:
        """The raw spec without its search section. In sections whose component is searched, keys with default values are omitted."""
        body: dict[str, Any] = dump_spec(self.spec)[self.spec.name]
        body.pop("search", None)
        body["meta"] = {key: value for key, value in body["meta"].items() if not is_for_search(("meta", key))}
        for section in ("algorithm", "memory", "net", "critic_net"):
            paths = {key.path for key in self.named.values()}
            if paths & {("agent", section, "name"), ("agent", section, "type")}:
                _drop_defaults(body, ("agent", section))
        return body


def draw(key: SearchKey, uniform: float) -> Any:
    """Return the value of a key at quantile `uniform` (0 to 1) of its distribution; for choice and grid_search, the index of the value."""
    if key.has_options:
        return min(int(uniform * len(key.args)), len(key.args) - 1)
    if key.is_normal:
        mean, deviation = key.args[:2]
        value = mean + deviation * NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
        return key.multiple(value / key.step) if key.step else _round(value)
    low, high = key.bounds
    if key.step and not key.is_log:
        count = round((high - low) / key.step)
        return key.multiple(low / key.step + min(int(uniform * (count + 1)), count))
    half = key.step / 2 if key.step else 0.0  # each multiple of the step represents the values nearest to it
    low, high = max(low - half, low / 2), high + half
    value = math.exp(math.log(low) + uniform * (math.log(high) - math.log(low))) if key.is_log else low + uniform * (high - low)
    return snap(key, value)


def snap(key: SearchKey, value: float) -> float:
    """Return the value of a range that is nearest to `value`, with at most 8 digits."""
    low, high = key.bounds
    return min(max(key.multiple(value / key.step) if key.step else _round(value), low), high)


def _round(value: float) -> float:
    return float(f"{value:.8g}")


def _known_choices(keys: Iterable[SearchKey], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        if key.text not in values:
            continue
        value = values[key.text]
        if not key.has_options:
            yield show_path(key.where), value
        elif value in key.args:
            index = key.args.index(value)
            yield show_path(key.where), index
            yield from _known_choices(key.nested[index] if key.nested else (), values)


def suggest(asked: Any, name: str, key: SearchKey) -> Any:
    """Ask an Optuna trial for the choice of a key: an index, a quantile of a normal distribution, or a value of a range."""
    if key.has_options:
        return asked.suggest_categorical(name, range(len(key.args)))
    if key.is_normal:
        return asked.suggest_float(name, 0.0, 1.0)
    low, high = key.bounds
    if key.is_whole:
        return asked.suggest_int(name, int(low), int(high), log=key.is_log, step=1 if key.is_log else int(key.step or 1))
    return asked.suggest_float(name, low, high, log=key.is_log, step=None if key.is_log else key.step)


def frozen_trial(optuna: Any, space: SearchSpace, choices: KeyChoices, metric: float | None, state: Any = None) -> Any:
    """Return an Optuna trial with given choices, whose state is COMPLETE unless `state` is given."""
    asked = optuna.trial.FixedTrial(choices)
    for name in choices:
        suggest(asked, name, space.named[name])
    state = optuna.trial.TrialState.COMPLETE if state is None else state
    return optuna.trial.create_trial(state=state, value=metric, params=choices, distributions=dict(asked.distributions))


def _combinations(keys: Iterable[SearchKey]) -> list[KeyChoices]:
    """Return the choices of every combination of grid_search keys, including grid_search keys nested in them."""
    axes: list[list[KeyChoices]] = []
    for key in keys:
        if key.distribution == "grid_search":
            name, nested = show_path(key.where), key.nested or ((),) * len(key.args)
            axes.append([{name: index, **inner} for index in range(len(key.args)) for inner in _combinations(nested[index])])
    return [{name: choice for part in parts for name, choice in part.items()} for parts in itertools.product(*axes)]


def _drop_defaults(body: dict[str, Any], location: tuple[str, ...]) -> None:
    """Remove keys with default values from a section, because another component, chosen by the search, has other defaults."""
    section = value_at(body, location)
    if not isinstance(section, dict):
        return
    named = {"name": section.get("type"), **section}
    models = models_at(location, {"agent": {**body["agent"], location[-1]: named}})
    for model in models if len(models) == 1 else ():
        for name, field in model.model_fields.items():
            if name in section and name != "name" and section[name] == field.get_default(call_default_factory=False):
                del section[name]
