"""The command compare: runs as graphs, files and text."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.experiment.files.paths import ComparisonPaths, file_stem, new_comparison
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.compare import RULES, Setting, Summary, read_settings, summarize
from slm_lab.experiment.report.curves import Aligned, Curve
from slm_lab.experiment.report.figure import GREY, MEAN_COLOUR, SESSION_COLOURS, Figure, Line, Panel
from slm_lab.experiment.report.progress import number
from slm_lab.experiment.report.statistics import INTERVAL, Estimate
from slm_lab.experiment.report.trial_figures import FRAMES, GLOBAL_FRAMES, WALL_CLOCK, Axis
from slm_lab.experiment.report.writer import Writer

AXES = {axis.column: axis for axis in (FRAMES, GLOBAL_FRAMES, WALL_CLOCK, Axis("opt_steps", "opt_step", "optimizer steps"))}
"""Values of --by."""
METRICS = {"total_reward": "mean return (last 100 episodes)", "return_new": "mean return (episodes since the last row)"}
"""Values of --metric → vertical axis."""
COLOURS = (MEAN_COLOUR, *SESSION_COLOURS)
BAND = "mean ± 1 standard deviation over seeds"
MEDIANS = "medians over all seeds, with the interval of order statistics; ∞: not reached by half of them"


def compare(
    run_patterns: Sequence[str],
    *,
    by: str = "frame",
    metric: str = "total_reward",
    solve: float | None = None,
    labels: Sequence[str] = (),
    data_dir: Path = Path("data"),
    out: Path | None = None,
) -> str:
    """Compare the runs in the folders (or patterns) `run_patterns` over a column of AXES; return the table as text, with the files written.

    `metric` is the column of METRICS that is drawn, `solve` the return that counts as solved, `labels` one name per pattern, `out` the
    folder to write in instead of a new one in `data_dir`. A graph that cannot be drawn is a notice.

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
    summaries = [summarize(setting, solve, metric) for setting in settings]
    graphs = comparison_graphs(settings, by, solve, metric)
    try:
        paths = new_comparison(data_dir, out)
    except OSError as error:
        raise UserError(f"cannot write to {out or data_dir}: {error.strerror or error}") from None
    axis, writer = AXES[by], Writer(paths.root)
    writer.write("table not written", (paths.table("json"), lambda: _json(settings, summaries, by, solve, metric)))
    writer.write("table not written", (paths.table("csv"), lambda: csv_bytes([_row(one) for one in summaries])))
    with writer.drawing():
        writer.draw(graphs, partial(paths.graph, axis=axis.name))
    writer.close()
    if writer.reason:
        if out is None:
            with suppress(OSError):
                paths.root.rmdir()  # if nothing was written
        raise UserError(f"{text_table(summaries)}\n\ncannot write the comparison to {paths.root}: {writer.reason}")
    return "\n".join([text_table(summaries), *_files(paths, graphs, axis)])


def comparison_graphs(settings: Sequence[Setting], by: str, solve: float | None = None, metric: str = "total_reward") -> dict[str, Figure]:
    """Return figures of the return, the gradient norm and the variance of the return between seeds, each if a setting has it.

    Each env has figures of its own: with several, the env is part of a figure's name.
    """
    envs = {setting.env: [one for one in settings if one.env == setting.env] for setting in settings}
    return {
        f"{name}_{file_stem(env)}" if len(envs) > 1 else name: figure
        for env, of_env in envs.items()
        for name, figure in _graphs(of_env, env, by, solve, metric).items()
    }


def _graphs(settings: Sequence[Setting], title: str, by: str, solve: float | None, metric: str) -> dict[str, Figure]:
    shared = by == "frame" and any(setting.distributed for setting in settings)
    axis = GLOBAL_FRAMES if shared else AXES[by]
    returns = [setting.aligned(metric, by) for setting in settings]
    norms = [setting.aligned("grad_norm", by) for setting in settings]
    styles = [Line(f"{one.name} ({one.count()})", Curve(*np.empty((2, 0))), colour) for one, colour in zip(settings, cycle(COLOURS))]
    variance = "variance of the return between seeds"
    texts = {
        "mean_returns": (f"return, {BAND}", METRICS[metric], [*threshold_line(returns, solve), *lines_with_bands(styles, returns)]),
        "grad_norm": (f"gradient norm, {BAND}", "norm of the gradient before clipping", lines_with_bands(styles, norms)),
        "return_variance": (variance, "variance of the mean return between seeds", variance_lines(styles, returns)),
    }
    return {
        name: Figure(f"{title}: {what}", (Panel(y_label, lines, x_label=axis.label),))
        for name, (what, y_label, lines) in texts.items()
        if lines or name == "mean_returns"
    }


def text_table(summaries: Sequence[Summary]) -> str:
    """Return the table for the terminal; with columns of solving only if there is a threshold, of status only if a seed is not done.

    The env is a column if there are several.
    """
    has_threshold, has_status = any(one.solved is not None for one in summaries), any(one.status != "done" for one in summaries)
    solving = ("solved", "global frames to solve", "seconds to solve") if has_threshold else ()
    has_envs = len({one.env for one in summaries}) > 1
    optional = (*(("status",) if has_status else ()), *solving)
    head = ("name", *(("env",) if has_envs else ()), "seeds", "sessions", *optional, "final return", "median", "updates/s", "grad norm")
    lines: list[tuple[str, ...]] = [head]
    for one in summaries:
        status = (one.status,) if has_status else ()
        reached = map(estimate_text, (one.steps_to_threshold, one.seconds_to_threshold))
        solved = (f"{one.solved} of {one.seeds}", *reached) if has_threshold else ()
        others = map(number_text, (one.final_return_median, one.opt_steps_per_second, one.grad_norm))
        env = (one.env,) if has_envs else ()
        counts = (str(one.seeds), str(one.sessions))
        lines.append((one.name, *env, *counts, *status, *solved, estimate_text(one.final_return), *others))
    explained = f"; global frames and seconds to solve: {MEDIANS}" if has_threshold else ""
    judged = {rule: [one.name for one in summaries if rule in (one.solved_by or "").split(" and ")] for rule in RULES}
    rules = [f"solved, {', '.join(names)}: judged on {RULES[rule]}" for rule, names in judged.items() if names]
    return "\n".join([*text_rows(lines), f"[low, high]: {INTERVAL}{explained}", *rules])


def lines_with_bands(styles: Sequence[Line], of_settings: Sequence[Aligned]) -> list[Line]:
    """Return a line in the style of each setting that has points, with a band if there are two seeds."""
    return [
        replace(line, curve=one.mean(), band=one.band() if len(one.value_SF) > 1 else None)
        for line, one in zip(styles, of_settings, strict=True)
        if len(one.frame)
    ]


def variance_lines(styles: Sequence[Line], of_settings: Sequence[Aligned]) -> list[Line]:
    """Return the lines of the settings that have two seeds; unbiased, since settings may differ in their number of seeds."""
    return [
        replace(line, curve=Curve(one.frame, one.value_SF.var(axis=0, ddof=1)))
        for line, one in zip(styles, of_settings, strict=True)
        if len(one.value_SF) > 1 and len(one.frame)
    ]


def threshold_line(of_settings: Sequence[Aligned], solve: float | None) -> list[Line]:
    """Return a horizontal line at the return that counts as solved; none without one."""
    last = max((float(one.frame[-1]) for one in of_settings if len(one.frame)), default=0.0)
    if solve is None or not last:
        return []
    return [Line(f"solved: {number(solve)}", Curve(np.linspace(0.0, last, 100), np.full(100, solve)), GREY, dashed=True)]


def _row(one: Summary) -> dict[str, Any]:
    """Return the columns of the files."""
    row: dict[str, Any] = {}
    for name, value in one._asdict().items():
        row[name] = value.value if isinstance(value, Estimate) else value
        if name in ("steps_to_threshold", "seconds_to_threshold", "final_return"):
            row |= {f"{name}_low": value and value.low, f"{name}_high": value and value.high}
    return finite(row)


def _json(settings: Sequence[Setting], summaries: Sequence[Summary], by: str, solve: float | None, metric: str) -> bytes:
    rows = [_row(one) | {"runs": [str(run.paths.root) for run in setting.runs]} for setting, one in zip(settings, summaries, strict=True)]
    content = {"by": by, "metric": metric, "solve": solve, "interval": INTERVAL, "settings": rows}
    return (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _files(paths: ComparisonPaths, graphs: dict[str, Figure], axis: Axis) -> list[str]:
    """Return the files that were written, by name."""
    drawn = [paths.graph(name, ext, axis.name) for name in graphs for ext in ("html", "png")]
    return [str(file) for file in (paths.table("json"), paths.table("csv"), *drawn) if file.is_file()]


# ---- text and files of tables


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for a file: what is infinite is null there."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}


def csv_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the CSV file of rows with the same columns."""
    text = StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


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
