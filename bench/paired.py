"""Training speed of this checkout against another one: `python -m bench.paired OTHER_CHECKOUT [CASE …] [--pairs 20]`.

A case with one process is run by both checkouts at the same time on the same core, and its speed is in frames per second of CPU time of
`Session.run`. Other programs and changes in the speed of the core therefore affect both checkouts in the same way. A case with several
processes is run by one checkout after the other, in alternating order, and its speed is in frames per second of wall-clock time. The
command prints the medians and the ratio of this checkout to the other one: the geometric mean over the pairs with its 95 % interval
(Student's t on the logarithms).
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev

ROOT = Path(__file__).resolve().parent.parent
FRAMES = {
    "ppo_cartpole": 150_000,
    "a2c_cartpole": 200_000,
    "a2c_one_env": 60_000,
    "dqn_cartpole": 7_000,
    "sac_halfcheetah": 1_500,
    "ppo_halfcheetah": 20_480,
    "ppo_hopper_arc": 8_192,
    "crossq_halfcheetah": 600,
    "ppo_pong": 2_048,
    "appo_cartpole": 250_000,
    "a3c_cartpole": 250_000,
    "a3c_one_env": 256_000,
}
"""Case → number of frames."""
SEVERAL_PROCESSES = ("appo_cartpole", "a3c_cartpole", "a3c_one_env")
T95 = {4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 24: 2.064, 29: 2.045}
"""Degrees of freedom → two-sided 95 % quantile of Student's t."""


CPU_SECONDS = """
import sys, time
import slm_lab
session = slm_lab.Session(slm_lab.load_spec(sys.argv[1], sys.argv[2], ["env.max_frame=" + sys.argv[3]])).build()
begin = time.process_time()
session.run()
print(time.process_time() - begin)
"""


def start_python(words: Sequence[str], core: int | None, checkout: Path = ROOT) -> subprocess.Popen[str]:
    """Start Python, with one thread, in a checkout.

    Args:
        words: arguments of Python.
        core: the core on which the process runs; None: all cores.
        checkout: root folder of the checkout, which is also the working directory.
    """
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*pinned, sys.executable, *words]
    return subprocess.Popen(command, env=env, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start(checkout: Path, case: str, core: int | None) -> subprocess.Popen[str]:
    """Start a run. A run on one core prints its CPU time. A run on all cores (`core` is None) prints its frames per second."""
    frames = str(FRAMES[case])
    if core is None:
        return start_python([str(ROOT / "bench" / "ours.py"), case, frames], core, checkout)
    return start_python(["-c", CPU_SECONDS, str(ROOT / "bench" / "specs.json"), case, frames], core, checkout)


def last_line(run: subprocess.Popen[str]) -> str:
    """Wait for a run to end, and return the last line that it printed. Raises SystemExit if the run fails."""
    out, errors = run.communicate()
    if run.returncode:
        raise SystemExit(errors[-2000:])
    return out.splitlines()[-1]


def pair(checkouts: Sequence[Path], case: str, number: int) -> list[float]:
    """Return the frames per second of each checkout in pair `number`."""
    order = [0, 1][:: 1 if number % 2 else -1]
    if case not in SEVERAL_PROCESSES:
        core = number // 2 % (os.cpu_count() or 1)
        runs = {which: start(checkouts[which], case, core) for which in order}
        return [FRAMES[case] / float(last_line(runs[which])) for which in (0, 1)]
    fps = {which: float(json.loads(last_line(start(checkouts[which], case, None)))["fps"]) for which in order}
    return [fps[0], fps[1]]


def ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the ratios of the pairs, and the bounds of its 95 % confidence interval."""
    logs = [math.log(value) for value in ratios]
    half = T95[len(logs) - 1] * stdev(logs) / math.sqrt(len(logs))
    return math.exp(fmean(logs)), math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.paired", description="Compare the training speed of two checkouts.")
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT", help="the root folder of the other checkout")
    parser.add_argument("cases", nargs="*", default=list(FRAMES), metavar="CASE", help=f"{', '.join(FRAMES)} (default: all)")
    parser.add_argument("--pairs", type=int, default=20, choices=[n + 1 for n in T95], help="number of pairs (20)")
    arguments = parser.parse_args()
    for case in arguments.cases:
        if case not in FRAMES:
            parser.error(f"unknown case {case!r}; expected one of {', '.join(FRAMES)}")
    import torch

    sys.stdout.write(f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    for case in arguments.cases:
        pairs = [pair((ROOT, arguments.other.resolve()), case, number) for number in range(arguments.pairs)]
        here, other = zip(*pairs, strict=True)
        mean, low, high = ratio([a / b for a, b in zip(here, other, strict=True)])
        sys.stdout.write(f"{case}: {median(here):,.0f} against {median(other):,.0f} frames/s, ratio {mean:.3f} ({low:.3f} to {high:.3f})\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
