"""Run a study: train the missing runs, several concurrently, and then write the comparison of all runs."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from slm_lab.experiment.execute.executor import Executor, Message, Resources, Target, Task, TaskDied, TaskFailed, run_task
from slm_lab.experiment.execute.local.fork_server import ensure_server
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.files.lock import ENDED
from slm_lab.experiment.files.paths import RunPaths, StudyPaths, StudyRunFolder, new_folder, run_name, study_start_info
from slm_lab.experiment.plan import Plan, Stop, TrialFailed, UserError, count_session_processes
from slm_lab.experiment.report.report_page import LiveReport, try_write_report
from slm_lab.experiment.report.run import last_row, load_run
from slm_lab.experiment.report.study_result import ResultRun, write_result
from slm_lab.experiment.run.experiment import ATTEMPTS, Experiment, TaskStart, acquire_lock, cleanup_on_error, run_plan
from slm_lab.experiment.run.sessions import SAVING
from slm_lab.experiment.run.study.study_run import (
    RunJob,
    check_builds_task,
    describe_changes,
    find_adopted_runs,
    has_failed,
    run_key,
    run_study_task,
)
from slm_lab.experiment.run.study.study_table import RunState, StudyTable
from slm_lab.lib.files import display_path, indented_json, replace_file, with_checksum
from slm_lab.lib.limits import cores
from slm_lab.lib.log import capture_notices
from slm_lab.lib.text import last_line
from slm_lab.spec.load.study_file import differing_paths
from slm_lab.spec.models.spec import SPEC_VERSION
from slm_lab.spec.models.study import Study, StudyRun

VERSION = 1


class _RunLimits(NamedTuple):
    """An executor for the runs of a study, and the resources that the runs may use."""

    executor: Executor
    concurrent: int
    """Maximum number of runs that are trained concurrently."""
    jobs: int | None
    """Maximum number of concurrent Sessions per run."""
    resources: Resources
    gpus: int
    """Number of GPUs of this machine over which the runs are distributed, or 0 if there are no GPUs, or if the cluster assigns the GPUs."""


@dataclass
class _Planner:
    """The Planner of a study, which starts the missing runs and records how the runs end."""

    states: list[RunState]
    folders: Mapping[tuple[str, int], StudyRunFolder]
    """Key of a run (see run_key) → folder of the run."""
    paths: StudyPaths
    table: StudyTable
    runner: _RunLimits
    target: Target
    device: str | None
    live: LiveReport
    """LiveReport that writes the HTML page of the study from time to time."""
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a run whose task has reported the end of the run → (status, cause)."""

    @property
    def concurrent(self) -> int:
        return self.runner.concurrent

    def next_task(self, slot: int) -> TaskStart[RunState] | None:
        state = next((state for state in self.states if state.status == "waiting"), None)
        if state is None:
            return None
        folder, gpus = self.folders[run_key(state.run)], self.runner.gpus
        state.status, state.start_time, state.share = "running", perf_counter(), self._trained_fraction(state.run)
        state.share_at_start = state.share
        name = folder.root.name
        files = folder, self.paths.result(name), self.paths.lock_of(name)
        job = RunJob(state.run.spec, *files, self.device, slot % gpus if gpus else 0, self.runner.jobs)
        return TaskStart(state, state.run.name, self.target, (job,))

    def on_message(self, item: RunState, task: Task, message: Message) -> None:
        match message:
            case Message(_, "outcome", (status, cause)):
                self.outcomes[item.run.name] = status, cause
            case Message(_, "failed", (cause,)):
                self.outcomes[item.run.name] = "failed", cause

    def on_task_end(self, item: RunState, died: TaskDied) -> None:
        ended = "stopped" if died.lost else "failed", f"the process of the run {died.reason}\n{died.output}".strip()
        outcome = self.outcomes.pop(item.run.name, None)
        if died.lost and outcome is None:
            self.table.print_line(f"{died.description}; the run continues on another node")
        self._end_run(item, *(outcome or ended))

    def update(self) -> None:
        for state in self.states:
            if state.status == "running":
                state.share = max(state.share, self._trained_fraction(state.run))
        self.table.show()
        self.live.write_if_due()

    def on_stop_request(self) -> None:
        self.table.notice(SAVING)

    def _end_run(self, state: RunState, status: str, cause: str) -> None:
        state.cause = cause
        if status == "done":
            state.status, state.share = "done", 1.0
            state.seconds = perf_counter() - state.start_time if state.share_at_start == 0.0 else None
        elif status == "stopped":
            state.status = "waiting"
            return
        else:
            state.failures += 1
            state.status = "failed" if state.failures >= ATTEMPTS or status == "invalid" else "waiting"
            state.share = 0.0
            if state.status == "waiting":
                return self.table.print_line(f"{state.run.name}: failed and is retried: {last_line(cause) or 'unknown cause'}")
        self.table.print_run_end(state)

    def _trained_fraction(self, run: StudyRun) -> float:
        """Return the fraction of a run's frames that have been trained, summed over all Sessions of the run."""
        folder = self.folders[run_key(run)]
        starts = folder.run_folders() if folder.root.is_dir() else []
        frames = _trained_frames(starts[-1]) if starts and not has_failed(starts[-1]) else 0
        meta = run.spec.meta
        return min(1.0, frames / (run.spec.session_frames * meta.max_session))


class StudyExperiment(Experiment[StudyPaths]):
    """The execution of a study, which trains the missing runs and compares all runs.

    Args:
        paths: paths of the study to continue, or None to create a new folder in plan.data_dir.
        adopt: patterns of finished run folders of `train`. A folder replaces the run of the study that has the same settings and the same
            seed.
        max_seeds: maximum number of seeds per entry, up to which seeds are added until all differences are decided (see
            report/decision.py), or None to add no seeds.
        target: function that the process of a run calls.
    """

    def __init__(
        self,
        study: Study,
        plan: Plan | None = None,
        *,
        paths: StudyPaths | None = None,
        adopt: Sequence[str] = (),
        max_seeds: int | None = None,
        target: Target = run_study_task,
    ) -> None:
        self.max_seeds = max_seeds
        self.study, self.plan, self.paths, self.adopt, self._target = study, plan or Plan(), paths, adopt, target
        self.states = [RunState(run) for run in study.runs]

    def run(self, stop: Stop | None = None) -> StudyPaths:
        """Run the missing runs, write the comparison, and return the paths of the study.

        Raises UserError or SpecError before anything is written, and TrialFailed at the end if a run failed. After Ctrl-C, SIGTERM or
        SIGHUP, raises Interrupted (a KeyboardInterrupt) when the current runs have saved their state.
        """
        stop, folder = stop or Stop(), self.plan.data_dir if self.paths is None else self.paths.root
        with self._run_context(stop, folder, self.study.runs[0].spec.meta.start_method, self._interrupted_message):
            self._run(stop)
            failed = [state for state in self.states if state.status == "failed"]
            if failed:
                names = "; ".join(f"{state.run.name}: {last_line(state.cause) or 'unknown cause'}" for state in failed[:3])
                raise TrialFailed(f"{len(failed)} of {len(self.states)} runs failed: {names}", {})
        return self._existing_paths

    def _interrupted_message(self) -> str:
        if self.paths is None:
            return "interrupted; nothing was written"
        words = (self.study.source, self.study.name, f"study@{display_path(self.paths.root)}")
        return f"interrupted; continue it with slm-lab {shlex.join(words)}"

    def _run(self, stop: Stop) -> None:
        study = self.study
        adopted = find_adopted_runs(self.study, self.adopt)
        concurrent, _ = self._concurrency()
        self.display = table = StudyTable(self.states, concurrent)
        with table, capture_notices(table.notice), LocalExecutor(stall_notice=None) as executor:
            ensure_server()
            if self.paths is not None:
                self.lock = acquire_lock(self.paths.lock, "study")
            existing = {} if self.paths is None else self._existing_runs()
            missing = [state for state in self.states if run_key(state.run) not in existing and run_key(state.run) not in adopted]
            ended = self.paths is not None and all(self.paths.result(folder.root.name).is_file() for folder in existing.values())
            gpus = 0 if ended and not missing else self._check_builds(executor, missing, stop)
            concurrent = table.concurrent = concurrent_gpu_runs(self.study.runs, concurrent, gpus)
            self._create_study_folder()
            paths = self._existing_paths
            table.set_log_file(paths.log)
            self._move_outdated_runs(existing, table)
            self._folders: dict[tuple[str, int], StudyRunFolder] = {}
            self._read_run_states(self.states, existing, adopted)
            table.print_line(f"{study.name}: {_run_count_text(study)}, {concurrent} run{'s' * (concurrent > 1)} at a time")
            table.print_line(f"{display_path(paths.root)}")
            if self.lock is not None and self.lock.killed is not None:
                table.print_line(f"the last start, {self.lock.killed}, {ENDED}")
            table.print_line(table.summary())
            with self._open_executor(executor, gpus) as runner:
                table.concurrent = runner.concurrent
                live = LiveReport(self._write_page)
                planner = _Planner(self.states, self._folders, paths, table, runner, self._target, self.plan.device, live)
                run_plan(planner, runner.executor, runner.resources, stop)
                while not stop.requested and self._add_seeds(existing, table, runner.concurrent):
                    run_plan(planner, runner.executor, runner.resources, stop)
            interrupted = stop.requested and any(state.status in ("waiting", "running") for state in self.states)
            for lock in paths.root.glob(f"{paths.lock.name}_*"):  # remove the locks of runs, which have ended
                lock.unlink(missing_ok=True)
            self._report(table)
            if interrupted:
                raise KeyboardInterrupt

    @contextmanager
    def _open_executor(self, here: Executor, gpus: int) -> Iterator[_RunLimits]:
        """Yield a _RunLimits with an executor for this machine or, if the plan names a cluster, for the cluster."""
        if self.plan.cluster is None:
            concurrent, jobs = self._concurrency()
            yield _RunLimits(here, concurrent_gpu_runs(self.study.runs, concurrent, gpus), jobs, Resources(), gpus)
            return
        from slm_lab.experiment.execute.ray.connect import connect_cluster
        from slm_lab.experiment.execute.ray.ray_executor import RayExecutor

        with connect_cluster(self.plan.cluster, self._existing_paths.root) as cluster:
            nodes = cluster.nodes
            widest = self._cores_of_largest_run(int(max(node.cores for node in nodes)))
            cluster.check_fits("a run", widest)
            room = sum(int(node.cores // widest) for node in nodes)
            concurrent = 1 if "wall_t" in self.study.spec.x else min(room, self.plan.jobs or room, len(self.study.runs))
            share = 0.0
            if self.plan.device != "cpu" and any(node.gpus for node in nodes):
                share = max((run_gpu_fraction(run) for run in self.study.runs), default=0.0)
            with RayExecutor(stall_notice=None) as executor:  # Ray makes only the assigned GPUs visible to a run
                yield _RunLimits(executor, concurrent, widest, Resources(widest, share), 0)

    def _cores_of_largest_run(self, limit: int) -> int:
        """Return the largest number of cores that any run of the study needs.

        Args: limit: number of cores, which limits the number of concurrent Sessions of a run.
        """
        widest = 1
        for run in self.study.runs:
            meta = run.spec.meta
            each = meta.max_session if meta.distributed else min(meta.max_session, max(1, limit // count_session_processes(meta)))
            widest = max(widest, each * count_session_processes(meta))
        return widest

    def _concurrency(self) -> tuple[int, int | None]:
        """Return (number of concurrent runs, maximum number of concurrent Sessions per run)."""
        limit = self.plan.jobs or cores()
        widest = self._cores_of_largest_run(limit)
        one_at_a_time = "wall_t" in self.study.spec.x
        concurrent = 1 if one_at_a_time else max(1, limit // widest)
        return min(concurrent, len(self.study.runs)), max(1, limit // concurrent)

    # ---- files

    def _create_study_folder(self) -> None:
        """Create the folder of the study, and save the study in the folder. A continued study uses the existing folder.

        Raises UserError if the folder cannot be written.
        """
        made: Path | None = None
        with cleanup_on_error(self.plan.data_dir, lambda: made):
            paths = self.paths
            if paths is None:
                paths = StudyPaths(new_folder(self.plan.data_dir.absolute(), self.study.name), self.study.name)
                made = paths.root
                self.lock = acquire_lock(paths.lock, "study")
            for folder in (paths.runs, paths.results):
                folder.mkdir(exist_ok=True)
            content = {
                self.study.name: dict(self.study.raw),
                "$study": {"version": VERSION, "source": self.study.source, "set": list(self.study.sets), **self.study.plan_json}
                | ({} if self.max_seeds is None else {"max_seeds": self.max_seeds}),
            }
            replace_file(paths.study, indented_json(content), sync=True)
        self.paths = paths

    def _existing_runs(self) -> dict[tuple[str, int], StudyRunFolder]:
        """Return the runs of the study that have a folder or a result, as a dict: (digest, random_seed) → folder.

        If the current study contains a run with the same settings, the digest of the current study's run is used. Raises UserError if the
        study file has another version.
        """
        paths = self._existing_paths
        version = study_start_info(paths).get("version", VERSION)
        if version != VERSION:
            raise UserError(f"{paths.study} has version {version}; expected {VERSION}: it was written by another version of slm_lab")
        folders = {}
        for name in sorted(
            {file.stem for file in paths.results.glob("*.json")} | {file.parent.name for file in paths.runs.glob("*/*.json")}
        ):
            with suppress(OSError, ValueError, KeyError, TypeError):  # killed before the file was written, so nothing was trained
                identity = self._read_identity(StudyRunFolder(paths.runs / name))
                folders[self._current_identity(identity)] = StudyRunFolder(paths.runs / name)
        return folders

    def _read_identity(self, folder: StudyRunFolder) -> dict[str, Any]:
        """Return a dict with the entry, env, random_seed, digest, settings and spec_version of a run.

        Raises UserError if the spec of the run has another version.
        """
        file = folder.identity if folder.identity.is_file() else self._existing_paths.result(folder.root.name)
        identity: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if (version := identity["spec_version"]) != SPEC_VERSION:
            raise UserError(f"{file} has spec_version {version}; expected {SPEC_VERSION}: another version of slm_lab trained this run")
        return identity

    def _has_identity(self, folder: StudyRunFolder, identity: Mapping[str, Any]) -> bool:
        """Return whether the identity file of a run exists, can be read and contains `identity`."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return folder.identity.is_file() and self._read_identity(folder) == identity
        return False

    def _current_identity(self, identity: Mapping[str, Any]) -> tuple[str, int]:
        """Return the digest and the random_seed of a run.

        If the current study contains a run with the same settings except for keys that did not exist when the given run was trained, the
        digest of the current study's run is returned.
        """
        seed = int(identity["random_seed"])
        for run in self._first_runs.values():
            alike = (run.entry, run.env) == (identity["entry"], identity["env"])
            if alike and run.digest != identity["digest"] and not differing_paths(identity["settings"], run.settings, run.spec):
                return run.digest, seed
        return str(identity["digest"]), seed

    @property
    def _first_runs(self) -> dict[tuple[str, str], StudyRun]:
        """(entry, env) → first run of this entry in this env. The other runs of the entry in the env differ only in their seeds."""
        return {(run.entry, run.env): run for run in reversed(self.study.runs)}

    def _move_outdated_runs(self, existing: dict[tuple[str, int], StudyRunFolder], table: StudyTable) -> None:
        """Move the files of outdated runs to a separate folder. A run is outdated if the study now has other settings for its entry and
        env."""
        wanted, digests = self._first_runs, {run.digest for run in self.study.runs}
        reported: set[tuple[str, str]] = set()
        paths = self._existing_paths
        for key, folder in list(existing.items()):
            identity = self._read_identity(folder)
            run = wanted.get((identity["entry"], identity["env"]))
            if key[0] in digests or run is None:
                continue
            del existing[key]
            paths.outdated_runs.mkdir(exist_ok=True)
            for file in (folder.root, paths.result(folder.root.name)):
                if file.exists():
                    shutil.move(file, _unused_path(paths.outdated_runs / file.name))  # the folder of outdated runs may be on another disk
            if (run.entry, run.env) not in reported:
                reported.add((run.entry, run.env))
                changed = describe_changes(identity["settings"], run.settings)
                table.print_line(
                    f"{run.entry}, {run.env}: changed ({', '.join(changed)}); "
                    f"its runs are repeated; the old runs are in {paths.outdated_runs}"
                )

    def _read_run_states(
        self, states: Sequence[RunState], existing: Mapping[tuple[str, int], StudyRunFolder], adopted: Mapping[tuple[str, int], Path]
    ) -> None:
        """Set the status of each run from the run's files, and write the results of adopted runs."""
        paths = self._existing_paths
        for state in states:
            run, key = state.run, run_key(state.run)
            folder = existing.get(key, StudyRunFolder(paths.runs / run_name(run)))
            self._folders[key] = folder
            identity = {
                "entry": run.entry,
                "env": run.env,
                "random_seed": run.random_seed,
                "digest": run.digest,
                "settings": dict(run.settings),
                "spec_version": SPEC_VERSION,
            }
            file = paths.result(folder.root.name)
            if key in adopted and not file.is_file():
                write_result(file, load_run(adopted[key]), {**identity, "adopted": str(adopted[key])})
            if folder.root.is_dir() or not file.is_file():
                folder.root.mkdir(exist_ok=True)
                # the run is new or relabelled, or its settings have newer keys
                if not self._has_identity(folder, identity):
                    _write_json(folder.identity, identity)
                state.failures = sum(map(has_failed, folder.run_folders()))
            if file.is_file():
                content = ResultRun(file).content
                if any(content.get(name) != value for name, value in identity.items()):
                    _write_json(file, with_checksum({**content, **identity}))
                state.status, state.share, state.seconds = "done", 1.0, content["seconds"]
            elif state.failures >= ATTEMPTS:
                state.status, state.cause = "failed", f"it failed {state.failures} times; remove {folder.root} to try again"

    # ---- processes

    def _check_builds(self, executor: Executor, missing: Sequence[RunState], stop: Stop) -> int:
        """Build env and agent once for each pair of entry and env, in a separate process, and return the number of GPUs.

        Raises SpecError if a build fails.
        """
        specs = {state.run.digest: state.run for state in missing}
        source = f"{self.study.source} {self.study.name}"
        arguments = list(specs.values()), replace(self.plan, jobs=None), source
        try:
            messages = run_task(executor, "the check of the specs", check_builds_task, *arguments, stop=stop)
        except TaskFailed as error:
            raise UserError(str(error)) from None
        return next(int(message.content[0]) for message in messages if message.kind == "valid")

    def _add_seeds(self, existing: Mapping[tuple[str, int], StudyRunFolder], table: StudyTable, concurrent: int) -> bool:
        """Add runs with new seeds for the entries whose differences are not decided, and return whether any runs were added.

        Seeds are added until there are at least `concurrent` new runs. If a run failed, no seeds are added, since the results of an entry
        without its failed runs would overestimate the entry.
        """
        from slm_lab.experiment.report.decision import decisions
        from slm_lab.experiment.report.study_report import study_settings

        if self.max_seeds is None or any(state.status != "done" for state in self.states):
            return False
        differences = decisions(self.study, study_settings(self.study, self._results()[0]))
        undecided = [difference for difference in differences if difference.after is None]
        before = len(self.study.runs)
        while len(self.study.runs) - before < concurrent:
            seeds = Counter((run.entry, run.env) for run in self.study.runs)
            wanted = [difference for difference in undecided if seeds[difference.entry, difference.env] < self.max_seeds]
            if not wanted:
                break
            self.study = self.study.with_additional_seed(
                {(name, difference.env) for difference in wanted for name in (difference.entry, difference.reference)}
            )
        added = [RunState(run) for run in self.study.runs[before:]]
        self.states += added
        self._read_run_states(added, existing, {})
        if added:
            seeds_added = ", ".join(map(str, dict.fromkeys(state.run.random_seed for state in added)))
            table.print_line(f"not decided: {len(undecided)} of {len(differences)} differences; random_seed {seeds_added} added")
        return bool(added)

    def _results(self) -> tuple[list[ResultRun], list[tuple[str, str]]]:
        """Return the results of the study so far, and (entry, env) of each failed run."""
        names = (self._folders[run_key(state.run)].root.name for state in self.states)
        results = [ResultRun(file) for name in names if (file := self._existing_paths.result(name)).is_file()]
        return results, [(state.run.entry, state.run.env) for state in self.states if state.status == "failed"]

    def _write_page(self, *, ended: bool = False) -> Path:
        from slm_lab.experiment.report.report_folder import write_study_report

        return write_study_report(self.study, self._existing_paths, *self._results(), ended=ended, decide=self.max_seeds is not None)

    def _report(self, table: StudyTable) -> None:
        from slm_lab.experiment.report.study_report import write_report

        results, failed = self._results()
        for line in write_report(self.study, self._existing_paths, results, failed, decide=self.max_seeds is not None):
            table.print_line(line)
        page = try_write_report(partial(self._write_page, ended=True))
        if page is not None:
            table.print_line(f"open {display_path(page)}")
        if results:
            env = f" --env {shlex.quote(self.study.envs[0])}" if len(self.study.envs) > 1 else ""
            table.print_line(f"play the best run: slm-lab enjoy@{display_path(self._existing_paths.root)}{env}")


def run_gpu_fraction(run: StudyRun) -> float:
    """Return the fraction of a GPU that a run uses, or 0 if the net of the run computes on the CPU."""
    spec = run.spec
    return spec.meta.search_resources.gpu if spec.agent.net is not None and spec.agent.net.gpu is not False else 0.0


def concurrent_gpu_runs(runs: Sequence[StudyRun], concurrent: int, gpus: int) -> int:
    """Return the number of concurrent runs that fit on the GPUs, which is at most `concurrent`.

    A run whose net is on a GPU uses the fraction meta.search_resources.gpu of this GPU.
    """
    share = max(map(run_gpu_fraction, runs), default=0.0)
    return max(1, min(concurrent, int(gpus / share))) if gpus and share else concurrent


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    replace_file(file, (json.dumps(content, ensure_ascii=False) + "\n").encode(), sync=True)


def _trained_frames(paths: RunPaths) -> int:
    """Return the sum of the frames in the last rows of all tables of a run."""
    return sum(int(last_row(paths.session_df(index)).get("frame", 0)) for index in paths.table_numbers())


def _unused_path(path: Path) -> Path:
    """Return `path` or, if this path exists already, a path that does not exist and whose name has an additional number."""
    return next(
        candidate for n in range(10_000) if not (candidate := path if n == 0 else path.with_name(f"{path.stem}_{n}{path.suffix}")).exists()
    )


def _run_count_text(study: Study) -> str:
    """Describe the number of runs of a study. If all entries have the same seeds, the number is written as a product."""
    axes = {"entries": len(study.entries), "envs": len(study.envs), "seeds": len({run.random_seed for run in study.runs})}
    separate_seeds = any(entry.random_seed for entry in study.spec.entries)
    return _count(len(study.runs), "runs") if separate_seeds else " × ".join(_count(number, name) for name, number in axes.items())


def _count(number: int, plural: str) -> str:
    return f"{number} {plural if number != 1 else {'entries': 'entry'}.get(plural, plural[:-1])}"
