"""Saved specs of older versions mean what they meant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from slm_lab.spec.algorithm import SoftActorCriticSpec
from slm_lab.spec.loader import dump_spec, load_spec
from slm_lab.spec.memory import PrioritizedReplaySpec
from slm_lab.spec.net import TorchArcNetSpec
from slm_lab.spec.saved import SPEC_VERSION
from tests.spec.conftest import Specs

OLD: dict[str, Any] = {"git": "abc", "versions": {"slm_lab": "0.1"}}
REPLAY = {"agent.memory": {"name": "Replay", "batch_size": 8}, "env.num_envs": 4, "env.max_frame": 20_000}


def polyak(algorithm: dict[str, Any], coef: float, frequency: int) -> dict[str, Any]:
    net = {"type": "MLPNet", "update_type": "polyak", "polyak_coef": coef, "update_frequency": frequency}
    return {**REPLAY, "agent.algorithm": algorithm, "agent.net": net}


@pytest.mark.parametrize("run", [OLD, [OLD, OLD]])
@pytest.mark.parametrize(
    ("algorithm", "updates_per_frame"),  # of the target net, today
    [
        ({"name": "DQN", "training_frequency": 8}, 1 / 4),
        ({"name": "SoftActorCritic", "training_frequency": 8, "training_iter": 2}, 2 / 8),
        ({"name": "SoftActorCritic", "training_frequency": 1, "training_iter": 6, "policy_delay": 3}, 2 / 4),
        ({"name": "SoftActorCritic", "training_frequency": 2}, 4 / 4),
    ],
)
def test_target_nets_of_an_older_run_move_as_fast(specs: Specs, algorithm: dict[str, Any], updates_per_frame: float, run: Any) -> None:
    spec = specs.load(polyak(algorithm, 0.05, 8) | {"meta.run": run})
    assert spec.agent.net is not None
    assert updates_per_frame * math.log(1 - spec.agent.net.polyak_coef) == pytest.approx(math.log(0.95) / 8)
    assert spec.agent.net.update_frequency == 1
    assert "agent.net.update_frequency" not in specs.notices()
    again = load_spec(specs.file(dump_spec(spec)), "ppo")
    assert again == spec, "converted once"


@pytest.mark.parametrize(
    ("algorithm", "ratio"),
    [({"name": "SoftActorCritic"}, 0.98), ({"name": "CrossQ"}, 0.98), ({"name": "SoftActorCritic", "fixed_alpha": 0.1}, 0.6)],
)
def test_the_automatic_target_entropy_of_an_older_run_stays(specs: Specs, algorithm: dict[str, Any], ratio: float) -> None:
    changes = REPLAY | {"agent.algorithm": algorithm, "agent.net.batch_norm": True}
    for run, expected in ((OLD, ratio), ({"spec_version": 2}, 0.6)):
        spec = specs.load(changes | {"meta.run": run}).agent.algorithm
        assert isinstance(spec, SoftActorCriticSpec)
        assert spec.target_entropy_ratio == expected
    assert specs.notices() == ([] if spec.fixed_alpha else ["agent.algorithm.target_entropy"] * 2)  # see the next test


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        (
            REPLAY | {"agent.algorithm": {"name": "SoftActorCritic", "fixed_alpha": 0.1}, "agent.net.clip_grad_val": 1.0},
            ["net.clip_grad_val"],
        ),
        (REPLAY | {"agent.algorithm": {"name": "SoftActorCritic"}}, ["algorithm.target_entropy"]),
        (REPLAY | {"agent.algorithm": {"name": "DQN"}, "agent.net.clip_grad_val": 1.0}, []),
        ({"agent.net.shared": True, "agent.net.use_same_optim": False}, ["net.use_same_optim"]),
        ({"agent.net.shared": False, "agent.net.use_same_optim": False}, []),
    ],
)
def test_what_no_key_can_keep_of_version_2_is_noted(specs: Specs, changes: dict[str, Any], paths: list[str]) -> None:
    for version, expected in ((2, paths), (SPEC_VERSION, [])):
        specs.log.clear()
        specs.load(changes | {"meta.run": [{"spec_version": version}]})
        noted = [record.getMessage() for record in specs.log.records if "older version" in record.getMessage()]
        assert [note.split(": ")[1] for note in noted] == [f"agent.{path}" for path in expected]


def test_a_buffer_of_version_2_is_used_from_a_batch_on(specs: Specs) -> None:
    changes = REPLAY | {"agent.algorithm": {"name": "DQN", "training_start_step": 1}}
    for version, expected in ((2, specs.load(changes).agent.memory.batch_size), (SPEC_VERSION, 1)):  # type: ignore[union-attr]
        spec = specs.load(changes | {"meta.run": [{"spec_version": version}]})
        assert spec.agent.training_start == expected


def test_those_of_this_version_stay(specs: Specs) -> None:
    spec = specs.load(polyak({"name": "DQN"}, 0.05, 1) | {"meta.run": [OLD, {**OLD, "spec_version": SPEC_VERSION}]})
    assert spec.agent.net is not None
    assert spec.agent.net.polyak_coef == 0.05


@pytest.mark.parametrize(("given", "expected"), [(True, "before"), (False, False)])
def test_batch_norm_of_an_older_run_stays_before_the_activations(specs: Specs, given: bool, expected: Any) -> None:
    net = {"type": "ConvNet", "normalize": True, "batch_norm": given, "conv_hid_layers": [[4, 3, 2]]}
    saved = specs.load({"agent.net": net, "meta.run": OLD})
    assert saved.agent.net is not None
    assert saved.agent.net.batch_norm == expected
    assert specs.load({"agent.net": net}).agent.net.batch_norm is given


def test_gains_of_an_older_run_stay(specs: Specs) -> None:
    """Output layers had a gain of 1, every layer of a TorchArcNet too."""
    saved = specs.load({"agent.net": {"type": "MLPNet", "init_fn": "orthogonal_", "actor_init_std": 0.01}, "meta.run": OLD})
    assert saved.agent.net is not None
    assert (saved.agent.net.actor_init_std, saved.agent.net.critic_init_std) == (0.01, 1.0)
    arc = {"modules": {"body": {"LazyLinear": [4]}}}
    saved = specs.load({"agent.net": {"type": "TorchArcNet", "arc": arc, "init_fn": "xavier_normal_"}, "meta.run": OLD})
    assert isinstance(saved.agent.net, TorchArcNetSpec)
    assert saved.agent.net.hid_layers_activation == "identity"
    assert specs.notices() == []


def test_schedulers_and_batch_renorm_of_an_older_run_stay(specs: Specs) -> None:
    layers = [{"LazyBatchRenorm1d": given} for given in ({"momentum": 0.1}, None, [0.2, 0.01])]
    arc = {"modules": {"body": {"Sequential": [{"LazyLinear": [4]}, *layers]}}}
    for scheduler, unit in (({"name": "StepLR", "step_size": 100}, "frames"), ({"name": "LinearToZero", "frame": 100}, None)):
        net = {"type": "TorchArcNet", "arc": arc, "lr_scheduler_spec": scheduler}
        saved = specs.load({"agent.net": net, "meta.run": OLD}).agent.net
        assert isinstance(saved, TorchArcNetSpec)
        assert saved.lr_scheduler_spec is not None
        assert saved.arc is not None
        assert saved.lr_scheduler_spec.unit == unit
        assert [layer["LazyBatchRenorm1d"] for layer in saved.arc["modules"]["body"]["Sequential"][1:]] == [
            {"eps": 1e-3, "warmup_steps": 100_000, "momentum": 0.1},
            {"eps": 1e-3, "warmup_steps": 100_000},
            {"eps": 0.01, "warmup_steps": 100_000, "momentum": 0.2},
        ]


@pytest.mark.parametrize("run", [OLD, {**OLD, "spec_version": 2}])
def test_priorities_of_an_older_run_stay(specs: Specs, run: Any) -> None:
    """Weights with an exponent of 0.4, new transitions with the greatest priority so far; those of the buffer of self-imitation too."""
    replay = {"name": "PrioritizedReplay", "batch_size": 8}
    expected = (0.4, "greatest") if run is OLD else (None, 100_000)
    spec = specs.load({"agent.algorithm": {"name": "DQN"}, "agent.memory": replay, "meta.run": run})
    memory = spec.agent.memory
    assert isinstance(memory, PrioritizedReplaySpec)
    assert (memory.beta, memory.initial_error) == expected
    sil = specs.load({"agent.algorithm": {"name": "SIL", "lam": 0.9}, "agent.memory": {"name": "OnPolicyBatchReplay"}, "meta.run": run})
    replay_spec = sil.agent.memory.sil_replay  # type: ignore[union-attr]
    assert (replay_spec.beta, replay_spec.initial_error) == expected  # type: ignore[union-attr]
    given = specs.load({"agent.algorithm": {"name": "DQN"}, "agent.memory": {**replay, "beta": 0.7}, "meta.run": run})
    assert given.agent.memory.beta == 0.7  # type: ignore[union-attr]
    uniform = specs.load(REPLAY | {"agent.algorithm": {"name": "DQN"}, "meta.run": run})
    assert uniform.agent.memory.name == "Replay"
    assert specs.notices() == []


@pytest.mark.parametrize("episodes", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.95, 1.0])
def test_the_best_episodes_of_an_older_run_stay(specs: Specs, share: float, episodes: int) -> None:
    """cross_entropy was the fraction to keep, rounded, at least one."""
    memory = {"name": "OnPolicyCrossEntropy", "cross_entropy": share}
    algorithm = {"name": "Reinforce", "training_frequency": episodes}
    q = specs.load({"agent.algorithm": algorithm, "agent.memory": memory, "meta.run": OLD}).agent.memory.cross_entropy  # type: ignore[union-attr]
    totals = np.random.default_rng(0).normal(size=episodes)
    kept = int((totals >= np.quantile(totals, q)).sum()) if q < 1 else episodes
    assert kept == max(1, round(share * episodes))


def test_what_no_key_expresses_of_an_older_run_is_noted(specs: Specs) -> None:
    explore = {"name": "linear_decay", "start_val": 1.0, "end_val": 0.1, "end_step": 100}
    algorithm = {"name": "DQN", "action_policy": "epsilon_greedy", "action_pdtype": "Argmax", "explore_var_spec": explore}
    changes = REPLAY | {"agent.algorithm": algorithm, "agent.memory.use_cer": True, "meta.rigorous_eval": 2}
    specs.load(changes | {"meta.run": OLD})
    assert specs.notices() == ["agent.memory.use_cer", "meta.rigorous_eval"]
    specs.log.clear()
    specs.load(changes | {"meta.run": {**OLD, "spec_version": 2}})
    assert specs.notices() == []


@pytest.mark.parametrize(
    ("algorithm", "normalize"),
    [
        ({"name": "PPO"}, "rollout"),
        ({"name": "PPO", "normalize_advantages": "standardize"}, "rollout"),
        ({"name": "PPO", "normalize_advantages": False}, False),
        ({"name": "PPO", "normalize_advantages": "percentile"}, "percentile"),
        ({"name": "ActorCritic", "lam": 0.9}, True),
        ({"name": "ActorCritic", "num_step_returns": 8}, False),
        ({"name": "Reinforce"}, False),
    ],
    ids=str,
)
def test_advantages_of_an_older_run_are_scaled_as_they_were(specs: Specs, algorithm: dict[str, Any], normalize: str | bool) -> None:
    changes = {"agent.algorithm": algorithm, "agent.net": {"type": "MLPNet"}}
    assert specs.load(changes | {"meta.run": OLD}).agent.algorithm.normalize_advantages == normalize  # type: ignore[attr-defined]
    now = specs.load(changes | {"meta.run": {"spec_version": 2}}).agent.algorithm
    assert now.normalize_advantages == algorithm.get("normalize_advantages", "standardize")  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["normalize_v_targets", "symlog", "clip_vloss"])
def test_what_no_key_expresses_is_noted(specs: Specs, key: str) -> None:
    specs.load({"agent.algorithm": {"name": "PPO", key: True}, "agent.net": {"type": "MLPNet", "clip_grad_val": 0.5}, "meta.run": OLD})
    assert specs.notices() == [f"agent.algorithm.{key}", "agent.net.clip_grad_val"]
