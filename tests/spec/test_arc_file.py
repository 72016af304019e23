"""Tests of `arc_file`: the graph of a TorchArcNet in a separate file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slm_lab.spec.load.loader import dump_spec, load_spec
from tests.spec.conftest import Specs

YAML = """
modules:
  body:
    Sequential:
      - LazyLinear: {out_features: 8}
      - Tanh:
graph:
  input: x
  modules:
    body: [x]
  output: body
"""
ARC: dict[str, Any] = {
    "modules": {"body": {"Sequential": [{"LazyLinear": {"out_features": 8}}, {"Tanh": None}]}},
    "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"},
}


def net(**keys: Any) -> dict[str, Any]:
    return {"agent.net": {"name": "TorchArcNet", **keys}}


@pytest.mark.parametrize("place", ["beside the spec", "working directory"])
def test_the_saved_spec_contains_the_arc(specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = specs.file({}).parent if place == "beside the spec" else Path()
    (folder / "net.yaml").write_text(YAML, encoding="utf-8")
    spec = specs.load(net(arc_file="net.yaml"))
    assert spec == specs.load(net(arc=ARC))
    assert spec.agent.net is not None
    assert spec.agent.net.model_dump()["arc"] == ARC
    (folder / "net.yaml").unlink()
    assert load_spec(dump_spec(spec)) == spec


def test_an_arc_counts_before_a_file(specs: Specs) -> None:
    spec = specs.load(net(arc=ARC, arc_file="there is none.yaml"))
    assert spec.agent.net is not None
    assert spec.agent.net.model_dump()["arc"] == ARC
    assert specs.notices() == ["agent.net.arc_file"]


def test_a_file_cannot_be_searched(specs: Specs) -> None:
    changes = net(arc=ARC) | {"search": {"agent": {"net": {"arc_file__choice": ["a.yaml", "b.yaml"]}}}}
    assert specs.problems(changes) == ["search.agent.net.arc_file__choice"]


def test_it_belongs_to_a_torch_arc_net(specs: Specs) -> None:
    specs.load({"agent.net": {"name": "MLPNet", "hid_layers": [8], "arc_file": "there is none.yaml"}})
    assert specs.notices() == ["agent.net.arc_file"]


def test_problems_of_the_content_are_told_of_the_file(specs: Specs) -> None:
    (specs.file({}).parent / "net.yaml").write_text(YAML.replace("LazyLinear: {", "LazyLinear: {in_features: 3, "), encoding="utf-8")
    (specs.file({}).parent / "other.yaml").write_text("modules: {body: {NoLayer: }}", encoding="utf-8")
    assert "agent.net.arc_file" in str(specs.problems(net(arc_file="other.yaml")))


@pytest.mark.parametrize(("value", "text"), [("none.yaml", None), ("bad.yaml", "a: ["), ("empty.yaml", ""), (3, None)])
def test_a_file_that_cannot_be_used(specs: Specs, value: Any, text: str | None) -> None:
    if text is not None:
        (specs.file({}).parent / value).write_text(text, encoding="utf-8")
    assert "agent.net.arc_file" in specs.problems(net(arc_file=value))
