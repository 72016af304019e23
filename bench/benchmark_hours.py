"""Hours that the missing runs of `make benchmarks` take on this machine: `python -m bench.benchmark_hours [NAME …] [--seconds 20]`.

Each entry of a study that lacks results is trained for some seconds in each of its envs, in this process. The training is the same as in
the study, except that updates begin almost immediately and there are no evaluations. Frames and time are counted from the first row. The
time is processor time, so that other programs have little influence. The hours are hours of one core. The table is printed in Markdown.
"""

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.studies import STUDIES, missing_runs, study_of
from slm_lab.experiment.events import Event, Row
from slm_lab.experiment.files.sink import RunSink
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.session import Session
from slm_lab.lib.limits import processor_name
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.models.study import StudyRun


class Rate(NamedTuple):
    """The speed of an entry in an env, and the number of runs without a result."""

    study: str
    entry: str
    env: str
    runs: int
    """Number of runs that have no result."""
    frames: int
    """Number of frames of these runs, summed over their Sessions."""
    per_second: float | None
    """Frames per second of one core; None if the training failed."""

    @property
    def hours(self) -> float | None:
        """Hours of one core; None if the training failed."""
        return None if not self.per_second else self.frames / self.per_second / 3600


class Stopwatch(RunSink):
    """Records the frame and the processor time at each training row, and requests a stop after some seconds."""

    def __init__(self, stop: Stop, seconds: float) -> None:
        self.stop, self.seconds = stop, seconds
        self.marks: list[tuple[int, float]] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Row) and event.mode == "train":
            self.marks.append((int(event.values["frame"] or 0), time.process_time()))
            if self.marks[-1][1] - self.marks[0][1] > self.seconds:
                self.stop.requested = True

    @property
    def frames_per_second(self) -> float | None:
        """Frames per second from the first row to the last; None if there are fewer than two rows."""
        (first, begin), (last, end) = (self.marks[0], self.marks[-1]) if self.marks else ((0, 0.0), (0, 0.0))
        return (last - first) / (end - begin) if end > begin else None


def shortened(spec: Spec) -> Spec:
    """Return the spec with one Session, one thread, frequent rows and no evaluations, and with updates that begin almost immediately."""
    algorithm = spec.agent.algorithm
    if not algorithm.on_policy:
        algorithm = algorithm.model_copy(update={"training_start_step": 500})
    rows = spec.agent.rollout_len * spec.env.num_envs if algorithm.on_policy else 200
    limits = {"max_session": 1, "log_frequency": rows, "rigorous_eval": 0, "eval_episodes": 0, "threads": 1}
    agent = spec.agent.model_copy(update={"algorithm": algorithm})
    return spec.model_copy(update={"agent": agent, "meta": spec.meta.model_copy(update=limits)})


def frames_per_second(spec: Spec, seconds: float) -> float | None:
    """Train a Session (one worker of a distributed run) for some seconds, and return its frames per second of processor time.

    Returns None, with a message, if the training fails.
    """
    stop, store = Stop(), None
    if spec.meta.distributed:
        fd = create_shared_file()
        store = SharedArrays(fd, synced=spec.meta.distributed == "synced")
    watch = Stopwatch(stop, seconds)
    try:
        session = Session(shortened(spec), plan=Plan(), sink=watch, context=SessionContext(stop=stop, store=store)).build()
        session.run()
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return None
    finally:
        if store is not None:
            os.close(fd)
    return watch.frames_per_second


def rates(name: str, seconds: float, envs: Sequence[str] = ()) -> Iterator[Rate]:
    """Yield the measured rate of each entry of a study in each env (or each of `envs`) in which the entry lacks results."""
    missing = missing_runs(study_of(name), STUDIES[name].results)
    left = Counter((run.entry, run.env) for run in missing)
    first: dict[tuple[str, str], StudyRun] = {}
    for run in missing:
        first.setdefault((run.entry, run.env), run)
    for (entry, env), run in first.items():
        if envs and env not in envs:
            continue
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
    parser = argparse.ArgumentParser(
        prog="python -m bench.benchmark_hours", description="Measure the hours that the missing runs of studies take."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"studies: {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--env", action="append", default=[], help="measure only this env (may be given several times)")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of training of each entry in each env (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in STUDIES:
            parser.error(f"unknown study '{name}'; expected one of {', '.join(STUDIES)}")
    logging.disable(logging.WARNING)
    measured = [rate for name in options.names or STUDIES for rate in rates(name, options.seconds, options.env)]
    sys.stdout.write("| study | env | entry | runs left | frames | frames/s | hours of a core |\n|---|---|---|---|---|---|---|\n")
    sys.stdout.write("".join(f"{line(rate)}\n" for rate in measured))
    for name in dict.fromkeys(rate.study for rate in measured):
        hours = sum(rate.hours or 0.0 for rate in measured if rate.study == name)
        sys.stdout.write(f"{name}: {hours:.1f} hours\n")
    sys.stdout.write(f"{processor_name()}\n")


if __name__ == "__main__":
    main()
