"""Verify a run: train a window of its frames again in a temporary folder, and compare rows and weights. The run folder is not changed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from rich.console import Console

from slm_lab.env.make import choose_backend, make_env_request
from slm_lab.experiment.collect.workers.shared import num_env_groups
from slm_lab.experiment.execute.local.user_code import convert_build_errors, describe_failure, is_from_user_code, os_exit_raises
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import Training
from slm_lab.experiment.files.lock import in_use
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.provenance import changed_versions
from slm_lab.experiment.files.search_state import SearchState
from slm_lab.experiment.files.sink import LocalSink, Position, is_damaged
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.report.nondeterminism import nondeterminism_reason
from slm_lab.experiment.report.progress import ProgressDisplay, format_duration
from slm_lab.experiment.report.row_difference import RowComparison, compare_rows
from slm_lab.experiment.report.run import Run, read_columns, read_table
from slm_lab.experiment.run.engine import monitor_progress
from slm_lab.experiment.run.verify.bundle_difference import PartDifference, count_arrays, differing_parts
from slm_lab.experiment.run.verify.window import (
    Checkpoint,
    SessionFiles,
    Window,
    choose_window,
    is_numbered,
    recorded_settings,
    session_files,
    table_paths,
)
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.resume import changed_keys, trained_spec
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.session.session_process import make_shared_arrays
from slm_lab.experiment.training.observers.base import Observer, ObserverContext
from slm_lab.lib.files import display_path
from slm_lab.lib.records import Episode
from slm_lab.lib.store import create_shared_file
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError, diff, format_json

_NEVER = 1e9
"""Value of meta.save_interval while a window is trained again, such that no state is saved before the end of the window."""


@dataclass(frozen=True)
class Finding:
    """A difference between the recorded run and the files or the repeated training."""

    kind: Literal["file", "spec", "rows", "weights", "state"]
    where: str
    """The file, or the key of the spec, in which the difference was found."""
    text: str
    detail: dict[str, Any] = field(default_factory=dict)
    """The differing values, which are added to the JSON document of the result."""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass
class Verification:
    """The result of a verification: which rows and checkpoints were compared, and which differences were found."""

    folder: Path
    session: int
    name: str = ""
    """The trial that was verified if the folder belongs to a search, such as "trial 3 of the search"."""
    window: Window | None = None
    """The window of frames that was trained again, or None if nothing was trained again, because files or the spec were changed."""
    seconds: float = 0.0
    rows: int = 0
    """Number of table rows that the repeated training has produced and that were compared."""
    checkpoints: list[tuple[str, int, int]] = field(default_factory=list)
    """One tuple (name, frame, number of arrays) for each compared checkpoint."""
    findings: list[Finding] = field(default_factory=list)
    machine: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Package versions and machine properties that differ: name → (value in the run, value on this machine)."""

    @property
    def is_equal(self) -> bool:
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dict, which is the content of the JSON document."""
        window = self.window
        return {
            "run": str(self.folder),
            "name": self.name or None,
            "session": self.session,
            "equal": self.is_equal,
            "from": None if window is None else window.begin,
            "to": None if window is None else window.end,
            "seconds": round(self.seconds, 3),
            "rows": self.rows,
            "checkpoints": [{"name": name, "frame": frame, "arrays": arrays} for name, frame, arrays in self.checkpoints],
            "differences": [
                {"kind": finding.kind, "where": finding.where, "text": finding.text, **finding.detail} for finding in self.findings
            ],
            "machine": {key: {"run": run, "here": here} for key, (run, here) in self.machine.items()},
        }

    def text(self) -> str:
        """Return the result as text for the terminal, with several lines."""
        lines = [", ".join([str(display_path(self.folder)), *filter(None, [self.name]), f"session {self.session}"])]
        if self.window is None:
            lines.append("nothing was trained again, since files or the spec of the run were changed")
        else:
            lines.append(f"frames {self.window.begin:,} to {self.window.end:,}, trained again in {format_duration(self.seconds)}")
            lines.append(f"  rows         {self.rows} compared")
            lines += [f"  {name:<12} frame {frame:,}, {arrays} arrays compared" for name, frame, arrays in self.checkpoints]
            if not self.checkpoints:
                lines.append("  weights      not compared: no checkpoint in these frames")
        if self.is_equal:
            return "\n".join([*lines, f"equal to the byte: {'rows and weights' if self.checkpoints else 'rows'}"])
        differences = [str(finding) for finding in self.findings]
        differences += [f"{key}: {run} in the run, {here} here" for key, (run, here) in self.machine.items()]
        wrapped = (
            textwrap.fill(difference, 80, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
            for difference in differences
        )
        return "\n".join([*lines, "not equal:", *wrapped])


def verify(
    training: Training,
    session: int = 0,
    *,
    begin: int | None = None,
    end: int | None = None,
    frames: int | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> Verification:
    """Train a window of a Session's frames again, and compare the results with the files of the run.

    Args:
        begin, end: first and last frame of the window, or None for the default of choose_window.
        frames: maximum number of frames of the window if `end` is not given.
        device: device of the nets, or None for the device according to the spec.
        console: where progress is shown, or None for stdout.

    Raises UserError if the run cannot be verified, because its training is not deterministic, or because the run has no two saved states
    between which it can be trained again.
    """
    paths, run = training.paths, Run(training.paths, training.trial)
    spec = _checked_spec(training, session, device)
    files = session_files(paths, session, training.trial)
    if spec.meta.distributed:  # no previous version of the file with the shared arrays is kept
        files = replace(files, previous=None)
    result = Verification(paths.root, session, training.name, machine=_machine_differences(run.starts[-1]))
    result.findings += [Finding("file", file, f"is {problem}") for file, _, problem in (text.partition(" is ") for text in files.damaged)]
    result.findings += _changed_keys(spec, files, run, training.spec_file.name)
    if result.findings:
        return result
    changed = _changed_tables(paths, files, spec)
    table = read_table(paths.session_df(session * spec.policies, "train", training.trial))
    try:
        window = result.window = choose_window(files, table, run.starts, session, (begin, end, frames))
    except UserError:
        if not changed or (begin, end, frames) != (None, None, None):
            raise
        return replace(result, findings=changed)
    again = _RepeatedTraining(training, spec, session, window, _plan(training, run, device), run)
    started = perf_counter()
    with again.train(console) as copy:
        result.seconds = perf_counter() - started
        _compare(result, again, copy)
    if result.findings and files.last is not None:
        result.findings += _restarted_workers(files.last)
    result.findings += changed
    return result


def _restarted_workers(last: Checkpoint) -> list[Finding]:
    """Return a Finding if rollout workers were restarted in the run, since new processes use new random streams."""
    restarts = int((state.load(last.path)["source"] or {}).get("restarts", 0))
    if not restarts:
        return []
    times = "once" if restarts == 1 else f"{restarts} times"
    text = f"rollout workers were restarted {times} in the run; a window with a restart cannot be repeated exactly"
    return [Finding("state", last.path.name, text, {"restarts": restarts})]


def _checked_spec(training: Training, session: int, device: str | None) -> Spec:
    """Return the saved spec of a training. Raises UserError if the run is being trained, cannot be verified, or has no Session with the
    index `session`."""
    root = training.paths.root
    if in_use(training.paths.lock):
        raise UserError(f"{root} is in use by a process that trains the run; wait until the process ends")
    spec = load_spec(training.spec_file, training.spec_name, for_search=False)
    keys = Run(training.paths, training.trial).flat_spec()
    if (why := nondeterminism_reason(keys, of_search=training.of_search, device=device)) is not None:
        raise UserError(f"{root} cannot be verified: {why}")
    if not 0 <= session < spec.meta.max_session:
        raise UserError(f"session {session}: the sessions of {root} are 0 to {spec.meta.max_session - 1}")
    return spec


def _machine_differences(start: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the package versions and the processor of this machine that differ from those of a start of the run (see
    Verification.machine)."""
    from slm_lab.agent.torch_settings import cpu_name

    cpu = diff({"cpu": start["cpu"]}, {"cpu": cpu_name()}) if "cpu" in start else {}
    return changed_versions(start) | cpu


def _changed_keys(spec: Spec, files: SessionFiles, run: Run, file: str) -> list[Finding]:
    """Return a Finding for each key whose value in the saved spec differs from its value in the last checkpoint.

    Keys that the last start of the run has changed are omitted.
    """
    if files.last is None:
        return []
    recorded_changes = run.starts[-1].get("changed", {})
    return [
        Finding("spec", key, f"{format_json(now)} in {file}, {format_json(before)} in the checkpoint", {"file": now, "checkpoint": before})
        for key, (before, now) in changed_keys(trained_spec(files.last.header, spec), spec).items()
        if key not in recorded_changes
    ]


def _changed_tables(paths: RunPaths, files: SessionFiles, spec: Spec) -> list[Finding]:
    """Return a Finding for each table whose rows were changed after the last checkpoint was saved."""
    if files.last is None or spec.meta.distributed:
        return []
    findings = []
    for name, (size, crc) in (files.last.header["tables"] or {}).items():
        path = paths.info_dir / name
        missing = size > (path.stat().st_size if path.exists() else 0)
        if missing or is_damaged(path, size, crc):
            shorter = "it is shorter than when the last checkpoint was saved"
            why = shorter if missing else "its rows do not match the checksum (CRC-32) in the last checkpoint"
            findings.append(Finding("rows", name, f"{why}, at frame {files.last.frame:,}"))
    return findings


def _plan(training: Training, run: Run, device: str | None) -> Plan:
    """Return a plan with which a Session uses the same seeds as in the run."""
    paths = training.paths
    mode: Literal["train", "dev"] = "dev" if run.mode == "dev" else "train"
    plan = Plan(mode, paths.root.parent, device)
    if not training.of_search:
        return plan
    common = paths.root.name == "confirm" or SearchState.load(paths.search_state).common_seeds
    return replace(plan, common_seeds=common, jobs=1)  # with a value of jobs, as in a search, an update uses one thread


class _WindowSink(LocalSink):
    """Sink whose tables contain only the rows of the window that is trained again."""

    def truncate_tables(self, session: int, position: Position | None = None, frame: int = 0) -> None: ...


class _StopObserver(Observer):
    """Observer that requests a stop when all policies of the Session have reached their last frame."""

    def __init__(self, context: ObserverContext, stop: Stop, frame: int, left: set[int]) -> None:
        super().__init__(context)
        self.stop, self.frame, self.left = stop, frame, left
        left.add(context.table)

    def on_step(self, episodes: list[Episode]) -> None:
        if self.context.clock.frame >= self.frame:
            self.left.discard(self.context.table)
            self.stop.requested = self.stop.requested or not self.left


class _Progress(ProgressDisplay):
    """Display of the progress of one Session of a run."""

    def __init__(self, session: int, end: int, policies: Sequence[str], console: Console | None) -> None:
        self.session = session
        super().__init__(1, end, console, policies=policies)

    def __call__(self, event: Any) -> None:
        if hasattr(event, "table"):
            event = replace(event, table=event.table - self.session * self.policies)
        super().__call__(event)

    def _name(self, index: int) -> str:
        return f"session {self.session}" if self.policies == 1 else f"session {self.session} policy {self.policy_names[index]}"


def _backend_override(spec: Spec, recorded: str | None) -> str | None:
    """Return the env backend that the run used if "auto" would choose a different backend on this machine, or None otherwise.

    If "auto" chooses the same backend, "auto" is kept, since "auto" may choose another backend for the evaluation envs, whose
    number is different.
    """
    sampler = spec.meta.sampler
    if spec.env.backend != "auto" or recorded is None:
        return None
    with suppress(SpecError):  # the same error is raised when the envs are built
        envs = spec.env.num_envs if sampler is None else sampler.num_envs_per_worker // num_env_groups(sampler)
        if choose_backend(spec.env, make_env_request(spec.env, envs)).name == recorded:
            return None
    return recorded


@dataclass(frozen=True)
class _RepeatedTraining:
    """The repeated training of a window of a Session's frames."""

    training: Training
    spec: Spec
    session: int
    window: Window
    plan: Plan
    run: Run

    @contextmanager
    def train(self, console: Console | None) -> Iterator[RunPaths]:
        """Train the window in a temporary folder, and yield the paths of the new files. Raises UserError if training fails."""
        with tempfile.TemporaryDirectory(prefix="slm_lab_verify_") as folder, ExitStack() as stack:
            copy = self._create_run_folder(Path(folder))
            spec = self._spec()
            display = stack.enter_context(_Progress(self.session, self.window.end, spec.policy_names, console))
            stop, store = Stop(), None
            if spec.meta.distributed:
                descriptor = create_shared_file()
                stack.callback(os.close, descriptor)
                store = make_shared_arrays(spec, descriptor)
            beat = stack.enter_context(monitor_progress(spec, stop, display))
            stack.enter_context(os_exit_raises())
            context = SessionContext(stop, beat, store, resumed=None if self.window.start is None else copy)
            session = Session(spec, self.session, self.plan, trial=self.training.trial, context=context, observers=self._observers(stop))
            stack.callback(session.close)
            self._train(session, copy, display)
            yield copy

    def _train(self, session: Session, copy: RunPaths, display: ProgressDisplay) -> None:
        with convert_build_errors(self.spec, session.context.stop):
            session.build()
        if self._ends_with_run:
            for learner, frame in zip(session.learners, self._frames_at_last_checkpoint, strict=True):
                learner.frames = frame  # less than env.max_frame if the run ended because of meta.max_seconds
        sink = _WindowSink(copy, self.training.trial, display)
        try:
            session.train(sink)
        except BaseException as error:  # an env may raise any exception
            if not is_from_user_code(error):
                raise
            raise UserError(f"{self.training.paths.root} cannot be verified: training failed again: {describe_failure(error)}") from error
        finally:
            sink.close()

    def _create_run_folder(self, root: Path) -> RunPaths:
        """Create a run folder that contains the state from which training continues, and return its paths."""
        copy, trial = RunPaths(root, self.training.paths.spec_name), self.training.trial
        copy.make_dirs()
        copy.spec.write_text(json.dumps(dump_spec(self._spec())), encoding="utf-8")
        if isinstance(self.window.start, Path):
            first = self.session * self.spec.policies
            shutil.copyfile(self.window.start, str(copy.checkpoint(first, "last", trial)))
        return copy

    def _spec(self) -> Spec:
        """Return the spec with the machine-dependent settings that the run has recorded, and without saves and limits that depend on
        time."""
        recorded, spec = recorded_settings(self.run.starts), self.spec
        meta: dict[str, Any] = {"save_interval": _NEVER, "max_seconds": None, "run": None}
        meta |= {key: recorded[key] for key in ("threads", "matmul") if key in recorded and recorded[key] != "torch"}
        env = {} if (backend := _backend_override(spec, recorded.get("backend"))) is None else {"backend": backend}
        return spec.with_meta(**meta).model_copy(update={"env": spec.env.model_copy(update=env)})

    @property
    def _last_state(self) -> Checkpoint | None:
        return next((checkpoint for checkpoint in self.window.checkpoints if checkpoint.which == "last"), None)

    @property
    def _frames_at_last_checkpoint(self) -> list[int]:
        assert self._last_state is not None
        return [int(frame) for frame in self._last_state.header["frames"]]

    @property
    def _ends_with_run(self) -> bool:
        """Whether the window ends at the frame at which the training of the run ended."""
        return self._last_state is not None and self._last_state.frame == self.window.end and bool(self._last_state.header["done"])

    def _observers(self, stop: Stop) -> Sequence[Any]:
        """Return an observer that stops training at the end of the window, in a list.

        If the window ends where the training of the run ended, no observer is needed, and () is returned.
        """
        if self._ends_with_run:
            return ()
        left: set[int] = set()
        frames = self._frames_at_last_checkpoint if self._last_state is not None and self._last_state.frame == self.window.end else []

        def stop_at(context: ObserverContext) -> Observer:
            policy = context.table % self.spec.policies
            return _StopObserver(context, stop, frames[policy] if frames else self.window.end, left)

        return [stop_at]


def _compare(result: Verification, again: _RepeatedTraining, copy: RunPaths) -> None:
    """Compare the tables and checkpoints of the run in the window with those of the repeated training, and add the findings to `result`."""
    paths, window, trial = again.training.paths, again.window, again.training.trial
    for table, other in zip(table_paths(paths, again.session, trial), table_paths(copy, again.session, trial), strict=True):
        if table.exists() or other.exists():
            comparison = compare_rows(read_columns(table), read_columns(other), after=window.begin, up_to=window.end)
            result.rows += comparison.rows
            result.findings += _row_findings(table.name, comparison, window)
    for checkpoint in window.checkpoints:
        file = copy.checkpoint(checkpoint.table, checkpoint.which, trial)
        if not file.is_file():
            result.findings.append(Finding("weights", str(checkpoint.path), f"was not written again at frame {checkpoint.frame:,}"))
            continue
        saved = state.load(checkpoint.path)
        result.checkpoints.append((f"ckpt-{checkpoint.which}", checkpoint.frame, count_arrays(saved)))
        if parts := differing_parts(saved, state.load(file)):
            result.findings.append(_part_finding(checkpoint, parts))


def _row_findings(name: str, comparison: RowComparison, window: Window) -> list[Finding]:
    findings = []
    if (cell := comparison.first) is not None:
        text = f"frame {cell.frame:,} (row {cell.row}), {cell.column}: {cell.a} in the run, {cell.b} trained again"
        findings.append(Finding("rows", name, text, cell._asdict()))
    only, missing = comparison.only[0], [frame for frame in comparison.only[1] if frame != window.end]
    for frames, what in ((only, "that training does not write"), (missing, "missing")):
        if frames:
            text = f"{len(frames)} row{'s' * (len(frames) > 1)} {what}, the first at frame {frames[0]:,}"
            findings.append(Finding("rows", name, text, {"frames": list(frames)}))
    return findings


def _part_finding(checkpoint: Checkpoint, parts: Sequence[PartDifference]) -> Finding:
    weights = [part for part in parts if "weights/" in part.name]
    shown = weights or list(parts)
    largest = max((part.largest for part in weights if part.largest is not None), default=None)  # other entries have no common unit
    more = f" and {len(shown) - 1} more" if len(shown) > 1 else ""
    size = "" if largest is None else f"; largest difference {largest:.3g}"
    others = f"; {len(parts) - len(shown)} other entries differ" if len(parts) > len(shown) else ""
    kind = f"at frame {checkpoint.frame:,}, " if not is_numbered(checkpoint.which) else ""
    if any(part.name == "frame" for part in parts):
        kind = f"at frame {checkpoint.frame:,} (another frame in the repetition), "
    detail = {"parts": [part.name for part in parts], "largest": largest}
    return Finding("weights" if weights else "state", checkpoint.path.name, f"{kind}{shown[0].name}{more} differ{size}{others}", detail)
