"""Tests of the loader: files, names, dumps, and speed."""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slm_lab.spec.load.files import find_spec_file, spec_names
from slm_lab.spec.load.loader import dump_spec, load_spec, load_specs
from slm_lab.spec.models.net import TorchArcNetSpec
from slm_lab.spec.models.spec import SPEC_VERSION
from slm_lab.spec.report import Problem, SpecError
from tests.spec.conftest import PPO, Specs, changed

YAML = """
$schema: spec.schema.json
_net: &net
  type: TorchArcNet
  shared: false
  arc: &arc
    modules:
      body:
        Sequential:
        - LazyLinear: {out_features: 64}
        - Tanh:
    graph:
      input: x
      modules: {body: [x]}
      output: body
  hid_layers_activation: tanh
  init_fn: orthogonal_
  use_same_optim: true
  loss_spec: {name: MSELoss}
  optim_spec: &optim {name: AdamW, lr: 3e-4}
_env: &env {name: "${env}", num_envs: 16, max_t: null, max_frame: "${max_frame}", normalize_obs: true}
ppo_arc:
  agent:
    name: PPO
    algorithm: {name: PPO, explore_var_spec: null, gamma: 0.99, time_horizon: 32, minibatch_size: 64}
    memory: {name: OnPolicyBatchReplay}
    net:
      <<: *net
      optim_spec: {<<: *optim, lr: 1e-4}
      lr_scheduler_spec: {name: LinearToZero, frame: "${max_frame}"}
  env: *env
  meta:
    search_resources: {cpu: 1, gpu: 0.125}
    search_scheduler: {grace_period: 1.0e+5, reduction_factor: 3}
  search:
    agent.algorithm.gamma__uniform: [0.98, 0.999]
    agent.net.optim_spec.lr__loguniform: [1.0e-4, 1.0e-3]
"""


def test_yaml_file_as_published(specs: Specs) -> None:
    spec = load_spec(specs.file(YAML, "a.yaml"), "ppo_arc", ["env=HalfCheetah-v5", "max_frame=1e6"])
    assert (spec.name, spec.env.name, spec.env.max_frame) == ("ppo_arc_halfcheetah", "HalfCheetah-v5", 1_000_000)
    assert spec.agent.net is not None
    assert spec.agent.net.optim_spec.model_dump() == {"name": "AdamW", "lr": 1e-4}
    assert spec.agent.net.lr_scheduler_spec is not None
    assert spec.agent.net.lr_scheduler_spec.kwargs == {"frame": 1e6}
    assert isinstance(spec.agent.net, TorchArcNetSpec)
    assert spec.agent.net.hid_layers_activation == "tanh"
    assert load_spec(specs.file(dump_spec(spec)), spec.name) == spec
    assert specs.notices() == []


@pytest.mark.parametrize(
    "changes",
    [{}, {"agent.algorithm": {"name": "Random"}, "agent.net": ..., "agent.memory": ...}, {"agent.algorithm.minibatch_size": 10_000}],
)
def test_dump_and_load_are_identity(specs: Specs, changes: dict[str, Any]) -> None:
    free = {"env.options": {"a": None}, "search": {"agent.algorithm.gamma__choice": [0.9]}, "meta.random_seed": 3}
    spec = specs.load(changes | free)
    specs.log.clear()
    dumped = dump_spec(spec)
    assert load_spec(specs.file(dumped), "ppo") == spec
    assert specs.notices() == []
    assert json.loads(json.dumps(dumped)) == dumped
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_meta_run_is_ignored(specs: Specs) -> None:
    spec = specs.load({"meta.run": [{"git_sha": "abc", "versions": {"torch": None}, "spec_version": SPEC_VERSION}]})
    assert load_spec(specs.file(dump_spec(spec)), "ppo") == spec


@pytest.mark.parametrize("version", [None, 1, SPEC_VERSION - 1, SPEC_VERSION + 1])
def test_a_spec_that_another_version_saved_is_refused(specs: Specs, version: int | None) -> None:
    """The keys of another version may have another meaning. The version of the last start counts."""
    last = {} if version is None else {"spec_version": version}
    assert specs.problems({"meta.run": [{"spec_version": SPEC_VERSION}, last]}) == ["meta.run"]
    assert specs.problems({"meta.run": last | {"mode": "train"}}) == ["meta.run"]
    specs.load({"meta.run": [last, {"spec_version": SPEC_VERSION}]})


def test_names_that_are_no_specs(specs: Specs) -> None:
    file = specs.file(
        {"$schema": "x", "_base": {"broken": 1}, "ppo": PPO, "a2c": changed(PPO, {"agent.algorithm": {"name": "ActorCritic"}})}
    )
    assert spec_names(file) == ["ppo", "a2c"]
    assert [spec.name for spec in load_specs(file)] == ["ppo", "a2c"]
    for name in ("pop", "zzzz", "_base"):
        assert specs.found(load_spec, file, name) == [""]


def test_all_specs_of_a_file_are_told_together(specs: Specs) -> None:
    file = specs.file(
        {"one": changed(PPO, {"agent.algorithm.gama": 1}), "two": PPO, "three": 3, "four": changed(PPO, {"env.max_frame": -1})}
    )
    assert specs.found(load_specs, file) == ["one.agent.algorithm.gama (unknown)", "three", "four.env.max_frame"]


@pytest.mark.parametrize("content", [[], 3, {}, {"_a": {}}, {"a/b": PPO}, {"..": PPO}, {"": PPO}, {"a" * 200: PPO}])
def test_files_that_hold_no_specs(specs: Specs, content: Any) -> None:
    assert specs.found(load_specs, specs.file(content))


def test_files_are_found_here_then_in_the_package(specs: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    package = specs.folder / "package"
    (package / "benchmark" / "ppo").mkdir(parents=True)
    (package / "experimental").mkdir()
    for path in ("demo.json", "benchmark/ppo/ppo_x.json", "experimental/dqn_x.json", "both.json"):
        (package / path).write_text(json.dumps({"ppo": PPO}))
    monkeypatch.setattr("slm_lab.spec.load.files.SPEC_FOLDER", package)
    monkeypatch.chdir(specs.folder)
    specs.file({"here": PPO}, "both.json")
    assert find_spec_file("demo.json") == package / "demo.json"
    assert find_spec_file("slm_lab/spec/demo.json") == package / "demo.json"
    assert find_spec_file("ppo_x.json") == package / "benchmark" / "ppo" / "ppo_x.json"
    assert find_spec_file("dqn_x.json") == package / "experimental" / "dqn_x.json"
    assert find_spec_file("benchmark/ppo/ppo_x.json") == package / "benchmark" / "ppo" / "ppo_x.json"
    assert find_spec_file("slm_lab/spec/benchmark/ppo/ppo_x.json") == package / "benchmark" / "ppo" / "ppo_x.json"
    assert find_spec_file("both.json") == Path("both.json")
    for name in ("dmo.json", "package", str(specs.folder / "no.json"), "a\0b", "a" * 10_000):
        assert specs.found(find_spec_file, name) == [""]


def test_an_error_crosses_process_borders() -> None:
    error = SpecError("file", [Problem("a.b", "wrong"), Problem("", "\ud800")])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.problems) == (str(error), error.problems)
    assert str(error) == "file: 2 problems\n  a.b: wrong\n  \\ud800"


def test_loading_is_fast_and_imports_nothing_heavy(specs: Specs) -> None:
    file = specs.file({"good": PPO, "bad": changed(PPO, {"agent.algorithm.gama": 1, "env.name": "CartPol-v1"})})
    code = f"""
import sys
from slm_lab.spec.report import Problem, SpecError
from slm_lab.spec.load.loader import load_spec
load_spec({str(file)!r}, "good")
try:
    load_spec({str(file)!r}, "bad")
except SpecError as error:
    assert len(error.problems) == 2, error
heavy = {{"torch", "pandas", "plotly", "ray", "gymnasium", "ruamel.yaml"}} & set(sys.modules)
assert not heavy, heavy
"""
    # CPU seconds, including Python's start; the second bound is relative to pydantic alone, because a busy machine needs more CPU time
    assert cpu_seconds(code) < 0.5 or min(cpu_seconds(code) for _ in range(2)) < 6 * cpu_seconds("import pydantic.main")


def cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_last_set_argument_of_a_key_counts() -> None:
    """Also if a section that contains the key was set in between."""
    rate = "agent.net.optim_spec.lr"
    sets = [f"{rate}=0.1", 'agent.net.optim_spec={"name": "Adam", "lr": 0.3}', f"{rate}=0.2"]
    assert load_spec("demo.json", "ppo_cartpole", sets).agent.net.optim_spec.lr == 0.2
