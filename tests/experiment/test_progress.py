from __future__ import annotations

import io

from rich.console import Console

from slm_lab.experiment.progress import Progress

ROW: dict[str, float | int | None] = {"total_reward": 21.5, "total_reward_ma": None}


def shown(terminal: bool, sessions: int = 2) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    return Progress(sessions, 1000, Console(file=file, force_terminal=terminal, width=80, highlight=False, soft_wrap=True)), file


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
    assert "999,999,999" in text
    assert "20:50:00" in text
    assert "…" not in text


def test_a_failure_and_a_notice_are_said_above_it() -> None:
    for terminal in (True, False):
        progress, file = shown(terminal)
        with progress:
            progress.notice("it rains")
            progress.notice("it rains")
            progress.ended(1, "failed", "Traceback [bold]\n  oh no\n")
        assert file.getvalue().count("it rains") == 1
        assert "session 1 failed: Traceback [bold]\n  oh no" in file.getvalue().replace("\r", "")
