"""The figures of a Session and of a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TypeVar

import numpy as np

from slm_lab.experiment.files.paths import DataMode
from slm_lab.experiment.report.figure import EVALUATION_COLOUR, GREY, SESSION_COLOURS, Figure, Line, Panel, policy_colour
from slm_lab.experiment.report.metrics import (
    Aligned,
    Curve,
    Strengths,
    Table,
    align,
    align_or_interpolate,
    consistency_curve,
    curve,
    interpolate,
    metric_curves,
)
from slm_lab.experiment.report.run import ALL_WORKERS, Run
from slm_lab.experiment.report.writer import Writer
from slm_lab.experiment.training.observers.base import info_column

Curves = dict[str, Curve]
"""Name of a figure → the curve that a table contributes to it."""
_Of = TypeVar("_Of")

BASELINE = "random baseline"
"""Name of the line of the random baseline."""
RETURNS = {"mean_returns": "current_return", "mean_returns_ma": "total_reward_ma"}
_POLICY_RETURNS = {"policy_returns": "mean_returns", "policy_returns_ma": "mean_returns_ma"}
"""Names of figures with a curve per policy → those with a curve per table."""
_TRAINING_COLUMNS = ("loss", "entropy", "explore_var")
"""Columns, which are also the names of their figures."""
_DISTRIBUTED_COLUMNS = ("grad_norm", "staleness", "lock_wait")
"""Additional columns of Sessions that train one net together."""
_CORE_RANGE = ("sample_efficiencies", "training_efficiencies", "stabilities", "consistencies")
_TEXTS = {
    "mean_returns": ("mean return", "mean return ({episodes})"),
    "mean_returns_ma": ("mean return, moving average", "mean return, moving average (last 100 rows)"),
    "policy_returns": ("mean return of each policy", "mean return ({episodes})"),
    "policy_returns_ma": ("moving average of each policy", "mean return, moving average (last 100 rows)"),
    "loss": ("loss", "loss"),
    "entropy": ("entropy", "entropy of the policy (nats)"),
    "explore_var": ("explore_var", "explore_var"),
    "grad_norm": ("gradient norm", "norm of the gradient before clipping"),
    "staleness": ("staleness", "staleness (updates by others, pull to push)"),
    "lock_wait": ("waiting time for the lock", "waiting time of an update for the lock (ms)"),
    "strengths": ("strength", "strength (mean return above random)"),
    "sample_efficiencies": ("sample efficiency", "sample efficiency (1 / frame)"),
    "training_efficiencies": ("training efficiency", "training efficiency (1 / optimizer step)"),
    "stabilities": ("stability", "stability"),
    "consistencies": ("consistency", "consistency"),
}
"""Name of a figure → title, and label of the vertical axis."""


@dataclass(frozen=True)
class Axis:
    """A horizontal axis."""

    name: str
    """Name of the axis in file names."""
    column: str
    label: str


FRAMES = Axis("frames", "frame", "frames")
GLOBAL_FRAMES = Axis("global_frames", "global_frame", "global frames (of all workers together)")
"""Used if the Sessions train one net."""
POLICY_FRAMES = Axis("frames", "frame", "frames (of each policy)")
"""Used if a Session trains several policies."""
WALL_CLOCK = Axis("wall_t", "wall_t", "wall-clock time (s)")
"""Additional axis for the returns if the Sessions train one net."""


@dataclass(frozen=True)
class Labels:
    """Titles and names in the figures of a trial."""

    title: str
    """Spec, env and trial."""
    episodes: Mapping[DataMode, str]
    """Description of the episodes over which a return is the mean."""
    mode: DataMode = "train"
    """Mode of the tables used for the metrics and the figures of returns."""
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
    """The env's random baseline, drawn as a line in figures of returns; None: unknown."""
    workers: bool = False
    """Whether the Sessions train one net."""

    def describe(self, index: int) -> str:
        """Return the name of the Session (and policy) that the table with this index belongs to."""
        if self.workers:
            return f"all workers{self.failed_text}" if index == ALL_WORKERS else f"worker {index}"
        session, policy = divmod(index, self.policies)
        return f"session {session}" if self.policies == 1 else f"session {session}, policy {policy}"

    def name(self, index: int) -> str:
        """Return the name of a table in a legend."""
        name = f"policy {index % self.policies}" if self.policies > 1 and self.sessions == 1 else self.describe(index)
        return f"{name} (failed)" if index in self.failed_tables else name

    def without_failed(self, tables: Mapping[int, _Of]) -> dict[int, _Of]:
        """Return the entries of `tables` whose Sessions did not fail."""
        return {index: one for index, one in tables.items() if index not in self.failed_tables}

    @property
    def unit_name(self) -> str:
        """What each table belongs to: "policies", "workers" or "sessions"."""
        return "policies" if self.policies > 1 else "workers" if self.workers else "sessions"

    @property
    def failed_text(self) -> str:
        """The text ", 1 failed", or with several policies ", 1 session failed"."""
        sessions = "" if self.policies == 1 else " session" if self.failed == 1 else " sessions"
        return f", {self.failed}{sessions} failed" if self.failed else ""

    def count(self, tables: int) -> str:
        """Return "2 sessions, 1 failed", or "6 policies, 1 session failed"."""
        return f"{tables} {self.unit_name if tables != 1 else 'policy' if self.policies > 1 else self.unit_name[:-1]}{self.failed_text}"


def draw_tables(writer: Writer, run: Run, labels: Labels) -> None:
    """Draw the figures that need no random baseline."""
    train, metric_tables, graph = run.tables("train"), run.tables_per_training(labels.mode), partial(run.paths.trial_graph, t=run.trial)
    returns = draw_returns(writer, run, labels)
    if labels.workers:
        of_workers = learning_curves(train, _DISTRIBUTED_COLUMNS, "global_frame")
        writer.draw(trial_figures(of_workers, labels, GLOBAL_FRAMES), graph)
        successful = list(labels.without_failed(learning_curves(train, _TRAINING_COLUMNS, "global_frame")).values())
        means = {name: interpolate([curves[name] for curves in successful]).mean() for name in next(iter(successful), {})}
        writer.draw(trial_figures({ALL_WORKERS: means}, labels), graph)
        over = {index: return_curves(table, WALL_CLOCK.column) for index, table in metric_tables.items()}
        writer.draw(trial_figures(over, labels, WALL_CLOCK), partial(graph, axis=WALL_CLOCK.name))
        return
    learning = learning_curves(train, _TRAINING_COLUMNS)
    writer.draw(trial_figures(learning, labels), graph)
    writer.draw(policy_figures(returns, labels), graph)
    for index, table in train.items():
        _draw_session(writer, run, index, returns[index], labels)
        in_training = learning[index] | (return_curves(table) if labels.mode == "eval" else {})
        _draw_session(writer, run, index, in_training, replace(labels, mode="train"))


def draw_returns(writer: Writer, run: Run, labels: Labels) -> dict[int, Curves]:
    """Draw the returns of the trial over frames; return their curves."""
    returns = {index: return_curves(table) for index, table in run.tables_per_training(labels.mode).items()}
    writer.draw(_with_evaluation(trial_figures(returns, labels), run, labels), partial(run.paths.trial_graph, t=run.trial))
    return returns


def _with_evaluation(figures: dict[str, Figure], run: Run, labels: Labels) -> dict[str, Figure]:
    """Add the mean of the Sessions' evaluations to the figure of their returns in training, if there are any."""
    tables = labels.without_failed(run.tables_per_training("eval")) if labels.mode == "train" else {}
    curves = [one for table in tables.values() if len((one := curve(table, "total_reward")).frame)]
    if not curves:
        return figures
    name, joined = next(iter(RETURNS)), align_or_interpolate(curves)
    figure = figures[name]
    line = Line("evaluation", joined.mean(), EVALUATION_COLOUR)
    return figures | {name: replace(figure, panels=(replace(figure.panel, lines=[*figure.panel.lines, line]),))}


def draw_strengths(writer: Writer, run: Run, labels: Labels, strengths: Mapping[int, Strengths]) -> None:
    """Draw strengths and the metrics computed from them."""
    graph, curves = partial(run.paths.trial_graph, t=run.trial), {index: metric_curves(one) for index, one in strengths.items()}
    common = common_strengths(list(labels.without_failed(strengths).values()))
    writer.draw(trial_figures(curves, labels), graph)
    writer.draw(consistency_figures(common, labels), graph)
    for index, one in curves.items() if not labels.workers else ():
        _draw_session(writer, run, index, one, labels)


def _draw_session(writer: Writer, run: Run, index: int, curves: Curves, labels: Labels) -> None:
    writer.draw(session_figures(index, curves, labels), partial(run.paths.session_graph, index, mode=labels.mode, t=run.trial))


def learning_curves(tables: Mapping[int, Table], columns: Sequence[str], over: str = "frame") -> dict[int, Curves]:
    """Return the curves of each table that describe its updates; lock_wait is omitted if there are no waits.

    The training columns include the entries of `info` (meta.log_info).
    """
    waits = any(np.nan_to_num(table.get("lock_wait", 0.0)).any() for table in tables.values())
    infos = dict.fromkeys(name for table in tables.values() for name in table if name.startswith(info_column("")))
    names = [name for name in columns if name != "lock_wait" or waits] + (list(infos) if columns is _TRAINING_COLUMNS else [])
    return {index: {name: curve(table, name, over) for name in names} for index, table in tables.items()}


def return_curves(table: Table, over: str = "frame") -> Curves:
    """Return the curves of RETURNS."""
    return {name: curve(table, column, over) for name, column in RETURNS.items()}


def session_figures(index: int, curves: Curves, labels: Labels) -> dict[str, Figure]:
    """Return figures of the curves that have points."""
    suffix = ", evaluation" if labels.mode == "eval" else ""
    titled = replace(labels, title=f"{labels.title}, {labels.describe(index)}{suffix}")
    figures = {}
    for name, one in curves.items():
        if len(one.frame):
            figures[name] = _figure(name, [Line(labels.name(index), one)], titled)
    return figures


def trial_figures(tables: Mapping[int, Curves], labels: Labels, axis: Axis | None = None) -> dict[str, Figure]:
    """Return figures of each table's curves and their mean ± one standard deviation.

    Returns over frames are always drawn, other figures only if they have points.
    """
    figures = {}
    for name in next(iter(tables.values()), {}):
        lines = _mean_lines({index: curves[name] for index, curves in tables.items() if len(curves[name].frame)}, labels, axis)
        if lines or (name in RETURNS and axis is not WALL_CLOCK):
            figures[name] = _figure(name, lines, labels, axis)
    return figures


def policy_figures(tables: Mapping[int, Curves], labels: Labels) -> dict[str, Figure]:
    """Return figures of the returns with a curve per policy, ± one standard deviation if there are several Sessions; {} for one policy."""
    figures: dict[str, Figure] = {}
    for name, of_table in _POLICY_RETURNS.items() if labels.policies > 1 else ():
        lines = []
        for policy in range(labels.policies):
            own = [one for index, one in labels.without_failed(tables).items() if index % labels.policies == policy]
            curves = [one[of_table] for one in own if len(one[of_table].frame)]
            together = align_or_interpolate(curves)
            aligned = together if len(together.frame) else align(curves)
            band = aligned.band() if len(curves) > 1 else None
            lines += [Line(f"policy {policy}", aligned.mean(), policy_colour(policy), band)] if len(aligned.frame) else []
        figure = _figure(name, lines, labels)
        several = f" ± std over {labels.sessions - labels.failed} sessions" if any(line.band for line in lines) else ""
        figures[name] = replace(figure, title=f"{figure.title}{several}{labels.failed_text}")
    return figures


def common_strengths(strengths: Sequence[Strengths]) -> Aligned:
    """Return the strengths at common frames: those that all tables share, or by interpolation if these are few."""
    curves = [Curve(one.frame, one.value) for one in strengths if len(one.value)]
    return align_or_interpolate(curves, len(curves))


def consistency_figures(common: Aligned, labels: Labels) -> dict[str, Figure]:
    """Return the figure of the consistency over Sessions, or over their policies; {} for a single one, where it has no meaning."""
    one, count = consistency_curve(common), len(common.value_SF)
    if count < 2 or not len(one.frame):
        return {}
    return {"consistencies": _figure("consistencies", [Line(f"over {labels.count(count)}", one)], labels)}


def _mean_lines(curves: Mapping[int, Curve], labels: Labels, axis: Axis | None) -> list[Line]:
    """Return a line for each table and their mean, which excludes failed Sessions.

    The mean requires two Sessions at a frame, since the last row of a stopped Session is not on the frame grid of the others. Over global
    frames each worker has a different grid, and the mean covers the range that all workers cover.
    """
    successful = labels.without_failed(curves)
    name = f"mean of {labels.count(len(successful))}"
    colours = zip(curves.items(), cycle(SESSION_COLOURS), strict=False)
    faint = {index: Line(labels.name(index), one, colour, faint=True) for (index, one), colour in colours}
    if len(successful) == 1:
        ((index, one),) = successful.items()
        del faint[index]
        return [*faint.values(), Line(name if labels.failed and not labels.workers else labels.name(index), one)]
    aligned = interpolate(list(successful.values())) if axis is GLOBAL_FRAMES else align_or_interpolate(list(successful.values()))
    return [*faint.values(), *([Line(name, aligned.mean(), band=aligned.band())] if len(aligned.frame) else [])]


def _figure(name: str, lines: list[Line], labels: Labels, axis: Axis | None = None) -> Figure:
    key = name.removeprefix(info_column(""))
    what, y_label = _TEXTS.get(name, (key, f"{key} at the end of episodes (last 100 episodes)"))
    y_label = y_label.format(episodes=labels.episodes[labels.mode])
    if labels.baseline is not None and lines and (name in RETURNS or name in _POLICY_RETURNS):
        frame = max(float(line.curve.frame[-1]) for line in lines)
        across = Curve(np.array([0.0, frame]), np.full(2, labels.baseline))
        lines = [Line(BASELINE, across, GREY, dashed=True), *lines]
    panel = Panel(y_label, lines, name in _CORE_RANGE, (axis or labels.frames).label, each=labels.unit_name)
    return Figure(f"{labels.title}: {what}", (panel,))
