"""Training speed of this checkout against another one: `python -m bench.paired OTHER_CHECKOUT [CASE …] [--pairs 20] [--core 0]`.

Both run a case in turn, in fresh processes, the order changing from pair to pair. Printed are the frames per second of both (medians), and
the ratio of this checkout to the other: the geometric mean over the pairs with its 95 % interval (Student's t on the logarithms).
"""

import argparse
import json
import math
import os
import subprocess
import sys
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
T95 = {4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 24: 2.064, 29: 2.045}
"""Degrees of freedom → two-sided 95 % quantile of Student's t."""


def measure(checkout: Path, case: str, core: int | None) -> float:
    """Frames per second of one run."""
    command = [sys.executable, str(ROOT / "bench" / "ours.py"), case, str(FRAMES[case])]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}, {case}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["fps"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the training speed of two checkouts, pair by pair.")
    parser.add_argument("other", type=Path)
    parser.add_argument("cases", nargs="*", default=list(FRAMES))
    parser.add_argument("--pairs", type=int, default=20, choices=[n + 1 for n in T95])
    parser.add_argument("--core", type=int, help="pin both to this core")
    arguments = parser.parse_args()
    import torch

    sys.stdout.write(f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    for case in arguments.cases:
        speeds: dict[Path, list[float]] = {ROOT: [], arguments.other.resolve(): []}
        for pair in range(arguments.pairs):
            for checkout in list(speeds)[:: 1 if pair % 2 else -1]:
                speeds[checkout].append(measure(checkout, case, arguments.core))
        here, other = speeds.values()
        logs = [math.log(a / b) for a, b in zip(here, other, strict=True)]
        half = T95[arguments.pairs - 1] * stdev(logs) / math.sqrt(len(logs))
        mean, low, high = (math.exp(fmean(logs) + step) for step in (0.0, -half, half))
        sys.stdout.write(f"{case}: {median(here):,.0f} against {median(other):,.0f} frames/s, ratio {mean:.3f} ({low:.3f} to {high:.3f})\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
