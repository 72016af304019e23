"""Search: an experiment whose trials have different values of the keys in the search section of the spec."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from slm_lab.experiment.execute.executor import Executor, TaskFailed, run_task
from slm_lab.experiment.execute.local.fork_server import ensure_server
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.execute.ray.connect import connect_cluster
from slm_lab.experiment.execute.ray.local_cluster import check_installed
from slm_lab.experiment.execute.ray.ray_executor import RayExecutor
from slm_lab.experiment.files.find import checkpoint_names
from slm_lab.experiment.files.lock import ENDED, RunLock
from slm_lab.experiment.files.paths import RunPaths, new_run
from slm_lab.experiment.files.provenance import provenance
from slm_lab.experiment.files.search_state import SearchState, TrialState, best_first
from slm_lab.experiment.plan import Plan, Stop, TrialFailed, UserError, check_spec
from slm_lab.experiment.report.trial_record import TrialRecord
from slm_lab.experiment.run.experiment import Experiment, acquire_lock, cleanup_on_error
from slm_lab.experiment.run.search import confirm as confirming
from slm_lab.experiment.run.search.prepare import TrialShare, check_values_task, trial_resources
from slm_lab.experiment.run.search.proposer import make_proposer
from slm_lab.experiment.run.search.schedule import Exploit, check_evaluation, check_pbt, make_scheduler
from slm_lab.experiment.run.search.stage import SearchTable, Stage, final_metric, format_values, result_lines
from slm_lab.experiment.run.search.trial_task import TrialJob
from slm_lab.experiment.run.trial import import_analysis_modules
from slm_lab.experiment.session.resume import changed_keys, find_run, read_start_history
from slm_lab.lib.files import display_path, indented_json, replace_file
from slm_lab.lib.log import capture_notices
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.load.search_space import SearchSpace, Values
from slm_lab.spec.models.spec import Spec

if TYPE_CHECKING:
    from slm_lab.experiment.report.report_page import LiveReport
    from slm_lab.experiment.report.search_report import SearchSummary

_NOTHING = "stopped before the first trial; nothing was written"
_CHANGEABLE_KEYS = re.compile(
    r"meta\.(max_trial|search_resources\b.*|search_scheduler\b.*|search_keep|save_interval|checkpoint_frequency|stall_\w+|max_restart)"
)
"""Regular expression for the spec keys that may be changed when a search is continued."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the paths of its files, a record of each trial, and a summary."""

    paths: RunPaths
    records: list[TrialRecord]
    summary: SearchSummary


class Search(Experiment[RunPaths]):
    """A hyperparameter search, which runs trials with proposed values until meta.max_trial trials have ended.

    Several trials run concurrently. Each trial is a complete Trial with Sessions and the usual files, whose names contain the index of the
    trial. The state of the search is saved in its run folder whenever a trial begins or ends.

    Args:
        confirm: number of best trials that are trained again with new seeds and 4 Sessions each, and ranked by their new results.
        common_seeds: whether all trials use the same seeds, so that the trials differ only in their values.
    """

    def __init__(
        self,
        spec: Spec,
        plan: Plan | None = None,
        *,
        confirm: int = 0,
        common_seeds: bool = False,
        paths: RunPaths | None = None,
        state: SearchState | None = None,
        lock: RunLock | None = None,
    ) -> None:
        check_spec(spec)
        check_evaluation(spec)
        self.plan = plan or Plan()
        self.spec = spec
        self.paths, self.lock = paths, lock
        self._continued = state is not None
        self._common_seeds = common_seeds
        self._gpus = 0
        """Number of GPUs of this machine over which trials are distributed."""
        self.space = SearchSpace(self.spec)
        self.state = state or self._new_state()
        self.state.confirm = max(confirm, self.state.confirm)

    @classmethod
    def resume(cls, folder: str | Path, sets: Sequence[str] = (), plan: Plan | None = None, *, confirm: int = 0) -> Search:
        """Return a search that continues the search in a folder. Ended trials are kept, and trials that had begun are continued.

        Args: sets: "path=value" overrides of the saved spec, such as "meta.max_trial=50".

        Raises SpecError if the saved spec is invalid. Raises UserError if the folder contains no search or is in use, or if the search
        cannot be continued with the overrides `sets`.
        """
        paths = find_run(folder)
        if not paths.search_state.exists():
            missing = paths.search_state.name
            raise UserError(f"'{folder}' is not the folder of a search: it has no {missing}; train@ continues a training run")
        lock = acquire_lock(paths.lock)
        try:
            saved = load_spec(paths.spec, paths.spec_name)
            spec = load_spec(paths.spec, paths.spec_name, sets) if sets else saved
            state = SearchState.load(paths.search_state)
            _check_changes(saved, spec, state, paths)
            return cls(spec, replace(plan or Plan(), data_dir=paths.root.parent), confirm=confirm, paths=paths, state=state, lock=lock)
        except BaseException:
            lock.release()
            raise

    def run(self, stop: Stop | None = None) -> SearchResult:
        """Run the search, write its files, and return its result.

        Raises UserError or SpecError before anything is written, and TrialFailed if all trials failed. After Ctrl-C, SIGTERM or SIGHUP,
        raises Interrupted (a KeyboardInterrupt) when the Sessions have saved their state and the results so far have been analysed.
        """
        stop, folder = stop or Stop(), self.plan.data_dir if self.paths is None else self.paths.root
        with self._run_context(stop, folder, self.spec.meta.start_method, self._interrupted_message):
            result = self._run(stop)
            if all(record.status == "failed" for record in result.records):
                raise TrialFailed(f"all {len(result.records)} trials failed; the last: {result.records[-1].cause.strip()}", {})
        return result

    def _interrupted_message(self) -> str:
        return (
            _NOTHING
            if self.paths is None
            else f"interrupted; continue it with slm-lab search@{shlex.quote(str(display_path(self.paths.root)))}"
        )

    def _new_state(self) -> SearchState:
        from slm_lab.experiment.report.baseline import known_baseline

        baseline = known_baseline(self.spec.env)
        metric = self.spec.meta.search_metric or "current_return"
        return SearchState(metric, None if baseline is None else baseline.mean_return, self._common_seeds)

    def _run(self, stop: Stop) -> SearchResult:
        meta = self.spec.meta
        schedules = meta.search_scheduler is not None or meta.search_algorithm == "pbt"
        check_installed(*["ray"] * schedules, *["optuna"] * (meta.search_algorithm == "optuna"))
        self.plan = replace(self.plan, data_dir=self.plan.data_dir.absolute(), engine="processes", common_seeds=self.state.common_seeds)
        algorithm = "random" if meta.search_algorithm == "pbt" else meta.search_algorithm  # used only for the initial values
        proposer = make_proposer(self.space, algorithm, meta.random_seed)
        if self.state.proposer:
            proposer.load_state_dict(self.state.proposer)
        self._proposer = proposer
        if meta.search_algorithm == "pbt":
            check_pbt(self.spec, self.space)
        self.display = table = SearchTable(self.state.metric)
        with table, capture_notices(table.notice):
            begin = perf_counter()
            ensure_server()  # the server imports torch in the meantime
            with LocalExecutor(stall_notice=None) as here, self._prepared_executor(here, table, stop) as executor:
                self._run_stages(executor, table, stop, begin)
        return self._analyze(table, stop)

    @contextmanager
    def _prepared_executor(self, here: Executor, table: SearchTable, stop: Stop) -> Iterator[Executor]:
        """Yield the executor of the trials, for this machine or for the cluster.

        Before the executor is yielded, env and agent are built with the searched values as a check, and the resources of each trial are
        determined.
        """
        address, folder = self.plan.cluster, self.plan.data_dir if self.paths is None else self.paths.root
        self.plan = replace(self.plan, cluster=None)
        if not self._continued:
            table.print_line(f"{self.spec.name}: building env and agent with the searched values …")
        with suppress(TaskFailed):  # caused by a bug, which the trials will report
            messages = run_task(here, "the check of the builds", check_values_task, self.spec, self.plan, self._continued, stop=stop)
            self._gpus = next(int(message.content[0]) for message in messages if message.kind == "valid")
        if address is None:
            self._share = trial_resources(self.spec, self.plan, self.space.num_trials, self._gpus)
            yield here
            return
        self._gpus = 0  # Ray makes only the assigned GPUs visible to a trial
        with connect_cluster(address, folder) as joined, RayExecutor(stall_notice=None) as executor:
            table.print_line(str(joined))
            nodes, gpus = [node.cores for node in joined.nodes], sum(node.gpus for node in joined.nodes)
            self._share = trial_resources(self.spec, self.plan, self.space.num_trials, gpus * (self.plan.device != "cpu"), nodes)
            yield executor

    def _run_stages(self, executor: Executor, table: SearchTable, stop: Stop, begin: float) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        self._create_run_folder()
        table.set_log_file(self._existing_paths.search_log)
        threading.Thread(target=import_analysis_modules, daemon=True).start()
        self._print_start(table, perf_counter() - begin)
        self._search_stage(executor, table).run(stop)
        if self.state.confirm and not stop.requested:
            self._confirm_stage(executor, table, stop)

    def _create_run_folder(self) -> None:
        """Create the run folder, and save the spec in the folder. A continued search uses the existing folder.

        Raises UserError if the folder cannot be written.
        """
        made: Path | None = None
        with cleanup_on_error(self.plan.data_dir, lambda: made):
            paths = self.paths
            if paths is None:
                paths = new_run(self.plan.data_dir, self.spec.name)
                made = paths.root
            history = [] if made is not None else read_start_history(paths.spec)
            self.lock = self.lock or RunLock(paths.lock)
            paths.make_dirs()
            paths.remove_temporaries()
            start = provenance({}, "search") | ({} if made is not None else {"continues": len(self.state.trials)})
            replace_file(paths.spec, indented_json(dump_spec(self.spec.with_meta(run=[*history, start]))), sync=True)
            self.state.save(paths.search_state)
        self.paths = paths

    def _print_start(self, table: SearchTable, seconds: float) -> None:
        meta, algorithm = self.spec.meta, self.spec.meta.search_algorithm
        trials = f"{self.space.num_trials} trials ({algorithm}), {self._share.concurrent} at a time"
        sessions = f"{meta.max_session} session{'s' * (meta.max_session > 1)} × {self.spec.session_frames:,} frames"
        table.print_line(f"{self.spec.name}: {trials}, each {sessions}; random_seed {meta.random_seed}; ready after {seconds:.1f} s")
        table.print_line(f"{display_path(self._existing_paths.root)}")
        if self._continued:
            ended = sum(trial.has_ended for trial in self.state.trials)
            running = sum(not trial.has_ended and trial.frame > 0 for trial in self.state.trials)
            killed = "" if self.lock is None or self.lock.killed is None else f"the last start, {self.lock.killed}, {ENDED}; "
            table.print_line(f"continues: {killed}{ended} trials have ended, {running} continue from their checkpoints")

    def _search_stage(self, executor: Executor, table: SearchTable) -> Stage:
        state = self.state
        scheduler = make_scheduler(self.spec, self.space, [(state.trials[t], frame, metric) for t, frame, metric in state.reports])

        def propose(trial: int) -> Values | None:
            values = self._proposer.ask(trial)
            state.exhausted = values is None
            return values

        def report(trial: TrialState, frame: int, metric: float) -> None:
            state.reports.append((trial.trial, frame, metric))

        def end(trial: TrialState) -> None:
            trial.metric = final_metric(trial, state.metric)
            failed = trial.status == "failed"
            self._proposer.tell(trial.trial, None if failed else trial.metric)
            self._remove_old_checkpoints()

        return Stage(
            state.trials,
            self.space.num_trials,
            self._share.concurrent,
            self.spec.session_frames,
            executor,
            self._share.resources,
            self._job,
            self._save,
            table,
            propose=propose,
            on_report=report,
            on_end=end,
            on_exploit=lambda trial, decision: self._record_exploit(trial, decision, table),
            scheduler=scheduler,
            exhausted=state.exhausted,
        )

    def _save(self) -> None:
        self.state.proposer = self._proposer.state_dict()
        self.state.save(self._existing_paths.search_state)
        self._live_report.write_if_due()

    @cached_property
    def _live_report(self) -> LiveReport:
        from slm_lab.experiment.report.report_page import LiveReport

        return LiveReport(self._write_report)

    def _write_report(self, *, ended: bool = False) -> Path:
        from slm_lab.experiment.report.report_folder import write_search_report

        return write_search_report(self._existing_paths, self.spec, self.state, ended=ended)

    def _record_exploit(self, trial: TrialState, decision: Exploit, table: SearchTable) -> None:
        exploit = {"trial": trial.trial, "frame": trial.frame, "source": decision.source, "values": decision.values}
        self.state.exploits.append(exploit)
        new = format_values(decision.values)
        table.print_line(f"trial {trial.trial} continues from trial {decision.source} at frame {trial.frame:,} with {new}")

    def trial_spec(self, values: Values) -> Spec:
        """Return the spec of a trial with the given values of the searched keys.

        If meta.eval_episodes is "auto", it is replaced by 0, since trials are compared and stopped early by their training rows.
        """
        spec = self.space.trial_spec(values)
        if not spec.meta.evaluates_by_default:
            return spec
        return spec.with_meta(eval_episodes=0)

    def _job(self, trial: TrialState, slot: int) -> TrialJob:
        after = max((frame for index, frame, _ in self.state.reports if index == trial.trial), default=0)
        spec, state = self.trial_spec(trial.values), self.state
        sets: tuple[str, ...] = ()
        if self.spec.meta.search_algorithm == "pbt":
            after = min(after, trial.frame)
            spec = spec.with_meta(save_interval=0.0)
            sets = tuple(f"{key}={json.dumps(value)}" for key, value in trial.values.items())
        plan = self._plan_of(self._share, slot)
        return TrialJob(spec, self._existing_paths, trial.trial, plan, state.metric, state.baseline, after, sets, trial.take_over)

    def _plan_of(self, share: TrialShare, slot: int) -> Plan:
        """Return the plan of a trial. Trials on this machine are distributed over the GPUs of this machine."""
        return replace(self.plan, jobs=share.sessions, first_gpu=slot % self._gpus if self._gpus and share.gpus else 0)

    def _confirm_stage(self, executor: Executor, table: SearchTable, stop: Stop) -> None:
        """Train the best trials of the search again with different seeds."""
        state = self.state
        if state.confirm_seed is None:
            state.confirm_seed = confirming.fresh_seed(self.spec.meta.random_seed)
        chosen = confirming.add_confirmations(best_first(state.trials), state.confirm, state.confirmations)
        if not chosen:
            return
        confirmed = confirming.confirmation_spec(self.spec, state.confirm_seed)
        share = trial_resources(confirmed, self.plan, len(chosen), int(self._share.gpus > 0), self._share.nodes)
        runs = confirming.create_run_folder(self._existing_paths, confirmed)
        table.print_line(f"confirming {len(chosen)} trials: {confirmed.meta.max_session} sessions each, random_seed {state.confirm_seed}")

        def job(trial: TrialState, slot: int) -> TrialJob:
            spec = confirming.confirmation_spec(self.trial_spec(trial.values), state.confirm_seed or 0)
            plan = replace(self._plan_of(share, slot), common_seeds=True)
            return TrialJob(spec, runs, trial.trial, plan, state.metric, state.baseline)

        def end(trial: TrialState) -> None:
            trial.metric = final_metric(trial, state.metric)

        lock = RunLock(runs.lock)
        try:
            stage = Stage(
                chosen,
                len(chosen),
                share.concurrent,
                confirmed.session_frames,
                executor,
                share.resources,
                job,
                self._save,
                table,
                on_end=end,
                exhausted=True,
            )
            stage.run(stop)
        finally:
            lock.release()

    def _remove_old_checkpoints(self) -> None:
        """Remove the checkpoints of all ended trials that are not among the best trials (meta.search_keep)."""
        keep = self.spec.meta.search_keep
        if keep == "all":
            return
        best = {trial.trial for trial in best_first(self.state.trials)[: max(keep, self.state.confirm)]}
        for trial in self.state.trials:
            if trial.has_ended and trial.trial not in best:
                for file in self._existing_paths.checkpoints(trial.trial):
                    file.unlink(missing_ok=True)

    def records(self) -> list[TrialRecord]:
        """Return a record of each trial of the search."""
        from slm_lab.experiment.report.search_report import search_records

        return search_records(self.state, self._existing_paths, self.spec.meta.random_seed)

    def _analyze(self, table: SearchTable, stop: Stop) -> SearchResult:
        from slm_lab.experiment.report.report_page import try_write_report
        from slm_lab.experiment.report.search_report import write_search

        paths = self._existing_paths
        for lock in (path for root in (paths.root, paths.confirmation) for path in root.glob(".lock_*")):
            lock.unlink(missing_ok=True)  # remove the locks of trials and Sessions, which have ended
        records = self.records()
        with capture_notices(table.notice):
            summary = write_search(paths, self.spec, records, self.state.metric)
            report = try_write_report(partial(self._write_report, ended=True))
        for line in result_lines(self.state, summary):
            table.print_line(line)
        root = display_path(paths.root)
        if report is not None:
            table.print_line(f"open {display_path(report)}")
        if paths.best_spec in summary.files:
            table.print_line(f"spec of the best trial: {display_path(paths.best_spec)}")
        table.print_line(f"all files: {root}")
        for line in next_commands(self.state, paths):
            table.print_line(line)
        unfinished = not all(trial.has_ended for trial in [*self.state.trials, *self.state.confirmations])
        if stop.requested and (unfinished or len(records) < self.space.num_trials):
            raise KeyboardInterrupt
        return SearchResult(paths, records, summary)


def next_commands(state: SearchState, paths: RunPaths) -> list[str]:
    """Return lines with the commands that can be used after a search, to play the best trial and to confirm the best trials."""
    ended, root = best_first(state.trials), display_path(paths.root)
    playable = any(checkpoint_names(paths, trial=trial.trial) for trial in ended)
    play = [f"play it:   slm-lab enjoy@{root}"] if playable else []
    return [*play, f"confirm:   slm-lab search@{root} --confirm 3"] if ended and not state.confirm else play


def _check_changes(saved: Spec, spec: Spec, state: SearchState, paths: RunPaths) -> None:
    """Raise UserError if a key was changed that a continued search must keep, or if meta.max_trial is below the number of trials so far."""
    changes = changed_keys(saved, spec)
    problems = [f"{path}: {old} → {new}" for path, (old, new) in changes.items() if not _CHANGEABLE_KEYS.fullmatch(path)]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise UserError(f"{paths.root}: the search has begun and cannot be continued with another value of:{listed}\nstart a new search")
    if "meta.max_trial" in changes and spec.meta.max_trial < len(state.trials):
        known = len(state.trials)
        raise UserError(f"meta.max_trial={spec.meta.max_trial}: the search has {known} trials already; expected {known} or more")
