"""Tests of studies: the runs that they list, and the problems of invalid studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slm_lab.spec.load.files import spec_summaries
from slm_lab.spec.load.loader import load_spec, load_with_notices
from slm_lab.spec.load.study_file import load_study, settings_that_affect_results
from slm_lab.spec.models.study import Study
from slm_lab.spec.report import SpecError

PPO: dict[str, Any] = {"agent": {"algorithm": {"name": "PPO"}}, "env": {"name": "CartPole-v1", "max_frame": 20_000}}
ANY_ENV: dict[str, Any] = {"agent": {"algorithm": {"name": "PPO"}}, "env": {"name": "${env}", "max_frame": 20_000}}
ENTRIES = [{"spec": "ppo", "label": "one"}, {"spec": "ppo", "label": "other", "set": {"agent.algorithm.gamma": 0.9}}]
STUDY: dict[str, Any] = {"entries": ENTRIES, "random_seed": [3, 1]}


def study(folder: Path, sets: tuple[str, ...] = (), beside: dict[str, Any] | None = None, **keys: Any) -> Study:
    """Load STUDY with changed keys."""
    body = {key: value for key, value in {**STUDY, **keys}.items() if value is not ...}
    searched = {**PPO, "search": {"agent.algorithm.gamma__uniform": [0.9, 1.0]}}
    content = {"ppo": PPO, "any": ANY_ENV, "searched": searched, "it": {"study": body, **(beside or {})}}
    file = folder / "file.json"
    file.write_text(json.dumps(content))
    return load_study(file, "it", sets)


def problems(folder: Path, sets: tuple[str, ...] = (), **keys: Any) -> list[str]:
    """Return the paths of the problems of a changed STUDY."""
    with pytest.raises(SpecError) as error:
        study(folder, sets, **keys)
    return [problem.path for problem in error.value.problems]


def test_runs_are_specs_with_overrides(tmp_path: Path) -> None:
    found = study(tmp_path, set={"env.max_frame": 5000, "agent": {"algorithm": {"gamma": 0.5}}})
    assert [(run.entry, run.random_seed) for run in found.runs] == [("one", 3), ("one", 1), ("other", 3), ("other", 1)]
    for run in found.runs:
        gamma = 0.9 if run.entry == "other" else 0.5  # an entry's own values are applied last
        sets = ["env.max_frame=5000", f"agent.algorithm.gamma={gamma}", f"meta.random_seed={run.random_seed}"]
        assert run.spec == load_spec(tmp_path / "file.json", "ppo", sets)


def test_an_entry_can_have_its_own_seeds(tmp_path: Path) -> None:
    first, second = ENTRIES
    found = study(tmp_path, entries=[{**first, "random_seed": [7]}, second])
    assert [(run.entry, run.random_seed) for run in found.runs] == [("one", 7), ("other", 3), ("other", 1)]


def test_null_means_absent(tmp_path: Path) -> None:
    first, second = ENTRIES
    found = study(tmp_path, entries=[{**first, "random_seed": None}, second], envs=None, metric=None, set={"agent.net.optim_spec": None})
    assert [(run.entry, run.random_seed) for run in found.runs] == [("one", 3), ("one", 1), ("other", 3), ("other", 1)]


@pytest.mark.parametrize("raw", [3, "a study", None])
def test_an_entry_that_is_no_spec(tmp_path: Path, raw: Any) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"it": raw}))
    for envs in ([], ["Acrobot-v1"]):
        found = problems(tmp_path, entries=[{"spec": "other.json:it", "label": "one"}], envs=envs)
        assert set(found) <= {"study.entries[0]", "study.entries[0].spec"}


def test_a_variable_elsewhere_in_the_spec_does_not_keep_the_name(tmp_path: Path) -> None:
    named = {**PPO, "agent": {**PPO["agent"], "name": "PPO on ${env}"}}
    (tmp_path / "named.json").write_text(json.dumps({"named": named}))
    found = study(tmp_path, entries=[{"spec": "named.json:named", "label": "one"}], envs=["Acrobot-v1"])
    assert {(run.spec.env.name, run.spec.agent.name) for run in found.runs} == {("Acrobot-v1", "PPO on Acrobot-v1")}


@pytest.mark.parametrize("spec", ["ppo", "any"])
def test_envs_fill_the_variable_or_replace_the_name(tmp_path: Path, spec: str) -> None:
    envs = [
        "CartPole-v1",
        {"name": "Acrobot-v1", "label": "acrobot", "set": {"env.max_frame": 4000}, "solve": -100, "published": {"one": -80}},
    ]
    found = study(tmp_path, entries=[{"spec": spec, "label": "one"}], envs=envs, metric="total_reward", solve=195)
    assert [(run.env, run.spec.env.name, run.spec.env.max_frame) for run in found.runs[::2]] == [
        ("CartPole-v1", "CartPole-v1", 20_000),
        ("acrobot", "Acrobot-v1", 4000),
    ]
    assert [found.solve_score(env) for env in found.envs] == [195, -100]
    assert [found.published_score("one", env) for env in found.envs] == [None, -80]


def test_the_default_metric_is_that_of_published_scores_if_there_are_any(tmp_path: Path) -> None:
    assert study(tmp_path).metric == "current_return"
    envs = [{"name": "CartPole-v1", "published": {"one": 195}}]
    assert study(tmp_path, envs=envs).metric == "total_reward_ma"


def test_a_digest_is_of_what_is_learned(tmp_path: Path) -> None:
    first = study(tmp_path).runs
    assert len({run.digest for run in first}) == 2
    other = study(tmp_path, set={"meta": {"save_interval": 3, "checkpoint_frequency": 5000}}, random_seed=[9], entries=ENTRIES[::-1]).runs
    assert {run.digest for run in other} == {run.digest for run in first}
    assert {run.digest for run in study(tmp_path, set={"env.num_envs": 2}).runs}.isdisjoint({run.digest for run in first})
    assert settings_that_affect_results(first[0].spec)["agent.algorithm.name"] == "PPO"


def test_keys_of_the_study_are_set(tmp_path: Path) -> None:
    found = study(tmp_path, ("random_seed=[5,6,7]", "set.env.max_frame=3000", "entries[0].label=first", "metric=total_reward"))
    assert found.spec.random_seed == [5, 6, 7]
    assert (found.metric, found.entries) == ("total_reward", ["first", "other"])
    assert {run.spec.env.max_frame for run in found.runs} == {3000}
    for written in ({"env": {"num_envs": 2}, "env.max_frame": 4000}, {"env": {"max_frame": 4000}}, {"env.max_frame": 4000}):
        found = study(tmp_path, ("set.env.max_frame=3000",), set=written)
        assert {run.spec.env.max_frame for run in found.runs} == {3000}, written
    assert problems(tmp_path, ("env.max_frame=3", "random_seeds=[1]")) == ["study.random_seeds", "study.env.max_frame"]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"entries": []}, ["study.entries"]),
        ({"entries": ...}, ["study.entries"]),
        ({"random_seed": []}, ["study.random_seed"]),
        ({"random_seed": [1, 2, 1]}, ["study.random_seed"]),
        ({"entries": [{"spec": "ppo", "random_seed": [1, 1]}]}, ["study.entries[0].random_seed"]),
        ({"entries": [{"spec": "ppo", "random_seed": []}]}, ["study.entries[0].random_seed"]),
        ({"random_seed": [1, -2]}, ["study.random_seed[1]"]),
        ({"entries": [*ENTRIES, {"spec": "ppo", "label": "one", "set": {"env.num_envs": 2}}]}, ["study.entries[2].label"]),
        ({"entries": [*ENTRIES, {"spec": "ppo", "label": "twin"}]}, ["study.entries[2]"]),
        ({"entries": [{"spec": "ppo", "label": "one", "env": env} for env in ("a", "b")]}, ["study.entries[1]"]),
        ({"entries": [{"spec": "any"}], "envs": [{"name": "CartPole-v1", "label": label} for label in "ab"]}, ["study.envs[1]"]),
        ({"entries": [{"spec": "pppo"}]}, ["study.entries[0].spec"]),
        ({"entries": [{"spec": "it"}]}, ["study.entries[0].spec"]),
        ({"entries": [{"spec": "none.json:ppo"}]}, ["study.entries[0].spec"]),
        ({"entries": [{"spec": "searched"}]}, ["study.entries[0].spec"]),
        ({"entries": [{"spec": "any"}]}, ["study.entries[0]"]),  # ${env} has no value
        ({"entries": [{"spec": "ppo", "set": {"agent.algorithm.gama": 1}}]}, ["study.entries[0]"]),
        ({"entries": [{"spec": "ppo", "set": {"meta.random_seed": 1}}]}, ["study.entries[0].set.meta.random_seed"]),
        ({"set": {"meta": {"random_seed": 1}}, "entries": ENTRIES[:1]}, ["study.set.meta.random_seed"]),
        ({"envs": ["CartPole-v1"], "entries": [{"spec": "any", "set": {"env": "Acrobot-v1"}}]}, ["study.entries[0].set.env"]),
        ({"metric": "evaluation"}, ["study.entries[0].spec", "study.entries[1].spec"]),
        ({"envs": ["CartPole-v1", "CartPole-v1"]}, ["study.envs[1]"]),
        ({"envs": ["CartPol-v1"]}, ["study.entries[0]", "study.entries[1]"]),
        ({"solve": 195}, ["study.solve"]),
        ({"envs": [{"name": "CartPole-v1", "solve": 195}]}, ["study.envs[0].solve"]),
        ({"envs": [{"name": "CartPole-v1", "published": {"two": 195}}]}, ["study.envs[0].published.two"]),
        ({"metric": "reward"}, ["study.metric"]),
        ({"x": ["frames"]}, ["study.x[0]"]),
        ({"baseline": "on"}, ["study.baseline"]),
        ({"paired": True}, ["study.paired"]),
        (
            {"paired": True, "baseline": "one", "entries": [ENTRIES[0], {**ENTRIES[1], "random_seed": [7]}]},
            ["study.entries[1].random_seed"],
        ),
        ({"seeds": 3, "baseline": "on"}, ["study.seeds"]),
        ({"baseline": "on", "solve": 3}, ["study.baseline", "study.solve"]),
    ],
    ids=lambda value: json.dumps(value, default=str)[:50],
)
def test_what_is_wrong(tmp_path: Path, keys: dict[str, Any], found: list[str]) -> None:
    assert problems(tmp_path, **keys) == found


def test_pairs_are_those_of_one_env(tmp_path: Path) -> None:
    """Entries with the same label can have different envs and seeds; only entries of the same env are paired."""
    acrobot, cartpole = ({"spec": "any", "set": {"env": name}} for name in ("Acrobot-v1", "CartPole-v1"))
    entries = [
        {**acrobot, "label": "base", "random_seed": [0, 1]},
        {**cartpole, "label": "base", "random_seed": [10, 11]},
        {**cartpole, "label": "new", "random_seed": [11, 12], "set": {"env": "CartPole-v1", "agent.algorithm.gamma": 0.9}},
    ]
    assert len(study(tmp_path, entries=entries, baseline="base", paired=True).runs) == 6
    entries[2]["random_seed"] = [0, 1]
    assert problems(tmp_path, entries=entries, baseline="base", paired=True) == ["study.entries[2].random_seed"]


def test_keys_beside_the_study_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        study(tmp_path, beside={"agent": {}}, random_seed=[])
    assert [problem.path for problem in error.value.problems] == ["agent", "study.random_seed"]


def test_a_study_that_is_no_object(tmp_path: Path) -> None:
    assert problems(tmp_path, beside={"study": []}) == ["study"]


def test_values_of_a_set_are_not_said_to_come_from_the_command_line(tmp_path: Path) -> None:
    for keys in ({"agent.algorithm.gama": 1}, {"agent.algorithm.gamma": "x"}, {"nothing": 1}):
        with pytest.raises(SpecError) as error:
            study(tmp_path, entries=[{"spec": "ppo", "set": keys}])
        (problem,) = error.value.problems
        assert "--set" not in problem.message
        assert "set" in problem.message


def test_a_study_is_no_spec_and_a_spec_no_study(tmp_path: Path) -> None:
    study(tmp_path)
    file = tmp_path / "file.json"
    assert [spec.name for spec in load_with_notices(file, None, ["env=CartPole-v1"]).specs] == ["ppo", "any_cartpole", "searched"]
    for call in (lambda: load_spec(file, "it"), lambda: load_study(file, "ppo"), lambda: load_study(file, "itt")):
        with pytest.raises(SpecError):
            call()


def test_studies_that_ship() -> None:
    short, full = (load_study("a3c_vs_a2c.json", name) for name in ("a3c_vs_a2c_short", "a3c_vs_a2c"))
    assert (len(short.runs), len(full.runs)) == (15, 80)
    assert short.entries == full.entries
    for run in full.runs:
        meta, sampler = run.spec.meta, run.spec.meta.sampler
        workers = meta.max_session if meta.distributed else 1
        envs = sampler.num_envs if sampler is not None else run.spec.env.num_envs
        updates = run.spec.session_frames // (32 * envs)
        assert updates == (8000 if run.entry == "A2C, 1 env" else 2000)
        assert workers * run.spec.session_frames == 256_000
        assert meta.log_frequency == meta.eval_frequency == 100 * 32 * envs
    assert all(run.spec.trial_frames == 64_000 for run in short.runs)
    assert "a3c_vs_a2c" not in {name for _, name, *_ in spec_summaries()}
