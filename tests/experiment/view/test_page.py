"""Tests of the view's pages in a headless Chromium: graphs, live rows, comparison, parallel coordinates, hostile names, width, colours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra view is not installed")

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.view import server
from tests.browser import Browser, needs_browser
from tests.experiment.view.folders import HOSTILE, append, make_run, make_search, make_study, serving, training

pytestmark = [pytest.mark.slow, needs_browser]  # a browser takes seconds to start

CURVE = "[...document.querySelectorAll('.js-plotly-plot .scatterlayer path.js-line')].some((one) => one.getAttribute('d').length > 20)"
"""Whether a graph has a curve."""
LAST = "Math.max(...[...document.querySelectorAll('.js-plotly-plot')][0].data.flatMap((trace) => trace.x ?? []))"
"""The last frame of the first graph."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def address(data: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the view's address; then check that no error was reported and no request left it. Pages poll every two seconds."""
    monkeypatch.setattr(server, "_SHARE", 100.0)
    browser.size(1280)
    browser.scheme("light")
    with serving(data) as address:
        yield address
        browser.run("fetch('/api/runs').then((answer) => answer.text())")  # lets pending errors be reported
        assert browser.errors == []
        assert [one for one in browser.requests if not one.startswith((f"{address}/", "data:", "blob:"))] == []
        browser.open("about:blank#end")


def _count(selector: str) -> str:
    return f"document.querySelectorAll({selector!r}).length"


def test_list(browser: Browser, address: str, data: Path) -> None:
    for index in range(3):
        make_run(data, index)
    make_run(data, 3, "dqn_pong")
    make_search(data)
    make_study(data)
    browser.open(address)
    browser.wait(f"{_count('svg.spark path')} === 5")  # a study has no sparkline
    assert browser.run(_count("tbody tr")) == 6
    browser.run("{ const f = document.getElementById('filter'); f.value = 'cartpole -search'; f.dispatchEvent(new Event('input')); }")
    assert browser.run(_count("tbody tr")) == 4
    browser.run("{ const f = document.getElementById('filter'); f.value = 'dqn'; f.dispatchEvent(new Event('input')); }")
    assert browser.run(_count("tbody tr")) == 1
    assert browser.run("new URLSearchParams(location.search).get('q')") == "dqn"
    browser.run("{ const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input')); }")
    browser.run("document.getElementById('group').click()")
    assert browser.run(_count("tr.group")) == 4
    assert "3 runs; return: mean 100, best 100" in browser.run("document.querySelector('tbody').innerText")


def test_many_runs_are_added_while_scrolling(browser: Browser, address: str, data: Path) -> None:
    for index in range(230):
        make_run(data, index, rows=1, meta__max_session=1)
    browser.open(address)
    browser.wait(f"{_count('tbody tr')} >= 100")
    assert browser.run(_count("tbody tr")) < 230
    for _ in range(3):
        browser.run("scrollTo(0, document.body.scrollHeight)")
        browser.run("new Promise((done) => setTimeout(done, 300))")
    browser.wait(f"{_count('tbody tr')} === 230")


def test_live(browser: Browser, address: str, data: Path) -> None:
    """Appended rows, and the end of the training, appear on the page of the run and in the list."""
    paths = make_run(data, rows=3, ended=False)
    with training(paths):
        browser.open(f"{address}/run?path={paths.root.name}")
        browser.wait(CURVE)
        assert browser.run(LAST) == 300
        assert browser.run("document.querySelector('.summary').dataset.status") == "running"
        browser.run("void (window.graph = document.querySelector('.js-plotly-plot'))")
        append(paths, 400, 40.0)
        browser.wait(f"{LAST} === 400")
        assert browser.run("window.graph === document.querySelector('.js-plotly-plot')")  # updated in place: no flicker, the zoom is kept
        browser.run("document.getElementById('tab-logs').click()")
        browser.wait("document.querySelector('pre.log').textContent.includes('begins')")
        with paths.session_log(0).open("a") as file:
            file.write("one more line\n")
        browser.wait("document.querySelector('pre.log').textContent.includes('one more line')")
        browser.open(address)
        browser.wait("document.querySelector('td.state')?.innerText.includes('running')")
        assert "350 of 1,000" in browser.run("document.querySelector('td.frames').innerText")
        append(paths, 900, 90.0)
        browser.wait("document.querySelector('td.frames')?.innerText.includes('600 of 1,000')")
    browser.wait("document.querySelector('td.state')?.innerText.includes('stopped')")


def test_run_page(browser: Browser, address: str, data: Path) -> None:
    paths = make_run(data)
    (paths.root / "video").mkdir()
    (paths.root / "video" / "a.mp4").write_bytes(bytes(1000))
    browser.open(f"{address}/run?path={paths.root.name}")
    browser.wait(CURVE)
    assert browser.run(_count("#graphs .js-plotly-plot")) >= 2
    assert "logs (2)" in browser.run("document.querySelector('.tabs').innerText")
    browser.run("document.getElementById('tab-videos').click()")
    assert browser.run(_count("#videos video")) == 1
    assert not browser.run("document.body.innerText.includes('Share chart')")


def _tick(browser: Browser, *runs: RunPaths) -> None:
    for paths in runs:
        browser.run(f"document.querySelector('tr[data-path=\"{paths.root.name}\"] input').click()")


def test_ticking_compares(browser: Browser, address: str, data: Path) -> None:
    first = make_run(data, 0, value=lambda s, frame: frame / 10 + 10 * s)
    make_run(data, 1)
    other = make_run(data, 2, value=lambda s, frame: frame / 10 + 5 + 10 * s, agent__algorithm__gamma=0.5)
    browser.open(address)
    browser.wait(f"{_count('tbody tr')} === 3")
    assert browser.run("document.getElementById('compare').disabled")
    _tick(browser, first, other)
    assert browser.run("document.getElementById('compare').textContent") == "compare 2"
    browser.run("document.getElementById('compare').click()")
    browser.wait("location.pathname === '/compare'")
    browser.wait(CURVE)
    assert browser.run("document.querySelector('.plot').data.filter((one) => one.showlegend !== false).length") == 2
    text = browser.run("document.getElementById('statistics').innerText")
    assert "interquartile mean" in text
    assert "probability of improvement" in text
    assert "agent.algorithm.gamma" in browser.run("document.getElementById('spec').innerText")
    assert browser.run(_count("#spec tbody tr")) == 1
    browser.run("document.getElementById('all-keys').click()")
    assert browser.run(_count("#spec tbody tr")) > 20
    browser.run("{ const by = document.getElementById('by'); by.value = 'wall_t'; by.dispatchEvent(new Event('change')); }")
    browser.wait(f"{LAST} === 10")


def test_parallel_coordinates(browser: Browser, address: str, data: Path) -> None:
    """Dragging a range on the axis of the metric selects the trials in it; a click removes the selection."""
    paths = make_search(data, (10.0, 40.0, 30.0, 20.0))
    browser.open(f"{address}/run?path={paths.root.name}")
    browser.wait(f"{_count('path.trial')} === 4")
    browser.wait(CURVE)
    assert browser.run("[...document.querySelectorAll('svg.parallel text.title')].map((one) => one.textContent)") == [
        "lr",
        "hid_layers",
        "current_return",
    ]
    assert browser.run("document.getElementById('scale').innerText").split("\n") == ["worst, trial 0: 10", "best, trial 1: 40"]
    drag = """(from, to) => {
        const axis = [...document.querySelectorAll('rect.axis')].pop();
        const box = axis.getBoundingClientRect();
        axis.setPointerCapture = () => {};
        for (const [type, share] of [["pointerdown", from], ["pointermove", to], ["pointerup", to]])
            axis.dispatchEvent(new PointerEvent(type, {pointerId: 1, clientY: box.top + 8 + (1 - share) * (box.height - 16)}));
    }"""
    browser.run(f"({drag})(0.5, 1)")  # 25 to 40
    assert browser.run(_count("path.trial.out")) == 2
    shown = "[...document.querySelectorAll('tr[data-trial]')].map((row) => Number(row.dataset.trial))"
    assert browser.run(shown) == [1, 2]
    browser.run(f"({drag})(0.2, 0.2)")
    assert browser.run(_count("path.trial.out")) == 0
    assert browser.run(shown) == [1, 2, 3, 0]
    browser.run("document.querySelector('tr[data-trial] a').click()")
    browser.wait("new URLSearchParams(location.search).get('trial') === '1'")
    browser.wait(CURVE)


def test_study(browser: Browser, address: str, data: Path) -> None:
    study = make_study(data, 4)
    browser.open(f"{address}/run?path={study.root.name}")
    browser.wait(f"{_count('tbody tr')} === 6")  # two entries with two seeds each
    browser.run("[...document.links].find((one) => one.textContent === 'compare the entries').click()")
    browser.wait("location.pathname === '/compare'")
    browser.wait(CURVE)


def test_hostile_texts_are_shown_as_text(browser: Browser, address: str, data: Path) -> None:
    name = HOSTILE.replace("/", "")
    paths = make_run(data, agent__algorithm__gamma=HOSTILE, env__name=HOSTILE, agent__name=HOSTILE)
    paths.session_log(0).write_text(HOSTILE)
    paths.session_log(0).rename(paths.log_dir / f"{name}.log")
    paths.root.rename(data / name)
    other = make_run(data, 1)
    search = make_search(data)
    search.spec.write_text(search.spec.read_text().replace("lr__loguniform", "lr<img src=x onerror='window.hacked=1'>__loguniform"))
    (data / f"{name}x").mkdir()
    (data / f"{name}x" / "x_spec.json").write_text("{")
    browser.open(address)
    browser.wait(f"{_count('tbody tr')} === 4")
    browser.wait(f"document.body.innerText.includes({HOSTILE!r})")
    pages = [f"run?path={_quoted(name)}", f"compare?run={_quoted(f':{name}')}&run=:{other.root.name}", f"run?path={search.root.name}"]
    for page in pages:
        browser.open(f"{address}/{page}")
        browser.wait(CURVE)
        if page == pages[0]:
            browser.run("document.getElementById('tab-logs').click()")
            browser.wait(f"document.querySelector('pre.log').textContent.includes({HOSTILE!r})")
            browser.run("document.getElementById('tab-graphs').click()")
        assert browser.run("window.hacked") is None
        assert browser.run(_count("img")) == 0


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (1280, "dark"), (390, "dark")])
def test_width_and_colours(browser: Browser, address: str, data: Path, width: int, scheme: str) -> None:
    """No page is wider than the screen, and the background follows the colour scheme."""
    run, search, study = make_run(data), make_search(data), make_study(data)
    browser.size(width)
    browser.scheme(scheme)
    for page in (
        "",
        f"run?path={run.root.name}",
        f"run?path={search.root.name}",
        f"run?path={study.root.name}",
        f"compare?run=:{run.root.name}",
    ):
        browser.open(f"{address}/{page}")
        browser.wait(f"{_count('tbody tr')} > 0")
        assert browser.run("document.documentElement.scrollWidth") <= width
        red = int(browser.run("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
        assert (red > 200) == (scheme == "light")


def test_the_server_ends_and_starts_again(browser: Browser, data: Path) -> None:
    """The page reports that the server does not answer, and continues when the server is started again."""
    make_run(data)
    with serving(data) as address:
        browser.open(address)
        browser.wait(f"{_count('tbody tr')} === 1")
    browser.wait("!document.getElementById('problem').hidden")
    browser.open("about:blank#end")
