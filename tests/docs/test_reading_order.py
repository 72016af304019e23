"""docs/reading_order.md: its walks are those of a run, and its files exist."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from slm_lab import Trial, load_agent, load_spec
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "reading_order.md").read_text(encoding="utf-8")
_STEP = re.compile(r"^\| \[`(?P<module>[\w.]+):(?P<name>[\w.]+)`\]\(\.\./(?P<file>\S+)\) \| .+ \|$", re.MULTILINE)


def walks() -> dict[str, list[str]]:
    """Return walk → its functions, as "module:qualname"."""
    parts = PAGE.partition("\n## Walks\n")[2].partition("\n## ")[0].split("\n### ")[1:]
    return {part.partition("\n")[0]: [f"{step['module']}:{step['name']}" for step in _STEP.finditer(part)] for part in parts}


def code_of(function: str) -> CodeType:
    """Return the code of "module:qualname", of a method or property without its decorators. Raises ImportError, AttributeError."""
    module, _, name = function.partition(":")
    found: Any = importlib.import_module(f"slm_lab.{module}")
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
        found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        found = found.fget if isinstance(found, property) else found.func if isinstance(found, cached_property) else found
    code = inspect.unwrap(found).__code__
    assert isinstance(code, CodeType)
    return code


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The calls of functions of the walks while a small spec is loaded, trained, continued and played, in their order."""
    names = {code_of(function): function for functions in walks().values() for function in functions}
    found = list[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            found.append(names[frame.f_code])

    folder = tmp_path_factory.mktemp("walks")
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        sets = ["agent.algorithm.gamma=0.9", "env.max_frame=1200", "meta.max_session=1", "meta.log_frequency=400"]
        result = Trial(load_spec("demo.json", "ppo_cartpole", sets), data_dir=folder).run()
        Trial.resume(result.paths.root, sets=["env.max_frame=1600"]).run()
        load_agent(result.paths.root)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("walk", walks())
def test_the_functions_of_a_walk_are_called_in_its_order(walk: str, calls: list[str]) -> None:
    functions = walks()[walk]
    assert len(functions) >= 8
    position = 0
    for function in functions:
        if function not in calls[position:]:
            order = "\n".join(sorted(set(functions), key=lambda name: calls.index(name) if name in calls else len(calls)))
            pytest.fail(
                f"{function} is not called after the functions above it in docs/reading_order.md; order of the first calls:\n{order}"
            )
        position = calls.index(function, position) + 1


def test_the_walks_are_there() -> None:
    assert list(walks()) == ["A spec key", "A reward", "A gradient", "A checkpoint"]
    rows = [line for line in PAGE.partition("\n## Walks\n")[2].splitlines() if line.startswith("| [")]
    assert len(rows) == sum(map(len, walks().values())), "a row has another form"


def test_links_are_to_the_files_of_the_functions() -> None:
    steps = [(f"slm_lab/{step['module'].replace('.', '/')}.py", step["file"]) for step in _STEP.finditer(PAGE)]
    assert [pair for pair in steps if pair[0] != pair[1]] == []


def test_files_exist() -> None:
    """And a file that a link names by its last parts is the one that it leads to."""
    links = re.findall(r"\[`?([^`\]]+)`?\]\(\.\./([^)#]+)\)", PAGE)
    assert len(links) > 80
    assert [path for _, path in links if not (ROOT / path).exists()] == []
    named = [(text, Path(path)) for text, path in links if text.endswith(".py")]
    assert [text for text, path in named if not path.as_posix().endswith(text)] == []


@pytest.mark.parametrize("name", ["search", "study", "cluster"])
def test_there_is_a_stop_for(name: str) -> None:
    assert f"\n### A {name}\n" in PAGE
