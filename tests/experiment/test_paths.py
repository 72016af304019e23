from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from slm_lab.experiment.files import paths as paths_module
from slm_lab.experiment.files.find import find_run
from slm_lab.experiment.files.paths import RunPaths, new_comparison, new_run, parse_folder_time, run_paths_in, runs_of_spec
from slm_lab.experiment.plan import UserError


def test_names_of_a_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "ppo")
    assert paths.spec == tmp_path / "ppo_spec.json"
    assert paths.trial_graph("mean_returns", "html") == tmp_path / "ppo_t0_trial_graph_mean_returns_vs_frames.html"
    assert paths.report == paths.trial_report() == tmp_path / "report.html"
    assert paths.session_df(1) == tmp_path / "info/ppo_t0_s1_session_df_train.csv"
    assert paths.timeline(1) == tmp_path / "info/ppo_t0_s1_timeline.csv"
    assert paths.timeline_graph(1, "png", 2) == tmp_path / "graph/ppo_t2_s1_session_graph_timeline.png"
    assert paths.pbt(1, 2) == tmp_path / "info/ppo_t2_s1_pbt.csv"
    assert paths.checkpoint(0, "best") == tmp_path / "model/ppo_t0_s0_ckpt-best.pt"


def test_sessions_with_a_table(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "ppo")
    for index in (10, 2, 0):
        paths.session_df(index).touch()
    paths.session_df(3, "eval").touch()
    RunPaths(paths.root, "ppo_other").session_df(7).touch()
    assert paths.table_numbers() == [0, 2, 10]
    assert paths.table_numbers("eval") == [3]


def test_the_folder_of_a_single_confirmation_holds_trials(tmp_path: Path) -> None:
    search = new_run(tmp_path, "ppo")
    search.search_state.touch()
    for root, expected in ((search.confirmation, True), (tmp_path / "confirm", False)):
        paths = RunPaths(root, "ppo")
        paths.info_dir.mkdir(parents=True)
        paths.session_df(0, t=3).touch()
        assert (paths.trials(), paths.has_several_trials) == ([3], expected)


def test_policies_are_told_from_sessions(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "ppo")
    paths.spec.write_text('{"ppo": {"meta": {"sampler": {"num_policies": 3}}}}')
    assert paths.session_df(4) == paths.info_dir / "ppo_t0_s1_p1_session_df_train.csv"
    assert paths.checkpoint(2, "best").name == "ppo_t0_s0_p2_ckpt-best.pt"
    assert paths.pbt(1).name == "ppo_t0_s1_pbt.csv"
    for index in (4, 0):
        paths.session_df(index).touch()
    assert (paths.table_numbers(), paths.trials()) == ([0, 4], [0])


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 1, 1, 23, 59, 59)

    monkeypatch.setattr(paths_module, "datetime", Still)
    first, second = new_run(tmp_path, "ppo"), new_run(tmp_path, "ppo")
    assert first.root.name == "ppo_2026_01_01_235959"
    assert second.root.name == "ppo_2026_01_02_000000"
    assert runs_of_spec(tmp_path, "ppo") == [first.root, second.root]


def test_the_time_in_the_name_of_a_folder() -> None:
    assert parse_folder_time("a_2026_b_2026_01_31_235959") == datetime(2026, 1, 31, 23, 59, 59)
    for name in ("ppo", "2026_01_31_235959", "ppo_2026_02_31_235959", "ppo_2026_1_31_235959", "ppo_2026_01_31_235959_1"):
        assert parse_folder_time(name) is None, name


def test_runs_are_of_that_spec_alone(tmp_path: Path) -> None:
    mine = new_run(tmp_path, "ppo").root
    new_run(tmp_path, "ppo_cartpole")
    (tmp_path / "ppo_notes").mkdir()
    assert runs_of_spec(tmp_path, "ppo") == [mine]
    assert runs_of_spec(tmp_path / "nowhere", "ppo") == []


def test_names_that_look_the_same_in_file_names(tmp_path: Path) -> None:
    """Each name finds only its own runs, including the latest one; a folder of another name is not among them."""
    made = {}
    for name in ("a_b", "a+b", "a b"):
        made[name] = new_run(tmp_path, name)
        made[name].spec.write_text(json.dumps({name: {}}))
    for name, paths in made.items():
        assert paths.stem == "a_b"
        assert runs_of_spec(tmp_path, name) == [paths.root]
        assert find_run("latest", name, tmp_path) == paths
        assert find_run(paths.root.name, name, tmp_path) == paths
    with pytest.raises(UserError, match=r"no run of 'a\+b' in the folder"):
        find_run(str(made["a_b"].root), "a+b", tmp_path)
    with pytest.raises(UserError, match="no run of mode train of 'a=b'"):
        find_run("latest", "a=b", tmp_path)
    made["a b"].spec.write_text("{half")
    assert runs_of_spec(tmp_path, "a b") == [made["a b"].root], "whoever loads it says what is wrong"


def test_a_run_whose_name_has_the_value_of_a_variable(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "ppo_pong")
    paths.spec.write_text('{"ppo_pong": {}}')
    for where in ("latest", paths.root.name):
        with pytest.raises(UserError, match=r"did you mean ppo_pong\?"):
            find_run(where, "ppo", tmp_path)


def test_a_name_stays_inside_the_data_folder(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "../../evil name")
    assert paths.root.parent == tmp_path
    assert paths.spec.parent == paths.root


def test_the_run_that_wrote_a_folder(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "ppo_t0 x")
    assert run_paths_in(paths.root) is None
    for path in (paths.trial_spec(), paths.spec, paths.trial_spec(12)):
        path.touch()
    assert run_paths_in(paths.root) == RunPaths(paths.root, "ppo_t0_x")
    for t in (0, 12, 12):
        paths.session_df(t % 5, t=t).touch()
    assert paths.trials() == [0, 12]


def test_the_folder_of_a_comparison(tmp_path: Path) -> None:
    first, second = new_comparison(tmp_path), new_comparison(tmp_path)
    assert first.root != second.root
    assert first.root.parent == tmp_path
    named = new_comparison(tmp_path, tmp_path / "a/b")
    assert new_comparison(tmp_path, tmp_path / "a/b") == named
    assert named.graph("grad_norm", "png", "wall_t") == tmp_path / "a/b/compare_graph_grad_norm_vs_wall_t.png"
