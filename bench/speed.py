"""Training frames per second against Stable-Baselines3 and Sample Factory: `python -m bench.speed` (or `make bench`).

Each case runs in a fresh process per side, ours and the peer's in alternation, with one torch thread in each process. Start-up is left out:
time is measured from the first row (log_frequency frames) to the last. Medians over the rounds, their spread and the ratio are printed and
saved in bench/results/.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Peer:
    """Another library, in a virtual environment of its own."""

    name: str
    folder: str
    script: str
    packages: tuple[str, ...]
    constrained: bool = True
    """Whether it is installed with our constraints.txt."""


SB3 = Peer("Stable-Baselines3", "sb3", "peer_sb3.py", ("stable-baselines3==2.9.2", "torch==2.13.0", "gymnasium[mujoco]==1.4.0"))
SF = Peer("Sample Factory", "sf", "peer_sf.py", ("sample-factory==2.1.1", "torch==2.13.0"), constrained=False)
PEERS = {
    **dict.fromkeys(("ppo_cartpole", "a2c_cartpole", "ppo_halfcheetah", "dqn_cartpole", "sac_halfcheetah", "a3c_cartpole"), SB3),
    "appo_cartpole": SF,
}
CASES = tuple(PEERS)
PEER_CASES = {"a3c_cartpole": "a2c_cartpole"}
"""Case → what the peer runs instead because it has no such mode: the same numbers of envs, steps and weights in one process."""


def peer_python(peer: Peer) -> Path:
    """Return the Python of the peer's virtual environment, which is created first if it does not exist."""
    home = ROOT / ".peers" / peer.folder
    python, ready = home / "bin" / "python", home / ".ready"
    if not ready.exists():
        sys.stderr.write(f"setting up {home.relative_to(ROOT)} (once)\n")
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        constraints = ["-c", str(ROOT / "constraints.txt")] if peer.constrained else []
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *constraints, *peer.packages], check=True)
        ready.touch()
    return python


def measure(command: list[str]) -> dict[str, Any]:
    """Run one side once; its last line of output is its result."""
    # One thread per process, also in the libraries below torch.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_case(case: str, rounds: int, given: Path | None) -> dict[str, Any]:
    """Run both sides in alternation. Return frames per second of every round, versions, and the ratio of the medians."""
    peer = PEERS[case]
    theirs = [str(given or peer_python(peer)), f"bench/{peer.script}", PEER_CASES.get(case, case)]
    sides = {"ours": [sys.executable, "-m", "bench.ours", case], "peer": theirs}
    fps: dict[str, list[float]] = {side: [] for side in sides}
    result: dict[str, Any] = {"case": case, "peer": peer.name, "fps": fps}
    for number in range(rounds):
        # The order changes with each round, so that a machine that warms up or slows down favours neither side.
        for side in sorted(sides, reverse=bool(number % 2)):
            measured = measure(sides[side])
            fps[side].append(round(measured["fps"], 1))
            result[f"{side}_version"], result[f"{side}_frames"] = measured["version"], measured["frames"]
            sys.stderr.write(f"{case} round {number + 1}/{rounds} {side}: {measured['fps']:,.0f} frames/s\n")
    result["ratio"] = round(median(fps["ours"]) / median(fps["peer"]), 2)
    return result


def row(result: dict[str, Any]) -> str:
    """Return one line of the table: medians with their spread, the ratio of the medians, and the spread of the rounds' ratios."""
    ours, peer = result["fps"]["ours"], result["fps"]["peer"]
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    sides = [f"{median(fps):9,.0f} ({min(fps):,.0f} to {max(fps):,.0f})" for fps in (ours, peer)]
    peers = f"{result['peer']:18} {sides[1]:30}"
    return f"{result['case']:16} {sides[0]:30} {peers} {result['ratio']:5.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", help=f"which cases, of {', '.join(CASES)}; none: all")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side per case (3)")
    parser.add_argument("--peer-python", type=Path, help="Python that has the cases' peer; absent: one under .peers, made where missing")
    options = parser.parse_args()
    if unknown := sorted(set(options.cases) - set(CASES)):
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> None:
    options = arguments()
    results = [run_case(case, options.rounds, options.peer_python) for case in options.cases or CASES]
    header = f"{'case':16} {'slm_lab frames/s (spread)':30} {'peer':18} {'frames/s (spread)':30} ratio"
    sys.stdout.write("\n".join([header, *map(row, results)]) + "\n")
    report = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "results": results,
    }
    path = ROOT / "bench" / "results" / f"speed_{datetime.now():%Y_%m_%d_%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
