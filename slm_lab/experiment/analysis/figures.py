"""Which graphs there are of a Session and of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slm_lab.experiment.analysis.graph import SESSION_COLOURS, Graph, Line
from slm_lab.experiment.analysis.metrics import Strengths, consistency_curve, metric_curves
from slm_lab.experiment.analysis.table import Aligned, Curve, Table, align, curve
from slm_lab.experiment.paths import DataMode

Curves = dict[str, Curve]
"""Name of a graph → what one Session has to show in it."""

RETURNS = {"mean_returns": "total_reward", "mean_returns_ma": "total_reward_ma"}
LEARNING = {"loss": "loss", "entropy": "entropy", "explore_var": "explore_var"}
"""Names of graphs → columns."""
_CORE_RANGE = ("sample_efficiencies", "training_efficiencies", "stabilities", "consistencies")
_TEXTS = {
    "mean_returns": ("mean return", "mean return ({episodes})"),
    "mean_returns_ma": ("mean return, moving average", "mean return, moving average (last 100 rows)"),
    "loss": ("loss", "loss"),
    "entropy": ("entropy", "entropy of the policy (nats)"),
    "explore_var": ("explore_var", "explore_var"),
    "strengths": ("strength", "strength (mean return above random)"),
    "sample_efficiencies": ("sample efficiency", "sample efficiency (1 / frame)"),
    "training_efficiencies": ("training efficiency", "training efficiency (1 / optimizer step)"),
    "stabilities": ("stability", "stability"),
    "consistencies": ("consistency", "consistency"),
}
"""What is drawn, as in the title, and along the axis."""


@dataclass(frozen=True)
class Labels:
    """What stands on the graphs of a trial."""

    title: str
    """Spec, env and trial."""
    episodes: Mapping[DataMode, str]
    """Over what episodes a return is the mean."""
    failed: int = 0
    """Sessions that failed: they are missing in the lines of the trial."""

    def of_sessions(self, count: int) -> str:
        """In words, as in 2 sessions, 1 failed."""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{count} session{'s' if count != 1 else ''}{failed}"


def learning_curves(table: Table) -> Curves:
    return {name: curve(table, column) for name, column in LEARNING.items()}


def return_curves(table: Table) -> Curves:
    return {name: curve(table, column) for name, column in RETURNS.items()}


def session_graphs(index: int, curves: Curves, labels: Labels, mode: DataMode) -> dict[str, Graph]:
    """Graphs of those curves that have points."""
    suffix = ", evaluation" if mode == "eval" else ""
    titled = replace(labels, title=f"{labels.title}, session {index}{suffix}")
    return {name: _graph(name, [Line(f"session {index}", one)], titled, mode) for name, one in curves.items() if len(one.frame)}


def trial_graphs(sessions: Mapping[int, Curves], labels: Labels, mode: DataMode) -> dict[str, Graph]:
    """Each Session's curves and their mean ± one standard deviation; the returns always, the others where there are points."""
    graphs = {}
    for name in next(iter(sessions.values()), {}):
        lines = _mean_lines({index: curves[name] for index, curves in sessions.items() if len(curves[name].frame)}, labels)
        if lines or name in RETURNS:
            graphs[name] = _graph(name, lines, labels, mode)
    return graphs


def common_strengths(strengths: Mapping[int, Strengths]) -> Aligned:
    """At the frames that every Session with strengths has."""
    curves = [Curve(one.frame, one.value) for one in strengths.values() if len(one.value)]
    return align(curves, least=len(curves))


def consistency_graphs(common: Aligned, labels: Labels, mode: DataMode) -> dict[str, Graph]:
    """How alike the Sessions are; of one alone there is nothing to say."""
    one, sessions = consistency_curve(common), len(common.value_SF)
    if sessions < 2 or not len(one.frame):
        return {}
    return {"consistencies": _graph("consistencies", [Line(f"over {labels.of_sessions(sessions)}", one)], labels, mode)}


def judged_curves(table: Table, strengths: Strengths) -> Curves:
    """Returns, and the metrics made of them."""
    return {**return_curves(table), **metric_curves(strengths)}


def _mean_lines(curves: Mapping[int, Curve], labels: Labels) -> list[Line]:
    """The mean goes over frames that two Sessions have: the last row of one that was stopped stands off the others' grid."""
    name = f"mean of {labels.of_sessions(len(curves))}"
    if len(curves) == 1:
        return [Line(name if labels.failed else f"session {index}", one) for index, one in curves.items()]
    aligned = align(list(curves.values()), least=2)
    sessions = [
        Line(f"session {index}", one, SESSION_COLOURS[order % len(SESSION_COLOURS)], faint=True)
        for order, (index, one) in enumerate(curves.items())
    ]
    mean = Line(name, aligned.mean(), std=aligned.std())
    return [*sessions, mean] if len(aligned.frame) else sessions


def _graph(name: str, lines: list[Line], labels: Labels, mode: DataMode) -> Graph:
    what, y_label = _TEXTS[name]
    return Graph(f"{labels.title}: {what}", y_label.format(episodes=labels.episodes[mode]), lines, name in _CORE_RANGE)
