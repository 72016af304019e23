"""Tests of runs with env.schedule: contents of the rows, evaluation, exact resume, and every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slm_lab
from slm_lab.cli import main
from slm_lab.experiment.session.session import Session
from tests.env.toys import PREFIX
from tests.resume.runs import bundle, differing, rows, small, train

ENV = PREFIX + "Course-v0"
SCHEDULE = {
    "length": [[0, 9], [300, 5], [600, 3]],
    "bonus": {"by": "return", "start": 0.0, "steps": [[8, 0.5], [4, 1.0]], "episodes": 10},
    "label": [[0, "easy"], [500, "hard"]],
}
ROUNDS = {"async_rl": False, "num_workers": 2, "num_envs_per_worker": 2}
WORKERS = {"algorithm": {"time_horizon": 16, "minibatch_size": 32}}


def course(meta: dict[str, Any] | None = None, **sections: Any) -> Any:
    env = {"num_envs": 2, "schedule": SCHEDULE} if "sampler" not in (meta or {}) else {"schedule": SCHEDULE}
    return small("PPO", ENV, 900, **{"algorithm": {"time_horizon": 32, "minibatch_size": 32}, **sections}, env=env, meta=meta or {})


def test_rows_say_what_held_and_evaluation_has_the_last_values() -> None:
    session = Session(course({"rigorous_eval": 2, "eval_frequency": 300}))
    result = session.run()
    lengths = [float(row["env_length"]) for row in result.rows]  # type: ignore[arg-type]
    assert lengths[:3] == [9.0, 9.0, 9.0]
    assert 5.0 <= lengths[3] < 9.0  # some episodes of this row began before frame 300
    assert lengths[4:6] == [5.0, 5.0]
    assert lengths[7:] == [3.0] * len(lengths[7:])
    assert [row["epi_len"] for row in result.rows] == lengths
    bonus = [float(row["env_bonus"]) for row in result.rows]  # type: ignore[arg-type]
    assert bonus == sorted(bonus)
    assert bonus[0] < 0.5
    assert bonus[-1] == 1.0
    assert [row["env_label"] for row in result.rows][-1] == 1.0
    assert {row["total_reward"] for row in result.eval_rows} == {6.0}  # three steps of 1 + bonus


@pytest.mark.parametrize(
    "meta",
    [{}, pytest.param({"sampler": ROUNDS}, marks=pytest.mark.slow), pytest.param({"sampler": {**ROUNDS, "serial_mode": True}})],
    ids=["here", "rounds", "serial"],
)
def test_stopped_and_continued_equals_straight(meta: dict[str, Any], tmp_path: Path) -> None:
    spec = course(meta, **WORKERS)
    _, one = train(spec, tmp_path / "straight")
    _, other = train(spec, tmp_path / "stopped", (333, 555))
    assert rows(one.session_df(0)) == rows(other.session_df(0))
    assert {row["env_length"] for row in rows(one.session_df(0))} >= {"9", "3"}
    assert differing(bundle(one), bundle(other)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "meta",
    [{"sampler": {"num_workers": 1, "num_envs_per_worker": 2}}, {"distributed": "shared", "max_session": 2}],
    ids=["asynchronous workers", "Hogwild"],
)
def test_every_engine_follows_the_frames_of_all_processes(meta: dict[str, Any], tmp_path: Path) -> None:
    paths = slm_lab.Trial(course(meta, **WORKERS), tmp_path).run().paths
    for index in range(meta.get("max_session", 1)):
        lengths = [float(row["env_length"]) for row in rows(paths.session_df(index)) if row["env_length"]]
        assert lengths[0] == 9.0
        assert lengths[-1] < 5.0


def test_a_key_that_the_env_does_not_take_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, env = tmp_path / "spec.json", {"name": ENV, "max_frame": 5000, "schedule": {"lenght": [[0, 3]]}}
    file.write_text(json.dumps({"s": {"agent": {"algorithm": {"name": "PPO"}}, "env": env}}))
    assert main([str(file), "s", "train", "--data-dir", str(tmp_path)]) == 2
    assert "env.schedule.lenght: the env has no argument and no attribute 'lenght'; did you mean 'length'" in capsys.readouterr().err
