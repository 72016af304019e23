"""Frames per second of PPO on CartPole over the number of envs: `python -m bench.width [--rounds N] [--picture FILE]`.

For every number of envs, a rollout has four minibatches and four epochs, so that the computation per frame stays the same. The env is also
measured without an agent, with random actions. Each measurement is a new process. Training is measured with one torch thread and with
`--threads` threads.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

SPECS = Path(__file__).parent / "specs.json"
HORIZONS = {8: 128, 64: 64, 512: 32, 4096: 16}
"""Number of envs → number of steps of a rollout."""
SECONDS = 4.0
"""Approximate time of a measurement, s."""


def sets(envs: int, threads: int, frames: int) -> list[str]:
    """Return the arguments of --set for a number of envs."""
    rollout = envs * HORIZONS[envs]
    return [
        f"env.num_envs={envs}",
        f"agent.algorithm.time_horizon={HORIZONS[envs]}",
        f"agent.algorithm.minibatch_size={rollout // 4}",
        f"meta.threads={threads}",
        f"meta.log_frequency={rollout}",
        f"env.max_frame={frames}",
    ]


def training(envs: int, threads: int) -> float:
    """Return the frames per second of training, from the first row to the last."""
    import slm_lab
    from bench.ours import frames_and_seconds

    rollout = envs * HORIZONS[envs]
    rate, frames = 0.0, 4 * rollout
    for _ in range(2):  # the first run shows how many frames take SECONDS
        with TemporaryDirectory() as folder:
            slm_lab.Trial(slm_lab.load_spec(str(SPECS), "ppo_cartpole", sets(envs, threads, frames)), data_dir=folder).run()
            (table,) = Path(folder).glob("*/info/*_session_df_train.csv")
            counted, seconds = frames_and_seconds(table)
        rate = counted / seconds
        frames = max(4, int(rate * SECONDS / rollout)) * rollout
    return rate


def env_alone(envs: int, threads: int) -> float:
    """Return the frames per second of the env without an agent; the random actions are drawn beforehand."""
    import slm_lab
    from slm_lab.env.make import make_env

    env = make_env(slm_lab.load_spec(str(SPECS), "ppo_cartpole", sets(envs, threads, 10**6)).env, 0)
    env.reset()
    actions = [env.sample() for _ in range(16)]
    begin, steps = perf_counter(), 0
    while perf_counter() - begin < SECONDS:
        env.step(actions[steps % 16])
        steps += 1
    rate = steps * envs / (perf_counter() - begin)
    env.close()
    return rate


MEASURES = {"env": env_alone, "training": training}


def measure(what: str, envs: int, threads: int) -> float:
    """Return the result of a measurement in a new process."""
    command = [sys.executable, "-m", "bench.width", "--one", what, str(envs), str(threads)]
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def draw(rates: dict[str, list[float]], picture: Path) -> None:
    """Draw the rates over the number of envs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=150)
    for (name, values), colour, above in zip(rates.items(), ("#7F7F7F", "#0072B2", "#D55E00"), (7, -14, 7), strict=True):
        axes.plot(list(HORIZONS), values, marker="o", label=name, color=colour)
        for envs, value in zip(HORIZONS, values, strict=True):
            axes.annotate(f"{value / 1000:,.0f} k", (envs, value), textcoords="offset points", xytext=(0, above), ha="center", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(HORIZONS), [f"{envs:,}" for envs in HORIZONS])
    axes.set_xlabel("environments")
    axes.set_ylabel("frames per second")
    axes.set_title("PPO on CartPole-v1")
    axes.margins(x=0.08, y=0.15)
    axes.grid(color="#E3E3E3")
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.width", description="Measure frames per second of PPO on CartPole over the number of envs."
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case, of which the median is printed (3)")
    parser.add_argument("--threads", type=int, default=2, help="number of torch threads of the second training curve (2)")
    parser.add_argument("--picture", type=Path, help="PNG file to which the curves are drawn")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, envs, threads = options.one
        sys.stdout.write(json.dumps(MEASURES[what](int(envs), int(threads))) + "\n")
        return
    import torch

    sys.stdout.write(f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    curves = {
        "env alone": ("env", 1),
        "training, one thread": ("training", 1),
        f"training, {options.threads} threads": ("training", options.threads),
    }
    rates: dict[str, list[float]] = {name: [] for name in curves}
    for envs in HORIZONS:
        measured = {name: [measure(what, envs, threads) for _ in range(options.rounds)] for name, (what, threads) in curves.items()}
        for name, values in measured.items():
            rates[name].append(median(values))
            sys.stdout.write(f"{envs:6,} envs  {name:24} {median(values):12,.0f} ({min(values):,.0f} to {max(values):,.0f})\n")
            sys.stdout.flush()
    if options.picture:
        draw(rates, options.picture)


if __name__ == "__main__":
    main()
