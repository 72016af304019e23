"""Tests of the view's routes for runs, searches, studies and comparisons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra view is not installed")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.view import index as index_module
from slm_lab.experiment.view.folders import DataFolder
from slm_lab.experiment.view.index import Index
from slm_lab.experiment.view.server import make_app
from slm_lab.lib.files import replace_file
from tests.experiment.view.folders import append, make_run, make_search, make_study, training


class View:
    """A client of the view."""

    def __init__(self, data: Path) -> None:
        self.client = TestClient(make_app(Index(DataFolder(data))), base_url="http://127.0.0.1")

    def get(self, name: str, /, *parameters: tuple[str, Any], **named: Any) -> dict[str, Any]:
        answer = self.client.get(f"/api/{name}", params=[*parameters, *named.items()])
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def runs(self, since: int = 0) -> dict[str, dict[str, Any]]:
        return {run["path"]: run for run in self.get("runs", since=since)["runs"]}


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:
    monkeypatch.setattr(index_module, "_FRESH", 0.0)
    return View(tmp_path)


def test_list(view: View, tmp_path: Path) -> None:
    run, search, study = make_run(tmp_path), make_search(tmp_path), make_study(tmp_path, 3)
    (tmp_path / "notes").mkdir()
    found = view.runs()
    assert list(found) == [study.root.name, search.root.name, run.root.name]  # newest first
    entry = found[run.root.name]
    assert (entry["kind"], entry["status"], entry["env"], entry["algorithm"]) == ("run", "done", "CartPole-v1", "PPO")
    assert (entry["value"], entry["error"], entry["frame"], entry["progress"]) == (100.0, 2.5, 1000, 1.0)
    assert entry["seconds"] == 10.0  # from the last row; file times change when a run is copied
    entry = found[search.root.name]
    assert (entry["kind"], entry["status"], entry["text"], entry["best"], entry["value"]) == ("search", "done", "3 of 3 trials", 1, 40.0)
    assert entry["algorithm"] == "PPO"
    entry = found[study.root.name]
    assert (entry["kind"], entry["status"], entry["text"], entry["progress"]) == ("study", "stopped", "3 of 4 runs", 0.75)
    assert entry["value"] is None


def test_the_best_entry_of_a_study(view: View, tmp_path: Path) -> None:
    """The list shows the highest score if all scores are of one env."""
    study = make_study(tmp_path)
    rows = [{"env": "CartPole-v1", "entry": name, "score": score} for name, score in (("A", 90.0), ("B", 100.5), ("C", None))]
    study.table("json").write_text(json.dumps({"rows": rows}))
    entry = view.runs()[study.root.name]
    assert (entry["best"], entry["value"]) == ("B", 100.5)
    rows[0]["env"] = "Acrobot-v1"
    replace_file(study.table("json"), json.dumps({"rows": rows}).encode())
    assert view.runs()[study.root.name]["value"] is None


def test_runs_that_a_study_adds_are_counted(view: View, tmp_path: Path) -> None:
    study = make_study(tmp_path, 6)  # two of the six runs were added by --until-decided
    entry = view.runs()[study.root.name]
    assert (entry["status"], entry["text"], entry["progress"]) == ("done", "6 of 6 runs", 1.0)
    (study.results / "C_2.json").unlink()
    entry = view.runs()[study.root.name]
    assert (entry["status"], entry["text"]) == ("stopped", "5 of 6 runs")


def test_progress_return_and_remaining_time_of_a_running_run(view: View, tmp_path: Path) -> None:
    """Session 0: 500 of 1,000 frames at 100 frames/s; session 1: 300 at 50. 500 + 700 frames are left at 150 frames/s."""
    paths = make_run(tmp_path, rows=2, ended=False)
    append(paths, 500, 60.0, 100.0, s=0)
    append(paths, 300, 20.0, 50.0, s=1)
    with training(paths):
        entry = view.runs()[paths.root.name]
    assert (entry["status"], entry["frame"], entry["progress"]) == ("running", 400, 0.4)
    assert entry["eta"] == pytest.approx(1200 / 150)
    assert entry["value"] == 40.0
    assert entry["error"] == pytest.approx(20.0)  # for two sessions: |60 − 20| / 2
    assert view.runs()[paths.root.name]["status"] == "stopped"


def test_evaluation_is_the_return_of_a_running_run(view: View, tmp_path: Path) -> None:
    paths = make_run(tmp_path, ended=False, meta__max_session=1)
    paths.session_df(0, "eval").write_text("frame,total_reward\n500,77\n1000,88\n")
    assert view.runs()[paths.root.name]["value"] == 88.0


def test_the_report_of_a_run_has_no_link_to_a_file(view: View, tmp_path: Path) -> None:
    first, second = make_run(tmp_path), make_run(tmp_path, 1)
    first.report.write_text("")
    report = view.get("run", path=second.root.name)["report"]
    assert (report["settings"]["previous"]["name"], report["settings"]["previous"]["href"]) == (first.root.name, None)
    assert report["files"] == []


def test_an_old_evaluation_is_not_the_return_of_a_running_run(view: View, tmp_path: Path) -> None:
    """As in the final metrics, an evaluation is ignored if it is older than a fifth of the run's frames, or if a Session has none."""
    paths = make_run(tmp_path, ended=False, meta__max_session=1, meta__eval_episodes=3)
    paths.session_df(0, "eval").write_text("frame,total_reward,current_return_se\n500,77,4\n")
    other = make_run(tmp_path, 1, ended=False, meta__max_session=1, meta__eval_episodes=3)
    other.session_df(0, "eval").write_text("frame,total_reward,current_return_se\n500,77,4\n900,88,5\n")
    found = view.runs()
    assert [found[one.root.name]["value"] for one in (paths, other)] == [100.0, 88.0]
    assert found[other.root.name]["error"] == 5.0


def test_workers_of_one_net_share_the_frames(view: View, tmp_path: Path) -> None:
    paths = make_run(tmp_path, rows=1, ended=False, meta__distributed="synced", env__max_frame=400)
    with training(paths):
        entry = view.runs()[paths.root.name]
    assert (entry["frame"], entry["progress"]) == (200, 0.5)


def test_only_changes_are_sent(view: View, tmp_path: Path) -> None:
    paths, other = make_run(tmp_path, 0, ended=False), make_run(tmp_path, 1)
    with training(paths):
        first = view.get("runs")
        assert (first["all"], len(first["runs"])) == (True, 2)
        assert view.get("runs", since=first["version"])["runs"] == []
        append(paths, 5000, 500.0)
        second = view.get("runs", since=first["version"])
        assert (second["all"], [run["path"] for run in second["runs"]]) == (False, [paths.root.name])
        assert view.get("runs", since=second["version"] + 5)["all"]  # the server was started again
    assert view.runs(second["version"])[paths.root.name]["status"] == "stopped"
    shutil.rmtree(other.root)
    third = view.get("runs", since=second["version"])
    assert (third["all"], [run["path"] for run in third["runs"]]) == (True, [paths.root.name])


def test_a_new_start_and_new_metrics_are_noticed(view: View, tmp_path: Path) -> None:
    paths = make_run(tmp_path, ended=False)
    assert view.runs()[paths.root.name]["status"] == "stopped"
    with training(paths):
        assert view.runs()[paths.root.name]["status"] == "running"
    temporary = paths.root / "temporary"
    temporary.write_text(json.dumps({"current_return": 7.0, "frame": 1000, "failed": 1}))
    temporary.rename(paths.trial_metrics())
    entry = view.runs()[paths.root.name]
    assert (entry["status"], entry["value"]) == ("failed", 7.0)


@pytest.mark.parametrize("rows", [10, 4000])
def test_sparkline(view: View, tmp_path: Path, rows: int) -> None:
    """The return is frame / 10 in both sessions; only some rows of a large table are read."""
    paths = make_run(tmp_path, rows=rows, env__max_frame=200 * rows)
    points = view.get("sparklines", path=paths.root.name)[paths.root.name]
    assert points[-1] == [0.5, 10.0 * rows]  # half of max_frame
    for share, value in points:
        assert value == pytest.approx(share * 200 * rows / 10, abs=rows / 500)
    assert 20 <= len(points) <= 60


def test_run(view: View, tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    (paths.root / "video").mkdir()
    (paths.root / "video" / "a.mp4").write_bytes(bytes(range(100)))
    answer = view.get("run", path=paths.root.name)
    assert answer["report"]["tables"]["train"]["0"]["current_return"][-1] == 100
    assert (answer["logs"], answer["videos"]) == (["ppo_cartpole_t0_s0.log", "ppo_cartpole_t0_s1.log"], ["a.mp4"])
    assert set(view.get("run", path=paths.root.name, version=answer["version"])) == {"version", "again"}
    append(paths, 1100, 110.0)
    newer = view.get("run", path=paths.root.name, version=answer["version"])
    assert newer["report"]["tables"]["train"]["0"]["frame"][-1] == 1100
    part = view.client.get("/api/video", params={"path": paths.root.name, "name": "a.mp4"}, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content, part.headers["content-type"]) == (206, bytes(range(10, 20)), "video/mp4")


def test_log(view: View, tmp_path: Path) -> None:
    """The route sends the end of the log first, then appended text, and earlier parts on request; together they are the whole log."""
    paths = make_run(tmp_path)
    log = paths.session_log(0)
    log.write_text("".join(f"line {i}: ä\n" for i in range(20_000)))
    of = {"path": paths.root.name, "name": log.name}
    part = view.get("log", **of)
    assert part["text"].startswith("line ")
    assert part["end"] == part["size"] == log.stat().st_size
    text, begin = part["text"], part["begin"]
    while begin:
        earlier = view.get("log", before=begin, **of)
        text, begin = earlier["text"] + text, earlier["begin"]
    assert text == log.read_text()
    with log.open("a") as file:
        file.write("the end\n")
    newer = view.get("log", after=part["end"], **of)
    assert (newer["text"], newer["begin"]) == ("the end\n", part["end"])
    assert view.get("log", after=newer["end"], **of)["text"] == ""
    log.write_text("again\n")  # the log was written anew
    assert view.get("log", after=newer["end"], **of)["text"] == "again\n"


def test_search(view: View, tmp_path: Path) -> None:
    paths = make_search(tmp_path)
    answer = view.get("search", path=paths.root.name)
    assert {key["path"]: (key["log"], key["options"]) for key in answer["keys"]} == {
        "agent.net.optim_spec.lr": (True, None),
        "agent.net.hid_layers": (False, ["[16]", "[64, 64]"]),
    }
    assert [(one["trial"], one["metric"]) for one in answer["trials"]] == [(0, 10.0), (1, 40.0), (2, 30.0)]
    assert answer["curves"]["1"][-1] == [1.0, 40.0]
    trial = view.get("run", path=paths.root.name, trial=1)
    assert trial["report"]["tables"]["train"]["0"]["current_return"] == [20, 40]
    assert trial["logs"] == ["search_t1.log"]
    assert view.client.get("/api/run", params={"path": paths.root.name, "trial": 9}).status_code == 404


def test_kind_of_a_folder_that_the_list_does_not_have_yet(view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of a new folder, which selects its page, is read from the folder: the list may be older or show a new search as a run."""
    monkeypatch.setattr(index_module, "_FRESH", 1e9)
    assert view.runs() == {}
    folders = make_run(tmp_path).root, make_search(tmp_path).root, make_study(tmp_path).root
    assert [view.get("kind", path=folder.name)["kind"] for folder in folders] == ["run", "search", "study"]


def test_study(view: View, tmp_path: Path) -> None:
    study = make_study(tmp_path, 3)
    runs = view.get("study", path=study.root.name)["runs"]
    assert [(run["entry"], run["random_seed"], run["value"]) for run in runs] == [("A", 1, 100.0), ("A", 2, 110.0), ("B", 1, 120.0)]
    run = view.get("run", path=runs[0]["path"])
    assert "log.txt" in run["logs"]
    assert view.get("log", path=runs[0]["path"], name="log.txt")["text"] == "of the study\n"


def test_compare(view: View, tmp_path: Path) -> None:
    """Compares two runs of one spec with other seeds (returns 100, 110, 120, 230) and a run of another spec with 105 and 115."""
    first = make_run(tmp_path, 0, value=lambda s, frame: frame / 10 + 10 * s)
    second = make_run(tmp_path, 1, value=lambda s, frame: frame / 10 + 20 + 110 * s, meta__random_seed=1)
    other = make_run(tmp_path, 2, value=lambda s, frame: frame / 10 + 5 + 10 * s, agent__algorithm__gamma=0.5)
    answer = view.get("compare", *(("run", f":{one.root.name}") for one in (first, second, other)))
    a, b = answer["settings"]
    assert (a["count"], b["count"]) == ("4 seeds", "2 seeds")
    assert a["final_return"][0] == 140.0
    assert a["interquartile_mean"][0] == 115.0  # mean of 110 and 120
    assert a["interquartile_mean"][1] <= 115.0 <= a["interquartile_mean"][2]
    assert (a["x"][-1], a["mean"][-1], len(a["seeds"])) == (1000.0, 140.0, 4)
    (pair,) = answer["pairs"]
    assert pair["improvement"][0] == 3 / 8  # 105 beats 100; 115 beats 100 and 110
    assert pair["difference"][0] == -30.0
    differing = {row["key"]: row["values"] for row in answer["spec"] if row["differs"]}
    assert differing == {"agent.algorithm.gamma": ["0.98", "0.98", "0.5"], "meta.random_seed": ["0", "1", "0"]}
    seconds = view.get("compare", ("run", f":{first.root.name}"), ("by", "wall_t"))
    assert seconds["settings"][0]["x"][-1] == 10.0
    known = view.get("compare", ("run", f":{first.root.name}"), ("by", "wall_t"), ("version", seconds["version"]))
    assert set(known) == {"version", "again"}


def test_a_search_and_a_study_in_a_comparison(view: View, tmp_path: Path) -> None:
    """A search is compared by its best trial or a given one, a study by all its runs."""
    search, study = make_search(tmp_path), make_study(tmp_path, 4)
    words = [("run", f":{search.root.name}"), ("run", f"0:{search.root.name}"), ("run", f":{study.root.name}")]
    answer = view.get("compare", *words)
    assert [run["trial"] for run in answer["runs"]] == [1, 0, None, None, None, None]
    assert len(answer["spec"][0]["values"]) == 6


def test_confirmations(view: View, tmp_path: Path) -> None:
    """The value of a search is that of its best confirmation; the page of the confirmations shows the first one by default."""
    paths = make_search(tmp_path)
    confirm = RunPaths(paths.confirmation, paths.spec_name)
    confirm.root.mkdir()
    confirm.make_dirs()
    for file in (confirm.spec, confirm.trial_spec(1), confirm.trial_spec(2)):
        file.write_text(paths.spec.read_text())
    for trial in (1, 2):
        shutil.copy(paths.session_df(0, "train", trial), confirm.session_df(0, "train", trial))
    state = SearchState.load(paths.search_state)
    state.confirmations = [TrialState(trial, {}, "finished", metric=metric) for trial, metric in ((1, 15.0), (2, 25.0))]
    state.save(paths.search_state)
    assert view.runs()[paths.root.name]["value"] == 25.0
    folder = view.get("search", path=paths.root.name)["confirm"]
    answer = view.get("run", path=folder)
    assert (answer["trials"], answer["entry"]["trial"]) == ([1, 2], 1)
    assert view.get("run", path=folder, trial=2)["report"]["tables"]["train"]["0"]["current_return"][-1] == 30
    (run,) = view.get("compare", ("run", f":{paths.root.name}"))["runs"]
    assert (run["path"], run["trial"]) == (folder, 2)


@pytest.mark.parametrize(
    ("name", "parameters", "status"),
    [
        ("run", {"path": "nowhere"}, 404),
        ("run", {"path": "ppo_cartpole_2026_01_01_000000", "trial": "-1"}, 400),
        ("search", {"path": "ppo_cartpole_2026_01_01_000000"}, 400),
        ("study", {"path": "ppo_cartpole_2026_01_01_000000"}, 400),
        ("compare", {}, 400),
        ("compare", {"run": "x:ppo_cartpole_2026_01_01_000000"}, 400),
        ("compare", {"run": ":ppo_cartpole_2026_01_01_000000", "by": "frmae"}, 400),
        ("compare", {"run": ":nowhere"}, 404),
        ("runs", {"since": "one"}, 400),
        ("nothing", {}, 404),
    ],
)
def test_wrong_questions(view: View, tmp_path: Path, name: str, parameters: dict[str, str], status: int) -> None:
    make_run(tmp_path)
    answer = view.client.get(f"/api/{name}", params=parameters)
    assert answer.status_code == status
    assert answer.json()["error"]


def test_pages_and_files(view: View) -> None:
    for path in ("/", "/run?path=x", "/compare"):
        assert view.client.get(path).text.startswith("<!doctype html>")
    for name in (
        "page.js",
        "list.js",
        "run.js",
        "search.js",
        "study.js",
        "compare.js",
        "report.js",
        "view.css",
        "report.css",
        "plotly.min.js",
    ):
        answer = view.client.get(f"/static/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/css" if name.endswith("css") else "text/javascript")
