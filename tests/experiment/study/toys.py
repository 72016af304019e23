"""Small studies, and runs without pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.files.paths import StudyPaths
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.experiment.run.study.study import StudyExperiment
from slm_lab.experiment.run.study.study_run import RunJob, run_study_task
from slm_lab.lib.files import replace_file, with_checksum
from slm_lab.spec.load.study_file import load_study

NET = {"name": "MLPNet", "hid_layers": [8], "gpu": False}
A2C = {
    "agent": {
        "algorithm": {"name": "ActorCritic", "lam": 0.9, "training_frequency": 8},
        "memory": {"name": "OnPolicyBatchReplay"},
        "net": {**NET, "optim_spec": {"name": "Adam", "lr": 0.01}},
    },
    "env": {"name": "CartPole-v1", "num_envs": 2, "max_frame": 400},
    "meta": {"log_frequency": 100, "save_interval": 0.05},
}
STUDY: dict[str, Any] = {
    "entries": [{"spec": "a2c", "label": "slow", "set": {"agent.net.optim_spec.lr": 0.001}}, {"spec": "a2c", "label": "fast"}],
    "random_seed": [0, 1],
    "metric": "total_reward",
    "baseline": "slow",
}


def blank_run(context: Context, job: RunJob) -> None:
    """Run as in a study, with blank pictures."""
    from slm_lab.experiment.report import writer
    from tests.blank import BlankRenderer

    writer.PNGRenderer = BlankRenderer  # type: ignore[assignment, misc]
    run_study_task(context, job)


def write(folder: Path, study: dict[str, Any] | None = None, **keys: Any) -> Path:
    """Write a file with the spec a2c and a study of it."""
    folder.mkdir(exist_ok=True)
    file = folder / "study.json"
    file.write_text(json.dumps({"a2c": A2C, "small": {"study": {**(study or STUDY), **keys}}}))
    return file


def run(folder: Path, paths: StudyPaths | None = None, adopt: list[str] | None = None, jobs: int = 2, **keys: Any) -> StudyPaths:
    """Run a study; if it exists, only its missing runs."""
    study = load_study(write(folder, **keys), "small")
    return StudyExperiment(study, Plan(data_dir=folder / "data", jobs=jobs), paths=paths, adopt=adopt or (), target=blank_run).run()


def results(paths: StudyPaths) -> dict[tuple[str, int], ResultRun]:
    """Return a dict from (label, random_seed) to the result."""
    read = (ResultRun(file) for file in paths.results.glob("*.json"))
    return {(one.content["entry"], one.content["random_seed"]): one for one in read}


def written(paths: StudyPaths) -> dict[tuple[str, int], int]:
    """Return a dict from (label, random_seed) to the modification time of the run's table."""
    return {
        (identity["entry"], identity["random_seed"]): max(file.stat().st_mtime_ns for file in path.parent.glob("*/info/*_train.csv"))
        for path in paths.runs.glob("*/study_run.json")
        for identity in [json.loads(path.read_text())]
        if any(path.parent.glob("*/info/*_train.csv"))
    }


RETURNS: dict[str, Callable[[int], float]] = {
    "slow": lambda seed: 20.0 + seed,
    "fast": lambda seed: 480.0 - seed,
    "same": lambda seed: 20.0,
}


def made_up_run(context: Context, job: RunJob) -> None:
    """Write a result with the return that RETURNS gives, instead of training."""
    identity = json.loads(job.folder.identity.read_text(encoding="utf-8"))
    write_made_up(job.result, identity)
    context.send("outcome", "done", "")


def failing_run(context: Context, job: RunJob) -> None:
    """Do the same as `made_up_run`, but fail for random_seed 2."""
    identity = json.loads(job.folder.identity.read_text(encoding="utf-8"))
    if identity["random_seed"] == 2:
        return context.send("outcome", "invalid", "the env is gone")
    made_up_run(context, job)


def evaluated_run(context: Context, job: RunJob) -> None:
    """Do the same as `made_up_run`, but give runs of the entry fast evaluations of return 0."""
    identity = json.loads(job.folder.identity.read_text(encoding="utf-8"))
    write_made_up(job.result, identity, {"0": {"frame": [200], "total_reward": [0.0]}} if identity["entry"] == "fast" else {})
    context.send("outcome", "done", "")


def write_made_up(file: Path, identity: dict[str, Any], evaluation: dict[str, Any] | None = None) -> None:
    value = RETURNS[identity["entry"]](identity["random_seed"])
    table = {"0": {"frame": [100, 200], "total_reward": [10.0, value], "current_return": [10.0, value]}}
    body = {"version": 1, **identity, "status": "done", "policies": 1, "seconds": 1.0, "failures": {}, "sessions": {"0": "done"}}
    content = with_checksum(
        {**body, "spec_name": "a2c", "versions": {}, "git": None, "processor": "", "train": table, "eval": evaluation or {}}
    )
    replace_file(file, json.dumps(content).encode())
