"""Gain of asynchronous rollouts, which are collected while the learner trains, in frames per second: `python -m bench.overlap`.

In synchronous mode, the workers and the learner wait for each other. The possible gain of asynchronous mode depends on the times that
collecting and training take. Therefore the command first chooses training_epoch with a short synchronous run:

- `sleeper`: an env that sleeps for 1 ms in each step. Collecting and training take the same time, and the gain is at most 2 ×.
- `humanoid`: two workers and the learner share two cores. Collecting and training take the same number of core seconds, and the gain is at
  most 1.5 ×.

Each measurement is a trial in a separate process. The modes alternate.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

SPECS = Path(__file__).parent / "specs.json"
CASES = {"sleeper": 1, "humanoid": 2}
"""Case → number of cores that are used for collecting."""


class Sleeper(CartPoleEnv):
    """CartPole that sleeps for 1 ms in every step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return super().step(action)  # type: ignore[no-untyped-call]  # Gymnasium leaves it untyped


gym.register("Sleeper-v0", entry_point="bench.overlap:Sleeper", max_episode_steps=500)


def run(case: str, async_rl: bool, epochs: int) -> dict[str, float]:
    """Train a case and return its results.

    The results are: fps, the frames per second from the first row to the last; learner_busy, the share of this time in which the learner
    was busy; and lag, the mean policy lag.
    """
    import slm_lab

    sets = [f"meta.sampler.async_rl={str(async_rl).lower()}", f"agent.algorithm.training_epoch={epochs}"]
    with TemporaryDirectory() as folder:
        slm_lab.Trial(slm_lab.load_spec(str(SPECS), f"overlap_{case}", sets), data_dir=folder).run()
        (table,) = Path(folder).glob("*/info/*_session_df_train.csv")
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
    frames, seconds = (float(rows[-1][name]) - float(rows[0][name]) for name in ("frame", "wall_t"))
    busy = [float(row["learner_busy"]) for row in rows[1:] if row["learner_busy"]]
    lag = [float(row["lag_mean"]) for row in rows[1:] if row["lag_mean"]]
    return {"fps": frames / seconds, "learner_busy": mean(busy), "lag": mean(lag)}


def measured(case: str, async_rl: bool, epochs: int) -> dict[str, float]:
    """Return the result of `run` in a separate process."""
    command = [sys.executable, "-m", "bench.overlap", "--one", case, str(async_rl), str(epochs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def fitting_epochs(case: str) -> int:
    """Return the number of epochs for which training takes as many core seconds as collecting."""
    probe = 4
    share = measured(case, False, probe)["learner_busy"]
    return max(1, round(probe * CASES[case] * (1 - share) / share))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description="Compare asynchronous and synchronous rollouts.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode (3)")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, async_rl, epochs = options.one
        sys.stdout.write(json.dumps(run(case, async_rl == "True", int(epochs))) + "\n")
        return
    if unknown := sorted(set(options.cases) - set(CASES)):
        parser.error(f"unknown case {unknown[0]!r}; expected one of {', '.join(CASES)}")
    sys.stdout.write(f"{'case':10} {'epochs':>6} {'sync':>10} {'async':>10}  ratio (spread)        learner busy   lag\n")
    for case in options.cases or CASES:
        epochs = fitting_epochs(case)
        results: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for number in range(options.rounds):
            for async_rl in (False, True) if number % 2 == 0 else (True, False):
                results[async_rl].append(measured(case, async_rl, epochs))
        sync, asynchronous = ([result["fps"] for result in results[mode]] for mode in (False, True))
        ratios = [b / a for a, b in zip(sync, asynchronous, strict=True)]
        busy = [mean(result["learner_busy"] for result in results[mode]) for mode in (False, True)]
        lag = mean(result["lag"] for result in results[True])
        spread = f"{median(asynchronous) / median(sync):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        speeds = f"{median(sync):10,.0f} {median(asynchronous):10,.0f}"
        sys.stdout.write(f"{case:10} {epochs:6} {speeds}  {spread:20} {busy[0]:5.0%} → {busy[1]:4.0%} {lag:6.1f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
