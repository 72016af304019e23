"""Run one run of a study in a separate process, and adopt finished run folders of `train` as runs of a study."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.files.lock import SessionLock
from slm_lab.experiment.files.paths import RunPaths, StudyRunFolder
from slm_lab.experiment.plan import Interrupted, Plan, TrialFailed, UserError
from slm_lab.experiment.run.experiment import find_build_problems
from slm_lab.experiment.training.resolve import complete_spec, number_of_gpus, single_session_spec
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.study_file import differing_paths, settings_that_affect_results
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.models.study import Study, StudyRun
from slm_lab.spec.report import SpecError, diff


@dataclass(frozen=True)
class RunJob:
    """The description of a run of a study to start. A run that has been started before is continued."""

    spec: Spec
    folder: StudyRunFolder
    result: Path
    lock: Path
    """Path of the lock file that is locked while the process of the run is running."""
    device: str | None
    first_gpu: int
    jobs: int | None


def run_study_task(context: Context, job: RunJob) -> None:
    """Train one run of a study, write its result, and report the outcome to the process of the study.

    The outcome is the message ("outcome", "done" | "failed" | "stopped" | "invalid", cause).
    """
    lock = SessionLock(job.lock)
    context.redirect_output(job.folder.log)
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
    """Train one run of a study, and write the result of the run.

    The caller holds the lock of the run, so that a study that has waited for the lock finds the result.
    """
    from slm_lab.experiment.report.run import Run
    from slm_lab.experiment.report.study_result import write_result
    from slm_lab.experiment.run.trial import Trial

    begin = perf_counter()
    console = Console(file=sys.stdout, width=200, highlight=False, soft_wrap=True)
    plan = Plan(data_dir=job.folder.root, device=job.device, first_gpu=job.first_gpu, jobs=job.jobs)
    starts = job.folder.run_folders()
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
    """Return whether the run in a folder has ended with at least one failed Session."""
    from slm_lab.experiment.report.run import Run

    return Run(paths).status == "failed"


def check_builds_task(context: Context, runs: list[StudyRun], plan: Plan, source: str) -> None:
    """Build the env and the agent of each run's spec in the process of a task.

    The task sends the message ("valid", number of GPUs) or ("user_error", SpecError).
    """
    problems = [
        problem for run in runs for problem in find_build_problems(single_session_spec(run.spec), plan, f"study: {run.entry} in {run.env}")
    ]
    if problems:
        context.send("user_error", SpecError(source, problems))
    else:
        context.send("valid", number_of_gpus(plan))


def run_key(run: StudyRun) -> tuple[str, int]:
    """Return the digest and the random_seed of a run, which together identify the run within a study."""
    return run.digest, run.random_seed


def find_adopted_runs(study: Study, patterns: Sequence[str]) -> dict[tuple[str, int], Path]:
    """Return the run folders that match the patterns of --adopt, as a dict: key of the run (see run_key) → folder.

    Raises UserError if a pattern matches no folder, or if a folder does not contain a run of the study.
    """
    adopted: dict[tuple[str, int], Path] = {}
    for pattern in patterns:
        folders = [Path(word) for word in sorted(glob(pattern)) if Path(word).is_dir()]
        if not folders:
            raise UserError(f"--adopt: no folder matches '{pattern}'")
        for folder in folders:
            adopted[_matching_run_key(folder, study)] = folder
    return adopted


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference between two dicts of settings, such as "agent.algorithm.gamma: 0.98 → 0.99"."""
    return [f"{path}: {_value_text(old)} → {_value_text(new)}" for path, (old, new) in diff(before, after).items()]


def _value_text(value: Any) -> str:
    return "absent" if value is None else json.dumps(value, ensure_ascii=False)


def _matching_run_key(folder: Path, study: Study) -> tuple[str, int]:
    """Return the key of the run in a folder (see run_key). Raises UserError if the run is not a run of the study or has not finished."""
    from slm_lab.experiment.report.run import load_run

    run = load_run(folder)
    if run.status != "done" or run.mode != "train":
        raise UserError(
            f"--adopt: {folder} cannot be adopted: {'it is a run of mode dev' if run.mode == 'dev' else f'its status is {run.status}'}"
        )
    spec = load_spec(run.paths.spec, run.name)
    settings, seed = settings_that_affect_results(spec), spec.meta.random_seed
    candidates = [candidate for candidate in study.runs if candidate.spec.name == spec.name] or list(study.runs)
    first = {candidate.digest: candidate.spec for candidate in candidates}
    saved = {digest: complete_spec(spec) for digest, spec in first.items()}  # a run whose spec has no net is saved with the recommended net
    wanted = {digest: settings_that_affect_results(spec) for digest, spec in saved.items()}
    for candidate in candidates:
        if candidate.random_seed == seed and not differing_paths(settings, wanted[candidate.digest], saved[candidate.digest]):
            return run_key(candidate)
    nearest = min(
        candidates, key=lambda candidate: (len(describe_changes(settings, wanted[candidate.digest])), candidate.random_seed != seed)
    )
    seeds = [str(candidate.random_seed) for candidate in candidates if candidate.digest == nearest.digest]
    listed = describe_changes(settings, wanted[nearest.digest]) or [f"meta.random_seed: {seed}; the study has {', '.join(seeds)}"]
    near = f"the nearest is {nearest.entry}, {nearest.env}, which differs in {', '.join(listed)}"
    raise UserError(f"--adopt: {folder} is not a run of the study; {near}")
