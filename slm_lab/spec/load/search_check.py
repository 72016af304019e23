"""Check the search section of a valid spec. Every hyperparameter value that a search may use must be valid in the spec."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slm_lab.spec.compat.differences import SIZES, round_up_to_envs
from slm_lab.spec.models.search import (
    DISTRIBUTIONS,
    SearchKey,
    active_values,
    is_search_only,
    parse_search,
    search_entries,
    walk_search_keys,
)
from slm_lab.spec.models.spec import SECTION_KEYS
from slm_lab.spec.report import KeyPath, Problem, Report, format_json, set_value_at, show_path, to_path, type_to_name_key, value_at

FindProblems = Callable[[dict[str, Any]], list[Problem]]
"""Function that returns the problems of a raw spec."""
_MOST_VALUES = 1000
"""Maximum number of values of one search key that are checked."""
_MOST_CONTEXTS = 8
"""Maximum number of combinations of other search keys' values with which a value of a search key is tested."""
_EVALUATION = {"eval_episodes", "rigorous_eval", "eval_deterministic"}
"""Keys of the section meta that determine in which episodes the return of a trial is measured."""
_ALGORITHM: KeyPath = ("agent", "algorithm")
_REPLACED: dict[KeyPath, KeyPath] = {("agent", "algorithm", "lam"): ("agent", "algorithm", "num_step_returns")}
"""Maps the path of a searched key to the path of the key that the searched key replaces in the spec. (SLM Lab uses lam if a spec contains
both lam and num_step_returns.)"""


def check_search(raw: dict[str, Any], report: Report, problems_of: FindProblems | None) -> None:
    """Add a problem to `report` for each malformed key of the search section, and for each search value that is invalid in the spec.

    A search value is reported only if it is invalid with the spec's own values of the other searched keys, and also with all tested
    combinations of the search values of these keys. If `problems_of` is None, because the spec itself is invalid, search values are not
    tested.
    """
    search = raw.get("search")
    if not isinstance(search, dict):
        return
    before = len(report.problems)
    keys = [key for key, _ in search_entries(search, report)]
    _check_paths(keys, report)
    if len(report.problems) > before or problems_of is None or not keys:
        return
    _check_algorithm(raw, keys, report)
    base = {key: value for key, value in raw.items() if key not in ("search", "name")}
    checker = _ValueChecker(base, keys, problems_of)
    for key, above in walk_search_keys(keys):
        _check_key(key, above, checker, report)
    if len(report.problems) == before and (problems := checker.find_combination_problems()):
        report.add_problem(("search",), f"no combination of its values is valid: {problems[0]}")


def note_search_differences(raw: dict[str, Any], report: Report) -> None:
    """If the spec was written for SLM Lab, add a note to `report` for each search key whose values have another meaning in SLM Lab.

    The trials of a search use the search values unchanged.
    """
    algorithm, envs = value_at(raw, _ALGORITHM), value_at(raw, ("env", "num_envs"))
    if not (report.for_slm_lab and isinstance(algorithm, dict)):
        return
    keys = [key for key, _ in walk_search_keys(parse_search(raw.get("search")))]
    paths = {key.path for key in keys}
    one_width = isinstance(envs, int | None) and not any(path == ("env", "num_envs")[: len(path)] for path in paths)
    for key in keys:
        section, name = key.path[:-1], key.path[-1]
        is_size = section == _ALGORITHM and name in SIZES and algorithm.get("name") in ("PPO", "PPOSIL")
        sizes = key.args if key.has_options else key.values_to_check()
        if is_size and not (one_width and all(round_up_to_envs(size, envs or 1) == size for size in sizes)):
            report.note(("search", *key.where), "sizes are used as they are; SLM Lab rounds them up to multiples of num_envs")
        schedule = value_at(raw, section) if section[:2] == _ALGORITHM and name in ("start_val", "end_val") else None
        if isinstance(schedule, dict) and schedule.get("name") == "no_decay":
            report.note(("search", *key.where), "the value of no_decay is start_val; in SLM Lab it is end_val, unless end_val is 0")


def drop_unusable_values(raw: dict[str, Any], problems: Sequence[Problem], report: Report) -> None:
    """Remove unusable keys and values, in place, from the search section of a spec that was written for SLM Lab. Add a note to `report` for
    each removal.

    Unusable keys are keys that belong to another section of the spec, which SLM Lab ignores. Unusable values are options of a choice that
    are invalid in combination with other values of the spec.
    """
    known = frozenset().union(*SECTION_KEYS.values())
    for node, text, where in [*_argument_lists(raw["search"], ())]:
        path = ("search", *where)
        found = [problem for problem in problems if problem.path == show_path(report.original_path(path))]
        if not found or report.is_from_set_argument(path):
            continue
        key = to_path(str(text).rpartition("__")[0])[-1:]
        if any(problem.code == "unknown" for problem in found):
            if key and key[0] in known:
                report.note(path, f"is not a key of that section, and SLM Lab ignores it; not searched ({found[0].message})")
                del node[text]
            continue
        form = DISTRIBUTIONS.get(str(text).rpartition("__")[2])
        if form is not None and not form.options:
            continue  # an invalid bound makes the complete range invalid
        bad = [
            value for value in node[text] if any(problem.message.startswith(f"invalid value {format_json(value)}: ") for problem in found)
        ]
        if not bad:
            continue
        report.note(path, f"{found[0].message}; {', '.join(map(format_json, bad))} {'is' if len(bad) == 1 else 'are'} not searched")
        if len(bad) < len(node[text]):
            node[text] = [value for value in node[text] if value not in bad]
        else:
            del node[text]


def _argument_lists(node: Any, where: KeyPath) -> Iterator[tuple[dict[str, Any], str, KeyPath]]:
    """Yield a tuple (dict, key, path of the key) for each key in a search section whose value is a list of arguments, such as
    {"gamma__uniform": [0.9, 0.99]}."""
    if isinstance(node, dict):
        for key, value in node.items():
            if isinstance(value, list) and "__" in key:
                yield node, key, (*where, key)
            else:
                yield from _argument_lists(value, (*where, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _argument_lists(value, (*where, index))


def set_searched_value(raw: dict[str, Any], path: KeyPath, value: Any, report: Report) -> None:
    """Set the searched key at `path` of a raw spec to `value`, in place. The path agent.net.type sets the key agent.net.name."""
    if path in _REPLACED and value is not None:
        section = value_at(raw, _REPLACED[path][:-1])
        if isinstance(section, dict):
            section.pop(_REPLACED[path][-1], None)
    set_value_at(raw, type_to_name_key(path), value, report, source="search.")


def _check_paths(keys: Sequence[SearchKey], report: Report, above: frozenset[KeyPath] = frozenset()) -> None:
    """Add a problem to `report` for each search key that cannot be searched, or whose path another search key varies at the same time.

    Args: above: paths of the search keys whose options contain the search keys `keys`.
    """
    seen = set(above)
    for key in keys:
        location, path = ("search", *key.where), tuple(map(str, key.path))
        if is_search_only(key.path) or key.path[0] == "name" or key.path[:2] == ("meta", "run"):
            report.add_problem(location, f"{key.text} cannot be searched")
        elif key.path[0] == "meta" and key.path[-1] in _EVALUATION:
            report.add_problem(
                location, f"{key.text} cannot be searched: trials are compared by evaluations of one kind; set it in the section meta"
            )
        elif key.path[-1] == "arc_file":
            report.add_problem(location, "arc_file cannot be searched; give the contents of the files as values of arc")
        elif path in seen:
            report.add_problem(location, f"{key.text} is searched by two keys at the same time; remove one of them")
        seen.add(path)
    for key in keys:
        for inner in key.nested:
            _check_paths(inner, report, frozenset(seen))


def _check_algorithm(raw: dict[str, Any], keys: Sequence[SearchKey], report: Report) -> None:
    if raw.get("meta", {}).get("search_algorithm") == "grid" and not any(key.distribution == "grid_search" for key in keys):
        first = f"search.{show_path(keys[0].where)}"
        why = f"'grid' tries all values of grid_search keys, and there are none ({first}); allowed here: 'optuna', 'random', 'pbt'"
        report.add_problem(("meta", "search_algorithm"), why)


class _ValueChecker:
    """Tester of search values, which sets the values in a copy of a raw spec and validates the copy."""

    def __init__(self, base: dict[str, Any], keys: Sequence[SearchKey], problems_of: FindProblems) -> None:
        self.base, self.keys, self.problems_of = base, keys, problems_of
        self.base_problems = problems_of(copy.deepcopy(base))
        """Problems of the raw spec without search values."""
        self.contexts = min(max(len(key.values_to_check()) for key, _ in walk_search_keys(keys)), _MOST_CONTEXTS)

    def problems_of_values(self, pins: Mapping[KeyPath, Any]) -> list[Problem]:
        """Return the problems of the search values `pins`, or [] if these values are valid with at least one tested combination of values
        of the other search keys.

        Args: pins: maps the path of a search key in the search section to its value or, for a list of options, to the index of its value.
        """
        pinned = [key for key in self.keys if key.where in pins]
        first = self._problems_of_values(pinned, pins, 0)
        if not first or len(pinned) == len(self.keys) or any(problem.code == "unknown" for problem in first):
            return first
        return first if self.find_combination_problems(pins) else []

    def find_combination_problems(self, pins: Mapping[KeyPath, Any] | None = None) -> list[Problem]:
        """Return the problems of the first tested combination of the values of all search keys, or [] if any tested combination is valid.

        Args: pins: search values that every tested combination contains (see `problems_of_values`).
        """
        first: list[Problem] = []
        for context in range(self.contexts):
            found = self._problems_of_values(self.keys, pins or {}, context)
            if not found:
                return []
            first = first or found
        return first

    def _problems_of_values(self, keys: Sequence[SearchKey], pins: Mapping[KeyPath, Any], context: int) -> list[Problem]:
        def choose(key: SearchKey) -> Any:
            values = key.values_to_check()
            return pins.get(key.where, values[context % len(values)])

        attempt, report = copy.deepcopy(self.base), Report()
        for key, value in active_values(keys, choose):
            set_searched_value(attempt, key.path, value, report)
        return report.problems or [problem for problem in self.problems_of(attempt) if problem not in self.base_problems]


def _check_key(key: SearchKey, above: Mapping[KeyPath, int], checker: _ValueChecker, report: Report) -> None:
    location = ("search", *key.where)
    for value in key.values_to_check()[:_MOST_VALUES]:
        if not (key.has_options or key.is_normal or value in key.bounds) and any(
            problem.path == show_path(location) for problem in report.problems
        ):
            continue  # problems of the ends of the value's range are already reported
        shown = format_json(key.args[value] if key.has_options else value)
        below = {inner.text for inner in key.nested[value]} if key.nested else set()
        for problem in checker.problems_of_values({**above, key.where: value}):
            if problem.path in below:
                continue  # this problem is reported when the nested key is checked
            is_at_key = problem.path == key.text
            if problem.code == "unknown" and f"{key.text}.".startswith(f"{problem.path}."):
                report.add_problem(location, problem.message if is_at_key else str(problem), "unknown")
                return  # the problem is the same for every value of the key
            report.add_problem(location, f"invalid value {shown}: {problem.message if is_at_key else problem}")
