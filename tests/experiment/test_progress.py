from __future__ import annotations

import io
from typing import IO, cast

import pytest
from rich.console import Console

from slm_lab.experiment.events import CheckpointWritten, End, Event, Notice, Progress
from slm_lab.experiment.progress import ProgressDisplay, number
from slm_lab.experiment.screen import Screen

ROW: dict[str, float | int | None] = {"total_reward": 21.5, "total_reward_ma": None}


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
        progress.update(0, 1000, 500.0, ROW)  # the last one is never held back
    assert file.getvalue().splitlines() == [
        "session 0  frame 250/1,000  fps 500  total_reward 21.5  total_reward_ma -  eta 0:02",
        "session 1  frame 500/1,000  fps 500  total_reward 21.5  total_reward_ma -  eta 0:01",
        "session 0  frame 1,000/1,000  fps 500  total_reward 21.5  total_reward_ma -  eta 0:00",
    ]


def test_one_live_table_fits_a_terminal_of_80_columns() -> None:
    progress, file = shown(terminal=True)
    with progress:
        progress.update(0, 999_999_999, 123_456.0, {"total_reward": -1234.5, "total_reward_ma": -1234.5})
        progress.update(1, 250, 0.01, ROW)
    text = file.getvalue()
    assert "total_reward_ma" in text
    assert "999,999,999/1,000" in text
    assert "20:50:00" in text
    assert "…" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_events_are_shown(terminal: bool) -> None:
    """A notice once however many Sessions report it; a failure with its cause, as it is."""
    display, file = shown(terminal)
    events: list[Event] = [
        Progress(0, 250, 500.0, ROW),
        Notice("it rains"),
        Notice("it rains"),
        CheckpointWritten(0, 250),
        End(0, "done"),
        End(1, "failed", "Traceback [bold]\n  oh no\n"),
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
    """Characters that it lacks are replaced: the bar of the table, the × of the first line."""
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
        progress.update(0, 999_999, 123_456.0, {"total_reward": -1234.5, "total_reward_ma": -1234.5})
    last = [line for line in file.getvalue().splitlines() if "999,999" in line][-1]
    assert "999,999/1,000" in last
    assert "…" not in last


def test_a_run_that_never_began_leaves_no_table() -> None:
    progress, file = shown(terminal=True)
    with progress:
        pass
    assert file.getvalue().endswith("\x1b[2K")


def test_numbers() -> None:
    assert [number(value) for value in (None, 200_000.0, 12345.6, 0.123456, 3)] == ["-", "200000", "12346", "0.1235", "3"]


def test_a_screen_that_is_gone_is_silent() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    screen = Screen(Gone())
    with ProgressDisplay(1, 1000, Console(file=cast(IO[str], screen), force_terminal=True)) as progress:
        progress.say("hello")
    assert isinstance(screen.error, BrokenPipeError)
