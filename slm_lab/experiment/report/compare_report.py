"""The command compare: compare runs in graphs, files and text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.files.paths import file_stem, new_comparison
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.compare import RULES, Setting, Summary, read_settings, summarize, usable_metric
from slm_lab.experiment.report.figure import GREY, MEAN_COLOUR, SESSION_COLOURS, Figure, Line, Panel
from slm_lab.experiment.report.metrics import INTERVAL, Aligned, Curve, Estimate
from slm_lab.experiment.report.progress import number
from slm_lab.experiment.report.trial_figures import FRAMES, GLOBAL_FRAMES, WALL_CLOCK, Axis
from slm_lab.experiment.report.writer import Writer, csv_bytes, json_bytes
from slm_lab.lib.files import finite

AXES = {axis.column: axis for axis in (FRAMES, GLOBAL_FRAMES, WALL_CLOCK, Axis("opt_steps", "opt_step", "optimizer steps"))}
"""Values of --by."""
METRICS = {
    "current_return": "mean return (evaluation, or recent episodes)",
    "total_reward": "mean return (last 100 episodes)",
    "return_new": "mean return (episodes since the last row)",
}
"""Values of --metric → vertical axis."""
COLOURS = (MEAN_COLOUR, *SESSION_COLOURS)
BAND = "mean ± 1 standard deviation over seeds"
VARIANCE = ("variance of the return between seeds", "variance of the mean return between seeds")
"""Title, and label of the vertical axis."""
MEDIANS = "medians over all seeds, with the interval of order statistics; ∞: not reached by half of them"


class Comparison(NamedTuple):
    """What `comparison` found and wrote."""

    text: str
    content: dict[str, Any]
    """The content of the JSON file."""
    files: list[Path]


def compare(run_patterns: Sequence[str], **options: Any) -> str:
    """Return the text of `comparison`: the table and the written files."""
    return comparison(run_patterns, **options).text


def comparison(
    run_patterns: Sequence[str],
    *,
    by: str = "frame",
    metric: str = "current_return",
    solve: float | None = None,
    labels: Sequence[str] = (),
    data_dir: Path = Path("data"),
    out: Path | None = None,
) -> Comparison:
    """Compare the runs in the folders (or patterns) `run_patterns` over a column of AXES; return the table and the written files.

    `metric` is the column of METRICS to draw, `solve` the return that counts as solved, `labels` one name per pattern, `out` the output
    folder instead of a new one in `data_dir`. A graph that cannot be drawn causes a notice.

    Raises UserError for invalid arguments and runs, before anything is written, and if a file cannot be written.
    """
    if by not in AXES:
        raise UserError(f"invalid column '{by}'; expected one of {', '.join(AXES)}")
    if metric not in METRICS:
        raise UserError(f"invalid metric '{metric}'; expected one of {', '.join(METRICS)}")
    settings = read_settings(run_patterns, labels)
    for setting in settings:
        if metric == "return_new" and (old := [run.paths.root for run in setting.runs if not run.has_new_returns]):
            raise UserError(f"{old[0]}: SLM Lab wrote this run, without return_new; compare total_reward")
    metric = usable_metric(metric, settings)
    summaries = [summarize(setting, solve, metric) for setting in settings]
    graphs = comparison_graphs(settings, by, solve, metric)
    try:
        paths = new_comparison(data_dir, out)
    except OSError as error:
        raise UserError(f"cannot write to {out or data_dir}: {error.strerror or error}") from None
    rows, writer = [file_row(one._asdict()) for one in summaries], Writer(paths.root)
    runs = ([str(run.paths.root) for run in setting.runs] for setting in settings)
    content: dict[str, Any] = {"by": by, "metric": metric, "solve": solve, "interval": INTERVAL}
    content |= {"settings": [row | {"runs": folders} for row, folders in zip(rows, runs, strict=True)]}
    writer.write("table not written", (paths.table("json"), partial(json_bytes, content)))
    writer.write("table not written", (paths.table("csv"), partial(rows_csv, rows)))
    with writer.drawing():
        writer.draw(graphs, partial(paths.graph, axis=AXES[by].name))
    writer.close()
    if writer.reason:
        if out is None:
            with suppress(OSError):
                paths.root.rmdir()  # if nothing was written
        raise UserError(f"{text_table(summaries)}\n\ncannot write the comparison to {paths.root}: {writer.reason}")
    return Comparison("\n".join([text_table(summaries), *map(str, writer.files)]), content, writer.files)


def comparison_graphs(
    settings: Sequence[Setting], by: str, solve: float | None = None, metric: str = "current_return"
) -> dict[str, Figure]:
    """Return figures of the return, the gradient norm and the variance of the return between seeds, if any setting has them.

    Each env has separate figures. With several envs, the env is part of a figure's name.
    """
    drawn = [
        Drawn("mean_returns", f"return, {BAND}", METRICS[metric], metric, solve),
        Drawn("grad_norm", f"gradient norm, {BAND}", "norm of the gradient before clipping", "grad_norm"),
        Drawn("return_variance", *VARIANCE, metric, spread=True),
    ]
    envs = {setting.env: [one for one in settings if one.env == setting.env] for setting in settings}
    return {
        f"{name}_{file_stem(env)}" if len(envs) > 1 else name: figure
        for env, of_env in envs.items()
        for name, figure in setting_figures(env, of_env, by, cycle(COLOURS), drawn).items()
        if figure.panel.lines or name == "mean_returns"
    }


class Drawn(NamedTuple):
    """The content of a figure for each setting."""

    name: str
    """Name of the figure."""
    title: str
    y_label: str
    column: str
    solve: float | None = None
    """Return that counts as solved, drawn as a line; None: no line."""
    spread: bool = False
    """Show the variance between seeds instead of their mean; the mean has a band if there are two seeds."""


def shared_axis(settings: Sequence[Setting], by: str) -> Axis:
    """Return the axis of a column; frames are global frames if Sessions train one net."""
    return GLOBAL_FRAMES if by == "frame" and any(setting.distributed for setting in settings) else AXES[by]


def setting_figures(env: str, settings: Sequence[Setting], by: str, colours: Iterable[str], drawn: Iterable[Drawn]) -> dict[str, Figure]:
    """Return figures with a line for each setting that has points, over a column of AXES. All settings have the same env."""
    styles = [Line(f"{one.name} ({one.count()})", Curve(*np.empty((2, 0))), colour) for one, colour in zip(settings, colours, strict=False)]
    figures = {}
    for what in drawn:
        of_settings = [setting.aligned(what.column, by) for setting in settings]
        found = [(style, one) for style, one in zip(styles, of_settings, strict=True) if len(one.frame)]
        lines = [_line(style, one, spread=what.spread) for style, one in found if not what.spread or len(one.value_SF) > 1]
        level = _threshold_line([one for _, one in found], what.solve)
        panel = Panel(what.y_label, [*level, *lines], x_label=shared_axis(settings, by).label)
        figures[what.name] = Figure(f"{env}: {what.title}", (panel,))
    return figures


def _line(style: Line, one: Aligned, *, spread: bool) -> Line:
    """Return a setting's mean or, with `spread`, its variance (unbiased, since numbers of seeds may differ)."""
    if spread:
        return replace(style, curve=Curve(one.frame, one.value_SF.var(axis=0, ddof=1)))
    return replace(style, curve=one.mean(), band=one.band() if len(one.value_SF) > 1 else None)


def _threshold_line(of_settings: Sequence[Aligned], solve: float | None) -> list[Line]:
    """Return a horizontal line at the return that counts as solved; [] if `solve` is None."""
    last = max((float(one.frame[-1]) for one in of_settings), default=0.0)
    if solve is None or not last:
        return []
    return [Line(f"solved: {number(solve)}", Curve(np.linspace(0.0, last, 100), np.full(100, solve)), GREY, dashed=True)]


def text_table(summaries: Sequence[Summary]) -> str:
    """Return the table for the terminal. It has solve columns only with a threshold, and a status column only if a seed is not done.

    The env is a column if there are several envs.
    """
    columns: dict[str, list[str]] = {
        "name": [one.name for one in summaries],
        "env": [one.env for one in summaries] if len({one.env for one in summaries}) > 1 else [],
        "seeds": [str(one.seeds) for one in summaries],
        "sessions": [str(one.sessions) for one in summaries],
        "status": [one.status for one in summaries] if any(one.status != "done" for one in summaries) else [],
    }
    explained = ""
    if any(one.solved is not None for one in summaries):
        columns["solved"] = [f"{one.solved} of {one.seeds}" for one in summaries]
        columns["global frames to solve"] = [estimate_text(one.steps_to_threshold) for one in summaries]
        columns["seconds to solve"] = [estimate_text(one.seconds_to_threshold) for one in summaries]
        explained = f"; global frames and seconds to solve: {MEDIANS}"
    columns |= {
        "final return": [estimate_text(one.final_return) for one in summaries],
        "median": [number_text(one.final_return_median) for one in summaries],
        "updates/s": [number_text(one.opt_steps_per_second) for one in summaries],
        "grad norm": [number_text(one.grad_norm) for one in summaries],
    }
    judged = {rule: [one.name for one in summaries if rule in (one.solved_by or "").split(" and ")] for rule in RULES}
    rules = [f"solved, {', '.join(names)}: judged on {RULES[rule]}" for rule, names in judged.items() if names]
    return "\n".join([*text_rows(table_lines(columns)), f"[low, high]: {INTERVAL}{explained}", *rules])


# ---- text and files of tables

_INTERVALS = ("steps_to_threshold", "seconds_to_threshold", "final_return", "score", "difference", "solve_frames")
"""Columns of output files that have a 95 % interval."""


def file_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for a file: estimates become NAME, NAME_low and NAME_high; infinite numbers become null."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if name in _INTERVALS:
            middle, low, high = value or (None, None, None)
            cells |= {name: middle, f"{name}_low": low, f"{name}_high": high}
        else:
            cells[name] = value
    return dict(finite(cells))


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the content of a CSV file from rows with the same columns."""
    return csv_bytes(rows[0], [row.values() for row in rows])


def table_lines(columns: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the header and the lines of a table, without empty columns."""
    kept = {title: cells for title, cells in columns.items() if cells}
    return [list(kept), *(list(line) for line in zip(*kept.values(), strict=True))]


def text_rows(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of cells with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def number_text(value: float | None) -> str:
    """Format a number of a table."""
    if value is not None and math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if value is not None and 1e3 <= abs(value) < 1e15 else number(value)


def estimate_text(one: Estimate | None, sign: str = "") -> str:
    """Format an estimate with its interval: "12 [11, 13]". sign: "+" before positive values."""
    if one is None:
        return "-"
    value = f"{sign if one.value > 0 else ''}{number_text(one.value)}"
    return value if one.low is None else f"{value} [{number_text(one.low)}, {number_text(one.high)}]"
