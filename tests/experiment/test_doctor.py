"""Tests of the doctor: each rule on hand-made tables on both sides of its threshold, ranking, damaged folders, and the command."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab import cli
from slm_lab.experiment.files import bundle
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report import doctor
from slm_lab.experiment.report.doctor import Finding, change_option, diagnose_run, diagnosis_text
from slm_lab.experiment.report.report_data import diagnosis
from slm_lab.experiment.report.run import Run, load_run
from slm_lab.spec.load.loader import dump_spec, load_spec

SPECS = Path(doctor.__file__).parents[2] / "spec"
FILES = {
    "ppo": "demo",
    "dqn": "benchmark/dqn/dqn_cartpole",
    "c51": "benchmark/rainbow/rainbow_cartpole",
    "appo": "benchmark/appo/appo_cartpole",
    "a3c": "benchmark/a3c/a3c_gae_cartpole",
}
NAMES = {"ppo": "ppo_cartpole", "dqn": "dqn_cartpole", "c51": "rainbow_cartpole", "appo": "appo_cartpole", "a3c": "a3c_gae_cartpole"}
BODIES = {kind: dump_spec(load_spec(SPECS / f"{file}.json", NAMES[kind]))[NAMES[kind]] for kind, file in FILES.items()}
ROWS = 20
LR, ALGORITHM = "agent.net.optim_spec.lr", "agent.algorithm"
Values = float | Sequence[float]

RISING = list(np.linspace(20.0, 200.0, ROWS))
HEALTHY: dict[str, Values] = {
    "frame": list(range(1000, 1000 * ROWS + 1, 1000)),
    "epi": list(range(10, 10 * ROWS + 1, 10)),
    "opt_step": list(range(100, 100 * ROWS + 1, 100)),
    "return_new": RISING,
    "current_return": RISING,
    "current_return_se": 5.0,
    "epi_len": 100.0,
    "epi_len_max": list(np.linspace(120.0, 290.0, ROWS)),
    "epi_truncated": 0.0,
    "lr": list(np.linspace(1e-3, 1e-4, ROWS)),
    "grad_norm": 1.0,
}
OF_KIND: dict[str, dict[str, Values]] = {
    "ppo": {"entropy": list(np.linspace(0.69, 0.3, ROWS)), "approx_kl": 0.01, "clip_fraction": 0.1, "explained_variance": 0.8},
    "dqn": {"q_mean": 50.0, "td_error": 1.0},
    "c51": {"q_mean": 50.0},
    "appo": {"lag_mean": 10.0, "lag_masked": 0.0, "rollout_busy": 0.6, "inference_busy": 0.3, "learner_busy": 0.6},
    "a3c": {"staleness": 1.0},
}


def make_run(
    root: Path,
    columns: Mapping[str, Values] | None = None,
    kind: str = "ppo",
    sets: Mapping[str, Any] | None = None,
    others: int = 2,
    rows: int = ROWS,
    trial: int = 0,
) -> Run:
    """Return a run in which session 0 has these columns (healthy ones by default), plus `others` healthy sessions."""
    paths = RunPaths(root / "run", NAMES[kind])
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.make_dirs()
    body = copy.deepcopy(BODIES[kind])
    for path, value in ({"env.max_frame": 1000 * ROWS} | dict(sets or {})).items():
        *parents, key = path.split(".")
        section = body
        for parent in parents:
            section = section[parent]
        section[key] = value
    for file in (paths.spec, paths.trial_spec(trial)):
        file.write_text(json.dumps({NAMES[kind]: body}))
    paths.trial_metrics(trial).write_text(json.dumps({"random_baseline": 24.85, "status": "done"}))
    for session in range(1 + others):
        own = HEALTHY | OF_KIND[kind] | (dict(columns or {}) if session == 0 else {})
        if kind == "a3c":
            own["global_frame"] = [2 * frame + session for frame in HEALTHY["frame"]]  # type: ignore[union-attr]
        cells = {name: [values] * ROWS if isinstance(values, float) else list(values) for name, values in own.items()}
        lines = [",".join(cells), *(",".join(str(cells[name][row]) for name in cells) for row in range(rows))]
        paths.session_df(session, t=trial).write_text("\n".join(lines) + "\n")
    return Run(paths, trial)


def save_checkpoint(run: Run, obs: float = 1.0, action: np.ndarray | None = None, squares: Sequence[float] = (1.0,) * 8) -> None:
    """Write the last checkpoint of session 0: 64 observations of 4 numbers, a hidden layer of 8 units, and their squared gradients."""
    actions = torch.zeros(64, 1, dtype=torch.int64) if action is None else torch.from_numpy(action.astype(np.float32)).view(64, 1, -1)
    slabs = {
        "obs": torch.full((65, 1, 4), obs),
        "action": actions,
        "reward": torch.ones(64, 1),
        "valid": torch.ones(64, 1, dtype=torch.bool),
    }
    weights = {
        "actor_body.layers.0.weight": torch.randn(8, 4),
        "actor_body.layers.0.bias": torch.randn(8),
        "actor_head.linear.weight": torch.randn(2, 8),
    }
    of_units = torch.tensor(squares)
    second = torch.cat([of_units.repeat_interleave(4), of_units, torch.zeros(16)])
    param = torch.cat([weight.ravel() for weight in weights.values()])
    trainer = {"param": param, "optimizers": [{"first": torch.zeros_like(second), "second": second}]}
    spaces = {"action": {"type": "Discrete" if action is None else "Box"}}
    policy = {"weights": weights, "spaces": spaces, "agent": {"algorithm": {"trainer": trainer}}}
    source = {"open": {"obs": torch.zeros(1, 4), "rollout": {"rollout": {"slabs": slabs}}}}
    path = run.paths.checkpoint(0, "last")
    assert isinstance(path, Path)
    bundle.save(path, {"version": bundle.VERSION, "policies": [policy], "source": source})


def save_policies(run: Run, *obs: float) -> None:
    """Write the last checkpoint of session 0 with one policy for each value of `obs`; policy i has observations of 4 + i numbers."""
    own = [
        {"rollout": {"rollout": {"slabs": {name: torch.full((64, 1, 4 + index), one) for name in ("obs", "action", "reward")}}}}
        for index, one in enumerate(obs)
    ]
    for one in own:
        one["rollout"]["rollout"]["slabs"]["valid"] = torch.ones(64, 1, dtype=torch.bool)
    path = run.paths.checkpoint(0, "last")
    assert isinstance(path, Path)
    policies = [{"weights": {}, "spaces": {"action": {"type": "Discrete"}}} for _ in obs]
    bundle.save(path, {"version": bundle.VERSION, "policies": policies, "source": {"open": {"obs": torch.zeros(1, 5), "policies": own}}})


def half(early: float, late: float) -> list[float]:
    return [early] * (ROWS // 2) + [late] * (ROWS // 2)


POOR = {"current_return": 22.0, "current_return_se": 2.0}
RATED: dict[str, Values] = {"elo_se": 30.0, "current_return": 0.0}
SELF_PLAY = {"meta.self_play": {}}
TOGETHER: dict[str, Values] = {"epi_truncated": 1.0, "epi_len": 1000.0, "epi_len_max": 1000.0}
POOL = {"meta.run": [{"backend": "envpool"}], "env.num_envs": 64}
CASES: dict[str, tuple[str, dict[str, Values], dict[str, Any], dict[str, Values], dict[str, Any]]] = {
    # rule: kind of run, columns and settings that trigger it, and those that just do not
    "discount": ("ppo", {}, {f"{ALGORITHM}.gamma": 0.89}, {}, {f"{ALGORITHM}.gamma": 0.91}),
    "time_limit": ("ppo", {"epi_truncated": 1.0, "epi_len_max": 24.0}, {}, {"epi_truncated": 1.0, "epi_len_max": 26.0}, {}),
    "truncation": ("ppo", {"epi_len_max": 200.0}, {}, {"epi_len_max": 200.0, "epi_truncated": half(0.0, 0.01)}, {}),
    "reward_scale": ("ppo", {"current_return": 10_100.0}, {}, {"current_return": 9_900.0}, {}),
    # γ = 0.99 over 100 steps: (1 − 0.99^100) / (1 − 0.99) = 63.4 steps count, 158.5 of 250
    "value_range": (
        "c51",
        {"current_return": 250.0},
        {f"{ALGORITHM}.v_max": 158.0},
        {"current_return": 250.0},
        {f"{ALGORITHM}.v_max": 159.0},
    ),
    "replay_ratio": (
        "dqn",
        {"opt_step": list(range(8100, 8100 * ROWS + 1, 8100))},
        {},
        {"opt_step": list(range(7900, 7900 * ROWS + 1, 7900))},
        {},
    ),
    "policy_lag": ("appo", {"lag_masked": 0.11}, {}, {"lag_masked": 0.09}, {}),
    "clipping": (
        "ppo",
        {"clip_fraction": 0.51, "approx_kl": 1e-6},
        {f"{ALGORITHM}.clip_eps_spec.start_val": 1e-4},
        {"clip_fraction": 0.49, "approx_kl": 1e-6},
        {f"{ALGORITHM}.clip_eps_spec.start_val": 1e-4},
    ),
    "entropy_high": (
        "ppo",
        {"entropy": half(0.69, 0.68)} | POOR,
        {f"{ALGORITHM}.entropy_coef_spec.start_val": 1.0},
        {"entropy": half(0.69, 0.65)} | POOR,
        {f"{ALGORITHM}.entropy_coef_spec.start_val": 1.0},
    ),
    "large_updates": ("ppo", {"approx_kl": half(0.11, 0.0)}, {}, {"approx_kl": half(0.09, 0.0)}, {}),
    "small_updates": ("ppo", {"approx_kl": 9e-6, "clip_fraction": 0.0}, {}, {"approx_kl": 1.1e-5, "clip_fraction": 0.0}, {}),
    "entropy_lost": ("ppo", {"entropy": [0.6] + [0.011] * 19} | POOR, {}, {"entropy": [0.6] + [0.013] * 19} | POOR, {}),
    "values": ("dqn", {"q_mean": 401.0}, {}, {"q_mean": 399.0}, {}),
    "gradients": ("ppo", {"grad_norm": 501.0}, {}, {"grad_norm": 499.0}, {}),
    "critic": ("ppo", {"explained_variance": 0.04} | POOR, {}, {"explained_variance": half(0.06, -5.0)} | POOR, {}),
    "learning_rate": ("ppo", {"lr": [1e-3] * 13 + [1e-4] * 7}, {}, {"lr": [1e-3] * 15 + [1e-4] * 5}, {}),
    "baseline": ("ppo", {"current_return": 34.0}, {}, {"current_return": 35.0}, {}),
    "rating": ("ppo", {"elo": [10.0] + [94.0] * 19, **RATED}, SELF_PLAY, {"elo": [10.0] + [96.0] * 19, **RATED}, SELF_PLAY),
    "bottleneck": ("appo", {"rollout_busy": 0.76, "learner_busy": 0.24}, {}, {"rollout_busy": 0.74, "learner_busy": 0.24}, {}),
    "lockstep": (
        "ppo",
        TOGETHER,
        POOL | {f"{ALGORITHM}.time_horizon": 250},
        TOGETHER,
        POOL | {f"{ALGORITHM}.time_horizon": 251},
    ),
    "episodes": ("ppo", {"epi": list(range(20))}, {}, {"epi": list(range(1, 21))}, {}),
}


@pytest.mark.parametrize(
    ("elo", "rules"),
    [
        ([0.0] * 19 + [59.0], {"baseline", "rating"}),  # two standard errors above the return of random actions
        ([0.0] * 10 + [300.0] * 10, set()),
        ([0.0] * 9 + [400.0] + [200.0] * 10, {"rating"}),  # the return has fallen by more than 4 · √2 · 30
    ],
)
def test_in_self_play_the_rating_is_judged_and_not_the_return(elo: list[float], rules: set[str], tmp_path: Path) -> None:
    """In self-play the return is about 0 whatever is learned, and here the longest game has the same length in all rows."""
    columns = {"elo": elo, **RATED, "epi_len_max": 42.0, "explained_variance": 0.0}
    run = make_run(tmp_path, columns, sets=SELF_PLAY, others=0)
    run.paths.trial_metrics().write_text(json.dumps({"random_baseline": 0.0, "status": "done"}))
    found = {finding.rule for finding in diagnose(run)} - {"seeds", "critic"}
    assert found == rules


def test_returns_against_policies_that_learn_are_not_judged(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"current_return": 22.0}, sets={"agent.policies": {"good": ["a"], "evil": ["b"]}}, others=1)
    assert of_rule(diagnose(run), "baseline") is None


def test_large_rewards_of_self_imitation_are_scaled(tmp_path: Path) -> None:
    """SIL and PPOSIL cannot be combined with env.normalize_reward."""
    for name, key in (("PPO", "env.normalize_reward"), ("PPOSIL", "env.reward_scale")):
        run = make_run(tmp_path / name, {"current_return": 10_100.0}, sets={"agent.algorithm.name": name}, others=0)
        found = of_rule(diagnose(run), "reward_scale")
        assert found is not None
        assert found.key == key


def test_offline_learning_has_no_episodes_and_no_observations(tmp_path: Path) -> None:
    columns = {"epi": 0.0, "current_return": 22.0}
    run = make_run(tmp_path, columns, sets={"agent.algorithm": {"name": "BC"}, "meta.demonstrations": "x.npz"}, others=0)
    found = diagnose_run(run)
    assert of_rule(diagnose(run), "episodes") is None
    assert not {"episodes", "observation_scale"} & {*found.checked, *found.not_checked}


def test_observations_are_those_of_each_policy(tmp_path: Path) -> None:
    run = make_run(tmp_path, sets={"agent.policies": {"good": ["a"], "evil": ["b"]}}, others=1)
    save_policies(run, 1.0, 2.0)
    assert of_rule(diagnose(run), "observation_scale") is None
    assert "observation_scale" in diagnose_run(run).checked
    save_policies(run, 1.0, 101.0)
    assert of_rule(diagnose(run), "observation_scale") is not None


def test_raw_observations_of_a_replay_buffer_are_not_judged(tmp_path: Path) -> None:
    """With normalize_obs, a checkpoint may contain observations before normalisation, which must not be judged."""
    for normalize, found in ((False, True), (True, False)):
        sets = {"env.normalize_obs": normalize, "agent.policies": {"good": ["a"], "evil": ["b"]}}
        run = make_run(tmp_path / str(normalize), sets=sets, others=1)
        save_policies(run, 1.0, 1000.0)
        assert (of_rule(diagnose(run), "observation_scale") is not None) == found


@pytest.mark.parametrize(
    ("source", "why"),
    [({"open": None, "env": {}}, "the envs cannot be saved"), ({"open": [{}, {}], "resumes": 0}, "rollout workers")],
    ids=["envs that cannot be saved", "rollout workers"],
)
def test_the_reason_for_missing_observations(source: dict[str, Any], why: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, others=0)
    path = run.paths.checkpoint(0, "last")
    policies = [{"weights": {}, "spaces": {"action": {"type": "Discrete"}}}]
    bundle.save(path, {"version": bundle.VERSION, "policies": policies, "source": source})
    assert why in diagnose_run(run).not_checked["observation_scale"]


def diagnose(run: Run, *, checkpoints: bool = True) -> list[Finding]:
    return list(diagnose_run(run, checkpoints=checkpoints).findings)


def of_rule(findings: Sequence[Finding], rule: str) -> Finding | None:
    return next((finding for finding in findings if finding.rule == rule), None)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_beyond_its_threshold_only(rule: str, tmp_path: Path) -> None:
    kind, faulty, faulty_sets, near, near_sets = CASES[rule]
    found = of_rule(diagnose(make_run(tmp_path / "faulty", faulty, kind, faulty_sets, others=0)), rule)
    assert found is not None
    assert found.sessions == (0,)
    assert of_rule(diagnose(make_run(tmp_path / "near", near, kind, near_sets, others=0)), rule) is None
    assert found.key is not None
    body = copy.deepcopy(BODIES[kind])
    if kind == "appo":
        del body["env"]["num_envs"]  # the value follows from the number of workers
    load_spec({NAMES[kind]: body}, NAMES[kind], [str(change_option(found)).removeprefix("--set ")])  # raises if the change is invalid


@pytest.mark.parametrize(
    ("columns", "sets"),
    [
        ({"epi_len": half(999.0, 1000.0)}, {}),
        ({"epi_truncated": half(0.99, 1.0)}, {}),
        ({}, {"env.stagger_episodes": True}),
        ({}, {"env.num_envs": 1}),
        ({}, {"meta.run": [{"backend": "sync"}]}),
        ({}, {"meta.sampler": {"mode": "sync"}}),
    ],
    ids=["unequal lengths", "terminations", "staggered", "one env", "another backend", "rollout workers"],
)
def test_episodes_that_do_not_begin_together(columns: dict[str, Values], sets: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(tmp_path, TOGETHER | columns, sets=POOL | {f"{ALGORITHM}.time_horizon": 64} | sets, others=0)
    assert of_rule(diagnose(run), "lockstep") is None


def test_returns_below_the_atoms(tmp_path: Path) -> None:
    """With negative returns (costs), v_min is too high. With normalised rewards the rule is skipped, as the returns have another scale."""
    sets = {"env.max_frame": 1000 * ROWS, f"{ALGORITHM}.v_max": 100.0, f"{ALGORITHM}.v_min": -100.0}
    found = of_rule(diagnose(make_run(tmp_path / "low", {"current_return": -250.0}, "c51", sets, others=0)), "value_range")
    assert found is not None
    assert (found.key, found.value) == (f"{ALGORITHM}.v_min", -200.0)
    result = diagnose_run(
        make_run(tmp_path / "normalised", {"current_return": -250.0}, "c51", sets | {"env.normalize_reward": True}, others=0)
    )
    assert "value_range" not in {*result.checked, *result.not_checked}


def test_rules_that_read_the_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, others=0)
    for rule, faulty, near in (
        ("observation_scale", {"obs": 101.0}, {"obs": -99.0}),
        ("saturated_actions", {"action": np.array([1.0] * 55 + [0.9] * 9)}, {"action": np.array([-1.0] * 54 + [0.9] * 10)}),
        ("dead_units", {"squares": [1.0] * 4 + [0.0] * 3 + [1e-11]}, {"squares": [1.0] * 4 + [0.0] * 3 + [1e-9]}),
    ):
        save_checkpoint(run, **faulty)  # type: ignore[arg-type]
        found = of_rule(diagnose(run), rule)
        assert found is not None
        assert found.key is not None
        assert of_rule(diagnose(run, checkpoints=False), rule) is None
        save_checkpoint(run, **near)  # type: ignore[arg-type]
        assert of_rule(diagnose(run), rule) is None
        assert rule in diagnose_run(run).checked or rule == "saturated_actions"


@pytest.mark.parametrize(
    "content",
    [
        {
            "policies": [{"weights": {}, "agent": {"algorithm": {"trainer": {"param": torch.zeros(2), "optimizers": [None]}}}}],
            "source": None,
        },
        {"policies": [{"agent": {"algorithm": {}}}], "source": {"open": None}},
        {"policies": [], "source": {"open": {"obs": torch.ones(1, 4), "rollout": {"rollout": {"slabs": {}}}}}},
        {},
    ],
    ids=["shared", "random", "none", "empty"],
)
def test_a_checkpoint_of_another_form_only_leaves_rules_out(content: dict[str, Any], tmp_path: Path) -> None:
    """Rules without data are skipped: workers of a shared net save no optimizer, and envs that cannot be saved have no observations."""
    run = make_run(tmp_path)
    path = run.paths.checkpoint(0, "last")
    assert isinstance(path, Path)
    bundle.save(path, {"version": bundle.VERSION, **content})
    result = diagnose_run(run)
    assert result.findings == ()
    assert {"dead_units", "observation_scale", "saturated_actions"} <= result.not_checked.keys()


def test_few_replays_and_old_data(tmp_path: Path) -> None:
    """Both sides of two thresholds: 0.5 replays with batches of 64, and a lag of 8 datasets with 4 minibatches and 4 epochs."""
    epochs = BODIES["appo"]["agent"]["algorithm"]["training_epoch"]
    assert BODIES["dqn"]["agent"]["memory"]["batch_size"] == 64
    for kind, column, low, high, fires_below in (
        ("dqn", "opt_step", 7.7, 7.9, True),
        ("appo", "lag_mean", 8 * 4 * epochs - 0.5, 8 * 4 * epochs + 0.5, False),
    ):
        rule = "replay_ratio" if kind == "dqn" else "policy_lag"
        for value in (low, high):
            columns: dict[str, Values] = {column: [value * (row + 1) for row in range(ROWS)] if kind == "dqn" else value}
            if kind == "appo":  # gradient steps of datasets of 4 minibatches of 256 frames
                columns["opt_step"] = [1000 / 1024 * 4 * epochs * (row + 1) for row in range(ROWS)]
            found = of_rule(diagnose(make_run(tmp_path / f"{kind}{value}", columns, kind, others=0)), rule)
            assert (found is not None) == ((value == low) == fires_below), (kind, value)


def test_policy_lag_counts_the_gradient_steps_of_all_agents(tmp_path: Path) -> None:
    """With 5 agents, a dataset of 4 × 256 frames has 5 times as many minibatches, which gives 4 × 5 × epochs gradient steps."""
    per_dataset = 4 * 5 * BODIES["appo"]["agent"]["algorithm"]["training_epoch"]
    steps = [1000 / 1024 * per_dataset * (row + 1) for row in range(ROWS)]
    for datasets, fires in ((7.9, False), (8.1, True)):
        run = make_run(tmp_path / str(datasets), {"opt_step": steps, "lag_mean": datasets * per_dataset}, "appo", others=0)
        assert (of_rule(diagnose(run), "policy_lag") is not None) == fires, datasets
    few = [step / 100 for step in steps]  # updates stopped early by target_kl: the number of steps in the spec counts
    run = make_run(tmp_path / "few", {"opt_step": few, "lag_mean": 7.9 * per_dataset / 5}, "appo", others=0)
    assert of_rule(diagnose(run), "policy_lag") is None


def test_staleness_of_workers_that_share_a_net(tmp_path: Path) -> None:
    """With two workers, up to two updates of the other worker are allowed on average (its own staleness is 1).

    The joint table of the workers has no session number.
    """
    stale = make_run(tmp_path / "stale", {"staleness": 5.1}, "a3c", {"meta.max_session": 2}, others=1)
    found = of_rule(diagnose(stale), "staleness")
    assert found is not None
    assert found.sessions == ()
    assert (
        of_rule(diagnose(make_run(tmp_path / "fresh", {"staleness": 2.9}, "a3c", {"meta.max_session": 2}, others=1)), "staleness") is None
    )
    assert of_rule(diagnose(stale), "seeds") is None


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    """With 3 sessions there is no finding; with 2 there is only the remark that the seeds are few."""
    for kind in ("ppo", "dqn", "appo"):
        run = make_run(tmp_path / kind, kind=kind)
        assert diagnose(run) == []
        assert "no problem found" in diagnosis_text(run, diagnose_run(run))
    (only,) = diagnose(make_run(tmp_path / "two", others=1))
    assert (only.rule, only.severity) == ("seeds", "remark")


def test_seeds_of_a_study_are_in_its_other_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path, others=0)
    assert [finding.rule for finding in diagnose(run)] == ["seeds"]
    (tmp_path / "study_run.json").write_text("{}")
    assert diagnose(run) == []


def test_findings_are_ranked_by_severity_and_then_from_cause_to_symptom(tmp_path: Path) -> None:
    faults: dict[str, Values] = {"approx_kl": 0.5, "explained_variance": 0.0, "epi_len_max": 200.0} | POOR
    found = diagnose(make_run(tmp_path, faults, sets={f"{ALGORITHM}.gamma": 0.5}, others=0))
    assert [(finding.rule, finding.severity) for finding in found] == [
        *[(rule, "problem") for rule in ("discount", "large_updates", "baseline")],
        *[(rule, "warning") for rule in ("truncation", "critic")],
        ("seeds", "remark"),
    ]


def test_a_single_large_update_makes_the_policy_stop(tmp_path: Path) -> None:
    """The finding names the cause, a large update, instead of the small updates that follow it."""
    columns: dict[str, Values] = {"approx_kl": [31.7] + [0.0] * 19, "clip_fraction": [0.9] + [0.0] * 19, "entropy": [0.6] + [1e-9] * 19}
    found = diagnose(make_run(tmp_path, columns | POOR, others=0))
    assert [finding.rule for finding in found if finding.key == LR] == ["large_updates", "entropy_lost"]
    assert of_rule(found, "small_updates") is None


@pytest.mark.parametrize(("last", "reported"), [(9.0, True), (1.5, False)])
def test_a_rising_entropy_of_continuous_actions(last: float, reported: bool, tmp_path: Path) -> None:
    """Differential entropy has no upper bound: at a constant rise, the entropy in the second half stays below 95 % of the largest value."""
    bonus = {f"{ALGORITHM}.entropy_coef_spec.start_val": 0.1}
    run = make_run(tmp_path, {"entropy": list(np.linspace(3.0, last, ROWS))} | POOR, sets=bonus, others=0)
    save_checkpoint(run, action=np.zeros((64, 2), np.float32))
    assert (of_rule(diagnose(run), "entropy_high") is not None) == reported


def test_a_small_entropy_of_continuous_actions_is_usual(tmp_path: Path) -> None:
    """Differential entropy has no lower bound: 0.01 nats correspond to a standard deviation of 0.24.

    Without a checkpoint, a negative entropy shows that the actions are continuous.
    """
    columns: dict[str, Values] = {"entropy": [1.4] + [0.01] * 19} | POOR
    assert of_rule(diagnose(make_run(tmp_path / "discrete", columns, others=0)), "entropy_lost") is not None
    run = make_run(tmp_path / "checkpoint", columns, others=0)
    save_checkpoint(run, action=np.zeros(64))
    assert of_rule(diagnose(run), "entropy_lost") is None
    columns["entropy"] = [1.4] + [0.01] * 18 + [-0.1]
    assert of_rule(diagnose(make_run(tmp_path / "negative", columns, others=0)), "entropy_lost") is None


def test_the_advice_of_two_findings_agrees(tmp_path: Path) -> None:
    """With a learning rate above 0.003, a useless critic must not lead to the advice to raise it."""
    columns: dict[str, Values] = {"approx_kl": 0.5, "explained_variance": 0.0} | POOR
    for rate, rises in ((0.2, False), (0.001, True)):
        found = of_rule(diagnose(make_run(tmp_path / str(rate), columns, sets={LR: rate}, others=0)), "critic")
        assert found is not None
        assert (found.key, found.value > rate) == (LR, rises)


def test_a_minority_of_sessions_lowers_the_severity(tmp_path: Path) -> None:
    """A fault in one of four sessions is a warning that names the session; in one of two it is a problem."""
    for others, severity in ((3, "warning"), (1, "problem")):
        run = make_run(tmp_path / str(others), {"approx_kl": 0.5}, others=others)
        found = of_rule(diagnose(run), "large_updates")
        assert found is not None
        assert (found.severity, found.sessions) == (severity, (0,))
        assert "(session 0)" in diagnosis_text(run, diagnose_run(run))


def test_a_solved_task_is_no_fault(tmp_path: Path) -> None:
    """CartPole at its limit: all episodes are truncated at one length, the entropy is near 0, and the critic explains nothing."""
    solved: dict[str, Values] = {
        "current_return": half(250.0, 500.0),
        "epi_len": half(250.0, 500.0),
        "epi_len_max": 500.0,
        "epi_truncated": half(0.5, 1.0),
        "explained_variance": -10.0,
        "entropy": [0.6] * 5 + [0.001] * 15,
    }
    assert diagnose(make_run(tmp_path, solved)) == []


def test_missing_and_torn_files_only_leave_rules_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, {"approx_kl": 0.5}, others=0)
    save_checkpoint(run)
    checkpoint, table = run.paths.checkpoint(0, "last"), run.paths.session_df(0)
    assert isinstance(checkpoint, Path)
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: len(content) // 2])
    result = diagnose_run(Run(run.paths))
    assert of_rule(result.findings, "large_updates") is not None
    assert "dead_units" in result.not_checked
    lines = table.read_text().splitlines(keepends=True)
    for text, rows in (("".join(lines[:3]) + lines[3][:20], 2), (lines[0], 0), ("", 0), ("a,b\n1,2\n", 0)):
        table.write_text(text)
        found = diagnose_run(Run(run.paths))
        assert [finding.rule for finding in found.findings] == (["seeds"] if rows else [])
        assert "large_updates" in found.not_checked
    table.unlink()
    run.paths.trial_metrics().write_text("{")
    assert diagnose(Run(run.paths)) == []
    run.paths.spec.write_text("{")
    with pytest.raises(UserError):
        diagnose(Run(run.paths))


def test_a_run_without_the_columns_of_episodes(tmp_path: Path) -> None:
    """Runs of earlier versions or of SLM Lab lack these columns; the episode length is then computed as frames per episode."""
    run = make_run(tmp_path, {"current_return": 10_100.0}, others=0)
    table = run.paths.session_df(0)
    lines = [line.split(",") for line in table.read_text().splitlines()]
    kept = [column for column, name in enumerate(lines[0]) if not name.startswith("epi_")]
    table.write_text("".join(",".join(line[column] for column in kept) + "\n" for line in lines))
    result = diagnose_run(load_run(run.paths.root))
    assert of_rule(result.findings, "reward_scale") is not None
    assert not {"truncation", "time_limit"} & {*result.checked, *result.not_checked}


def test_what_is_poor_early_may_be_usual(tmp_path: Path) -> None:
    """Before half of env.max_frame (80,000), returns and values are not judged, but the size of updates is."""
    columns: dict[str, Values] = {"explained_variance": 0.0, "approx_kl": 0.5} | POOR
    for frames, expected in ((41_000, ["large_updates"]), (40_000, ["large_updates", "baseline", "critic"])):
        run = make_run(tmp_path / str(frames), columns, sets={"env.max_frame": frames}, others=0)
        assert [finding.rule for finding in diagnose(run) if finding.severity != "remark"] == expected


def test_a_rule_names_itself_and_its_source() -> None:
    for rule in (*doctor.RULES, *doctor.TRIAL_RULES):
        assert rule.__doc__ is not None
        assert any(year in rule.__doc__ for year in map(str, range(1998, 2030))), rule.__name__


def test_the_page_lists_the_rules_in_the_order_of_their_ranks() -> None:
    page = (SPECS.parents[1] / "docs" / "doctor.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert listed == [rule.__name__ for rule in (*doctor.RULES, *doctor.TRIAL_RULES)]


def test_the_return_is_that_of_evaluations_if_there_are_any(tmp_path: Path) -> None:
    run = make_run(tmp_path, POOR, others=0)
    assert of_rule(diagnose(run), "baseline") is not None
    run.paths.session_df(0, "eval").write_text("frame,current_return,current_return_se\n10000,20,5\n20000,180,5\n")
    assert of_rule(diagnose(Run(run.paths)), "baseline") is None


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["doctor", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_fits_80_columns_and_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, {"approx_kl": 0.5, "epi_len_max": 200.0}, sets={f"{ALGORITHM}.gamma": 0.5}, others=0)
    code, out, err = run_command(capsys, str(run.paths.root))
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert f"--set {ALGORITHM}.gamma=0.99\n" in out
    assert out.index("1. problem") < out.index("2. problem") < out.index("3. warning")


def test_json_has_stable_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, {"approx_kl": 0.5}, others=0)
    code, out, _ = run_command(capsys, str(run.paths.root), "--json")
    content = json.loads(out)
    assert code == 0
    assert set(content) == {"run", "spec", "trial", "status", "findings", "checked", "not_checked"}
    (finding,) = [one for one in content["findings"] if one["rule"] == "large_updates"]
    keys = {"rule", "title", "severity", "evidence", "advice", "key", "value", "sessions", "frames", "set"}
    assert set(finding) == keys
    assert finding["set"] == f"--set {finding['key']}={finding['value']:g}"
    assert (finding["key"], finding["sessions"], finding["frames"]) == (LR, [0], [1000, 10000])


def test_a_run_without_rows_cannot_be_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, {}, others=0)
    table = run.paths.session_df(0)
    table.write_text(table.read_text().splitlines(keepends=True)[0])
    code, out, err = run_command(capsys, str(run.paths.root))
    assert (code, out) == (2, "")
    assert f"{run.paths.root} has no rows to examine (status: done)" in err
    assert str(table) in err
    assert "no problem found" not in diagnosis_text(Run(run.paths), diagnose_run(Run(run.paths)))
    assert diagnosis(Run(run.paths)) is None, "not [], which the page would show as no fault"


def test_the_command_takes_the_trial_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trial given by its number needs no checkpoint; a trial that does not exist is a user error."""
    for trial, divergence in ((0, 0.01), (1, 0.5)):
        run = make_run(tmp_path, {"approx_kl": divergence}, others=2, trial=trial)
    trials = [TrialState(trial, {}, 0, "finished") for trial in (0, 1)]
    SearchState("current_return", None, False, trials).save(run.paths.search_state)
    assert "no problem found" in run_command(capsys, str(run.paths.root), "--trial", "0")[1]
    assert "The policy changes too much" in run_command(capsys, str(run.paths.root), "--trial", "1")[1]
    for words in (("--trial", "7"), ("--trial", "1", "--entry", "PPO"), ()):
        assert run_command(capsys, str(run.paths.root), *words)[0] == 2


@pytest.mark.parametrize("words", [(), ("nowhere",), ("one", "two"), ("nowhere", "--episodes", "3")])
def test_errors_of_the_user(words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_command(capsys, *words, "--data-dir", str(tmp_path))
    assert (code, out) == (2, "")
    assert err
