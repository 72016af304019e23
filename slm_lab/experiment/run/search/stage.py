"""Run the trials of a search concurrently, and display the trials in a live table or, without a terminal, in plain lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from slm_lab.experiment.execute.executor import Executor, Message, Resources, Task, TaskDied
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.report.progress import LiveTable, format_duration, format_number
from slm_lab.experiment.run.experiment import ATTEMPTS, STOP_SECONDS, TaskStart, run_plan
from slm_lab.experiment.run.search.schedule import Decision, Exploit, Scheduler
from slm_lab.experiment.run.search.trial_task import TrialJob, TrialOutcome, Update, get_metric, run_trial_task
from slm_lab.experiment.run.sessions import SAVING
from slm_lab.lib.text import format_table, last_line, wrap_paragraph
from slm_lab.spec.load.search_space import Values
from slm_lab.spec.report import SpecError

if TYPE_CHECKING:
    from slm_lab.experiment.report.search_report import SearchSummary
    from slm_lab.experiment.report.trial_record import TrialRecord


_MOST_ROWS = 16


@dataclass
class Totals:
    """The trials of a search, with counts by status and the estimated remaining time."""

    trials: list[TrialState]
    """All trials of the search so far."""
    target: int
    """Number of trials that were requested."""
    concurrent: int
    """Maximum number of trials that run concurrently."""
    max_frame: int

    def count(self, *statuses: str) -> int:
        return sum(trial.status in statuses for trial in self.trials)

    @property
    def best(self) -> TrialState | None:
        """The finished trial with the best metric, or None if no trial has finished."""
        finished = [trial for trial in self.trials if trial.status == "finished" and trial.metric is not None]
        return max(finished, key=lambda trial: trial.metric or 0.0, default=None)

    def seconds_left(self) -> float | None:
        """Return the estimated remaining time of the search in seconds, or None if the time is unknown.

        The estimate is based on the durations of ended trials or, before a trial has ended, on the progress of running trials.
        """
        ended = [trial.seconds for trial in self.trials if trial.has_ended]
        begun = [trial for trial in self.trials if trial.status == "running" and trial.frame > 0]
        whole = [trial.seconds * self.max_frame / trial.frame for trial in begun]
        if not ended and not whole:
            return None
        each = sum(ended) / len(ended) if ended else sum(whole) / len(whole)
        left = [max(0.0, min(seconds, 2.0 * each) - trial.seconds) for trial, seconds in zip(begun, whole, strict=True)]
        waiting = max(0, self.target - self.count("finished", "stopped", "failed") - len(begun))
        return (sum(left) + waiting * each) / max(1, min(self.concurrent, waiting + len(begun)))


class SearchTable(LiveTable):
    """Live table that displays the running trials of a search, the counts of trials, the best trial so far with its values, and the
    remaining time."""

    totals: Totals
    """The counts of the current trials, which are set by the Stage that runs the trials."""

    def __init__(self, metric: str, console: Console | None = None) -> None:
        super().__init__(console)
        self.metric = metric

    def print_trial_end(self, trial: TrialState) -> None:
        """Print the result of a trial that has ended."""
        how = {"finished": "", "stopped": f" stopped at frame {trial.frame:,}", "failed": " failed"}.get(trial.status, f" {trial.status}")
        result = "" if trial.status == "failed" else f"  {self.metric} {format_number(trial.metric)}"
        cause = f": {last_line(trial.cause)}" if trial.status == "failed" and trial.cause.strip() else ""
        self.print_end(f"trial {trial.trial}{how}{cause}{result}  {format_values(trial.values)}  {format_duration(trial.seconds)}")
        self.show(now=True)

    def active_runs_table(self) -> Table:
        table, max_frame = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True), self.totals.max_frame
        for name in ("trial", "frame", self.metric, "time"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("values", overflow="ellipsis", no_wrap=True, ratio=1)  # shortened if space is short, unlike the numbers
        running = [trial for trial in self.totals.trials if trial.status == "running"]
        for trial in running[:_MOST_ROWS]:
            frame = f"{trial.frame:,}/{max_frame:,}"
            table.add_row(str(trial.trial), frame, format_number(trial.metric), format_duration(trial.seconds), format_values(trial.values))
        return table

    def summary(self) -> str:
        """Return a line with the counts of trials, the remaining time, and the best trial."""
        totals = self.totals
        counts = {name: totals.count(name) for name in ("running", "stopped", "failed")}
        done = totals.count("finished", "stopped", "failed")
        shown = (f"{count} {name}" for name, count in counts.items() if count or name == "running")
        left, best = totals.seconds_left(), totals.best
        eta = "-" if left is None else format_duration(left)
        line = f"{', '.join([f'{done}/{totals.target} trials done', *shown])}, eta {eta}"
        if best is None:
            return f"{line}; no trial has finished yet"
        return f"{line}; best {self.metric} {format_number(best.metric)}: trial {best.trial}  {format_values(best.values)}"


def result_lines(state: SearchState, summary: SearchSummary) -> list[str]:
    """Return the last lines that a search prints: the counts of trials, the best trials, and the importance of the searched keys."""
    records = summary.ranked
    counts = {name: sum(record.status == name for record in records) for name in ("finished", "stopped", "failed", "running")}
    seconds = sum(record.seconds for record in records)
    counts["interrupted"] = counts.pop("running")  # the search has ended, so no trial is running
    lines = [f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)}; {format_duration(seconds)} of training"]
    lines += _ranking_lines([record for record in records if record.metric is not None][: max(3, state.confirm)], state.metric)
    if summary.importance is not None:
        shares = sorted(summary.importance.shares.items(), key=lambda item: -item[1])
        method = f"PED-ANOVA, best {summary.importance.best} of {summary.importance.trials} trials"
        text = f"importance ({method}): {', '.join(f'{key} {share:.0%}' for key, share in shares)}"
        lines += wrap_paragraph(text).splitlines()
    return lines


def _ranking_lines(records: Sequence[TrialRecord], metric: str) -> list[str]:
    """Return the lines of a table with the best trials and their values."""
    if not records:
        return []
    confirmed = any(record.confirmed is not None for record in records)
    keys = list(dict.fromkeys(key for record in records for key in record.values))
    short = {key: _short_key(key, dict.fromkeys(keys)) for key in keys}
    head = ["trial", metric, *(["confirmed"] if confirmed else []), *short.values()]
    cells = []
    for record in records:
        values = [_value_text(record.values[key]) if key in record.values else "-" for key in keys]
        cells.append([str(record.trial), format_number(record.metric), *([_confirmed_text(record)] if confirmed else []), *values])
    return format_table([head, *cells])


def _confirmed_text(record: TrialRecord) -> str:
    interval = "" if record.confirmed_interval is None else f" [{', '.join(map(format_number, record.confirmed_interval))}]"
    return f"{format_number(record.confirmed)}{interval}"


def format_values(values: Mapping[str, Any]) -> str:
    """Return the values of searched keys as text. The path of each key is shortened to its shortest unambiguous suffix."""
    return "  ".join(f"{_short_key(key, values)} {_value_text(value)}" for key, value in values.items())


def _short_key(key: str, values: Mapping[str, Any]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        short = ".".join(parts[-count:])
        if sum(other == short or other.endswith(f".{short}") for other in values) == 1:
            return short
    return key


def _value_text(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


_SAVE_EVERY = 2.0
"""Time in seconds between two periodic saves of the state of a search. The state is also saved whenever a trial begins or ends."""


@dataclass
class Stage(Totals):
    """Runner of trials, which runs trials until `target` trials have ended or a stop is requested. New trials, with values from `propose`,
    are appended to `trials`."""

    executor: Executor
    resources: Resources
    """Resources that each trial reserves."""
    make_job: Callable[[TrialState, int], TrialJob]
    """Function that returns the TrialJob of a trial.

    `make_job` is called with the trial and its slot, which is a number below `concurrent` that no other running trial has. `make_job`
    raises SpecError if the combination of values is invalid.
    """
    save: Callable[[], None]
    """Function that saves the state of the search."""
    table: SearchTable
    propose: Callable[[int], Values | None] = lambda trial: None
    """Function that returns the values of a new trial, or None if no values are left to propose."""
    on_report: Callable[[TrialState, int, float], None] = lambda trial, frame, metric: None
    on_end: Callable[[TrialState], None] = lambda trial: None
    on_exploit: Callable[[TrialState, Exploit], None] = lambda trial, decision: None
    scheduler: Scheduler | None = None
    decisions: dict[int, Decision] = field(default_factory=dict)
    """Index of a trial that was asked to stop by the scheduler, but has not ended yet → the decision of the scheduler."""
    exhausted: bool = False
    last: dict[int, Update] = field(default_factory=dict)
    """Index of a trial that has ended, but whose process is still running → the last update of the trial, which contains its outcome."""
    _begun: dict[int, float] = field(default_factory=dict)
    """Index of a running trial → time up to which the run time of the trial has been counted."""
    _save_due: float = 0.0
    _stop: Stop = field(default_factory=Stop)

    def run(self, stop: Stop) -> None:
        """Run all trials. After a stop request, no new trial begins, and running trials save their state."""
        self._stop, self.table.totals = stop, self
        for trial in self.trials:
            if trial.status == "running":  # the trial was running when an earlier start of the search ended
                trial.status = "waiting"
        run_plan(self, self.executor, self.resources, stop)
        self.save()

    def next_task(self, slot: int) -> TaskStart[TrialState] | None:
        """Return the task of the next trial, or None if no trial is left. A trial with invalid values is not run but ends immediately."""
        while (trial := self._next_trial()) is not None:
            try:
                job = self.make_job(trial, slot)
            except SpecError as error:
                self._end_trial(trial, TrialOutcome("failed", cause=str(error), retry=False))
                continue
            trial.status = "running"
            self._begun[trial.trial] = monotonic()
            self.save()  # save before the trial writes a file
            return TaskStart(trial, f"trial {trial.trial}", run_trial_task, (job,))
        return None

    def on_stop_request(self) -> None:
        self.table.notice(SAVING)

    def update(self) -> None:
        """Save and display the state of the search."""
        self._add_run_time()
        if monotonic() >= self._save_due:
            self._save_due = monotonic() + _SAVE_EVERY
            self.save()
        self.table.show()

    def on_message(self, item: TrialState, task: Task, message: Message) -> None:
        match message:
            case Message(_, "update", (Update(outcome=None) as update,)):
                self._handle(task, item, update)
            case Message(_, "update", (Update() as update,)):
                self.last[item.trial] = update
            case Message(_, "failed", (cause,)):
                self.last[item.trial] = Update(item.frame, outcome=TrialOutcome("failed", cause=cause))

    def on_task_end(self, item: TrialState, died: TaskDied) -> None:
        cause = died.reason if died.lost else f"the process that ran the trial {died.reason}\n{died.output}".strip()
        unknown = Update(item.frame, outcome=TrialOutcome("failed", cause=cause, lost=died.lost))
        self._handle(died.task, item, self.last.pop(item.trial, unknown))

    def _next_trial(self) -> TrialState | None:
        """Return the next trial to start, or None if no trial is left. A waiting trial is preferred to a new trial."""
        for trial in self.trials:
            if trial.status == "waiting":
                return trial
        if self.exhausted or len(self.trials) >= self.target:
            return None
        values = self.propose(len(self.trials))
        if values is None:
            self.exhausted = True
            self.target = len(self.trials)
            return None
        self.trials.append(TrialState(len(self.trials), values))
        return self.trials[-1]

    def _handle(self, task: Task, trial: TrialState, update: Update) -> None:
        trial.frame = max(trial.frame, update.frame)
        trial.take_over = None
        for frame, metric in update.reports:
            trial.metric = metric
            self.on_report(trial, frame, metric)
            decision = self.scheduler.decide(trial, frame, metric) if self.scheduler is not None else None
            if decision is not None and update.outcome is None and trial.trial not in self.decisions:
                self.decisions[trial.trial] = decision
                task.stop(STOP_SECONDS)
        if update.outcome is not None:
            self._add_run_time()
            del self._begun[trial.trial]
            decision = self.decisions.pop(trial.trial, None)
            if update.outcome.status == "stopped" and isinstance(decision, Exploit):
                self._exploit(trial, decision)
                return
            if update.outcome.status == "stopped" and decision is None and self._stop.requested:
                return  # search@ will continue this trial
            self._end_trial(trial, update.outcome)

    def _exploit(self, trial: TrialState, decision: Exploit) -> None:
        """Prepare a trial to continue with the state of a better trial and with new values."""
        source = next(other for other in self.trials if other.trial == decision.source)
        if source.status == "running" and source.frame < self.max_frame:
            trial.values, trial.take_over, trial.frame = decision.values, decision.source, source.frame
            self.on_exploit(trial, decision)
        trial.status = "waiting"
        self.save()

    def _end_trial(self, trial: TrialState, outcome: TrialOutcome) -> None:
        trial.metrics = outcome.metrics
        if outcome.lost:
            trial.status = "waiting"
            self.table.print_line(f"trial {trial.trial}: {outcome.cause}; the trial continues on another node")
            self.save()
            return
        if outcome.status == "failed":
            trial.failures += 1
            trial.cause = outcome.cause
            if outcome.retry and trial.failures < ATTEMPTS:
                trial.status = "waiting"
                self.table.print_line(f"trial {trial.trial} failed and is retried: {last_line(outcome.cause) or 'unknown cause'}")
                self.save()
                return
            trial.status = "failed"
        else:
            trial.status = outcome.status
        if self.scheduler is not None:
            self.scheduler.record_end(trial)
        self.on_end(trial)
        self.save()
        self.table.print_trial_end(trial)

    def _add_run_time(self) -> None:
        now = monotonic()
        for trial in self.trials:
            if trial.trial in self._begun:
                trial.seconds += now - self._begun[trial.trial]
                self._begun[trial.trial] = now


def final_metric(trial: TrialState, name: str) -> float | None:
    """Return the search metric of a trial that has ended, from the metrics of the trial.

    If the metrics of the trial do not contain the search metric, the metric of the trial's last report is returned.
    """
    value = get_metric(trial.metrics, name)
    return trial.metric if value is None else value
