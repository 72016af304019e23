"""Implementation of the command `compare`: compare runs in graphs, tables and one HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.files.find import BEST, TrainingChoice
from slm_lab.experiment.files.paths import ComparisonPaths, file_stem, new_comparison
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report import comparison_page as html
from slm_lab.experiment.report.compare import read_settings
from slm_lab.experiment.report.figure import GREY, MEAN_COLOUR, SESSION_COLOURS, Figure, Line, Panel
from slm_lab.experiment.report.metrics import INTERVAL, AlignedCurves, Bounds, Curve, Estimate, Median
from slm_lab.experiment.report.pairwise import Comparison, PairComparison, compare_pairs, profile_figure
from slm_lab.experiment.report.progress import format_number
from slm_lab.experiment.report.seed_result import RULES
from slm_lab.experiment.report.setting import ComparableMetric, Setting, Summary, comparable_metric, summarize
from slm_lab.experiment.report.trial_figures import FRAMES, GLOBAL_FRAMES, WALL_CLOCK, Axis
from slm_lab.experiment.report.writer import Writer, csv_bytes, json_bytes
from slm_lab.lib.files import nonfinite_to_none
from slm_lab.lib.text import format_table, wrap_paragraph

AXES = {axis.column: axis for axis in (FRAMES, GLOBAL_FRAMES, WALL_CLOCK, Axis("opt_steps", "opt_step", "optimizer steps"))}
"""Value of the option --by → axis."""
METRICS = {
    "current_return": "mean return (evaluation, or recent episodes)",
    "total_reward": "mean return (last 100 episodes)",
    "return_new": "mean return (episodes since the last row)",
    "training_return": "mean return (recent training episodes)",
}
"""Value of the option --metric → label of the vertical axis."""
PROFILES = "performance_profiles"
"""Name of the figure that shows the performance profiles."""
RETURNS = (*METRICS, "total_reward_ma", "evaluation")
"""Columns that contain returns, which may be negative. All other columns in figures have no negative values."""
COLOURS = (MEAN_COLOUR, *SESSION_COLOURS)
BAND = "mean ± 1 standard deviation over seeds"
VARIANCE = ("variance of the return between seeds", "variance of the mean return between seeds")
"""Title of the figure of the variance between seeds, and label of its vertical axis."""


class WrittenComparison(NamedTuple):
    """Result of `write_comparison`: the text for the terminal, the content of the JSON file, and the written files."""

    text: str
    content: dict[str, Any]
    """The content of the JSON file as a dict."""
    files: list[Path]


def compare(run_patterns: Sequence[str], **options: Any) -> str:
    """Compare runs like `write_comparison`, and return only the text for the terminal: the tables and the names of the written files."""
    return write_comparison(run_patterns, **options).text


def write_comparison(
    run_patterns: Sequence[str],
    *,
    by: str = "frame",
    metric: str = "current_return",
    solve: float | None = None,
    labels: Sequence[str] = (),
    choice: TrainingChoice = BEST,
    data_dir: Path = Path("data"),
    out: Path | None = None,
) -> WrittenComparison:
    """Compare the runs that `run_patterns` name, write the results to files, and return the tables and the written files.

    Args:
        by: key of AXES, which names the column on the horizontal axis of the graphs.
        metric: key of METRICS, which names the column to draw.
        solve: return at which the task counts as solved, or None for no such return.
        labels: a name for each pattern, by default the names of the specs.
        choice: which trial of a search and which runs of a study are compared (see read_settings).
        data_dir: the folder that contains the run folders.
        out: the output folder, by default a new folder in `data_dir`.

    If a graph cannot be drawn, a notice is printed. Raises UserError if an argument or a run is invalid (before any file is written), or if
    a file cannot be written.
    """
    if by not in AXES:
        raise UserError(f"invalid column '{by}'; expected one of {', '.join(AXES)}")
    if metric not in METRICS:
        raise UserError(f"invalid metric '{metric}'; expected one of {', '.join(METRICS)}")
    settings = read_settings(run_patterns, labels, choice, data_dir)
    for setting in settings:
        if metric == "return_new" and (old := [run.paths.root for run in setting.runs if not run.has_new_returns]):
            raise UserError(f"{old[0]}: SLM Lab wrote this run, whose tables have no column return_new; compare total_reward instead")
    used = comparable_metric(metric, settings)
    metric = used.metric
    summaries = [summarize(setting, solve, metric) for setting in settings]
    graphs = comparison_graphs(settings, by, solve, metric)
    try:
        paths = new_comparison(data_dir, out)
    except OSError as error:
        raise UserError(f"cannot write to {out or data_dir}: {error.strerror or error}") from None
    comparison = compare_pairs(settings, metric)
    if comparison.profiles:
        graphs[PROFILES] = profile_figure(comparison, COLOURS)
    return _write(_Report(settings, summaries, comparison, graphs, by, used, solve), paths, remove_empty=out is None)


@dataclass(frozen=True)
class _Report:
    """Results of a comparison, from which the text for the terminal and the content of all files are created."""

    settings: Sequence[Setting]
    summaries: Sequence[Summary]
    comparison: Comparison
    graphs: Mapping[str, Figure]
    by: str
    used: ComparableMetric
    solve: float | None

    @property
    def tables(self) -> dict[str, list[list[str]]]:
        """Title → table as a list of rows, each a list of cells, for each table that is not empty."""
        differences, all_envs = pairs_table(self.comparison), overall_table(self.comparison)
        tables = {"Results": settings_table(self.summaries), "Differences": differences, "All envs": all_envs}
        return {title: lines for title, lines in tables.items() if len(lines) > 1}

    @property
    def text(self) -> str:
        keys = [lines[0].index("env") + 1 if "env" in lines[0] else 2 if lines[0][1] == "A" else 1 for lines in self.tables.values()]
        blocks = [format_table(lines, key_columns=count) for lines, count in zip(self.tables.values(), keys, strict=True)]
        texts = [*self._metric_sentence, *explanations(self.summaries, self.comparison)]
        explained = [line for text in texts for line in wrap_paragraph(text, indent="").splitlines()]
        return "\n".join([*(line for block in blocks for line in (*block, "")), *explained])

    @property
    def _metric_sentence(self) -> list[str]:
        """List with a sentence that says why the requested metric is not used, or [] if the requested metric is used."""
        return [f"{self.used.reason}."] if self.used.reason else []

    def content(self) -> dict[str, Any]:
        """Return the content of the JSON file of the comparison as a dict."""
        runs = ([str(run.paths.root) for run in setting.runs] for setting in self.settings)
        rows = [
            flatten_row(one._asdict()) | {"runs": folders, "bounds": list(setting.bounds or ()) or None}
            for one, folders, setting in zip(self.summaries, runs, self.settings, strict=True)
        ]
        return {
            "by": self.by,
            "metric": self.used.metric,
            "metric_reason": self.used.reason or None,
            "solve": self.solve,
            "interval": INTERVAL,
            "settings": rows,
            "pairs": [flatten_row(one._asdict()) for one in self.comparison.pairs],
            "overall": [flatten_row(one._asdict()) for one in self.comparison.overall],
            "scales": [one._asdict() for one in self.comparison.scales],
            "profiles": {
                name: {part: getattr(one, part).tolist() for part in one._fields} for name, one in self.comparison.profiles.items()
            },
        }

    def page(self, paths: ComparisonPaths) -> str:
        names = [one.name for one in self.settings]
        order = sorted(self.graphs, key=lambda name: name != PROFILES)
        runs = [(f"{one.name}: {run.paths.root}", run.paths.root) for one in self.settings for run in one.runs]
        return html.page(
            "Comparison of " + (" and ".join(names) if len(names) < 4 else f"{len(names)} settings"),
            [
                f'<div class="sentences">{html.bullets([*pair_sentences(self.comparison), *self._metric_sentence])}</div>',
                *(html.section(title, html.table(lines)) for title, lines in self.tables.items()),
                html.section("Graphs", *(html.plot_html(self.graphs[name]) for name in order)),
                html.section("Definitions", html.bullets(explanations(self.summaries, self.comparison)), html.definition_list_html(TERMS)),
                html.section("Runs", html.links(runs, paths.root)),
            ],
        )


def _write(report: _Report, paths: ComparisonPaths, *, remove_empty: bool) -> WrittenComparison:
    """Write the tables, the page and the graphs of a comparison. Raises UserError if a file cannot be written.

    Args: remove_empty: whether to remove the output folder if no file could be written.
    """
    writer = Writer(paths.root)
    writer.write("table not written", (paths.table("json"), lambda: json_bytes(report.content())))
    writer.write("table not written", (paths.table("csv"), lambda: rows_csv([flatten_row(one._asdict()) for one in report.summaries])))
    with writer.suppress_drawing_errors():
        for name, graph in report.graphs.items():
            axis = "" if name == PROFILES else AXES[report.by].name
            writer.draw({name: graph}, partial(paths.graph, axis=axis))
    writer.write("page not written", (paths.page, lambda: report.page(paths).encode()))
    writer.close()
    if writer.reason:
        if remove_empty:
            with suppress(OSError):
                paths.root.rmdir()  # has no effect if the folder has files
        raise UserError(f"{report.text}\n\ncannot write the comparison to {paths.root}: {writer.reason}")
    listed = [paths.table("csv"), paths.table("json"), paths.graph("mean_returns", "png", AXES[report.by].name)]
    lines = [str(file) for file in listed if file in writer.files]
    text = "\n".join([report.text, *lines, *([f"open {paths.page}"] if paths.page in writer.files else [])])
    return WrittenComparison(text, report.content(), writer.files)


def comparison_graphs(
    settings: Sequence[Setting], by: str, solve: float | None = None, metric: str = "current_return"
) -> dict[str, Figure]:
    """Return a dict with figures of the return, of the gradient norm, and of the variance of the return between seeds: name → figure.

    Figures without data are omitted, except the figure of the return. The dict has separate figures for each env. If there are several
    envs, the name of a figure contains the env.
    """
    drawn = [
        FigureSpec("mean_returns", f"return, {BAND}", METRICS[metric], metric, solve),
        FigureSpec("grad_norm", f"gradient norm, {BAND}", "norm of the gradient before clipping", "grad_norm"),
        FigureSpec("return_variance", *VARIANCE, metric, spread=True),
    ]
    envs = {setting.env: [one for one in settings if one.env == setting.env] for setting in settings}
    return {
        f"{name}_{file_stem(env)}" if len(envs) > 1 else name: figure
        for env, of_env in envs.items()
        for name, figure in setting_figures(env, of_env, by, cycle(COLOURS), drawn).items()
        if figure.first_panel.lines or name == "mean_returns"
    }


class FigureSpec(NamedTuple):
    """Description of a figure that shows the same table column for each setting."""

    name: str
    """Name of the figure, which is part of its file name."""
    title: str
    y_label: str
    column: str
    solve: float | None = None
    """Level of a horizontal line (the return that counts as solved, or a published score), or None if the figure has no such line."""
    level: str = "solved"
    """Name of the horizontal line at `solve` in the legend."""
    spread: bool = False
    """Whether the lines show the variance between seeds instead of the mean over seeds."""


def shared_axis(settings: Sequence[Setting], by: str) -> Axis:
    """Return the horizontal axis of figures over the column `by`.

    For by="frame", the axis shows global frames if the Sessions of a run train a shared net.
    """
    return GLOBAL_FRAMES if by == "frame" and any(setting.shares_one_net for setting in settings) else AXES[by]


def setting_figures(
    env: str, settings: Sequence[Setting], by: str, colours: Iterable[str], drawn: Iterable[FigureSpec]
) -> dict[str, Figure]:
    """Return a dict of the figures of an env: name → figure with a line for each setting that has points.

    Args:
        env: env of all `settings`, for the titles.
        by: key of AXES, which names the column on the horizontal axis.
        colours: colour of each setting.
        drawn: descriptions of the figures.
    """
    styles = [
        Line(f"{one.label or one.name} ({one.count_text()})", Curve(*np.empty((2, 0))), colour)
        for one, colour in zip(settings, colours, strict=False)
    ]
    figures = {}
    for what in drawn:
        of_settings = [setting.aligned_curves(what.column, by) for setting in settings]
        nonempty = [(style, one) for style, one in zip(styles, of_settings, strict=True) if len(one.frame)]
        limits = _column_range(settings, what)
        lines = [_line(style, one, limits, spread=what.spread) for style, one in nonempty if not what.spread or len(one.value_SF) > 1]
        level = _threshold_line([one for _, one in nonempty], what)
        panel = Panel(what.y_label, [*level, *lines], x_label=shared_axis(settings, by).label)
        figures[what.name] = Figure(f"{env}: {what.title}", (panel,))
    return figures


def _column_range(settings: Sequence[Setting], what: FigureSpec) -> Bounds:
    """Return the range of possible values of the column that a figure shows, to which the bands of the figure are clipped."""
    if what.column not in RETURNS:
        return 0.0, math.inf
    known = {setting.bounds for setting in settings}
    return (known.pop() if len(known) == 1 else None) or (-math.inf, math.inf)


def _line(style: Line, curves: AlignedCurves, limits: Bounds, *, spread: bool) -> Line:
    """Return the line to draw for a setting: the mean over its seeds or, if `spread` is True, the unbiased variance between its seeds.

    The variance is unbiased, since a biased variance would depend on the number of seeds, which may differ between settings.
    """
    if spread:
        return replace(style, curve=Curve(curves.frame, curves.value_SF.var(axis=0, ddof=1)))
    mean, (low, high) = curves.mean(), curves.band()
    within = np.minimum(np.maximum(low, limits[0]), mean.value), np.maximum(np.minimum(high, limits[1]), mean.value)
    return replace(style, curve=mean, band=within if len(curves.value_SF) > 1 else None)


def _threshold_line(of_settings: Sequence[AlignedCurves], what: FigureSpec) -> list[Line]:
    """Return a list with the horizontal line of a figure at the level `what.solve`, or [] if the figure has no horizontal line."""
    last = max((float(one.frame[-1]) for one in of_settings), default=0.0)
    if what.solve is None or not last:
        return []
    return [
        Line(f"{what.level}: {format_number(what.solve)}", Curve(np.linspace(0.0, last, 100), np.full(100, what.solve)), GREY, dashed=True)
    ]


def settings_table(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return the table with the results of each setting as lists of cells: the header and the rows.

    The table has columns about solving only if a threshold for the return is given, a status column only if a seed is not done, and an env
    column only if the settings have several envs.
    """
    several = len({one.env for one in summaries}) > 1
    columns: dict[str, list[str]] = {
        "name": [one.label for one in summaries] if several else [one.name for one in summaries],
        "env": [one.env for one in summaries] if several else [],
        "seeds": [str(one.seeds) for one in summaries],
        "sessions": [str(one.sessions) for one in summaries] if any(one.sessions != one.seeds for one in summaries) else [],
        "status": [one.status for one in summaries] if any(one.status != "done" for one in summaries) else [],
    }
    if any(one.solved is not None for one in summaries):
        columns["solved"] = [f"{one.solved} of {one.seeds}" for one in summaries]
        columns["seconds to solve"] = [median_text(one.seconds_to_threshold) for one in summaries]
        columns["global frames to solve"] = [median_text(one.steps_to_threshold) for one in summaries]
    columns |= {
        "final return": [estimate_text(one.final_return) for one in summaries],
        "median": [number_text(one.final_return_median) for one in summaries],
        "interquartile mean": [estimate_text(one.interquartile_mean) for one in summaries],
        "updates/s": [number_text(one.opt_steps_per_second) for one in summaries],
        "grad norm": [number_text(one.grad_norm) for one in summaries],
    }
    return rows_from_columns(columns)


def pairs_table(comparison: Comparison) -> list[list[str]]:
    """Return the table of differences between each setting B and the first setting A as lists of cells: the header and the rows."""
    pairs = comparison.pairs
    several = len({one.env for one in pairs}) > 1
    columns: dict[str, list[str]] = {
        "B": [one.b for one in pairs],
        "A": [one.a for one in pairs],
        "env": [one.env for one in pairs] if several else [],
        "B − A": [estimate_text(one.difference, "+") for one in pairs],
        "P(B > A)": [estimate_text(one.improvement) for one in pairs],
        "p": [format_number(one.p_value and _rounded(one.p_value)) for one in pairs],
        "p (Holm)": [format_number(one.p_holm and _rounded(one.p_holm)) for one in pairs],
    }
    return rows_from_columns(columns)


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def overall_table(comparison: Comparison) -> list[list[str]]:
    """Return the table with the results of each setting over all envs as lists of cells: the header and the rows."""
    rows = comparison.overall
    columns: dict[str, list[str]] = {
        f"over {len(comparison.scales)} envs": [one.name for one in rows],
        "runs": [str(one.seeds) for one in rows],
        "interquartile mean": [estimate_text(one.interquartile_mean) for one in rows],
        "optimality gap": [estimate_text(one.optimality_gap) for one in rows],
        "P(> first)": [estimate_text(one.improvement) for one in rows],
    }
    return rows_from_columns(columns)


def solved_text(seed: str, value: str, level: str, *, rows: bool) -> str:
    """Return a sentence that says when a seed counts as solved.

    Args:
        seed: subject of the sentence, such as "A seed".
        value: what is compared with the return `level`, such as a column of the training tables.
        level: the return that counts as solved.
        rows: whether `value` is from the rows of training tables.
    """
    return f"{seed} counts as solved if {value} reaches {level}{' in at least one table row' if rows else ''}."


def medians_text(*, evaluations: bool, rows: bool) -> str:
    """Return a text that explains the columns of seconds and frames to solve.

    Args:
        evaluations: whether the evaluations of a seed are compared with the return that counts as solved.
        rows: whether the training rows of a seed are compared with the return that counts as solved.
    """
    between = "the seconds and global frames are interpolated linearly between two evaluations"
    first = "the seconds and global frames of the first table row at or above the return are used"
    if evaluations and rows:
        point, earliest = f"For seeds with evaluations, {between}; for other seeds, {first}", "evaluation or table row"
    else:
        point, earliest = (between, "evaluation") if evaluations else (first, "table row")
    return (
        "The seconds and global frames to solve are medians over all seeds; a seed that did not reach the return counts as later than "
        f"every seed that did. {point[0].upper()}{point[1:]}. The intervals of the medians are computed from order statistics, which need "
        "at least six seeds. ∞ means that at least half of the seeds did not reach the return. <= marks an upper limit: the first "
        f"{earliest} was already at or above the return."
    )


def explanations(summaries: Sequence[Summary], comparison: Comparison) -> list[str]:
    """Return sentences that explain the columns of the tables of a comparison."""
    lines = [f"The final return in the table is the mean over the seeds with its {INTERVAL}. {_bootstrap_sentence(comparison)}"]
    judged = {rule: [one.name for one in summaries if rule in (one.solved_by or "").split(" and ")] for rule in RULES}
    judged = {rule: names for rule, names in judged.items() if names}
    for rule, names in judged.items():
        seed = f"A seed of {' or '.join(names)}" if len(judged) > 1 else "A seed"
        lines.append(solved_text(seed, RULES[rule], "the value of --solve", rows=rule != "evaluation"))
    if any(one.solved is not None for one in summaries):
        lines.append(medians_text(evaluations="evaluation" in judged, rows=bool(judged.keys() - {"evaluation"})))
    if comparison.pairs:
        lines.append(
            "B − A is the difference of the mean final returns, with Welch's 95 % confidence interval, limited to the range of possible "
            "differences if this range is known. The interval is not adjusted for the number of comparisons. p is the two-sided p-value of "
            "Welch's t-test of this difference, and p (Holm) is p adjusted by Holm's method for all comparisons in the table. P(B > A) is "
            "the probability that a seed of B has a higher final return than a seed of A."
        )
    scales = [
        f"in {one.env}, 0 is {format_number(one.zero)} ({one.zero_is}) and 1 is {format_number(one.one)} ({one.one_is})"
        for one in comparison.scales
    ]
    return [*lines, *([f"Over all envs, returns are normalised linearly: {'; '.join(scales)}."] if scales else [])]


def _bootstrap_sentence(comparison: Comparison) -> str:
    """Return a sentence that names the columns of the tables of a comparison whose intervals are computed by the bootstrap."""
    names = [
        "the interquartile mean",
        *(["P(B > A)"] if comparison.pairs else []),
        *(["the optimality gap", "P(> first)"] if comparison.overall else []),
    ]
    if len(names) == 1:
        return "The interval of the interquartile mean is the percentile interval of the stratified bootstrap over seeds."
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"The intervals of {listed} are percentile intervals of the stratified bootstrap over seeds."


def pair_sentences(comparison: Comparison) -> list[str]:
    """Return a sentence for each pair of settings. The sentence says which setting is better, or that no difference is shown."""
    several = len({one.env for one in comparison.pairs}) > 1
    return [_comparison_sentence(one, f" in {one.env}" if several else "") for one in comparison.pairs]


def _comparison_sentence(pair: PairComparison, where: str) -> str:
    value, low, high = pair.difference
    chance = f"P(better) = {format_number(_rounded(pair.improvement.value))}"
    if low is None or high is None:
        side = "above" if value > 0 else "below"
        return f"{pair.b} is {format_number(abs(value))} {side} {pair.a}{where}, with too few seeds for an interval."
    interval = f"95 % interval {format_number(low)} to {format_number(high)}, {chance}"
    if low <= 0.0 <= high:
        return f"No difference shown between {pair.b} and {pair.a}{where}: {format_number(value)} ({interval})."
    return f"{pair.b} is {format_number(abs(value))} {'above' if value > 0 else 'below'} {pair.a}{where} ({interval})."


TERMS = {
    "final return": "The last current return of a seed: from its last evaluation if there is one, else from its most recent episodes.",
    "interquartile mean": "Mean of the middle half of the seeds (Agarwal et al. 2021): less sensitive to single seeds than the mean, and "
    "less uncertain than the median.",
    "P(B > A)": "Probability that a seed of B has a higher final return than a seed of A (Mann-Whitney U / (n m), in which ties count one "
    "half). The value 0.5 means that neither is better.",
    "p, p (Holm)": "Probability of a difference at least this large if the means are equal (Welch's t-test), and this probability, "
    "adjusted by Holm's method for all comparisons in the table.",
    "performance profile": "Fraction of the runs of all envs whose normalised return is above τ. A curve that is higher everywhere is "
    "better.",
    "optimality gap": "Mean amount by which normalised returns are below 1; lower is better.",
}
"""Term in a comparison → definition of the term. The formulas are in docs/statistics.md."""


# ---- text and files of tables

_INTERVALS = (
    "steps_to_threshold", "seconds_to_threshold", "final_return", "interquartile_mean", "score", "difference", "improvement",
    "optimality_gap", "solve_seconds", "solve_frames",
)  # fmt: skip
"""Columns of output files whose values have a 95 % interval."""
_MEDIANS = ("steps_to_threshold", "seconds_to_threshold", "solve_seconds", "solve_frames")
"""Columns of output files whose values are medians, which may be only upper limits."""


def flatten_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of results to a flat dict for a CSV or JSON file.

    A field NAME whose value is an Estimate or a Median becomes the columns NAME, NAME_low and NAME_high. For a Median, the column
    NAME_at_most says whether the median is only an upper limit. Infinite numbers become null.
    """
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if name in _INTERVALS:
            middle, low, high = (value or (None, None, None))[:3]
            cells |= {name: middle, f"{name}_low": low, f"{name}_high": high}
            cells |= {f"{name}_at_most": value is not None and value.at_most} if name in _MEDIANS else {}
        else:
            cells[name] = value
    return dict(nonfinite_to_none(cells))


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the content of a CSV file with the rows `rows`, which all have the same columns."""
    return csv_bytes(rows[0], [row.values() for row in rows])


def rows_from_columns(columns: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Convert columns to the lines of a table: the header, then the rows. Empty columns are omitted.

    Args: columns: title of each column → cells of the column.
    """
    kept = {title: cells for title, cells in columns.items() if cells}
    return [list(kept), *(list(line) for line in zip(*kept.values(), strict=True))]


def number_text(value: float | None) -> str:
    """Format a number for a table in the terminal or in the HTML page, such as "1,234", "0.25", "∞", or "-" for None."""
    if value is not None and math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if value is not None and 1e3 <= abs(value) < 1e15 else format_number(value)


def estimate_text(estimate: Estimate | None, sign: str = "") -> str:
    """Format an estimate with its interval, such as "12 [11, 13]". If `sign` is "+", positive values have a plus sign."""
    if estimate is None:
        return "-"
    value = f"{sign if estimate.value > 0 else ''}{number_text(estimate.value)}"
    return value if estimate.low is None else f"{value} [{number_text(estimate.low)}, {number_text(estimate.high)}]"


def median_text(median: Median | None) -> str:
    """Format the median of the points at which a threshold was reached, such as "<= 12" if the median is only an upper limit."""
    if median is None:
        return "-"
    return f"{'<= ' if median.at_most else ''}{estimate_text(Estimate(median.value, median.low, median.high))}"
