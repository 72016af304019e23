"""The search section: `"key__distribution": [arguments]`, nested like the spec or with a dotted path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slm_lab.spec.meta import MetaSpec
from slm_lab.spec.report import Path, Report, nearest, show, show_path, to_path
from slm_lab.spec.spec import Spec
from slm_lab.spec.tidy import is_ineffective
from slm_lab.spec.torch_check import check_net
from slm_lab.spec.validate import validate
from slm_lab.spec.variables import override

RETIRED = frozenset({"clip_eps", "entropy_coef", "clip_grad", "lr_decay_frequency", "lr_anneal_timestep"})
"""Keys that published specs search over, but no longer exist."""


@dataclass(frozen=True)
class _Form:
    """Arguments of a distribution."""

    words: str
    """Their form, for messages."""
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
"""Distribution → form of its arguments; None: any values, of which one (choice) or each (grid_search) is used."""


NET: Path = ("agent", "net")


@dataclass(frozen=True)
class SearchKey:
    """One key that a search varies."""

    path: Path
    """Path in the spec: ("agent", "algorithm", "gamma")."""
    distribution: str
    """Key of DISTRIBUTIONS."""
    args: tuple[Any, ...]
    """Its arguments."""


def parse_search(search: dict[str, Any] | None) -> list[SearchKey]:
    """Return the keys of a valid spec's search section, in file order."""
    return [key for _, key in _keys(search or {}, (), (), Report())]


_META = frozenset(key for key in MetaSpec.model_fields if key.startswith("search_") or key == "max_trial")
"""Keys of meta that only a search uses."""


def is_for_search(path: Path) -> bool:
    """Return whether only a search uses the key at `path`."""
    return path[0] == "search" or (path[0] == "meta" and path[1:2] != () and path[1] in _META)


def search_keys(spec: Spec) -> list[str]:
    """Return the paths of keys that only a search uses and that differ from their defaults."""
    found = [key for key, field in MetaSpec.model_fields.items() if key in _META and getattr(spec.meta, key) != field.default]
    return ["search"] * (spec.search is not None) + [f"meta.{key}" for key in found]


def redirect_search(search: dict[str, Any], moved: dict[Path, Path | None], report: Report) -> dict[str, Any]:
    """Return a valid search section with keys moved to new paths (None: removed); with dotted paths if anything moved."""
    found = [
        (where, key, next((old for old in moved if key.path[: len(old)] == old), None)) for where, key in _keys(search, (), (), Report())
    ]
    if all(old is None for _, _, old in found):
        return search
    result = {}
    for where, key, old in found:
        new = moved[old] if old else ()
        if old and new is None:
            report.note(("search", *where), "has no effect in this spec; ignored")
        else:
            path = (*(new or ()), *key.path[len(old or ()) :])
            result[f"{show_path(path)}__{key.distribution}"] = list(key.args)
    return result


def prune_search(raw: dict[str, Any], report: Report) -> None:
    """Remove retired keys and keys without effect from raw["search"], in place, with a note for each."""
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
            report.ineffective((*where, text), "no longer exists; ignored")
            del node[text]
        elif key_path and "__" in text and is_ineffective(key_path, raw):
            report.ineffective((*where, text), "has no effect in this spec; ignored")
            del node[text]


def check_search(raw: dict[str, Any], report: Report, *, values: bool) -> None:
    """Add a problem for each malformed search key and, with `values` (for a valid spec), for each value that is not valid in the spec."""
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
            hint = nearest(distribution, DISTRIBUTIONS) or f"; allowed: {', '.join(DISTRIBUTIONS)}"
            report.fail(here, f"unknown distribution '{distribution}'{hint}")
        elif message := _wrong_arguments(distribution, value):
            report.fail(here, message)
        else:
            yield here, SearchKey((*path, *to_path(name)), distribution, tuple(value))


def _wrong_arguments(distribution: str, args: Any) -> str | None:
    """Return the error in a distribution's arguments, if any."""
    form = DISTRIBUTIONS[distribution]
    if form is None:
        return None if isinstance(args, list) and args else f"{distribution} expects a list of values (not empty), not {show(args)}"
    fit = isinstance(args, list) and form.least <= len(args) <= form.most
    if not fit or any(isinstance(arg, bool) or not isinstance(arg, (int, float)) for arg in args):
        return f"{distribution} expects numbers {form.words}, not {show(args)}"
    if form.whole and any(arg != int(arg) for arg in args):
        return f"{distribution} expects whole numbers {form.words}, not {show(args)}"
    if form.log and args[0] <= 0:
        return f"{distribution} needs a low bound above 0, not {show(args[0])}"
    if form.ordered and args[0] >= args[1]:
        return f"{distribution} needs low < high, not {show(args)}"
    if not form.ordered and args[1] < 0:
        return f"{distribution} needs a deviation ≥ 0, not {show(args[1])}"
    return None if len(args) < 3 or args[2] > 0 else f"{distribution} needs {'a base' if len(args) > form.least else 'a step'} above 0"


def _check_values(key: SearchKey, where: Path, base: dict[str, Any], report: Report) -> None:
    """Validate the spec with each value of the key (with the bounds, for a range)."""
    path = (*key.path[:2], "name") if key.path in ((*NET, "type"), ("agent", "critic_net", "type")) else key.path  # as in the models
    form = DISTRIBUTIONS[key.distribution]
    values = key.args[:1000] if form is None else key.args[:2] if form.ordered else key.args[:1]
    for value in values:
        attempt, setting, found = copy.deepcopy(base), Report(), Report()
        override(attempt, path, int(value) if form is not None and form.whole else value, setting)
        spec = None if setting.problems else validate(attempt, found)
        for place in ("net", "critic_net"):
            if spec is not None and (net := getattr(spec.agent, place)) is not None:
                check_net(net, ("agent", place), found)
        for problem in setting.problems + found.problems:
            report.fail(where, f"invalid value {show(value)}: {problem}")
        if any(problem.code == "unknown" for problem in found.problems):
            return  # the same for every value
