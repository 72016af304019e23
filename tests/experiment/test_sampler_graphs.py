"""Tests of the analysis of runs with rollout workers and a learner, on hand-made files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.report.analyze import analyze_trial
from slm_lab.experiment.report.figure import MARK
from slm_lab.experiment.report.metrics import Curve, align_or_interpolate
from slm_lab.experiment.report.render_html import plotly_json
from slm_lab.experiment.report.render_png import PNGRenderer
from slm_lab.experiment.report.run import read_columns
from slm_lab.experiment.report.sampler import KIND_COLOURS, Span, bottleneck, pbt_figure, read_spans, timeline_figure, training_overlap
from slm_lab.experiment.report.trial_figures import POLICY_FRAMES
from slm_lab.spec.models.meta import SamplerSpec
from slm_lab.spec.models.spec import Spec
from tests.experiment.test_graph import read_figure, write_rows

MakeSpec = Callable[..., Spec]
BUSY = ("rollout_busy", "inference_busy", "learner_busy")
LAG = ("lag_min", "lag_mean", "lag_max", "lag_masked")
TURNS = [
    ("worker 0", "rollout", 50.0, 51.0),
    ("worker 1", "rollout", 50.0, 50.8),
    ("learner", "train", 51.0, 51.5),
    ("learner", "idle", 51.5, 52.5),
    ("worker 0", "rollout", 51.5, 52.5),
    ("learner", "train", 52.5, 53.0),
]
"""Spans of processes, as in a synchronous run: (process, kind, begin, end)."""


def settled(spec: Spec, sessions: int = 1, **sampler: Any) -> Spec:
    """Return the spec with a sampler, without the changes that a sampler requires in the rest of the spec."""
    return spec.with_meta(sampler=SamplerSpec(**sampler), max_session=sessions)


def write_spans(path: Path, spans: Sequence[tuple[Any, ...]]) -> None:
    path.write_text("\n".join(["process,kind,begin,end", *(",".join(map(str, span)) for span in spans)]) + "\n", encoding="utf-8")


def write_pbt(path: Path, rows: Sequence[tuple[Any, ...]]) -> None:
    header = "frame,policy,total_reward,lr,entropy_coef,gamma,source"
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")


def table(rows: int, **columns: Sequence[float]) -> dict[str, np.ndarray]:
    return {"frame": np.arange(1.0, rows + 1)} | {f"{name}_busy": np.array(values) for name, values in columns.items()}


def test_bottleneck_by_hand() -> None:
    """The shares are means over the last two of four rows; the first rows belong to the start and are left out."""
    one = table(4, rollout=[0, 0, 0.5, 0.7], inference=[1, 1, 0.1, 0.3], learner=[1, 1, 0.4, np.nan])
    name, busy = bottleneck([one]) or ("", {})
    assert name == "rollout"
    assert busy == pytest.approx({"rollout": 0.6, "inference": 0.2, "learner": 0.4})
    other = table(3, rollout=[0, 0.2, 0.2], inference=[0, 0, 0], learner=[0, 0.9, 1.0])  # the last two of three rows
    name, busy = bottleneck([one, other]) or ("", {})
    assert name == "learner"
    assert busy == pytest.approx({"rollout": 0.4, "inference": 0.1, "learner": 0.675})


def test_no_bottleneck_without_its_columns() -> None:
    for tables in (
        [],
        [{"frame": np.arange(3.0)}],
        [table(2, rollout=[0.5, 0.5], learner=[0.1, 0.1])],
        [table(0, rollout=[], inference=[], learner=[])],
        [table(2, rollout=[0.5, 0.5], learner=[0.1, 0.1], inference=[0.1, np.nan])],
    ):
        assert bottleneck(tables) is None
    known = bottleneck([{"frame": np.arange(3.0)}, table(1, rollout=[0.5], learner=[0.1], inference=[0.1])])
    assert known == ("rollout", {"rollout": 0.5, "inference": 0.1, "learner": 0.1})


def test_busy_shares_are_metrics(paths: RunPaths, make_spec: MakeSpec) -> None:
    lags = [["", 1, 2], ["", 2.5, 4], ["", 4, 8], ["", 0, 0.25]]
    busy = [["", 0.5, 0.75], ["", 0.25, 0.25], ["", 1.0, 1.0]]
    columns = dict(zip((*LAG, *BUSY), [*lags, *busy], strict=True))
    write_rows(paths, 0, [30.0, 40.0, 50.0], columns=columns)
    metrics = analyze_trial(settled(make_spec()), paths)
    assert metrics["bottleneck"] == "learner"
    assert metrics["busy"] == {"rollout": 0.625, "inference": 0.25, "learner": 1.0}
    assert json.loads(paths.trial_metrics().read_text()) == metrics
    assert "policies" not in metrics


def test_runs_without_a_sampler_have_none_of_it(paths: RunPaths, make_spec: MakeSpec) -> None:
    write_rows(paths, 0, [30.0, 40.0])
    write_spans(paths.timeline(0), TURNS)  # of something else
    for spec in (make_spec(), settled(make_spec(), num_workers=3)):
        metrics = analyze_trial(spec, paths)
        assert not {"bottleneck", "busy", "policies", "best_policy"} & metrics.keys()
        names = [path.name for path in paths.root.rglob("*.png") if any(word in path.name for word in ("lag", "busy", "polic", "pbt"))]
        assert names == []
        assert paths.timeline_graph(0, "png").exists() is (spec.meta.sampler is not None)


def test_spans_begin_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert read_spans(read_columns(path)) == []
    write_spans(path, [*TURNS, ("learner", "train", "nan", 60), ("learner", "train", 60, 59), ("learner", "train", "", 1)])
    path.write_text(path.read_text() + "worker 0,rollout,49")  # cut off
    spans = read_spans(read_columns(path))
    assert len(spans) == 5
    assert spans[0] == Span("worker 0", "rollout", 0.0, 1.0)
    assert spans[2] == Span("learner", "train", 1.0, 1.5)
    assert all(span.kind != "idle" for span in spans)


def test_overlap_by_hand() -> None:
    train = Span("learner", "train", 1.0, 3.0)
    assert training_overlap([train]) is None
    assert training_overlap([Span("worker 0", "rollout", 0.0, 1.0), train]) == 0
    # workers together from 0.5 to 1.5 and from 2.5 on: 0.5 + 0.5 of 2
    both = [Span("worker 0", "rollout", 0.5, 1.2), Span("worker 1", "rollout", 1.0, 1.5), Span("worker 0", "rollout", 2.5, 4.0)]
    assert training_overlap([*both, train]) == pytest.approx(0.5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sampler", "words"),
    [({"async_rl": False}, "synchronous"), ({"async_rl": True}, "asynchronous"), ({"serial_mode": True}, "asynchronous, serial")],
)
@pytest.mark.usefixtures("pictures")
def test_timeline_of_a_session(paths: RunPaths, make_spec: MakeSpec, sampler: dict[str, Any], words: str) -> None:
    for s in (0, 1):
        write_rows(paths, s, [30.0, 40.0])
    write_spans(paths.timeline(1), TURNS)
    analyze_trial(settled(make_spec(), 2, **sampler), paths)
    assert not paths.timeline_graph(0, "png").exists()
    assert paths.timeline_graph(1, "png") == paths.graph_dir / "small_t0_s1_session_graph_timeline.png"
    traces, layout = read_figure(paths.timeline_graph(1, "html"))
    assert layout["title"]["text"].startswith(f"small (CartPole-v1), trial 0, session 1: {words} timeline <span")
    assert "Rollouts are collected during 0 % of the training time. Grey: waiting." in layout["title"]["text"]
    assert layout["xaxis"]["title"]["text"] == "seconds since the start of the window"
    assert layout["xaxis"]["range"] == [0, 3]
    assert layout["yaxis"]["ticktext"] == ["learner", "worker 0", "worker 1"]
    learner, first, second = layout["yaxis"]["tickvals"]
    assert learner - first > first - second  # the learner is set apart from the workers
    by_name = {trace["name"]: trace for trace in traces}
    assert list(by_name) == ["waiting", "collecting a rollout", "training"]
    assert by_name["training"]["base"] == [1, 2.5]
    assert by_name["training"]["x"] == [0.5, 0.5]
    assert by_name["training"]["y"] == [learner, learner]
    assert by_name["collecting a rollout"]["base"] == [0, 1.5, 0]
    assert by_name["waiting"]["base"] == [1, 0, 0]
    assert by_name["waiting"]["x"] == [2, 2.5, 0.8]


def test_timeline_picture_shows_every_kind(tmp_path: Path) -> None:
    spans = [
        *(Span(f"worker {worker}", "rollout", 0.1 * worker, 0.5 + 0.1 * worker) for worker in (10, 9, 0)),
        Span("worker 0", "rollout", 0.25, 0.7),  # of another group of envs
        Span("inference", "inference", 0.3, 0.4),
        Span("learner", "train", 0.5, 0.9),
        Span("learner", "saving & such", 0.9, 0.95),
    ]
    timeline = timeline_figure("a", spans)
    assert list(timeline.first_panel.rows) == ["learner", "inference", "worker 0", "worker 9", "worker 10"]
    (rollouts,) = (kind for kind in timeline.first_panel.bars if kind.name == "collecting a rollout")
    shared = [bar for bar in rollouts.bars if bar.text.startswith("worker 0")]
    assert {bar.thickness for bar in shared} == {0.4}
    assert shared[0].middle - shared[1].middle == pytest.approx(0.4)
    (tmp_path / "a.png").write_bytes(PNGRenderer().render(timeline))
    with Image.open(tmp_path / "a.png") as image:
        assert image.size[0] == 800
        pixels = np.asarray(image)
    for colour in (*KIND_COLOURS.values(), "#CC79A7", "#E0E0E0"):
        assert (pixels == tuple(bytes.fromhex(colour[1:]))).all(axis=-1).sum() > 30
    from plotly.graph_objects import Figure

    Figure(plotly_json(timeline))


def test_file_that_cannot_be_read_is_a_notice(paths: RunPaths, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    for index in (0, 1):
        write_rows(paths, index, [30.0, 40.0], columns={"lag_mean": [1, 2]})
    paths.timeline(0).mkdir()
    write_pbt(paths.pbt(0), [(0, 0, "", 0.1, 0.01, 0.9, "")])
    with caplog.at_level(logging.WARNING):
        analyze_trial(settled(make_spec(), num_policies=2), paths)
    assert [message.partition(":")[0] for message in caplog.messages] == ["cannot draw small_t0_s0_timeline.csv"]
    assert paths.session_graph(0, "pbt", "png").exists()
    for path in (paths.timeline(0), paths.pbt(0)):
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(b"\xff\xfe,,\n\x00\n")
    caplog.clear()
    analyze_trial(settled(make_spec(), num_policies=2), paths)
    assert caplog.messages == []


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_a_curve_for_each_policy(paths: RunPaths, make_spec: MakeSpec) -> None:
    """Table 2 s + p belongs to policy p of Session s."""
    for index, returns in enumerate(([10.0, 20.0], [30.0, 50.0], [20.0, 40.0], [50.0, 50.0])):
        write_rows(paths, index, returns, columns={"lag_mean": [1, 2]})
    metrics = analyze_trial(settled(make_spec(), 2, num_policies=2), paths)
    assert (metrics["policies"], metrics["best_policy"], metrics["sessions"], metrics["total_reward_ma"]) == ([30, 50], 1, 2, 40)
    names = [trace["name"] for trace in read_figure(paths.trial_graph("mean_returns", "html"))[0]]
    assert names[:4] == [f"session {s}, policy {p}" for s in (0, 1) for p in (0, 1)]
    assert names[-1] == "mean of 4 policies"
    title = read_figure(paths.session_graph(3, "mean_returns", "html"))[1]["title"]["text"]
    assert title == "small (CartPole-v1), trial 0, session 1, policy 1: mean return"


def test_policies_of_one_session_and_of_failed_ones(paths: RunPaths, make_spec: MakeSpec) -> None:
    for index, returns in enumerate(([10.0, 20.0], [30.0, 50.0])):
        write_rows(paths, index, returns)
    one = analyze_trial(settled(make_spec(), num_policies=2), paths)
    assert (one["policies"], one["best_policy"], one["sessions"]) == ([20, 50], 1, 1)
    assert (one["current_return"], one["current_return_se"]) == (35, None), "of one Session, not of two"
    assert [trace["name"] for trace in read_figure(paths.trial_graph("mean_returns", "html"))[0]][:2] == ["policy 0", "policy 1"]
    for index, returns in enumerate(([20.0, 40.0], [float("nan")] * 2), start=2):
        write_rows(paths, index, returns)
    two = analyze_trial(settled(make_spec(), 2, num_policies=2), paths, failed={0: "killed"})
    assert (two["policies"], two["best_policy"], two["sessions"], two["failed"]) == ([40, None], 0, 1, 1)
    names = [trace["name"] for trace in read_figure(paths.trial_graph("mean_returns", "html"))[0]]
    assert names[-1] == "mean of 1 policy, 1 session failed"
    for index in range(4):
        write_rows(paths, index, [float("nan")])
    none = analyze_trial(settled(make_spec(), 2, num_policies=2), paths)
    assert (none["policies"], none["best_policy"]) == ([None, None], None)


def test_policies_whose_rows_are_at_frames_of_their_own(paths: RunPaths, make_spec: MakeSpec) -> None:
    for index in range(4):
        write_rows(paths, index, [30.0, 40.0, 50.0], shift=100 * index)
    metrics = analyze_trial(settled(make_spec(), 2, num_policies=2), paths)
    assert metrics["consistency"] is not None
    traces = read_figure(paths.trial_graph("mean_returns", "html"))[0]
    assert traces[-1]["name"] == "mean of 4 policies"
    assert (traces[-1]["x"][0], traces[-1]["x"][-1]) == (1300, 3000)


def test_aligning_keeps_to_a_grid_where_there_is_one() -> None:
    grid = Curve(np.array([10.0, 20.0, 30.0]), np.array([1.0, 2.0, 3.0]))
    stopped = Curve(np.array([10.0, 20.0, 25.0]), np.array([3.0, 4.0, 4.5]))
    assert align_or_interpolate([grid, stopped], 2).frame.tolist() == [10, 20]
    off = Curve(np.array([12.0, 22.0]), np.array([3.0, 4.0]))
    assert align_or_interpolate([grid, off], 2).frame.tolist() == [12, 20, 22]
    assert len(align_or_interpolate([], 2).frame) == 0


ROUNDS = [
    *((0, policy, "", 0.001, 0.01, 0.99, "") for policy in (0, 1, 2)),
    (5000, 0, 30, 0.001, 0.01, 0.99, ""),
    (5000, 1, 10, 0.0012, 0.01, 0.99, "0"),
    (5100, 2, 20, 0.001, 0.008, 0.99, ""),
]


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_history_of_population_based_training(paths: RunPaths, make_spec: MakeSpec) -> None:
    for index in range(3):
        write_rows(paths, index, [10.0, 20.0])
    write_pbt(paths.pbt(0), ROUNDS)
    analyze_trial(settled(make_spec(), num_policies=3, pbt={}), paths)
    traces, layout = read_figure(paths.session_graph(0, "pbt", "html"))
    assert layout["title"]["text"].endswith("session 0: population-based training")
    assert [layout[axis]["title"]["text"] for axis in ("yaxis", "yaxis2")] == ["learning rate", "entropy coefficient"]
    assert "yaxis3" not in layout  # gamma stays as it is
    assert layout["xaxis2"]["title"]["text"] == "frames (of each policy)"
    assert layout["yaxis"]["domain"][0] > layout["yaxis2"]["domain"][1]
    lines = [(trace["yaxis"], trace["name"], trace["x"], trace["y"]) for trace in traces if trace["name"] != MARK]
    assert lines[:3] == [
        ("y", "policy 0", [0, 5000], [0.001, 0.001]),
        ("y", "policy 1", [0, 5000], [0.001, 0.0012]),
        ("y", "policy 2", [0, 5100], [0.001, 0.001]),
    ]
    assert lines[5] == ("y2", "policy 2", [0, 5100], [0.01, 0.008])
    assert all(trace["line"]["shape"] == "hv" for trace in traces if trace["name"] != MARK)
    marks = [(trace["yaxis"], trace["x"], trace["y"], trace["text"]) for trace in traces if trace["name"] == MARK and trace["text"]]
    taken = ["policy 1 copied the weights of policy 0"]
    assert marks == [("y", [5000], [0.0012], taken), ("y2", [5000], [0.01], taken)]
    assert [trace["name"] for trace in traces if trace["showlegend"]] == ["policy 0", "policy 1", "policy 2", MARK]
    with Image.open(paths.session_graph(0, "pbt", "png")) as image:
        assert image.size == (800, 445)


def test_history_of_other_hyperparameters(tmp_path: Path, make_spec: MakeSpec) -> None:
    from plotly.graph_objects import Figure

    path = tmp_path / "a.csv"
    assert pbt_figure(read_columns(path), "a", POLICY_FRAMES) is None
    write_pbt(path, [(0, 0, "", 0.1, "", 0.9, ""), (0, 1, "", 0.1, "", 0.9, ""), (100, 1, "", 0.1, "", 0.95, "")])
    figure = pbt_figure(read_columns(path), "a", POLICY_FRAMES)
    assert figure is not None
    assert [panel.y_label for panel in figure.panels] == ["learning rate", "gamma"]
    assert not any(line.marks for panel in figure.panels for line in panel.lines)
    assert PNGRenderer().render(figure).startswith(b"\x89PNG")
    Figure(plotly_json(figure))
