"""Tests of the report page of a run in headless Chromium: plots, controls, and that the page sends no network requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.report import report_data as report_data_module
from slm_lab.experiment.report.baseline import Baseline
from slm_lab.experiment.report.figure import Figure, Line, Panel, ParallelCoordinates, Scale, Trials
from slm_lab.experiment.report.metrics import Curve
from slm_lab.experiment.report.render_html import plotly_json
from slm_lab.experiment.report.report_page import write_report, write_trial_report
from tests.browser import Browser, needs_browser
from tests.experiment.test_report import HOSTILE, save_spec, two_seeds, write_rows

pytestmark = [needs_browser, pytest.mark.slow]
TRACES = "document.getElementById('graph-return').data"
DRAWN = "SLMReport.drawAll(document.getElementById('report'))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture
def report(browser: Browser, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """Return the browser with the page of two seeds, with a notice in the log, 1,280 pixels wide."""
    monkeypatch.setattr(report_data_module, "known_baseline", lambda spec: Baseline(20.0))
    two_seeds(paths)
    lines = "2026-01-01 10:00:00,000 begins: index 0, device cpu, frame 0\n2026-01-01 10:00:02,000 the loss was not finite\n"
    paths.session_log(0).write_text(lines)
    browser.size(1280)
    browser.scheme("light")
    browser.open(write_trial_report(paths))
    browser.wait(f"{TRACES} !== undefined")
    return browser


def ys(browser: Browser, meta: str) -> Any:
    return browser.run(f"{TRACES}.filter(one => one.meta === {json.dumps(meta)}).map(one => one.y)")


def choose(browser: Browser, key: str, value: str) -> None:
    browser.run(f"(() => {{const one = document.getElementById('choose-{key}'); one.value = {json.dumps(value)}; one.onchange()}})()")


def smooth(browser: Browser, weight: float) -> None:
    browser.run(f"(() => {{const one = document.getElementById('smoothing'); one.value = {weight}; one.oninput()}})()")


def test_every_graph_is_drawn_and_nothing_leaves_the_machine(report: Browser) -> None:
    report.run(DRAWN)
    graphs = report.run("[...document.querySelectorAll('.graph')].map(one => [one.id, one.data.length, one.data[0].x.length])")
    assert len(graphs) >= 8
    assert all(traces > 0 and points > 0 for _, traces, points in graphs), graphs
    assert report.errors == []
    assert {url.partition(":")[0] for url in report.requests} == {"file"}
    assert len(report.requests) == 2
    titles = report.run("[...document.querySelectorAll('.graph')].map(one => one.layout.xaxis.title.text)")
    assert set(titles) == {"frames"}


def test_first_screen_answers_which_seed_was_worse_and_why(report: Browser) -> None:
    """The answer must be within the first 800 pixels, without scrolling."""
    bottom = "document.querySelector('.sentences p').getBoundingClientRect().bottom"
    assert report.run(bottom) < 800
    text = report.run("document.querySelector('.sentences').innerText")
    assert "Session 1 ended worse than session 0" in text
    assert "explored less" in text
    assert report.run("document.querySelector('.ranking').getBoundingClientRect().bottom") < 800


def test_seeds_can_be_switched_and_the_mean_follows(report: Browser) -> None:
    assert len(ys(report, "line")) == 2
    assert ys(report, "mean")[0][-1] == 175
    report.run("document.querySelector('input[data-line=\"1\"]').click()")
    assert ys(report, "line") == [[20, 60, 100, 200, 250, 300]]
    assert ys(report, "mean") == []  # one seed has no mean
    report.run("document.querySelector('input[data-line=\"1\"]').click()")
    assert len(ys(report, "mean")) == 1


def test_return_axis_band_and_smoothing(report: Browser) -> None:
    assert ys(report, "level") == [[20, 20]]
    assert len(ys(report, "band")) == 1
    assert max(ys(report, "band")[0]) == 300  # 175 + 125
    choose(report, "band", "interval")
    assert max(ys(report, "band")[0]) == 500  # the highest possible return
    choose(report, "band", "none")
    assert ys(report, "band") == []
    choose(report, "axis", "wall_t")
    assert report.run(f"{TRACES}.find(one => one.meta === 'line').x") == [1, 2, 3, 4, 5, 6]
    assert report.run("document.getElementById('graph-return').layout.xaxis.title.text") == "seconds of training"
    choose(report, "axis", "opt_step")
    assert report.run(f"{TRACES}.find(one => one.meta === 'line').x") == [10, 20, 30, 40, 50, 60]
    smooth(report, 0.5)
    # (1 - w) Σ w^(n - i) y_i, divided by the sum of the weights: 20, (10 + 60) / 1.5 …
    smoothed, last, share = list[float](), 0.0, 0.0
    for y in (20, 60, 100, 200, 250, 300):
        last, share = 0.5 * last + 0.5 * y, 0.5 * share + 0.5
        smoothed.append(last / share)
    assert np.allclose(ys(report, "line")[0], smoothed)
    choose(report, "return", "train total_reward")
    smooth(report, 0)
    assert ys(report, "line")[0] == [20, 60, 100, 200, 250, 300]  # total_reward is equal here


def test_events_stand_on_every_axis(report: Browser) -> None:
    """The notice came after 2 s, at frame 2,000 and after 20 gradient steps, and is marked on each axis."""
    for axis, place in (("frame", 2000), ("wall_t", 2), ("opt_step", 20)):
        choose(report, "axis", axis)
        assert report.run(f"{TRACES}.find(one => one.meta === 'events').x") == [place]
    assert "the loss was not finite" in report.run("document.getElementById('events').innerText")


def test_choices_outlive_a_reload(report: Browser) -> None:
    choose(report, "axis", "wall_t")
    report.run("location.reload()")
    report.wait(f"document.readyState === 'complete' && {TRACES} !== undefined")
    assert report.run("document.getElementById('graph-return').layout.xaxis.title.text") == "seconds of training"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_and_colour_schemes(report: Browser, scheme: str) -> None:
    report.size(390)
    report.scheme(scheme)
    report.run(DRAWN)
    # plotly resizes its graphs with a delay
    report.wait("[...document.querySelectorAll('.main-svg')].every(one => one.getBoundingClientRect().width <= 390)")
    assert report.run("document.documentElement.scrollWidth") <= 390
    background = report.run("getComputedStyle(document.body).backgroundColor")
    ink = report.run("document.getElementById('graph-return').layout.font.color")
    assert (background == "rgb(16, 19, 21)") is (scheme == "dark")
    assert ink == ("#e6e8ea" if scheme == "dark" else "#23282d")
    assert report.errors == []


def test_print_has_every_graph_and_dark_ink(report: Browser) -> None:
    report.scheme("dark")
    assert report.print().startswith(b"%PDF")
    assert report.run("[...document.querySelectorAll('.graph')].every(one => one.data.length > 0)")
    report.run("dispatchEvent(new Event('beforeprint'))")
    assert report.run("document.getElementById('graph-return').layout.font.color") == "#23282d"
    report.run("dispatchEvent(new Event('afterprint'))")


def test_newer_data_keep_the_choices(report: Browser, paths: RunPaths) -> None:
    """New data arrive as from a server; the chosen return must stay chosen when the first evaluation adds another one before it."""
    choose(report, "axis", "wall_t")
    choose(report, "return", "train total_reward")
    write_rows(paths, 0, [20.0, 60.0, 100.0, 200.0, 250.0, 300.0, 310.0], columns={"wall_t": [1, 2, 3, 4, 5, 6, 7]})
    data = report_data_module.report_data(report_data_module.Run(paths))
    data["returns"].insert(0, {"column": "total_reward", "label": "evaluation", "mode": "eval"})
    report.run(f"SLMReport.update(document.getElementById('report'), {json.dumps(data)})")
    report.wait(f"{TRACES} !== undefined")
    assert report.run("document.getElementById('choose-return').value") == "train total_reward"
    assert ys(report, "line")[0][-1] == 310
    assert report.run(f"{TRACES}.find(one => one.meta === 'line').x")[-1] == 7


def test_hostile_names_are_text(browser: Browser, paths: RunPaths) -> None:
    paths = RunPaths(paths.root, "hostile")
    save_spec(paths, HOSTILE, env={"name": "<img src=x onerror=alert(1)>", "max_frame": 10})
    write_rows(paths, 0, [1.0, 2.0], columns={"info_<b>x</b>": [1, 2]})
    browser.size(1280)
    browser.open(write_trial_report(paths))
    browser.run(DRAWN)
    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    assert browser.run("document.querySelectorAll('img, main b, main script').length") == 0
    assert browser.errors == []


def test_without_its_script_the_page_says_so(browser: Browser, paths: RunPaths) -> None:
    two_seeds(paths)
    page = write_trial_report(paths)
    (paths.root / "plotly.min.js").unlink()
    browser.open(page)
    assert "plotly.min.js is not beside this page" in browser.run("document.body.innerText")
    assert "session 1" in browser.run("document.querySelector('.ranking').innerText")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_and_tables_of_a_search(browser: Browser, tmp_path: Path, scheme: str) -> None:
    frame = np.arange(1.0, 6)
    curves = Figure("a: returns", (Panel("mean return", [Line("1. trial 0", Curve(frame, frame), "#440154")]),))
    axes = [Scale("gamma", [(0.0, "0.9"), (1.0, "1")]), Scale("metric", [(0.0, "1"), (1.0, "2")])]
    trials = Trials(["trial 0", "trial 1"], ["finished"] * 2, "metric", np.array([2.0, 1.0]), 1.0, 2.0)
    parallel = ParallelCoordinates("a: trials", "", trials, axes, np.array([[0.0, 1.0], [1.0, 0.0]]))
    figures = [{"title": one.title, "note": "", "plot": plotly_json(one)} for one in (curves, parallel)]
    row: list[Any] = [{"text": "trial 0", "href": "a_t0_report.html"}, {"text": "trial 1", "href": "javascript:alert(1)"}, "2"]
    ranking = {"title": "Ranking", "columns": ["trial", "other", "metric"], "rows": [row], "note": ""}
    data = {"version": 1, "kind": "search", "title": "a", "folder": "a", "figures": figures, "tables_of": [ranking]}
    browser.size(1280)
    browser.scheme(scheme)
    browser.open(write_report(tmp_path, tmp_path / "report.html", data))
    browser.run(DRAWN)
    assert browser.run("[...document.querySelectorAll('.graph')].map(one => one.data[0].type)") == ["scatter", "parcoords"]
    assert browser.run("document.querySelector('.graph').data[0].line.color") == ("#cfa6ff" if scheme == "dark" else "#440154")
    assert browser.run("[...document.querySelectorAll('td a')].map(one => one.getAttribute('href'))") == ["a_t0_report.html"]
    assert browser.errors == []
