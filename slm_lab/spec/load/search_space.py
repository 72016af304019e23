"""The search space of a spec: the searched hyperparameters and their distributions. For given values of the hyperparameters, the search
space returns the spec of a trial."""

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
from slm_lab.spec.load.search_check import set_searched_value
from slm_lab.spec.models.search import SearchKey, active_values, is_search_only, parse_search, walk_search_keys
from slm_lab.spec.models.spec import Spec, models_at
from slm_lab.spec.report import Problem, Report, SpecError, show_path, value_at

Values = dict[str, Any]
"""Maps the dotted paths of the searched keys to their values in one trial, such as {"agent.algorithm.gamma": 0.97}."""
KeyChoices = dict[str, Any]
"""Maps the names of search keys (see SearchSpace.named) to their values in one trial or, for the distributions choice and grid_search, to
the indices of their values."""


class SearchSpace:
    """Search space of a spec: the keys that the spec's search section varies, with their distributions. Raises SpecError if the search
    section is empty."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.search_keys = tuple(parse_search(spec.search))
        if not self.search_keys:
            raise SpecError(spec.name, [Problem("search", "nothing to search: the spec has no keys here")])
        self.named = {show_path(key.where): key for key, _ in walk_search_keys(self.search_keys)}
        """Maps unique names to all search keys, including search keys that are nested in the options of other search keys."""
        self.keys = tuple(dict.fromkeys(key.text for key in self.named.values()))
        """Dotted paths of all searched keys, in the order of the spec file."""

    @property
    def num_trials(self) -> int:
        """Number of trials of the search, which is meta.max_trial or, if all search keys are grid_search keys, the number of combinations
        of values (the grid).

        If meta.max_trial is above 1, it limits the number of trials of a grid.
        """
        count = self.spec.meta.max_trial
        if not self.is_grid:
            return count
        return len(self.grid) if count == 1 else min(count, len(self.grid))

    @property
    def is_grid(self) -> bool:
        """Whether all search keys have the distribution grid_search."""
        return all(key.distribution == "grid_search" for key in self.named.values())

    def sample(self, rng: np.random.Generator) -> Values:
        """Return random values for one trial, drawn from the distributions of the search keys. The values of a grid_search key are equally
        probable."""
        return self.trial_values(lambda _, key: value_at_quantile(key, rng.random()))

    @cached_property
    def grid(self) -> tuple[Values, ...]:
        """All combinations of the values of grid_search keys, or one empty dict if the search has no grid_search keys.

        The combinations do not contain search keys that are nested in a search key with another distribution.
        """
        return tuple(self.values_from(choices) for choices in self.grid_choices)

    @cached_property
    def grid_choices(self) -> tuple[KeyChoices, ...]:
        """The combinations of values in the attribute `grid`, as choices (see KeyChoices)."""
        return tuple(_grid_combinations(self.search_keys))

    def trial_values(self, choose: Callable[[str, SearchKey], Any]) -> Values:
        """Return the values of one trial.

        Args: choose: function that takes the name of a search key and the search key, and returns the choice (see KeyChoices).
        """
        return {key.text: value for key, value in active_values(self.search_keys, lambda key: choose(show_path(key.where), key))}

    def values_from(self, choices: KeyChoices) -> Values:
        """Return the values that the choices `choices` stand for. Search keys without a choice are omitted."""
        keys = [key for key in self.search_keys if show_path(key.where) in choices]
        return {key.text: value for key, value in active_values(keys, lambda key: choices[show_path(key.where)])}

    def choices_of(self, values: Mapping[str, Any]) -> KeyChoices:
        """Return the choices that stand for the values `values`, which have dotted paths as keys. A search key without a value, or without
        a matching option, is omitted."""
        return dict(_matching_choices(self.search_keys, values))

    def trial_spec(self, values: Mapping[str, Any]) -> Spec:
        """Return the spec of a trial, which is the searched spec with the values `values` and without the search section.

        Raises SpecError if the combination of values is invalid, and KeyError if `values` contains a key that is not searched.
        """
        paths = {key.text: key.path for key in self.named.values()}
        body, report = copy.deepcopy(self._base_spec), Report()
        for text in sorted(values, key=lambda text: len(paths[text])):
            set_searched_value(body, paths[text], copy.deepcopy(values[text]), report)
        if report.problems:
            raise SpecError(self.spec.name, report.problems)
        return load_with_notices({self.spec.name: body}, self.spec.name, ()).specs[0]

    @cached_property
    def _base_spec(self) -> dict[str, Any]:
        """The raw spec to which the values of a trial are applied, without the search section.

        If the name of a component (such as a net) is searched, the raw spec does not contain those keys of the component that have default
        values.
        """
        body: dict[str, Any] = dump_spec(self.spec)[self.spec.name]
        body.pop("search", None)
        body["meta"] = {key: value for key, value in body["meta"].items() if not is_search_only(("meta", key))}
        for section in ("algorithm", "memory", "net", "critic_net"):
            paths = {key.path for key in self.named.values()}
            if paths & {("agent", section, "name"), ("agent", section, "type")}:
                _drop_defaults(body, ("agent", section))
        return body


def value_at_quantile(key: SearchKey, uniform: float) -> Any:
    """Return the value of a search key at the quantile `uniform` (0 to 1) of the search key's distribution.

    For the distributions choice and grid_search, return the index of the value in the list of options.
    """
    if key.has_options:
        return min(int(uniform * len(key.args)), len(key.args) - 1)
    if key.is_normal:
        mean, deviation = key.args[:2]
        value = mean + deviation * NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
        return key.multiple_of_step(value / key.step) if key.step else _round(value)
    low, high = key.bounds
    if key.step and not key.is_log:
        count = round((high - low) / key.step)
        return key.multiple_of_step(low / key.step + min(int(uniform * (count + 1)), count))
    half = key.step / 2 if key.step else 0.0  # each multiple of the step represents all values that are rounded to it
    low, high = max(low - half, low / 2), high + half
    value = math.exp(math.log(low) + uniform * (math.log(high) - math.log(low))) if key.is_log else low + uniform * (high - low)
    return round_to_range(key, value)


def round_to_range(key: SearchKey, value: float) -> float:
    """Return the number nearest to `value` that the range of a search key allows, rounded to at most 8 significant digits."""
    low, high = key.bounds
    return min(max(key.multiple_of_step(value / key.step) if key.step else _round(value), low), high)


def _round(value: float) -> float:
    return float(f"{value:.8g}")


def _matching_choices(keys: Iterable[SearchKey], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        if key.text not in values:
            continue
        value = values[key.text]
        if not key.has_options:
            yield show_path(key.where), value
        elif value in key.args:
            index = key.args.index(value)
            yield show_path(key.where), index
            yield from _matching_choices(key.nested[index] if key.nested else (), values)


def suggest_choice(trial: Any, name: str, key: SearchKey) -> Any:
    """Return the number that the Optuna trial `trial` suggests for a search key.

    The suggested number is the index of an option, a number in the range of the search key or, for a normal distribution, a quantile (0 to
    1).
    """
    if key.has_options:
        return trial.suggest_categorical(name, range(len(key.args)))
    if key.is_normal:
        return trial.suggest_float(name, 0.0, 1.0)
    low, high = key.bounds
    if key.is_integer:
        return trial.suggest_int(name, int(low), int(high), log=key.is_log, step=1 if key.is_log else int(key.step or 1))
    return trial.suggest_float(name, low, high, log=key.is_log, step=None if key.is_log else key.step)


def create_frozen_trial(optuna: Any, space: SearchSpace, choices: KeyChoices, metric: float | None, state: Any = None) -> Any:
    """Return an Optuna trial with the choices `choices` and the objective value `metric`. If `state` is None, the trial has the state
    COMPLETE."""
    fixed_trial = optuna.trial.FixedTrial(choices)
    for name in choices:
        suggest_choice(fixed_trial, name, space.named[name])
    state = optuna.trial.TrialState.COMPLETE if state is None else state
    return optuna.trial.create_trial(state=state, value=metric, params=choices, distributions=dict(fixed_trial.distributions))


def _grid_combinations(keys: Iterable[SearchKey]) -> list[KeyChoices]:
    """Return all combinations of the values of grid_search keys, as choices (see KeyChoices). Search keys that are nested in the options of
    another search key are included."""
    axes: list[list[KeyChoices]] = []
    for key in keys:
        if key.distribution == "grid_search":
            name, nested = show_path(key.where), key.nested or ((),) * len(key.args)
            axes.append([{name: index, **inner} for index in range(len(key.args)) for inner in _grid_combinations(nested[index])])
    return [{name: choice for part in parts for name, choice in part.items()} for parts in itertools.product(*axes)]


def _drop_defaults(body: dict[str, Any], location: tuple[str, ...]) -> None:
    """Remove keys with default values from a section of a spec, because the component that a trial chooses for this section may have other
    default values."""
    section = value_at(body, location)
    if not isinstance(section, dict):
        return
    named = {"name": section.get("type"), **section}
    models = models_at(location, {"agent": {**body["agent"], location[-1]: named}})
    for model in models if len(models) == 1 else ():
        for name, field in model.model_fields.items():
            if name in section and name != "name" and section[name] == field.get_default(call_default_factory=False):
                del section[name]
