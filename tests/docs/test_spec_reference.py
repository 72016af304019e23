"""docs/spec.md against the models, and the figures that pages quote against docs/BENCHMARKS.md."""

from __future__ import annotations

import re
from typing import get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.docs.blocks import ROOT
from tools import spec_reference
from tools.schema import key_descriptions
from tools.spec_reference import SECTIONS, Section, example, keys

PAGE = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")


def test_the_page_is_current() -> None:
    assert spec_reference.text() == PAGE, "run: python -m tools.generate"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_every_key_is_there_with_its_meaning_and_a_valid_example(section: Section) -> None:
    part = PAGE.partition(f"\n## {section.heading}\n")[2].partition("\n## ")[0]
    for model in section.models.values():
        descriptions = key_descriptions(model)
        for key in set(keys(section)) & set(model.model_fields):
            assert f"#### {key}\n" in part
            assert " ".join(descriptions[key].split()).replace("|", "\\|") in part, key
    for key in keys(section):
        value = example(section, key)
        assert value is not None, key
        assert any(_is_valid(model, key, value) for model in section.models.values() if key in model.model_fields), (key, value)


def _is_valid(model: type, key: str, value: object) -> bool:
    try:
        TypeAdapter(get_type_hints(model, include_extras=True)[key]).validate_python(value)
    except ValidationError:
        return False
    return True


def test_quoted_scores_are_those_of_the_benchmarks() -> None:
    """A cell "500.0 (498.9)" of a table in README.md or docs/algorithms.md is a score and its published one."""
    scores = {}
    for line in (ROOT / "docs" / "BENCHMARKS.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 10 and "**" in cells[6]:
            scores[cells[2], cells[1]] = (cells[6].strip("*"), cells[8], cells[5])
    quoted = 0
    for name in ("README.md", "docs/algorithms.md"):
        table = re.findall(r"^\| (.*) \|$", (ROOT / name).read_text(encoding="utf-8").partition("| | CartPole-v1")[2], re.MULTILINE)
        envs = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3")
        for row in table:
            algorithm, *cells = (cell.strip() for cell in row.split("|"))
            for env, cell in zip(envs, cells, strict=False):
                if (algorithm, env) not in scores:
                    continue
                score, published, seeds = scores[algorithm, env]
                star = "" if seeds == "4" else r"\*"
                assert cell == f"{score}{star}" + (f" ({published})" if published else ""), (name, algorithm, env)
                quoted += 1
    assert quoted > 30
