"""Tests of short specs, whose absent parts get recommended values that are written into the saved spec, and of specs as dicts."""

from __future__ import annotations

from typing import Any

import pytest

from slm_lab.spec.load.files import spec_names
from slm_lab.spec.load.loader import dump_spec, load_spec, load_specs
from slm_lab.spec.models.algorithm import ALGORITHMS
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.rules.resolve import complete_short_spec
from tests.spec.conftest import PPO, Specs

LEARNING = [name for name, model in ALGORITHMS.items() if model.learns]


def short(name: str, max_frame: int = 100_000, **more: Any) -> dict[str, Any]:
    body = {"agent": {"algorithm": {"name": name, **more}}, "env": {"name": "CartPole-v1", "max_frame": max_frame}}
    return body | ({"meta": {"demonstrations": "episodes.npz"}} if ALGORITHMS[name].offline else {})


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("name", LEARNING)
def test_a_completed_spec_is_saved_in_full(specs: Specs, name: str, images: bool) -> None:
    spec = load_spec(short(name))
    assert spec.lacks_net
    assert load_spec(dump_spec(spec)) == spec
    full = complete_short_spec(spec, images, "discrete")
    assert not full.lacks_net
    assert full.agent.net is not None
    assert full.agent.net.name == ("ConvNet" if images else "MLPNet")
    assert complete_short_spec(full, images, "discrete") == full
    assert load_spec(dump_spec(full)) == full
    assert specs.notices() == []


@pytest.mark.parametrize("name", LEARNING)
def test_recommended_values_fit_few_frames(specs: Specs, name: str) -> None:
    body = short(name, 500)
    body["agent"]["memory"] = {"name": "Replay", "batch_size": 16} if not ALGORITHMS[name].on_policy else None
    for images in (False, True):
        load_spec(dump_spec(complete_short_spec(load_spec(body), images, "discrete")))  # an error if max_frame has no update


def test_what_is_given_stays(specs: Specs) -> None:
    body = short("PPO", gamma=0.5, time_horizon=100, training_epoch=1)
    body["agent"]["memory"] = {"name": "OnPolicyBatchReplay"}
    found: Any = complete_short_spec(load_spec(body), False, "discrete").agent
    assert (found.algorithm.gamma, found.algorithm.time_horizon, found.algorithm.training_epoch) == (0.5, 100, 1)
    assert found.algorithm.minibatch_size == 64
    body["agent"]["net"] = {"name": "MLPNet"}
    spec = load_spec(body)
    assert not spec.lacks_net
    assert complete_short_spec(spec, False, "discrete") is spec
    assert spec.agent.algorithm.model_dump()["val_loss_coef"] == 1.0  # a section that is present has its own defaults
    dqn = short("DQN")
    dqn["agent"]["memory"] = {"name": "Replay"}
    assert complete_short_spec(load_spec(dqn), False, "discrete").agent.memory.model_dump()["batch_size"] == 32
    del dqn["agent"]["memory"]
    assert load_spec(dqn).agent.memory.model_dump()["batch_size"] == 128


def test_the_engine_decides_too() -> None:
    distributed = short("ActorCritic") | {"meta": {"distributed": "synced", "max_session": 2}}
    net = complete_short_spec(load_spec(distributed), False, "discrete").agent.net
    assert net is not None
    assert net.optim_spec.name == "GlobalAdam"
    sampled = short("PPO") | {"meta": {"sampler": {}}}
    found: Any = complete_short_spec(load_spec(sampled), False, "discrete").agent.algorithm
    assert (found.time_horizon, found.minibatch_size) == (128, 64)
    spec = complete_short_spec(load_spec(short("PPO")), False, "continuous")
    assert spec.agent.net is not None
    assert spec.agent.net.log_std_init == 0.0


def test_no_update_is_an_error_for_what_is_given(specs: Specs) -> None:
    assert specs.found(load_spec, short("PPO", 100, time_horizon=128)) == ["agent.algorithm.time_horizon"]
    assert load_spec(short("PPO", 100)).lacks_net


def test_a_dict_is_a_source(specs: Specs) -> None:
    assert load_spec({"ppo": PPO}, "ppo") == load_spec({"ppo": PPO}) == load_spec(PPO, "ppo") == specs.load({})
    assert load_spec(PPO).name == "spec"
    assert load_spec(PPO, "ppo", ["agent.algorithm.gamma=0.5"]).agent.algorithm.gamma == 0.5
    assert PPO["agent"]["algorithm"] == {"name": "PPO"}, "the user's dict is not changed"
    assert [spec.name for spec in load_specs({"_x": 1, "one": PPO, "two": PPO})] == spec_names({"one": PPO, "two": PPO}) == ["one", "two"]


@pytest.mark.parametrize(
    ("source", "name", "problem"),
    [
        ({"one": PPO, "two": PPO}, None, ""),
        ({"one": PPO}, "two", ""),
        ({}, None, ""),
        ({"agent": PPO["agent"]}, None, "env (missing)"),
        ({"agent": {"algorithm": {"name": "PPO", "gamma": object()}}}, None, "agent.algorithm.gamma"),
        ({3: PPO}, None, ""),
    ],
)
def test_errors_of_a_dict_name_it_spec(specs: Specs, source: Any, name: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^spec\b"):
        load_spec(source, name)
    assert specs.found(load_spec, source, name) == [problem]


def test_random_is_not_short() -> None:
    spec: Spec = load_spec(short("Random"))
    assert not spec.lacks_net
    assert complete_short_spec(spec, False, "discrete") is spec
