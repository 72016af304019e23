from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slm_lab.experiment import checkpoint
from slm_lab.experiment.observers import DevCheckError
from slm_lab.experiment.paths import RunPaths, new_run
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.session import Session
from slm_lab.experiment.sessions import check_builds
from slm_lab.lib.records import Metrics
from slm_lab.spec.base import SpecError
from slm_lab.spec.spec import Spec

MakeSpec = Callable[..., Spec]


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_it_ends_at_the_first_step_at_or_past_its_frames(make_spec: MakeSpec) -> None:
    result = Session(make_spec(env={"num_envs": 3}, meta={"log_frequency": 400})).run()
    assert [row["frame"] for row in result.rows] == [402, 801, 1002]
    assert (result.frame, result.interrupted) == (1002, False)
    assert all(row["t"] * 3 == row["frame"] for row in result.rows)
    assert result.rows[-1]["opt_step"] > 0


def test_alone_it_takes_all_frames_of_a_distributed_spec(make_spec: MakeSpec) -> None:
    spec = make_spec()
    sets = {"distributed": "synced", "max_session": 4}
    session = Session(spec.model_copy(update={"meta": spec.meta.model_copy(update=sets)}))
    assert session.run().frame == Session(spec).run().frame >= spec.env.max_frame
    assert session._best()["global_frame"] == session.clock.frame


def test_the_same_seed_gives_the_same_bytes_and_another_session_others(make_spec: MakeSpec, tmp_path: Path) -> None:
    """Defect 10: seeds are never set."""

    def run(name: str, index: int) -> list[dict[str, str]]:
        (tmp_path / name).mkdir()
        paths = RunPaths(tmp_path / name, "small")
        paths.make_dirs()
        Session(make_spec(), index).run(paths)
        return [{key: value for key, value in row.items() if key not in ("wall_t", "fps")} for row in table(paths.session_df(index))]

    first = run("a", 0)
    assert first == run("b", 0)
    assert first != run("c", 1)
    assert float(first[-1]["total_reward"]) > 0


def test_files_of_a_session(make_spec: MakeSpec, tmp_path: Path) -> None:
    paths = new_run(tmp_path, "small")
    session = Session(make_spec(meta={"rigorous_eval": 2, "eval_frequency": 500}))
    session.run(paths)
    assert [row["frame"] for row in table(paths.session_df(0))] == ["252", "500", "752", "1000"]
    assert [row["frame"] for row in table(paths.session_df(0, "eval"))] == ["500", "1000"]
    bundle = checkpoint.load(paths.checkpoint(0, "last"))
    assert bundle["clock"]["frame"] == 1000
    assert bundle["observers"]["Recorder"]["table"]["frame"] == 1000
    assert {"agent", "env", "rng"} <= bundle.keys()
    best = checkpoint.load(paths.checkpoint(0, "best"))
    assert best["total_reward_ma"] == max(row["total_reward_ma"] for row in session.result.eval_rows)
    session.agent.load_weights(best["weights"])
    assert list(paths.tensorboard(0).iterdir())


def test_evaluation_leaves_the_training_as_it_is(make_spec: MakeSpec) -> None:
    def losses(**meta: int) -> list[object]:
        return [row["loss"] for row in Session(make_spec(meta=meta)).run().rows]

    assert losses(rigorous_eval=2, eval_frequency=100) == losses()


def test_a_stop_saves_first_and_then_writes_the_row_of_the_end(make_spec: MakeSpec, tmp_path: Path) -> None:
    class StopAt500(Stop):
        @property
        def requested(self) -> bool:
            return session.clock.frame >= 500

    paths = new_run(tmp_path, "small")
    session = Session(make_spec(meta={"log_frequency": 300}, env={"max_frame": 10**9}), stop=StopAt500.__new__(StopAt500))
    assert session.run(paths).interrupted
    assert [row["frame"] for row in table(paths.session_df(0))] == ["300", "500"]
    bundle = checkpoint.load(paths.checkpoint(0, "last"))
    assert bundle["clock"]["frame"] == 500
    assert bundle["observers"]["Recorder"]["table"]["frame"] == 300, "a run that goes on must not see a row off the grid"


def test_dev_fails_where_nothing_learns(make_spec: MakeSpec) -> None:
    Session(make_spec(), plan=Plan(mode="dev")).run()
    with pytest.raises(DevCheckError, match="before the first update"):
        Session(make_spec(env={"max_frame": 100}), plan=Plan(mode="dev")).run()
    session = Session(make_spec(), plan=Plan(mode="dev")).build()
    session.agent.update = lambda: Metrics(0.0, 0.0)  # type: ignore[method-assign]
    session.agent.ready = lambda: True  # type: ignore[method-assign]
    with pytest.raises(DevCheckError, match="no weight moved"):
        session.run()


def test_a_bare_session_leaves_torch_as_it_was(make_spec: MakeSpec) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Session(make_spec(env={"max_frame": 100})).run()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_session_computes_on_one_thread(make_spec: MakeSpec) -> None:
    """Defect 4: workers that each use all cores slow one another down."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    session = Session(make_spec()).build()
    try:
        assert torch.get_num_threads() == 1
    finally:
        session.close()
        torch.set_num_threads(before)


def test_an_absent_device_is_the_users_to_put_right(make_spec: MakeSpec) -> None:
    with pytest.raises(UserError, match="cuda device"):
        Session(make_spec(), plan=Plan(device="cuda:99")).build()


def test_check_builds_tells_the_problems_of_all_specs(make_spec: MakeSpec) -> None:
    wrong = make_spec(env={"name": "Pendulum-v1", "gravitas": 1}).model_copy(update={"name": "pendulum"})
    with pytest.raises(SpecError, match=r"pendulum\.env\.gravitas"):
        check_builds([make_spec(), wrong, make_spec()], Plan(), "specs.json")


def test_a_drawn_seed_is_told_and_kept(make_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    session = Session(make_spec(meta={"random_seed": None}, env={"max_frame": 100})).build()
    seed = session.spec.meta.random_seed
    assert seed is not None
    assert f"small: random_seed {seed}, drawn" in caplog.text
    first, again = session.run(), Session(make_spec(meta={"random_seed": seed}, env={"max_frame": 100})).run()
    assert [row["total_reward"] for row in first.rows] == [row["total_reward"] for row in again.rows]


def test_a_session_runs_twice_the_same(make_spec: MakeSpec) -> None:
    session = Session(make_spec(env={"max_frame": 300}))
    first = session.run()
    again = session.run()
    assert first is not again
    assert [row["total_reward"] for row in first.rows] == [row["total_reward"] for row in again.rows]


def test_a_stopped_evaluation_is_none(make_spec: MakeSpec) -> None:
    """The episodes that finish first are the shortest: their mean would be no estimate."""
    session = Session(make_spec(meta={"rigorous_eval": 3})).build()
    try:
        assert session._evaluate() is not None
        session.stop.requested = True
        assert session._evaluate() is None
    finally:
        session.close()


def test_divergence_is_noticed_once(make_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    session = Session(make_spec()).build()
    session.agent.update = lambda: Metrics(float("nan"), 1.0)  # type: ignore[method-assign]
    session.agent.ready = lambda: True  # type: ignore[method-assign]
    session.run()
    assert sum("training has diverged" in message for message in caplog.messages) == 1
