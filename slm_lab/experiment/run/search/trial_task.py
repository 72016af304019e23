"""Run a trial of a search as a task of an executor.

Each Session of the trial has a separate process, even if there is only one Session. A killed process counts as a failed Session, as in runs
outside a search.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console

from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.files.lock import SessionLock
from slm_lab.experiment.files.paths import DataMode, RunPaths
from slm_lab.experiment.plan import Interrupted, Plan, Stop, TrialFailed, UserError
from slm_lab.experiment.report.metrics import Strengths, Table, consistency, last_value, session_metrics
from slm_lab.experiment.report.run import read_json, read_table, tables_per_training
from slm_lab.experiment.report.trial_figures import common_strengths
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.resume import read_run
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError

COLUMNS = {"current_return": "current_return", "final_return": "total_reward", "total_reward_ma": "total_reward_ma"}
"""Search metric → column of the session tables whose last value is the metric."""


class ReportReader:
    """Reader that computes the search metric of a running trial from the tables that the trial's Sessions write.

    Args:
        metric, baseline: see SearchState.
        after: frame of the last report that has already been read.
    """

    def __init__(self, paths: RunPaths, trial: int, spec: Spec, metric: str, baseline: float | None, after: int = 0) -> None:
        mode: DataMode = "eval" if spec.meta.rigorous_eval else "train"
        self.files = [paths.session_df(index, mode, trial) for index in range(spec.meta.max_session * spec.policies)]
        self.metric, self.baseline, self.after = metric, baseline, after
        self.frame = 0
        """The last frame up to which all tables of the trial have rows."""
        self._sizes: list[int] = []

    def read(self) -> list[tuple[int, float]]:
        """Return (frame, metric) for each new frame that all tables have reached, in order. Frames at which the metric is undefined are
        omitted."""
        try:
            sizes = [file.stat().st_size for file in self.files]
        except OSError:  # some Session has not written a row yet
            return []
        if sizes == self._sizes:
            return []
        tables = [read_table(file) for file in self.files]
        self._sizes = sizes
        if not all(len(table["frame"]) for table in tables):
            return []
        common = min(float(table["frame"][-1]) for table in tables)
        self.frame = int(common)
        new = [int(frame) for frame in tables[0]["frame"] if self.after < frame <= common]
        metrics = [(frame, self._metric_at(frame, tables)) for frame in new]
        self.after = max([self.after, *new])
        return [(frame, value) for frame, value in metrics if value is not None]

    def _metric_at(self, frame: int, tables: list[Table]) -> float | None:
        cut = [{name: column[table["frame"] <= frame] for name, column in table.items()} for table in tables]
        return trial_metric(list(tables_per_training(dict(enumerate(cut))).values()), self.metric, self.baseline)


def trial_metric(tables: list[Table], metric: str, baseline: float | None) -> float | None:
    """Return a search metric of a trial, computed as in analyze_trial, or None if the metric is undefined in all tables.

    The metric "consistency" is computed from all tables together. Any other metric is the mean over the tables in which the metric is
    defined.

    Args: tables: one table per independent training.
    """
    if metric in COLUMNS:
        values = [last_value(table, COLUMNS[metric]) for table in tables]
    else:
        strengths = [Strengths.from_table(table, baseline) for table in tables]
        if metric == "consistency":
            return consistency(common_strengths(strengths))
        values = [session_metrics(strength)[metric] for strength in strengths]
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def get_metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return the metric `name` from the metrics of a trial that has ended, or None if the metric is undefined."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else None


_POLL = 0.25
"""Time in seconds between two reads of the tables of a running trial."""


@dataclass(frozen=True)
class TrialJob:
    """The description of a trial to run. A trial that has been started before is continued."""

    spec: Spec
    paths: RunPaths
    """Paths of the search's files. The search holds the lock of the run folder."""
    trial: int
    plan: Plan
    metric: str
    baseline: float | None
    after: int = 0
    """Frame of the trial's last report that the search has received."""
    sets: tuple[str, ...] = ()
    """Overrides of the saved spec of the trial, in the form "path=value"."""
    exploit_from: int | None = None
    """Index of the trial from whose checkpoints this trial continues, or None if this trial continues from its own checkpoints."""


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial of a search ended."""

    status: Literal["finished", "stopped", "failed"]
    metrics: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    retry: bool = True
    """Whether a failed trial may be started again. `retry` is False if the spec of the trial is invalid."""
    lost: bool = False
    """Whether the cluster node of the trial was lost. A trial whose node was lost does not count as failed, and continues on another
    node."""


@dataclass(frozen=True)
class Update:
    """The progress of a trial since its previous update."""

    frame: int
    reports: tuple[tuple[int, float], ...] = ()
    """(frame, metric) for each new report of the search metric."""
    outcome: TrialOutcome | None = None


def run_trial_task(context: Context, job: TrialJob) -> None:
    """Run a trial of a search in the process of a task.

    When the tables of the trial have new rows, the message ("update", Update) is sent. The last message, also ("update", Update), contains
    the outcome of the trial.
    """
    lock, sender = SessionLock(job.paths.trial_lock(job.trial)), _ReportSender(context, job)
    try:
        with sender, job.paths.trial_log(job.trial).open("a", encoding="utf-8") as log:
            outcome = run_trial(job, context.stop, Console(file=log, width=200, highlight=False, soft_wrap=True))
    finally:
        lock.release()
    sender.report(outcome)


class _ReportSender:
    """Context manager that runs a thread, which reads the tables of a running trial and sends updates to the search."""

    def __init__(self, context: Context, job: TrialJob) -> None:
        self._context = context
        self._reports = ReportReader(job.paths, job.trial, job.spec, job.metric, job.baseline, job.after)
        self._sent, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._send_reports, name="reports", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _send_reports(self) -> None:
        while not self._ended.wait(_POLL):
            self.report()

    def report(self, outcome: TrialOutcome | None = None) -> None:
        """Send an update with new reports and the outcome. Without new rows and without an outcome, nothing is sent."""
        reports: tuple[tuple[int, float], ...] = ()
        with suppress(OSError, ValueError, KeyError):  # raised while a table is being truncated to a checkpoint
            reports = tuple(self._reports.read())
        if reports or self._reports.frame > self._sent or outcome is not None:
            self._sent = self._reports.frame
            self._context.send("update", Update(self._sent, reports, outcome))


def run_trial(job: TrialJob, stop: Stop, console: Console) -> TrialOutcome:
    """Run a trial of a search, and return the outcome of the trial. The trial writes the same files as a trial outside a search."""
    try:
        return TrialOutcome("finished", make_trial(job, stop, console).run().metrics)
    except Interrupted:
        return TrialOutcome("stopped", read_json(job.paths.trial_metrics(job.trial)) or {})
    except TrialFailed as error:
        return TrialOutcome("failed", error.metrics, str(error))
    except (SpecError, UserError) as error:
        return TrialOutcome("failed", cause=str(error), retry=False)
    except BaseException:
        return TrialOutcome("failed", cause=traceback.format_exc())


def make_trial(job: TrialJob, stop: Stop, console: Console) -> Trial:
    """Return the Trial for a job. If the trial has been started before, the Trial continues from the trial's checkpoints."""
    common: dict[str, Any] = {"plan": job.plan, "index": job.trial, "folder": job.paths, "stop": stop, "console": console}
    if job.exploit_from is not None:
        copy_checkpoints(job.paths, job.exploit_from, job.trial)
    if job.paths.trial_spec(job.trial).is_file():
        continued = read_run(job.paths, job.sets, job.trial)
        return Trial(continued.spec, resumption=continued, **common)
    return Trial(job.spec, **common)


def copy_checkpoints(paths: RunPaths, source: int, trial: int) -> None:
    """Copy the last and the best checkpoints of trial `source` to trial `trial`.

    The tables of trial `trial` are later truncated to the frames of these checkpoints. If trial `source` has finished in the meantime,
    nothing is copied, since no frames would be left to train.
    """
    from slm_lab.experiment.files import bundle as state

    files = [file for file in paths.checkpoints(source) if file.name.endswith(("ckpt-last.pt", "ckpt-best.pt"))]
    if any(state.read_header(file, check=True).get("done") for file in files):
        return
    prefix = f"{paths.stem}_t{source}_"
    for file in files:
        bundle = state.load(file)
        if "tables" in bundle:
            bundle["tables"] = None  # the positions belong to the files of the source trial
        state.save(file.with_name(f"{paths.stem}_t{trial}_{file.name.removeprefix(prefix)}"), bundle)
