"""Gain of each fast path: `python -m bench.fast_paths [PATH …] [--pairs 10]`.

A fast path computes the same results as the modules of a net or as autograd, but in less time. It has a switch. For each path, one case is
run with the switch on and with the switch off, both at the same time on the same core. The command prints the CPU time of `Session.run`
without the path divided by the CPU time with the path: the geometric mean over the pairs with its 95 % interval (Student's t on the
logarithms). A path with a ratio below 1.15 is not worth its code.
"""

import argparse
import os
import subprocess
import sys
from typing import NamedTuple

from bench.paired import ROOT, T95, last_line, ratio, start_python


class FastPath(NamedTuple):
    """The switch of a fast path, and the case in which the path is measured."""

    switch: str
    """The module-level constant that switches the path, as package.module:NAME."""
    case: str
    """Key in specs.json."""
    frames: int
    sets: tuple[str, ...] = ()
    """Arguments of --set."""


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
    return start_python(["-c", RUN, path.switch, switch, str(ROOT / "bench" / "specs.json"), path.case, *sets], core)


def gain(path: FastPath, number: int) -> float:
    """Return the CPU time without the path divided by the CPU time with the path, in pair `number`."""
    runs = {switch: start(path, switch, number // 2 % (os.cpu_count() or 1)) for switch in (("on", "off") if number % 2 else ("off", "on"))}
    seconds = {switch: float(last_line(run)) for switch, run in runs.items()}
    return seconds["off"] / seconds["on"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fast_paths", description="Measure the gain of each fast path.")
    parser.add_argument("paths", nargs="*", default=list(PATHS), metavar="PATH", help=f"{', '.join(PATHS)} (default: all)")
    parser.add_argument("--pairs", type=int, default=10, choices=[n + 1 for n in T95], help="number of pairs (10)")
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
