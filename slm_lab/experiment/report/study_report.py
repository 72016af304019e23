"""Create the tables and figures of a study from its result files alone, and write them at the end of the study."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.files.paths import StudyPaths, file_stem
from slm_lab.experiment.report import compare_report as comparison
from slm_lab.experiment.report.compare_report import FigureSpec, estimate_text, flatten_row, median_text, number_text, rows_csv
from slm_lab.experiment.report.decision import Decision, decisions, scores_by_seed
from slm_lab.experiment.report.decision import decision_explanation as decision_explanation
from slm_lab.experiment.report.figure import Figure
from slm_lab.experiment.report.metrics import INTERVAL, Estimate, Median, aggregate_known, estimate_difference
from slm_lab.experiment.report.progress import format_number
from slm_lab.experiment.report.seed_result import RULES, training_column
from slm_lab.experiment.report.setting import Setting, comparable_metric, summarize
from slm_lab.experiment.report.statistics import adjust_holm, probability_of_improvement, t_test
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.experiment.report.writer import Writer, json_bytes
from slm_lab.lib.files import display_path
from slm_lab.lib.text import format_table, wrap_paragraph
from slm_lab.spec.models.study import StudyPlan

SCORES = {
    "current_return": "the mean return of the last evaluation or, without evaluations, of the most recent training episodes",
    "total_reward": "the mean return of the last 100 training episodes (total_reward in the last table row)",
    "total_reward_ma": "the mean of total_reward over the last 100 table rows, where total_reward is the mean return of the last 100 "
    "episodes before the row",
    "return_new": "the mean return of the training episodes since the last but one table row (return_new in the last row)",
    "evaluation": "the mean return of the last evaluation",
    "training_return": "the mean return of the most recent training episodes",
}
"""Metric of a study → description of the score of a seed that is computed from this metric."""
_Y_LABELS = comparison.METRICS | {"total_reward_ma": "mean of the last 100 mean returns", "evaluation": "mean return in evaluation"}
_MORE = {
    "grad_norm": ("gradient norm", "norm of the gradient before clipping"),
    "staleness": ("staleness", "updates by other workers between pull and push"),
    "lock_wait": ("lock wait", "wait for the lock (ms)"),
    "lag_mean": ("policy lag", "age of the policy that acted (gradient steps)"),
}
"""Additional table column → (title of the figure, label of the vertical axis). A column is drawn if a study entry has values in this
column."""


class EntryResult(NamedTuple):
    """The results of a study entry in an env, which are one row of the table of the study. An unknown result is None."""

    env: str
    entry: str
    seeds: int
    failed: int
    """Number of failed runs of the entry in the env."""
    score: Estimate | None = None
    """Mean, over the seeds, of the final value of the metric."""
    median: float | None = None
    interquartile_mean: Estimate | None = None
    """Interquartile mean, over the seeds, of the final value of the metric."""
    difference: Estimate | None = None
    """Score of the entry minus score of the study's baseline entry, as a mean over the pairs of runs with the same random_seed if the study
    is paired."""
    pairs: int | None = None
    """Number of pairs of runs from which `difference` is computed, or None if the study is not paired or the entry is not compared."""
    improvement: Estimate | None = None
    """Probability that a seed of this entry scores higher than a seed of the baseline entry."""
    p_holm: float | None = None
    """Two-sided p-value of the t-test of `difference` (paired if the study is paired, else Welch's test), adjusted by Holm's method for the
    number of tests in the table."""
    solved: int | None = None
    """Number of seeds that reached the return that counts as solved (`solve`)."""
    solve_seconds: Median | None = None
    """Median number of seconds until a seed reached the return `solve`. The median is infinite if at least half of the seeds did not reach
    `solve`."""
    solve_frames: Median | None = None
    """Median number of global frames until a seed reached the return `solve`, or infinite if at least half of the seeds did not reach
    `solve`."""
    published: float | None = None
    """Published score of the entry in the env."""
    verdict: str = ""
    """Comparison of the score with the published score: "≥", "≈" or "below" (see compare_with_published), or "" if there is no published
    score."""
    updates_per_second: float | None = None
    grad_norm: float | None = None
    grad_norm_variance: float | None = None
    """Variance of the gradient norm over the table rows of a seed, averaged over the seeds."""
    return_variance: float | None = None
    """Variance, between the seeds, of the final value of the metric."""
    staleness: float | None = None
    lock_wait: float | None = None
    lag: float | None = None
    """Mean age of the policy that collected the data, in gradient steps."""


def write_report(
    study: StudyPlan,
    paths: StudyPaths,
    results: Sequence[ResultRun],
    failed: Sequence[tuple[str, str]] = (),
    *,
    decide: bool = False,
) -> list[str]:
    """Write the tables and figures of a study, and return lines for the terminal: the table, explanations and the path of the table file.

    If a file cannot be written, a notice is printed.

    Args:
        results: result of each run that has ended.
        failed: (study entry, env) of each run that failed.
        decide: whether to report for which entries the difference from the reference entry is decided (see report/decision.py).
    """
    settings = study_settings(study, results)
    if not settings and not failed:
        return ["no run has ended yet: there is nothing to compare"]
    study, reason = with_usable_metric(study, settings)
    rows = study_rows(study, settings, failed)
    writer = Writer(paths.root)
    markdown = markdown_table(study, rows, reason)
    figures = study_figures(study, settings)
    paths.graph("x", "png").parent.mkdir(exist_ok=True)
    with writer.suppress_drawing_errors():
        writer.draw(figures, paths.graph)
    plain = [flatten_row(row._asdict()) for row in rows]
    decided = decisions(study, settings) if decide else []
    about = {"study": study.name, "metric": study.metric, "metric_reason": reason or None}
    content = {**about, "rows": plain, "decisions": [_decision_row(one) for one in decided]}
    writer.write("table not written", (paths.table("md"), markdown.encode))
    writer.write("table not written", (paths.table("json"), partial(json_bytes, content)))
    writer.write("table not written", (paths.table("csv"), partial(rows_csv, plain)))
    writer.close()
    table = paths.table("md")
    return [*text_lines(study, rows, decided, reason), *([str(display_path(table))] if table.is_file() else [])]


def with_usable_metric(study: StudyPlan, settings: Mapping[tuple[str, str], Setting]) -> tuple[StudyPlan, str]:
    """Return a copy of the study whose metric is the one that `comparable_metric` chooses, and the reason for the change.

    The reason is "" if the metric has not changed.

    Args: settings: dict (env, study entry) → Setting with the ended runs of the entry in the env.
    """
    metric, reason = comparable_metric(study.metric, settings.values())
    return replace(study, spec=study.spec.model_copy(update={"metric": metric})), f"{reason}." if reason else ""


def _decision_row(one: Decision) -> dict[str, Any]:
    row = {"env": one.env, "entry": one.entry, "reference": one.reference, "seeds": one.pairs, "decided_after": one.after}
    return row | flatten_row({"difference": one.difference}) | {"bounded": one.bounded}


def decision_lines(study: StudyPlan, decided: Sequence[Decision]) -> list[str]:
    """Return a sentence for each Decision, and a text that explains the intervals of the decisions. Return [] if there are no decisions."""
    lines = [one.text(f" in {one.env}" if len(study.envs) > 1 else "") for one in decided]
    return [*lines, decision_explanation(decided)] if lines else []


def study_settings(study: StudyPlan, results: Sequence[ResultRun]) -> dict[tuple[str, str], Setting]:
    """Return a dict in the order of the study: (env, entry) → Setting with the ended runs of the entry in the env."""
    runs_of: dict[tuple[str, str], list[ResultRun]] = {}
    for env in study.envs:
        for entry in study.entries:
            runs = [one for one in results if (one.content["env"], one.content["entry"]) == (env, entry)]
            if runs:
                runs_of[env, entry] = sorted(runs, key=lambda one: one.random_seed)
    return {key: Setting(key[1], list(runs)) for key, runs in runs_of.items()}


def study_rows(study: StudyPlan, settings: Mapping[tuple[str, str], Setting], failed: Sequence[tuple[str, str]] = ()) -> list[EntryResult]:
    """Return the results of each study entry in each env.

    Args:
        settings: dict (env, study entry) → Setting with the ended runs of the entry in the env.
        failed: (study entry, env) of each run that failed.
    """
    rows = []
    for env in study.envs:
        base = settings.get((env, study.spec.baseline or ""))
        for entry in study.entries:
            setting = settings.get((env, entry))
            count = sum(one == (entry, env) for one in failed)
            if setting is not None:
                rows.append(_row(study, env, setting, base, count))
            elif count:
                rows.append(EntryResult(env, entry, 0, count, published=study.published_score(entry, env)))
    adjusted = adjust_holm([row.p_holm for row in rows])
    return [row._replace(p_holm=p) for row, p in zip(rows, adjusted, strict=True)]


def _row(study: StudyPlan, env: str, setting: Setting, base: Setting | None, failed: int) -> EntryResult:
    metric, published, seeds = study.metric, study.published_score(setting.name, env), setting.all_seeds
    numbers = summarize(setting, study.solve_score(env), metric, seeds, metric)
    paired, scores = study.spec.paired, _scores(setting, metric)
    compared = _compared_scores(setting, base, metric, paired=paired)
    bounds = setting.bounds if base is not None and base.bounds == setting.bounds else None
    norms = [curve for seed in seeds if len(curve := seed.curve("grad_norm", "frame").value)]
    return EntryResult(
        env=env,
        entry=setting.name,
        seeds=numbers.seeds,
        failed=failed,
        score=numbers.final_return,
        median=numbers.final_return_median,
        interquartile_mean=numbers.interquartile_mean,
        difference=estimate_difference(*compared, paired=paired, bounds=bounds),
        pairs=len(compared[0]) if paired and base is not None and base is not setting else None,
        improvement=_improvement(*_compared_scores(setting, base, metric)),
        p_holm=t_test(*compared, paired=paired),
        solved=numbers.solved,
        solve_seconds=numbers.seconds_to_threshold,
        solve_frames=numbers.steps_to_threshold,
        published=published,
        verdict=compare_with_published(numbers.final_return, published),
        updates_per_second=numbers.opt_steps_per_second,
        grad_norm=numbers.grad_norm,
        grad_norm_variance=aggregate_known(float(norm.var()) for norm in norms),
        return_variance=float(np.var(scores, ddof=1)) if len(scores) > 1 else None,
        staleness=_column_mean(setting, "staleness"),
        lock_wait=_column_mean(setting, "lock_wait"),
        lag=_column_mean(setting, "lag_mean"),
    )


def _scores(setting: Setting, metric: str) -> list[float]:
    return [value for seed in setting.all_seeds if (value := seed.final_return(metric)) is not None]


def _compared_scores(setting: Setting, base: Setting | None, metric: str, *, paired: bool = False) -> tuple[list[float], list[float]]:
    """Return the scores of `setting` and the scores of `base`, or two empty lists if `base` is None or is `setting` itself.

    With paired=True, the lists contain one score for each random_seed that both settings have, in the same order.
    """
    if base is None or base is setting:
        return [], []
    if not paired:
        return _scores(setting, metric), _scores(base, metric)
    own, theirs = (scores_by_seed(one, metric) for one in (setting, base))
    common = sorted(own.keys() & theirs.keys())
    return [own[seed] for seed in common], [theirs[seed] for seed in common]


def _improvement(scores: Sequence[float], others: Sequence[float]) -> Estimate | None:
    return probability_of_improvement([np.array(scores)], [np.array(others)]) if scores and others else None


def _column_mean(setting: Setting, column: str) -> float | None:
    curves = [seed.curve(column, "frame").value for seed in setting.all_seeds]
    return aggregate_known(float(values.mean()) for values in curves if len(values))


def compare_with_published(score: Estimate | None, published: float | None) -> str:
    """Compare a score with a published score, and return "≥", "≈" or "below", or "" if a score is unknown.

    "≥" means that the score is at least the published score. "≈" means that the score is below the published score, but the interval of the
    score contains the published score. "below" means that the whole interval of the score is below the published score, or that the score
    is below the published score and has no interval.
    """
    if score is None or published is None:
        return ""
    if score.value >= published:
        return "≥"
    return "≈" if score.high is not None and score.high >= published else "below"


# ---- figures


def study_figures(study: StudyPlan, settings: Mapping[tuple[str, str], Setting]) -> dict[str, Figure]:
    """Return a dict of the figures of a study: name → figure. For each env, the dict has figures of the metric over each axis of the study.

    For each env, the dict also has figures of the variance between seeds and of additional table columns, such as the gradient norm.
    """
    figures: dict[str, Figure] = {}
    for env in study.envs:
        of_env = [setting for (key_env, _), setting in settings.items() if key_env == env]
        suffix = f"_{file_stem(env)}" if len(study.envs) > 1 else ""
        for x in study.spec.x:
            for name, figure in _figures(study, env, of_env, x).items():
                figures[f"{name}{suffix}"] = figure
    return figures


def _figures(study: StudyPlan, env: str, settings: Sequence[Setting], x: str) -> dict[str, Figure]:
    metric, solve = study.metric, study.solve_score(env)
    drawn = [FigureSpec("returns", f"return, {comparison.BAND}", _Y_LABELS[metric], metric, *_reference_line_level(study, env, settings))]
    if x == study.spec.x[0]:
        drawn.append(FigureSpec("variance", *comparison.VARIANCE, metric, spread=True))
    if metric == "evaluation":
        drawn.append(FigureSpec("new_returns", f"return in training, {comparison.BAND}", _Y_LABELS["return_new"], "return_new", solve))
    if x == study.spec.x[0]:
        drawn += [FigureSpec(name, f"{title}, {comparison.BAND}", label, name) for name, (title, label) in _MORE.items()]
    colours = dict(zip(study.entries, cycle(comparison.COLOURS)))
    found = comparison.setting_figures(env, settings, x, [colours[one.name] for one in settings], drawn)
    axis = comparison.shared_axis(settings, x).name
    return {f"{name}_vs_{axis}": figure for name, figure in found.items() if figure.first_panel.lines}


def _reference_line_level(study: StudyPlan, env: str, settings: Sequence[Setting]) -> tuple[float | None, str]:
    """Return the level of the horizontal reference line in the figure of an env, and the name of this line.

    The level is the return that counts as solved (the key `solve` of the study). Without the key `solve`, the level is the published score
    if all entries have the same published score, else None (no line).
    """
    if (solve := study.solve_score(env)) is not None:
        return solve, "solved"
    scores = {study.published_score(one.name, env) for one in settings} - {None}
    return (scores.pop(), "published") if len(scores) == 1 else (None, "")


# ---- tables


def study_table(study: StudyPlan, rows: Sequence[EntryResult]) -> list[list[str]]:
    """Return the table of a study as lists of cells: the header, and a row for each entry and env.

    Columns without any value are omitted.
    """
    columns: dict[str, list[str]] = {
        "env": [row.env for row in rows] if len(study.envs) > 1 else [],
        "entry": [row.entry for row in rows],
        "seeds": [f"{row.seeds}{f' ({row.failed} failed)' if row.failed else ''}" for row in rows],
    }
    if any(row.solved is not None for row in rows):
        columns["solved"] = ["-" if row.solved is None else f"{row.solved} of {row.seeds}" for row in rows]
        columns["seconds to solve"] = [median_text(row.solve_seconds) for row in rows]
        columns["global frames to solve"] = [median_text(row.solve_frames) for row in rows]
    columns["score"] = [estimate_text(row.score) for row in rows]
    columns["median"] = [format_number(row.median) for row in rows]
    columns["interquartile mean"] = [estimate_text(row.interquartile_mean) for row in rows]
    if any(row.difference or row.improvement for row in rows):
        if study.spec.paired:
            columns["pairs"] = ["-" if row.pairs is None else str(row.pairs) for row in rows]
        cells = ["baseline" if row.entry == study.spec.baseline else estimate_text(row.difference, "+") for row in rows]
        columns[f"difference to {study.spec.baseline}"] = cells
        columns["P(higher)"] = [estimate_text(row.improvement) for row in rows]
        columns["p (Holm)"] = [_p_text(row.p_holm) for row in rows]
    if any(row.published is not None for row in rows):
        columns["published"] = ["" if row.published is None else f"{format_number(row.published)} {row.verdict}".strip() for row in rows]
    for title, values in {
        "updates/s": [row.updates_per_second for row in rows],
        "gradient norm": [row.grad_norm for row in rows],
        "gradient norm variance": [row.grad_norm_variance for row in rows],
        "staleness": [row.staleness for row in rows],
        "lock wait (ms)": [row.lock_wait for row in rows],
        "policy lag (steps)": [row.lag for row in rows],
    }.items():
        if any(value is not None for value in values):
            columns[title] = [number_text(value) for value in values]
    return comparison.rows_from_columns(columns)


def _p_text(p: float | None) -> str:
    return format_number(p and float(f"{p:.2g}"))


def markdown_table(study: StudyPlan, rows: Sequence[EntryResult], reason: str = "", *, general: bool = True) -> str:
    """Return the table of a study as Markdown, followed by a list that explains the columns of the table.

    Args:
        reason: why the table has a different metric than the study, or "" if the table has the metric of the study.
        general: see `explanations`.
    """
    head, *lines = study_table(study, rows)
    table = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines]]
    texts = [*([reason] if reason else []), *explanations(study, head, general=general)]
    return "\n".join([*table, "", bullets(texts)]) + "\n"


def bullets(texts: Iterable[str]) -> str:
    """Return a bullet list as Markdown."""
    return "\n".join(f"- {text}" for text in texts)


def text_lines(study: StudyPlan, rows: Sequence[EntryResult], decided: Sequence[Decision] = (), reason: str = "") -> list[str]:
    """Return the lines for the terminal: the table of a study, explanations of its columns, and decisions.

    Args: reason: why the table has a different metric than the study, or "" if the table has the metric of the study.
    """
    lines = study_table(study, rows)
    texts = [*([reason] if reason else []), *explanations(study, lines[0]), *decision_lines(study, decided)]
    table = format_table(lines, key_columns=2 if len(study.envs) > 1 else 1)
    return [*table, *(line for text in texts for line in wrap_paragraph(text, indent="").splitlines())]


def explanations(study: StudyPlan, columns: Collection[str], *, general: bool = True) -> list[str]:
    """Return a text for each column, or group of columns, of the table of a study that needs an explanation.

    Args:
        columns: titles of the columns of the table (see `study_table`). Texts about other columns are omitted.
        general: whether the texts also contain the `general_explanations`, which are equal for many studies.
    """
    shown = {"difference" if column == f"difference to {study.spec.baseline}" else column for column in columns}
    own = {"score": f"The score of a seed is {SCORES[study.metric]}.", "solved": _solved_text(study)}
    common = general_explanations([study], shown)
    if not general:
        return [text for column, text in own.items() if column in shown]
    return [f"{own[column]} {text}" if column in own else text for column, text in common.items()]


def general_explanations(studies: Sequence[StudyPlan], columns: Collection[str]) -> dict[str, str]:
    """Return a dict: title of a column, or "difference" → text that explains the column without naming the metric or a return of a study.

    Args:
        studies: the studies whose tables have the columns.
        columns: titles of the columns (see `study_table`), with "difference" for the difference to the baseline. Texts about other columns
            are omitted.
    """
    solved = [one for one in studies if any(one.solve_score(env) is not None for env in one.envs)]
    texts = {
        "score": f'The column "score" has the mean of the scores over the seeds and its {INTERVAL}.',
        "interquartile mean": "The interquartile mean is the mean of the middle half of the scores. Its 95 % confidence interval is the "
        "percentile interval of the bootstrap over seeds.",
        "difference": " ".join(dict.fromkeys(_difference_definition(paired=one.spec.paired) for one in studies)),
        "solved": comparison.medians_text(
            evaluations=any(one.metric in ("evaluation", "current_return") for one in solved),
            rows=any(one.metric != "evaluation" for one in solved),
        ),
        "published": 'Beside a published score, "≥" means that the score in the table is at least the published score, "≈" that it is '
        'lower, but its interval contains the published score, and "below" that it is lower and its interval, if there is one, does not '
        "contain the published score.",
        "gradient norm variance": "The gradient norm is averaged over the table rows of each seed, and then over the seeds. The gradient "
        "norm variance is the variance over the table rows of a seed, averaged over the seeds.",
    }
    return {column: text for column, text in texts.items() if column in columns}


def _difference_definition(*, paired: bool) -> str:
    """Return a text that explains the columns in which entries are compared with the baseline."""
    if paired:
        what = "mean difference between the score of the entry and the score of the baseline with the same random_seed"
        test, pairs = "the paired t-test", ", which need not have the same random_seed"
        used = (
            ' Only random_seeds for which both have a result are used; the column "pairs" shows the number of these pairs. The score of '
            "a run is the mean over its Sessions."
        )
    else:
        what = "mean score of the entry minus the mean score of the baseline"
        test, pairs, used = "Welch's t-test", "", ""
    return (
        f"The difference is the {what}.{used} Its 95 % confidence interval is that of {test}. If the range of possible differences is "
        "known, the interval is limited to this range. The interval is not adjusted for the number of comparisons. p (Holm) is the "
        "two-sided p-value of the same test, adjusted by Holm's method for all comparisons with the baseline in the table. P(higher) is "
        f"the probability that a seed of the entry has a higher score than a seed of the baseline{pairs}; its interval is the percentile "
        "interval of the bootstrap over seeds."
    )


def _solved_text(study: StudyPlan) -> str:
    level, metric = _levels(study), study.metric
    if metric == "current_return":
        return (
            f"A seed counts as solved if current_return reaches {level} in at least one table row or, in a run with meta.rigorous_eval, if "
            "the mean return of at least one evaluation reaches this return."
        )
    value = RULES[metric] if metric in ("evaluation", "return_new") else f"the column {training_column(metric)}"
    return comparison.solved_text("A seed", value, level, rows=metric != "evaluation")


def _levels(study: StudyPlan) -> str:
    levels = {env: study.solve_score(env) for env in study.envs}
    known = {level for level in levels.values() if level is not None}
    return (
        format_number(known.pop())
        if len(known) == 1
        else ", ".join(f"{format_number(level)} ({env})" for env, level in levels.items() if level is not None)
    )


def result_sentences(study: StudyPlan, rows: Sequence[EntryResult]) -> list[str]:
    """Return sentences about the results of a study.

    The first returned sentences describe the differences between each entry and the baseline entry. The next sentences say when each entry
    reached the return that counts as solved (`solve`).
    """
    return [*_differences(study, rows), *_solved_sentences(study, rows)]


def _env_suffix(study: StudyPlan, row: EntryResult) -> str:
    return f" in {row.env}" if len(study.envs) > 1 else ""


def _differences(study: StudyPlan, rows: Sequence[EntryResult]) -> Iterator[str]:
    base = study.spec.baseline
    for row in rows:
        if row.difference is None or row.difference.low is None or row.difference.high is None:
            continue
        value, low, high = row.difference
        p = "" if row.p_holm is None else f", p (Holm) {_p_text(row.p_holm)}"
        seeds = f"{row.seeds} seeds" if row.pairs is None else f"{row.pairs} pairs of runs"
        interval = f"95 % interval of the difference {format_number(low)} to {format_number(high)}{p}"
        if row.difference.low <= 0.0 <= row.difference.high:
            yield f"No difference shown between {row.entry} and {base} with {seeds}{_env_suffix(study, row)} ({interval})."
        else:
            way = "above" if value > 0.0 else "below"
            yield f"{row.entry} scored {format_number(abs(value))} {way} {base}{_env_suffix(study, row)} ({interval})."


def _solved_sentences(study: StudyPlan, rows: Sequence[EntryResult]) -> Iterator[str]:
    for row in rows:
        if row.solved is None or row.solve_frames is None:
            continue
        level, frames, seconds = format_number(study.solve_score(row.env)), row.solve_frames.value, row.solve_seconds
        at_most = "at most " if row.solve_frames.at_most else ""
        after = "" if seconds is None else f" and {'at most ' if seconds.at_most else ''}{number_text(seconds.value)} s"
        median = f"the median is {at_most}{frames:,.0f} global frames{after}"
        when = "at least half of the seeds never did" if math.isinf(frames) else median
        yield f"{row.entry} reached {level} in {row.solved} of {row.seeds} seeds{_env_suffix(study, row)}; {when}."


def definitions(study: StudyPlan) -> dict[str, str]:
    """Return a dict with definitions of the terms in the HTML report of a study: term → definition."""
    terms = {
        "seed": "One independent training: a Session, or all Sessions of a distributed run, which train one net.",
        "score": f"The score of a seed is {SCORES[study.metric]}.",
        "seconds to solve": "Seconds from the start of training until the seed counts as solved. With wall_t in x, the runs train one at a "
        "time; otherwise, concurrent runs slow each other down.",
        "global frames": "Frames of all workers and envs together.",
        "updates/s": "Optimizer steps per second, of all workers together.",
        "staleness": "Updates by other workers between the moment a worker reads the weights and the moment it applies its gradient.",
    }
    return terms | {name: text for name, text in comparison.TERMS.items() if name in ("interquartile mean",)}


def origins(results: Sequence[ResultRun]) -> list[str]:
    """Return a text for each combination of processor, software versions and git commit, with the number of runs of this combination."""
    described = (
        f"{one.content.get('processor') or 'unknown processor'}; "
        f"{', '.join(f'{name} {version}' for name, version in one.content.get('versions', {}).items()) or 'unknown versions'}; "
        f"git {one.content.get('git') or 'unknown'}"
        for one in results
    )
    return [f"{text} ({count} run{'s' if count > 1 else ''})" for text, count in Counter(described).items()]


def study_commands(study: StudyPlan, paths: StudyPaths) -> dict[str, str]:
    """Return a dict: label → shell command that repeats or continues a study, compares the runs of the study, or plays its best policy."""
    sets = "".join(f" -s {shlex.quote(one)}" for one in study.sets)
    file, folder = shlex.quote(study.source), shlex.quote(str(display_path(paths.root)))
    env = f" --env {shlex.quote(study.envs[0])}" if len(study.envs) > 1 else ""
    return {
        "repeat": f"slm-lab {file} {shlex.quote(study.name)} study{sets}",
        "continue": f"slm-lab {file} {shlex.quote(study.name)} study@{folder}",
        "compare": f"slm-lab compare {folder}",
        "play the best": f"slm-lab enjoy@{folder}{env}",
    }
