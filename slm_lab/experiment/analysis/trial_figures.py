"""The figures of a Session and of a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from slm_lab.experiment.analysis.curves import Aligned, Curve, Table, align, align_or_interpolate, curve, interpolate
from slm_lab.experiment.analysis.figure import GREY, POLICY_COLOURS, SESSION_COLOURS, Figure, Line, Panel
from slm_lab.experiment.analysis.metrics import Strengths, consistency_curve, metric_curves
from slm_lab.experiment.analysis.run import Run, distributed
from slm_lab.experiment.analysis.writer import Writer
from slm_lab.experiment.observers.base import info_column
from slm_lab.experiment.paths import DataMode

Curves = dict[str, Curve]
"""Name of a figure → the curve of one table in it."""

RETURNS = {"mean_returns": "total_reward", "mean_returns_ma": "total_reward_ma"}
_POLICY_RETURNS = {"policy_returns": "mean_returns", "policy_returns_ma": "mean_returns_ma"}
"""Names of figures with a curve per policy → those with a curve per table."""
_TRAINING_COLUMNS = ("loss", "entropy", "explore_var")
"""Columns, and names of their figures."""
_DISTRIBUTED_COLUMNS = ("grad_norm", "staleness", "lock_wait")
"""Those of Sessions that train one net together."""
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
"""What is drawn, in the title and along the vertical axis."""


@dataclass(frozen=True)
class Axis:
    """A horizontal axis."""

    name: str
    """In file names."""
    column: str
    label: str


FRAMES = Axis("frames", "frame", "frames")
SESSION_FRAMES = Axis("frames", "frame", "frames (of each session)")
"""If the Sessions train one net."""
POLICY_FRAMES = Axis("frames", "frame", "frames (of each policy)")
"""If a Session trains several policies."""
SHARED_AXES = (
    Axis("global_frames", "global_frame", "global frames (of all sessions together)"),
    Axis("wall_t", "wall_t", "wall-clock time (s)"),
)
"""Additional axes for the returns if the Sessions train one net."""


@dataclass(frozen=True)
class Labels:
    """Titles and names in the figures of a trial."""

    title: str
    """Spec, env and trial."""
    episodes: Mapping[DataMode, str]
    """The episodes over which a return is the mean."""
    failed: int = 0
    """Number of failed Sessions, which the means of the trial leave out."""
    policies: int = 1
    """Number of policies of each Session."""
    sessions: int = 1
    """Number of Sessions of the trial."""
    frames: Axis = FRAMES
    failed_tables: Set[int] = frozenset()
    """Indices of the tables of failed Sessions."""
    baseline: float | None = None
    """The env's random baseline, a line in figures of returns; None: not known."""

    def describe(self, index: int) -> str:
        """Return the Session, and its policy, that the table of this index belongs to."""
        session, policy = divmod(index, self.policies)
        return f"session {session}" if self.policies == 1 else f"session {session}, policy {policy}"

    def name(self, index: int) -> str:
        """Return the same for a legend."""
        name = f"policy {index % self.policies}" if self.policies > 1 and self.sessions == 1 else self.describe(index)
        return f"{name} (failed)" if index in self.failed_tables else name

    @property
    def each(self) -> str:
        """What the tables belong to."""
        return "policies" if self.policies > 1 else "sessions"

    @property
    def missing(self) -> str:
        """Return ", 1 failed", or with several policies ", 1 session failed"."""
        sessions = "" if self.policies == 1 else " session" if self.failed == 1 else " sessions"
        return f", {self.failed}{sessions} failed" if self.failed else ""

    def count(self, tables: int) -> str:
        """Return "2 sessions, 1 failed", or "6 policies, 1 session failed"."""
        return f"{tables} {self.each if tables != 1 else 'policy' if self.policies > 1 else 'session'}{self.missing}"


def draw_tables(writer: Writer, run: Run, labels: Labels, mode: DataMode) -> None:
    """Draw what needs no random baseline; `mode` is that of the tables from which the metrics are made."""
    train, metric_tables, graph = run.tables("train"), run.tables(mode), partial(run.paths.trial_graph, t=run.trial)
    learning = learning_curves(train)
    returns = {index: return_curves(table) for index, table in metric_tables.items()}
    draw_returns(writer, run, labels, mode)
    writer.draw(trial_figures(learning, labels, "train"), graph)
    writer.draw(policy_figures(returns, labels, mode), graph)
    for axis in SHARED_AXES if distributed(train) else ():
        over = {index: return_curves(table, axis.column) for index, table in metric_tables.items()}
        writer.draw(trial_figures(over, labels, mode, axis), partial(graph, axis=axis.name))
    for index, table in train.items():
        _draw_session(writer, run, index, returns[index], labels, mode)
        _draw_session(writer, run, index, learning[index], labels, "train")
        if mode == "eval":
            _draw_session(writer, run, index, return_curves(table), labels, "train")


def draw_returns(writer: Writer, run: Run, labels: Labels, mode: DataMode) -> None:
    """Draw the returns of the trial over frames."""
    returns = {index: return_curves(table) for index, table in run.tables(mode).items()}
    writer.draw(trial_figures(returns, labels, mode), partial(run.paths.trial_graph, t=run.trial))


def draw_strengths(writer: Writer, run: Run, labels: Labels, mode: DataMode, strengths: Mapping[int, Strengths]) -> None:
    """Draw strengths and the metrics made of them."""
    graph, curves = partial(run.paths.trial_graph, t=run.trial), {index: metric_curves(one) for index, one in strengths.items()}
    common = common_strengths([one for index, one in strengths.items() if index not in labels.failed_tables])
    writer.draw(trial_figures(curves, labels, mode), graph)
    writer.draw(consistency_figures(common, labels, mode), graph)
    for index, one in curves.items():
        _draw_session(writer, run, index, one, labels, mode)


def _draw_session(writer: Writer, run: Run, index: int, curves: Curves, labels: Labels, mode: DataMode) -> None:
    drawn = session_figures(index, curves, labels, mode)
    writer.draw(drawn, partial(run.paths.session_graph, index, mode=mode, t=run.trial))


def learning_curves(tables: Mapping[int, Table]) -> dict[int, Curves]:
    """Return the curves of each table that describe its updates; without waits for the lock if there are none."""
    waits = any(np.nan_to_num(table.get("lock_wait", 0.0)).any() for table in tables.values())
    shared = _DISTRIBUTED_COLUMNS if waits else _DISTRIBUTED_COLUMNS[:-1]
    infos = dict.fromkeys(name for table in tables.values() for name in table if name.startswith(info_column("")))
    columns = (*_TRAINING_COLUMNS, *(shared if distributed(tables) else ()), *infos)
    return {index: {column: curve(table, column) for column in columns} for index, table in tables.items()}


def return_curves(table: Table, over: str = "frame") -> Curves:
    return {name: curve(table, column, over) for name, column in RETURNS.items()}


def session_figures(index: int, curves: Curves, labels: Labels, mode: DataMode) -> dict[str, Figure]:
    """Return the figures of those curves that have points."""
    suffix = ", evaluation" if mode == "eval" else ""
    titled = replace(labels, title=f"{labels.title}, {labels.describe(index)}{suffix}")
    return {name: _figure(name, [Line(labels.name(index), one)], titled, mode) for name, one in curves.items() if len(one.frame)}


def trial_figures(tables: Mapping[int, Curves], labels: Labels, mode: DataMode, axis: Axis | None = None) -> dict[str, Figure]:
    """Return figures of each table's curves and their mean ± one standard deviation.

    Returns over frames are always drawn, other figures only if there are points.
    """
    figures = {}
    for name in next(iter(tables.values()), {}):
        lines = _mean_lines({index: curves[name] for index, curves in tables.items() if len(curves[name].frame)}, labels, axis)
        if lines or (name in RETURNS and axis not in SHARED_AXES):
            figures[name] = _figure(name, lines, labels, mode, axis)
    return figures


def policy_figures(tables: Mapping[int, Curves], labels: Labels, mode: DataMode) -> dict[str, Figure]:
    """Return figures of the returns with a curve per policy, ± one standard deviation over several Sessions; {} for one policy."""
    figures: dict[str, Figure] = {}
    for name, of_table in _POLICY_RETURNS.items() if labels.policies > 1 else ():
        lines = []
        for policy in range(labels.policies):
            own = {index: one[of_table] for index, one in tables.items() if index % labels.policies == policy}
            curves = [one for index, one in own.items() if len(one.frame) and index not in labels.failed_tables]
            together = align_or_interpolate(curves, min(len(curves), 2))
            aligned = together if len(together.frame) else align(curves)
            band = aligned.band() if len(curves) > 1 else None
            colour = POLICY_COLOURS[policy % len(POLICY_COLOURS)]
            lines += [Line(f"policy {policy}", aligned.mean(), colour, band)] if len(aligned.frame) else []
        figure = _figure(name, lines, labels, mode)
        several = f" ± std over {labels.sessions - labels.failed} sessions" if any(line.band for line in lines) else ""
        figures[name] = replace(figure, title=f"{figure.title}{several}{labels.missing}")
    return figures


def common_strengths(strengths: Sequence[Strengths]) -> Aligned:
    """Return the strengths at the frames that all tables with strengths have."""
    curves = [Curve(one.frame, one.value) for one in strengths if len(one.value)]
    return align_or_interpolate(curves, len(curves))


def consistency_figures(common: Aligned, labels: Labels, mode: DataMode) -> dict[str, Figure]:
    """Return the consistency over Sessions, or over their policies; {} for one alone, of which it says nothing."""
    one, count = consistency_curve(common), len(common.value_SF)
    if count < 2 or not len(one.frame):
        return {}
    return {"consistencies": _figure("consistencies", [Line(f"over {labels.count(count)}", one)], labels, mode)}


def _mean_lines(curves: Mapping[int, Curve], labels: Labels, axis: Axis | None) -> list[Line]:
    """Return a line of each table and their mean, which leaves out those of failed Sessions.

    The mean needs two Sessions at a frame: the last row of a stopped Session is not on the grid of the others. Over axes other than frames
    each Session has another grid, and the mean goes over the range that all cover.
    """
    good = {index: one for index, one in curves.items() if index not in labels.failed_tables}
    name = f"mean of {labels.count(len(good))}"
    faint = [
        Line(labels.name(index), one, SESSION_COLOURS[order % len(SESSION_COLOURS)], faint=True)
        for order, (index, one) in enumerate(curves.items())
    ]
    if len(good) == 1:
        ((index, one),) = good.items()
        failed = [line for line, other in zip(faint, curves, strict=True) if other != index]
        return [*failed, Line(name if labels.failed else labels.name(index), one)]
    aligned = interpolate(list(good.values())) if axis in SHARED_AXES else align_or_interpolate(list(good.values()), 2)
    return [*faint, Line(name, aligned.mean(), band=aligned.band())] if len(aligned.frame) else faint


def _figure(name: str, lines: list[Line], labels: Labels, mode: DataMode, axis: Axis | None = None) -> Figure:
    key = name.removeprefix(info_column(""))
    what, y_label = _TEXTS.get(name, (key, f"{key} at the end of episodes (last 100 episodes)"))
    y_label = y_label.format(episodes=labels.episodes[mode])
    if labels.baseline is not None and lines and (name in RETURNS or name in _POLICY_RETURNS):
        frame = max(float(line.curve.frame[-1]) for line in lines)
        across = Curve(np.array([0.0, frame]), np.full(2, labels.baseline))
        lines = [Line("random baseline", across, GREY, dashed=True), *lines]
    panel = Panel(y_label, lines, name in _CORE_RANGE, (axis or labels.frames).label, each=labels.each)
    return Figure(f"{labels.title}: {what}", (panel,))
