"""Trial: run the Sessions of one spec concurrently, then compute metrics and draw graphs."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slm_lab.experiment.events import Emit, Event, Progress, SessionEnded
from slm_lab.experiment.execute.local.fork_server import ensure_server, start_method
from slm_lab.experiment.execute.local.interrupt import restore_handlers
from slm_lab.experiment.execute.local.user_code import convert_build_errors, os_exit_raises
from slm_lab.experiment.files.lock import RunLock
from slm_lab.experiment.files.paths import RunPaths, file_stem, new_run
from slm_lab.experiment.files.provenance import data_digest, provenance
from slm_lab.experiment.files.storage import StoredPath
from slm_lab.experiment.files.trackers import wait_for_trackers
from slm_lab.experiment.plan import Interrupted, Plan, Stop, TrialFailed, UserError, check_spec
from slm_lab.experiment.report.progress import ProgressDisplay, format_duration, format_number, is_number
from slm_lab.experiment.run.engine import ENGINES, choose_engine, failures, monitor_progress
from slm_lab.experiment.run.experiment import Experiment, acquire_lock, cleanup_on_error
from slm_lab.experiment.run.sessions import SessionsJob
from slm_lab.experiment.session.resume import ContinuedRun, continuation_messages, find_run, read_run
from slm_lab.experiment.training.observers.base import ObserverFactory, check_factories
from slm_lab.experiment.training.resolve import complete_spec
from slm_lab.lib.files import display_path, indented_json, replace_file
from slm_lab.lib.log import capture_notices
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import Spec

if TYPE_CHECKING:
    import pandas as pd

    from slm_lab.experiment.deploy.load import LoadedAgent
    from slm_lab.experiment.files.sink import CheckpointKind
    from slm_lab.experiment.report.report_page import LiveReport
    from slm_lab.experiment.report.run import Run


class TrialResult(dict[str, Any]):
    """The metrics of a trial as a dict (the content of the trial's metrics file), with access to the files of the run.

    >>> result = Trial(spec).run()
    >>> result["strength"], result.train.groupby("session").total_reward.last(), result.paths.root
    >>> action, state = result.agent().act(obs)

    Attributes:
        metrics: the metrics as a dict.
        paths: paths of the run's files.
        trial: index of the trial.
    """

    def __init__(self, metrics: dict[str, Any], paths: RunPaths, trial: int = 0) -> None:
        super().__init__(metrics)
        self.metrics, self.paths, self.trial = metrics, paths, trial

    def __repr__(self) -> str:
        """Return a text with the run folder and the metrics that are not None, one metric per line."""
        defined = {name: value for name, value in self.metrics.items() if value is not None}
        width = max(map(len, defined), default=0)
        shown = (format_number(value) if is_number(value) else value for value in defined.values())
        lines = (f"  {name:<{width}}  {value}" for name, value in zip(defined, shown, strict=True))
        return "\n".join([f"TrialResult in {self.paths.root}", *lines])

    @cached_property
    def run(self) -> Run:
        """The content of the run folder, as returned by `load_run`."""
        from slm_lab.experiment.report.run import Run

        return Run(self.paths, self.trial)

    @property
    def train(self) -> pd.DataFrame:
        """The training rows of all Sessions. The first columns are session and policy, and the other columns are those of the CSV files."""
        return self.run.train

    @property
    def eval(self) -> pd.DataFrame:
        """The evaluation rows of all Sessions, in the same format as the training rows. The DataFrame is empty if there were no
        evaluations."""
        return self.run.eval

    def agent(self, session: int | None = None, which: CheckpointKind = "best", policy: str | None = None) -> LoadedAgent:
        """Load the trained agent of a Session, by default of the Session with the best weights. Raises UserError (see load_agent).

        Args: policy: name of the policy in agent.policies, which is required if there are several policies.
        """
        from slm_lab.experiment.deploy.load import load_agent

        return load_agent(self.paths.root, which, session, policy=policy)


_NOTHING = "stopped before the first step; nothing was written"


class Trial(Experiment[RunPaths]):
    """A trial, which runs the Sessions of one spec and then writes the results.

    Args:
        data_dir: folder in which the run folder is created, unless `plan` is given.
        plan: mode, data folder and resources.
        index: index of the trial in the search to which the trial belongs, or 0.
        observers: subclasses of slm_lab.Observer (or functions that return an Observer), in addition to those of meta.observers. If there
            are several Sessions, the observers must be importable, since each Session then runs in a separate process.
        resumption: the run that the trial continues, or None for a new run.
        lock: the lock of the run folder if the caller has acquired it already, else None.
        folder: run folder to which the trial writes its files, if the trial belongs to a search. The search has created and locked the
            folder.
        stop: stop request with which the caller can end the trial early.
        console: where messages are printed.
    """

    def __init__(
        self,
        spec: Spec,
        data_dir: str | Path = "data",
        plan: Plan | None = None,
        *,
        index: int = 0,
        observers: Sequence[ObserverFactory] = (),
        resumption: ContinuedRun | None = None,
        lock: RunLock | None = None,
        folder: RunPaths | None = None,
        stop: Stop | None = None,
        console: Console | None = None,
    ) -> None:
        check_spec(spec)
        self.plan = plan or Plan(data_dir=Path(data_dir))
        sent = (self.plan.engine or choose_engine(spec, self.plan)) != "inline"
        self.plan = replace(self.plan, observers=(*self.plan.observers, *check_factories(observers, sent=sent)))
        self.spec, self.index = _spec_for_mode(spec, self.plan), index
        self._resumption, self.lock, self._folder = resumption, lock, folder
        self._stop, self._console = stop or Stop(), console
        self._data_dir = self._shown = Path()
        """_data_dir is the absolute path of the data folder. _shown is the path that is shown to the user: the data folder or, once the run
        folder exists, the run folder."""

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        sets: Sequence[str] = (),
        plan: Plan | None = None,
        *,
        observers: Sequence[ObserverFactory] = (),
        stop: Stop | None = None,
        console: Console | None = None,
    ) -> Trial:
        """Return a trial that continues the run in a folder. Finished Sessions are kept. Other Sessions are continued or started again.

        Args: sets: "path=value" overrides of the saved spec, such as "env.max_frame=2e6". Most keys cannot be changed when a run is
            continued.

        Raises SpecError or UserError (see `read_run` and RunLock).
        """
        paths = find_run(folder)
        lock = acquire_lock(paths.lock)
        try:
            continued = read_run(paths, sets)
            plan = replace(plan or Plan(), data_dir=paths.root.parent)
            return cls(continued.spec, plan=plan, observers=observers, resumption=continued, lock=lock, stop=stop, console=console)
        except BaseException:
            lock.release()
            raise

    def run(self) -> TrialResult:
        """Run all Sessions, write the results, and return the metrics, with access to tables, files and agents.

        Raises SpecError or UserError before anything is written, and TrialFailed after the analysis if a Session failed. After Ctrl-C,
        SIGTERM or SIGHUP, raises Interrupted (a KeyboardInterrupt) when all Sessions have saved their state and the graphs are drawn. If a
        signal arrives after all Sessions have ended normally, only the analysis is shortened.
        """
        stop, folder = self._stop, self.plan.data_dir if self._resumption is None else self._resumption.paths.root
        self._data_dir = self.plan.data_dir.absolute()  # an env may change the working directory
        self._shown = self.plan.data_dir if self._resumption is None else display_path(self.plan.data_dir)
        with self._run_context(stop, folder, self.spec.meta.start_method, self._interrupted_message), os_exit_raises():
            if self.plan.storage is not None and self._engine != "ray":
                only = "only a run on a cluster writes its checkpoints to this URL; remove --storage, or add --cluster"
                raise UserError(f"--storage {self.plan.storage}: {only}")
            if self._needs_processes:
                ensure_server()  # the server imports torch in the meantime
            metrics, ends = self._run(stop)
        ended = [end for end in ends if end.status != "stopped"]
        if stop.requested and len(ended) < self.spec.meta.max_session:  # some Sessions were stopped or did not begin
            raise Interrupted(_NOTHING if self.paths is None else "", stop.number)
        return TrialResult(metrics, self._existing_paths, self.index)

    def _interrupted_message(self) -> str:
        if self.paths is None:
            return _NOTHING
        if self.plan.mode == "dev":
            return f"interrupted before all checks were made; what was written is in {self._shown}"
        return f"interrupted; continue it with slm-lab train@{shlex.quote(str(self._shown))}"

    @property
    def _engine(self) -> str:
        return self.plan.engine or choose_engine(self.spec, self.plan)

    @property
    def _needs_processes(self) -> bool:
        """Whether it is certain, before the Sessions are built, that this trial starts child processes."""
        sampler, left = self.spec.meta.sampler, self._resumption is None or bool(self._resumption.sessions_to_run)
        workers = sampler is not None and not sampler.serial_mode
        return left and self._engine != "ray" and (self._engine != "inline" or workers or self.spec.env.backend == "async")

    def _run(self, stop: Stop) -> tuple[dict[str, Any], list[SessionEnded]]:
        sessions, engine = self.spec.meta.max_session, self._engine
        concurrent = self.plan.concurrent_sessions(self.spec.meta)
        display = ProgressDisplay(sessions, self.spec.session_frames, self._console, policies=self.spec.policy_names, concurrent=concurrent)
        self.display = display
        with display, capture_notices(display.notice):
            display.start(self.spec.name)
            with monitor_progress(self.spec, stop, display) as beat, convert_build_errors(self.spec, stop):
                self.spec = complete_spec(self.spec, beat)
            restore_handlers()
            if stop.requested:
                return {}, []
            if engine != "inline":
                threading.Thread(target=import_analysis_modules, daemon=True).start()
            begin = perf_counter()
            ends = self._run_sessions(engine, display, stop)
            seconds = perf_counter() - begin
        metrics = self._analyze(ends, display, stop, seconds)
        if causes := metrics.get("failures") or failures(ends):
            several = f"{len(causes)} of {sessions} sessions failed: {', '.join(map(str, causes))}"
            raise TrialFailed(several if sessions > 1 else f"session 0 failed: {next(iter(causes.values()))}", metrics)
        return metrics, ends

    def _run_sessions(self, engine: str, display: ProgressDisplay, stop: Stop) -> list[SessionEnded]:
        """Run the Sessions of the trial, and return how they ended. If a run is continued, only the unfinished Sessions are run."""
        continued = self._resumption
        job = SessionsJob(
            self.spec, self.plan, self.index, partial(self._create_run_folder, display), self._make_event_handler(display), stop
        )
        if continued is None:
            return ENGINES[engine](job)
        ends = [SessionEnded(index, "done") for index in continued.starts if index not in continued.sessions_to_run]
        for end in ends:
            display(end)
        if not continued.sessions_to_run:
            self._create_run_folder(display, None)
            return ends
        return [*ends, *ENGINES[engine](replace(job, sessions=tuple(continued.sessions_to_run), resumed=continued.paths))]

    def _make_event_handler(self, display: ProgressDisplay) -> Emit:
        """Return a function that displays events and writes the HTML page of the run from time to time.

        In a trial of a search, the function only displays events, since the search writes the page.
        """
        live: LiveReport | None = None

        def emit(event: Event) -> None:
            nonlocal live
            display(event)
            if isinstance(event, Progress) and self.paths is not None and self._folder is None:
                live = live or self._live_report(self.paths)
                live.write_if_due()

        return emit

    def _live_report(self, paths: RunPaths) -> LiveReport:
        from slm_lab.experiment.report.report_page import LiveReport, write_trial_report

        return LiveReport(partial(write_trial_report, paths, self.index))

    def _create_run_folder(self, display: ProgressDisplay, choices: Mapping[str, str | int] | None) -> RunPaths:
        """Create the run folder, save the spec in the folder, and return the paths of the run. A continued run uses the existing folder.

        If the folder cannot be written, UserError is raised, and a new folder is removed.

        Args: choices: see SessionParts.chosen_settings, or None if no Session is left to run.
        """
        continued = self._resumption
        start = [] if choices is None else [provenance({**choices, "start_method": start_method()}, self.plan.mode)]
        if start and (digest := data_digest(self.spec.meta.demonstrations)) is not None:
            start[0]["demonstrations_sha256"] = digest
        if continued is not None and start:
            changed = {path: {"from": old, "to": new} for path, (old, new) in continued.changes.items()}
            starts = {str(index): session.to_dict() for index, session in continued.starts.items()}
            start[0] |= {"continues": starts} | ({"changed": changed} if changed else {})
        if continued is None and start and self.plan.storage is not None:
            name = f"{file_stem(self.spec.name)}_{token_hex(8)}"  # unique even for runs on different machines
            start[0]["checkpoints"] = str(StoredPath(self.plan.storage) / name)
        history = continued.history if continued is not None else []
        saved = indented_json(dump_spec(self.spec.with_meta(run=[*history, *start])))
        made: Path | None = None
        with cleanup_on_error(self.plan.data_dir, lambda: made):
            paths = self._folder
            if continued is not None and paths is None:
                paths = continued.paths
                paths.make_dirs()
                paths.remove_temporaries()
            elif paths is None:
                paths = new_run(self._data_dir, self.spec.name)
                made = paths.root
                self.lock = RunLock(paths.lock)
            spec_files = [paths.trial_spec(self.index), *([paths.spec] if self._folder is None else [])]
            for file in spec_files if choices is not None else ():
                replace_file(file, saved, sync=True)
        self._shown /= paths.root.name
        self.paths = paths
        if self._folder is None:  # the output of a trial of a search is already its log
            display.set_log_file(paths.trial_log(self.index))
        self._print_start(paths, display)
        return paths

    def _print_start(self, paths: RunPaths, display: ProgressDisplay) -> None:
        """Print what is run. If a run is continued, also print the state in which the last start has left the run."""
        continued, meta = self._resumption, self.spec.meta
        sessions = f"{meta.max_session} session{'s' * (meta.max_session > 1)}{' of one net' if meta.distributed else ''}"
        of_each = f"{self.spec.policies} policies × " if self.spec.policies > 1 else ""
        display.begin(f"{self.spec.name}: {sessions} × {of_each}{self.spec.session_frames:,} frames, random_seed {meta.random_seed}")
        if isinstance(paths.checkpoint_dir, StoredPath):
            display.print_line(f"checkpoints in {paths.checkpoint_dir}")
        if continued is not None:
            display.print_line(f"continues {self._shown}")
            for line in continuation_messages(continued, self.lock.killed if self.lock is not None else None):
                display.print_line(f"  {line}")

    def _analyze(self, ends: list[SessionEnded], display: ProgressDisplay, stop: Stop, seconds: float) -> dict[str, Any]:
        """Compute the metrics of the Sessions that did not fail, draw all graphs, and print and return the metrics.

        Args: seconds: run time of the Sessions in seconds.
        """
        paths = self.paths
        if paths is None:
            return {}
        from slm_lab.experiment.report.analyze import analyze_trial
        from slm_lab.experiment.report.report_page import try_write_report, write_trial_report

        with capture_notices(display.notice):
            metrics = analyze_trial(self.spec, paths, self.index, failed=failures(ends), stop=stop)
            report = try_write_report(partial(write_trial_report, paths, self.index, ended=True)) if metrics else None
        if metrics:
            display.print_line(_headline(metrics, self.spec, seconds))
            for line in _summary(metrics, self.spec.trial_frames):
                display.print_line(f"  {line}")
        if metrics.get("sessions") and report is not None:
            display.print_line(f"open {self._shown / report.relative_to(paths.root)}")
        display.print_line(f"all files: {self._shown}")
        for line in self._next_commands(metrics):
            display.print_line(line)
        with capture_notices(display.notice):
            wait_for_trackers(paths, self.index, self.spec.meta.track, range(self.spec.meta.max_session * self.spec.policies))
        return metrics

    def _next_commands(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return lines with the commands that are useful after this run. In mode dev, the returned list is empty."""
        shown, status = shlex.quote(str(self._shown)), metrics.get("status")
        if self.plan.mode == "dev" or status not in ("done", "failed", "stopped"):
            return []
        again = [f"try again: slm-lab train@{shown}"] if status == "failed" else []
        if status == "stopped":
            return [] if self._console is not None else [f"continue:  slm-lab train@{shown}"]
        if not metrics["sessions"] or self._console is not None:  # no commands in a search or study, which prints its own
            return again
        lines = [*again, f"play it:   slm-lab enjoy@{shown}"]
        if status == "done":
            lines.append(f"train on:  slm-lab train@{shown} --set env.max_frame={2 * self.spec.env.max_frame}")
            if self.spec.meta.max_session == 1 and self.spec.policies == 1:
                lines += ["one seed shows little: results differ between seeds; train three more:", f"  {_FOUR_SESSIONS.format(shown)}"]
        return lines


_FOUR_SESSIONS = "slm-lab train@{} --set meta.max_session=4"


def _headline(metrics: dict[str, Any], spec: Spec, seconds: float) -> str:
    """Return the first line of the results of a trial, with the current return and the run time."""
    from slm_lab.experiment.report.analyze import return_text

    frame = metrics["frame"]
    if not metrics["sessions"]:
        return f"all sessions failed after {format_duration(seconds)}"
    limit = spec.meta.max_seconds
    timed_out = metrics["status"] == "done" and limit is not None and (frame or 0) < spec.trial_frames
    ended = (
        f"; ended after {format_number(limit)} s of training (meta.max_seconds), before {spec.trial_frames:,} frames" if timed_out else ""
    )
    stopped = "; stopped early" if metrics["status"] == "stopped" else ""
    return f"{return_text(metrics, spec)} after {frame or 0:,} frames, {format_duration(seconds)}{ended}{stopped}"


def _summary(metrics: dict[str, Any], max_frame: int) -> list[str]:
    """Return lines with all defined metrics except the current return, two metrics per line."""
    shown = {name: value for name, value in metrics.items() if is_number(value) and not name.startswith("current_return")}
    cells = [f"{name:<20}{format_number(value) + (f'/{max_frame}' if name == 'frame' else ''):<16}" for name, value in shown.items()]
    return ["".join(cells[at : at + 2]).rstrip() for at in range(0, len(cells), 2)]


def _spec_for_mode(spec: Spec, plan: Plan) -> Spec:
    """Return the spec that is run. In mode dev, the spec is changed to a single Session."""
    return spec.with_meta(max_session=1) if plan.mode == "dev" else spec


def import_analysis_modules() -> None:
    """Import the modules that draw graphs, while the Sessions still run."""
    report = "slm_lab.experiment.report"
    for module in (f"{report}.analyze", f"{report}.report_page", "plotly.io", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        import_module(module)
