"""Tests of docs/from_slm_lab.md against the spec models and the notices: every row, topic and command is correct."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

from slm_lab.cli.entry import main
from slm_lab.spec.compat import differences
from slm_lab.spec.load.loader import load_with_notices
from slm_lab.spec.rules import resolve
from tests.docs.blocks import ROOT, blocks
from tools import from_slm_lab
from tools.from_slm_lab import MODELS, table
from tools.slm_lab_keys import KEYS, NEEDED, NOTES, DefaultText

FILE = ROOT / "docs" / "from_slm_lab.md"
PAGE = FILE.read_text(encoding="utf-8")


def test_the_tables_are_current() -> None:
    assert from_slm_lab.text() == PAGE, "run: python -m tools.generate"
    assert re.findall(r"<!-- keys: ([\w.]+) -->", PAGE) == [
        "agent.algorithm",
        "schedule",
        "agent.memory",
        "agent.net",
        "env",
        "meta",
        "old",
    ]


@pytest.mark.parametrize(("section", "name"), [(section, name) for section in KEYS for name in KEYS[section]])
def test_every_key_exists_here(section: str, name: str) -> None:
    """Every key of SLM Lab exists in the models, and its row states the default of this library unless both defaults are equal."""
    fields = MODELS[section][name].model_fields
    rows = [line for line in table(section).splitlines()[2:] if name in re.split(r" \| |, ", line) or " | all | " in line or not name]
    for key, there in KEYS[section][name].items():
        assert key in fields
        (row,) = (line for line in rows if line.startswith(f"| `{key}` |"))
        if there == NEEDED:
            assert "equired" in row
            assert not fields[key].is_required() or "efault `" not in row
        elif not isinstance(there, DefaultText):
            assert fields[key].default == there or "efault `" in row


def test_no_note_is_left_over() -> None:
    assert [place for place in NOTES if not any(place[1] in keys for keys in KEYS[place[0]].values())] == []
    assert all(note in PAGE for note in NOTES.values())


def topics() -> set[str]:
    """Return the topics of all notices in slm_lab/spec/compat/differences.py and resolve.py: the second item of (path, topic, message)."""
    nodes = [node for module in (differences, resolve) for node in ast.walk(ast.parse(inspect.getsource(module)))]
    yields = [node.value for node in nodes if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "note_difference"]
    found = [item.elts[1] for item in yields] + [call.args[1] for call in calls]
    return {node.value for node in found if isinstance(node, ast.Constant)}


def test_the_topics_are_those_of_the_notices() -> None:
    part = PAGE.partition("## What differs\n")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", part, re.MULTILINE)[1:]
    assert len(topics()) > 15
    assert sorted(explained) == sorted(topics()), "a notice has no row in the table of docs/from_slm_lab.md, or a row no notice"


def test_check_of_the_example_prints_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` of the example prints the text on the page, and its last line names the topic of each notice once."""
    example = next(block for block in blocks(FILE) if block.file == "theirs.json")
    shown = next(block.text for block in blocks(FILE) if block.text.startswith("a2c_cartpole: valid"))
    path = tmp_path / "theirs.json"
    path.write_text(example.text, encoding="utf-8")
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(shown)
    found = load_with_notices(str(path), None)
    assert found.differences is not None
    assert printed.splitlines()[-1] == f"written for SLM Lab; differs here: {', '.join(found.differences)} (docs/from_slm_lab.md)"
    assert len(found.differences) == len(set(found.differences)) == 3
    assert set(found.differences) <= topics()
    ours = json.loads(example.text)
    del ours["a2c_cartpole"]["meta"]["max_trial"]
    path.write_text(json.dumps(ours), encoding="utf-8")
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == "a2c_cartpole: valid\n"
