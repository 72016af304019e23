"""Gain of each fast path: `python -m bench.fast_paths [PATH …] [--pairs 10]`.

A fast path computes the same as the modules of a net or autograd in less time, and can be switched off. For each path, one case is run with
the switch on and with the switch off, both at the same time on the same core. The command prints the ratio of the speed with the path to
the speed without it, measured by CPU time of `Session.run`: the geometric mean over the pairs with its 95 % interval (Student's t on the
logarithms). A path with a ratio below 1.15 is not worth its code.
"""

import argparse
import os
import subprocess
import sys
from typing import NamedTuple

from bench.paired import ROOT, T95, last_line, ratio


class FastPath(NamedTuple):
    """The switch of a fast path, and the case in which the path is measured."""

    switch: str
    """The module-level constant that is the switch, as package.module:NAME."""
    case: str
    frames: int
    sets: tuple[str, ...] = ()


PATHS = {
    "numpy acting": FastPath("slm_lab.agent.policy.policy:NUMPY_ACTING", "a2c_one_env", 30_000),
    "closed-form objective": FastPath("slm_lab.agent.ops.objective:CLOSED_FORM", "ppo_cartpole", 60_000),
    "passes without a graph": FastPath("slm_lab.agent.net.passes.direct:DIRECT", "sac_halfcheetah", 1_500),
}
RUN = """
import importlib, sys, time
module, name = sys.argv[1].split(":")
if sys.argv[2] == "off":
    setattr(importlib.import_module(module), name, False)
import slm_lab
session = slm_lab.Session(slm_lab.load_spec(sys.argv[3], sys.argv[4], sys.argv[5:])).build()
begin = time.process_time()
session.run()
print(time.process_time() - begin)
"""


def start(path: FastPath, switch: str, core: int) -> subprocess.Popen[str]:
    """Start a run with the switch "on" or "off". The run prints its CPU time."""
    sets = [f"env.max_frame={path.frames}", *path.sets]
    command = [
        "taskset",
        "-c",
        str(core),
        sys.executable,
        "-c",
        RUN,
        path.switch,
        switch,
        str(ROOT / "bench" / "specs.json"),
        path.case,
        *sets,
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def gain(path: FastPath, number: int) -> float:
    """Return the CPU time without the path divided by the CPU time with it, in pair `number`."""
    runs = {switch: start(path, switch, number // 2 % (os.cpu_count() or 1)) for switch in (("on", "off") if number % 2 else ("off", "on"))}
    seconds = {switch: float(last_line(run)) for switch, run in runs.items()}
    return seconds["off"] / seconds["on"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what each fast path buys.")
    parser.add_argument("paths", nargs="*", default=list(PATHS), metavar="PATH", help=", ".join(PATHS))
    parser.add_argument("--pairs", type=int, default=10, choices=[n + 1 for n in T95])
    arguments = parser.parse_args()
    for name in arguments.paths:
        if name not in PATHS:
            parser.error(f"unknown path {name!r}; expected one of {', '.join(PATHS)}")
    import torch

    sys.stdout.write(f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    for name in arguments.paths:
        path = PATHS[name]
        mean, low, high = ratio([gain(path, number) for number in range(arguments.pairs)])
        case = " ".join((path.case, *path.sets))
        sys.stdout.write(f"{name} ({path.switch}), {case}: {mean:.2f} × ({low:.2f} to {high:.2f})\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
