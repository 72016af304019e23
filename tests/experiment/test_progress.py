from __future__ import annotations

import io
import math
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console

from slm_lab.experiment.events import CheckpointWritten, Event, Notice, Progress, Row, SessionEnded
from slm_lab.experiment.report import progress as progress_module
from slm_lab.experiment.report.progress import ProgressDisplay, format_number, format_with_error
from slm_lab.experiment.report.screen import Screen, console_on
from slm_lab.experiment.training.observers.builtin import ProgressReporter
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Metrics

ROW: dict[str, float | int | None] = {"current_return": 21.5, "current_return_se": 1.25}


def shown(terminal: bool, sessions: int = 2, width: int = 80) -> tuple[ProgressDisplay, io.StringIO]:
    file = io.StringIO()
    return ProgressDisplay(sessions, 1000, Console(file=file, force_terminal=terminal, width=width, highlight=False, soft_wrap=True)), file


def test_plain_lines_without_a_terminal() -> None:
    progress, file = shown(terminal=False)
    with progress:
        progress.update(0, 250, 500.0, None)
        progress.update(0, 250, 500.0, ROW)
        progress.update(0, 500, 500.0, ROW)  # too soon for another line
        progress.update(1, 500, 500.0, ROW)
        progress.update(0, 1000, 500.0, ROW, seconds_left=90.0)  # the last row is never delayed
        progress.states[1].line_due = 0.0
        progress.update(1, 500, 1.0, ROW, seconds_left=90.0)  # time left until max_seconds
    assert file.getvalue().splitlines() == [
        "session 0  frame 250/1,000  fps 500  return 21.5 ± 1.2  eta 0:02",
        "session 1  frame 500/1,000  fps 500  return 21.5 ± 1.2  eta 0:01",
        "session 0  frame 1,000/1,000  fps 500  return 21.5 ± 1.2  eta 0:00",
        "session 1  frame 500/1,000  fps 1  return 21.5 ± 1.2  eta 1:30",
    ]


def test_a_line_within_2_seconds_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line appears within 2 s whatever log_frequency is; more lines follow at longer intervals."""
    now = 100.0
    monkeypatch.setattr(progress_module, "perf_counter", lambda: now)
    progress, file = shown(terminal=False)
    frames = []
    with progress:
        for frame in range(0, 400, 2):
            now += 0.25
            progress.update(0, frame, 0.0, None)
            if len(lines := file.getvalue().splitlines()) > len(frames):
                frames.append(now - 100.0)
    assert frames[0] <= 2.0
    assert 2 <= len(frames) <= 4
    assert lines[0] == "session 0  frame 8/1,000  fps -  return -  eta -"


def test_sessions_that_wait_are_queued() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    progress = ProgressDisplay(4, 1000, console, concurrent=2)
    with progress:
        progress.update(0, 250, 0.0, None)
        assert [state.status for state in progress.states] == ["", "starts", "queued", "queued"]
        progress.show_session_end(0, "done", "")
        assert [state.status for state in progress.states] == ["done", "starts", "starts", "queued"]
    assert "queued" in file.getvalue()


@pytest.mark.parametrize("warm_up", [0, pytest.param(3000, marks=pytest.mark.slow)])
def test_the_speed_is_that_of_whole_updates(warm_up: int) -> None:
    """An update takes 100 times as long as a step; the remaining time shown must be right within a factor of 1.5."""
    clock, step, rollout, frames = Clock(), 0.001, 128, 40_000
    clock.begin()
    now = clock.time = 0.0
    shown: list[tuple[float, int, float]] = []
    reporter = ProgressReporter(clock, lambda frame, fps, row, left: shown.append((now, frame, fps)))
    while clock.frame < frames:
        now += step
        clock.time = now
        clock.tick(1)
        if clock.frame >= warm_up and clock.frame % rollout == 0:
            now += 100 * step
            clock.time = now
            reporter.on_update(Metrics(0.0))
        reporter.on_row(Row(0, "train", {}))
    known = [(at, frame, fps) for at, frame, fps in shown if fps > 0]
    assert known[0][1] <= warm_up + 2 * rollout
    for at, frame, fps in known:
        left = now - at
        if frame > warm_up + 2 * rollout and frame < frames - 4 * rollout:
            assert 1 / 1.5 < (frames - frame) / fps / left < 1.5, frame


def test_the_speed_of_an_agent_that_does_not_learn() -> None:
    clock = Clock()
    clock.begin()
    clock.time = 0.0
    shown: list[float] = []
    reporter = ProgressReporter(clock, lambda frame, fps, row, left: shown.append(fps), learns=False)
    for second in range(1, 4):
        clock.time = float(second)
        clock.tick(10)
        reporter.due = 0.0
        reporter.on_step([])
    assert shown == [10.0, 10.0, 10.0]


def test_one_live_table_fits_a_terminal_of_80_columns() -> None:
    progress, file = shown(terminal=True)
    with progress:
        progress.update(0, 999_999_999, 123_456.0, {"current_return": -1234.5, "current_return_se": 12.5})
        progress.update(1, 250, 0.01, ROW)
    text = file.getvalue()
    assert "21.5 ± 1.2" in text
    assert "999,999,999/1,000" in text
    assert "20:50:00" in text
    assert "…" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_events_are_shown(terminal: bool) -> None:
    """A notice is shown once, however many Sessions report it; a failure is shown with its cause, without interpreting markup."""
    display, file = shown(terminal)
    events: list[Event] = [
        Progress(0, 250, 500.0, ROW),
        Notice("it rains"),
        Notice("it rains"),
        CheckpointWritten(0, 250),
        SessionEnded(0, "done"),
        SessionEnded(1, "failed", "Traceback [bold]\n  oh no\n"),
    ]
    with display:
        for event in events:
            display(event)
    text = file.getvalue().replace("\r", "")
    assert "250/1,000" in text
    assert text.count("it rains") == 1
    assert "session 1 failed: Traceback [bold]\n  oh no" in text
    assert [state.status for state in display.states] == ["done", "failed"]


def test_an_output_that_is_not_utf_8() -> None:
    """Characters that the encoding lacks are replaced, such as the bar of the table and the × of the first line."""
    raw = io.BytesIO()
    screen = Screen(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    console = Console(file=cast(IO[str], screen), force_terminal=True, width=80, highlight=False)
    with ProgressDisplay(1, 1000, console) as display:
        display.begin("größe: 1 × 1,000 frames …")
        display(Progress(0, 250, 500.0, ROW))
    assert b"gr??e: 1 ? 1,000 frames ?" in raw.getvalue()
    assert b"250/1,000" in raw.getvalue()
    assert screen.error is None


@pytest.mark.parametrize("width", [20, 30, 40, 60])
def test_a_narrow_terminal_drops_columns_and_clips_no_number(width: int) -> None:
    progress, file = shown(terminal=True, sessions=1, width=width)
    with progress:
        progress.begin("small: 1 × 1,000 frames")
        progress.update(0, 999_999, 123_456.0, {"current_return": -1234.5, "current_return_se": 12.5})
    last = [line for line in file.getvalue().splitlines() if "999,999" in line][-1]
    assert "999,999/1,000" in last
    assert "…" not in last


def test_a_run_that_never_began_leaves_no_table() -> None:
    progress, file = shown(terminal=True)
    with progress:
        pass
    assert file.getvalue().endswith("\x1b[2K")


def test_numbers() -> None:
    numbers = (None, 200_000.0, 12345.6, 0.123456, 3, 1e15, -7.5e25)
    assert [format_number(number) for number in numbers] == ["-", "200000", "12346", "0.1235", "3", "1e+15", "-7.5e+25"]


@pytest.mark.parametrize(("no_color", "text"), [("1", "bold red\n"), ("", "\x1b[1;31mbold red\x1b[0m\n")])
def test_no_color_means_no_styles(no_color: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: True, raising=False)
    console_on(file).print("[bold red]bold red[/]")
    assert file.getvalue() == text


def test_a_screen_that_is_gone_is_silent() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    screen = Screen(Gone())
    with ProgressDisplay(1, 1000, Console(file=cast(IO[str], screen), force_terminal=True)) as progress:
        progress.print_line("hello")
    assert isinstance(screen.error, BrokenPipeError)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (None, None, "-"),
        (500.0, 0.0, "500"),
        (487.24, 6.14, "487.2 ± 6.1"),
        (487.24, 0.999, "487.2 ± 1.0"),
        (-301.0, 1234.5, "-300 ± 1200"),
        (1e20, 1e18, "1e+20 ± 1e+18"),
        (1.0, math.nan, "1"),
        (1.0, math.inf, "1"),
        (2.5e-9, 1e-10, "2.5e-09 ± 1e-10"),
    ],
)
def test_an_estimate_has_as_many_digits_as_its_error_allows(value: float | None, error: float | None, text: str) -> None:
    assert format_with_error(value, error) == text


@pytest.mark.parametrize("terminal", [False, True])
def test_the_log_has_what_is_printed_without_a_terminal(terminal: bool, tmp_path: Path) -> None:
    """The log includes lines from before the file exists and after the display has ended, without colours and live tables."""
    progress, file = shown(terminal)
    plain, text = shown(terminal=False)
    for display in (progress, plain):
        with display:
            display.begin("small: 2 sessions")
            if display is progress:
                display.set_log_file(tmp_path / "log.txt")
            display.update(0, 250, 500.0, ROW)
            display(Notice("it rains"))
            display(Notice("it rains"))
            display(SessionEnded(1, "failed", "out of memory\nat frame 500"))
        display.print_line("return 21.5")
    assert (tmp_path / "log.txt").read_text() == text.getvalue()
    assert ("\033" in file.getvalue()) == terminal


def test_a_log_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    progress, file = shown(terminal=False)
    progress.set_log_file(tmp_path / "none" / "log.txt")
    progress.print_line("first")
    progress.print_line("second")
    assert file.getvalue() == "first\nsecond\n"
