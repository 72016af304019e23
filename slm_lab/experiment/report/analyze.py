"""Write the metrics and figures of a trial from the CSV tables of its Sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from slm_lab.experiment.files.paths import DataMode, RunPaths
from slm_lab.experiment.plan import Stop, UserError
from slm_lab.experiment.report.baseline import Baseline, known_baseline, measure_baseline
from slm_lab.experiment.report.elo import draw_elo
from slm_lab.experiment.report.metrics import (
    SESSION_METRICS,
    Scalars,
    Strengths,
    aggregate_known,
    consistency,
    current_return,
    is_recent,
    last_value,
    mean_current_return,
    mean_metrics,
    session_metrics,
)
from slm_lab.experiment.report.progress import format_with_error
from slm_lab.experiment.report.run import ALL_WORKERS, Run, Status, last_frame
from slm_lab.experiment.report.sampler import draw_sampler, sampler_metrics
from slm_lab.experiment.report.trial_figures import (
    FRAMES,
    GLOBAL_FRAMES,
    POLICY_FRAMES,
    Labels,
    common_strengths,
    draw_returns,
    draw_tables,
)
from slm_lab.experiment.report.writer import Writer, json_bytes
from slm_lab.lib.files import nonfinite_to_none
from slm_lab.lib.text import nonblank_lines
from slm_lab.spec.models.spec import Spec

_NO_SCALARS: Scalars = dict.fromkeys(("current_return", "current_return_se", "final_return", "total_reward_ma", *SESSION_METRICS, "frame"))
EPISODES = "recent episodes"
"""Description, in messages and figures, of the training episodes whose mean return is current_return (see EpisodeWindow.current)."""


def analyze_trial(
    spec: Spec,
    paths: RunPaths,
    t: int = 0,
    *,
    failed: Mapping[int, str] | None = None,
    stop: Stop | None = None,
    recorded_baseline: float | None = None,
    episodes: str = EPISODES,
    complete: bool = False,
) -> dict[str, Any]:
    """Write the metrics and figures of trial `t` from the existing tables of its Sessions, and return the metrics.

    Args:
        failed: index of each failed Session → cause of the failure. The tables of failed Sessions are drawn and their metrics files have
            the status "failed", but the metrics of the trial do not include failed Sessions.
        stop: the Stop object of the run if the run has just ended. The Stop object tells whether a stop was requested. If a stop was
            requested, Sessions may be incomplete, and the env's random baseline is not measured. If `stop` is None, a Session counts as
            done if its table has reached the last frame of the Session or meta.max_seconds.
        recorded_baseline: random baseline of the env (mean return of a random agent), which is used if no baseline is shipped or cached.
        episodes: description, for the figures, of the training episodes over which the returns are averaged.
        complete: whether to raise UserError if a file cannot be written, for example because the disk is full.

    The run may be unfinished. Returns {} if the trial has neither a table nor a failed Session. With meta.rigorous_eval, the metrics and
    returns of the trial are computed from the evaluations. If a table cannot be read, or a file or figure cannot be written, a notice is
    printed and the analysis continues.

    If the random baseline is neither shipped, cached nor recorded, the baseline is measured for at most 30 s after all files are written. A
    stop request interrupts the measurement of the baseline. After the measurement of the baseline, the metrics and the figures of the
    returns are written again.

    The returned dict has the following keys, where the value of a metric that is not defined is None:

    - current_return is the return of the last evaluation or, without a recent evaluation, the last finite current_return of the table.
      The standard error of current_return is current_return_se, computed over Sessions if there are several, and over episodes if there is
      one Session. The key evaluated tells whether current_return comes from evaluations.
    - These keys are means over the Sessions: final_return (the last total_reward), total_reward_ma (the last value), strength,
      max_strength, final_strength, sample_efficiency, training_efficiency, stability and frame (the last frame).
    - Other keys are consistency, random_baseline, sessions (number of Sessions that did not fail) and status ("done", "stopped" or
      "failed").
    - If Sessions failed, failed is the number of failed Sessions, and failures is a dict: index of the Session → cause in one line.
    - If the busy time of the rollout workers and the learner was measured, the dict has the keys bottleneck and busy (see sampler_metrics).
    - If a Session trains several policies, the dict has the keys policies and best_policy (see sampler_metrics). With several policies, all
      means over Sessions are means over all policies of all Sessions.
    - If the run uses self-play, elo is the last Elo rating, averaged over the Sessions.

    If the Sessions are workers that train one shared net, the metrics are computed over global frames from the rows of all workers,
    including failed workers. With a shared net, frame is the last global frame, and consistency is None.
    """
    trial = _Trial(spec, Run(paths, t), failed or {}, stop)
    if not trial.train and not trial.failures:
        return {}
    baseline, writer = known_baseline(spec.env), Writer(paths.root)
    if baseline is None and recorded_baseline is not None:
        baseline = Baseline(recorded_baseline)
    mean_return = baseline.mean_return if baseline else None
    trial.labels = replace(trial.labels, baseline=mean_return, episodes={**trial.labels.episodes, "train": episodes})
    metrics = trial.write_metrics(mean_return, writer)
    with writer.suppress_drawing_errors():
        draw_tables(writer, trial.run, trial.labels)
        draw_sampler(writer, trial.run, trial.labels, spec.meta.sampler)
        if spec.meta.self_play is not None:
            draw_elo(writer, trial.run, trial.labels)
    if baseline is None and trial.successful_tables and trial.has_returns and not trial.stop_requested:
        mean_return = measure_baseline(spec.env, stop)
        if mean_return is not None:
            metrics = trial.write_metrics(mean_return, writer)
            trial.labels = replace(trial.labels, baseline=mean_return)
            with writer.suppress_drawing_errors():
                draw_returns(writer, trial.run, trial.labels)
    writer.close()
    if complete and writer.reason:
        raise UserError(f"cannot write the results of {paths.root}: {writer.reason}")
    return metrics


def return_text(metrics: Mapping[str, Any], spec: Spec, episodes: str = EPISODES) -> str:
    """Return a text with the current return of a trial, the standard error, and the episodes and Sessions from which both are computed.

    In self-play, the text has the Elo rating instead of the return.

    Args: episodes: description of the training episodes over which the return is averaged.
    """
    value, sessions = metrics["current_return"], metrics["sessions"]
    if metrics.get("elo") is not None:
        over_sessions = f", mean of {sessions} sessions" if sessions > 1 else ""
        return f"Elo {metrics['elo']:.0f} (newest snapshot, random actions: 0{over_sessions})"
    if value is None:
        return "no episode ended" if metrics["final_return"] is None else "no episode ended recently"
    over = ["evaluation" if metrics["evaluated"] else episodes]
    over += [f"mean of {spec.policies} policies"] if spec.policies > 1 else []
    over += [f"mean of {sessions} sessions"] if sessions > 1 and not spec.meta.distributed else []
    return f"return {format_with_error(value, metrics['current_return_se'])} ({', '.join(over)})"


class _Trial:
    """The CSV tables of a trial, from which its metrics and figures are computed.

    The index of a table is Session · policies + policy (see RunPaths.session_df).
    """

    def __init__(self, spec: Spec, run: Run, failures: Mapping[int, str], stop: Stop | None) -> None:
        self.spec, self.run, self.stop = spec, run, stop
        self.mode: DataMode = "eval" if spec.meta.rigorous_eval else "train"
        """Mode ("train" or "eval") of the tables from which the metrics are computed."""
        self.failures = {s: failures[s] for s in sorted(failures)}
        self.train, self.metric_tables = run.tables("train"), run.tables_per_training(self.mode)
        self.evaluations = run.tables_per_training("eval") if spec.meta.may_evaluate else {}
        failed_tables = frozenset(index for index in self.train if index // spec.policies in self.failures)
        self.successful_tables = [index for index in self.train if index not in failed_tables]
        """Indices of the tables of Sessions that did not fail."""
        env, frames = spec.env.name.rpartition(":")[2], POLICY_FRAMES if spec.policies > 1 else FRAMES
        self.labels = Labels(
            title=f"{spec.name} ({env}), trial {run.trial}",
            episodes={"train": EPISODES, "eval": f"{spec.meta.rigorous_eval} evaluation episodes"},
            mode=self.mode,
            failed=len(self.failures),
            policies=spec.policies,
            policy_names=tuple(spec.policy_names),
            sessions=spec.meta.max_session,
            frames=GLOBAL_FRAMES if run.shares_one_net else frames,
            failed_tables=failed_tables,
            workers=run.shares_one_net,
        )

    @property
    def has_returns(self) -> bool:
        return any(np.isfinite(table["total_reward"]).any() for table in self.metric_tables.values() if "total_reward" in table)

    @cached_property
    def returns_from_evaluation(self) -> bool:
        """Whether current_return is the return of the last evaluation: true if each Session that did not fail has a recent evaluation."""
        tables = {index: table for index, table in self.metric_tables.items() if index in (*self.successful_tables, ALL_WORKERS)}
        return bool(tables) and all(is_recent(self.evaluations.get(index), table) for index, table in tables.items())

    @property
    def stop_requested(self) -> bool:
        return self.stop is not None and self.stop.requested

    def strengths(self, baseline: float | None) -> dict[int, Strengths]:
        return {index: Strengths.from_table(table, baseline) for index, table in self.metric_tables.items()}

    def write_metrics(self, baseline: float | None, writer: Writer) -> dict[str, Any]:
        """Write the metrics files of the trial and of its Sessions, and return the trial's metrics."""
        policies, strengths, paths, t = self.spec.policies, self.strengths(baseline), self.run.paths, self.run.trial
        session_scalars = {index: self._table_metrics(index, strengths) for index in self.train}
        train = {index: self.train[index] for index in self.successful_tables}
        metric_tables = {index: table for index, table in self.metric_tables.items() if index in (*self.successful_tables, ALL_WORKERS)}
        sessions = {index // policies for index in self.successful_tables}
        failures = {str(s): _failure_in_one_line(cause) for s, cause in self.failures.items()}
        status = {index: self._status(index) for index in self.train}
        may_be_missing = self.stop is None or self.stop_requested
        stopped = "stopped" in status.values() or (may_be_missing and len(sessions) + len(self.failures) < self.spec.meta.max_session)
        of_tables = {index: self._table_metrics(index, strengths) for index in metric_tables}
        metrics: dict[str, Any] = {
            **(mean_metrics(list(of_tables.values())) or _NO_SCALARS),
            **mean_current_return(of_tables, policies),
            "evaluated": self.returns_from_evaluation,
            "consistency": None
            if self.run.shares_one_net
            else consistency(common_strengths([strengths[index] for index in self.successful_tables])),
            "random_baseline": baseline,
            "sessions": len(sessions),
            "status": "failed" if self.failures else "stopped" if stopped else "done",
            **({"failed": len(self.failures), "failures": failures} if self.failures else {}),
            **sampler_metrics(train, metric_tables, policies),
            **({} if self.spec.meta.self_play is None else {"elo": aggregate_known(last_value(table, "elo") for table in train.values())}),
        }
        metrics = dict(nonfinite_to_none(metrics))
        writer.write("metrics file not written", (paths.trial_metrics(t), partial(json_bytes, metrics, ensure_ascii=True)))
        with_tables = {index // policies for index in session_scalars}
        session_scalars |= {s * policies: _NO_SCALARS for s in self.failures if s not in with_tables}
        for index, scalars in session_scalars.items():
            content: dict[str, Any] = {**scalars, "random_baseline": baseline, "status": status.get(index, "failed")}
            if index // policies in self.failures:
                content["failed"] = self.failures[index // policies] or "unknown cause"
            writer.write("metrics file not written", (paths.session_metrics(index, t), partial(json_bytes, content, ensure_ascii=True)))
        return metrics

    def _table_metrics(self, index: int, strengths: Mapping[int, Strengths]) -> Scalars:
        """Return the metrics of the table with index `index`.

        If the table belongs to a single worker of a shared net, all metrics except `frame` are None.
        """
        frame = last_frame(self.train[index] if index in self.train else self.run.tables_per_training("train")[index])
        if index not in self.metric_tables:
            return {**_NO_SCALARS, "frame": frame}
        evaluation = self.evaluations.get(index, {}) if self.returns_from_evaluation else {}
        return {
            **current_return(evaluation or self.metric_tables[index]),
            "final_return": last_value(self.metric_tables[index], "total_reward"),
            "total_reward_ma": last_value(self.metric_tables[index], "total_reward_ma"),
            **session_metrics(strengths[index]),
            "frame": frame,
        }

    def _status(self, index: int) -> Status:
        """Return the status of the Session that wrote the table with index `index`.

        A Session without a successful table is "failed". Any other Session is "done" if it has reached its last frame or the time limit
        meta.max_seconds, or if `self.stop` is given and no stop was requested. Otherwise, the Session is "stopped".
        """
        if index not in self.successful_tables:
            return "failed"
        may_stop = self.stop is None or self.stop.requested
        table, limit = self.train[index], self.spec.meta.max_seconds
        if limit is not None and (last_value(table, "wall_t") or 0.0) >= limit:
            return "done"
        return "stopped" if may_stop and (last_frame(table) or 0) < self.spec.session_frames else "done"


def _failure_in_one_line(text: str) -> str:
    """Return the cause of a failure in one line: the last line of a traceback or, without a traceback, the first line of the cause.

    If the last line of the cause is "(at frame …)", this line is appended. If the cause contains no traceback, its lines after the first
    line are the output of a process that died.
    """
    lines = nonblank_lines(text) or ["unknown cause"]
    if "Traceback" not in text:
        return " ".join([lines[0], *(line for line in lines[1:][-1:] if line.startswith("(at frame "))])
    return " ".join(lines[-2:]) if lines[-1].startswith("(at frame ") else lines[-1]
