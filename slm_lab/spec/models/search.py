"""The section `search` of a spec. The keys of the section `search` have the form `"key__distribution": [arguments]`, and are nested like
the keys of the spec or contain a dotted path.

An option of choice or grid_search may be an object that contains search keys. Search keys inside an option are searched only if the option
is chosen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slm_lab.spec.models.meta import MetaSpec
from slm_lab.spec.models.spec import Spec, ineffective_keys
from slm_lab.spec.report import KeyPath, Report, format_json, nearest_hint, show_path, to_path

RETIRED = frozenset({"clip_eps", "entropy_coef", "clip_grad", "lr_decay_frequency", "lr_anneal_timestep"})
"""Keys that no longer exist in specs, but that still occur in the search sections of published specs."""


@dataclass(frozen=True)
class _ArgumentForm:
    """Number and kind of the arguments of a distribution."""

    words: str
    """Description of the distribution's arguments, for messages."""
    min_args: int
    max_args: int
    integer: bool = False
    log: bool = False
    ordered: bool = True
    """Whether the first two arguments are the lower and upper bound of the distribution."""
    options: bool = False
    """Whether the arguments are the values from which a search chooses."""


_OPTIONS = _ArgumentForm("[value, …]", 1, 1, ordered=False, options=True)
DISTRIBUTIONS = {
    "choice": _OPTIONS,
    "grid_search": _OPTIONS,
    "uniform": _ArgumentForm("[low, high]", 2, 2),
    "quniform": _ArgumentForm("[low, high, step]", 3, 3),
    "loguniform": _ArgumentForm("[low, high]", 2, 3, log=True),
    "qloguniform": _ArgumentForm("[low, high, step]", 3, 4, log=True),
    "randn": _ArgumentForm("[mean, deviation]", 2, 2, ordered=False),
    "qrandn": _ArgumentForm("[mean, deviation, step]", 3, 3, ordered=False),
    "normal": _ArgumentForm("[mean, deviation]", 2, 2, ordered=False),
    "randint": _ArgumentForm("[low, high]", 2, 2, integer=True),
    "qrandint": _ArgumentForm("[low, high, step]", 3, 3, integer=True),
    "lograndint": _ArgumentForm("[low, high]", 2, 3, integer=True, log=True),
    "qlograndint": _ArgumentForm("[low, high, step]", 3, 4, integer=True, log=True),
}
"""Maps the names of distributions to the forms of their arguments. A trial uses one of the values of choice, and a search tries all values
of grid_search."""


@dataclass(frozen=True)
class SearchKey:
    """One key of a spec that a search varies."""

    path: KeyPath
    """Path of the key in the spec, such as ("agent", "algorithm", "gamma")."""
    distribution: str
    """Name of the distribution, a key of DISTRIBUTIONS."""
    args: tuple[Any, ...]
    """Arguments of the distribution. For choice and grid_search, `args` contains the options without the search keys inside the options."""
    nested: tuple[tuple[SearchKey, ...], ...] = ()
    """For choice and grid_search, the search keys inside each option in `args`, or () if no option contains search keys."""
    where: KeyPath = field(default=(), compare=False)
    """Unique path of the search key in the search section, such as ("agent.net.optim_spec__choice", 1, "lr__loguniform")."""

    @property
    def text(self) -> str:
        """Return the dotted path of the key in the spec, which names the key in the results of a search."""
        return show_path(self.path)

    @property
    def has_options(self) -> bool:
        """Return whether `args` are the values from which a search chooses (choice and grid_search)."""
        return DISTRIBUTIONS[self.distribution].options

    @property
    def is_integer(self) -> bool:
        """Return whether all values of the distribution are integers."""
        return DISTRIBUTIONS[self.distribution].integer

    @property
    def is_log(self) -> bool:
        """Return whether the logarithm of the value is uniformly distributed."""
        return DISTRIBUTIONS[self.distribution].log

    @property
    def is_normal(self) -> bool:
        """Return whether the values of the search key have a normal distribution, without bounds."""
        form = DISTRIBUTIONS[self.distribution]
        return not form.ordered and not form.options

    @property
    def step(self) -> float | None:
        """Return the step of which all possible values are multiples, or None if the distribution has no step."""
        return self.args[2] if self.distribution.startswith("q") else 1 if self.is_integer else None

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest possible value of a range. If the distribution has a step, these two values are multiples of
        the step.

        The upper bound in `args` is itself a possible value, except for the distributions randint and lograndint.
        """
        low, high, step = self.args[0], self.args[1], self.step
        if not step:
            return low, high
        if self.distribution in ("randint", "lograndint"):
            return int(low), int(high) - 1
        return self.multiple_of_step(math.ceil(low / step - _SLACK)), self.multiple_of_step(math.floor(high / step + _SLACK))

    def multiple_of_step(self, count: float) -> float:
        """Round `count` to an integer, and return its product with the step, without floating-point error.

        The product has the type int if all values of the distribution are integers.
        """
        product = round(count) * (self.step or 1)
        return int(product) if self.is_integer else float(f"{product:.12g}")

    def values_to_check(self) -> tuple[Any, ...]:
        """Return a sample of the possible values. Only this sample is validated, not all possible values.

        For choice and grid_search, the sample contains the indices of all options. For a range, the sample contains both ends and possibly
        a value between the ends. For a normal distribution, the sample contains a value near the mean. Other values may be invalid,
        because invalid values are not proposed.
        """
        if self.has_options:
            return tuple(range(len(self.args)))
        if self.is_normal:
            mean, std = self.args[:2]
            return (_fraction_near(mean, std) if self.step is None else self.multiple_of_step(mean / self.step),)
        low, high = self.bounds
        inner = () if self.step else (_fraction_near(low + (high - low) * 0.414, high - low),)
        return tuple(dict.fromkeys((low, high, *inner)))


def _fraction_near(value: float, width: float) -> float:
    """Return a number near `value` that is not a whole number. Validating it shows whether the key accepts fractions.

    Args: width: distance over which the values of the distribution vary. If it is below 1, the result may be a whole number.
    """
    rounded = float(f"{value:.5g}")
    return rounded + 0.001 if rounded.is_integer() and width >= 1 else rounded


_SLACK = 1e-9
"""Tolerance, in steps, for a bound that is not an exact multiple of the step because of rounding. For example, 0.3 / 0.1 is
2.9999999999999996."""


def parse_search(search: dict[str, Any] | None) -> list[SearchKey]:
    """Return the search keys of the search section of a valid spec, in the order of the file.

    The attribute `nested` of a search key contains the search keys inside its options.
    """
    return [key for key, _ in search_entries(search or {}, Report())]


def active_values(keys: Iterable[SearchKey], choose: Callable[[SearchKey], Any]) -> Iterator[tuple[SearchKey, Any]]:
    """Yield a tuple (search key, value) for each active search key. A search key whose value is a complete section of the spec precedes the
    search keys inside this section.

    A search key that is nested in an option of another search key is active only if this option is chosen.

    Args: choose: function that returns the value of a search key or, for choice and grid_search, the index of the value.
    """
    for key in sorted(keys, key=lambda key: len(key.path)):
        chosen = choose(key)
        yield key, copy.deepcopy(key.args[chosen]) if key.has_options else chosen
        if key.nested:
            yield from active_values(key.nested[chosen], choose)


def walk_search_keys(
    keys: Iterable[SearchKey], above: Mapping[KeyPath, int] | None = None
) -> Iterator[tuple[SearchKey, dict[KeyPath, int]]]:
    """Yield a tuple (search key, conditions) for each search key. Nested search keys follow the search key in whose options they are
    nested.

    The conditions determine when the search key is active. They map the attribute `where` of each outer search key to the index of the
    option that must be chosen.

    Args: above: conditions of the outer search keys, by default none.
    """
    for key in keys:
        yield key, dict(above or {})
        for index, inner in enumerate(key.nested):
            yield from walk_search_keys(inner, {**(above or {}), key.where: index})


_META = frozenset(key for key in MetaSpec.model_fields if key.startswith("search_") or key == "max_trial")
"""Keys of the section meta that only a search uses."""


def is_search_only(path: KeyPath) -> bool:
    """Return whether the key of a spec at `path` is used only by searches, and by no other mode."""
    return path[0] == "search" or (path[0] == "meta" and path[1:2] != () and path[1] in _META)


def changed_search_keys(spec: Spec) -> list[str]:
    """Return the dotted paths of those keys of a spec that only a search uses and whose values differ from the defaults."""
    found = [key for key, field in MetaSpec.model_fields.items() if key in _META and getattr(spec.meta, key) != field.default]
    return ["search"] * (spec.search is not None) + [f"meta.{key}" for key in found]


def redirect_search(search: dict[str, Any], moved: dict[KeyPath, KeyPath | None], report: Report) -> dict[str, Any]:
    """Return a search section in which search keys are moved to other paths of the spec. If any search key is moved, all search keys get
    dotted paths. Add a note to `report` for each removed search key.

    Args: search: valid search section. moved: dict from old paths to new paths, or to None to remove the search key.
    """
    found = [
        (key, args, next((old for old in moved if key.path[: len(old)] == old), None)) for key, args in search_entries(search, Report())
    ]
    if all(old is None for _, _, old in found):
        return search
    result = {}
    for key, args, old in found:
        new = moved[old] if old else ()
        if old and new is None:
            report.note(("search", *key.where), "has no effect in this spec; ignored")
        else:
            path = (*(new or ()), *key.path[len(old or ()) :])
            result[f"{show_path(path)}__{key.distribution}"] = args
    return result


def prune_search(raw: dict[str, Any], report: Report) -> dict[str, Any]:
    """Remove keys that no longer exist, and keys without effect, from the search section of a raw spec in place. Add a note to `report` for
    each removed key, and return the raw spec."""
    search = raw.get("search")
    if isinstance(search, dict):
        _prune_section(search, (), ("search",), raw, report)
    if not search:
        raw.pop("search", None)
    return raw


def _prune_section(node: dict[str, Any], path: KeyPath, where: KeyPath, raw: dict[str, Any], report: Report) -> None:
    for text in [*node]:
        name = text.rpartition("__")[0] or _misspelt_key(text, node[text])
        key_path = (*path, *to_path(name or text))
        if isinstance(node[text], dict) and "__" not in text:
            _prune_section(node[text], key_path, (*where, text), raw, report)
        elif key_path and key_path[-1] in RETIRED:
            report.note_ineffective_key((*where, text), "no longer exists; ignored")
            del node[text]
        elif key_path and name and key_path[-1] in ineffective_keys(key_path[:-1], raw):
            report.note_ineffective_key((*where, text), "has no effect in this spec; ignored")
            del node[text]


def _misspelt_key(text: str, args: Any) -> str:
    """Return the part "key" of `text` if `text` is "key_distribution" (with one underscore instead of two), else ""."""
    distribution = next((word for word in DISTRIBUTIONS if text.endswith(f"_{word}")), "")
    return text.removesuffix(f"_{distribution}") if distribution and "__" not in text and isinstance(args, list) else ""


def search_entries(node: Any, report: Report, path: KeyPath = (), where: KeyPath = ()) -> Iterator[tuple[SearchKey, Any]]:
    """Yield a tuple (search key, arguments as written in the file) for each well-formed key of `node`, and add a problem to `report` for
    each malformed key.

    Args:
        node: the search section or a part of the search section.
        path: path in the spec to which `node` corresponds.
        where: path of `node` in the search section.
    """
    for text, value in _items(node):
        here = (*where, text)
        name, _, distribution = str(text).rpartition("__")
        if isinstance(value, (dict, list)) and not name and not _misspelt_key(str(text), value):
            inner = (text,) if isinstance(text, int) else to_path(text)
            yield from search_entries(value, report, (*path, *inner), here)
        elif isinstance(node, list) and value is None:
            continue  # null stands for a list item of the spec that is not searched
        elif not name or not to_path(name):
            meant = _misspelt_key(str(text), value)
            hint = f"; did you mean '{meant}__{str(text)[len(meant) + 1 :]}'?" if meant else ""
            report.add_problem(("search", *here), f"must be key__distribution, or an object of such keys{hint}")
        elif distribution not in DISTRIBUTIONS:
            hint = nearest_hint(distribution, DISTRIBUTIONS) or f"; allowed: {', '.join(DISTRIBUTIONS)}"
            report.add_problem(("search", *here), f"unknown distribution '{distribution}'{hint}")
        elif message := _argument_error(distribution, value):
            report.add_problem(("search", *here), message)
        else:
            yield _search_key((*path, *to_path(name)), distribution, value, here, report), value


def _search_key(path: KeyPath, distribution: str, args: list[Any], where: KeyPath, report: Report) -> SearchKey:
    if not DISTRIBUTIONS[distribution].options:
        return SearchKey(path, distribution, tuple(args), where=where)
    found = [_split_option(value, path, (*where, index), report) for index, value in enumerate(args)]
    nested = tuple(tuple(keys) for _, keys in found)
    return SearchKey(path, distribution, tuple(value for value, _ in found), nested if any(nested) else (), where)


def _split_option(value: Any, path: KeyPath, where: KeyPath, report: Report) -> tuple[Any, list[SearchKey]]:
    """Return a tuple of two values: an option of choice or grid_search without the search keys inside the option, and a list of these
    search keys."""
    if not isinstance(value, (dict, list)):
        return value, []
    rest: Any = copy.copy(value)
    keys: list[SearchKey] = []
    for text, inner in _items(value):
        if isinstance(text, str) and text.rpartition("__")[0]:
            del rest[text]
            keys += [key for key, _ in search_entries({text: inner}, report, path, where)]
        else:
            rest[text], below = _split_option(inner, (*path, text), (*where, text), report)
            keys += below
    return rest, keys


def _items(node: Any) -> list[tuple[Any, Any]]:
    return [*node.items()] if isinstance(node, dict) else [*enumerate(node)]


def _argument_error(distribution: str, args: Any) -> str | None:
    """Return an error message if the arguments of a distribution are invalid, else None."""
    form = DISTRIBUTIONS[distribution]
    if form.options:
        return None if isinstance(args, list) and args else f"{distribution} expects a list of values (not empty), not {format_json(args)}"
    fit = isinstance(args, list) and form.min_args <= len(args) <= form.max_args
    if not fit or any(isinstance(arg, bool) or not isinstance(arg, (int, float)) or not math.isfinite(arg) for arg in args):
        return f"{distribution} expects numbers {form.words}, not {format_json(args)}"
    if form.integer and any(arg != int(arg) for arg in args):
        return f"{distribution} expects whole numbers {form.words}, not {format_json(args)}"
    if form.log and args[0] <= 0:
        return f"{distribution} needs a low bound above 0, not {format_json(args[0])}"
    if form.ordered and args[0] >= args[1]:
        return f"{distribution} needs low < high, not {format_json(args)}"
    if not form.ordered and args[1] < 0:
        return f"{distribution} needs a deviation ≥ 0, not {format_json(args[1])}"
    names = ("step", "base") if distribution.startswith("q") else ("base",)
    for name, arg in zip(names, args[2:], strict=False):
        if arg <= 0:
            return f"{distribution} needs a {name} above 0"
    low, high = SearchKey((), distribution, tuple(args)).bounds if form.ordered else (0, 0)
    return (
        None
        if low <= high
        else f"{distribution}: the range {format_json(args[:2])} contains no multiple of the step {format_json(args[2])}"
    )
