"""Which graphs there are of a Session and of a trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from slm_lab.experiment.analysis.graph import POLICY_COLOURS, SESSION_COLOURS, Graph, Line
from slm_lab.experiment.analysis.metrics import Strengths, consistency_curve, metric_curves
from slm_lab.experiment.analysis.table import Aligned, Curve, Table, align, curve, gathered, interpolate
from slm_lab.experiment.paths import DataMode

Curves = dict[str, Curve]
"""Name of a graph → what one Session has to show in it."""

RETURNS = {"mean_returns": "total_reward", "mean_returns_ma": "total_reward_ma"}
POLICY_RETURNS = {"policy_returns": "mean_returns", "policy_returns_ma": "mean_returns_ma"}
"""Names of graphs with a curve per policy → those with a curve per table."""
LEARNING = {"loss": "loss", "entropy": "entropy", "explore_var": "explore_var"}
"""Names of graphs → columns."""
SHARED = {"grad_norm": "grad_norm", "staleness": "staleness", "lock_wait": "lock_wait"}
"""The same of Sessions that train one net together."""
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
    "staleness": ("staleness", "staleness (updates of others, pull to push)"),
    "lock_wait": ("wait for the lock", "wait of an update for the lock (ms)"),
    "strengths": ("strength", "strength (mean return above random)"),
    "sample_efficiencies": ("sample efficiency", "sample efficiency (1 / frame)"),
    "training_efficiencies": ("training efficiency", "training efficiency (1 / optimizer step)"),
    "stabilities": ("stability", "stability"),
    "consistencies": ("consistency", "consistency"),
}
"""What is drawn, as in the title, and along the axis."""


@dataclass(frozen=True)
class Axis:
    """What curves go over."""

    name: str
    """In file names."""
    column: str
    label: str


FRAMES = Axis("frames", "frame", "frames")
SESSION_FRAMES = Axis("frames", "frame", "frames (of each session)")
"""The same where the Sessions train one net."""
POLICY_FRAMES = Axis("frames", "frame", "frames (of each policy)")
"""The same where a Session trains several policies."""
SHARED_AXES = (
    Axis("global_frames", "global_frame", "global frames (of all sessions together)"),
    Axis("wall_t", "wall_t", "wall-clock time (s)"),
)
"""Where the Sessions train one net, the returns are drawn over these too."""


@dataclass(frozen=True)
class Labels:
    """What stands on the graphs of a trial."""

    title: str
    """Spec, env and trial."""
    episodes: Mapping[DataMode, str]
    """Over what episodes a return is the mean."""
    failed: int = 0
    """Sessions that failed: they are missing in the lines of the trial."""
    policies: int = 1
    """Of each Session."""
    sessions: int = 1
    """Of the trial."""
    frames: Axis = FRAMES
    """Whose frames the curves go over."""

    def of(self, index: int) -> str:
        """Whose the table of this index is, in words."""
        session, policy = divmod(index, self.policies)
        return f"session {session}" if self.policies == 1 else f"session {session}, policy {policy}"

    def name(self, index: int) -> str:
        """The same as briefly as a legend has it."""
        return f"policy {index % self.policies}" if self.policies > 1 and self.sessions == 1 else self.of(index)

    @property
    def each(self) -> str:
        """What has a table of its own."""
        return "policies" if self.policies > 1 else "sessions"

    @property
    def missing(self) -> str:
        """In words, as in ", 1 failed", or of policies ", 1 session failed"."""
        sessions = "" if self.policies == 1 else " session" if self.failed == 1 else " sessions"
        return f", {self.failed}{sessions} failed" if self.failed else ""

    def count(self, tables: int) -> str:
        """In words, as in 2 sessions, 1 failed, or in 6 policies, 1 session failed."""
        return f"{tables} {self.each if tables != 1 else 'policy' if self.policies > 1 else 'session'}{self.missing}"


def distributed(tables: Iterable[Table]) -> bool:
    """Whether the Sessions of these tables train one net together."""
    return any("global_frame" in table for table in tables)


def learning_curves(tables: Mapping[int, Table]) -> dict[int, Curves]:
    """What each Session tells of its updates; who waits for no lock has nothing to show of it."""
    columns = LEARNING | SHARED if distributed(tables.values()) else LEARNING
    if not any(np.nan_to_num(table.get("lock_wait", 0.0)).any() for table in tables.values()):
        columns = {name: column for name, column in columns.items() if name != "lock_wait"}
    return {index: {name: curve(table, column) for name, column in columns.items()} for index, table in tables.items()}


def return_curves(table: Table, over: str = "frame") -> Curves:
    return {name: curve(table, column, over) for name, column in RETURNS.items()}


def session_graphs(index: int, curves: Curves, labels: Labels, mode: DataMode) -> dict[str, Graph]:
    """Graphs of those curves that have points."""
    suffix = ", evaluation" if mode == "eval" else ""
    titled = replace(labels, title=f"{labels.title}, {labels.of(index)}{suffix}")
    return {name: _graph(name, [Line(labels.name(index), one)], titled, mode) for name, one in curves.items() if len(one.frame)}


def trial_graphs(sessions: Mapping[int, Curves], labels: Labels, mode: DataMode, axis: Axis | None = None) -> dict[str, Graph]:
    """Each Session's curves and their mean ± one standard deviation; the returns over frames always, others where there are points."""
    graphs = {}
    for name in next(iter(sessions.values()), {}):
        lines = _mean_lines({index: curves[name] for index, curves in sessions.items() if len(curves[name].frame)}, labels, axis)
        if lines or (name in RETURNS and axis not in SHARED_AXES):
            graphs[name] = _graph(name, lines, labels, mode, axis)
    return graphs


def policy_graphs(returns: Mapping[int, Curves], labels: Labels, mode: DataMode) -> dict[str, Graph]:
    """The returns with one curve per policy, the mean ± one standard deviation where there are several Sessions; {} of a single policy."""
    graphs: dict[str, Graph] = {}
    for of_policies, name in POLICY_RETURNS.items() if labels.policies > 1 else ():
        lines = []
        for policy in range(labels.policies):
            curves = [one[name] for index, one in returns.items() if index % labels.policies == policy and len(one[name].frame)]
            together = gathered(curves, least=min(len(curves), 2))
            aligned = together if len(together.frame) else align(curves)
            std = aligned.std() if len(curves) > 1 else None
            colour = POLICY_COLOURS[policy % len(POLICY_COLOURS)]
            lines += [Line(f"policy {policy}", aligned.mean(), colour, std)] if len(aligned.frame) else []
        graph = _graph(of_policies, lines, labels, mode)
        several = f" ± std over {labels.sessions - labels.failed} sessions" if any(line.std is not None for line in lines) else ""
        graphs[of_policies] = replace(graph, title=f"{graph.title}{several}{labels.missing}")
    return graphs


def common_strengths(strengths: Mapping[int, Strengths]) -> Aligned:
    """At the frames that every Session with strengths has."""
    curves = [Curve(one.frame, one.value) for one in strengths.values() if len(one.value)]
    return gathered(curves, least=len(curves))


def consistency_graphs(common: Aligned, labels: Labels, mode: DataMode) -> dict[str, Graph]:
    """How alike the Sessions, or their policies, are; of one alone there is nothing to say."""
    one, sessions = consistency_curve(common), len(common.value_SF)
    if sessions < 2 or not len(one.frame):
        return {}
    return {"consistencies": _graph("consistencies", [Line(f"over {labels.count(sessions)}", one)], labels, mode)}


def judged_curves(table: Table, strengths: Strengths) -> Curves:
    """Returns, and the metrics made of them."""
    return {**return_curves(table), **metric_curves(strengths)}


def _mean_lines(curves: Mapping[int, Curve], labels: Labels, axis: Axis | None) -> list[Line]:
    """The mean goes over frames that two Sessions have: the last row of one that was stopped stands off the others' grid.

    Where each Session has a grid of its own, over what is no frame, it goes over the range that all share.
    """
    name = f"mean of {labels.count(len(curves))}"
    if len(curves) == 1:
        return [Line(name if labels.failed else labels.name(index), one) for index, one in curves.items()]
    aligned = interpolate(list(curves.values())) if axis in SHARED_AXES else gathered(list(curves.values()), least=2)
    sessions = [
        Line(labels.name(index), one, SESSION_COLOURS[order % len(SESSION_COLOURS)], faint=True)
        for order, (index, one) in enumerate(curves.items())
    ]
    mean = Line(name, aligned.mean(), std=aligned.std())
    return [*sessions, mean] if len(aligned.frame) else sessions


def _graph(name: str, lines: list[Line], labels: Labels, mode: DataMode, axis: Axis | None = None) -> Graph:
    what, y_label = _TEXTS[name]
    x_label = (axis or labels.frames).label
    text = y_label.format(episodes=labels.episodes[mode])
    return Graph(f"{labels.title}: {what}", text, lines, name in _CORE_RANGE, x_label, each=labels.each)
