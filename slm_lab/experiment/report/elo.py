"""Draw the figure of self-play: the Elo ratings of the policy snapshots of each Session, and the scores of snapshots in games."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from slm_lab.experiment.report.figure import EVALUATION_COLOUR, GREY, MEAN_COLOUR, SESSION_COLOURS, Figure, Line, Panel
from slm_lab.experiment.report.metrics import Curve
from slm_lab.experiment.report.run import Run, parse_numbers, read_columns
from slm_lab.experiment.report.trial_figures import Labels
from slm_lab.experiment.report.writer import Writer

_SCORES = {"score_random": ("against random actions", GREY), "score_previous": ("against the previous snapshot", MEAN_COLOUR)}
"""Table column of the scores against an opponent → (name of the opponent in the legend, colour of the line)."""
_FIXED_COLOURS = (EVALUATION_COLOUR, "#D55E00", "#56B4E9")
Snapshots = Mapping[str, np.ndarray]
"""Table of the policy snapshots of a Session: column → one value for each snapshot."""


def elo_figure(tables: Mapping[int, Snapshots], title: str, x_label: str = "frames") -> Figure | None:
    """Return the figure of the Elo ratings and scores of a trial, or None if the tables have no ratings.

    Args: tables: index of each Session → table of its snapshots.
    """
    tables = {s: table for s, table in tables.items() if len(table.get("elo", ()))}
    if not tables:
        return None
    alone = len(tables) == 1
    lines = [
        _rating_line(table, "rating" if alone else f"session {s}", SESSION_COLOURS[i % len(SESSION_COLOURS)])
        for i, (s, table) in enumerate(tables.items())
    ]
    ratings = Panel("Elo", lines, x_label=x_label, band="±1 standard error", height=200)
    columns = [name for name in next(iter(tables.values())) if name.startswith("score_")]
    fixed = [name for name in columns if name not in _SCORES]
    colours = {
        **_SCORES,
        **{name: (f"against {name.removeprefix('score_')}", _FIXED_COLOURS[i % len(_FIXED_COLOURS)]) for i, name in enumerate(fixed)},
    }
    scores = [_mean_score_line(list(tables.values()), name, *colours[name]) for name in columns]
    panel = Panel("score", [line for line in scores if len(line.curve.frame)], x_label, (0.0, 1.0), height=150)
    note = "Elo 0: random actions. Score per game: 1 won, 0.5 drawn, 0 lost"
    return Figure(f"{title}: self-play", (ratings, panel), note if alone else f"{note}; mean over sessions")


def _rating_line(table: Snapshots, name: str, colour: str) -> Line:
    frame, elo, error = table["frame"], table["elo"], table["elo_se"]
    known = np.isfinite(frame) & np.isfinite(elo)
    frame, elo, error = frame[known], elo[known], np.nan_to_num(error[known])
    return Line(name, Curve(frame, elo), colour, band=(elo - error, elo + error))


def _mean_score_line(tables: Sequence[Snapshots], column: str, name: str, colour: str) -> Line:
    """Return the line of the scores against one opponent, averaged over the Sessions, at the frames that all Sessions have in common.

    Args: column: table column of the scores against the opponent.
    """
    frames = [table["frame"][np.isfinite(table[column])] for table in tables if column in table]
    common = frames[0] if frames else np.empty(0)
    for other in frames[1:]:
        common = np.intersect1d(common, other)
    values = [table[column][np.isin(table["frame"], common)] for table in tables if column in table]
    return Line(name, Curve(common, np.mean(values, axis=0) if len(common) else np.empty(0)), colour)


def draw_elo(writer: Writer, run: Run, labels: Labels) -> None:
    """Write the figure of the Elo ratings of a run, if the run has rated snapshots. If a file cannot be read, a notice is printed."""
    paths, t, tables = run.paths, run.trial, {}
    for s in sorted({index // run.policies for index in run.tables("train")}):
        with writer.suppress_drawing_errors(paths.elo(s, t).name):
            if paths.elo(s, t).is_file():
                tables[s] = {name: parse_numbers(cells) for name, cells in read_columns(paths.elo(s, t)).items()}
    if (figure := elo_figure(tables, labels.title, labels.frames.label)) is not None:
        writer.draw({"elo": figure}, partial(paths.trial_graph, t=t))
