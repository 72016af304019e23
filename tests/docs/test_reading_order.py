"""Tests of docs/reading_order.md: its call sequences list functions in the order in which a run calls them, and its files exist."""

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
_STEP = re.compile(r"^1\. \[`(?P<module>[\w.]+):(?P<name>[\w.]+)`\]\(\.\./(?P<file>\S+)\) .+$", re.MULTILINE)


def sequences() -> dict[str, list[list[str]]]:
    """Return a dict from each call sequence to its lists of functions, as "module:qualname"."""
    parts = PAGE.partition("\n## Call sequences\n")[2].partition("\n## ")[0].split("\n### ")[1:]
    lists = {part.partition("\n")[0]: [[*_STEP.finditer(block)] for block in part.split("\n\n")] for part in parts}
    return {name: [[f"{step['module']}:{step['name']}" for step in steps] for steps in found if steps] for name, found in lists.items()}


def code_of(function: str) -> CodeType | None:
    """Return the code object of "module:qualname", without the decorators of a method or property; None if it does not exist."""
    try:
        return _code(function)
    except (ImportError, AttributeError):
        return None


def _code(function: str) -> CodeType:
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
    """Return the calls of the functions of the call sequences, in order, while a small spec is loaded, trained, continued and played."""
    names = {code_of(function): function for lists in sequences().values() for functions in lists for function in functions}
    found = list[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            found.append(names[frame.f_code])

    folder = tmp_path_factory.mktemp("sequences")
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


def end_of(functions: list[str], calls: list[str], begin: int) -> int:
    """Return the position in `calls`, from `begin` on, at which `functions` have been called in order.

    Earlier functions of the list must not be called in between. Return 0 if there is no such position.
    """
    reached = {0}
    for position, call in enumerate(calls[begin:], begin + 1):
        kept = {count for count in reached if call not in functions[:count]}
        reached = {0} | kept | {count + 1 for count in reached if functions[count] == call}
        if len(functions) in reached:
            return position
    return 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sequences())
def test_the_functions_of_a_call_sequence_are_called_in_its_order(name: str, calls: list[str]) -> None:
    position = 0
    for functions in sequences()[name]:
        position, begin = end_of(functions, calls, position), position
        known = [call for call in dict.fromkeys(calls[begin:]) if call in functions]
        assert position, "docs/reading_order.md has another order than the first calls:\n" + "\n".join(known)
    assert sum(map(len, sequences()[name])) >= 8


def test_another_order_is_found() -> None:
    """`end_of` rejects a wrong order, also in a loop, and functions that are never called."""
    calls = ["begin", *["read", "compute", "write"] * 3, "end"]
    assert end_of(["begin", "read", "compute", "write", "end"], calls, 0) == len(calls)
    assert end_of(["begin", "read", "write", "compute", "end"], calls, 0) == 0
    assert end_of(["begin", "read", "compute", "check"], calls, 0) == 0
    assert end_of(["begin", "read"], calls, 1) == 0


def test_the_functions_exist() -> None:
    functions = [function for lists in sequences().values() for functions in lists for function in functions]
    assert [function for function in functions if code_of(function) is None] == [], "docs/reading_order.md has other names"


def test_the_page_has_call_sequences() -> None:
    assert list(sequences()) == ["A spec key", "A reward", "A gradient", "A checkpoint"]
    items = [line for line in PAGE.partition("\n## Call sequences\n")[2].splitlines() if line.startswith("1. ")]
    assert len(items) == sum(len(functions) for lists in sequences().values() for functions in lists), "an item has another form"


def test_links_are_to_the_files_of_the_functions() -> None:
    steps = [(f"slm_lab/{step['module'].replace('.', '/')}.py", step["file"]) for step in _STEP.finditer(PAGE)]
    assert [pair for pair in steps if pair[0] != pair[1]] == []


def test_files_exist() -> None:
    """The files of all links exist, and the file name in a link's text is the end of the path that the link leads to."""
    links = re.findall(r"\[`?([^`\]]+)`?\]\(\.\./([^)#]+)\)", PAGE)
    assert len(links) > 80
    assert [path for _, path in links if not (ROOT / path).exists()] == []
    named = [(text, Path(path)) for text, path in links if text.endswith(".py")]
    assert [text for text, path in named if not path.as_posix().endswith(text)] == []


@pytest.mark.parametrize("name", ["search", "study", "cluster"])
def test_there_is_a_stop_for(name: str) -> None:
    assert f"\n### A {name}\n" in PAGE
