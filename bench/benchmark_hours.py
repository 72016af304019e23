"""Hours that the missing runs of `make benchmarks` take on this machine: `python -m bench.benchmark_hours [NAME …] [--seconds 20]`.

Each entry of a study that lacks results trains for some seconds in each of its envs, as the study would train it but without the frames
before its first update. From the frames per second follow the hours of one core. Results go to standard output, as a Markdown table.
"""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.ours import frames_and_seconds
from bench.studies import STUDIES, missing_runs
from slm_lab.experiment.plan import Plan, TrialFailed
from slm_lab.experiment.run.trial import Trial
from slm_lab.lib.limits import processor_name
from slm_lab.spec.load.study_file import load_study
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.models.study import StudyRun


class Rate(NamedTuple):
    """The speed of an entry in an env, and what is left to train."""

    study: str
    entry: str
    env: str
    runs: int
    """Runs that have no result yet."""
    frames: int
    """Frames of all of these runs and their sessions."""
    per_second: float | None
    """Frames per second of a run on one core, of all workers of a distributed run together; None: the run failed."""

    @property
    def hours(self) -> float | None:
        return None if not self.per_second else self.frames / self.per_second / 3600


def shortened(spec: Spec, seconds: float) -> Spec:
    """Return the spec with a limit of seconds, rows after each rollout or few frames, and updates almost from the start."""
    algorithm, meta = spec.agent.algorithm, spec.meta
    sessions = meta.max_session if meta.distributed else 1
    if not algorithm.on_policy:
        algorithm = algorithm.model_copy(update={"training_start_step": 500})
    env = spec.env.model_copy(update={"max_frame": 10**9})
    rows = max(100, spec.agent.rollout_len * env.num_envs) if algorithm.on_policy else 100
    limits = {"max_session": sessions, "max_seconds": seconds, "log_frequency": rows, "rigorous_eval": 0, "eval_episodes": 0}
    agent = spec.agent.model_copy(update={"algorithm": algorithm})
    return spec.model_copy(update={"agent": agent, "env": env, "meta": meta.model_copy(update=limits)})


def frames_per_second(spec: Spec, seconds: float) -> float | None:
    """Train for some seconds and return the frames per second after the first row; None if training failed or gave a single row."""
    with TemporaryDirectory() as folder:
        try:
            Trial(shortened(spec, seconds), plan=Plan(data_dir=Path(folder), jobs=1)).run()
        except TrialFailed as error:
            sys.stderr.write(f"{error}\n")
            return None
        tables = [frames_and_seconds(table) for table in Path(folder).glob("*/info/*_session_df_train.csv")]
    return sum(frames / seconds for frames, seconds in tables if seconds) or None


def rates(name: str, seconds: float) -> Iterator[Rate]:
    """Measure each entry of a study in each env in which it lacks results."""
    missing = missing_runs(load_study(STUDIES[name].file, name), STUDIES[name].results)
    left = Counter((run.entry, run.env) for run in missing)
    first: dict[tuple[str, str], StudyRun] = {}
    for run in missing:
        first.setdefault((run.entry, run.env), run)
    for (entry, env), run in first.items():
        sessions = 1 if run.spec.meta.distributed else run.spec.meta.max_session
        frames = left[entry, env] * sessions * run.spec.env.max_frame
        rate = Rate(name, entry, env, left[entry, env], frames, frames_per_second(run.spec, seconds))
        sys.stderr.write(f"{line(rate)}\n")
        yield rate


def line(rate: Rate) -> str:
    """Return a row of the table."""
    speed, hours = ("failed", "") if rate.per_second is None or rate.hours is None else (f"{rate.per_second:,.0f}", f"{rate.hours:.1f}")
    return f"| {rate.study} | {rate.env} | {rate.entry} | {rate.runs} | {rate.frames:,} | {speed} | {hours} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.benchmark_hours", description="Hours that the missing runs of studies take.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training of each entry in each env (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in STUDIES:
            parser.error(f"unknown study '{name}'; expected one of {', '.join(STUDIES)}")
    logging.disable(logging.WARNING)
    found = [rate for name in options.names or STUDIES for rate in rates(name, options.seconds)]
    sys.stdout.write("| study | env | entry | runs left | frames | frames/s | hours of a core |\n|---|---|---|---|---|---|---|\n")
    sys.stdout.write("".join(f"{line(rate)}\n" for rate in found))
    for name in dict.fromkeys(rate.study for rate in found):
        hours = sum(rate.hours or 0.0 for rate in found if rate.study == name)
        sys.stdout.write(f"{name}: {hours:.1f} hours\n")
    sys.stdout.write(f"{processor_name()}\n")


if __name__ == "__main__":
    main()
