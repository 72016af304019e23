"""Tests of docs/from_stable_baselines3.md against the models: every key that it names exists and has the default that it states."""

from __future__ import annotations

import re

import pytest

from slm_lab.spec.compat.migrate import OTHER_NAMES
from slm_lab.spec.models.algorithm import PPOSpec
from tests.docs.blocks import ROOT
from tools.spec_reference import SECTIONS

PAGE = (ROOT / "docs" / "from_stable_baselines3.md").read_text(encoding="utf-8")
MODELS = {section.path: list(section.models.values()) for section in SECTIONS}
PLACES = {
    "algorithm": "agent.algorithm",
    "net": "agent.net",
    "critic_net": "agent.net",
    "memory": "agent.memory",
    "env": "env",
    "meta": "meta",
}
KEYS = sorted(set(re.findall(rf"`(?:agent\.)?({'|'.join(PLACES)})\.(\w+)", PAGE)))


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_a_key_exists(section: str, key: str) -> None:
    assert any(key in model.model_fields for model in MODELS[PLACES[section]])


def test_many_keys_are_named() -> None:
    assert len(KEYS) > 40


OF_PPO = PAGE.partition("### PPO")[2].partition("### A2C")[0]


@pytest.mark.parametrize(("key", "default"), re.findall(r"`algorithm\.(\w+)` \(([\d.]+)\)", OF_PPO))
def test_a_default_of_ppo_is_that_of_the_model(key: str, default: str) -> None:
    value = PPOSpec.model_fields[key].default
    assert float(getattr(value, "start_val", value)) == float(default)


def test_arguments_with_another_name_are_errors_that_tell_it() -> None:
    """The loader knows the constructor arguments in the tables, so that its error can name the key of this library."""
    named = {name for name in OTHER_NAMES if f"`{name}" in PAGE}
    assert {"learning_rate", "n_steps", "n_epochs", "gae_lambda", "clip_range", "ent_coef", "vf_coef", "max_grad_norm"} <= named
    assert {"buffer_size", "learning_starts", "train_freq", "gradient_steps", "tau", "target_update_interval", "seed", "device"} <= named
