"""Tests of docs/spec.md, docs/nets.md and the component pages against the models, the code and the other pages."""

from __future__ import annotations

from typing import get_type_hints

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from slm_lab import Session
from slm_lab.spec.load.files import parse_json
from slm_lab.spec.load.loader import load_specs
from slm_lab.spec.models.algorithm import PPOSpec
from tests.docs.blocks import ROOT, blocks
from tools import component_pages, generate, spec_reference
from tools.schema import key_descriptions
from tools.spec_reference import FOLDERS, SECTIONS, Section, example, keys, page_of, with_papers

DOCS = ROOT / "docs"
COMPONENTS = [(section, name) for section in SECTIONS if section.path in FOLDERS for name in section.models]


def test_the_reference_is_current() -> None:
    assert spec_reference.text() == (DOCS / "spec.md").read_text(encoding="utf-8"), "run: python -m tools.generate"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("page", component_pages.pages())
def test_a_page_is_current(page: str) -> None:
    assert component_pages.pages()[page]() == (ROOT / page).read_text(encoding="utf-8"), "run: python -m tools.generate"


@pytest.mark.slow
def test_a_page_that_is_not_current_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate.py --check` fails if a page is out of date or describes a component that does not exist."""
    monkeypatch.setattr(generate, "FILES", {})
    monkeypatch.setattr(generate.sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 0
    monkeypatch.setattr(PPOSpec, "__doc__", "Another description.")
    assert generate.main() == 1
    assert capsys.readouterr().out == "out of date: docs/algorithms/PPO.md\n"
    monkeypatch.undo()
    monkeypatch.setattr(generate, "FILES", {})
    monkeypatch.setattr(generate.sys, "argv", ["generate.py", "--check"])
    monkeypatch.setattr(component_pages, "left_over", lambda: ["docs/algorithms/Old.md"])
    assert generate.main() == 1
    assert "docs/algorithms/Old.md" in capsys.readouterr().out


def _part(section: Section) -> str:
    """Return the text of a section of docs/spec.md or docs/nets.md."""
    return (DOCS / section.page).read_text(encoding="utf-8").partition(f"\n## {section.heading}\n")[2].partition("\n## ")[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_every_key_is_there_with_its_meaning_and_a_valid_example(section: Section) -> None:
    part = _part(section)
    for name, model in section.models.items():
        of_component = (DOCS / page_of(section, name)).read_text(encoding="utf-8") if section.path in FOLDERS else ""
        for key, meaning in _meanings(model).items():
            if key in keys(section):
                assert f"#### {key}\n" in part or f"### {key}\n" in of_component
                assert meaning in part or meaning in of_component, key
    for key in keys(section):
        value = example(section, key)
        assert value is not None, key
        assert any(_is_valid(model, key, value) for model in section.models.values() if key in model.model_fields), (key, value)


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return a dict from key to its description as the pages show it."""
    lines = {key: " ".join(words.split()).replace("|", "\\|") for key, words in key_descriptions(model).items()}
    return {key: with_papers(line) for key, line in lines.items() if key in model.model_fields}


def _is_valid(model: type, key: str, value: object) -> bool:
    try:
        TypeAdapter(get_type_hints(model, include_extras=True)[key]).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(("section", "name"), COMPONENTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_page_of_a_component_is_complete(section: Section, name: str) -> None:
    """A component page has a description, a handwritten part with an example, keys and specs, and equations except for Random."""
    text = (DOCS / page_of(section, name)).read_text(encoding="utf-8")
    hand, equations = component_pages._by_hand(page_of(section, name))
    assert "```json\n{" in hand
    assert len(hand.split("```")[0].split()) > 5
    assert equations or name == "Random"
    assert text.startswith(f"# {name}\n\n")
    assert all(f"\n## {part}\n" in text for part in ("Keys", "Shipped specs"))
    if section.path == "agent.algorithm":
        diagnostics = section.models[name].implementation().diagnostics  # type: ignore[attr-defined]
        assert [f"| `{column}` |" in text for column in diagnostics] == [True] * len(diagnostics)


@pytest.mark.slow
@pytest.mark.parametrize(("section", "name"), COMPONENTS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_examples_of_a_page_can_be_built(section: Section, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of a page build and use its component; recorded episodes are read from docs/learning_curves."""
    monkeypatch.chdir(DOCS / "learning_curves")
    texts = [block.text for block in blocks(DOCS / page_of(section, name)) if block.language == "json" and block.text.startswith("{")]
    assert texts
    for text in texts:
        (spec,) = load_specs(parse_json(text))
        session = Session(spec).build()
        session.close()
        agent = session.spec.agent
        assert agent.net is not None or name == "Random"
        assert name in (agent.algorithm.name, agent.memory.name, getattr(agent.net, "name", ""))


def test_code_of_equations_exists() -> None:
    files = {code for code, _ in component_pages._paragraphs().values()}
    assert [file for file in files if not (ROOT / "slm_lab" / file).exists()] == []


def test_every_score_is_on_the_page_of_its_algorithm() -> None:
    rows = component_pages._scores()
    pages = [
        (DOCS / page_of(section, name)).read_text(encoding="utf-8") for section, name in COMPONENTS if section.path == "agent.algorithm"
    ]
    assert len(rows) > 30
    assert [row.name for row in rows if sum(f"| `{row.name}` | {row.cells} |" in page for page in pages) != 1] == []
