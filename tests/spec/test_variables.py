"""Tests of ${var}, --set and spec_params."""

from __future__ import annotations

import pytest

from slm_lab.spec.load.files import spec_names
from slm_lab.spec.load.loader import load_spec, load_specs, mark_set_arguments, parse_value
from slm_lab.spec.report import Problem, SpecError
from tests.spec.conftest import PPO, Specs, changed

VARS = {"env.name": "${env}", "env.max_frame": "${max_frame}", "agent.name": "PPO on ${env} for ${max_frame}"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1e6),
        ("True", True),
        ("false", False),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ('"a"', "a"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("", ""),
        ("NaN", "NaN"),
    ],
)
def test_values_of_the_command_line(text: str, value: object) -> None:
    if text == "NaN":
        with pytest.raises(ValueError, match="finite"):
            parse_value(text)
    else:
        assert parse_value(text) == value


def test_variables_fill_values_and_text_and_name_the_spec(specs: Specs) -> None:
    spec = specs.load(VARS, ["env=ALE/Pong-v5", "max_frame=1e6"])
    assert (spec.env.name, spec.env.max_frame, spec.name) == ("ALE/Pong-v5", 1_000_000, "ppo_pong")
    assert spec.agent.name == "PPO on ALE/Pong-v5 for 1000000.0"
    assert specs.notices() == []


def test_each_place_of_an_unfilled_variable_is_told_with_the_other_problems(specs: Specs) -> None:
    problems = specs.problems(VARS | {"agent.algorithm.gama": 1}, ["max_frame=10"])
    assert problems == ["agent.name (missing)", "env.name (missing)", "agent.algorithm.gama (unknown)"]


def test_a_replaced_value_needs_no_variable(specs: Specs) -> None:
    nets = {"agent.net.hid_layers": ["${width}", 8], "agent.net.optim_spec": {"lr": "${lr}"}}
    sets = ["env.name=CartPole-v1", "agent.name=x", "agent.net.hid_layers=[4]", "agent.net.optim_spec.lr=0.5", "max_frame=1e6"]
    spec = specs.load(VARS | nets, sets)
    assert (spec.env.name, spec.agent.name, spec.agent.net.hid_layers) == ("CartPole-v1", "x", [4])  # type: ignore[union-attr]
    assert specs.problems(VARS | nets, ["env.max_frame=9", *sets[:3]]) == ["agent.net.optim_spec.lr (missing)"]


def test_overrides_by_path(specs: Specs) -> None:
    sets = [
        "agent.algorithm.gamma=0.5",
        "agent.net.hid_layers[1]=32",
        "agent.net.hid_layers.0=16",
        "meta.search_resources.cpu=2",
        "agent.net.type=MLPNet",
    ]
    spec = specs.load({"agent.net.hid_layers": [8, 8]}, [*sets, "env.name=PongNoFrameskip-v4"])
    assert spec.agent.algorithm.gamma == 0.5
    assert spec.agent.net is not None
    assert spec.agent.net.name == "MLPNet"
    assert spec.agent.net.hid_layers == [16, 32]
    assert spec.meta.search_resources.cpu == 2
    assert spec.env.name == "ALE/Pong-v5"  # an old id is replaced in --set too


def test_a_net_by_override_in_either_word(specs: Specs) -> None:
    for text in ("agent.net.type=RecurrentNet", "agent.net.name=RecurrentNet"):
        net = specs.load({}, [text]).agent.net
        assert net is not None
        assert net.name == "RecurrentNet"


def test_overrides_go_into_the_v4_form(specs: Specs) -> None:
    body = changed(PPO, {}) | {"agent": [PPO["agent"]], "env": [PPO["env"]]}
    file = specs.file({"ppo": body})
    assert load_spec(file, "ppo", ["agent.algorithm.gamma=0.5"]).agent.algorithm.gamma == 0.5
    assert load_spec(file, "ppo", ["agent[0].algorithm.gamma=0.5"]).agent.algorithm.gamma == 0.5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("agent.algorithm.gama=0.5", "agent.algorithm.gama (unknown)"),
        ("agnt.algorithm.gamma=0.5", "agnt (unknown)"),
        ("agent.net.hid_layers[5]=1", "agent.net.hid_layers[5]"),
        ("env.name.x=1", "env.name"),
        ("gamma", ""),
        ("env.max_frame=abc", "env.max_frame"),
        ("agent.net.hid_layers.0=-1", "agent.net.hid_layers[0]"),
        ("agent.net.name=MLP", "agent.net.type"),
    ],
)
def test_overrides_that_do_not_fit(specs: Specs, text: str, problem: str) -> None:
    assert specs.problems({"agent.net.hid_layers": [8, 8]}, [text]) == [problem]


@pytest.mark.parametrize(
    ("text", "source"),
    [("env.max_frame=1e400", "--set env.max_frame=1e400"), ("lr=NaN", "--set lr=NaN"), (".=1", "--set"), ("env..=1", "--set")],
)
def test_arguments_that_cannot_be_parsed(specs: Specs, text: str, source: str) -> None:
    with pytest.raises(SpecError) as error:
        load_spec(specs.file({"ppo": PPO}), "ppo", [text])
    assert error.value.source == source


def test_problems_say_whether_they_come_from_set(specs: Specs) -> None:
    changes = {"env.name": "${env}", "env.num_envs": 0, "env.normalize_state": "${norm}", "agent.algorithm.lam": "${lam}"}
    found = specs.problems(changes | {"spec_params": {"lam": [7]}}, ["env=CartPol-v1", "norm=8", "agent.algorithm.gamma=2"])
    assert found == ["agent.algorithm.gamma", "agent.algorithm.lam", "env.num_envs", "env.normalize_state", "env.name"]
    body = changed(PPO, {}) | {"agent": [PPO["agent"]]}
    with pytest.raises(SpecError, match=r"agent\[0\].algorithm.gamma: .* not 2 \(from --set\)"):
        load_spec(specs.file({"ppo": body}), "ppo", ["agent.algorithm.gamma=2"])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("gamma=0.5", "agent.algorithm.gamma=0.5?"),
        ("gama=0.5", "agent.algorithm.gamma=0.5?"),
        ("lr=1e-4", "agent.net.optim_spec.lr=0.0001?"),
        ("betas=[0, 0]", "agent.net.optim_spec.betas=[0, 0]?"),
        ("net=ConvNet", "agent.net.name=ConvNet?"),
        ('net={"type": "ConvNet"}', 'agent.net={"type": "ConvNet"}?'),
        ("search=null", ""),
        ('agent={"name": "x"}', ""),
        ("max_t=5", "env.max_t=5?"),
        ("cpu=2", "meta.search_resources.cpu=2?"),
        ("seed=1", ""),
        ("zzz=1", ""),
    ],
)
def test_a_variable_that_no_spec_has_may_be_a_key(specs: Specs, text: str, meant: str) -> None:
    with pytest.raises(SpecError) as caught:
        specs.load({"agent.net.optim_spec": {"lr": 0.1, "betas": [0, 0.9]}}, [text])
    (problem,) = caught.value.problems
    assert problem.message.partition("; did you mean ")[2] == meant
    assert problem.message.endswith("; slm_lab calls it meta.random_seed") == (text == "seed=1")


def test_a_variable_that_no_spec_has_may_be_another_variable(specs: Specs) -> None:
    problems = specs.problems({"agent.algorithm.lam": "${lam}"}, ["lm=0.5"])
    assert problems == ["agent.algorithm.lam (missing)", " (unknown)"]


def test_spec_params_make_a_spec_for_each_combination(specs: Specs) -> None:
    params = {"env": ["PongNoFrameskip-v4", "ALE/Qbert-v5"], "lam": [0.9, 0.95]}
    body = changed(PPO, {"env.name": "${env}", "agent.algorithm.lam": "${lam}", "spec_params": params})
    file = specs.file({"ppo": body, "other": PPO})
    made = load_specs(file, "ppo")
    assert [spec.name for spec in made] == ["ppo_pong_0_9", "ppo_pong_0_95", "ppo_qbert_0_9", "ppo_qbert_0_95"]
    assert [spec.env.name for spec in made] == ["ALE/Pong-v5", "ALE/Pong-v5", "ALE/Qbert-v5", "ALE/Qbert-v5"]
    assert load_spec(file, "ppo_qbert_0_9").agent.algorithm.model_dump()["lam"] == 0.9
    assert load_spec(file, "ppo", ["env=ALE/Pong-v5", "lam=0.5"]).name == "ppo_pong"
    assert spec_names(file) == ["ppo", "other"]
    with pytest.raises(ValueError, match="ppo_pong_0_9, ppo_pong_0_95"):
        load_spec(file, "ppo")


@pytest.mark.parametrize("params", [[], {"env": "CartPole-v1"}, {"env": []}, {f"v{n}": [1, 2, 3] for n in range(20)}])
def test_spec_params_that_are_none(specs: Specs, params: object) -> None:
    assert specs.problems({"spec_params": params}) == ["spec_params"]


def test_only_keys_that_were_set_are_marked() -> None:
    paths = ["agent.net.hid_layers[0]", "agent.net.hid_layers_activation", "one.agent.net.hid_layers", "env.name", "env.nam"]
    error = SpecError("build", [Problem(path, "wrong") for path in paths])
    told = mark_set_arguments(error, "file.json one", ["agent.net.hid_layers=[4]", "env.name=X", "variable=1"])
    assert told.source == "file.json one"
    assert [p.path for p in told.problems] == paths
    marked = {p.path for p in told.problems if p.message == "wrong (from --set)"}
    assert marked == {"agent.net.hid_layers[0]", "one.agent.net.hid_layers", "env.name"}
    assert mark_set_arguments(told, "x", ["env.name=X"]).problems == told.problems
