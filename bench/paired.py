"""Training speed of this checkout against another one: `python -m bench.paired OTHER_CHECKOUT [CASE …] [--pairs 20]`.

A case of one process runs in both checkouts at the same time, each on a core of its own, and the cores are swapped from pair to pair: what
else the machine does slows both. A case of several processes runs in turn, the order changing from pair to pair. Printed are the frames
per second of both (medians), and the ratio of this checkout to the other: the geometric mean over the pairs with its 95 % interval
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
    "dqn_cartpole": 7_000,
    "sac_halfcheetah": 1_500,
    "appo_cartpole": 250_000,
    "a3c_cartpole": 250_000,
}
TOGETHER = ("ppo_cartpole", "a2c_cartpole", "dqn_cartpole", "sac_halfcheetah")
"""Cases of one process."""
T95 = {4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 24: 2.064, 29: 2.045}
"""Degrees of freedom → two-sided 95 % quantile of Student's t."""


def start(checkout: Path, case: str, core: int | None) -> subprocess.Popen[str]:
    """Begin one run, on `core` if given."""
    command = [sys.executable, str(ROOT / "bench" / "ours.py"), case, str(FRAMES[case])]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fps_of(run: subprocess.Popen[str]) -> float:
    """Wait for a run; return its frames per second."""
    out, errors = run.communicate()
    if run.returncode:
        raise SystemExit(errors[-2000:])
    return float(json.loads(out.splitlines()[-1])["fps"])


def pair(checkouts: Sequence[Path], case: str, number: int) -> list[float]:
    """Frames per second of each checkout in pair `number`."""
    order = [0, 1][:: 1 if number % 2 else -1]
    if case in TOGETHER and (os.cpu_count() or 1) > 1:
        runs = [start(checkout, case, core) for checkout, core in zip(checkouts, order, strict=True)]
        return [fps_of(run) for run in runs]
    fps = {which: fps_of(start(checkouts[which], case, None)) for which in order}
    return [fps[0], fps[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the training speed of two checkouts, pair by pair.")
    parser.add_argument("other", type=Path)
    parser.add_argument("cases", nargs="*", default=list(FRAMES))
    parser.add_argument("--pairs", type=int, default=20, choices=[n + 1 for n in T95])
    arguments = parser.parse_args()
    import torch

    sys.stdout.write(f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    for case in arguments.cases:
        pairs = [pair((ROOT, arguments.other.resolve()), case, number) for number in range(arguments.pairs)]
        here, other = zip(*pairs, strict=True)
        logs = [math.log(a / b) for a, b in zip(here, other, strict=True)]
        half = T95[arguments.pairs - 1] * stdev(logs) / math.sqrt(len(logs))
        mean, low, high = (math.exp(fmean(logs) + step) for step in (0.0, -half, half))
        sys.stdout.write(f"{case}: {median(here):,.0f} against {median(other):,.0f} frames/s, ratio {mean:.3f} ({low:.3f} to {high:.3f})\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
