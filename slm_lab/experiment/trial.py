"""Trial: the Sessions of one spec, run side by side, then measured and drawn together."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from slm_lab.experiment.engine import Outcome, stop_on_signal
from slm_lab.experiment.engine.inline import run_inline
from slm_lab.experiment.engine.processes import run_processes
from slm_lab.experiment.paths import RunPaths, new_run
from slm_lab.experiment.plan import Interrupted, Plan, Stop, TrialFailed, UserError
from slm_lab.experiment.progress import Progress, number
from slm_lab.experiment.provenance import provenance
from slm_lab.lib.log import logger
from slm_lab.lib.rng import draw_seed
from slm_lab.spec.loader import dump_spec
from slm_lab.spec.spec import Spec

_NEEDED_BYTES = 16 * 2**20
"""Free space below which a run does not begin."""
_NOTHING = "stopped before the first step; nothing was written"
_REMAINS = "stopped at once; what was written so far remains in {}"


class Trial:
    """Trial number `index` of an experiment. `plan` holds what `data_dir` says, and more."""

    def __init__(self, spec: Spec, data_dir: str | Path = "data", plan: Plan | None = None, *, index: int = 0) -> None:
        self.plan = plan or Plan(data_dir=Path(data_dir))
        self.spec, self.index = _settled(spec, self.plan), index
        self.paths: RunPaths | None = None
        """The files of the run, once there is one."""

    def run(self) -> dict[str, Any]:
        """Run every Session, write and return the metrics of the trial.

        Raises SpecError or UserError before anything is written; TrialFailed after the analysis, where a Session failed;
        Interrupted (a KeyboardInterrupt) after Ctrl-C, SIGTERM or SIGHUP, when every Session has saved itself and the graphs are drawn.
        """
        check_writable(self.plan.data_dir)
        stop = Stop()
        try:
            with stop_on_signal(stop):
                metrics = self._run(stop)
        except KeyboardInterrupt:
            raise Interrupted(_NOTHING if self.paths is None else _REMAINS.format(self.paths.root), stop.number) from None
        if stop.requested:
            raise Interrupted(_NOTHING if self.paths is None else "", stop.number)
        return metrics

    def _run(self, stop: Stop) -> dict[str, Any]:
        sessions = self.spec.meta.max_session
        run_sessions = run_inline if sessions == 1 and not self.spec.meta.distributed else run_processes
        with Progress(sessions, self.spec.session_frames, policies=self.spec.policies) as progress, _notices_to(progress):
            progress.start(self.spec.name)
            if run_sessions is run_processes:
                threading.Thread(target=_load_analysis, daemon=True).start()
            outcomes = run_sessions(self.spec, self.plan, self.index, partial(self._open, progress), progress, stop)
        metrics = self._analyze(outcomes, progress)
        failed = sorted(outcome.index for outcome in outcomes if outcome.status == "failed")
        if failed:
            raise TrialFailed(f"{len(failed)} of {sessions} Sessions failed: {', '.join(map(str, failed))}", metrics)
        return metrics

    def _open(self, progress: Progress, backend: str) -> RunPaths:
        """Make the run's folder and save the spec in it. Raises UserError, with nothing left behind."""
        meta = self.spec.meta.model_copy(update={"run": provenance(backend)})
        text = json.dumps(dump_spec(self.spec.model_copy(update={"meta": meta})), indent=2, ensure_ascii=False) + "\n"
        paths = None
        try:
            paths = new_run(self.plan.data_dir, self.spec.name)
            paths.spec.write_text(text, encoding="utf-8")
            paths.trial_spec(self.index).write_text(text, encoding="utf-8")
        except OSError as error:
            if paths is not None:
                shutil.rmtree(paths.root, ignore_errors=True)
            raise UserError(f"cannot write in the data folder {self.plan.data_dir}: {error.strerror or error}") from None
        self.paths = paths
        of_each = f"{self.spec.policies} policies × " if self.spec.policies > 1 else ""
        progress.begin(
            f"{self.spec.name}: {meta.max_session} × {of_each}{self.spec.session_frames:,} frames, random_seed {meta.random_seed}"
        )
        return paths

    def _analyze(self, outcomes: list[Outcome], progress: Progress) -> dict[str, Any]:
        """Measure and draw the Sessions that ended well; a failed one would pull their mean down to where it broke off."""
        paths = self.paths
        if paths is None:
            return {}
        from slm_lab.experiment.analysis import analyze_trial

        metrics: dict[str, Any] = {}
        well = {outcome.index for outcome in outcomes if outcome.status != "failed"}
        tables = [index for index in paths.sessions("train", self.index) if index // self.spec.policies in well]
        if tables:
            with _notices_to(progress):
                metrics = analyze_trial(self.spec, paths, self.index, sessions=tables, failed=len(outcomes) - len(well))
            progress.say(_summary(metrics, self.spec.session_frames))
        graphs = [paths.trial_graph(what, ext, self.index) for what in ("mean_returns", "mean_returns_ma") for ext in ("html", "png")]
        for file in (paths.root, *graphs, paths.trial_metrics(self.index)):
            if file.is_dir() or (file.is_file() and file.stat().st_size > 0):
                progress.say(f"{file}")
        return metrics


def _summary(metrics: dict[str, Any], max_frame: int) -> str:
    """The metrics in one line; those that are not defined are left out."""
    shown = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return "  ".join(f"{name} {number(value)}{f'/{max_frame}' if name == 'frame' else ''}" for name, value in shown.items())


def check_writable(folder: Path) -> None:
    """Raise UserError where no file can be made in `folder`, or it cannot be made itself; makes nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"cannot write in the data folder {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"cannot write in the data folder {folder}: no permission in {there}")
    usage = shutil.disk_usage(there)
    if usage.total and usage.free < _NEEDED_BYTES:
        needed, free = (f"{size / 2**20:.3g} MiB" for size in (_NEEDED_BYTES, usage.free))
        raise UserError(f"cannot write in the data folder {folder}: a run needs {needed} of disk space, and {free} are free")


def _settled(spec: Spec, plan: Plan) -> Spec:
    """The spec with what the run itself decides: a seed where it has none, one Session in mode dev."""
    update: dict[str, Any] = {}
    if spec.meta.random_seed is None:
        update["random_seed"] = draw_seed()
    if plan.mode == "dev":
        update["max_session"] = 1
    return spec.model_copy(update={"meta": spec.meta.model_copy(update=update)})


def _load_analysis() -> None:
    """Load what the graphs need while the Sessions run."""
    for module in ("slm_lab.experiment.analysis", "plotly.io", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        import_module(module)


class _Notices(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self.progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self.progress.notice(record.getMessage())


@contextmanager
def _notices_to(progress: Progress) -> Iterator[None]:
    """Show what is logged above the live display."""
    handler = _Notices(progress)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
