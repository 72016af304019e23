"""Tests of retro_analyze, which rebuilds metrics, graphs and results from files alone.

The runs are finished, killed or failed, or were made by SLM Lab.
"""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slm_lab import Observer, Trial, load_run
from slm_lab.cli import main
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, TrialFailed, UserError
from slm_lab.experiment.report import analyze
from slm_lab.experiment.report.baseline import Baseline
from slm_lab.experiment.report.retro_analyze import retro_analyze
from slm_lab.lib.records import Episode
from slm_lab.spec.models.spec import Spec
from tests.experiment.commands import Command, run_while, until

MakeSpec = Callable[..., Spec]


def outputs(paths: RunPaths) -> dict[str, Any]:
    """Return the content of all metrics files and pictures of a run; pages only by name, since their element ids are random."""
    files = [path for path in paths.root.rglob("*") if path.suffix in (".png", ".html") or "metrics" in path.name]
    return {path.name: b"" if path.suffix == ".html" else path.read_bytes() for path in files}


def remove_outputs(paths: RunPaths) -> None:
    for path in paths.root.rglob("*"):
        if path.suffix in (".png", ".html", ".js") or "metrics" in path.name:
            path.unlink()


def tables(paths: RunPaths) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths.info_dir.glob("*.csv")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("env", "meta"),
    [
        ({}, {"max_session": 2}),
        pytest.param({}, {"eval_episodes": 2}, marks=pytest.mark.slow),
        pytest.param({}, {"rigorous_eval": 2, "eval_frequency": 500}, marks=pytest.mark.slow),
        pytest.param({"max_frame": 10_000_000}, {"max_seconds": 1.0, "log_frequency": 2000}, marks=pytest.mark.slow),
        (
            {"num_envs": 8, "max_frame": 2000},
            {"sampler": {"serial_mode": True, "num_workers": 2, "num_envs_per_worker": 4, "num_policies": 2}, "log_frequency": 500},
        ),
    ],
    ids=["two sessions", "evaluation", "rigorous evaluation", "max_seconds", "two policies"],
)
def test_what_is_rebuilt_equals_what_the_run_wrote(env: Any, meta: Any, make_spec: MakeSpec, tmp_path: Path) -> None:
    result = Trial(make_spec(env=env, meta=meta), tmp_path).run()
    written, before = outputs(result.paths), tables(result.paths)
    assert any(name.endswith("mean_returns_vs_frames.png") for name in written)
    remove_outputs(result.paths)
    text = retro_analyze(result.paths.root)
    assert outputs(result.paths) == written
    assert tables(result.paths) == before
    assert text.startswith(f"{result.paths.root}: return ")
    assert text.splitlines()[0].endswith(": done")
    assert str(result.paths.trial_metrics()) in text.splitlines()


class FailsAt600(Observer):
    def on_step(self, episodes: list[Episode]) -> None:
        if self.context.clock.frame >= 600:
            raise ValueError("the disk is on fire")


@pytest.mark.slow
def test_a_failed_run(make_spec: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(TrialFailed):
        Trial(make_spec(), tmp_path, observers=[FailsAt600]).run()
    (folder,) = tmp_path.iterdir()
    paths = RunPaths(folder, "small")
    written = outputs(paths)
    text = retro_analyze(folder)
    assert outputs(paths) == written
    assert text.splitlines()[0].endswith("1 session: failed")
    assert load_run(folder).metrics["failures"] == {"0": "ValueError: the disk is on fire (at frame 600 of CartPole-v1)"}
    with paths.session_df(0).open() as file:
        *_, last = csv.DictReader(file)
    with paths.session_df(0).open("a") as file:  # the run was resumed and then killed
        csv.writer(file, lineterminator="\n").writerow({**last, "frame": "750"}.values())
    retro_analyze(folder)
    assert load_run(folder).status == "stopped"
    with paths.session_df(0).open("a") as file:
        csv.writer(file, lineterminator="\n").writerow({**last, "frame": "1000"}.values())
    retro_analyze(folder)
    assert load_run(folder).status == "done"
    assert "failed" not in json.loads(paths.session_metrics(0).read_text())


def test_a_killed_run(command: Callable[..., Command], spec_body: Callable[..., Any]) -> None:
    """The run is killed by SIGKILL while two Sessions train, so it has no metrics and no graphs, and its last line may be incomplete."""
    made = command(spec_body(env={"max_frame": 100_000_000}, meta={"max_session": 2}))
    process = made.start()
    until(made.has_rows(2), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: made.processes() == [], seconds=30)
    paths = made.paths
    assert load_run(paths.root).status == "stopped"
    before = tables(paths)
    text = retro_analyze(paths.root)
    assert tables(paths) == before
    run = load_run(paths.root)
    assert (run.status, run.sessions) == ("stopped", {0: "stopped", 1: "stopped"})
    assert run.metrics["frame"] == pytest.approx(run.train.groupby("session").frame.last().mean(), abs=1)
    assert "of 100,000,000 frames; 2 sessions: stopped" in text
    assert paths.trial_graph("mean_returns", "png").stat().st_size > 1000


def finished(make_spec: MakeSpec, folder: Path, **meta: Any) -> RunPaths:
    paths = Trial(make_spec(meta=meta), folder).run().paths
    remove_outputs(paths)
    return paths


@pytest.mark.slow
def test_a_torn_line_and_a_missing_table(make_spec: MakeSpec, tmp_path: Path) -> None:
    paths = finished(make_spec, tmp_path, max_session=2)
    text = paths.session_df(0).read_bytes()
    paths.session_df(0).write_bytes(text[:-5])  # within the last line, which is at the last frame
    retro_analyze(paths.root)
    run = load_run(paths.root)
    assert run.sessions == {0: "stopped", 1: "done"}
    assert json.loads(paths.session_metrics(0).read_text())["frame"] == 752
    assert paths.session_df(0).read_bytes() == text[:-5]
    paths.session_df(0).unlink()
    shown = retro_analyze(paths.root)
    run = load_run(paths.root)
    assert (run.status, run.metrics["sessions"], run.sessions) == ("stopped", 1, {1: "done"})
    assert "2 sessions: 1 done, 1 without rows" in shown
    for index in (0, 1):
        paths.session_df(index).write_text("frame,total_reward\n")
    with pytest.raises(UserError, match="has no rows yet"):
        retro_analyze(paths.root)


@pytest.mark.slow
def test_a_run_that_still_trains_is_not_disturbed(make_spec: MakeSpec, tmp_path: Path) -> None:
    """The tables of a running run are not changed, and its final results replace the intermediate ones."""
    shown = []

    def analyze_meanwhile(trial: Trial) -> None:
        until(lambda: trial.paths is not None and trial.paths.session_df(0).exists() and trial.paths.session_df(0).stat().st_size > 1000)
        assert trial.paths is not None
        shown.append(retro_analyze(trial.paths.root))

    spec = make_spec(env={"max_frame": 60_000}, meta={"log_frequency": 500})
    result = run_while(Trial(spec, tmp_path / "watched"), analyze_meanwhile)
    assert shown[0].splitlines()[0].endswith("1 session: stopped")
    assert result["status"] == "done"
    alone = Trial(spec, tmp_path / "alone").run()
    assert dict(result) == dict(alone)


def test_a_spec_of_another_version(make_spec: MakeSpec, tmp_path: Path) -> None:
    """The analysis reads only env and meta of the spec, and only few keys of meta."""
    paths = finished(make_spec, tmp_path)
    body = json.loads(paths.spec.read_text())
    body["small"]["agent"] = {"algorithm": {"name": "not_installed:New", "keys": 3}, "net": {"type": "Hyper"}}
    body["small"]["meta"] |= {"of_tomorrow": 1, "run": [{"mode": "train"}, {"mode": "train"}]}
    paths.spec.write_text(json.dumps(body))
    retro_analyze(paths.root)
    assert load_run(paths.root).status == "done"
    body["small"]["meta"]["max_session"] = "many"
    paths.spec.write_text(json.dumps(body))
    with pytest.raises(UserError, match=rf"{paths.spec} cannot be analyzed: meta.max_session"):
        retro_analyze(paths.root)


def test_the_recorded_baseline_serves_where_the_env_is_not_installed(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyze, "known_baseline", lambda spec: None)
    monkeypatch.setattr(analyze, "measure_baseline", lambda spec, stop: 3.0)
    result = Trial(make_spec(), tmp_path).run()
    monkeypatch.setattr(analyze, "measure_baseline", lambda spec, stop: pytest.fail("measured again"))
    retro_analyze(result.paths.root)
    assert load_run(result.paths.root).metrics == dict(result)
    assert result["random_baseline"] == 3


@pytest.mark.slow
def test_several_trials(make_spec: MakeSpec, tmp_path: Path) -> None:
    paths = finished(make_spec, tmp_path)
    paths.session_df(0, t=3).write_bytes(paths.session_df(0).read_bytes())
    text = retro_analyze(paths.root)
    assert json.loads(paths.trial_metrics(3).read_text()) == json.loads(paths.trial_metrics(0).read_text())
    assert [line.partition(":")[0] for line in text.splitlines() if ": return" in line] == [
        f"{paths.root}, trial 0",
        f"{paths.root}, trial 3",
    ]


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["retro_analyze", *map(str, words)])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out, printed.err


def test_the_latest_run(make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "latest", "--data-dir", tmp_path)[0] == 2
    paths = Trial(make_spec(), plan=Plan(data_dir=tmp_path)).run().paths
    capsys.readouterr()
    code, out, _ = answer(capsys, "latest", "--data-dir", tmp_path)
    assert (code, out.startswith(f"{paths.root}: return")) == (0, True)


@pytest.mark.slow
def test_of_several_runs_those_that_can_be_are_analyzed(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = finished(make_spec, tmp_path), finished(make_spec, tmp_path)
    bad.spec.write_text('{"small": {"env"')
    capsys.readouterr()
    code, out, err = answer(capsys, tmp_path / "small_*", good.root, tmp_path / "nothing_*")
    assert code == 2
    assert out.count(": return") == 1  # a run that is named twice is analyzed once
    assert good.trial_metrics().is_file()
    assert not bad.trial_metrics().exists()
    assert err.splitlines()[0] == f"no run folder matches '{tmp_path}/nothing_*'"
    assert f"{bad.spec} cannot be read as a saved spec" in err
    assert answer(capsys, good.root)[0] == 0
    monkeypatch.setattr("os.access", lambda *arguments: False)
    assert answer(capsys, good.root) == (2, "", f"cannot write to {good.root}: no permission\n")


@pytest.mark.parametrize("words", [[], ["nowhere"], ["{folder}"], ["{folder}/*"]])
def test_what_is_no_run(words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "inside").mkdir()
    code, out, err = answer(capsys, *[word.format(folder=tmp_path) for word in words])
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_a_full_disk_is_an_error(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old results stay complete, and the error prevents that they are mistaken for new ones."""
    paths = finished(make_spec, tmp_path)
    retro_analyze(paths.root)
    old = outputs(paths)
    lines = paths.session_df(0).read_text().splitlines(keepends=True)
    paths.session_df(0).write_text("".join(lines[:-1]))

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="cannot write the results"):
        retro_analyze(paths.root)
    assert outputs(paths) == old
    assert not list(tmp_path.rglob("*.tmp"))


# --- SLM Lab

V4_COLUMNS = (
    *("epi", "t", "wall_t", "opt_step", "frame", "fps", "total_reward", "total_reward_ma"),
    *("loss", "lr", "explore_var", "entropy_coef", "entropy", "grad_norm"),
)
V5_COLUMNS = ("total_reward", "total_reward_ma", "loss", "fps", "frame", "wall_t", "t", "epi", "opt_step", "lr")


def slm_lab_run(folder: Path, env: str, version: int = 5, sessions: int = 2, **meta: Any) -> list[list[float]]:
    """Write the files of a run of SLM Lab, with the columns and keys of its version 4 or 5, and return the returns."""
    folder.mkdir()
    name = "ppo_x"
    for inside in ("graph", "info", "log", "model"):
        (folder / inside).mkdir()
    added = {"experiment": 0, "trial": 0, "session": -1, "cuda_offset": 0, "resume": False, "experiment_ts": "2023_01_31_120000"}
    added |= {"prepath": f"data/{folder.name}/{name}_t0", "info_prepath": f"data/{folder.name}/info/{name}"}
    one = version == 4
    meta = {"distributed": False, "log_frequency": 1000, "eval_frequency": 1000, "max_session": sessions, "max_trial": 1, **added, **meta}
    memory, net = {"name": "OnPolicyBatchReplay"}, {"type": "MLPNet", "hid_layers": [64]}
    agent = {"name": "PPO", "algorithm": {"name": "PPO", "time_horizon": 32, "clip_val_loss": 1.0}, "memory": memory, "net": net}
    section: dict[str, Any] = {"name": env, "num_envs": 4, "max_t": None, "max_frame": 4000}
    if one:
        section |= {"frame_op": "concat", "frame_op_len": 4, "reward_scale": "sign"}
    spec = {"agent": [agent] if one else agent, "env": [section] if one else section, "name": name}
    spec |= {"meta": meta | {"git_sha": "abc", "random_seed": 5}} | ({"body": {"product": "outer", "num": 1}} if one else {})
    for suffix in ("_t0", *(f"_t0_s{s}" for s in range(sessions))):
        (folder / f"{name}{suffix}_spec.json").write_text(json.dumps(spec, indent=2))
    returns = [[20.0 + s, 40.0 + s, 30.0 + s, 80.0 + s] for s in range(sessions)]
    columns = V4_COLUMNS if one else V5_COLUMNS
    for s, own in enumerate(returns):
        for mode in ("train", "eval"):
            rows: list[dict[str, Any]] = [dict.fromkeys(columns, "") | {"frame": 0 if one else 0.0, "opt_step": 0}]
            for row, value in enumerate(own, 1):
                frame: float = 1000 * row if one else 1000.0 * row
                rows.append({"frame": frame, "wall_t": 10.5 * row, "opt_step": 32.0 * row, "epi": row, "t": 7, "fps": 95.0})
                rows[-1] |= {"total_reward": value, "total_reward_ma": sum(own[:row]) / row, "loss": 0.5, "lr": 0.001}
            with (folder / "info" / f"{name}_t0_s{s}_session_df_{mode}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, columns, restval="")
                writer.writeheader()
                writer.writerows(rows)
        for where in (f"{name}_t0_s{s}_session_metrics_scalar_train.json", f"{name}_t0_s{s}_session_metrics_train.json"):
            (folder / "info" / where).write_text('{"strength": 1.0}')
    for theirs in (f"{name}_t0_trial_metrics_scalar.json", f"info/{name}_t0_trial_metrics_scalar.json"):
        (folder / theirs).write_text('{"final_return_ma": 1.0, "strength": 1.0}')
    (folder / f"{name}_t0_trial_graph_mean_returns_vs_frames.png").write_bytes(b"theirs")
    return returns


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("version", [4, 5])
def test_a_run_of_slm_lab(version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics by our definitions, and graphs, are written under our names to a subfolder; the files of SLM Lab stay unchanged."""
    monkeypatch.setattr(analyze, "known_baseline", lambda spec: Baseline({"CartPole-v1": 20.0}[spec.name]))
    folder = tmp_path / "ppo_x_2023_01_31_120000"
    slm_lab_run(folder, "CartPole-v1", version)
    theirs = content(folder)
    assert main(["compare", str(folder)]) == 2
    assert "slm-lab retro_analyze" in capsys.readouterr().err
    code, out, err = answer(capsys, tmp_path / "ppo_*")
    assert (code, err) == (0, "")
    after = content(folder)
    assert {name: after[name] for name in theirs} == theirs
    assert {Path(name).parts[0] for name in after.keys() - theirs.keys()} == {"retro_analyze"}
    run = load_run(folder / "retro_analyze")
    metrics = run.metrics
    assert (metrics["status"], metrics["sessions"], metrics["frame"], metrics["random_baseline"]) == ("done", 2, 4000, 20)
    assert metrics["final_return"] == 80.5
    assert metrics["strength"] == pytest.approx((0 + 20 + 10 + 60) / 4 + 0.5)
    assert metrics["max_strength"] == metrics["final_strength"] == 60.5
    assert metrics["consistency"] == pytest.approx(1 - 2 * 0.5 * 4 / (4 * 23))
    s = [0, 20, 10, 60]
    efficiency = [sum(x / (at * row) for row, x in enumerate(s, 1)) / sum(s) for at in (1000, 32)]
    first = json.loads(run.paths.session_metrics(0).read_text())
    assert [first["sample_efficiency"], first["training_efficiency"]] == pytest.approx(efficiency)
    assert first["stability"] == pytest.approx(1 - 10 / 30)
    assert run.train.frame.tolist() == [1000, 2000, 3000, 4000] * 2
    for ext in ("html", "png"):
        assert run.paths.trial_graph("mean_returns", ext).stat().st_size > 1000
    assert "is a run of SLM Lab" in out
    assert "not computed: the graph of the entropy (no entropy in its tables), the graph of explore_var (no explore_var" in out
    again = answer(capsys, folder)
    assert again[:2] == (code, out)
    assert main(["compare", str(folder / "retro_analyze"), "--out", str(tmp_path / "compared")]) == 0
    assert "80.5" in capsys.readouterr().out


def test_slm_lab_runs_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Old env ids, evaluation, a run that stopped early, missing columns, and several envs."""
    atari = tmp_path / "atari"
    slm_lab_run(atari, "PongNoFrameskip-v4", 4, sessions=1, rigorous_eval=4)
    (info,) = (atari / "info").glob("*_eval.csv")
    info.write_text(info.read_text().replace("80.0", "90.0"))
    _, out, _ = answer(capsys, atari)
    assert "PongNoFrameskip-v4 is now ALE/Pong-v5, whose random baseline is used" in out
    metrics = load_run(atari / "retro_analyze").metrics
    assert metrics["final_return"] == 90
    assert metrics["random_baseline"] == pytest.approx(-20.7, abs=0.6)

    other = tmp_path / "roboschool"
    slm_lab_run(other, "RoboschoolHopper-v1", 4, sessions=1, distributed="synced")
    (train,) = (other / "info").glob("*_train.csv")
    lines = train.read_text().splitlines()
    train.write_text("\n".join([lines[0].replace("opt_step", "updates"), *lines[1:-1], lines[-1][:-4]]))  # the last row is cut off
    _, out, err = answer(capsys, other)
    run = load_run(other / "retro_analyze")
    assert (run.metrics["status"], run.metrics["strength"], run.metrics["frame"]) == ("stopped", None, 3000)
    assert "need the random baseline of RoboschoolHopper-v1" in out
    assert "training_efficiency (no opt_step in its tables)" in out
    assert "global frames" in out

    none = tmp_path / "none"
    slm_lab_run(none, "CartPole-v1")
    for path in (none / "info").glob("*.csv"):
        path.write_text(path.read_text().replace("total_reward", "reward"))
    code, out, err = answer(capsys, none)
    assert (code, out) == (2, "")
    assert err == f"'{none}' cannot be analyzed: its table of trial 0, session 0 has no column total_reward\n"
    for path in (none / "info").glob("*.csv"):
        path.unlink()
    assert "has no rows" in answer(capsys, none)[2]
    assert not (none / "retro_analyze").exists()

    two = tmp_path / "two"  # SLM Lab v4 uses the first
    slm_lab_run(two, "CartPole-v1", 4)
    for path in two.glob("*_spec.json"):
        spec = json.loads(path.read_text())
        path.write_text(json.dumps(spec | {"env": spec["env"] * 2}))
    code, out, err = answer(capsys, two)
    assert code == 0, err
    assert load_run(two / "retro_analyze").spec["env"]["name"] == "CartPole-v1"
