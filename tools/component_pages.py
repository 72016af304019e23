"""Generate docs/nets.md, and a page in docs/ for each algorithm, memory and net. The script tools/generate.py writes the files.

A page has three parts: the head, which describes the component; a part that is written by hand, between two markers; and the rest
(equations, keys, diagnostics, shipped specs, scores). The second marker names the paragraphs of docs/equations.md that the page quotes. If
a page does not exist, it is generated with an empty second part, to be completed by hand.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.net.body import BODIES
from slm_lab.spec.models.algorithm import ALGORITHMS, AlgorithmSpec
from slm_lab.spec.models.base import Component
from slm_lab.spec.models.net import NetSpec
from tools.spec_reference import FOLDERS, SECTIONS, Section, common_keys, key_lines, keys, page_of, relative, sections_of, shipped_specs

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BY_HAND = "<!-- written by hand -->"
GENERATED = "<!-- generated; equations: {} -->"
_PARTS = re.compile(rf"{BY_HAND}\n(?P<hand>.*?){GENERATED.format('(?P<equations>[^>]*?)')}\n", re.DOTALL)

DIAGNOSTICS = {
    "policy_loss": "loss of the policy, without the entropy bonus",
    "value_loss": "loss of the critic, before it is multiplied by `val_loss_coef`",
    "approx_kl": "estimate of KL(π_old, π), the Kullback–Leibler divergence between the policy that acted and the current policy: the mean "
    "of (r − 1) − ln r with the ratio r = π / π_old ([Schulman 2020](http://joschu.net/blog/kl-approx.html)); a value far above 0.02 means "
    "that the policy changes too much within one update",
    "clip_fraction": "share of transitions whose ratio is outside 1 ± ε",
    "explained_variance": "1 − Var(return − value) / Var(return): 1 for a perfect critic, 0 for a critic that predicts a constant, "
    "below 0 for a worse critic",
    "bounds_loss": "mean squared distance by which the means of actions exceed ±1.1, before it is multiplied by `bounds_loss_coef`",
    "td_error": "mean absolute temporal-difference error, \\|y − Q(s, a)\\|",
    "q_mean": "mean of Q(s, a) over the batch; a value far above the returns means that values are overestimated",
    "critic_loss": "sum of the losses of all critics",
    "actor_loss": "loss of the actor",
    "alpha": "temperature α",
}
"""Column of the tables → its meaning."""
OTHER_DIAGNOSTICS = {("IQL", "value_loss"): "loss of V"}
"""(algorithm, column) → meaning of the column, if it is not the one in DIAGNOSTICS."""

_MAX_SCORES = 12
"""Maximum number of scores on the page of a memory or net; if there are more, the page links to the page of all scores."""


def pages() -> dict[str, Callable[[], str]]:
    """Return {path of a page: function that returns the text of the page}."""
    found: dict[str, Callable[[], str]] = {"docs/nets.md": _nets}
    for section in SECTIONS:
        if section.path in FOLDERS:
            found |= {f"docs/{page_of(section, name)}": partial(_page, section, name) for name in section.models}
    return found


def left_over() -> list[str]:
    """Return the pages of components that no longer exist."""
    files = [file.relative_to(ROOT).as_posix() for folder in FOLDERS.values() for file in sorted((DOCS / folder).glob("*.md"))]
    return [file for file in files if file not in pages()]


def _nets() -> str:
    hand, _ = _by_hand("nets.md")
    return relative("\n".join(["# Nets", "", BY_HAND, f"{hand}{GENERATED.format('none')}", "", *sections_of("nets.md")]), "nets.md")


def _page(section: Section, name: str) -> str:
    page = page_of(section, name)
    hand, equations = _by_hand(page)
    head = "\n".join(_head(section, name))
    rest = "\n".join([*_equations(equations), *_keys(section, name), *_diagnostics(section, name), *_specs(section, name)])
    marker = GENERATED.format(", ".join(equations) or "none")
    # in the part that is written by hand, links are already relative to the page
    return f"{relative(head, page)}\n{BY_HAND}\n{hand}{marker}\n\n{relative(rest, page)}".rstrip() + "\n"


def _by_hand(page: str) -> tuple[str, list[str]]:
    """Return the part of a page that is written by hand, and the names of the equations that the page quotes."""
    file = DOCS / page
    if not file.exists():
        return "\n", []
    parts = _PARTS.search(file.read_text(encoding="utf-8"))
    if parts is None:
        raise ValueError(f"{file}: expected the line {BY_HAND}, and after it {GENERATED.format('NAME, NAME')}")
    return parts["hand"], [name.strip() for name in parts["equations"].split(",") if name.strip() != "none"]


def _head(section: Section, name: str) -> Iterator[str]:
    """Yield the lines that describe a component."""
    implementation, doc = _implementation(section, name)
    yield f"# {name}"
    # the docstring of the model replaces the summary of the class, which is its first paragraph
    for paragraph in (inspect.getdoc(section.models[name]) or "", *re.split(r"\n\n(?=Args:|Raises )", doc)[0].split("\n\n")[1:]):
        yield from ("", " ".join(paragraph.split())) if paragraph else ()
    key = section.path.removeprefix("agent.")
    yield from ("", f'- In a spec: `"{key}": {{"name": "{name}"}}`')
    if section.path == "agent.algorithm":
        yield from _algorithm_facts(ALGORITHMS[name])
    if section.path == "agent.memory":
        algorithms = next(one for one in SECTIONS if one.path == "agent.algorithm")
        users = [f"[{one}]({page_of(algorithms, one)})" for one, model in ALGORITHMS.items() if name in model.memories]
        yield f"- Algorithms that use this memory: {', '.join(users)}"
    file = Path(inspect.getsourcefile(implementation) or "").resolve().relative_to(ROOT).as_posix()
    yield from (f"- Code: `{implementation.__name__}` in [`{file}`](../{file})", "")


def _algorithm_facts(model: type[AlgorithmSpec]) -> Iterator[str]:
    """Yield the lines with the actions, memories, nets and processes that an algorithm supports."""
    yield f"- Supported actions: {', '.join(kind.replace('_', '-') for kind in model.action_kinds)}"
    memories = next(one for one in SECTIONS if one.path == "agent.memory")
    links = [f"[{memory}]({page_of(memories, memory)})" for memory in model.memories]
    yield f"- Memory: {', '.join([f'{links[0]} (default)', *links[1:]] if len(links) > 1 else links)}"
    if model.learns:
        yield f"- Recurrent nets (`RecurrentNet`): {'supported' if model.recurrent else 'not supported'}"
        sampler = {(): "", ("async",): ", `meta.sampler` (asynchronous)"}.get(model.samplers, ", `meta.sampler`")
        yield f"- Keys for training in several processes: `meta.distributed`{sampler}"


def _implementation(section: Section, name: str) -> tuple[Callable[..., object], str]:
    """Return (class or function that builds a component, docstring of this class if only this component uses the class, otherwise "")."""
    builders = {key: _builder(model) for key, model in section.models.items()}
    builder = builders[name]
    alone = inspect.isclass(builder) and list(builders.values()).count(builder) == 1
    return builder, (inspect.getdoc(builder) or "") if alone else ""


def _builder(model: type[BaseModel]) -> Callable[..., object]:
    """Return the function that builds the body of a built-in net, or the class of another component."""
    if issubclass(model, NetSpec) and model in BODIES:
        return BODIES[model]
    assert issubclass(model, Component)
    implementation: Callable[..., object] = model.implementation()
    return implementation


@cache
def _paragraphs() -> dict[str, tuple[str, str]]:
    """Return {name: (file of the code, text)} for the paragraphs of docs/equations.md that begin with a name in bold."""
    found = dict[str, tuple[str, str]]()
    for part in (DOCS / "equations.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, content = part.partition("\n")
        code = heading.partition("`")[2].rstrip("`")
        for block in re.split(r"\n\n(?=\*\*)", content.strip()):
            if name := re.match(r"\*\*(.+?)\.?\*\*", block):
                found[name[1]] = code, block
    return found


def _equations(names: list[str]) -> Iterator[str]:
    """Yield the quoted paragraphs; each group of paragraphs has a link to its code."""
    if not names:
        return
    yield from ("## Equations", "", "[Equations](equations.md) explains the notation and lists the formulas of all algorithms.", "")
    paragraphs = _paragraphs()
    if unknown := [name for name in names if name not in paragraphs]:
        raise ValueError(f"docs/equations.md has no paragraph {unknown}; expected one of {sorted(paragraphs)}")
    for index, name in enumerate(names):
        code, block = paragraphs[name]
        yield from (block, "")
        if index + 1 == len(names) or paragraphs[names[index + 1]][0] != code:
            yield from (f"Code: [`slm_lab/{code}`](../slm_lab/{code})", "")


def _keys(section: Section, name: str) -> Iterator[str]:
    """Yield the keys of a component. Keys that all nets have in common are given only by name."""
    component, common = Section(section.path, section.title, {"": section.models[name]}), common_keys(section)
    yield from ("## Keys", "")
    if common:
        yield from (f"The keys of all nets are described in [Nets]({section.link}): {', '.join(f'`{key}`' for key in common)}.", "")
    for key in keys(component):
        if key not in (*common, "name"):
            yield from key_lines(component, key, "###")


def _diagnostics(section: Section, name: str) -> Iterator[str]:
    """Yield the columns that an algorithm adds to the tables of a run."""
    algorithm = _implementation(section, name)[0]
    if not (inspect.isclass(algorithm) and issubclass(algorithm, Algorithm) and algorithm.diagnostics):
        return
    yield from (
        "## Diagnostics",
        "",
        "The tables of a run have these columns in addition to the [columns of all algorithms](results.md#columns):",
        "",
    )
    yield from ("| column | meaning (each value is the mean over the updates since the previous row) |", "|---|---|")
    if missing := [column for column in algorithm.diagnostics if column not in DIAGNOSTICS]:
        raise ValueError(f"DIAGNOSTICS in tools/component_pages.py does not say what the column {missing[0]!r} of {name} means")
    yield from (f"| `{column}` | {OTHER_DIAGNOSTICS.get((name, column), DIAGNOSTICS[column])} |" for column in algorithm.diagnostics)
    yield ""


class _Shipped(NamedTuple):
    """A shipped spec, and the names of its components."""

    file: str
    name: str
    components: frozenset[str]


@cache
def _shipped() -> tuple[_Shipped, ...]:
    found = []
    for file, name, spec in shipped_specs():
        agent = spec["agent"]
        algorithm = agent["algorithm"]["name"]
        model = ALGORITHMS.get(algorithm)
        memory = (agent.get("memory") or {}).get("name") or (model.memories[0] if model else "")
        nets = [agent.get(key) or {} for key in ("net", "critic_net")]
        components = {algorithm, memory, *(net.get("name") or net.get("type", "") for net in nets)}
        found.append(_Shipped(file, name, frozenset(components)))
    return tuple(found)


def _specs(section: Section, name: str) -> Iterator[str]:
    """Yield the shipped specs that use a component, and their scores."""
    users = [spec for spec in _shipped() if name in spec.components]
    files = {file: [spec.name for spec in users if spec.file == file] for file in dict.fromkeys(spec.file for spec in users)}
    yield from ("## Shipped specs", "")
    if not users:
        yield from (f"No shipped spec uses {name}.", "")
        return
    yield from (f"These shipped specs use {name}. The command `slm-lab FILE NAME train` trains the spec NAME of a file.", "")
    yield from (f"- [{Path(file).name}](../slm_lab/spec/{file}): {', '.join(f'`{one}`' for one in names)}" for file, names in files.items())
    yield ""
    scores = [row for row in _scores() if (row.file, row.name) in {(spec.file, spec.name) for spec in users}]
    if not scores:
        return
    yield from ("## Scores", "")
    if section.path != "agent.algorithm" and len(scores) > _MAX_SCORES:
        yield from (f"[Scores of the shipped specs](BENCHMARKS.md) lists the scores of {len(scores)} of these specs.", "")
        return
    yield from ("These scores are from [Scores of the shipped specs](BENCHMARKS.md), which explains the columns.", "")
    yield from ("| env | spec | frames | score | 95 % interval | seeds | published |", "|---|---|---|---|---|---|---|")
    yield from (f"| {row.env} | `{row.name}` | {row.cells} |" for row in scores)
    yield ""


class _Score(NamedTuple):
    """A row of docs/BENCHMARKS.md."""

    env: str
    file: str
    name: str
    cells: str


@cache
def _scores() -> tuple[_Score, ...]:
    found = []
    for line in (DOCS / "BENCHMARKS.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        # in the first table of the page, the fourth column contains the spec
        if len(cells) > 3 and (link := re.fullmatch(r"\[(?P<name>\w+)\]\(\.\./slm_lab/spec/(?P<file>\S+)\)", cells[3])):
            env, _, frames, _, seeds, score, interval, _ = cells[:8]
            published = cells[8].strip(" |") if len(cells) > 8 else ""
            found.append(_Score(env, link["file"], link["name"], " | ".join((frames, score, interval, seeds, published))))
    return tuple(found)
