"""docs/spec.md against the models."""

from __future__ import annotations

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
