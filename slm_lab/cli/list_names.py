"""The command `list [KIND] [--search WORD …]`, which lists the specs and studies that ship with slm_lab, algorithms, nets, memories, and
envs."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from slm_lab.cli.output import print_json, print_result
from slm_lab.cli.parser import UsageError, did_you_mean


class Entry(NamedTuple):
    """One entry of a list of names, with the heading above the entry, the cells of the entry's table row, and additional search words."""

    heading: str
    cells: tuple[str, ...]
    text: str = ""
    """Text that is printed below the table row of the entry."""
    keywords: str = ""
    values: tuple[Any, ...] = ()
    """Cells of the entry in JSON documents, or () if the JSON document contains `cells`."""

    def to_dict(self, kind: str) -> dict[str, Any]:
        """Return the entry as a dict for a JSON document."""
        cells = dict(zip(COLUMNS[kind], self.values or self.cells, strict=True))
        return {**cells, **({"group": self.heading} if kind == "envs" else {}), **({"description": self.text} if self.text else {})}

    def contains(self, words: Sequence[str]) -> bool:
        """Return whether the entry contains all of `words`, ignoring case."""
        content = " ".join((self.heading, *self.cells, self.text, self.keywords)).lower()
        return all(word.lower() in content for word in words)


def list_names(words: list[str], arguments: Namespace) -> int:
    """Print the list KIND and return the exit code. If words follow KIND or the option --search, print only the entries that contain all
    these words.

    Without KIND, print the number of entries in each list. With --search, but without KIND, print the matching entries of all lists.
    """
    search = [word for given in (*words[1:], *(arguments.search or ())) for word in given.split()]
    words = words[:1]
    if arguments.search is not None and not search:
        raise UsageError("--search is empty; expected words to look for, such as: list envs --search pong")
    if words and words[0] not in KINDS:
        raise UsageError(f"unknown list '{words[0]}'{did_you_mean(words[0], KINDS)} (lists: {', '.join(KINDS)})")
    if not words and not search:
        if arguments.json:
            return print_json({kind: {"entries": len(list(make())), "description": text} for kind, (make, text) in KINDS.items()})
        lines = [f"slm-lab list {kind:<12}{len(list(make())):>5} {text}" for kind, (make, text) in KINDS.items()]
        lines.append("slm-lab list KIND WORD … shows only entries that contain all these words")
        return print_result("\n".join(lines))
    kinds = words or list(KINDS)
    found = {kind: list(KINDS[kind][0]()) for kind in kinds}
    shown = {kind: [entry for entry in entries if entry.contains(search)] for kind, entries in found.items()}
    if not any(shown.values()):
        raise UsageError(_no_results_message(search, found))
    if arguments.json:
        return print_json({kind: [entry.to_dict(kind) for entry in entries] for kind, entries in shown.items()})
    if not search and "envs" in shown:  # show only names, since 1,000 envs with their spaces are 2,500 lines
        shown["envs"] = [entry._replace(text="") for entry in shown["envs"] if not entry.text.startswith(_REFUSED)]
    width = max(40, min(shutil.get_terminal_size((80, 24)).columns, 120))
    parts = [_table_text(entries, width, kind if len(kinds) > 1 else "") for kind, entries in shown.items() if entries]
    if shown.get("specs"):
        parts.append(textwrap.fill("Columns: NAME of the spec in FILE, algorithm, frames, env. slm-lab FILE NAME runs it.", width))
    if shown.get("envs") and not search:
        parts.append(textwrap.fill(_ABOUT_ENVS, width))
    return print_result("\n\n".join(parts))


def _no_results_message(search: Sequence[str], found: Mapping[str, Sequence[Entry]]) -> str:
    """Return the error message for a search without results.

    If a word of the search occurs in no entry and is similar to a name, the error message suggests the name. Otherwise, the error message
    suggests the command that lists all names.
    """
    from slm_lab.spec.report import nearest_hint

    entries = [entry for of_kind in found.values() for entry in of_kind]
    nowhere = [word for word in search if not any(entry.contains([word]) for entry in entries)]
    names = {name for entry in entries for name in (*entry.cells[0].split(), *entry.keywords.split())}
    parts = names.union(*(re.split(r"[/:_.-]", name) for name in names))
    hint = next(filter(None, (nearest_hint(word, parts) for word in nowhere)), f"; slm-lab list {next(iter(found))} shows all")
    what = next(iter(found)) if len(found) == 1 else "list"
    where = f"no entry of {what}" if len(found) == 1 else "no entry of any list"
    return f"{where} contains {' and '.join(repr(word) for word in nowhere or search)}{'' if nowhere else ' together'}{hint}"


def _table_text(entries: Sequence[Entry], width: int, kind: str) -> str:
    """Return text that shows list entries in aligned columns below their headings. Entries that consist only of a name are shown side by
    side."""
    lines, heading, names = list[str](), "", list[str]()
    shown = [entry for entry in entries if len(entry.cells) > 1]
    widths = [max(map(len, column)) for column in zip(*(entry.cells for entry in shown), strict=True)] if shown else []
    for entry in entries:
        title = " — ".join(filter(None, (kind, entry.heading)))
        if title != heading or not lines:
            lines += [*_wrap_names(names, width), *([""] if lines else [])]
            names, heading = [], title
            lines += textwrap.wrap(title, width) if title else []
        if len(entry.cells) == 1 and not entry.text:
            names.append(entry.cells[0])
            continue
        indent = "  " if title else ""
        row = (
            "  ".join(cell.ljust(size) for cell, size in zip(entry.cells, widths, strict=True)) if len(entry.cells) > 1 else entry.cells[0]
        )
        line = f"{indent}{row}".rstrip()
        lines.append(line if len(line) <= width else f"{line[: width - 1]}…")
        lines += textwrap.wrap(entry.text, width, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}    ")
    return "\n".join([*lines, *_wrap_names(names, width)])


def _wrap_names(names: Sequence[str], width: int) -> list[str]:
    """Return lines of text, at most `width` characters long, that contain the names side by side."""
    return textwrap.wrap(
        "  ".join(names), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _specs() -> Iterator[Entry]:
    from slm_lab.spec.load.files import spec_summaries

    for file, name, algorithm, env, frames in spec_summaries():
        values = (name, algorithm, frames, env, str(file))
        yield Entry(file.name, (name, algorithm, _frames_text(frames), env.rpartition(":")[2]), keywords=f"{file} {env}", values=values)


def _studies() -> Iterator[Entry]:
    from slm_lab.spec.load.files import SPEC_FOLDER, is_study, raw_entries, shipped_spec_files

    for file in shipped_spec_files():
        for name, raw in raw_entries(SPEC_FOLDER / file)[1].items():
            if is_study(raw):
                entries, seeds = raw["study"]["entries"], raw["study"]["random_seed"]
                labels = "; ".join(dict.fromkeys(entry.get("label", entry["spec"]) for entry in entries))
                cells, values = (name, f"{len(entries)} entries", f"{len(seeds)} seeds"), (name, len(entries), len(seeds), str(file))
                yield Entry(file.name, cells, f"{labels}.", str(file), values)


def _frames_text(frames: object) -> str:
    """Return a number of frames as text in thousands or millions, such as 200k or 10M."""
    try:
        count = float(str(frames))
    except ValueError:
        return str(frames)
    unit, size = ("M", 1e6) if count >= 1e6 else ("k", 1e3) if count >= 1e3 else ("", 1.0)
    return f"{count / size:g}{unit}"


def _algorithms() -> Iterator[Entry]:
    from slm_lab.spec.compat.migrate import OTHER_ALGORITHMS
    from slm_lab.spec.models.algorithm import ALGORITHMS, ALL_ACTIONS

    for name, model in ALGORITHMS.items():
        kinds = "any actions" if model.action_kinds == ALL_ACTIONS else f"{' and '.join(model.action_kinds)} actions"
        policy = "on-policy" if model.on_policy else "off-policy"
        others = " ".join(other for other, here in OTHER_ALGORITHMS.items() if here.split(",")[0] == name)
        yield Entry("", (name, policy if model.learns else "does not learn", kinds), _docstring_text(model), others)


def _nets() -> Iterator[Entry]:
    from slm_lab.spec.models.net import NETS

    for name, model in NETS.items():
        yield Entry("", (name,), _docstring_text(model))


def _memories() -> Iterator[Entry]:
    from slm_lab.spec.models.memory import MEMORIES

    for name, model in MEMORIES.items():
        yield Entry("", (name, "on-policy" if model.on_policy else "off-policy"), _docstring_text(model))


def _docstring_text(model: type) -> str:
    return " ".join(inspect.getdoc(model).split()) if model.__doc__ else ""  # type: ignore[union-attr]  # the docstring exists


def _envs() -> Iterator[Entry]:
    from slm_lab.spec.compat.env_ids import ATARI, KNOWN, current_id, ids_of_other_packages, requirement_by_kind

    backends = [
        name
        for name, package in (("pettingzoo", "pettingzoo"), ("ale", "ale_py"), ("envpool", "envpool"))
        if find_spec(package) is not None
    ]
    vector = ", ".join(["native", *backends, "sync", "async"])
    of_kind: dict[str, list[str]] = {}
    for name, kind in KNOWN.items():
        of_kind.setdefault(kind, []).append(name)
    of_kind["atari"] = [f"ALE/{game}-v5" for game in sorted(ATARI)]
    here = requirement_by_kind()
    for kind, names in sorted(of_kind.items(), key=lambda item: here.get(item[0]) is not None):
        missing = here.get(kind)
        heading = _package_heading(kind, missing)
        for name in sorted(name for name in names if current_id(name) == name):
            yield Entry(heading, (name,), keywords="installed" if not missing else "")
    yield from _pool_envs(here.get("envpool"))
    yield from _pettingzoo_envs()
    for module, names in ids_of_other_packages().items():
        for name in names or [f"{module}:…"]:
            yield Entry(_package_heading(module, here.get(module)), (name,))
    yield Entry("backends installed (env.backend)", (vector,))


_REFUSED = "not supported: "
_ABOUT_ENVS = (
    "--search WORD also shows the observations and actions of EnvPool's envs, and why some envs are not supported. "
    "An env of any other package is named package.module:EnvId, by the module that registers it."
)


def _pool_envs(missing: str | None) -> Iterator[Entry]:
    """Yield an entry for each env that exists only in EnvPool, with a description of the env's spaces. All ids of an env are search words
    of its entry."""
    from slm_lab.spec.compat.env_ids import envpool_envs, envpool_id

    for env in dict.fromkeys(envpool_envs().values()):
        ids = [name for name in env.ids if envpool_id(name)]
        if not ids or env.suite in ("atari", "box2d", "classic_control", "mujoco"):
            continue
        agents = f", {env.players} agents" if env.players > 1 else ""
        spaces = f"{env.observation} → {env.action}{agents}" if env.observation else ""
        refused = f"{_REFUSED}{env.unsupported_reason}" if env.unsupported_reason else ""
        heading = f"{env.suite}, backend envpool" + (f": not installed; pip install '{missing}'" if missing else " (installed)")
        yield Entry(heading, (ids[0],), refused or spaces, " ".join((*ids, spaces, "" if missing or refused else "installed")))


def _pettingzoo_envs() -> Iterator[Entry]:
    """Yield an entry for each env of PettingZoo's registry and of mpe2."""
    from slm_lab.spec.compat.env_ids import PETTINGZOO, pettingzoo_envs, unavailable_reason

    envs = {f"{PETTINGZOO}{name}": env for name, env in pettingzoo_envs().items()}
    reasons = {name: unavailable_reason(name) for name in envs}
    for name in sorted(envs, key=lambda name: (reasons[name] is not None, envs[name].id.rpartition("/")[0], name)):
        family = "mpe2" if envs[name].kind == "mpe2" else f"pettingzoo {envs[name].id.partition('/')[0]}"
        reason = reasons[name]
        missing = None if reason is None else reason.partition("pip install '")[2].rstrip("'")
        yield Entry(_package_heading(f"{family}, several agents", missing), (name,), keywords="installed" if reason is None else "")


def _package_heading(what: str, missing: str | None) -> str:
    return f"{what}: not installed; pip install '{missing}'" if missing else f"{what} (installed)"


COLUMNS = {
    "specs": ("name", "algorithm", "frames", "env", "file"),
    "studies": ("name", "entries", "seeds", "file"),
    "algorithms": ("name", "policy", "actions"),
    "nets": ("name",),
    "memories": ("name", "policy"),
    "envs": ("name",),
}
"""Maps each kind of list to the names that the cells of an entry have in JSON documents."""
KINDS: dict[str, tuple[Callable[[], Iterator[Entry]], str]] = {
    "specs": (_specs, "specs that ship with slm_lab"),
    "studies": (_studies, "studies that ship with slm_lab"),
    "algorithms": (_algorithms, "algorithms (agent.algorithm.name)"),
    "nets": (_nets, "nets (agent.net.name)"),
    "memories": (_memories, "memories (agent.memory.name)"),
    "envs": (_envs, "environments (env.name), installed ones first"),
}
"""Maps each kind of list to the function that yields the entries of the list, and a description of the list."""
