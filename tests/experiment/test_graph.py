"""Tests of the analysis of a trial from its tables, as it runs after training, after a failure or after Ctrl-C."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slm_lab.experiment.files.paths import DataMode, RunPaths
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.report import analyze
from slm_lab.experiment.report.analyze import analyze_trial
from slm_lab.experiment.report.baseline import Baseline
from slm_lab.experiment.report.figure import MEAN_COLOUR, Figure, Line, Panel, y_range
from slm_lab.experiment.report.metrics import Curve
from slm_lab.experiment.report.render_html import plotly_json, render_html, script_size
from slm_lab.experiment.report.render_png import PNGRenderer, format_tick
from slm_lab.experiment.report.run import Run, load_run
from slm_lab.experiment.report.trial_figures import BASELINE, Labels, return_curves, session_figures, trial_figures
from slm_lab.experiment.training.observers.base import COLUMNS
from slm_lab.spec.models.spec import Spec

MakeSpec = Callable[..., Spec]


def write_rows(
    paths: RunPaths,
    index: int,
    returns: Sequence[float | str],
    mode: DataMode = "train",
    t: int = 0,
    loss: Any = 0.5,
    shift: int = 0,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write row i of a Session, or of a policy, at frame 1000 i + shift; `columns` adds further columns."""
    columns = columns or {}
    names = (*COLUMNS, *columns)
    lines = [",".join(names)]
    for row, value in enumerate(returns, 1):
        cells: dict[str, Any] = {
            "frame": 1000 * row + shift,
            "opt_step": 10 * row,
            "total_reward": value,
            "total_reward_ma": value,
            "current_return": value,
        }
        cells |= {"loss": loss, "grad_norm": 0.5} | {name: values[row - 1] for name, values in columns.items()}
        lines.append(",".join(str(cells.get(name, "")) for name in names))
    paths.session_df(index, mode, t).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_figure(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the traces (without that of the random baseline) and the layout of a page, with the title joined into one line."""
    text = path.read_text(encoding="utf-8")
    decoder, start = json.JSONDecoder(), text.index("[", text.index("Plotly.newPlot("))
    traces, end = decoder.raw_decode(text, start)
    layout, _ = decoder.raw_decode(text, text.index("{", end))
    layout["title"]["text"] = layout["title"]["text"].replace("<br>", " ")
    return [trace for trace in traces if trace["name"] != BASELINE], layout


def test_the_random_baseline_is_a_line_in_figures_of_returns_if_it_is_known(paths: RunPaths, make_spec: MakeSpec, monkeypatch: Any) -> None:
    """The line is drawn only in figures of returns, also if the baseline is measured at the end of the run."""
    write_rows(paths, 0, [30.0, 50.0])
    run, labels = Run(paths), Labels("small", {"train": "last 100 episodes", "eval": ""})
    returns = {0: return_curves(run.tables("train")[0])}
    assert [line.name for line in trial_figures(returns, labels)["mean_returns"].first_panel.lines] == ["session 0"]
    known = replace(labels, baseline=22.0)
    for figures in (trial_figures(returns, known), session_figures(0, returns[0], known)):
        first, *_ = figures["mean_returns"].first_panel.lines
        assert (first.name, first.curve.value.tolist(), first.curve.frame.tolist()) == (BASELINE, [22, 22], [0, 2000])
        assert y_range(figures["mean_returns"].first_panel)[0] < 22
    monkeypatch.setattr(analyze, "known_baseline", lambda spec: None)
    monkeypatch.setattr(analyze, "measure_baseline", lambda spec, stop: 22.0)
    analyze_trial(make_spec(), paths)
    assert f'"{BASELINE}"' in paths.trial_graph("mean_returns", "html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("pictures")
def test_files_and_numbers_of_a_trial(paths: RunPaths, make_spec: MakeSpec) -> None:
    """All pages share one copy of the script plotly.min.js."""
    write_rows(paths, 0, [30.0, 50.0, 40.0, 60.0])
    write_rows(paths, 1, [40.0, 60.0, 50.0, 70.0])
    script = paths.root / "plotly.min.js"
    script.write_bytes(b"half of i")  # left by a run whose disk was full
    metrics = analyze_trial(make_spec(), paths)
    assert metrics == json.loads(paths.trial_metrics().read_text())
    assert metrics["strength"] == 30
    assert metrics["total_reward_ma"] == 65
    assert metrics["consistency"] == pytest.approx(1 - 2 * 20 / 120)
    assert [repr(metrics[name]) for name in ("random_baseline", "sessions", "frame")] == ["20.0", "2", "4000"]
    assert json.loads(paths.session_metrics(1).read_text())["strength"] == 35
    graphs = ("mean_returns", "mean_returns_ma")
    drawn = {paths.trial_graph(what, ext) for what in graphs for ext in ("html", "png")}
    drawn |= {paths.session_graph(index, what, ext) for what in graphs for ext in ("html", "png") for index in (0, 1)}
    assert {path for ext in ("html", "png") for path in paths.root.rglob(f"*.{ext}")} == drawn
    assert all(path.stat().st_size > 1000 for path in drawn)
    assert list(paths.root.rglob("*.js")) == [script]
    assert script.stat().st_size > 1_000_000
    pages = list(paths.root.rglob("*.html"))
    assert {file.parent for file in pages} == {paths.root, paths.graph_dir}
    for file in pages:
        (source,) = re.findall(r'src="([^"]*)"', file.read_text(encoding="utf-8"))
        assert (file.parent / source).resolve() == script


@pytest.mark.usefixtures("pictures")
def test_metrics_and_titles_of_evaluation(paths: RunPaths, make_spec: MakeSpec) -> None:
    for index in (0, 1):
        write_rows(paths, index, [30.0, 30.0, 30.0])
        write_rows(paths, index, [60.0, 80.0, 70.0], "eval")
    metrics = analyze_trial(make_spec(meta={"rigorous_eval": 4}), paths)
    assert (metrics["strength"], metrics["total_reward_ma"]) == (50, 70)
    traces, layout = read_figure(paths.trial_graph("mean_returns", "html"))
    assert traces[0]["y"] == [60, 80, 70]
    assert layout["yaxis"]["title"]["text"] == "mean return (4 evaluation episodes)"
    trial = "small (CartPole-v1), trial 0"
    for path, title in (
        (paths.trial_graph("mean_returns", "html"), f"{trial}: mean return"),
        (paths.session_graph(1, "mean_returns", "html"), f"{trial}, session 1: mean return"),
        (paths.session_graph(1, "mean_returns_ma", "html", "eval"), f"{trial}, session 1, evaluation: mean return, moving average"),
    ):
        assert read_figure(path)[1]["title"]["text"] == title
    long = Figure("x" * 300 + ": loss", (Panel("y"),))
    assert plotly_json(long)["layout"]["title"]["text"].endswith("x:<br>loss")


def test_trial_graph_shows_sessions_mean_and_band(paths: RunPaths, make_spec: MakeSpec) -> None:
    write_rows(paths, 0, [10.0, 20.0, 30.0])
    write_rows(paths, 1, [20.0, 40.0])
    analyze_trial(make_spec(), paths)
    traces, layout = read_figure(paths.trial_graph("mean_returns", "html"))
    by_name = {trace["name"]: trace for trace in traces}
    assert by_name["session 0"]["y"] == [10, 20, 30]
    assert by_name["session 0"]["line"]["width"] < by_name["mean of 2 sessions"]["line"]["width"]
    assert by_name["session 0"]["opacity"] >= 0.9  # each seed can be seen
    assert by_name["mean of 2 sessions"]["x"] == [1000, 2000]
    assert by_name["mean of 2 sessions"]["y"] == [15, 30]
    assert by_name["±1 standard deviation"]["y"] == [20, 40, 20, 10]
    assert layout["title"]["text"] == "small (CartPole-v1), trial 0: mean return"
    assert layout["legend"]["y"] < 0  # below the plot, where as many rows as a phone needs cover nothing
    assert layout["xaxis"]["title"]["text"] == "frames"
    assert layout["yaxis"]["title"]["text"] == "mean return (recent episodes)"


def write_shared(
    paths: RunPaths, index: int, returns: Sequence[float], lock_wait: float | str = 0.0, mode: DataMode = "train", new: float | None = None
) -> None:
    """Write rows of a Session that shares its net: row i at global frame 200 i + 50 index and after i + index / 2 seconds.

    new: return of the new episodes of each row; None: rows of SLM Lab, which lack this column.
    """
    columns = ["frame", "global_frame", "wall_t", "opt_step", "total_reward", "total_reward_ma", "grad_norm", "staleness", "lock_wait"]
    columns += [] if new is None else ["worker_reward", "epi_new", "return_new", "loss"]
    rows: list[Sequence[Any]] = [columns]
    for i, value in enumerate(returns, 1):
        row = [100 * i, 200 * i + 50 * index, i + index / 2, 10 * i, value, value, 0.5, 1.0 + index, lock_wait]
        rows.append([*row, *([] if new is None else [value + index, 3, new, 1.0 + index])])
    lines = [",".join(map(str, row)) for row in rows]
    paths.session_df(index, mode).write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.usefixtures("pictures")
def test_workers_of_one_net_are_one_experiment(paths: RunPaths, make_spec: MakeSpec) -> None:
    """The workers have one curve over global frames and one set of metrics."""
    write_shared(paths, 0, [30.0, 50.0, 70.0], lock_wait=0.25, new=60.0)
    write_shared(paths, 1, [40.0, 60.0, 80.0], new=60.0)
    spec = make_spec(meta={"distributed": "synced", "max_session": 2}, env={"max_frame": 600})
    metrics = analyze_trial(spec, paths)
    traces, layout = read_figure(paths.trial_graph("mean_returns", "html"))
    (line,) = traces
    assert (line["name"], line["x"]) == ("all workers", [200, 250, 400, 450, 600, 650])
    assert line["y"] == [30, 40, 50, 60, 70, 80]
    assert layout["xaxis"]["title"]["text"] == "global frames (of all workers together)"
    assert layout["yaxis"]["title"]["text"] == "mean return (recent episodes)"
    assert not list(paths.graph_dir.glob("*session_graph*"))
    assert metrics["consistency"] is None
    assert (metrics["strength"], metrics["final_return"], metrics["frame"], metrics["sessions"]) == (35, 80, 650, 2)
    assert metrics["sample_efficiency"] == pytest.approx(
        (10 / 200 + 20 / 250 + 30 / 400 + 40 / 450 + 50 / 600 + 60 / 650) / (10 + 20 + 30 + 40 + 50 + 60)
    )
    worker = json.loads(paths.session_metrics(1).read_text())
    assert (worker["strength"], worker["final_return"], worker["frame"], worker["status"]) == (None, None, 300, "done")
    metrics = analyze_trial(spec, paths, failed={1: "killed"})  # the rows of the failed worker still count
    lines = [(trace["name"], trace["y"]) for trace in read_figure(paths.trial_graph("mean_returns", "html"))[0]]
    assert ("all workers, 1 failed", [30, 40, 50, 60, 70, 80]) in lines
    assert (metrics["final_return"], metrics["sessions"], metrics["failed"]) == (80, 1, 1)


@pytest.mark.usefixtures("pictures")
def test_shared_sessions_without_a_shared_range_or_a_return(paths: RunPaths, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    write_shared(paths, 0, [1.0], lock_wait="")
    write_shared(paths, 1, [2.0], lock_wait=0.0)
    write_shared(paths, 2, [])
    analyze_trial(make_spec(), paths)
    traces, _ = read_figure(paths.trial_graph("mean_returns", "html"))
    assert [(trace["name"], trace["x"]) for trace in traces] == [("all workers", [200, 250])]
    for index in range(3):
        write_shared(paths, index, [float("nan"), float("nan")])
    analyze_trial(make_spec(), paths)
    assert caplog.messages == []


@pytest.mark.parametrize("letters", [(46, 46, 46, 46, 46), (11, 28, 51, 22), (10, 35, 55, 25, 48, 44, 20)])
def test_the_legend_of_several_bands_names_lines_only(letters: tuple[int, ...]) -> None:
    """The legend takes as many rows as long names need, and the axes shrink accordingly."""
    curve = Curve(np.arange(1.0, 40), np.arange(39.0))
    lines = [
        Line(f"{order}{'a3c_gae_shared (1 seed)' * 3}"[:count], curve, MEAN_COLOUR, (curve.value - 1, curve.value + 1))
        for order, count in enumerate(letters)
    ]
    several, one = figure_of(*lines), figure_of(lines[0])
    assert [trace.get("showlegend", True) for trace in plotly_json(several)["data"]] == [False, True] * len(letters)
    assert [trace.get("showlegend", True) for trace in plotly_json(one)["data"]] == [True, True]
    renderer = PNGRenderer()
    canvas = renderer._standard
    heights, names = [], []
    for figure in (one, several, one):
        renderer.render(figure)
        (legend,) = canvas.picture.legends
        box = legend.get_window_extent()
        assert box.x1 <= 800
        assert box.y1 < canvas.title.get_window_extent().y0
        heights.append(canvas.axes[0].get_position().height)
        names.append(len(legend.get_texts()))
    assert heights[0] == heights[2] > heights[1]
    assert names == [2, len(letters), 2]
    for figure in (several, figure_of()):
        renderer.render(figure)
    assert canvas.axes[0].get_position().height == heights[0]


def test_session_without_an_episode_beside_one_with(paths: RunPaths, make_spec: MakeSpec) -> None:
    write_rows(paths, 0, ["", "", ""])
    write_rows(paths, 1, [30.0, 50.0])
    metrics = analyze_trial(make_spec(), paths)
    assert (metrics["strength"], metrics["sessions"]) == (20, 2)
    assert json.loads(paths.session_metrics(0).read_text())["strength"] is None
    assert not paths.session_graph(0, "mean_returns", "png").exists()
    assert [trace["name"] for trace in read_figure(paths.trial_graph("mean_returns", "html"))[0]] == ["session 1"]


@pytest.mark.usefixtures("pictures")
def test_no_episode_at_all_and_nan_losses(paths: RunPaths, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(paths, 0, ["", ""], loss="nan")
    metrics = analyze_trial(make_spec(), paths)
    assert metrics["strength"] is metrics["total_reward_ma"] is metrics["consistency"] is None
    traces, layout = read_figure(paths.trial_graph("mean_returns", "html"))
    assert traces == []
    assert "no episode has ended" in layout["annotations"][0]["text"]
    assert paths.trial_graph("mean_returns_ma", "png").exists()
    assert caplog.messages == []


def test_another_trial_and_nothing_at_all(paths: RunPaths, make_spec: MakeSpec) -> None:
    assert analyze_trial(make_spec(), paths) == {}
    assert not paths.trial_metrics().exists()
    write_rows(paths, 0, [30.0], t=3)
    assert analyze_trial(make_spec(), paths, 3)["strength"] == 10
    assert paths.trial_graph("mean_returns", "png", 3).exists()


@pytest.mark.usefixtures("pictures")
def test_failed_graph_is_a_notice(
    paths: RunPaths, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph that cannot be drawn causes a notice and must not fail the run."""

    def fail(*_: object) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr(PNGRenderer, "render", fail)
    write_rows(paths, 0, [30.0, 40.0])
    with caplog.at_level(logging.WARNING):
        metrics = analyze_trial(make_spec(), paths)
    assert metrics["strength"] == 15
    assert "small_t0_trial_graph_mean_returns_vs_frames.png failed: ValueError: no ink" in caplog.messages
    assert paths.trial_graph("mean_returns", "html").exists()
    monkeypatch.setattr(PNGRenderer, "__init__", fail)
    assert analyze_trial(make_spec(), paths) == metrics


def test_what_cannot_be_read_or_written_is_a_notice(paths: RunPaths, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    paths.session_df(0).mkdir()
    paths.trial_metrics().mkdir()
    write_rows(paths, 1, [30.0, 40.0])
    assert analyze_trial(make_spec(), paths)["strength"] == 15
    assert [message.partition(": ")[0] for message in caplog.messages[:2]] == [
        "cannot read small_t0_s0_session_df_train.csv",
        "small_t0_trial_metrics_scalar.json failed",
    ]
    assert paths.trial_graph("mean_returns", "png").exists()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return the function disk(space), which limits the disk to so many more bytes.

    The file that exceeds the limit is written in part, and later files stay empty.
    """

    def limit(space: int) -> None:
        left, write_bytes = space, Path.write_bytes

        def write(path: Path, content: Any) -> int:
            nonlocal left
            written = write_bytes(path, content[:left])
            left -= written
            if written < len(content):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return written

        monkeypatch.setattr(Path, "write_bytes", write)

    return limit


@pytest.mark.parametrize("graphs", [0, 1, 3])
@pytest.mark.usefixtures("pictures")
def test_full_disk_leaves_whole_files_and_one_notice(
    paths: RunPaths, make_spec: MakeSpec, disk: Callable[[int], None], caplog: pytest.LogCaptureFixture, graphs: int
) -> None:
    for index in (0, 1):
        write_rows(paths, index, [30.0, 50.0, 40.0])
    disk(script_size() + 14_000 + graphs * 40_000 if graphs else 100_000)
    metrics = analyze_trial(make_spec(), paths)
    assert metrics == json.loads(paths.trial_metrics().read_text())
    pages, pictures = (list(paths.root.rglob(f"*.{ext}")) for ext in ("html", "png"))
    all_graphs = 2 + 2 * 2
    assert caplog.messages == [f"disk full: {all_graphs - len(pictures)} graphs not drawn"]
    assert bool(pictures) is bool(graphs)
    assert (paths.root / "plotly.min.js").exists() is bool(graphs)
    for page_file in pages:
        read_figure(page_file)
        assert page_file.read_text(encoding="utf-8").endswith("</html>")
    for picture in pictures:
        with Image.open(picture) as image:
            image.load()
    assert not list(paths.root.rglob(".*"))


def test_full_disk_before_the_metrics(
    paths: RunPaths, make_spec: MakeSpec, disk: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(paths, 0, [30.0, 40.0])
    paths.trial_metrics().write_text("of before")
    disk(10)
    assert analyze_trial(make_spec(), paths)["strength"] == 15
    assert caplog.messages == ["disk full: 2 metrics files not written, 4 graphs not drawn"]
    assert paths.trial_metrics().read_text() == "of before"
    assert not paths.session_metrics(0).exists()
    assert not list(paths.root.rglob(".*"))


def figure_of(*lines: Line, title: str = "a") -> Figure:
    return Figure(title, (Panel("y", list(lines)),))


def parabola(count: int, title: str = "a") -> Figure:
    frame = np.arange(1.0, count + 1)
    return figure_of(Line("b", Curve(frame, frame**2), band=(frame**2 - 1, frame**2 + 1)), title=title)


def test_picture_has_the_lines_colours_in_it(tmp_path: Path) -> None:
    renderer = PNGRenderer()
    for name, figure in (("a.png", parabola(40)), ("empty.png", figure_of()), ("again.png", parabola(40))):
        (tmp_path / name).write_bytes(renderer.render(figure))
    blue = tuple(bytes.fromhex(MEAN_COLOUR[1:]))

    def count(name: str) -> int:
        with Image.open(tmp_path / name) as image:
            assert image.size == (800, 450)
            return int((np.asarray(image) == blue).all(axis=-1).sum())

    assert count("a.png") > 300
    assert count("empty.png") == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "again.png").read_bytes()  # nothing of the previous figure remains


@pytest.mark.parametrize("count", [1, 2, 20_000])
@pytest.mark.parametrize("title", ["$\\oops{$", "<b> & $x", "名" * 200])
def test_any_title_and_length(count: int, title: str) -> None:
    assert PNGRenderer().render(parabola(count, title)).startswith(b"\x89PNG")
    assert len(render_html(parabola(count, title), "a.js")) < 200_000
    trace = plotly_json(parabola(count, title))["data"][-1]
    assert (trace["x"][0], trace["x"][-1]) == (1, count)
    assert trace["mode"] == ("lines+markers" if count < 20 else "lines")


@pytest.mark.parametrize("figure", [parabola(3), parabola(40), figure_of()])
def test_page_holds_what_plotly_knows(figure: Figure) -> None:
    from plotly.graph_objects import Figure as PlotlyFigure

    PlotlyFigure(plotly_json(figure))  # the check is skipped when the page is written, since its import takes a second


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (1500, "1,500"), (0.25, "0.25"), (2e-5, "2e-5"), (-0.00045, "−4.5e-4")])
def test_tick_is_short(value: float, text: str) -> None:
    assert format_tick(value, None) == text


def test_failed_sessions_have_metrics_and_graphs(paths: RunPaths, make_spec: MakeSpec) -> None:
    """Failed Sessions are drawn with a label of their failure, and the means exclude them."""
    for index, returns in enumerate(([30.0, 50.0], [40.0, 60.0], [900.0])):
        write_rows(paths, index, returns)
    spec = make_spec(meta={"max_session": 4})
    metrics = analyze_trial(spec, paths, failed={2: "Traceback\n  line 1\nValueError: bad\n", 3: "killed by SIGKILL"}, stop=Stop())
    assert (metrics["strength"], metrics["sessions"], metrics["status"], metrics["failed"]) == (25, 2, "failed", 2)
    assert metrics["failures"] == {"2": "ValueError: bad", "3": "killed by SIGKILL"}
    assert json.loads(paths.trial_metrics().read_text()) == metrics
    failed = json.loads(paths.session_metrics(2).read_text())
    assert (failed["status"], failed["strength"], failed["failed"].splitlines()[0]) == ("failed", 880, "Traceback")
    without_rows = json.loads(paths.session_metrics(3).read_text())
    assert (without_rows["status"], without_rows["strength"], without_rows["failed"]) == ("failed", None, "killed by SIGKILL")
    assert json.loads(paths.session_metrics(0).read_text())["status"] == "done"
    assert paths.session_graph(2, "mean_returns", "png").exists()
    names = [trace["name"] for trace in read_figure(paths.trial_graph("mean_returns", "html"))[0]]
    assert names == ["session 0", "session 1", "session 2 (failed)", "±1 standard deviation", "mean of 2 sessions, 2 failed"]
    paths.spec.write_text(json.dumps({"small": {"env": {"name": "CartPole-v1", "max_frame": 1000}}}))
    run = load_run(paths.root)
    assert (run.status, run.sessions) == ("failed", {0: "done", 1: "done", 2: "failed", 3: "failed"})
    analyze_trial(spec, paths, failed={0: "killed", 2: "killed"})
    assert read_figure(paths.trial_graph("mean_returns", "html"))[0][-1]["name"] == "mean of 1 session, 2 failed"
    all_failed = analyze_trial(spec, paths, failed=dict.fromkeys(range(3), ""))
    assert (all_failed["strength"], all_failed["total_reward_ma"], all_failed["sessions"]) == (None, None, 0)
    assert json.loads(paths.session_metrics(0).read_text())["failed"] == "unknown cause"
    assert {trace["name"] for trace in read_figure(paths.trial_graph("mean_returns", "html"))[0]} == {
        f"session {s} (failed)" for s in range(3)
    }
    assert analyze_trial(spec, paths, 1, failed={0: "no rows"})["failures"] == {"0": "no rows"}
    assert "failed" not in analyze_trial(spec, paths)


def test_a_session_that_was_stopped(paths: RunPaths, make_spec: MakeSpec) -> None:
    write_rows(paths, 0, [30.0, 50.0])  # two of ten thousand frames
    spec, stop = make_spec(env={"max_frame": 10_000}), Stop()
    assert analyze_trial(spec, paths, stop=stop)["status"] == "done"  # ended for another reason than a signal
    assert analyze_trial(spec, paths)["status"] == "stopped"
    stop.requested = True
    assert analyze_trial(spec, paths, stop=stop)["status"] == "stopped"


def test_everything_is_written_before_the_baseline_is_measured(
    paths: RunPaths, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the measurement the metrics and graphs are written again; after Ctrl-C nothing is measured."""
    spec, stop, measured = make_spec(), Stop(), 0

    def measure(env: Any, asked: Stop) -> float:
        nonlocal measured
        measured += 1
        metrics = json.loads(paths.trial_metrics().read_text())
        assert (metrics["total_reward_ma"], metrics["strength"], metrics["random_baseline"]) == (40, None, None)
        assert paths.trial_graph("mean_returns", "png").exists()
        assert BASELINE not in paths.trial_graph("mean_returns", "html").read_text(encoding="utf-8")
        assert asked is stop
        return 20.0

    monkeypatch.setattr(analyze, "known_baseline", lambda env: None)
    monkeypatch.setattr(analyze, "measure_baseline", measure)
    assert analyze_trial(spec, paths) == {}
    write_rows(paths, 0, [""])
    analyze_trial(spec, paths, stop=stop)
    assert measured == 0  # no return to compare with the baseline
    write_rows(paths, 0, [30.0, 40.0])
    metrics = analyze_trial(spec, paths, stop=stop)
    assert (metrics["strength"], measured) == (15, 1)
    assert json.loads(paths.trial_metrics().read_text()) == metrics
    assert json.loads(paths.session_metrics(0).read_text())["random_baseline"] == 20
    assert BASELINE in paths.trial_graph("mean_returns", "html").read_text(encoding="utf-8")
    stop.requested = True
    assert analyze_trial(spec, paths, stop=stop)["strength"] is None
    assert measured == 1
    monkeypatch.setattr(analyze, "known_baseline", lambda env: Baseline(None))  # no episode of the env ends
    assert analyze_trial(spec, paths)["strength"] is None
    assert measured == 1


def test_metrics_are_valid_json_whatever_a_table_holds(paths: RunPaths, make_spec: MakeSpec) -> None:
    write_rows(paths, 0, ["1e308", "1e308", "inf", "-1e308", "nan"], loss="1e400")
    with np.errstate(all="ignore"):
        metrics = analyze_trial(make_spec(), paths)
    assert metrics == json.loads(paths.trial_metrics().read_text(), parse_constant=pytest.fail)
    json.loads(paths.session_metrics(0).read_text(), parse_constant=pytest.fail)
