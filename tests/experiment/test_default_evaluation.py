"""Tests of evaluation with meta.eval_episodes: number of episodes, no effect on training, and the results that use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths, new_run
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.report.analyze import analyze_trial, return_text
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.seed_result import seed_results
from slm_lab.experiment.run.search.search import Search
from slm_lab.experiment.run.trial import Trial, _summary
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.evaluate import EvaluationPlan, plan_evaluation
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.commands import rows

MakeSpec = Callable[..., Spec]
PPO_500 = {"env": {"num_envs": 8, "max_frame": 500_000}}
DQN: dict[str, Any] = {
    "agent": {
        "name": "DQN",
        "algorithm": {
            "name": "DQN",
            "explore_var_spec": {"name": "linear_decay", "start_val": 1.0, "end_val": 0.1, "end_step": 1000},
            "training_iter": 2,
            "training_frequency": 4,
        },
        "memory": {"name": "Replay", "batch_size": 8, "max_size": 100},
        "net": {"type": "MLPNet", "hid_layers": [8], "hid_layers_activation": "relu"},
    },
    "env": {"name": "CartPole-v1", "max_frame": 166_667},
    "meta": {},
}


@pytest.mark.parametrize(
    ("frames", "envs", "limit", "episodes"),
    [
        (500_000, 8, 500, 3),  # 0.024 · 500,000 frames / (8 evaluations · 500 steps) = 3
        (499_999, 8, 500, 0),
        (10_000_000, 8, 500, 5),
        (500_000, 8, 100, 5),
        (500_000, 8, None, 0),
        (500_000, 1, 500, 3),
        (500_000, 16, 500, 0),  # with 16 envs, a frame costs half as much
        (1_000_000, 16, 500, 3),
    ],
)
def test_as_many_episodes_as_take_three_percent(make_spec: MakeSpec, frames: int, envs: int, limit: int | None, episodes: int) -> None:
    spec = make_spec(env={"num_envs": envs, "max_frame": frames})
    expected = EvaluationPlan(episodes, frames // 8, True) if episodes else None
    assert plan_evaluation(spec, frames, limit) == expected


def test_updates_of_an_off_policy_algorithm_count() -> None:
    """With half an update per frame, a frame costs as much as 1 + 4 · 0.5 env steps."""
    spec = load_spec({"dqn": DQN}, "dqn")
    assert plan_evaluation(spec, 166_667, 500) == EvaluationPlan(3, 20_834, True)
    assert plan_evaluation(spec, 166_666, 500) is None


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"eval_episodes": 0}, None),
        ({"eval_episodes": 5}, EvaluationPlan(5, 62_500, True)),
        ({"rigorous_eval": 2}, EvaluationPlan(2, 10_000, False)),
        ({"rigorous_eval": 0}, None),
        ({"eval_frequency": 1000}, None),
        ({"rigorous_eval": 0, "eval_episodes": "auto"}, EvaluationPlan(3, 62_500, True)),
    ],
)
def test_given_keys(make_spec: MakeSpec, meta: dict[str, Any], expected: EvaluationPlan | None) -> None:
    """Keys given in the spec take effect, and the saved spec has the same evaluation plan as the spec that was run."""
    spec = make_spec(**PPO_500, meta=meta)
    again = load_spec(dump_spec(spec), "small")
    assert plan_evaluation(spec, 500_000, 500) == plan_evaluation(again, 500_000, 500) == expected
    assert spec.meta.may_evaluate == again.meta.may_evaluate == (expected is not None)


class Exclusive(gym.Env[np.ndarray, int]):
    """Env that can exist only once at a time, like an env that binds a port."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)
    alive = 0

    def __init__(self) -> None:
        if Exclusive.alive:
            raise OSError("address already in use")
        Exclusive.alive += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def close(self) -> None:
        Exclusive.alive -= 1


gym.register("Exclusive-v0", Exclusive, max_episode_steps=100)


def test_an_env_that_cannot_exist_twice(make_spec: MakeSpec) -> None:
    """The error says that evaluation needs a second env, and how to train without evaluation."""
    name = f"{__name__}:Exclusive-v0"
    with pytest.raises(SpecError, match=r"address already in use.*meta\.eval_episodes=0"):
        Session(make_spec(env={"name": name, "num_envs": 1, "max_frame": 500_000})).build()
    session = Session(make_spec(env={"name": name, "num_envs": 1, "max_frame": 500_000}, meta={"eval_episodes": 0})).build()
    session.close()
    assert Exclusive.alive == 0


def test_both_forms_of_evaluation_exclude_each_other(spec_body: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec({"it": spec_body(meta={"rigorous_eval": 2, "eval_episodes": 3})}, "it")
    assert [problem.path for problem in caught.value.problems] == ["meta.eval_episodes"]


@pytest.fixture
def run_paths(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path / "data", "small")


def test_eight_evaluations_leave_training_as_it_is(make_spec: MakeSpec, run_paths: RunPaths) -> None:
    """The last evaluation is at the last frame; evaluations select the best checkpoint and set the current return, but no other metric."""
    specs = [make_spec(meta={"eval_episodes": episodes}) for episodes in (3, 0)]
    for trial, spec in enumerate(specs):
        sink = LocalSink(run_paths, trial)
        Session(spec).run(sink)
        sink.close()
    with_evaluation, without = (rows(run_paths.session_df(0, t=trial)) for trial in (0, 1))
    assert with_evaluation == without
    evaluations = rows(run_paths.session_df(0, "eval"))
    assert [int(row["frame"]) for row in evaluations] == [128, 252, 376, 500, 628, 752, 876, 1000]
    assert {row["epi_new"] for row in evaluations} == {"3"}
    best = state.load(run_paths.checkpoint(0, "best"))
    returns = [float(row["current_return"]) for row in evaluations]
    assert (best["mode"], best["current_return"], best["frame"]) == (
        "eval",
        pytest.approx(max(returns)),
        int(evaluations[np.argmax(returns)]["frame"]),
    )
    results = [analyze_trial(spec, run_paths, trial) for trial, spec in enumerate(specs)]
    assert (results[0]["evaluated"], results[1]["evaluated"]) == (True, False)
    assert results[0]["current_return"] == returns[-1] != results[1]["current_return"]
    own = ("current_return", "current_return_se", "evaluated")
    assert [{key: value for key, value in one.items() if key not in own} for one in results[:1]] == [
        {key: value for key, value in results[1].items() if key not in own}
    ]
    assert "(evaluation)" in return_text(results[0], specs[0])
    assert "(evaluation" not in return_text(results[1], specs[1])


def test_an_old_evaluation_is_not_the_current_return(make_spec: MakeSpec, run_paths: RunPaths) -> None:
    """In a run stopped after 1,000 frames, an evaluation at frame 800 is the current return; one at frame 796 is too old."""
    spec = make_spec(meta={"eval_episodes": 3})
    for last, evaluated in ((800, True), (796, False)):
        tables = {"train": [(500, 10.0), (1000, 20.0)], "eval": [(400, 30.0), (last, 40.0)]}
        for mode, points in tables.items():
            lines = [f"{frame},{value},{value},{value},1.5,5" for frame, value in points]
            header = "frame,total_reward,total_reward_ma,current_return,current_return_se,current_epi"
            run_paths.session_df(0, mode).write_text("\n".join([header, *lines]) + "\n")  # type: ignore[arg-type]
        metrics = analyze_trial(spec, run_paths)
        assert (metrics["evaluated"], metrics["current_return"]) == (evaluated, 40.0 if evaluated else 20.0)
        assert metrics["final_return"] == 20.0


def test_compare_takes_the_last_evaluation_and_draws_training(make_spec: MakeSpec, tmp_path: Path, no_baseline: None) -> None:
    result = Trial(make_spec(meta={"eval_episodes": 2}), tmp_path).run()
    (seed,) = seed_results(Run(result.paths))
    evaluations, train = rows(result.paths.session_df(0, "eval")), rows(result.paths.session_df(0))
    assert seed.final_return() == pytest.approx(float(evaluations[-1]["current_return"]))
    np.testing.assert_allclose(seed.curve("current_return", "frame").value, [float(row["current_return"]) for row in train])
    assert seed.threshold_rule == "return_new"


def test_a_search_makes_none_by_default(make_spec: MakeSpec, tmp_path: Path) -> None:
    body = dump_spec(make_spec(**PPO_500, meta={"max_trial": 2}))
    body["small"]["search"] = {"agent": {"algorithm": {"gamma__uniform": [0.9, 0.99]}}}
    for given, expected in (("auto", 0), (4, 4)):
        body["small"]["meta"]["eval_episodes"] = given
        search = Search(load_spec(body, "small"), Plan(data_dir=tmp_path))
        assert search.trial_spec({"agent.algorithm.gamma": 0.95}).meta.eval_episodes == expected
        best = search.space.trial_spec({"agent.algorithm.gamma": 0.95})
        assert best.meta.eval_episodes == given, "the spec of the best trial, which is trained for longer"
        assert search.state.metric == "current_return"


@pytest.mark.parametrize(
    "meta",
    [
        {"distributed": "synced", "max_session": 2},
        {"sampler": {"serial_mode": True, "async_rl": False, "num_workers": 2, "num_envs_per_worker": 2}},
    ],
    ids=["distributed", "sampler"],
)
def test_every_way_of_training_evaluates(make_spec: MakeSpec, tmp_path: Path, no_baseline: None, meta: dict[str, Any]) -> None:
    result = Trial(make_spec(env={"max_frame": 1024}, meta={**meta, "eval_episodes": 2}), tmp_path).run()
    assert result.metrics["evaluated"] is True
    assert "evaluated" not in "".join(_summary(result.metrics, 1)), "it is no number"
    frames, in_turn = (512, 32) if "distributed" in meta else (1024, 0)
    for index in result.paths.table_numbers():
        expected = [*range(frames // 8 - in_turn * index, frames, frames // 8), frames]
        assert [int(row["frame"]) for row in rows(result.paths.session_df(index, "eval"))] == expected


def test_a_spec_of_slm_lab_is_not_evaluated_by_default() -> None:
    body = {
        "agent": [{"name": "Reinforce", "algorithm": {"name": "Reinforce", "action_pdtype": "default", "action_policy": "default",
                   "explore_var_spec": None, "gamma": 0.99, "entropy_coef_spec": None, "training_frequency": 1},
                   "memory": {"name": "OnPolicyReplay"},
                   "net": {"type": "MLPNet", "hid_layers": [8], "hid_layers_activation": "relu", "clip_grad_val": None,
                           "loss_spec": {"name": "MSELoss"}, "optim_spec": {"name": "Adam", "lr": 0.002}, "lr_scheduler_spec": None}}],
        "env": [{"name": "CartPole-v0", "max_t": None, "max_frame": 10_000_000}],
        "body": {"product": "outer", "num": 1},
        "meta": {"distributed": False, "log_frequency": 1000, "max_session": 1, "max_trial": 1},
    }  # fmt: skip
    spec = load_spec({"old": body}, "old")
    assert not spec.meta.may_evaluate
    assert not load_spec(dump_spec(spec), "old").meta.may_evaluate
