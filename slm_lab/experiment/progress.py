"""What the user sees of a running trial: one live display for all Sessions, or plain lines where there is no terminal."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as LiveDisplay

_LINE_EVERY = 5.0
"""Seconds between two plain lines of a Session, at least."""
Row = dict[str, float | int | None]


class Progress:
    """Shows frames, speed, total_reward, its moving average and the time left of each Session.

    Refreshes when told something, not by a thread of its own, which would take time from a Session in this process.
    """

    def __init__(self, sessions: int, max_frame: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.max_frame = max_frame
        self.rows: dict[int, Row] = {}
        self.said: set[str] = set()
        self.line_due = [0.0] * sessions
        self.live = LiveDisplay(
            TextColumn("session {task.fields[index]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} frames"),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            auto_refresh=False,
        )
        self.tasks: list[TaskID] = []
        if self.console.is_terminal:
            self.tasks = [self.live.add_task("", total=max_frame, index=index, text="starts") for index in range(sessions)]

    def __enter__(self) -> Self:
        if self.tasks:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.tasks:
            self.live.stop()

    def update(self, index: int, frame: int, fps: float, row: Row | None) -> None:
        """Session `index` is at `frame`; `row` is its newest row, if there is a new one."""
        if row is not None:
            self.rows[index] = row
        if self.tasks:
            self.live.update(self.tasks[index], completed=min(frame, self.max_frame), text=self._text(index, frame, fps), refresh=True)
        elif row is not None and (perf_counter() >= self.line_due[index] or frame >= self.max_frame):
            self.line_due[index] = perf_counter() + _LINE_EVERY
            self.say(f"session {index}  {frame:,}/{self.max_frame:,} frames  {self._text(index, frame, fps)}")

    def ended(self, index: int, status: str, detail: str) -> None:
        """Session `index` has ended."""
        if self.tasks and status != "done":
            self.live.update(self.tasks[index], text=status, refresh=True)
        if status == "failed":
            self.say(f"session {index} failed: {detail.rstrip()}")

    def notice(self, text: str) -> None:
        """Say something once, however many Sessions remark on it."""
        if text not in self.said:
            self.said.add(text)
            self.say(text)

    def say(self, text: str) -> None:
        """Print a line, above the live display."""
        self.console.print(text, markup=False)

    def _text(self, index: int, frame: int, fps: float) -> str:
        row = self.rows.get(index, {})
        parts = [f"{fps:,.0f} fps"]
        parts += [f"{name} {value:.4g}" for name in ("total_reward", "total_reward_ma") if (value := row.get(name)) is not None]
        if fps > 0:
            parts.append(f"eta {_duration((self.max_frame - frame) / fps)}")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
