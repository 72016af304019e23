"""Tests of user-defined algorithms, memories and nets, named by import path."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest

from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.models.algorithm import AlgorithmSpec
from slm_lab.spec.models.base import ExtensionError, import_class
from slm_lab.spec.models.net import OptimSpec
from slm_lab.spec.report import SpecError
from tests.spec.conftest import PPO, Specs, changed
from tests.spec.user import models

USER = "tests.spec.user.models"
OWN: dict[str, Any] = {
    "agent.algorithm": {"name": f"{USER}:EvolutionSpec", "population": 8, "bonus": {"weight": 0.5}},
    "agent.memory": {"name": "Replay", "batch_size": 8},
}
NET = {"agent.net": {"type": f"{USER}:WideNet", "width": 3}}


def test_the_users_models_validate_their_keys(specs: Specs) -> None:
    agent = specs.load(OWN).agent
    assert agent.algorithm == models.EvolutionSpec(name=f"{USER}:EvolutionSpec", population=8, bonus=models.Bonus(weight=0.5))
    assert agent.algorithm.gamma == 0.99
    assert specs.load(NET).agent.net == models.WideNet(name=f"{USER}:WideNet", width=3, optim_spec=OptimSpec(lr=0.001))
    memory = specs.load(OWN | {"agent.memory": {"name": f"{USER}:RingSpec", "size": 3}}).agent.memory
    assert memory == models.RingSpec(name=f"{USER}:RingSpec", size=3)
    critic = {"agent.algorithm": {"name": "SoftActorCritic"}, "agent.memory": {"name": "Replay"}, "agent.critic_net": {"type": "MLPNet"}}
    assert specs.problems(critic | {"agent.critic_net": NET["agent.net"]}) == ["agent.critic_net.type"], "it is recurrent"
    assert specs.notices() == []


def test_a_saved_spec_loads_again(specs: Specs) -> None:
    spec = specs.load(OWN | {"agent.memory": {"name": f"{USER}:RingSpec"}, "search": {"agent.algorithm.sigma__uniform": [0.1, 0.2]}})
    dumped = dump_spec(spec)
    assert dumped["ppo"]["agent"]["algorithm"]["bonus"] == {"weight": 0.5}
    assert load_spec(specs.file(json.dumps(dumped)), "ppo") == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    net = specs.load(NET)
    assert load_spec(specs.file(dump_spec(net)), "ppo") == net
    assert specs.notices() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"agent.algorithm.sigm": 1}, "agent.algorithm.sigm (unknown)"),
        ({"agent.algorithm.sigma": 0}, "agent.algorithm.sigma"),
        ({"agent.algorithm.population": ...}, "agent.algorithm.population (missing)"),
        ({"agent.algorithm.bonus": {"weigth": 1}}, "agent.algorithm.bonus.weigth (unknown)"),
        ({"agent.algorithm.name": "tests.spec.user.modles:EvolutionSpec"}, "agent.algorithm.name"),
        ({"agent.algorithm.name": "no_such_package.x:Y"}, "agent.algorithm.name"),
        ({"agent.algorithm.name": "tests.spec.user.broken:Y"}, "agent.algorithm.name"),
        ({"agent.algorithm.name": f"{USER}:EvolutionSpc"}, "agent.algorithm.name"),
        ({"agent.algorithm.name": f"{USER}:WideNet"}, "agent.algorithm.name"),
        ({"agent.algorithm.name": f"{USER}:StillPPO"}, "agent.algorithm.name"),
        ({"agent.algorithm.name": "a b:c"}, "agent.algorithm.name"),
        ({"agent.net.type": f"{USER}:Unbuildable"}, "agent.net.type"),
        ({"agent.net.type": f"{USER}:Undefined"}, "agent.net.type"),
        ({"agent.memory.name": f"{USER}:NoMemory"}, "agent.memory.name"),
        # rules that follow from the declarations of the models
        ({"agent.memory": {"name": "PrioritizedReplay"}}, "agent.memory.name"),
        ({"agent.memory": {"name": "OnPolicyReplay"}}, "agent.memory.name"),
        (NET, "agent.net.type"),
        ({"agent.net": {"type": "DuelingMLPNet"}}, "agent.net.type"),
        ({"env.num_envs": ..., "meta.sampler": {"async_rl": False}}, "meta.sampler.async_rl"),
        ({"search": {"agent.algorithm.sigma__uniform": [-1, 1]}}, "search.agent.algorithm.sigma__uniform"),
    ],
)
def test_problems(specs: Specs, changes: dict[str, Any], problem: str) -> None:
    assert specs.problems(OWN | changes) == [problem]


def test_a_name_that_cannot_be_resolved_hides_no_other_problem(specs: Specs) -> None:
    found = specs.problems(OWN | {"agent.algorithm.name": "no_such_package:X", "env.max_frame": 0, "agent.net.hid_layrs": [8]})
    assert found == ["agent.algorithm.name", "agent.net.hid_layrs (unknown)", "env.max_frame"]


def test_an_on_policy_algorithm_by_the_defaults(specs: Specs) -> None:
    episodic = {"agent.algorithm": {"name": f"{USER}:EpisodicSpec"}}
    assert specs.load(episodic).agent.rollout_len == 32
    assert specs.load(episodic | {"agent.memory": {"name": "OnPolicyReplay"}} | NET).agent.rollout_len == 1
    assert specs.problems(episodic | NET | {"agent.net.widht": 1}) == ["agent.net.widht (unknown)"]
    assert specs.problems(episodic | {"agent.memory": {"name": f"{USER}:RingSpec"}}) == ["agent.memory.name"]
    assert specs.notices() == []


def test_keys_of_other_algorithms_are_ignored_with_a_notice(specs: Specs) -> None:
    assert specs.load(OWN | {"agent.algorithm.training_epoch": 3}) == specs.load(OWN)
    assert specs.notices() == ["agent.algorithm.training_epoch"]


def test_a_backend_by_import_path(specs: Specs) -> None:
    assert specs.load({"env.backend": f"{USER}:Envs"}).env.backend == f"{USER}:Envs"
    assert specs.problems({"env.backend": "no_such_package:Envs"}) == ["env.backend"]


def test_no_torch_is_imported(specs: Specs) -> None:
    file = specs.file({"own": changed(PPO, OWN), "bad": changed(PPO, OWN | {"agent.algorithm.sigm": 1})})
    code = f"""
import sys
from slm_lab.cli import main
assert main(["check", {str(file)!r}, "own"]) == 0
assert main(["check", {str(file)!r}]) == 2
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_hint_names_only_classes() -> None:
    """The module contains `np`, which is not a class."""
    with pytest.raises(ExtensionError, match=r"'tests\.env\.toys' has no class 'npp'$"):
        import_class("tests.env.toys:npp", AlgorithmSpec)


def test_the_allowed_keys_of_meta_do_not_include_run(specs: Specs) -> None:
    """Only slm_lab writes meta.run."""
    with pytest.raises(SpecError, match=r"meta\.zzz: unknown key; allowed: distributed, ") as raised:
        specs.load({"meta.zzz": 1})
    assert not re.search(r"\brun\b", str(raised.value))
