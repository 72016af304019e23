"""Tests of meta.sampler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slm_lab.experiment import plan
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.models.algorithm import ALGORITHMS, PPOSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Report, SpecError
from slm_lab.spec.rules.check import check_rules
from slm_lab.spec.rules.resolve import resolve_spec
from tests.spec.conftest import PPO, Specs, changed

SAMPLED: dict[str, Any] = {
    "env.num_envs": ...,
    "env.max_frame": 10_000,
    "meta.max_session": 1,
    "meta.sampler": {},
    "agent.algorithm.minibatch_size": 128,
}
"""2 workers × 8 envs × 128 steps, which collect asynchronously."""
REFERENCE = {
    "env.num_envs": ...,
    "env.max_frame": 100_000,
    "agent.algorithm": {"name": "PPO", "time_horizon": 32},
    "meta.sampler": {"async_rl": False, "num_workers": 16, "num_envs_per_worker": 8},
}
"""Reference example: 16 workers × 8 envs × 32 steps = 4096 transitions."""
REPLAYS = {"agent.memory": {"name": "Replay", "batch_size": 8, "max_size": 100}}
DQN = SAMPLED | REPLAYS | {"agent.algorithm": {"name": "DoubleDQN"}}
SIL = {"name": "OnPolicyBatchReplay", "batch_size": 8, "max_size": 100}


def sized(minibatch: int, batches: int, **sampler: Any) -> dict[str, Any]:
    changes: dict[str, Any] = {"agent.algorithm.minibatch_size": minibatch, "meta.sampler.num_batches_per_epoch": batches}
    return REFERENCE | changes | {f"meta.sampler.{key}": value for key, value in sampler.items()}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"meta.distributed": "synced", "meta.max_session": 2}, "meta.distributed"),
        ({"env.num_envs": 4}, "env.num_envs"),
        ({"meta.sampler": {"num_policies": 2, "pbt": {"perturb_min": 1.6, "perturb_max": 1.5}}}, "meta.sampler.pbt.perturb_min"),
        ({"meta.sampler": {"num_policies": 3, "pbt": {"replace_fraction": 0.667}}}, "meta.sampler.pbt.replace_fraction"),
        ({"meta.sampler": {"inference": "central", "worker_num_splits": 3}}, "meta.sampler.worker_num_splits"),
        ({"meta.sampler": {"inference": "central", "worker_num_splits": 20}}, "meta.sampler.worker_num_splits"),
        ({"agent.algorithm": {"name": "Reinforce"}}, "meta.sampler"),
        ({"agent.algorithm": {"name": "SARSA"}}, "meta.sampler"),
        ({"agent.algorithm": {"name": "SIL"}, "agent.memory": SIL}, "meta.sampler"),
        ({"agent.algorithm": {"name": "PPOSIL"}, "agent.memory": SIL}, "meta.sampler"),
        ({"agent.algorithm": {"name": "Random"}}, "meta.sampler"),
        ({"agent.algorithm": {"name": "ActorCritic"}, "agent.memory.name": "OnPolicyReplay"}, "agent.memory.name"),
        (DQN | {"meta.sampler.async_rl": False}, "meta.sampler.async_rl"),
        (DQN | {"meta.sampler.num_policies": 2}, "meta.sampler.num_policies"),
        (DQN | {"meta.sampler.num_batches_per_epoch": 3}, "meta.sampler.num_batches_per_epoch"),
        ({"agent.algorithm": {"name": "ActorCritic"}, "meta.sampler.num_batches_per_epoch": 2}, "meta.sampler.num_batches_per_epoch"),
        ({"meta.sampler": {"num_worker": 2}}, "meta.sampler.num_worker (unknown)"),
        ({"meta.sampler": {"pbt": {"perod": 2}}}, "meta.sampler.pbt.perod (unknown)"),
        ({"meta.sampler": {"inference": "centra"}}, "meta.sampler.inference"),
        ({"meta.sampler": {"num_workers": 0}}, "meta.sampler.num_workers"),
        ({"meta.sampler": {"pbt": {"perturb_min": 1.0}}}, "meta.sampler.pbt.perturb_min"),
        ({"agent.net": {"type": "RecurrentNet", "bidirectional": True}}, "agent.net.bidirectional"),
    ],
)
def test_what_contradicts(specs: Specs, changes: dict[str, Any], problem: str) -> None:
    assert specs.problems(SAMPLED | changes) == [problem]


@pytest.mark.parametrize(("minibatch", "batches"), [(4096, 1), (1024, 4), (4096, 2)])
def test_the_references_sizes_fit_whole_rounds(specs: Specs, minibatch: int, batches: int) -> None:
    spec = specs.load(sized(minibatch, batches))
    assert spec.env.num_envs == 128
    assert spec.rollouts_per_dataset == minibatch * batches // 32
    assert specs.notices() == []


@pytest.mark.parametrize(
    ("minibatch", "batches", "says", "nearest"),
    [
        (512, 3, "512 × 3 = 1536", [(512, 8), (2048, 2)]),
        (512, 7, "512 × 7 = 3584", [(512, 8)]),
        (100, 1, "100 × 1 = 100", [(4096, 1)]),
        (3000, 5, "3000 × 5 = 15000", [(4096, 4)]),
    ],
)
def test_sizes_that_are_not_whole_rounds(specs: Specs, minibatch: int, batches: int, says: str, nearest: list[tuple[int, int]]) -> None:
    """They are refused with a message that gives the sizes and proposes valid ones."""
    (problem,) = specs.messages(sized(minibatch, batches))
    assert problem.startswith("meta.sampler.num_batches_per_epoch")
    assert f" = {says} transitions" in problem
    assert "num_workers × num_envs_per_worker × time_horizon = 16 × 8 × 32 = 4096 transitions" in problem
    proposed = proposals(problem)
    assert proposed == nearest
    for one in proposed:
        specs.load(sized(*one))


SIZES = "which is not a multiple of"


def proposals(problem: str) -> list[tuple[int, int]]:
    """Return the pairs (minibatch_size, num_batches_per_epoch) that a message proposes."""
    words = problem.partition("nearest: ")[2].split(" or ")
    pairs = [tuple(int(number) for number in word.split(" × ")) for word in words]
    return [(minibatch, batches) for minibatch, batches in pairs]


def test_async_refuses_only_what_is_not_whole_rollouts(specs: Specs) -> None:
    assert specs.load(sized(512, 3, async_rl=True)).rollouts_per_dataset == 48
    assert specs.load(sized(32, 1, async_rl=True)).rollouts_per_dataset == 1
    (problem,) = specs.messages(sized(100, 1, async_rl=True))
    assert "= 100 × 1 = 100 transitions" in problem
    assert proposals(problem) == [(96, 1)]
    specs.load(sized(96, 1, async_rl=True))
    assert specs.problems(sized(512, 3, async_rl=True, serial_mode=True)), "serial_mode goes in rounds whatever async_rl says"


def test_the_envs_are_the_workers(specs: Specs) -> None:
    assert specs.load(SAMPLED).env.num_envs == 16
    assert specs.load(SAMPLED | {"env.num_envs": 16}).env.num_envs == 16
    assert specs.load(DQN).rollouts_per_dataset == 16
    assert specs.load(SAMPLED | {"agent.algorithm": {"name": "ActorCritic"}}).rollouts_per_dataset == 16


@pytest.mark.parametrize(
    ("changes", "notice"),
    [
        ({}, None),
        ({"meta.max_restart": 3}, None),
        ({"meta.sampler": {"num_policies": 2, "async_rl": False}, "agent.algorithm.minibatch_size": 2048}, "meta.sampler.async_rl"),
        ({"meta.sampler": {"serial_mode": True}, "agent.algorithm.minibatch_size": 2048}, "meta.sampler.async_rl"),
        ({"meta.sampler": {"num_policies": 2, "pbt": {"start": 9000}}, "env.max_frame": 9000}, "meta.sampler.pbt.start"),
        ({"meta.sampler": {"num_policies": 3, "pbt": {"start": 0, "replace_fraction": 0.666}}}, None),
        ({"meta.sampler": {"num_policies": 2, "pbt": {"start": 8999}}, "env.max_frame": 9000}, None),
        (
            {"meta.sampler": {"serial_mode": True, "async_rl": False, "inference": "central"}, "agent.algorithm.minibatch_size": 2048},
            "meta.sampler.inference",
        ),
        ({"agent.algorithm.with_vtrace": True, "agent.algorithm.c_bar": 1.5}, "agent.algorithm.c_bar"),
        ({"agent.algorithm.with_vtrace": True, "agent.algorithm.rho_bar": 2.0, "agent.algorithm.c_bar": 0.5}, "agent.algorithm.c_bar"),
    ],
)
def test_notices(specs: Specs, changes: dict[str, Any], notice: str | None) -> None:
    specs.load(SAMPLED | changes)
    assert specs.notices() == ([] if notice is None else [notice])


def test_what_is_resolved(specs: Specs) -> None:
    serial = {"serial_mode": True, "async_rl": False, "inference": "central"}
    sampler = specs.load(SAMPLED | {"meta.sampler": serial, "agent.algorithm.minibatch_size": 2048}).meta.sampler
    assert sampler is not None
    assert sampler.inference == "local"


@pytest.mark.parametrize(
    ("algorithm", "sampler", "sizes"),
    [
        ({}, {}, (64, 32)),  # a rollout of 128 steps of 16 envs
        ({}, {"async_rl": False}, (64, 32)),
        ({"time_horizon": 100}, {}, (64, 25)),
        ({"time_horizon": 5, "minibatch_size": 16}, {}, (16, 5)),
        ({}, {"async_rl": False, "num_batches_per_epoch": 8}, (256, 8)),
        ({"time_horizon": 7}, {"num_workers": 1, "num_envs_per_worker": 1}, (7, 1)),
        ({"time_horizon": 32}, {}, (64, 1)),  # the defaults fit
    ],
)
def test_sizes_that_are_absent_are_derived(
    specs: Specs, algorithm: dict[str, Any], sampler: dict[str, Any], sizes: tuple[int, int]
) -> None:
    spec = specs.load(SAMPLED | {"agent.algorithm": {"name": "PPO", **algorithm}, "meta.sampler": sampler})
    assert isinstance(spec.agent.algorithm, PPOSpec)
    assert spec.meta.sampler is not None
    assert (spec.agent.algorithm.minibatch_size, spec.meta.sampler.num_batches_per_epoch) == sizes
    assert load_spec(dump_spec(spec)) == spec
    assert specs.notices() == []


@pytest.mark.parametrize("name", [name for name, model in ALGORITHMS.items() if model.samplers])
def test_an_empty_sampler_is_valid_with_the_defaults_of(specs: Specs, name: str) -> None:
    changes = SAMPLED | {
        "agent.algorithm": {"name": name},
        "agent.memory": ...,
        "agent.net": {"type": "MLPNet", "batch_norm": name == "CrossQ"},
    }
    assert specs.load(changes).env.num_envs == 16
    assert specs.notices() == []


@pytest.mark.parametrize(
    "changes",
    [
        REFERENCE | {"agent.algorithm.minibatch_size": 2048, "meta.sampler.num_batches_per_epoch": 2},
        SAMPLED | {"meta.sampler": {"num_policies": 3, "pbt": {"start": 10, "period": 10, "optimize_gamma": True}}},
        SAMPLED | {"agent.algorithm.with_vtrace": True, "agent.algorithm.rho_bar": 2.0, "agent.algorithm.c_bar": 1.5},
        DQN,
    ],
)
def test_a_saved_spec_loads_again(specs: Specs, changes: dict[str, Any]) -> None:
    spec = specs.load(changes)
    before = specs.notices()
    assert load_spec(specs.file(json.dumps(dump_spec(spec)), "saved.json"), "ppo") == spec
    assert specs.notices() == before, "a resolved spec gives no notice"


workers = st.integers(1, 6)
samplers = st.fixed_dictionaries(
    {"num_workers": workers, "num_envs_per_worker": workers, "num_batches_per_epoch": workers},
    optional={
        "async_rl": st.booleans(),
        "serial_mode": st.booleans(),
        "worker_num_splits": workers,
        "inference": st.sampled_from(["auto", "local", "central"]),
        "num_policies": workers,
        "pbt": st.sampled_from([{}, {"perturb_min": 1.2, "perturb_max": 1.3}]),
    },
)
algorithms = st.one_of(
    st.fixed_dictionaries(
        {"name": st.just("PPO"), "time_horizon": st.sampled_from([1, 2, 4, 6]), "minibatch_size": st.integers(1, 32).map(lambda n: 12 * n)}
    ),
    st.fixed_dictionaries({"name": st.just("ActorCritic"), "training_frequency": workers}),
    st.just({"name": "DQN"}),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(samplers, algorithms)
def test_whatever_passes_the_rules_makes_whole_rounds(sampler: dict[str, Any], algorithm: dict[str, Any]) -> None:
    """If the sizes do not pass, the message proposes sizes that do."""
    memory = {"agent.memory": REPLAYS["agent.memory"]} if algorithm["name"] == "DQN" else {}
    body = changed(
        PPO, {"env.num_envs": ..., "agent.net": {"name": "MLPNet"}, "agent.algorithm": algorithm, "meta.sampler": sampler} | memory
    )
    found = checked(body)
    if isinstance(found, Spec):
        rows, columns, resolved = found.worker_rollout_len, found.rollouts_per_dataset, found.meta.sampler
        assert resolved is not None
        assert columns >= 1
        assert found.env.num_envs == resolved.num_envs
        if algorithm["name"] == "PPO":
            assert rows * columns == algorithm["minibatch_size"] * resolved.num_batches_per_epoch
        if resolved.serial_mode or not resolved.async_rl:
            assert columns % resolved.num_envs == 0
        return
    sizes = [problem for problem in found if SIZES in problem]
    for problem in sizes:
        for minibatch, batches in proposals(problem):
            other = {"agent.algorithm.minibatch_size": minibatch, "meta.sampler.num_batches_per_epoch": batches}
            again = checked(changed(body, other))
            assert isinstance(again, Spec) or not [one for one in again if SIZES in one]


def checked(body: dict[str, Any]) -> Spec | list[str]:
    """Return the resolved spec, or its problems."""
    spec, report = Spec.model_validate({"name": "ppo", **body}), Report()
    check_rules(spec, report)
    return [str(problem) for problem in report.problems] or resolve_spec(spec, report)


def test_a_process_of_central_inference_takes_a_core_too(specs: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "cores", lambda: 6)
    concurrent_sessions = {}
    for inference in ("local", "central"):
        changes = {"meta.max_session": 4, "meta.sampler.num_workers": 2, "meta.sampler.inference": inference}
        concurrent_sessions[inference] = plan.Plan().concurrent_sessions(specs.load(SAMPLED | changes).meta)
    assert concurrent_sessions == {"local": 2, "central": 1}


def test_a_problem_does_not_hide_the_others(specs: Specs) -> None:
    with pytest.raises(SpecError) as caught:
        specs.load(REFERENCE | {"env.num_envs": 3, "meta.distributed": "shared", "agent.algorithm.minibatch_size": 5})
    paths = [problem.path for problem in caught.value.problems]
    assert sorted(paths) == ["env.num_envs", "meta.distributed", "meta.sampler.num_batches_per_epoch"]
