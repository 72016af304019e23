"""Tests of combinations of algorithms, memories and nets: valid ones, problems of invalid ones, and keys that have no effect."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from slm_lab.spec.load.files import SPEC_FOLDER
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.models.algorithm import SoftActorCriticSpec
from slm_lab.spec.report import SpecError
from tests.contract.combinations import ALGORITHM_NAMES, MEMORIES, NEEDS, NETS, OFFLINE, fitting
from tests.spec.conftest import PPO, Specs, changed

REPLAY = {"agent.memory": {"name": "Replay"}}
DQN = {"agent.algorithm": {"name": "DQN"}} | REPLAY
PER: dict[str, Any] = DQN | {"agent.memory.name": "PrioritizedReplay"}
SAC = {"agent.algorithm": {"name": "SoftActorCritic", "training_start_step": 64}} | REPLAY
TQC = {"agent.algorithm": {"name": "TQC", "training_start_step": 64}} | REPLAY
DSAC = {"agent.algorithm": {"name": "DistributionalSAC", "training_start_step": 64}} | REPLAY
SIL = {"agent.algorithm": {"name": "PPOSIL"}}
CONSTANT = {"name": "no_decay", "start_val": 0.1}
FALLING = {"name": "linear_decay", "start_val": 0.4, "end_val": 1.0, "start_step": 10, "end_step": 5}


def hydra(*hid_layers: Any) -> dict[str, Any]:
    return {"agent.net": {"type": "HydraMLPNet", "hid_layers": list(hid_layers)}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        # memories
        ({"agent.algorithm": {"name": "ActorCritic"}, "agent.memory.name": "PrioritizedReplay"}, "agent.memory.name"),
        ({"agent.memory.name": "PrioritizedReplay"}, "agent.memory.name"),
        ({"agent.algorithm": {"name": "SARSA"}, "agent.memory.name": "Replay"}, "agent.memory.name"),
        (DQN | {"agent.memory": {"name": "OnPolicyReplay"}}, "agent.memory.name"),
        (SAC | {"agent.memory": {"name": "OnPolicyBatchReplay"}}, "agent.memory.name"),
        (DQN | {"agent.memory.batch_size": 64, "agent.memory.max_size": 32}, "agent.memory.batch_size"),
        (DQN | {"agent.memory.batch_size": 200_000}, "agent.memory.batch_size"),
        (TQC | {"agent.algorithm.num_quantiles": 1, "agent.algorithm.dropped_quantiles": 0}, "agent.algorithm.num_quantiles"),
        (TQC | {"agent.algorithm.num_quantiles": 5, "agent.algorithm.dropped_quantiles": 5}, "agent.algorithm.dropped_quantiles"),
        (SIL | {"agent.memory.batch_size": 8, "agent.memory.max_size": 4}, "agent.memory.batch_size"),
        (SIL | {"agent.memory.sil_replay_name": "PrioritisedReplay"}, "agent.memory.sil_replay_name"),
        (DQN | {"agent.memory.name": "HindsightReplay", "agent.algorithm.num_step_returns": 3}, "agent.algorithm.num_step_returns"),
        (DQN | {"meta.demonstrations": "episodes.npz", "agent.algorithm.num_step_returns": 3}, "agent.algorithm.num_step_returns"),
        (DQN | {"agent.memory": {"name": "PrioritizedReplay", "beta": 1.4}}, "agent.memory.beta"),
        (DQN | {"agent.memory": {"name": "PrioritizedReplay", "beta": FALLING}}, "agent.memory.beta.end_step"),
        (
            DQN | {"agent.memory": {"name": "PrioritizedReplay", "beta": FALLING | {"end_val": 1.5, "end_step": 20}}},
            "agent.memory.beta.end_val",
        ),
        (DQN | {"agent.memory": {"name": "PrioritizedReplay", "epsilon": -1}}, "agent.memory.epsilon"),
        (DQN | {"agent.memory": {"name": "PrioritizedReplay", "initial_error": 0}}, "agent.memory.initial_error"),
        (DQN | {"agent.memory": {"name": "PrioritizedReplay", "initial_error": "greatst"}}, "agent.memory.initial_error"),
        (DQN | {"env.clip_reward": [1, -1]}, "env.clip_reward"),
        (DQN | {"env.clip_reward": [1, 2, 3]}, "env.clip_reward"),
        (DQN | {"env.clip_reward": ["1", 2]}, "env.clip_reward[0]"),
        (DQN | {"env.clip_reward": -2}, "env.clip_reward"),
        (
            {"agent.algorithm": {"name": "Reinforce"}, "agent.memory": {"name": "OnPolicyCrossEntropy", "cross_entropy": 1.5}},
            "agent.memory.cross_entropy",
        ),
        # nets
        (SAC | {"agent.algorithm.name": "CrossQ", "agent.net.type": "RecurrentNet"}, "agent.net.type"),
        (DQN | {"agent.memory.burn_in": 2}, "agent.memory.burn_in"),
        (DQN | {"agent.memory": {"name": "PrioritizedReplay", "eta": 0.5}}, "agent.memory.eta"),
        ({"agent.net.type": "DuelingMLPNet"}, "agent.net.type"),
        ({"agent.net": {"type": "DuelingConvNet", "conv_hid_layers": [[8, 3]]}}, "agent.net.type"),
        (SAC | {"agent.net.type": "DuelingMLPNet"}, "agent.net.type"),
        (SAC | {"agent.net": {"type": "SimbaV2Net", "actor_init_std": 0.1}}, "agent.net.actor_init_std"),
        ({"agent.net": {"type": "SimbaV2Net", "critic_init_std": 1.0}}, "agent.net.critic_init_std"),
        (SAC | {"agent.net": {"type": "SimbaV2Net"}, "agent.algorithm.spectral_norm": True}, "agent.algorithm.spectral_norm"),
        (DSAC | {"agent.algorithm.num_atoms": 1}, "agent.algorithm.num_atoms"),
        (DSAC | {"agent.algorithm.v_min": 5.0}, "agent.algorithm.v_min"),
        (SAC | {"agent.critic_net": {"type": "RecurrentNet"}}, "agent.critic_net.type"),
        (SAC | {"agent.critic_net": {"type": "DuelingMLPNet"}}, "agent.critic_net.type"),
        (SAC | {"agent.critic_net.type": "MLP"}, "agent.critic_net.type"),
        (SAC | {"agent.critic_net": {"hid_layers": [8]}}, "agent.critic_net.name (missing)"),
        (SAC | {"agent.critic_net": {"type": "ConvNet", "conv_hid_layers": []}}, "agent.critic_net.conv_hid_layers"),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layers": [8, 0]}}, "agent.critic_net.hid_layers[1]"),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "optim_spec": {"name": "Adm"}}}, "agent.critic_net.optim_spec.name"),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layers_activation": "rellu"}}, "agent.critic_net.hid_layers_activation"),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layrs": [8]}}, "agent.critic_net.hid_layrs (unknown)"),
        (SAC | {"agent.critic_net.type": "TorchArcNet"}, "agent.critic_net.arc (missing)"),
        (hydra([[8], [8]], [8]), "agent.net.hid_layers"),
        (hydra([[8]], 8, []), "agent.net.hid_layers[1]"),
        (hydra([[8]], [True], []), "agent.net.hid_layers[1]"),
        (hydra([], [8], []), "agent.net.hid_layers[0]"),
        (hydra([[0]], [8], []), "agent.net.hid_layers[0]"),
        (hydra([[8]], [8], 3), "agent.net.hid_layers[2]"),
        (hydra([[8]], [8], [[1], [1], [1]]), "agent.net.hid_layers[2]"),
        ({"agent.net.type": "HydraMLPNet"}, "agent.net.hid_layers (missing)"),
        # algorithms
        (
            SAC | {"agent.algorithm.action_policy": "epsilon_greedy", "agent.algorithm.explore_var_spec": CONSTANT},
            "agent.algorithm.action_policy",
        ),
        (SAC | {"agent.algorithm.action_policy": "boltzmann"}, "agent.algorithm.action_policy"),
        (DQN | {"agent.algorithm.action_policy": "boltzmann"}, "agent.algorithm.explore_var_spec (missing)"),
        (
            SAC | {"agent.algorithm": {"name": "TD3", "action_policy": "random", "explore_var_spec": {**CONSTANT, "start_val": 0.3}}},
            "agent.algorithm.explore_var_spec",
        ),
        (SAC | {"agent.algorithm.log_alpha_min": 3}, "agent.algorithm.log_alpha_min"),
        (SAC | {"agent.algorithm.fixed_alpha": 0}, "agent.algorithm.fixed_alpha"),
        (SAC | {"agent.algorithm.initial_alpha": 0.001}, "agent.algorithm.initial_alpha"),
        (SAC | {"agent.algorithm.log_alpha_max": -1.0, "agent.algorithm.initial_alpha": 0.5}, "agent.algorithm.initial_alpha"),
        (SAC | {"agent.algorithm.target_entropy": "aut"}, "agent.algorithm.target_entropy"),
        (SIL | {"env.normalize_reward": True}, "env.normalize_reward"),
        (DQN | {"agent.algorithm.training_start_step": -1}, "agent.algorithm.training_start_step"),
        (DQN | {"meta.save_replay": 1}, "meta.save_replay"),
    ],
)
def test_what_does_not_go_together(specs: Specs, changes: dict[str, Any], problem: str) -> None:
    assert specs.problems(changes) == [problem]


@pytest.mark.parametrize(
    ("changes", "notices"),
    [
        ({"agent.critic_net": {"type": "MLPNet", "hid_layers": [8]}}, ["agent.critic_net"]),
        (
            {"agent.net.update_type": "polyak", "agent.net.update_frequency": 100, "agent.net.polyak_coef": 0.1},
            [f"agent.net.{key}" for key in ("update_type", "update_frequency", "polyak_coef")],
        ),
        (
            {
                "agent.memory.sil_replay_name": "Replay",
                "agent.memory.batch_size": 8,
                "agent.memory.max_size": 100,
                "agent.memory.beta": 0.4,
            },
            [f"agent.memory.{key}" for key in ("sil_replay_name", "batch_size", "max_size", "beta")],
        ),
    ],
)
def test_what_has_no_effect_is_dropped_with_a_notice(specs: Specs, changes: dict[str, Any], notices: list[str]) -> None:
    assert specs.load(changes) == specs.load({})
    assert specs.notices() == notices


@pytest.mark.parametrize(
    ("changes", "notice"),
    [
        (DQN | {"agent.net.update_type": "replace", "agent.net.polyak_coef": 0.1}, "agent.net.polyak_coef"),
        (DQN | {"agent.net.polyak_coef": 0.1}, "agent.net.polyak_coef"),
        (DQN | {"agent.net.polyak_coef": 0.005}, "agent.net.polyak_coef"),  # the default value
        (
            DQN | {"agent.net.update_type": "polyak", "agent.net.polyak_coef": 0.1, "agent.net.update_frequency": 9},
            "agent.net.update_frequency",
        ),
        (SAC | {"agent.net.update_type": "polyak"}, "agent.net.polyak_coef"),
        (
            SAC | {"agent.algorithm.target_entropy": 0.5, "agent.algorithm.entropy_anneal": {"start_ratio": 0.8}},
            "agent.algorithm.entropy_anneal",
        ),
        (DQN | {"agent.memory.beta": 0.4}, "agent.memory.beta"),
        (DQN | {"agent.algorithm.name": "VanillaDQN", "agent.net.update_frequency": 9}, "agent.net.update_frequency"),
        (SAC | {"agent.algorithm.name": "CrossQ", "agent.net.batch_norm": True, "agent.net.polyak_coef": 0.1}, "agent.net.polyak_coef"),
        (SAC | {"agent.algorithm.alpha_anneal_frames": 10}, "agent.algorithm.alpha_anneal_frames"),
        (SAC | {"agent.algorithm.fixed_alpha": 0.2, "agent.algorithm.alpha_lr": 0.1}, "agent.algorithm.alpha_lr"),
        (SAC | {"agent.algorithm.fixed_alpha": 0.2, "agent.algorithm.initial_alpha": 0.1}, "agent.algorithm.initial_alpha"),
        (SAC | {"agent.critic_net": {"type": "MLPNet"}, "agent.net.polyak_coef": 0.1}, "agent.net.polyak_coef"),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "gpu": True}}, "agent.critic_net.gpu"),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "update_type": "replace", "polyak_coef": 0.1}}, "agent.critic_net.polyak_coef"),
        (SAC | {"agent.algorithm.name": "CrossQ"}, "agent.net"),
        (SIL | {"agent.memory.sil_replay_name": "Replay", "agent.memory.alpha": 0.5}, "agent.memory.alpha"),
        (SAC | {"agent.algorithm.training_epoch": 10}, "agent.algorithm.training_epoch"),
        (TQC | {"agent.algorithm.critic_reduction": "min"}, "agent.algorithm.critic_reduction"),
        (TQC | {"agent.algorithm.symlog": True}, "agent.algorithm.symlog"),
        (TQC | {"agent.algorithm.target_entropy_ratio": 0.9}, "agent.algorithm.target_entropy_ratio"),
        (DSAC | {"agent.algorithm.entropy_penalty_coef": 0.5}, "agent.algorithm.entropy_penalty_coef"),
        (TQC | {"agent.net.loss_spec": {"name": "SmoothL1Loss"}}, "agent.net.loss_spec"),
        (DSAC | {"agent.algorithm.symlog": True}, "agent.algorithm.symlog"),
        (DSAC | {"agent.net.loss_spec": {"name": "SmoothL1Loss"}}, "agent.net.loss_spec"),
    ],
)
def test_what_has_no_effect_off_policy(specs: Specs, changes: dict[str, Any], notice: str) -> None:
    specs.load(changes)
    assert specs.notices() == [notice]


def test_a_default_polyak_coef_given_by_set_is_an_error(specs: Specs) -> None:
    file = specs.file({"run": changed(PPO, DQN)})
    with pytest.raises(SpecError, match=r"agent\.net\.polyak_coef: has no effect"):
        load_spec(file, "run", ["agent.net.polyak_coef=0.005"])
    load_spec(file, "run", ["agent.net.polyak_coef=0.005", "agent.net.update_type=replace"])


def test_save_replay_is_for_those_that_have_one(specs: Specs) -> None:
    specs.load(SIL | {"meta.save_replay": True})
    assert specs.notices() == []
    assert specs.problems({"meta.save_replay": True}) == ["meta.save_replay"]


def test_old_words_for_activations_are_settled_in_both_nets(specs: Specs) -> None:
    net = {"type": "MLPNet", "hid_layers_activation": "leaky_relu"}
    agent = specs.load(SAC | {"agent.net": net, "agent.critic_net": net}).agent
    assert [found.hid_layers_activation for found in (agent.net, agent.critic_net)] == ["LeakyReLU"] * 2  # type: ignore[union-attr]


def test_soft_actor_critic_ignores_exploration_variables_and_searches_of_them(specs: Specs) -> None:
    """A search below a key that is ignored would leave trials with an incomplete schedule."""
    explore = {"agent.algorithm.explore_var_spec": CONSTANT}
    assert specs.load(SAC | explore).agent.algorithm.explore_var_spec is None
    assert specs.notices() == ["agent.algorithm.explore_var_spec"]
    algorithm = {"explore_var_spec": {"start_val__uniform": [0.1, 0.2]}, "gamma__uniform": [0.9, 0.99]}
    searched = specs.load(SAC | explore | {"search": {"agent": {"algorithm": algorithm}}}).search
    assert searched == {"agent.algorithm.gamma__uniform": [0.9, 0.99]}


def test_a_policy_of_self_imitation_with_normalised_rewards_can_be_loaded(specs: Specs) -> None:
    """Earlier versions trained such policies; a new training is refused."""
    file = specs.file({"sil": changed(PPO, SIL | {"env.normalize_reward": True})})
    assert load_spec(file, "sil", builds_env=False).env.normalize_reward
    assert specs.found(load_spec, file, "sil") == ["env.normalize_reward"]


def test_keys_of_self_imitation_are_kept_for_it(specs: Specs) -> None:
    spec = specs.load(SIL | {"agent.memory.sil_replay_name": "SILReplay", "agent.memory.batch_size": 8})
    assert spec.agent.memory.sil_replay.model_dump() == {
        "name": "Replay",
        "batch_size": 8,
        "max_size": 100_000,
        "use_cer": False,
        "burn_in": None,
        "on_device": False,
        "demonstration_fraction": None,
    }  # type: ignore[union-attr]
    spec = specs.load(SIL | {"agent.memory.beta": 0.5})
    assert spec.agent.memory.sil_replay.beta == 0.5  # type: ignore[union-attr]
    assert specs.notices() == []


@pytest.mark.parametrize(
    ("changes", "beta", "error"),
    [
        (PER, None, 100_000),
        (PER | {"agent.memory.beta": 0.5, "agent.memory.initial_error": 10}, 0.5, 10),
        (PER | {"agent.net.type": "RecurrentNet"}, 0.4, "greatest"),
        (PER | {"agent.net.type": "RecurrentNet", "agent.memory.beta": 0.6, "agent.memory.initial_error": 2}, 0.6, 2),
        (SIL, None, 100_000),
        (SIL | {"agent.net.type": "RecurrentNet"}, 0.4, "greatest"),
    ],
)
def test_absent_keys_of_priorities(specs: Specs, changes: dict[str, Any], beta: float | None, error: Any) -> None:
    """Absent keys have SLM Lab's values, except for sequences; the values are written into the saved spec."""
    spec = specs.load(changes)
    replay = getattr(spec.agent.memory, "sil_replay", spec.agent.memory)
    found = replay.beta  # type: ignore[union-attr]
    assert (found.value(0) if hasattr(found, "value") else found, replay.initial_error) == (beta, error)  # type: ignore[union-attr]
    assert load_spec(specs.file(dump_spec(spec)), "ppo") == spec
    assert not [notice for notice in specs.notices() if "memory" in notice]


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_dump_and_load_are_identity_for_all_that_goes_together(specs: Specs, algorithm: str) -> None:
    """The test combines each memory with a plain net, and each net with the first memory that fits the algorithm."""
    goes = []
    first = next(memory for memory in MEMORIES if fitting(algorithm, memory, "MLPNet"))
    for memory, net in dict.fromkeys([*((memory, "MLPNet") for memory in MEMORIES), *((first, net) for net in NETS)]):
        changes = {
            "agent.algorithm": {"name": algorithm},
            "agent.memory": {"name": memory},
            "agent.net": {"type": net} | NEEDS.get(net, {}),
            "env.max_frame": 3000,
            **({"meta.demonstrations": "episodes.npz"} if algorithm in OFFLINE else {}),
        }
        if not fitting(algorithm, memory, net):
            assert all(problem in ("agent.memory.name", "agent.net.type") for problem in specs.problems(changes)), changes
            continue
        goes.append((memory, net))
        spec = specs.load(changes)
        specs.log.clear()
        assert load_spec(specs.file(dump_spec(spec)), "ppo") == spec
        assert set(specs.notices()) <= {"agent.net"}  # the notice about CrossQ's critics without batch normalisation
    assert goes


# ---- the schema, checked by a small validator of the keywords that it uses


WORDS = {
    *("$ref", "examples", "anyOf", "oneOf", "type", "const", "enum", "properties", "patternProperties", "additionalProperties"),
    *("required", "minProperties", "items", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
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
    if isinstance(value, str):
        fine = fine and re.search(node.get("pattern", ""), value) is not None
    if number:
        fine = fine and node.get("minimum", value) <= value <= node.get("maximum", value)
        fine = fine and node.get("exclusiveMinimum", value - 1) < value < node.get("exclusiveMaximum", value + 1)
    if isinstance(value, list):
        fine = fine and node.get("minItems", 0) <= len(value) <= node.get("maxItems", len(value))
        fine = fine and all(accepts(node.get("items", {}), item, definitions) for item in value)
    if isinstance(value, dict) and fine:
        assert list(node.get("patternProperties", {})) in ([], ["^[^_$]"])
        fine = len(value) >= node.get("minProperties", 0) and all(key in value for key in node.get("required", []))
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
"""The schema itself, and a file in the older form, which the schema does not describe."""
FILES = sorted(path for path in SPEC_FOLDER.rglob("*.json") if path.name not in NOT_TODAYS)


def test_the_schema_accepts_every_shipped_spec() -> None:
    schema = shipped_schema()
    assert [path for path in FILES if not accepts(schema, json.loads(path.read_text(encoding="utf-8")), schema["$defs"])] == []


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
        (
            {
                "agent.algorithm": {"name": "my.algorithm:Mine", "gama": 1},
                "agent.memory": {"name": "my:Memory"},
                "agent.net": {"type": "my:Net", "x": 2},
            },
            True,
        ),
        ({"agent.net": {"type": "my Net"}}, False),
    ],
)
def test_the_schema_knows_good_from_bad(changes: dict[str, Any], fine: bool) -> None:
    assert accepts(shipped_schema(), {"ppo": changed(PPO, changes)}, shipped_schema()["$defs"]) == fine


@pytest.mark.parametrize(("algorithm", "default"), [(SAC, 1.0), (DSAC, 0.01)], ids=["SAC", "DSAC"])
def test_the_default_of_initial_alpha_may_be_outside_of_the_interval(specs: Specs, algorithm: dict[str, Any], default: float) -> None:
    """A saved spec contains the default, so that files may. It is refused only in --set, which requests exactly this value."""
    outside = algorithm | {"agent.algorithm.log_alpha_max": -6.0, "agent.algorithm.log_alpha_min": -9.0}
    loaded = specs.load(outside | {"agent.algorithm.initial_alpha": default}).agent.algorithm
    assert isinstance(loaded, SoftActorCriticSpec)
    assert loaded.initial_alpha == default
    assert specs.problems(outside, [f"agent.algorithm.initial_alpha={default}"]) == ["agent.algorithm.initial_alpha"]
