"""Draw the figures of the returns of a trial and of its Sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TypeVar

import numpy as np

from slm_lab.experiment.files.paths import DataMode
from slm_lab.experiment.report.figure import EVALUATION_COLOUR, GREY, SESSION_COLOURS, Figure, Line, Panel
from slm_lab.experiment.report.metrics import (
    AlignedCurves,
    Curve,
    Strengths,
    Table,
    align_or_interpolate,
    curve,
)
from slm_lab.experiment.report.run import ALL_WORKERS, Run
from slm_lab.experiment.report.writer import Writer

Curves = dict[str, Curve]
"""Name of a figure → curve that this figure shows for a certain table."""
_Of = TypeVar("_Of")

BASELINE = "random baseline"
"""Name of the line of the random baseline in the legend."""
RETURNS = {"mean_returns": "current_return", "mean_returns_ma": "total_reward_ma"}
_TEXTS = {
    "mean_returns": ("mean return", "mean return ({episodes})"),
    "mean_returns_ma": ("mean return, moving average", "mean return, moving average (last 100 rows)"),
}
"""Name of a figure → (title of the figure, label of the vertical axis)."""


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a figure."""

    name: str
    """Name of the axis in file names."""
    column: str
    label: str


FRAMES = Axis("frames", "frame", "frames")
GLOBAL_FRAMES = Axis("global_frames", "global_frame", "global frames (of all workers together)")
"""Axis of the figures of a trial whose Sessions train one shared net."""
POLICY_FRAMES = Axis("frames", "frame", "frames (of each policy)")
"""Axis of the figures of a trial whose Sessions train several policies."""
WALL_CLOCK = Axis("wall_t", "wall_t", "wall-clock time (s)")
"""Axis of the wall-clock time, which is used in comparisons of runs."""


@dataclass(frozen=True)
class Labels:
    """Values shown in the titles and legends of a trial's figures."""

    title: str
    """Beginning of the titles of all figures, with the name of the spec, the env and the trial."""
    episodes: Mapping[DataMode, str]
    """Mode ("train" or "eval") → description of the episodes over which the returns of this mode are averaged."""
    mode: DataMode = "train"
    """Mode ("train" or "eval") of the tables from which the metrics and the figures of returns are computed."""
    failed: int = 0
    """Number of failed Sessions, which are excluded from the means of the trial."""
    policies: int = 1
    """Number of policies of each Session."""
    sessions: int = 1
    """Number of Sessions of the trial."""
    frames: Axis = FRAMES
    failed_tables: Set[int] = frozenset()
    """Indices of the tables of failed Sessions."""
    baseline: float | None = None
    """Random baseline of the env, which is drawn as a line in the figures of returns, or None if the baseline is unknown."""
    workers: bool = False
    """Whether the Sessions train one shared net."""
    policy_names: tuple[str, ...] = ()
    """Names of the policies of each Session."""

    def table_name(self, index: int) -> str:
        """Return the name of the Session (and of the policy, if there are several) to which the table with index `index` belongs."""
        if self.workers:
            return f"all workers{self.failed_text}" if index == ALL_WORKERS else f"worker {index}"
        session, policy = divmod(index, self.policies)
        return f"session {session}" if self.policies == 1 else f"session {session}, policy {self.policy_names[policy]}"

    def name(self, index: int) -> str:
        """Return the legend name of the line that shows the table with index `index`."""
        name = f"policy {self.policy_names[index % self.policies]}" if self.policies > 1 and self.sessions == 1 else self.table_name(index)
        return f"{name} (failed)" if index in self.failed_tables else name

    def without_failed(self, tables: Mapping[int, _Of]) -> dict[int, _Of]:
        """Return the entries of `tables` (index → table or curve) whose Sessions did not fail."""
        return {index: one for index, one in tables.items() if index not in self.failed_tables}

    @property
    def unit_name(self) -> str:
        """Plural name of what each table of the trial belongs to: "policies", "workers" or "sessions"."""
        return "policies" if self.policies > 1 else "workers" if self.workers else "sessions"

    @property
    def failed_text(self) -> str:
        """Text with the number of failed Sessions, such as ", 1 failed" or, with several policies, ", 1 session failed".

        If no Session failed, the text is "".
        """
        sessions = "" if self.policies == 1 else " session" if self.failed == 1 else " sessions"
        return f", {self.failed}{sessions} failed" if self.failed else ""

    def table_count_text(self, tables: int) -> str:
        """Return a text with the number of tables, such as "2 sessions, 1 failed" or "6 policies, 1 session failed"."""
        return f"{tables} {self.unit_name if tables != 1 else 'policy' if self.policies > 1 else self.unit_name[:-1]}{self.failed_text}"


def draw_tables(writer: Writer, run: Run, labels: Labels) -> None:
    """Draw the returns of a trial and of each of its Sessions.

    Other columns of the tables are drawn only in the HTML report of the trial.
    """
    returns = draw_returns(writer, run, labels)
    for index, table in run.tables("train").items() if not labels.workers else ():
        _draw_session(writer, run, index, returns[index], labels)
        if labels.mode == "eval":
            _draw_session(writer, run, index, return_curves(table), replace(labels, mode="train"))


def draw_returns(writer: Writer, run: Run, labels: Labels) -> dict[int, Curves]:
    """Draw the returns of a trial over frames. Return a dict: index of each table → curves of the returns in this table."""
    evaluations = labels.without_failed(run.tables_per_training("eval")) if labels.mode == "train" else {}
    returns = {index: return_curves(table) for index, table in run.tables_per_training(labels.mode).items()}
    writer.draw(_add_evaluation_line(trial_figures(returns, labels), evaluations), partial(run.paths.trial_graph, t=run.trial))
    return returns


def _add_evaluation_line(figures: dict[str, Figure], tables: Mapping[int, Table]) -> dict[str, Figure]:
    """Add a line of the mean return of the evaluations to the figure of the training returns, and return all figures.

    Args: tables: index of each evaluation table → table.
    """
    curves = [one for table in tables.values() if len((one := curve(table, "total_reward")).frame)]
    if not curves:
        return figures
    name, joined = next(iter(RETURNS)), align_or_interpolate(curves)
    figure = figures[name]
    line = Line("evaluation", joined.mean(), EVALUATION_COLOUR)
    return figures | {name: replace(figure, panels=(replace(figure.first_panel, lines=[*figure.first_panel.lines, line]),))}


def _draw_session(writer: Writer, run: Run, index: int, curves: Curves, labels: Labels) -> None:
    writer.draw(session_figures(index, curves, labels), partial(run.paths.session_graph, index, mode=labels.mode, t=run.trial))


def return_curves(table: Table) -> Curves:
    """Return a dict: name of each figure of returns (see RETURNS) → curve of the returns in a table."""
    return {name: curve(table, column) for name, column in RETURNS.items()}


def session_figures(index: int, curves: Curves, labels: Labels) -> dict[str, Figure]:
    """Return a dict of the figures of the returns of one Session (or policy): name → figure. Curves without points have no figure."""
    suffix = ", evaluation" if labels.mode == "eval" else ""
    titled = replace(labels, title=f"{labels.title}, {labels.table_name(index)}{suffix}")
    figures = {}
    for name, one in curves.items():
        if len(one.frame):
            figures[name] = _figure(name, [Line(labels.name(index), one)], titled)
    return figures


def trial_figures(tables: Mapping[int, Curves], labels: Labels) -> dict[str, Figure]:
    """Return a dict of the figures of a trial: name → figure with the curve of each table and the mean ± one standard deviation.

    If the curves have no points, the dict has empty figures.

    Args: tables: index of each table → curves of the returns.
    """
    figures = {}
    for name in next(iter(tables.values()), {}):
        lines = _mean_lines({index: curves[name] for index, curves in tables.items() if len(curves[name].frame)}, labels)
        figures[name] = _figure(name, lines, labels)
    return figures


def common_strengths(strengths: Sequence[Strengths]) -> AlignedCurves:
    """Return the strengths of several tables at the frames that all tables share.

    If the tables share few frames, the strengths are interpolated (see `align_or_interpolate`).
    """
    curves = [Curve(one.frame, one.value) for one in strengths if len(one.value)]
    return align_or_interpolate(curves, len(curves))


def _mean_lines(curves: Mapping[int, Curve], labels: Labels) -> list[Line]:
    """Return a line for each table, and a line for the mean over the Sessions that did not fail.

    The mean is drawn at the frames at which at least two Sessions have a table row, since a stopped Session may end with a row at another
    frame. If the Sessions share few frames, the curves are interpolated (see `align_or_interpolate`).
    """
    successful = labels.without_failed(curves)
    name = f"mean of {labels.table_count_text(len(successful))}"
    colours = zip(curves.items(), cycle(SESSION_COLOURS), strict=False)
    faint = {index: Line(labels.name(index), one, colour, faint=True) for (index, one), colour in colours}
    if len(successful) == 1:
        ((index, one),) = successful.items()
        del faint[index]
        return [*faint.values(), Line(name if labels.failed and not labels.workers else labels.name(index), one)]
    aligned = align_or_interpolate(list(successful.values()))
    return [*faint.values(), *([Line(name, aligned.mean(), band=aligned.band())] if len(aligned.frame) else [])]


def _figure(name: str, lines: list[Line], labels: Labels) -> Figure:
    what, y_label = _TEXTS[name]
    if labels.baseline is not None and lines:
        frame = max(float(line.curve.frame[-1]) for line in lines)
        across = Curve(np.array([0.0, frame]), np.full(2, labels.baseline))
        lines = [Line(BASELINE, across, GREY, dashed=True), *lines]
    panel = Panel(y_label.format(episodes=labels.episodes[labels.mode]), lines, x_label=labels.frames.label, faint_name=labels.unit_name)
    return Figure(f"{labels.title}: {what}", (panel,))
