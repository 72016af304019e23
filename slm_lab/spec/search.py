"""The search section: `"key__distribution": [arguments]`, nested where the key stands or with a dotted path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slm_lab.spec.report import Path, Report, nearest, show, show_path, to_path
from slm_lab.spec.tidy import is_ineffective
from slm_lab.spec.torch_check import check_net
from slm_lab.spec.validate import validate
from slm_lab.spec.variables import override

RETIRED = frozenset({"clip_eps", "entropy_coef", "clip_grad", "lr_decay_frequency", "lr_anneal_timestep"})
"""Keys that published specs search over, and nothing reads any more."""


@dataclass(frozen=True)
class _Form:
    """Arguments of a distribution."""

    words: str
    """How they are written, for messages."""
    least: int
    most: int
    whole: bool = False
    log: bool = False
    ordered: bool = True
    """The first two are bounds, low and high."""


DISTRIBUTIONS = {
    "choice": None,
    "grid_search": None,
    "uniform": _Form("[low, high]", 2, 2),
    "quniform": _Form("[low, high, step]", 3, 3),
    "loguniform": _Form("[low, high]", 2, 3, log=True),
    "qloguniform": _Form("[low, high, step]", 3, 4, log=True),
    "randn": _Form("[mean, deviation]", 2, 2, ordered=False),
    "qrandn": _Form("[mean, deviation, step]", 3, 3, ordered=False),
    "normal": _Form("[mean, deviation]", 2, 2, ordered=False),
    "randint": _Form("[low, high]", 2, 2, whole=True),
    "qrandint": _Form("[low, high, step]", 3, 3, whole=True),
    "lograndint": _Form("[low, high]", 2, 3, whole=True, log=True),
    "qlograndint": _Form("[low, high, step]", 3, 4, whole=True, log=True),
}
"""Distribution → form of its arguments; None: any values, of which one is taken (choice) or each (grid_search)."""


NET: Path = ("agent", "net")


@dataclass(frozen=True)
class SearchKey:
    """One key that a search varies."""

    path: Path
    """Of the key in the spec: ("agent", "algorithm", "gamma")."""
    distribution: str
    """A name of DISTRIBUTIONS."""
    args: tuple[Any, ...]
    """Its arguments."""


def parse_search(search: dict[str, Any] | None) -> list[SearchKey]:
    """The keys of a valid spec's search section, in the order written."""
    return [key for _, key in _keys(search or {}, (), (), Report())]


def redirect_search(search: dict[str, Any], moved: dict[Path, Path | None], report: Report) -> dict[str, Any]:
    """A valid search section after keys of its spec have moved (None: are gone), in dotted form where that concerns it."""
    found = [
        (where, key, next((old for old in moved if key.path[: len(old)] == old), None)) for where, key in _keys(search, (), (), Report())
    ]
    if all(old is None for _, _, old in found):
        return search
    result = {}
    for where, key, old in found:
        new = moved[old] if old else ()
        if old and new is None:
            report.note(("search", *where), "has no effect in this spec; dropped")
        else:
            path = (*(new or ()), *key.path[len(old or ()) :])
            result[f"{show_path(path)}__{key.distribution}"] = list(key.args)
    return result


def prune_search(raw: dict[str, Any], report: Report) -> None:
    """Take retired keys, and those without effect in this spec, out of raw["search"], in place and with a note each."""
    search = raw.get("search")
    if isinstance(search, dict):
        _prune(search, (), ("search",), raw, report)
    if not search:
        raw.pop("search", None)


def _prune(node: dict[str, Any], path: Path, where: Path, raw: dict[str, Any], report: Report) -> None:
    for text in [*node]:
        key_path = (*path, *to_path(text.rpartition("__")[0] or text))
        if isinstance(node[text], dict) and "__" not in text:
            _prune(node[text], key_path, (*where, text), raw, report)
        elif key_path and key_path[-1] in RETIRED:
            report.note((*where, text), "is no longer searched over; dropped")
            del node[text]
        elif key_path and "__" in text and is_ineffective(key_path, raw):
            report.note((*where, text), "has no effect in this spec; dropped")
            del node[text]


def check_search(raw: dict[str, Any], report: Report, *, values: bool) -> None:
    """Add a problem for each search key that is malformed and, with `values` (for a valid spec), whose values the spec would not take."""
    search = raw.get("search")
    if not isinstance(search, dict):
        return
    base = {key: value for key, value in raw.items() if key != "search"}
    for where, key in _keys(search, (), ("search",), report):
        if values:
            _check_values(key, where, base, report)


def _keys(node: dict[str, Any], path: Path, where: Path, report: Report) -> Iterator[tuple[Path, SearchKey]]:
    for text, value in node.items():
        here = (*where, text)
        name, _, distribution = text.rpartition("__")
        if isinstance(value, dict) and not name:
            yield from _keys(value, (*path, *to_path(text)), here, report)
        elif not name or not to_path(name):
            report.fail(here, "must be key__distribution, or an object of such keys")
        elif distribution not in DISTRIBUTIONS:
            hint = nearest(distribution, DISTRIBUTIONS) or f"; allowed are {', '.join(DISTRIBUTIONS)}"
            report.fail(here, f"'{distribution}' is no distribution{hint}")
        elif message := _wrong_arguments(distribution, value):
            report.fail(here, message)
        else:
            yield here, SearchKey((*path, *to_path(name)), distribution, tuple(value))


def _wrong_arguments(distribution: str, args: Any) -> str | None:
    """What is wrong with a distribution's arguments."""
    form = DISTRIBUTIONS[distribution]
    if form is None:
        return None if isinstance(args, list) and args else f"{distribution} takes a list of values (not empty), not {show(args)}"
    fit = isinstance(args, list) and form.least <= len(args) <= form.most
    if not fit or any(isinstance(arg, bool) or not isinstance(arg, (int, float)) for arg in args):
        return f"{distribution} takes numbers {form.words}, not {show(args)}"
    if form.whole and any(arg != int(arg) for arg in args):
        return f"{distribution} takes whole numbers {form.words}, not {show(args)}"
    if form.log and args[0] <= 0:
        return f"{distribution} needs a low bound above 0, not {show(args[0])}"
    if form.ordered and args[0] >= args[1]:
        return f"{distribution} needs low < high, not {show(args)}"
    if not form.ordered and args[1] < 0:
        return f"{distribution} needs a deviation ≥ 0, not {show(args[1])}"
    return None if len(args) < 3 or args[2] > 0 else f"{distribution} needs {'a base' if len(args) > form.least else 'a step'} above 0"


def _check_values(key: SearchKey, where: Path, base: dict[str, Any], report: Report) -> None:
    """Put the values that the key may take (of a range, its ends) into the spec, and see whether it takes them."""
    path = (
        (*key.path[:2], "name") if key.path in ((*NET, "type"), ("agent", "critic_net", "type")) else key.path
    )  # `base` has the models' words
    form = DISTRIBUTIONS[key.distribution]
    values = key.args[:1000] if form is None else key.args[:2] if form.ordered else key.args[:1]
    for value in values:
        attempt, found = copy.deepcopy(base), Report()
        override(attempt, path, int(value) if form is not None and form.whole else value, found)
        spec = None if found.problems else validate(attempt, found)
        for place in ("net", "critic_net"):
            if spec is not None and (net := getattr(spec.agent, place)) is not None:
                check_net(net, ("agent", place), found)
        for problem in found.problems:
            report.fail(where, f"{show(value)} does not fit: {problem}")
        if any("unknown key" in problem.message for problem in found.problems):
            return  # the same for every value
