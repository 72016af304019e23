"""Create the data of the HTML report of a trial: one JSON object, which the script report.js draws.

`report_data(Run(paths, trial))` returns the JSON object of a trial. The JSON object of a report is used in two ways:
- report_page.py writes the JSON object into report.html.
- A server can send the JSON object to a page that has loaded plotly.min.js and the script and style of `report_page.assets()`. The page of
  the server calls `SLMReport.render(element, data)` once, and later `SLMReport.update(element, data)` with newer data of the same run.

report.js also draws the reports of a search and of a study, whose data have figures and tables of results instead of Session tables. Since
the kinds of reports have different data, all keys except `version`, `kind` and `title` are optional. All texts are plain text: report.js
inserts texts as text nodes, and escapes the names that it passes to plotly. All numbers in the object are finite, and a missing number is
null. The JSON object has these keys:

    version, kind ("trial", "search" or "study"), title, subtitle, folder, written (ISO time), status
    refresh     seconds between two reloads of the page, null if the run is not running
    facts       [{label, value, note}]                      entries of the summary
    sentences   [text]                                      how the seeds differ (see seed_differences.py)
    ranking     {columns, rows: [{line, cells}]}            table of the seeds, from the best to the worst seed
    findings    [{severity, title, evidence, advice, key}]  findings of the doctor, null if unknown
    axes        [{column, label}], axis                     the x axes, and the column of the x axis that is shown first
    lines       [{index, name, failed, group}]              a line for each table of a Session, policy or worker
    means       [{name, indices, workers}]                  the bold lines, each the mean over the tables `indices` or, for columns that
                                                            are neither returns nor metrics, over the tables `workers` if present
    tables      {mode: {index: {column: [rows]}}}           mode is train, eval or trial (trial: over frames only)
    returns     [{column, label, mode}]                     the returns that a user can choose, the default first
    bounds      [low, high]                                 range of possible returns, null if unknown
    levels      [{value, label}]                            horizontal lines in the graph of the return
    panels      [{group, title, unit, mode, note, core, joint, columns: [{column, label}]}]
                core: whether the y axis shows only the range of most values; joint: whether the columns are of all workers together
    thinned     maximum number of table rows per point of a line
    events      [{frame, seconds, line, name, kind, text}]  notices, restarts and failures on the time axis
    metrics     {columns, rows, note}                       table of metrics
    settings    {changed: {columns, rows}, previous: {name, href, rows}, spec: text}
    origin      [{label, value}]                            versions, git commit, host and command
    commands    [{label, command}]                          shell commands
    files       [{label, href}]                             links to files
    paragraphs  [text]                                      results of a study
    tables_of   [{title, note, columns, rows, texts}]       tables of a search or study, where a cell is text, number or {text, href};
                                                            texts: whether the text in the last column is wrapped
    figures     [{title, note, plot: {data, layout}, href}] figures of a search or study
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np

from slm_lab.experiment.report.baseline import known_baseline
from slm_lab.experiment.report.doctor import Finding, change_option, diagnose_run, sessions_text
from slm_lab.experiment.report.metrics import (
    Scalars,
    Strengths,
    Table,
    consistency_curve,
    current_return,
    curve,
    estimate_mean,
    is_recent,
    last_value,
    mean_current_return,
    mean_rating,
    metric_columns,
    round_to_five_digits,
    session_metrics,
)
from slm_lab.experiment.report.progress import format_duration, format_number, format_with_error, rating_text
from slm_lab.experiment.report.report_events import collecting_and_learning_time, trial_events
from slm_lab.experiment.report.report_origin import commands, files, origin, published_levels, run_settings
from slm_lab.experiment.report.report_panels import COUNTS, RETURNS, panels
from slm_lab.experiment.report.return_range import return_range
from slm_lab.experiment.report.run import ALL_WORKERS, Run, last_frame
from slm_lab.experiment.report.sampler import bottleneck
from slm_lab.experiment.report.seed_differences import first_frame_at_level, learned_return, round_text, seed_difference_sentences
from slm_lab.experiment.report.trial_figures import common_strengths
from slm_lab.lib.log import notice
from slm_lab.spec.models.env import EnvSpec

VERSION = 1
_CELLS = 60_000
"""Maximum number of values in the tables of a report. This number of values takes about 450 kB."""
_MIN_ROWS, _MAX_ROWS = 40, 500
"""Lower and upper limit of the number of rows to which a table is thinned."""
_LAST = (*COUNTS, "current_return", "current_return_se", "total_reward", "total_reward_ma")
"""Columns in which a row of a thinned table has the last value of the rows that it replaces. In all other columns, the row has the mean of
the replaced values."""
_AXES = {
    "frame": "frames",
    "global_frame": "global frames (of all workers together)",
    "opt_step": "gradient steps",
    "wall_t": "seconds of training",
}
_METRICS = {
    "current_return": "current return",
    "final_return": "total_reward at the end",
    "total_reward_ma": "total_reward_ma at the end",
    "strength": "strength",
    "max_strength": "maximum strength",
    "final_strength": "final strength",
    "sample_efficiency": "sample efficiency (1 / frame)",
    "training_efficiency": "training efficiency (1 / gradient step)",
    "stability": "stability",
}


def report_data(run: Run) -> dict[str, Any]:
    """Return the data of the HTML report of a trial as a dict for JSON (see the module's docstring). The trial may still be training.

    Graphs and numbers are omitted if their table is missing or incomplete. Raises UserError if the spec of the run cannot be read.
    """
    trial = _Trial(run)
    return {
        "version": VERSION,
        "kind": "trial",
        "title": f"{run.name}{f', trial {run.trial}' if run.trial else ''}",
        "subtitle": f"{trial.algorithm} in {run.env}{', mode dev' * (run.mode == 'dev')}",
        "folder": run.paths.root.name,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "status": run.status,
        "facts": trial.summary_entries(),
        "sentences": []
        if trial.has_opponents
        else seed_difference_sentences(trial.seeds, trial.return_tables, trial.names, trial.baseline, trial.current_return_tables),
        "ranking": trial.ranking(),
        "findings": diagnosis(run),
        **trial.graphs(),
        "events": trial_events(run, trial.names),
        "metrics": trial.metrics(),
        "settings": run_settings(run),
        "origin": origin(run),
        "commands": commands(run),
        "files": files(run),
    }


def diagnosis(run: Run) -> list[dict[str, Any]] | None:
    """Return the findings of the command `doctor` in a run, most severe first, or None if `doctor` fails or the run has no rows.

    For the report, `doctor` examines only the settings and the tables of the run. Checkpoints are not examined, since torch would have to
    be imported to read a checkpoint.
    """
    try:
        found = diagnose_run(run, checkpoints=False)
        return [_finding_entry(run, finding) for finding in found.findings] if found.checked else None
    except Exception as error:
        notice(f"cannot diagnose {run.paths.root}: {type(error).__name__}: {error}")
        return None


def _finding_entry(run: Run, finding: Finding) -> dict[str, str]:
    title = f"{finding.title}{sessions_text(run, finding)}"
    texts = {"severity": finding.severity, "title": title, "evidence": finding.evidence, "advice": finding.advice}
    return {**texts, "key": change_option(finding) or ""}


class _Trial:
    """The tables of a trial, and methods that create the sections of its HTML report."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.train = {index: table for index, table in run.tables("train").items() if len(table["frame"])}
        self.eval = {index: table for index, table in run.tables("eval").items() if len(table["frame"])}
        self.failed = {int(s) for s in run.metrics.get("failures", {})}
        self.names = {index: self._name(index) for index in self.train}
        if run.shares_one_net:
            self.names[ALL_WORKERS] = "all workers"
        self.of_training = run.tables_per_training("train") if self.train else {}
        self.evaluated = {index: table for index, table in run.tables_per_training("eval").items() if len(table["frame"])}
        self.baseline = _baseline(run)

    @property
    def algorithm(self) -> str:
        return str(self.run.spec.get("agent", {}).get("algorithm", {}).get("name", "?"))

    @property
    def has_opponents(self) -> bool:
        """Whether returns depend on other policies that learn too. If so, the returns of different seeds cannot be compared."""
        return bool(self.run.spec.get("meta", {}).get("self_play") is not None or self.run.spec.get("agent", {}).get("policies"))

    @cached_property
    def is_rated(self) -> bool:
        """Whether a training table has Elo ratings of self-play."""
        return any(np.isfinite(table.get("elo", np.empty(0))).any() for table in self.train.values())

    @property
    def uses_rigorous_eval(self) -> bool:
        """Whether the returns of this run are taken from its evaluation tables (meta.rigorous_eval)."""
        return bool(self.run.spec.get("meta", {}).get("rigorous_eval")) and bool(self.evaluated)

    @property
    def seeds(self) -> dict[int, Table]:
        """Index → training table of each independent training, except the trainings of failed Sessions."""
        policies = self.run.policies
        return {i: one for i, one in self.of_training.items() if i // policies not in self.failed and len(one["frame"])}

    @property
    def return_tables(self) -> dict[int, Table]:
        """Index of each seed → evaluation table of the seed if `uses_rigorous_eval` is true, else training table of the seed.

        The returns in the report are taken from these tables.
        """
        return {index: self.evaluated[index] for index in self.seeds if index in self.evaluated} if self.uses_rigorous_eval else self.seeds

    @cached_property
    def returns_from_evaluation(self) -> bool:
        """Whether current returns are taken from the last evaluation: true if each seed has a recent evaluation."""
        return bool(self.seeds) and all(is_recent(self.evaluated.get(index), table) for index, table in self.return_tables.items())

    @property
    def current_return_tables(self) -> dict[int, Table]:
        """Index of each seed → table whose last row has the current return of the seed."""
        return {index: self.evaluated[index] for index in self.seeds} if self.returns_from_evaluation else self.return_tables

    @cached_property
    def bounds(self) -> tuple[float, float] | None:
        """The range of possible returns, or None if the range is unknown, or if a return of this run is outside the range.

        A return may be outside the range because arguments of the env have changed the range.
        """
        found, columns = return_range(self.run.settings()), ("current_return", "total_reward")
        values = [curve(table, name).value for table in self.of_training.values() for name in columns]
        inside = found is not None and all(((found[0] <= one) & (one <= found[1])).all() for one in values)
        return found if inside else None

    @cached_property
    def learned_return(self) -> float | None:
        """The return at which a seed counts as having learned (see seed_differences.learned_return)."""
        return learned_return([curve(table, "current_return") for table in self.return_tables.values()], self.baseline)

    def _name(self, index: int) -> str:
        if self.run.shares_one_net:
            return f"worker {index}"
        session, policy = divmod(index, self.run.policies)
        sessions = {i // self.run.policies for i in self.train}
        if self.run.policies == 1:
            return f"session {session}"
        name = f"policy {self.run.policy_names[policy]}"
        return name if len(sessions) == 1 else f"session {session}, {name}"

    def current_return_table(self, index: int) -> Table:
        """Return the table whose last row has the current return of the training with index `index`, even if its Session failed."""
        if index in self.current_return_tables:
            return self.current_return_tables[index]
        return (self.evaluated if self.uses_rigorous_eval else self.of_training).get(index, {"frame": np.empty(0)})

    # ---- summary

    def summary_entries(self) -> list[dict[str, Any]]:
        found = [self._rating() or self._return_fact(), self._frames(), self._time(), *self._bottleneck(), self._sessions()]
        return [*filter(None, found)]

    def _rating(self) -> dict[str, Any] | None:
        """Return the entry of the summary with the Elo rating of self-play, or None if the run has no Elo rating.

        The summary shows the Elo rating instead of the return, since returns in self-play depend on the opponents.
        """
        newest = [(last_value(table, "elo"), last_value(table, "elo_se")) for table in self.seeds.values()]
        found = mean_rating([(elo, error) for elo, error in newest if elo is not None])
        if found is None:
            return None
        over = f"mean of {len(newest)} sessions ± standard error" if len(newest) > 1 else "± standard error"
        return _summary_entry("Elo rating", rating_text(*found), f"newest snapshot, {over}; random actions: 0")

    def _return_fact(self) -> dict[str, Any] | None:
        if self.run.policies > 1 and self.run.spec.get("agent", {}).get("policies"):
            return self._returns_of_policies()
        found = mean_current_return({index: current_return(self.current_return_table(index)) for index in self.seeds}, self.run.policies)
        value, count = found["current_return"], len({index // self.run.policies for index in self.seeds})
        if value is None:
            return _summary_entry("current return", "-", "no episode has ended recently" if self.train else "no rows yet")
        what = "evaluation" if self.returns_from_evaluation else "recent training episodes"
        over = f"{what}; mean of {count} sessions ± standard error" if count > 1 else f"{what} ± standard error over episodes"
        if self.run.shares_one_net:
            over = f"{what} of all workers ± standard error over episodes"
        return _summary_entry("current return", format_with_error(value, found["current_return_se"]), over)

    def _returns_of_policies(self) -> dict[str, Any]:
        """Return the entry of the summary with the current return of each policy of agent.policies.

        The entry does not have the mean over the policies, which has no meaning if the policies are opponents in a game.
        """
        texts = []
        for policy, name in enumerate(self.run.policy_names):
            own = {
                i // self.run.policies: current_return(self.current_return_table(i)) for i in self.seeds if i % self.run.policies == policy
            }
            found = mean_current_return(own, 1)
            if found["current_return"] is not None:
                texts.append(f"{name} {format_with_error(found['current_return'], found['current_return_se'])}")
        count = len({index // self.run.policies for index in self.seeds})
        over = (
            f"of each policy, mean of {count} sessions ± standard error" if count > 1 else "of each policy ± standard error over episodes"
        )
        return _summary_entry("current return", ", ".join(texts) or "-", over if texts else "no episode has ended recently")

    def _frames(self) -> dict[str, Any] | None:
        frames = [last_frame(table) or 0 for table in self.of_training.values()]
        planned = self.run.spec.get("env", {}).get("max_frame")
        if not frames:
            return None
        value = min(frames) if self.run.status == "running" else round(sum(frames) / len(frames))
        share = f"{value / planned:.0%} of {planned:,.0f}" if isinstance(planned, int | float) and planned else ""
        each = " for each session" if len(frames) > 1 else ""
        return _summary_entry("frames", f"{value:,}", f"{share}{each}")

    def _time(self) -> dict[str, Any] | None:
        known = [(last_frame(one) or 0, seconds) for one in self.of_training.values() if (seconds := last_value(one, "wall_t"))]
        if not known:
            return None
        speed, seconds = sum(frame / time for frame, time in known) / len(known), max(time for _, time in known)
        left = self._time_left(speed)
        each = " per session" if len(known) > 1 else ""
        return _summary_entry("time", format_duration(seconds), f"{float(f'{speed:.3g}'):,.0f} frames/s{each}{left}")

    def _time_left(self, speed: float) -> str:
        planned = self.run.spec.get("env", {}).get("max_frame")
        if self.run.status != "running" or not isinstance(planned, int | float) or speed <= 0:
            return ""
        done = min((last_frame(table) or 0 for table in self.of_training.values()), default=0)
        return f", {format_duration(max(0.0, (planned - done) / speed))} left"

    def _bottleneck(self) -> list[dict[str, Any]]:
        """Return a list with the summary entry that says which activity of the run took most of the time, or [] if the times are unknown.

        The compared activities are acting and learning or, if the run has rollout workers, the work of each kind of process.
        """
        found = bottleneck(list(self.train.values()))
        if found is not None:
            role, busy = found
            return [_summary_entry("bottleneck", role, ", ".join(f"{name} busy {share:.0%}" for name, share in busy.items()))]
        split = collecting_and_learning_time(self.run)
        if split is None or not sum(split):
            return []
        share = split[0] / sum(split)
        note = f"envs and acting {share:.0%}, learning {1 - share:.0%} of the time"
        return [_summary_entry("bottleneck", "envs and acting" if share > 0.5 else "learning", note)]

    def _sessions(self) -> dict[str, Any]:
        counts = Counter(self.run.sessions.values())
        total = sum(counts.values())
        notes = [f"{count} {status}" for status, count in counts.items()] if len(counts) > 1 else []
        notes.append(f"random_seed {self.run.spec.get('meta', {}).get('random_seed')}")
        notes += ["one seed shows little: meta.max_session=4 trains four"] if total == 1 and self.run.is_standalone else []
        what = "worker" if self.run.shares_one_net else "session"
        return _summary_entry("seeds", f"{total} {what}{'s' * (total != 1)}", ", ".join(notes))

    def ranking(self) -> dict[str, Any]:
        """Return the ranking: a table with a row for each seed, from the best to the worst seed.

        Seeds are ordered by current return (in self-play, by Elo rating). Seeds with equal current returns are ordered by the mean return
        over the run.
        """
        learned = [] if self.learned_return is None else [f"reached {round_text(self.learned_return)} at frame"]
        ratings = ["Elo rating ± se"] if self.is_rated else []
        columns = [
            "",
            *ratings,
            "current return ± se",
            "episodes",
            "mean over the run",
            "highest",
            *learned,
            "frames",
            "time",
            "frames/s",
            "status",
        ]
        rows = sorted((self._ranking_row(index) for index in self.of_training), key=lambda one: one[0], reverse=True)
        return {"columns": columns, "rows": [row for _, row in rows]}

    def _ranking_row(self, index: int) -> tuple[tuple[float, float], dict[str, Any]]:
        """Return the sort key of the seed with index `index`, and the row of the seed in the ranking."""
        own = (self.evaluated if self.uses_rigorous_eval else self.of_training).get(index, {"frame": np.empty(0)})
        now, one, table = self.current_return_table(index), curve(own, "current_return"), self.of_training[index]
        found = current_return(now)
        mean, best = (float(of(one.value)) if len(one.value) else None for of in (np.mean, np.max))
        seconds, frame, level = last_value(table, "wall_t"), last_frame(table) or 0, first_frame_at_level(one, self.learned_return)
        elo = last_value(table, "elo")
        status = self.run.status if index == ALL_WORKERS else self.run.sessions.get(index // self.run.policies, "-")
        cells = [
            self._name(index) if index not in self.names else self.names[index],
            *([] if not self.is_rated else ["-" if elo is None else rating_text(elo, last_value(table, "elo_se"))]),
            format_with_error(found["current_return"], found["current_return_se"]),
            format_number(last_value(now, "current_epi")),
            "-" if mean is None else round_text(mean),
            "-" if best is None else round_text(best),
            *([] if self.learned_return is None else ["never" if level is None else f"{level:,.0f}"]),
            f"{frame:,}",
            "-" if seconds is None else format_duration(seconds),
            f"{frame / seconds:,.0f}" if seconds else "-",
            str(status),
        ]
        key = tuple(-math.inf if value is None else value for value in (elo if self.is_rated else found["current_return"], mean))
        return (key[0], key[1]), {"line": index, "cells": cells}

    # ---- graphs

    def graphs(self) -> dict[str, Any]:
        """Return the entries of the report's data about the graphs: the thinned tables, and the descriptions of the graphs."""
        train = {index: self._with_strengths(table) for index, table in self.train.items()}
        if self.run.shares_one_net:
            train[ALL_WORKERS] = self._with_strengths(self.of_training[ALL_WORKERS])
        modes: dict[str, dict[int, Table]] = {"train": train, "eval": {**self.eval, **self.evaluated}, "trial": self._consistency()}
        cells = sum(len(table["frame"]) and len(table) for tables in modes.values() for table in tables.values()) or 1
        rows = min(max(_CELLS // cells, _MIN_ROWS), _MAX_ROWS)
        longest = max((len(table["frame"]) for table in train.values()), default=0)
        columns = {name for table in train.values() for name in table}
        shared = "global_frame" in columns
        return {
            "axes": [{"column": name, "label": label} for name, label in _AXES.items() if name in columns],
            "axis": "global_frame" if shared else "frame",
            "lines": [self._session_line(index) for index in sorted(train)],
            "means": self._mean_lines(),
            "tables": {mode: {str(i): _json_table(table, rows) for i, table in tables.items()} for mode, tables in modes.items()},
            "thinned": -(-longest // rows) if longest > rows else 1,
            "returns": self._return_choices(columns),
            "bounds": self.bounds,
            "levels": self._level_lines(),
            "panels": panels(modes),
        }

    def _session_line(self, index: int) -> dict[str, Any]:
        failed = index // self.run.policies in self.failed
        name = f"{self.names[index]}{' (failed)' if failed else ''}"
        return {"index": index, "name": name, "failed": failed, "group": index % self.run.policies if self.run.policies > 1 else index}

    def _mean_lines(self) -> list[dict[str, Any]]:
        """Return the descriptions of the bold lines in the graphs of the report.

        A bold line shows the mean over Sessions (one line per policy if there are several), or the joint table of all workers.
        """
        policies = self.run.policies
        if self.run.shares_one_net:
            return [{"name": "all workers", "indices": [ALL_WORKERS], "workers": sorted(self.train)}]
        of_policy = [[i for i in self.seeds if i % policies == policy] for policy in range(policies)]
        if policies > 1:
            return [
                {"name": f"policy {p}", "indices": own} for p, own in zip(self.run.policy_names, of_policy, strict=True) if len(own) > 1
            ]
        return [{"name": "mean of sessions", "indices": of_policy[0]}] if len(of_policy[0]) > 1 else []

    def _return_choices(self, columns: set[str]) -> list[dict[str, Any]]:
        found = [{"column": name, "label": label, "mode": "train"} for name, label in RETURNS.items() if name in columns]
        if self.is_rated:
            elo = {"column": "elo", "error": "elo_se", "label": "Elo rating (newest snapshot)", "unit": "Elo rating", "mode": "train"}
            return [elo, *found]
        if not self.evaluated:
            return found
        episodes = self.run.spec.get("meta", {}).get("rigorous_eval") or ""
        evaluation = {"column": "total_reward", "label": f"evaluation ({episodes} episodes)" if episodes else "evaluation", "mode": "eval"}
        return [evaluation, *found] if self.uses_rigorous_eval else [*found[:1], evaluation, *found[1:]]

    def _level_lines(self) -> list[dict[str, Any]]:
        random = [] if self.baseline is None else [{"value": self.baseline, "label": "random agent"}]
        return [*random, *published_levels(self.run)]

    def _with_strengths(self, table: Table) -> Table:
        """Return the table with additional columns for the metrics of SLM Lab.

        The metrics in a row are computed over all rows up to this row.
        """
        strengths, rows = Strengths.from_table(table, self.baseline), np.isfinite(table.get("total_reward", np.empty(0)))
        if not len(strengths.value):
            return table
        return {**table, **{name: _scatter_to_rows(one, rows) for name, one in metric_columns(strengths).items()}}

    def _consistency(self) -> dict[int, Table]:
        if self.run.shares_one_net or len(self.seeds) < 2 or self.baseline is None:
            return {}
        common = consistency_curve(common_strengths([Strengths.from_table(table, self.baseline) for table in self.seeds.values()]))
        return {0: {"frame": common.frame, "consistency": common.value}} if len(common.frame) else {}

    # ---- metrics

    def metrics(self) -> dict[str, Any]:
        """Return the table of metrics, with columns for the mean over the seeds, the interval of the mean, and the value of each seed."""
        tables = self.evaluated if self.uses_rigorous_eval else self.of_training
        own = {
            index: {"current_return": current_return(self.current_return_table(index))["current_return"], **self._metrics_of(tables[index])}
            for index in self.seeds
            if index in tables
        }
        bounds = {name: self._bounds(name) for name in _METRICS}
        rows = []
        for name, label in _METRICS.items():
            values = {index: one[name] for index, one in own.items()}
            known = [value for value in values.values() if value is not None]
            if known:
                rows.append([label, *_interval_cells(known, bounds[name]), *(_cell_text(value) for value in values.values())])
        if (consistency := self.run.metrics.get("consistency")) is not None:
            rows.append(["consistency", _cell_text(consistency), "", *[""] * len(own)])
        note = "95 % interval over the seeds (Student's t, within the possible range); consistency is of all seeds together"
        return {"columns": ["metric", "mean", "95 % interval", *(self.names[index] for index in own)], "rows": rows, "note": note}

    def _metrics_of(self, table: Table) -> Scalars:
        found = session_metrics(Strengths.from_table(table, self.baseline))
        last = {"final_return": last_value(table, "total_reward"), "total_reward_ma": last_value(table, "total_reward_ma")}
        return {**last, **found}

    def _bounds(self, name: str) -> tuple[float, float]:
        """Return the range of possible values of a metric."""
        low, high = self.bounds or (-math.inf, math.inf)
        if name in ("current_return", "final_return", "total_reward_ma"):
            return low, high
        if name.endswith("strength") and self.baseline is not None:
            return low - self.baseline, high - self.baseline
        return (-math.inf, 1.0) if name == "stability" else (0.0 if name.endswith("efficiency") else -math.inf, math.inf)


def _summary_entry(label: str, value: str, note: str = "") -> dict[str, Any]:
    return {"label": label, "value": value, "note": note}


def _baseline(run: Run) -> float | None:
    """Return the mean return of a random agent, from the metrics of the run or else from the shipped or cached baselines.

    Returns None if the mean return of a random agent is unknown.
    """
    found = run.metrics.get("random_baseline")
    if isinstance(found, int | float):
        return float(found)
    with suppress(Exception):  # the env may belong to another version of the program
        known = known_baseline(EnvSpec.model_validate(run.spec["env"]))
        return known.mean_return if known else None
    return None


def _scatter_to_rows(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return an array with `values` at the positions where the boolean array `rows` is True, and NaN at all other positions."""
    full = np.full(len(rows), np.nan)
    full[rows] = values
    return full


def _json_table(table: Table, rows: int) -> dict[str, list[float | None]]:
    """Return a table as lists for JSON, thinned to at most `rows` rows and without columns that have no finite value."""
    thinned = thin_table(table, rows)
    kept = {name: values for name, values in thinned.items() if np.isfinite(values).any() and name not in ("epi", "t")}
    return {name: [round_to_five_digits(value) for value in values.tolist()] for name, values in kept.items()}


def thin_table(table: Table, rows: int) -> Table:
    """Return a table with at most `rows` rows.

    Each new row replaces a group of consecutive rows, and all groups have about the same number of rows.

    In columns of counts and returns (_LAST), the value of a new row is the last value of the group of rows that it replaces, if this value
    is finite. All other values of a new row are means over the finite values of the group.
    """
    count = len(table["frame"])
    if count <= rows:
        return table
    ends = np.unique(np.linspace(-1, count - 1, rows + 1).round().astype(int))[1:]
    begins = np.append(0, ends[:-1] + 1)
    thinned = {}
    for name, values in table.items():
        known = np.isfinite(values)
        number_of, total = (np.add.reduceat(part, begins) for part in (known.astype(float), np.where(known, values, 0.0)))
        mean = np.where(number_of > 0, total / np.maximum(number_of, 1.0), np.nan)
        thinned[name] = np.where(known[ends], values[ends], mean) if name in _LAST else mean
    return thinned


def _cell_text(value: float | None) -> str:
    return format_number(value) if value is None or value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


def _interval_cells(values: Sequence[float], bounds: tuple[float, float]) -> list[str]:
    found = estimate_mean(values, bounds)
    assert found is not None
    if found.low is None or found.high is None:
        return [_cell_text(found.value), "one seed: unknown"]
    return [_cell_text(found.value), f"{_cell_text(found.low)} to {_cell_text(found.high)}"]
