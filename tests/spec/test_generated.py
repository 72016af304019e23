"""Tests of the generated lists and the shipped schema against their sources."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from slm_lab.spec.load.files import SPEC_FOLDER
from slm_lab.spec.models.spec import SECTION_KEYS
from slm_lab.spec.rules import torch_check
from tests.docs.blocks import ROOT
from tools import schema


@cache
def current_schema() -> dict[str, Any]:
    return schema.json_schema()


def test_torch_names_are_those_of_torch() -> None:
    import torch

    from tools import torch_names as generator

    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if not (pinned and torch.__version__.startswith(f"{pinned[1]}.")):
        pytest.skip("the list is that of the version of torch in constraints.txt")

    assert (SPEC_FOLDER / "models" / "torch_names.json").read_text(encoding="utf-8") == generator.text()


def test_optimizers_are_all_of_torch_but_those_refused() -> None:
    import torch

    everything = {name for name, item in vars(torch.optim).items() if isinstance(item, type) and issubclass(item, torch.optim.Optimizer)}
    assert everything - set(torch_check.OPTIMIZERS) == {"Optimizer", "LBFGS", "SparseAdam"}
    everything = set(torch.optim.lr_scheduler.__all__)
    refused = {"LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR"}
    assert everything - set(torch_check.SCHEDULERS) == refused


@pytest.mark.filterwarnings("ignore:Implicit dimension")
def test_activations_and_losses_can_be_made() -> None:
    import torch
    from torch import nn

    for name in torch_check.ACTIVATIONS:
        assert getattr(nn, name)()(torch.zeros(2, 3)).shape == (2, 3), name
    for name in torch_check.LOSSES:
        assert getattr(nn, name)()(torch.zeros(2), torch.ones(2)).shape == (), name
    assert [torch_check.activation_class(word) for word in ("relu", "leaky_relu", "SiLU", "selu", "nope")] == [
        "ReLU",
        "LeakyReLU",
        "SiLU",
        "SELU",
        None,
    ]


def test_known_envs_are_those_of_gymnasium() -> None:
    pytest.importorskip("ale_py")
    from tools import known_envs as generator

    assert (SPEC_FOLDER / "compat" / "known_envs.json").read_text(encoding="utf-8") == generator.text()


def test_known_envs_are_those_of_envpool() -> None:
    envpool = pytest.importorskip("envpool")
    generated = json.loads((SPEC_FOLDER / "compat" / "envpool_envs.json").read_text(encoding="utf-8"))
    if envpool.__version__ == generated["_version"]:
        ids = [name for envs in generated["_suites"].values() for names, *_ in envs for name in names]
        assert sorted(ids) == sorted(envpool.list_all_envs())


def test_shipped_schema_is_today_s() -> None:
    assert json.loads((SPEC_FOLDER / "spec.schema.json").read_text(encoding="utf-8")) == current_schema(), "run: python tools/generate.py"


def test_schema_describes_every_key() -> None:
    definitions: dict[str, Any] = current_schema()["$defs"]
    bare = [
        (name, key)
        for name, part in definitions.items()
        for key, inner in part.get("properties", {}).items()
        if not inner.get("description")
    ]
    assert [place for place in bare if place[1] != "name"] == []
    assert definitions["PPOSpec"]["properties"]["lam"]["description"].startswith("λ")
    for keys in SECTION_KEYS.values():
        assert all(any(key in part.get("properties", {}) for part in definitions.values()) for key in keys)


def test_schema_is_what_the_loader_takes() -> None:
    """Without a validator, the test checks parts of the schema: nulls, ${var}, `type` and `name`, names of torch, numbers above 0."""
    definitions = current_schema()["$defs"]
    mlp = definitions["MLPNetSpec"]
    assert mlp["properties"]["type"]["const"] == mlp["properties"]["name"]["const"] == "MLPNet"
    assert mlp["anyOf"] == [{"required": ["type"]}, {"required": ["name"]}]
    assert definitions["EnvSpec"]["properties"]["max_frame"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert {"$ref": "#/$defs/Absent"} in definitions["EnvSpec"]["properties"]["max_frame"]["anyOf"]
    assert "Lookahead" in definitions["OptimSpec"]["properties"]["name"]["anyOf"][0]["enum"]
    assert definitions["Spec"]["required"] == ["agent", "env"]
    assert definitions["Spec"]["additionalProperties"] is False
    assert definitions["EnvSpec"]["additionalProperties"] is True
