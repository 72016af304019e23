"""Tests of trackers (meta.track): the data they receive, and that no tracker can stop or change a run.

Most tests use a stand-in for a tracker's library.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.events import Row
from slm_lab.experiment.files import trackers
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.files.trackers import is_running, read_state, tracker_step, tracker_values, wait_for_trackers
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.cluster.remote import SinkServer
from slm_lab.experiment.track.adapters import TrackedRun
from slm_lab.experiment.track.summary import summary
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError

MakeSpec = Callable[..., Spec]
Fake = Callable[[str], None]
ROW: dict[str, float | int | None] = {"frame": 250, "wall_t": 1.5, "fps": 200.0, "total_reward": 20.0, "current_return": 21.0, "lr": 0.5}

RECORDER = """
import json, os, types
FILE = os.path.join(os.path.dirname(__file__), "calls.jsonl")

def note(*call):
    with open(FILE, "a") as file:
        file.write(json.dumps(call) + "\\n")

class Summary:
    def update(self, values):
        note("summary", values)

class Run:
    id, summary = "abc", Summary()
    def log(self, values, step):
        log(values, step)
    def finish(self, exit_code):
        note("finish", exit_code)

def Settings(**settings):
    return None

def init(**arguments):
    note("init", {key: value for key, value in arguments.items() if key != "settings"})
    return Run()

def log(values, step):
    note("log", step, values)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return the function fake(code), which installs a stand-in for the package wandb in tracker processes.

    Its calls are recorded unless `code` replaces a function.
    """
    (folder := tmp_path / "libraries").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def make(code: str = "") -> None:
        (folder / "wandb.py").write_text(RECORDER + textwrap.dedent(code))

    make()
    return make


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[list[Any]]]:
    """Return the function calls(), which returns the calls of the stand-in in order."""
    return lambda: [json.loads(line) for line in (tmp_path / "libraries" / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def saved(paths: RunPaths, make_spec: MakeSpec) -> RunPaths:
    """Return a run folder that contains its spec."""
    text = json.dumps(dump_spec(make_spec()))
    for file in (paths.spec, paths.trial_spec()):
        file.write_text(text)
    return paths


def track(paths: RunPaths, *names: str, frames: tuple[int, ...] = (250, 500), status: Any = "done") -> None:
    sink = LocalSink(paths, track=names)
    sink.open_table(0)
    for frame in frames:
        sink(Row(0, "train", {**ROW, "frame": frame, "total_reward": frame / 10}, {"alpha": 0.25}))
    sink.close(status)
    wait_for_trackers(paths, 0, names, [0])


def test_values_by_tag() -> None:
    values = {**ROW, "grad_norm": None, "loss": float("nan"), "entropy": 0.6, "info_success": 1.0, "epi_new": 3}
    assert tracker_values(Row(0, "train", values, {"clip_fraction": 0.1})) == {
        "time/wall_t": 1.5, "time/fps": 200.0, "return/total_reward": 20.0, "return/current_return": 21.0, "schedule/lr": 0.5,
        "loss/entropy": 0.6, "info/info_success": 1.0, "episode/epi_new": 3, "loss/clip_fraction": 0.1,
    }  # fmt: skip
    assert tracker_values(Row(0, "eval", values)) == {"eval/total_reward": 20.0, "eval/current_return": 21.0, "eval/epi_new": 3}
    assert [tracker_step(Row(0, "train", {"frame": 100, "global_frame": frame})) for frame in (400, None)] == [400, 100]


def test_rows_spec_and_metrics(saved: RunPaths, fake: Fake, calls: Callable[[], list[Any]]) -> None:
    track(saved, "wandb", status="stopped")
    (init, (_, settings)), *logs, (_, summary), finish = [(call[0], call) for call in calls()][:1] + calls()[1:]
    assert init == "init"
    assert (settings["group"], settings["name"], settings["id"]) == (saved.root.name, f"{saved.root.name}_s0", None)
    assert settings["config"]["env"]["max_frame"] == 1000
    assert "run" not in settings["config"]["meta"]
    assert [(call[1], call[2]["return/total_reward"], call[2]["loss/alpha"]) for call in logs] == [(250, 25.0, 0.25), (500, 50.0, 0.25)]
    assert (summary["metric/final_return"], summary["metric/frame"], summary["status"]) == (50.0, 500, "stopped")
    assert summary["metric/max_strength"] == pytest.approx(50.0 - 22.25, abs=5), "above the random baseline of CartPole"
    assert finish == ["finish", 0]


def test_final_metrics_have_the_return_of_a_recent_evaluation(saved: RunPaths) -> None:
    """The current return is that of the evaluation, as in the metrics files; the other metrics are those of training rows."""
    saved.session_df(0).write_text("frame,total_reward,current_return\n500,10,20\n1000,11,21\n")
    saved.session_df(0, "eval").write_text("frame,total_reward,current_return,current_return_se\n800,70,70,2\n")
    found = summary(saved)
    assert (found["current_return"], found["current_return_se"], found["final_return"]) == (70.0, 2.0, 11.0)
    saved.session_df(0, "eval").write_text("frame,total_reward,current_return,current_return_se\n799,70,70,2\n")
    assert summary(saved)["current_return"] == 21.0


@pytest.mark.slow
def test_a_continued_run_continues_its_tracker_run(saved: RunPaths, fake: Fake, calls: Callable[[], list[Any]]) -> None:
    """Rows after the checkpoint, which the continued run writes again, must not be tracked twice."""
    track(saved, "wandb")
    track(saved, "wandb", frames=(500, 750))
    assert [call[1]["id"] for call in calls() if call[0] == "init"] == [None, "abc"]
    assert [call[1] for call in calls() if call[0] == "log"] == [250, 500, 750]
    assert read_state(saved.tracker(0, "wandb", "json")) == {"id": "abc", "steps": {"train": 750}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def init(**arguments): raise ConnectionError('no server\\nsecond line')", "ConnectionError: no server"),
        ("def log(values, step): raise ValueError('full')", "ValueError: full"),
        ("def init(**arguments): raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def log(values, step): os._exit(3)", "its process has died"),
    ],
)
def test_a_tracker_that_fails_is_one_notice(code: str, reason: str, saved: RunPaths, fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake(code)
    sink = LocalSink(saved, track=["wandb"])
    for frame in range(1, 400):
        sink(Row(0, "train", {**ROW, "frame": frame}))
        if caplog.messages:
            break
        time.sleep(0.05)
    for frame in range(400, 403):
        sink(Row(0, "train", {**ROW, "frame": frame}))
    sink.close()
    expected = f"wandb (meta.track) is switched off: {reason}; the run continues; see log/small_t0_s0_wandb.log"
    assert caplog.messages == [expected]
    with saved.session_df(0).open() as file:
        assert [row["frame"] for row in csv.DictReader(file)][-3:] == ["400", "401", "402"]


@pytest.mark.slow
def test_a_tracker_that_blocks(saved: RunPaths, fake: Fake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """During training a blocked tracker is switched off; at the end, the run waits for it only for a limited time.

    In both cases its process is ended.
    """
    monkeypatch.setattr(trackers, "_HANG_SECONDS", 0.3)
    monkeypatch.setattr(trackers, "END_SECONDS", 1.0)
    fake("import time\ndef log(values, step): time.sleep(1000)")
    sink, begin = LocalSink(saved, track=["wandb"]), time.monotonic()
    sink(Row(0, "train", ROW))
    sink(Row(0, "train", {**ROW, "frame": 500}))
    assert time.monotonic() - begin < 0.3
    time.sleep(0.4)
    sink(Row(0, "train", {**ROW, "frame": 750}))
    assert "it has not taken a row for 0.3 s" in caplog.messages[0]
    sink.close()
    wait_for_trackers(saved, 0, ["wandb"], [0])
    assert not is_running(saved.tracker(0, "wandb", "log"))
    assert "it did not finish within 1 s" in caplog.messages[-1]


@pytest.mark.parametrize(("code", "tries"), [(errno.EAGAIN, 3), (errno.EACCES, 3), (errno.ENOLCK, 1)])
def test_waits_only_for_a_lock_that_is_taken(code: int, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks reports another error, which must end the wait after the first attempt."""
    errors = [OSError(code, os.strerror(code))] * 2

    def lockf(*_: object) -> None:
        made.append(1)
        if errors:
            raise errors.pop()

    made = list[int]()
    monkeypatch.setattr(fcntl, "lockf", lockf)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    trackers.acquire_tracker_lock(0)
    assert len(made) == tries


@pytest.mark.slow
def test_many_rows_before_the_process_has_started(saved: RunPaths, fake: Fake, calls: Callable[[], list[Any]]) -> None:
    """The rows exceed the capacity of a pipe: none may be lost, and the Session must not wait for the tracker."""
    fake("import time\ntime.sleep(0.5)")
    track(saved, "wandb", frames=tuple(range(1, 1001)))
    assert [call[1] for call in calls() if call[0] == "log"] == list(range(1, 1001))


def test_a_missing_library_is_an_error_before_training(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "mlflow" else object())
    with pytest.raises(SpecError) as error:
        Trial(make_spec(meta={"track": ["wandb", "mlflow"]}), data_dir=tmp_path / "data").run()
    (problem,) = error.value.problems
    assert problem.path == "meta.track[1]"
    assert "pip install 'slm-lab[mlflow]'" in str(problem)
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_run_is_the_same_with_and_without(
    make_spec: MakeSpec, tmp_path: Path, fake: Fake, calls: Callable[[], list[Any]], no_baseline: None
) -> None:
    def trained(track: list[str]) -> tuple[list[dict[str, str]], bytes]:
        result = Trial(make_spec(meta={"track": track, "rigorous_eval": 1, "eval_frequency": 500}), data_dir=tmp_path / "data").run()
        with result.paths.session_df(0).open() as file:
            rows = [{key: value for key, value in row.items() if key not in ("wall_t", "fps")} for row in csv.DictReader(file)]
        return rows, result.paths.checkpoint(0, "best").read_bytes()

    assert trained([]) == trained(["wandb"])
    logged = [call for call in calls() if call[0] == "log"]
    assert [call[1] for call in logged if "time/fps" in call[2]] == [252, 500, 752, 1000]
    assert [call[1] for call in logged if "eval/total_reward" in call[2]] == [500, 1000]


@pytest.mark.slow
def test_workers_of_one_net(make_spec: MakeSpec, tmp_path: Path, fake: Fake, calls: Callable[[], list[Any]], no_baseline: None) -> None:
    """Each worker is a separate tracker run in the same group; steps are global frames."""
    spec = make_spec(meta={"track": ["wandb"], "distributed": "synced", "max_session": 2})
    paths = Trial(spec, data_dir=tmp_path / "data").run().paths
    inits = [call[1] for call in calls() if call[0] == "init"]
    assert {(one["group"], one["name"]) for one in inits} == {(paths.root.name, f"{paths.root.name}_s{s}") for s in (0, 1)}
    logged = sorted(call[1] for call in calls() if call[0] == "log")
    tables = []
    for index in (0, 1):
        with paths.session_df(index).open() as file:
            tables += [int(row["global_frame"]) for row in csv.DictReader(file)]
    assert logged == sorted(tables)
    assert max(logged) > 500, "each worker collects 500 frames"


@pytest.mark.slow
def test_rows_of_another_node(saved: RunPaths, fake: Fake, calls: Callable[[], list[Any]]) -> None:
    """On a cluster, the process that writes the tables runs the trackers; a restarted Session continues its tracker run."""
    server = SinkServer()
    for restart, frame in enumerate((250, 500)):
        server.begin(0, restart, saved, 0, ["wandb"])
        server.call_sink_method(0, restart, "open_table", 0)
        server.write(0, restart, Row(0, "train", {**ROW, "frame": frame}))
    server.call_sink_method(0, 1, "close", "done")
    wait_for_trackers(saved, 0, ["wandb"], [0])
    assert [call[1] for call in calls() if call[0] == "log"] == [250, 500]
    assert [call[1] for call in calls() if call[0] == "finish"] == [1, 0]


@pytest.mark.slow
def test_a_killed_session_fails_its_run(saved: RunPaths, fake: Fake, calls: Callable[[], list[Any]]) -> None:
    code = f"""
import os
from pathlib import Path
from slm_lab.experiment.events import Row
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import LocalSink
LocalSink(RunPaths(Path({str(saved.root)!r}), "small"), track=["wandb"])(Row(0, "train", {{"frame": 250, "total_reward": 1.0}}))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    wait_for_trackers(saved, 0, ["wandb"], [0])
    assert [call[:2] for call in calls() if call[0] in ("log", "finish")] == [["log", 250], ["finish", 1]]


def test_names_and_groups(tmp_path: Path) -> None:
    """Tracker runs are grouped by trial; the trials of a search and the runs of a study are grouped by its folder."""
    search = RunPaths(tmp_path / "search_1", "small")
    confirmed = RunPaths(search.confirmation, "small")
    of_study = RunPaths(tmp_path / "study_1" / "runs" / "A_CartPole_seed0_abc" / "small_1", "small")
    for paths in (search, confirmed, of_study):
        paths.root.mkdir(parents=True)
    search.search_state.write_text("{}")
    (tmp_path / "study_1" / "s_study.json").write_text("{}")
    runs = [TrackedRun(RunPaths(tmp_path / "run_1", "small"), 0, 1), TrackedRun(search, 3), TrackedRun(confirmed, 3), TrackedRun(of_study)]
    assert runs[1].trial_name == "search_1_t3", "sessions of a trial differ in their seeds alone"
    assert [(run.group, run.name) for run in runs] == [
        ("run_1", "run_1_s1"),
        ("search_1", "search_1_t3_s0"),
        ("search_1", "search_1_confirm_t3_s0"),
        ("study_1", "study_1_A_CartPole_seed0_abc_s0"),
    ]


def test_tensorboard(saved: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(saved, "tensorboard")
    track(saved, "tensorboard", frames=(500, 750))
    assert [message for message in caplog.messages if "switched off" in message] == []
    events = EventAccumulator(str(saved.tensorboard(0))).Reload()
    assert [(event.step, event.value) for event in events.Scalars("return/total_reward")] == [(250, 25.0), (500, 50.0), (750, 75.0)]
    assert {"loss/alpha", "time/fps", "schedule/lr", "metric/final_return"} <= set(events.Tags()["scalars"])
    (text,) = events.Tensors("spec/text_summary")
    assert '"max_frame": 1000' in text.tensor_proto.string_val[0].decode()
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    session = HParamsPluginData.FromString(data).session_start_info
    hparams = session.hparams
    assert session.group_name == saved.root.name
    assert (hparams["env.max_frame"].number_value, hparams["agent.algorithm.name"].string_value) == (1000, "PPO")


@pytest.mark.slow
def test_wandb_offline(saved: RunPaths, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(saved, "wandb")
    track(saved, "wandb", frames=(500, 750))
    ids = read_state(saved.tracker(0, "wandb", "json"))["id"]
    assert [message for message in caplog.messages if "switched off" in message] == []
    files = sorted(saved.log_dir.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{ids}.wandb"}
    content = b"".join(file.read_bytes() for file in files)
    for word in ("return/total_reward", "loss/alpha", "metric/final_return", saved.root.name, "max_frame"):
        assert word.encode() in content, word


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False])
def test_mlflow(given: bool, saved: RunPaths, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The data go to MLFLOW_TRACKING_URI if it is set, else to the data folder, where two Sessions create the tables at the same time."""
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mine.db' if given else saved.root.parent / 'mlflow.db'}"
    if given:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    else:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sinks = [LocalSink(saved, track=["mlflow"]) for _ in range(1 if given else 2)]
    for table, sink in enumerate(sinks):
        sink.open_table(table)
    for table, sink in enumerate(sinks):
        sink(Row(table, "train", ROW))
        sink.close("failed")
    wait_for_trackers(saved, 0, ["mlflow"], range(len(sinks)))
    if given:
        track(saved, "mlflow", frames=(250, 500))
    assert [message for message in caplog.messages if "switched off" in message] == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    run = client.get_run(read_state(saved.tracker(0, "mlflow", "json"))["id"])
    assert (run.data.params["env.max_frame"], run.data.tags["group"]) == ("1000", saved.root.name)
    assert run.info.status == ("FINISHED" if given else "FAILED")
    history = client.get_metric_history(run.info.run_id, "return/total_reward")
    assert [(one.step, one.value) for one in history] == [(250, 20.0), *([(500, 50.0)] if given else [])]
    assert run.data.metrics["metric/final_return"] == (50.0 if given else 20.0)


@pytest.mark.slow
def test_trackio(saved: RunPaths, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    track(saved, "trackio")
    track(saved, "trackio", frames=(500, 750))
    assert [message for message in caplog.messages if "switched off" in message] == []
    (database,) = (tmp_path / "trackio").rglob("slm_lab.db")
    rows = sqlite3.connect(database).execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    known = [(name, step, json.loads(metrics).get("return/total_reward")) for name, step, metrics in rows]
    name = f"{saved.root.name}_s0"
    assert [one for one in known if one[2] is not None] == [(name, 250, 25.0), (name, 500, 50.0), (name, 750, 75.0)]
