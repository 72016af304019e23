"""Algorithms, memories and nets together: what fits, what is told where it does not, and what is dropped."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slm_lab.spec.loader import SPEC_FOLDER, dump_spec, load_spec
from tests.contract.combinations import ALGORITHM_NAMES, MEMORIES, NEEDS, NETS, fitting
from tests.spec.conftest import PPO, Specs, changed

REPLAY = {"agent.memory": {"name": "Replay"}}
DQN = {"agent.algorithm": {"name": "DQN"}} | REPLAY
SAC = {"agent.algorithm": {"name": "SoftActorCritic"}} | REPLAY
SIL = {"agent.algorithm": {"name": "PPOSIL"}}
CONSTANT = {"name": "no_decay", "start_val": 0.1}
FALLING = {"name": "linear_decay", "start_val": 0.4, "end_val": 1.0, "start_step": 10, "end_step": 5}


def hydra(*hid_layers: Any) -> dict[str, Any]:
    return {"agent.net": {"type": "HydraMLPNet", "hid_layers": list(hid_layers)}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        # memories
        (
            {"agent.algorithm": {"name": "ActorCritic"}, "agent.memory.name": "PrioritizedReplay"},
            "agent.memory.name: must be 'OnPolicyBatchReplay', 'OnPolicyReplay' or 'OnPolicyCrossEntropy' "
            "(ActorCritic learns on-policy, from each transition once), not 'PrioritizedReplay'",
        ),
        ({"agent.memory.name": "PrioritizedReplay"}, "agent.memory.name: must be 'OnPolicyBatchReplay' (PPO learns from rollouts"),
        ({"agent.algorithm": {"name": "SARSA"}, "agent.memory.name": "Replay"}, "agent.memory.name: must be 'OnPolicyBatchReplay', 'OnP"),
        (
            DQN | {"agent.memory": {"name": "OnPolicyReplay"}},
            "agent.memory.name: must be 'Replay' or 'PrioritizedReplay' (DQN learns from old transitions drawn at random), "
            "not 'OnPolicyReplay'",
        ),
        (SAC | {"agent.memory": {"name": "OnPolicyBatchReplay"}}, "agent.memory.name: must be 'Replay' or 'PrioritizedReplay' (SoftActor"),
        (DQN | {"agent.memory": ...}, "agent.memory: missing; DQN learns from old transitions drawn at random and needs 'Replay' or"),
        (
            DQN | {"agent.memory.batch_size": 64, "agent.memory.max_size": 32},
            "agent.memory.batch_size: must be at most max_size (32), not 64",
        ),
        (DQN | {"agent.memory.batch_size": 200_000}, "agent.memory.batch_size: must be at most max_size (100000), not 200000"),
        (SIL | {"agent.memory.batch_size": 8, "agent.memory.max_size": 4}, "agent.memory.batch_size: must be at most max_size (4), not 8"),
        (
            SIL | {"agent.memory.sil_replay_name": "PrioritisedReplay"},
            "agent.memory.sil_replay_name: must be one of 'Replay', 'PrioritizedReplay', 'SILReplay', 'SILPrioritizedReplay', "
            "not \"PrioritisedReplay\"; did you mean 'PrioritizedReplay'?",
        ),
        (
            DQN | {"agent.memory": {"name": "PrioritizedReplay", "beta": 1.4}},
            "agent.memory.beta: must be a number from 0 to 1 or an object, not 1.4",
        ),
        (
            DQN | {"agent.memory": {"name": "PrioritizedReplay", "beta": FALLING}},
            "agent.memory.beta.end_step: must be at least start_step (10), not 5",
        ),
        (
            DQN | {"agent.memory": {"name": "PrioritizedReplay", "beta": FALLING | {"end_val": 1.5, "end_step": 20}}},
            "agent.memory.beta.end_val: must be a number from 0 to 1, not 1.5",
        ),
        (DQN | {"agent.memory": {"name": "PrioritizedReplay", "epsilon": 0}}, "agent.memory.epsilon: must be a number > 0, not 0"),
        (
            {"agent.algorithm": {"name": "Reinforce"}, "agent.memory": {"name": "OnPolicyCrossEntropy", "cross_entropy": 0}},
            "agent.memory.cross_entropy: must be a number > 0 and ≤ 1, not 0",
        ),
        # nets
        (
            DQN | {"agent.net.type": "RecurrentNet"},
            "agent.net.type: 'RecurrentNet' needs steps in order, and DQN draws single ones; take MLP",
        ),
        (SIL | {"agent.net.type": "RecurrentNet"}, "agent.net.type: 'RecurrentNet' needs steps in order, and PPOSIL imitates single ones"),
        (
            {"agent.net.type": "DuelingMLPNet"},
            "agent.net.type: must be 'MLPNet', not 'DuelingMLPNet': PPO has no action values to split; DQN and its kin have",
        ),
        (
            {"agent.net": {"type": "DuelingConvNet", "conv_hid_layers": [[8, 3]]}},
            "agent.net.type: must be 'ConvNet', not 'DuelingConvNet': PPO has",
        ),
        (SAC | {"agent.net.type": "DuelingMLPNet"}, "agent.net.type: must be 'MLPNet', not 'DuelingMLPNet': SoftActorCritic has no"),
        (SAC | {"agent.critic_net": {"type": "RecurrentNet"}}, "agent.critic_net.type: 'RecurrentNet' needs steps in order"),
        (SAC | {"agent.critic_net": {"type": "DuelingMLPNet"}}, "agent.critic_net.type: must be 'MLPNet', not 'DuelingMLPNet'"),
        (SAC | {"agent.critic_net.type": "MLP"}, "agent.critic_net.type: must be one of 'MLPNet', "),
        (SAC | {"agent.critic_net": {"hid_layers": [8]}}, "agent.critic_net.name: missing; must be one of 'MLPNet', "),
        (SAC | {"agent.critic_net.type": "ConvNet"}, "agent.critic_net.conv_hid_layers: missing; must be a list of items (not empty)"),
        (
            SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layers": [8, 0]}},
            "agent.critic_net.hid_layers[1]: must be a whole number > 0, not 0",
        ),
        (
            SAC | {"agent.critic_net": {"type": "MLPNet", "optim_spec": {"name": "Adm"}}},
            "agent.critic_net.optim_spec.name: 'Adm' is no optimizer of torch.optim to use here; did you mean 'Adam'?",
        ),
        (
            SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layers_activation": "rellu"}},
            "agent.critic_net.hid_layers_activation: 'rellu' is no activation",
        ),
        (
            SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layrs": [8]}},
            "agent.critic_net.hid_layrs: unknown key; did you mean 'hid_layers'",
        ),
        (
            SAC | {"agent.critic_net.type": "TorchArcNet"},
            "agent.critic_net.arc: missing; a TorchArcNet of the critics needs arc or critic_arc",
        ),
        (hydra([[8], [8]], [8]), "agent.net.hid_layers: must be a list of 3 items, not [[[8], [8]], [8]]"),
        (hydra([[8]], 8, []), "agent.net.hid_layers[1]: must be a list of units of the body, as [64], not 8"),
        (hydra([[8]], [True], []), "agent.net.hid_layers[1]: must be a list of units of the body, as [64], not [true]"),
        (hydra([], [8], []), "agent.net.hid_layers[0]: must be a list with the units of each of the heads, as [[32], [32]], not []"),
        (hydra([[0]], [8], []), "agent.net.hid_layers[0]: must be a list with the units of each of the heads, as [[32], [32]], not [[0]]"),
        (hydra([[8]], [8], 3), "agent.net.hid_layers[2]: must be a list with the units of each of the tails, as [[32], [32]], not 3"),
        (hydra([[8]], [8], [[1], [1], [1]]), "agent.net.hid_layers[2]: must be at most two tails, the actor's and the critic's, not 3"),
        ({"agent.net.type": "HydraMLPNet"}, "agent.net.hid_layers: missing; must be a list of 3 items"),
        # algorithms
        (
            SAC | {"agent.algorithm.action_policy": "epsilon_greedy", "agent.algorithm.explore_var_spec": CONSTANT},
            "agent.algorithm.action_policy: must be 'default' or 'random', not 'epsilon_greedy': SoftActorCritic samples its own policy",
        ),
        (
            SAC | {"agent.algorithm.action_policy": "boltzmann"},
            "agent.algorithm.action_policy: must be 'default' or 'random', not 'boltzmann'",
        ),
        (
            DQN | {"agent.algorithm.action_policy": "boltzmann"},
            "agent.algorithm.explore_var_spec: missing; the action_policy 'boltzmann' needs",
        ),
        (SAC | {"agent.algorithm.log_alpha_min": 3}, "agent.algorithm.log_alpha_min: must be below log_alpha_max (2), not 3"),
        (SAC | {"agent.algorithm.fixed_alpha": 0}, "agent.algorithm.fixed_alpha: must be a number > 0, not 0"),
        (
            SAC | {"agent.algorithm.target_entropy": "aut"},
            "agent.algorithm.target_entropy: must be a number or 'auto', not \"aut\"; did you",
        ),
        (DQN | {"agent.algorithm.training_start_step": -1}, "agent.algorithm.training_start_step: must be a whole number ≥ 0, not -1"),
        (DQN | {"meta.save_replay": 1}, "meta.save_replay: must be true or false, not 1"),
    ],
)
def test_what_does_not_go_together(specs: Specs, changes: dict[str, Any], problem: str) -> None:
    found = specs.problems(changes)
    assert len(found) == 1, found
    assert found[0].startswith(problem), found


@pytest.mark.parametrize(
    ("changes", "notices"),
    [
        (
            {"agent.critic_net": {"type": "MLPNet", "hid_layers": [8]}},
            ["agent.critic_net: has no effect in PPO, only in SoftActorCritic and CrossQ; dropped"],
        ),
        (
            {"agent.net.update_type": "replace", "agent.net.update_frequency": 100, "agent.net.polyak_coef": 0.1},
            [
                f"agent.net.{key}: has no effect, since PPO has no target net; dropped"
                for key in ("update_type", "update_frequency", "polyak_coef")
            ],
        ),
        (
            {
                "agent.memory.sil_replay_name": "Replay",
                "agent.memory.batch_size": 8,
                "agent.memory.max_size": 100,
                "agent.memory.beta": 0.4,
            },
            [
                f"agent.memory.{key}: has no effect in OnPolicyBatchReplay, but for SIL and PPOSIL; dropped"
                for key in ("sil_replay_name", "batch_size", "max_size", "beta")
            ],
        ),
    ],
)
def test_what_has_no_effect_is_dropped_with_a_notice(specs: Specs, changes: dict[str, Any], notices: list[str]) -> None:
    assert specs.load(changes) == specs.load({})
    assert specs.notices() == [f"ppo: {notice}" for notice in notices]


@pytest.mark.parametrize(
    ("changes", "notice"),
    [
        (
            DQN | {"agent.net.update_type": "replace", "agent.net.polyak_coef": 0.1},
            "agent.net.polyak_coef: has no effect, since the update_t",
        ),
        (DQN | {"agent.memory.beta": 0.4}, "agent.memory.beta: has no effect in Replay; dropped"),
        (
            DQN | {"agent.algorithm.name": "VanillaDQN", "agent.net.update_frequency": 9},
            "agent.net.update_frequency: has no effect, since V",
        ),
        (
            SAC | {"agent.algorithm.name": "CrossQ", "agent.net.batch_norm": True, "agent.net.polyak_coef": 0.1},
            "agent.net.polyak_coef: has no effect, since CrossQ has no",
        ),
        (
            SAC | {"agent.algorithm.alpha_anneal_frames": 10},
            "agent.algorithm.alpha_anneal_frames: has no effect, since there is no fixed_alpha; dropped",
        ),
        (
            SAC | {"agent.algorithm.fixed_alpha": 0.2, "agent.algorithm.alpha_lr": 0.1},
            "agent.algorithm.alpha_lr: has no effect, since fixed_alpha is given; dropped",
        ),
        (
            SAC | {"agent.algorithm.training_start_step": 10**9},
            "agent.algorithm.training_start_step: training begins after 1000000000 transitions, and env.max_frame is",
        ),
        (
            SAC | {"agent.critic_net": {"type": "MLPNet"}, "agent.net.polyak_coef": 0.1},
            "agent.net.polyak_coef: has no effect, since the critics have a net of their own, agent.critic_net,",
        ),
        (
            SAC | {"agent.critic_net": {"type": "MLPNet", "gpu": True}},
            "agent.critic_net.gpu: has no effect, since this net is the critics' alone; dropped",
        ),
        (
            SAC | {"agent.critic_net": {"type": "MLPNet", "update_type": "replace", "polyak_coef": 0.1}},
            "agent.critic_net.polyak_coef: has no effect, since the update_type is 'replace'; dropped",
        ),
        (
            SAC | {"agent.algorithm.name": "CrossQ"},
            "agent.net: the critics have no batch normalisation, which CrossQ needs in place of target nets; give batch_norm, or",
        ),
        (
            SIL | {"agent.memory.sil_replay_name": "Replay", "agent.memory.alpha": 0.5},
            "agent.memory.alpha: has no effect, since the sil_replay_name is uniform; dropped",
        ),
        (SAC | {"agent.algorithm.training_epoch": 10}, "agent.algorithm.training_epoch: has no effect in SoftActorCritic; dropped"),
    ],
)
def test_what_has_no_effect_off_policy(specs: Specs, changes: dict[str, Any], notice: str) -> None:
    specs.load(changes)
    assert len(specs.notices()) == 1
    assert specs.notices()[0].startswith(f"ppo: {notice}")


def test_save_replay_is_for_those_that_have_one(specs: Specs) -> None:
    specs.load(SIL | {"meta.save_replay": True})
    assert specs.notices() == []
    specs.load({"meta.save_replay": True})
    assert specs.notices() == ["ppo: meta.save_replay: has no effect, since PPO has no replay"]


def test_old_words_for_activations_are_settled_in_both_nets(specs: Specs) -> None:
    spec = specs.load(SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layers_activation": "leaky_relu"}})
    assert spec.agent.critic_net.hid_layers_activation == "LeakyReLU"  # type: ignore[union-attr]


def test_keys_of_self_imitation_are_kept_for_it(specs: Specs) -> None:
    spec = specs.load(SIL | {"agent.memory.sil_replay_name": "SILReplay", "agent.memory.batch_size": 8})
    assert spec.agent.memory.sil_replay.model_dump() == {"name": "Replay", "batch_size": 8, "max_size": 100_000, "use_cer": False}  # type: ignore[union-attr]
    spec = specs.load(SIL | {"agent.memory.beta": 0.5})
    assert spec.agent.memory.sil_replay.beta == 0.5  # type: ignore[union-attr]
    assert specs.notices() == []


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_dump_and_load_are_identity_for_all_that_goes_together(specs: Specs, algorithm: str) -> None:
    goes = []
    for memory, net in itertools.product(MEMORIES, NETS):
        changes = {
            "agent.algorithm": {"name": algorithm},
            "agent.memory": {"name": memory},
            "agent.net": {"type": net} | NEEDS.get(net, {}),
        }
        if not fitting(algorithm, memory, net):
            assert all(problem.startswith(("agent.memory.name", "agent.net.type")) for problem in specs.problems(changes)), changes
            continue
        goes.append((memory, net))
        spec = specs.load(changes)
        specs.log.clear()
        assert load_spec(specs.file(dump_spec(spec)), "ppo") == spec
        assert all("no batch normalisation" in notice for notice in specs.notices())  # CrossQ's, which nothing but its net changes
    assert goes


# ---- the schema, by a small validator: only the words that it uses


WORDS = {
    *("$ref", "anyOf", "oneOf", "type", "const", "enum", "properties", "patternProperties", "additionalProperties", "required"),
    *("items", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("pattern", "description", "title", "default", "discriminator", "$schema", "$defs"),
}


def accepts(node: dict[str, Any], value: Any, definitions: dict[str, Any]) -> bool:
    assert node.keys() <= WORDS, node.keys() - WORDS
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and float(value).is_integer()

    def of_kind(kind: str) -> bool:
        return number if kind == "number" else whole if kind == "integer" else isinstance(value, kinds[kind])

    fine = "$ref" not in node or accepts(definitions[node["$ref"].rsplit("/", 1)[1]], value, definitions)
    fine = fine and ("anyOf" not in node or any(accepts(part, value, definitions) for part in node["anyOf"]))
    fine = fine and ("oneOf" not in node or sum(accepts(part, value, definitions) for part in node["oneOf"]) == 1)
    fine = fine and ("type" not in node or of_kind(node["type"]))
    fine = fine and ("const" not in node or value == node["const"]) and ("enum" not in node or value in node["enum"])
    if number:
        fine = fine and node.get("minimum", value) <= value <= node.get("maximum", value)
        fine = fine and node.get("exclusiveMinimum", value - 1) < value < node.get("exclusiveMaximum", value + 1)
    if isinstance(value, list):
        fine = fine and node.get("minItems", 0) <= len(value) <= node.get("maxItems", len(value))
        fine = fine and all(accepts(node.get("items", {}), item, definitions) for item in value)
    if isinstance(value, dict) and fine:
        assert list(node.get("patternProperties", {})) in ([], ["^[^_$]"])
        fine = all(key in value for key in node.get("required", []))
        for key, inner in value.items() if fine else ():
            part = node.get("properties", {}).get(key)
            if part is None and not key.startswith(("_", "$")):
                part = node.get("patternProperties", {}).get("^[^_$]")
            part = node.get("additionalProperties", True) if part is None else part
            fine = fine and (part if isinstance(part, bool) else accepts(part, inner, definitions))
    return fine


@cache
def shipped_schema() -> dict[str, Any]:
    content = json.loads((SPEC_FOLDER / "spec.schema.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


NOT_TODAYS = ("spec.schema.json", "async_sac_roboschool.json")
"""The schema itself, and a file in the older form, which it does not describe."""
FILES = sorted(path for path in SPEC_FOLDER.rglob("*.json") if path.name not in NOT_TODAYS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_schema_accepts_every_shipped_spec(path: Path) -> None:
    assert accepts(shipped_schema(), json.loads(path.read_text(encoding="utf-8")), shipped_schema()["$defs"])


@pytest.mark.parametrize(
    ("changes", "fine"),
    [
        (DQN, True),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layers": [8]}, "meta.save_replay": True}, True),
        (DQN | {"agent.memory": {"name": "PrioritizedReplay", "beta": FALLING}}, True),
        (SIL | {"agent.memory.sil_replay_name": "SILReplay", "agent.memory.batch_size": 8}, True),
        (hydra([[8]], [8], []), True),
        (DQN | {"agent.algorithm.gama": 0.9}, False),
        (DQN | {"agent.memory.max_size": 0}, False),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layers": [0]}}, False),
    ],
)
def test_the_schema_knows_good_from_bad(changes: dict[str, Any], fine: bool) -> None:
    assert accepts(shipped_schema(), {"ppo": changed(PPO, changes)}, shipped_schema()["$defs"]) == fine
