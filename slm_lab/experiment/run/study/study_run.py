"""The process of one run of a study."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.files.lock import SessionLock
from slm_lab.experiment.files.paths import RunFolder, RunPaths
from slm_lab.experiment.plan import Interrupted, Plan, TrialFailed, UserError
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.models.study import StudyRun
from slm_lab.spec.report import Problem, SpecError


@dataclass(frozen=True)
class RunJob:
    """A run to start, or to continue if it has been started before."""

    spec: Spec
    folder: RunFolder
    result: Path
    lock: Path
    """Locked while the process runs."""
    device: str | None
    first_gpu: int
    jobs: int | None


def run_in_process(context: Context, job: RunJob) -> None:
    """Train, write the result, and send the message ("outcome", "done" | "failed" | "stopped" | "invalid", cause)."""
    lock = SessionLock(job.lock)
    context.print_to(job.folder.log)
    try:
        _train(context, job)
    except Interrupted:
        return context.send("outcome", "stopped", "")
    except (SpecError, UserError) as error:
        return context.send("outcome", "invalid", str(error))
    except TrialFailed as error:
        return context.send("outcome", "failed", str(error))
    except BaseException as error:
        traceback.print_exc()
        return context.send("outcome", "failed", f"{type(error).__name__}: {error}")
    finally:
        lock.release()
    context.send("outcome", "done", "")


def _train(context: Context, job: RunJob) -> None:
    """Train and write the result while the lock is held, so that a study that waits for the lock finds the result."""
    from slm_lab.experiment.report.run import Run
    from slm_lab.experiment.report.study_result import write_result
    from slm_lab.experiment.run.trial import Trial

    begin = perf_counter()
    console = Console(file=sys.stdout, width=200, highlight=False, soft_wrap=True)
    plan = Plan(data_dir=job.folder.root, device=job.device, first_gpu=job.first_gpu, jobs=job.jobs)
    starts = job.folder.starts()
    continued = bool(starts) and not has_failed(starts[-1])
    if continued:
        trial = Trial.resume(starts[-1].root, plan=plan, stop=context.stop, console=console)
    else:
        trial = Trial(job.spec, plan=plan, stop=context.stop, console=console)
    trial.run()
    assert trial.paths is not None
    identity: dict[str, Any] = json.loads(job.folder.identity.read_text(encoding="utf-8"))
    write_result(job.result, Run(trial.paths), identity, None if continued else round(perf_counter() - begin, 1))


def has_failed(paths: RunPaths) -> bool:
    """Return whether the run in a folder ended with a failed Session."""
    from slm_lab.experiment.report.run import Run

    return Run(paths).status == "failed"


def check_in_process(context: Context, runs: list[StudyRun], plan: Plan, source: str) -> None:
    """Build env and agent of each run's spec; send ("valid", number of GPUs) or ("user_error", error)."""
    import torch

    from slm_lab.experiment.session.session import Session
    from slm_lab.experiment.training.resolve import completed, with_seed

    problems: list[Problem] = []
    for run in runs:
        meta = run.spec.meta.model_copy(update={"sampler": None, "distributed": False, "max_session": 1})
        try:
            Session(with_seed(completed(run.spec.model_copy(update={"meta": meta})), 0), plan=plan).build().close()
        except SpecError as error:
            problems += [Problem(f"study: {run.entry} in {run.env}", str(problem), problem.code) for problem in error.problems]
        except UserError as error:
            problems.append(Problem(f"study: {run.entry} in {run.env}", str(error)))
    if problems:
        context.send("user_error", SpecError(source, problems))
    else:
        context.send("valid", torch.cuda.device_count() if torch.cuda.is_available() else 0)
