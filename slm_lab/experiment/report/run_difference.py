"""Compare two runs: their spec keys, their software versions and machines, the first table rows that differ, and their returns."""

from __future__ import annotations

import csv
import json
import math
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.files.named_model import ModelPaths
from slm_lab.experiment.report.compare import differing_keys
from slm_lab.experiment.report.compare_report import estimate_text, number_text
from slm_lab.experiment.report.metrics import Estimate, estimate_difference, estimate_mean
from slm_lab.experiment.report.nondeterminism import inexact_continuations
from slm_lab.experiment.report.return_range import return_range
from slm_lab.experiment.report.row_difference import RowComparison, compare_rows
from slm_lab.experiment.report.run import Run, read_columns
from slm_lab.experiment.report.seed_result import seed_results
from slm_lab.experiment.report.setting import Setting, comparable_metric
from slm_lab.experiment.report.student_t import student_t_quantile
from slm_lab.lib.files import display_path
from slm_lab.lib.text import format_table
from slm_lab.spec.report import diff, flatten_leaves

_RECORDS = ("spec_version", "git", "versions", "host", "cpu", "backend", "eval_backend", "matmul", "threads", "start_method")
"""Entries of meta.run that record the software and the machine with which a run was trained."""
_POWER = 0.8416
"""80 % quantile of the standard normal distribution, for a statistical power of 80 % (the probability that a true difference is shown)."""
_NORMAL_QUANTILE = 1.9599
"""97.5 % quantile of the standard normal distribution, which is a lower bound of the quantiles of Student's t distributions."""
_MOST_SEEDS = 1000
_WIDTH = 80


class KeyDifference(NamedTuple):
    """A key, and the values of this key in run `a` and in run `b`. The value is None in a run that does not have the key."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class TableDifference:
    """Comparison of the table of a Session (or of a policy of a Session) in run `a` with the table of the same Session in run `b`."""

    session: int
    policy: int
    mode: str
    """Mode of the compared tables: "train" or "eval"."""
    rows: RowComparison


@dataclass(frozen=True)
class ReturnComparison:
    """The final returns of two runs `a` and `b`, and the difference of these returns."""

    metric: str
    reason: str
    """Reason why `metric` is not current_return, or "" if `metric` is current_return."""
    a: dict[int, float]
    """Index of each Session → final return in run `a`. If the Sessions of run `a` train one shared net, the dict has a single entry."""
    b: dict[int, float]
    paired: bool
    """Whether both runs have the same seeds, so that the difference of the returns is computed seed by seed."""
    difference: Estimate | None
    needed: int | None
    """Number of seeds that would show a difference of this size in 80 % of all cases, or None if the number is unknown or above 1,000."""

    @property
    def difference_shown(self) -> bool | None:
        """Whether the interval of the difference excludes 0, or None if the difference has no interval."""
        interval = self.difference
        return None if interval is None or interval.low is None or interval.high is None else interval.low > 0 or interval.high < 0


@dataclass(frozen=True)
class RunDifference:
    """The differences between two runs."""

    a: Run
    b: Run
    keys: list[KeyDifference]
    implied: int
    """Number of keys that only one run has because the runs use different components, such as different algorithms. These keys are not in
    the list `keys`."""
    records: list[KeyDifference]
    tables: list[TableDifference]
    only: tuple[list[int], list[int]]
    """Indices of the tables that only run `a` has, and indices of the tables that only run `b` has."""
    returns: ReturnComparison | None
    """Comparison of the final returns, or None if the envs of the runs differ or a run has no return."""

    @property
    def first_table_difference(self) -> TableDifference | None:
        """The comparison of the tables whose first differing row has the lowest frame, or None if no row differs."""
        found = [one for one in self.tables if one.rows.first is not None]
        return min(found, key=lambda one: one.rows.first.frame if one.rows.first is not None else 0, default=None)

    @property
    def rows_equal(self) -> bool:
        """Whether both runs have the same tables with the same rows."""
        return bool(self.tables) and not any(self.only) and all(one.rows.rows_equal for one in self.tables)


def run_difference(a: Run, b: Run) -> RunDifference:
    """Compare runs `a` and `b`. Raises UserError if a saved spec cannot be read."""
    keys, other = a.flat_spec(), b.flat_spec()
    differ, pairs = differing_keys([keys, other]), diff(keys, other)
    sessions, sessions_b = (set(run.tables("train")) for run in (a, b))
    return RunDifference(
        a,
        b,
        [KeyDifference(key, *pairs[key]) for key in differ],
        len(pairs) - len(differ),
        [KeyDifference(key, *pair) for key, pair in diff(_recorded_origin(a), _recorded_origin(b)).items()],
        list(_table_differences(a, b)),
        (sorted(sessions - sessions_b), sorted(sessions_b - sessions)),
        _compare_returns(a, b) if a.env == b.env else None,
    )


def _recorded_origin(run: Run) -> dict[str, Any]:
    start = run.starts[-1]
    return dict(flatten_leaves({key: start[key] for key in _RECORDS if start.get(key) is not None}))


def _table_differences(a: Run, b: Run) -> Iterator[TableDifference]:
    """Yield the comparison of each training or evaluation table that both runs have."""
    for index in sorted(set(a.tables("train")) & set(b.tables("train"))):
        for mode in ("train", "eval"):
            files = [run.paths.session_df(index, mode, run.trial) for run in (a, b)]
            if all(file.is_file() for file in files):
                columns_a, columns_b = map(_columns, files)
                yield TableDifference(index // a.policies, index % a.policies, mode, compare_rows(columns_a, columns_b))


def _columns(file: Path) -> dict[str, list[str]]:
    """Return the columns of the table in a CSV file, or {} if the file is damaged, since `Run.tables` has already reported the damage."""
    try:
        return read_columns(file)
    except (OSError, csv.Error):
        return {}


def _compare_returns(a: Run, b: Run) -> ReturnComparison | None:
    metric, reason = comparable_metric("current_return", [Setting("A", [a]), Setting("B", [b])])
    returns_a, returns_b = _final_returns(a, metric), _final_returns(b, metric)
    if not returns_a or not returns_b:
        return None
    seeds = [run.spec.get("meta", {}).get("random_seed") for run in (a, b)]
    same_seeds = seeds[0] == seeds[1] and a.trial == b.trial and returns_a.keys() == returns_b.keys()
    paired = same_seeds and not (a.shares_one_net or b.shares_one_net)
    values, others = ([returns[s] for s in sorted(returns)] for returns in (returns_a, returns_b))
    bounds = return_range(a.settings())
    difference = estimate_difference(values, others, paired=paired, bounds=bounds if bounds == return_range(b.settings()) else None)
    return ReturnComparison(metric, reason, returns_a, returns_b, paired, difference, needed_seeds(values, others, paired=paired))


def _final_returns(run: Run, metric: str) -> dict[int, float]:
    """Return a dict: index of each Session that has a final return → final return.

    If the Sessions of the run train one shared net, the dict has a single entry.
    """
    with_rows = [index // run.policies for index, table in run.tables("train").items() if len(table["frame"])]
    sessions = [0] if run.shares_one_net else list(dict.fromkeys(with_rows))
    returns = zip(sessions, (seed.final_return(metric) for seed in seed_results(run)), strict=True)
    return {session: value for session, value in returns if value is not None}


def needed_seeds(values: Sequence[float], others: Sequence[float], *, paired: bool) -> int | None:
    """Return the number of seeds with which the 95 % interval of the difference of two mean returns excludes 0 in about 80 % of all cases.

    The number is the smallest n with |difference| ≥ (t₀.₉₇₅ + z₀.₈) · s / √n. With paired seeds, s is the standard deviation of the paired
    differences. Without paired seeds, s is the square root of the sum of the variances of `values` and `others`, and n is the number of
    seeds of each run. Returns None if n is above 1,000, if a run has a single seed, or if the difference is 0.

    Args: values, others: final returns of the seeds of the two runs.
    """
    if min(len(values), len(others)) < 2:
        return None
    gap = abs(float(np.mean(values)) - float(np.mean(others)))
    if paired:
        spread = float(np.std(np.subtract(values, others), ddof=1))
    else:
        spread = math.sqrt(float(np.var(values, ddof=1)) + float(np.var(others, ddof=1)))
    for n in range(2, _MOST_SEEDS + 1) if gap else ():
        freedom = n - 1 if paired else 2 * n - 2
        if gap * math.sqrt(n) < (_NORMAL_QUANTILE + _POWER) * spread:
            continue  # the quantile of Student's t distribution is larger, and takes longer to compute
        if gap * math.sqrt(n) >= (student_t_quantile(freedom) + _POWER) * spread:
            return n
    return None


# ---- output


def difference_json(difference: RunDifference) -> dict[str, Any]:
    """Return the comparison of two runs as a dict for a JSON document."""
    return {
        "a": str(difference.a.paths.root),
        "b": str(difference.b.paths.root),
        "keys": [pair._asdict() for pair in difference.keys],
        "implied": difference.implied,
        "records": [pair._asdict() for pair in difference.records],
        "inexact_continuations": {
            name: [{"frame": frame, "reason": reason} for frame, reason in inexact_continuations(run.starts)]
            for name, run in (("a", difference.a), ("b", difference.b))
        },
        "rows_equal": difference.rows_equal,
        "tables": [_table_json(one) for one in difference.tables],
        "only": {"a": difference.only[0], "b": difference.only[1]},
        "returns": None if difference.returns is None else _returns_json(difference.returns),
    }


def _table_json(table: TableDifference) -> dict[str, Any]:
    rows = table.rows
    return {
        "session": table.session,
        "policy": table.policy,
        "mode": table.mode,
        "rows": rows.rows,
        "equal": rows.equal,
        "first": None if rows.first is None else rows.first._asdict(),
        "columns": list(rows.columns),
        "only_a": len(rows.only[0]),
        "only_b": len(rows.only[1]),
    }


def _returns_json(returns: ReturnComparison) -> dict[str, Any]:
    difference = returns.difference
    return {
        "metric": returns.metric,
        "metric_reason": returns.reason or None,
        "a": {str(session): value for session, value in returns.a.items()},
        "b": {str(session): value for session, value in returns.b.items()},
        "paired": returns.paired,
        "difference": None if difference is None else difference._asdict(),
        "shown": returns.difference_shown,
        "seeds_needed": returns.needed,
    }


def difference_text(difference: RunDifference) -> str:
    """Return the comparison of two runs as text for the terminal.

    The lines of the text have at most 80 characters, except lines that contain the path of a folder.
    """
    width = max(60, min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH))
    parts = [[f"{name}  {display_path(run.paths.root)}" for name, run in (("A", difference.a), ("B", difference.b))]]
    parts.append(_pair_lines("key", difference.keys, width) or ["no key differs"])
    if difference.implied:
        more = f"and {difference.implied} more key{'s' * (difference.implied > 1)}"
        parts[-1] += textwrap.wrap(f"{more}, which only one run has because a component has another name", width)
    for name, run in (("A", difference.a), ("B", difference.b)):
        for frame, reason in inexact_continuations(run.starts):
            text = f"{name} was continued at frame {frame:,}, but not exactly: {reason}"
            parts[-1] += textwrap.wrap(text, width, subsequent_indent="  ")
    unknown = [name for name, run in (("A", difference.a), ("B", difference.b)) if not _recorded_origin(run)]
    same = f"versions and machine of {' and '.join(unknown)} are not recorded" if unknown else "same versions and machine"
    parts.append(([] if unknown else _pair_lines("made with", difference.records, width)) or [same])
    parts.append([line for text in _row_texts(difference) for line in textwrap.wrap(text, width, subsequent_indent="  ")])
    parts.append([line for text in _return_texts(difference) for line in textwrap.wrap(text, width, subsequent_indent="  ")])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _pair_lines(title: str, pairs: Sequence[KeyDifference], width: int) -> list[str]:
    """Return the lines of a text table that shows each key with its values in both runs. Long keys and values are shortened."""
    if not pairs:
        return []
    keys = [pair.key for pair in pairs]
    room = (width - 4 - max(map(len, [title, *keys]))) // 2
    size = max(room, 14)
    longest = width - 4 - 2 * size
    cells = [[_shorten(pair.key, longest, keep_end=True), *(_value_text(pair.key, value, size) for value in pair[1:])] for pair in pairs]
    return format_table([[title, "A", "B"], *cells])


def _value_text(key: str, value: Any, size: int) -> str:
    text = "absent" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if key == "git" and value is not None:  # a commit hash, with a final "+" if files have changed since the commit
        text = f"{text[:8]}{'+' * text.endswith('+')}"
    return _shorten(text, size)


def _shorten(text: str, size: int, *, keep_end: bool = False) -> str:
    """Shorten a text to at most `size` characters. If `keep_end` is True, the end of the text is kept, else the beginning."""
    if len(text) <= size:
        return text
    return f"…{text[1 - size :]}" if keep_end else f"{text[: size - 1]}…"


def _row_texts(difference: RunDifference) -> list[str]:
    if models := [name for name, run in zip("AB", (difference.a, difference.b), strict=True) if isinstance(run.paths, ModelPaths)]:
        return [f"rows and returns are not compared: {' and '.join(models)} {'is a model' if len(models) == 1 else 'are models'}"]
    if not difference.tables:
        return ["rows: the runs have no table in common"]
    if difference.rows_equal:
        count = sum(one.rows.rows for one in difference.tables)
        return [f"rows are equal: {count:,} rows in {len(difference.tables)} table{'s' * (len(difference.tables) > 1)}, times aside"]
    texts = ["rows (times aside):"]
    texts += [f"{_table_name(one, difference.a.policy_names)}: {_table_text(one.rows)}" for one in difference.tables]
    for name, sessions in zip("AB", difference.only, strict=True):
        if sessions:
            texts.append(f"only in {name}: session{'s' * (len(sessions) > 1)} {', '.join(map(str, sessions))}")
    return texts


def _table_name(table: TableDifference, policies: Sequence[str]) -> str:
    policy = f" policy {policies[table.policy]}" if len(policies) > 1 else ""
    return f"session {table.session}{policy}{' evaluation' if table.mode == 'eval' else ''}"


def _table_text(rows: RowComparison) -> str:
    if (cell := rows.first) is not None:
        more = f" and {len(rows.columns) - 1} more columns" if len(rows.columns) > 1 else ""
        first = f"first difference at frame {cell.frame:,} (row {cell.row}): {cell.column}{more}; {cell.column} is"
        return f"{first} {cell.a or 'empty'} in A, {cell.b or 'empty'} in B"
    extra = [f"{len(only):,} more row{'s' * (len(only) > 1)} in {name}" for name, only in zip("AB", rows.only, strict=True) if only]
    if not rows.rows:
        return f"no rows with the same frame; {', '.join(extra)}" if extra else "no rows"
    return "; ".join([f"{rows.rows:,} rows are equal", *extra])


def _return_texts(difference: RunDifference) -> list[str]:
    returns = difference.returns
    if difference.a.env != difference.b.env:
        return [f"returns are not compared: the envs are {difference.a.env} and {difference.b.env}"]
    if any(isinstance(run.paths, ModelPaths) for run in (difference.a, difference.b)):
        return []
    if returns is None:
        return ["returns are not compared: a run has none yet"]
    lines = [f"{returns.metric} at the end (95 % interval over seeds):"]
    for name, run, values in (("A", difference.a, returns.a), ("B", difference.b, returns.b)):
        status = "" if run.status == "done" else f"; {run.status}"
        seeds = ", ".join(number_text(value) for value in values.values())
        lines.append(f"{name}  {estimate_text(estimate_mean(list(values.values()), return_range(run.settings())))}; seeds: {seeds}{status}")
    return [*lines, difference_sentence(returns), *([returns.reason] if returns.reason else [])]


def difference_sentence(returns: ReturnComparison) -> str:
    """Return a sentence that says whether the seeds show a difference of the returns.

    If the seeds show no difference, the sentence also says how many seeds would show a difference of this size.
    """
    one, counts = returns.difference, (len(returns.a), len(returns.b))
    assert one is not None
    many = counts[0] if counts[0] == counts[1] else f"{counts[0]} and {counts[1]}"
    seeds = f"{many} seed{'s' * (counts != (1, 1))}"
    if one.low is None or one.high is None:
        more = "an interval needs at least 2 seeds on each side; use, for example, --set meta.max_session=4"
        return f"No difference shown with {seeds}: A − B = {_minus_sign_text(one.value)}, without an interval; {more}"
    if one.value == one.low == one.high == 0:
        return f"The returns are equal in each of {seeds}"
    value, low, high = (_minus_sign_text(number) for number in (one.value, one.low, one.high))
    interval = f"A − B = {value} (95 %: {low} to {high}){', paired by seed' * returns.paired}"
    if returns.difference_shown:
        return f"Difference shown with {seeds}: {interval}"
    if one.value == 0:
        return f"No difference shown with {seeds}: {interval}"
    if returns.needed is None:
        more = f"more than {_MOST_SEEDS:,} seeds would be needed to show a difference of this size"
        return f"No difference shown with {seeds}: {interval}; {more}"
    each = "" if returns.paired else " each"
    return f"No difference shown with {seeds}: {interval}; about {returns.needed} seeds{each} would show a difference of this size"


def _minus_sign_text(value: float) -> str:
    return number_text(value).replace("-", "−")
