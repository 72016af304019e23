"""Scaling of Hogwild!: updates per second of 2 workers against 1 worker: `python -m bench.scaling [CASE …] [--mode MODE …] [--rounds N]`.

Each measurement is a trial in new processes; trials with 1 and 2 workers alternate. The time of a worker is measured from its first row to
its last row. The workers of a trial run at the same time.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

CASES = ("a3c_cartpole", "async_sac_halfcheetah")
MODES = {"synced": ("synced", False), "shared": ("shared", False), "locked": ("synced", True)}
"""Mode → values of meta.distributed and meta.hogwild_lock."""
SPECS = Path(__file__).parent / "specs.json"


def updates_per_second(case: str, mode: str, locked: bool, workers: int) -> float:
    """Return the updates per second of all workers together. The number of frames per worker does not depend on the number of workers."""
    import slm_lab

    plain = slm_lab.load_spec(str(SPECS), case)
    frames = plain.env.max_frame * workers // plain.meta.max_session
    sets = [
        f"meta.distributed={mode}",
        f"meta.max_session={workers}",
        f"env.max_frame={frames}",
        f"meta.hogwild_lock={str(locked).lower()}",
    ]
    rate = 0.0
    with TemporaryDirectory() as folder:
        slm_lab.Trial(slm_lab.load_spec(str(SPECS), case, sets), data_dir=folder).run()
        for table in Path(folder).glob("*/info/*_session_df_train.csv"):
            with table.open(newline="") as file:
                first, *_, last = csv.DictReader(file)
            rate += (int(last["opt_step"]) - int(first["opt_step"])) / (float(last["wall_t"]) - float(first["wall_t"]))
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description="Compare 2 Hogwild workers with 1 worker.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be given several times (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each number of workers (3)")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, mode, workers = options.one
        sys.stdout.write(json.dumps(updates_per_second(case, *MODES[mode], int(workers))) + "\n")
        return
    if unknown := sorted(set(options.cases) - set(CASES)):
        parser.error(f"unknown case {unknown[0]!r}; expected one of {', '.join(CASES)}")
    sys.stdout.write(f"{'case':24} {'mode':16} {'1 worker':>12} {'2 workers':>12}  ratio (spread)\n")
    for case in options.cases or CASES:
        for mode in options.mode or MODES:
            rates: dict[int, list[float]] = {1: [], 2: []}
            for number in range(options.rounds):
                for workers in (1, 2) if number % 2 == 0 else (2, 1):
                    command = [sys.executable, "-m", "bench.scaling", "--one", case, mode, str(workers)]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    rates[workers].append(float(json.loads(done.stdout.strip().splitlines()[-1])))
            one, two = (median(rates[workers]) for workers in (1, 2))
            ratios = [b / a for a, b in zip(rates[1], rates[2], strict=True)]
            sys.stdout.write(f"{case:24} {mode:16} {one:12,.0f} {two:12,.0f}  {two / one:.2f} ({min(ratios):.2f} to {max(ratios):.2f})\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
