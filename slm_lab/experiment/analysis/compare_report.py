"""The command compare: runs as graphs, files and text."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.experiment.analysis.compare import Setting, Summary, read_settings, summarize
from slm_lab.experiment.analysis.figure import GREY, MEAN_COLOUR, SESSION_COLOURS, Figure, Line, Panel
from slm_lab.experiment.analysis.statistics import INTERVAL, Estimate
from slm_lab.experiment.analysis.table import Aligned, Curve
from slm_lab.experiment.analysis.trial_figures import FRAMES, SESSION_FRAMES, SHARED_AXES, Axis
from slm_lab.experiment.analysis.writer import Writer
from slm_lab.experiment.paths import ComparisonPaths, new_comparison
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.progress import number

AXES = {axis.column: axis for axis in (FRAMES, *SHARED_AXES, Axis("opt_steps", "opt_step", "optimizer steps"))}
"""Values of --by."""
_COLOURS = (MEAN_COLOUR, *SESSION_COLOURS)
_BAND = "mean ± 1 standard deviation over seeds"


def compare(
    words: Sequence[str],
    *,
    by: str = "frame",
    solve: float | None = None,
    labels: Sequence[str] = (),
    data_dir: Path = Path("data"),
    out: Path | None = None,
) -> str:
    """Compare the runs in the folders (or patterns) `words` over a column of AXES; return the table as text, with the files written.

    `solve` is the total_reward that counts as solved, `labels` one name per word, `out` the folder to write in instead of a new one in
    `data_dir`. Raises UserError, with nothing written. A file or graph that fails is a notice.
    """
    if by not in AXES:
        raise UserError(f"invalid column '{by}'; expected {', '.join(AXES)}")
    settings = read_settings(words, labels)
    summaries = [summarize(setting, solve) for setting in settings]
    graphs = comparison_graphs(settings, by, solve)
    try:
        paths = new_comparison(data_dir, out)
    except OSError as error:
        raise UserError(f"cannot write in {out or data_dir}: {error.strerror or error}") from None
    axis, writer = AXES[by], Writer(paths.root)
    writer.write("table not written", (paths.table("json"), lambda: _json(settings, summaries, by, solve)))
    writer.write("table not written", (paths.table("csv"), lambda: _csv(summaries)))
    with writer.drawing():
        writer.draw(graphs, partial(paths.graph, axis=axis.name))
    writer.close()
    return "\n".join([text_table(summaries), *_files(paths, graphs, axis)])


def comparison_graphs(settings: Sequence[Setting], by: str, solve: float | None = None) -> dict[str, Figure]:
    """Return figures of the return, the gradient norm and the variance of the return between seeds, each where a setting has it."""
    axis, title = _axis(by, settings), _title(settings)
    returns = [setting.aligned("total_reward", by) for setting in settings]
    norms = [setting.aligned("grad_norm", by) for setting in settings]
    variance = "variance of the return between seeds"
    texts = {
        "mean_returns": (f"return, {_BAND}", "mean return (last 100 episodes)", [*_threshold(returns, solve), *_lines(settings, returns)]),
        "grad_norm": (f"gradient norm, {_BAND}", "norm of the gradient before clipping", _lines(settings, norms)),
        "return_variance": (variance, "variance of the mean return between seeds", _variances(settings, returns)),
    }
    return {
        name: Figure(f"{title}: {what}", (Panel(y_label, lines, x_label=axis.label),))
        for name, (what, y_label, lines) in texts.items()
        if lines or name == "mean_returns"
    }


def text_table(summaries: Sequence[Summary]) -> str:
    """Return the table for the terminal; with columns of solving only if there is a threshold, of status only if a seed is not done."""
    judged, marked = any(one.solved is not None for one in summaries), any(one.status != "done" for one in summaries)
    solving = ("solved", "global frames to solve", "seconds to solve") if judged else ()
    head = ("name", "seeds", "sessions", *(("status",) if marked else ()), *solving, "final return", "median", "updates/s", "grad norm")
    lines: list[tuple[str, ...]] = [head]
    for one in summaries:
        status = (one.status,) if marked else ()
        solved = (f"{one.solved} of {one.seeds}", _text(one.steps), _text(one.seconds)) if judged else ()
        others = (one.final_return_median, one.updates_per_second, one.grad_norm)
        lines.append((one.name, str(one.seeds), str(one.sessions), *status, *solved, _text(one.final_return), *map(number, others)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    explained = "; global frames and seconds to solve: median over the seeds that solved" if judged else ""
    return "\n".join([*rows, f"[low, high]: {INTERVAL}{explained}"])


def _axis(by: str, settings: Sequence[Setting]) -> Axis:
    shared = any(setting.distributed for setting in settings)
    if shared and by == "opt_step":
        return replace(AXES[by], label="optimizer steps (of each session)")
    return SESSION_FRAMES if shared and by == "frame" else AXES[by]


def _title(settings: Sequence[Setting]) -> str:
    envs = sorted({run.env for setting in settings for run in setting.runs})
    return envs[0] if len(envs) == 1 else f"{len(envs)} envs"


def _lines(settings: Sequence[Setting], of_settings: Sequence[Aligned]) -> list[Line]:
    """Return a line for each setting that has points, with a band where there are two seeds."""
    lines = []
    for order, (setting, aligned) in enumerate(zip(settings, of_settings, strict=True)):
        band = aligned.std() if len(aligned.value_SF) > 1 else None
        lines.append(Line(_legend(setting), aligned.mean(), _colour(order), band))
    return [line for line in lines if len(line.curve.frame)]


def _variances(settings: Sequence[Setting], of_settings: Sequence[Aligned]) -> list[Line]:
    """Return lines of the settings that have two seeds; unbiased, since settings may differ in their number of seeds."""
    return [
        Line(_legend(setting), Curve(aligned.frame, aligned.value_SF.var(axis=0, ddof=1)), _colour(order))
        for order, (setting, aligned) in enumerate(zip(settings, of_settings, strict=True))
        if len(aligned.value_SF) > 1 and len(aligned.frame)
    ]


def _threshold(of_settings: Sequence[Aligned], solve: float | None) -> list[Line]:
    last = max((float(one.frame[-1]) for one in of_settings if len(one.frame)), default=0.0)
    if solve is None or not last:
        return []
    return [Line(f"solved: {number(solve)}", Curve(np.linspace(0.0, last, 100), np.full(100, solve)), GREY)]


def _legend(setting: Setting) -> str:
    return f"{setting.name} ({setting.count()})"


def _colour(order: int) -> str:
    return _COLOURS[order % len(_COLOURS)]


def _row(one: Summary) -> dict[str, Any]:
    """Return the columns of the files."""
    parts = {"steps_to_threshold": one.steps, "seconds_to_threshold": one.seconds, "final_return": one.final_return}
    estimates = {
        f"{name}{suffix}": getattr(part, field) if part else None
        for name, part in parts.items()
        for suffix, field in (("", "value"), ("_low", "low"), ("_high", "high"))
    }
    return {
        "name": one.name,
        "seeds": one.seeds,
        "sessions": one.sessions,
        "status": one.status,
        "solved": one.solved,
        **estimates,
        "final_return_median": one.final_return_median,
        "opt_steps_per_second": one.updates_per_second,
        "grad_norm": one.grad_norm,
    }


def _json(settings: Sequence[Setting], summaries: Sequence[Summary], by: str, solve: float | None) -> bytes:
    rows = [_row(one) | {"runs": [str(run.paths.root) for run in setting.runs]} for setting, one in zip(settings, summaries, strict=True)]
    content = {"by": by, "solve": solve, "interval": INTERVAL, "settings": rows}
    return (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _csv(summaries: Sequence[Summary]) -> bytes:
    rows, text = [_row(one) for one in summaries], StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


def _files(paths: ComparisonPaths, graphs: dict[str, Figure], axis: Axis) -> list[str]:
    """Return the files that were written, by name."""
    drawn = [paths.graph(name, ext, axis.name) for name in graphs for ext in ("html", "png")]
    return [str(file) for file in (paths.table("json"), paths.table("csv"), *drawn) if file.is_file()]


def _text(one: Estimate | None) -> str:
    if one is None:
        return "-"
    return number(one.value) if one.low is None else f"{number(one.value)} [{number(one.low)}, {number(one.high)}]"
