"""Frames per second of envs with random actions: `python -m bench.envs [ID …] [--num-envs N] [--threads N] [--seconds S]`."""

from __future__ import annotations

import argparse
import sys
import time

from slm_lab.env import make_env
from slm_lab.spec.models.env import EnvSpec

SUITES = (
    "CheetahRun-v1", "MuJoCoPlayground/Go1JoystickFlatTerrain-v1", "MetaWorld/Reach-v3", "FetchReach-v4", "MiniGrid-DoorKey-8x8-v0",
    "Jumanji/Snake-v1", "highway-fast-v0", "D1Basic-v1", "gfootball/academy_empty_goal-v1",
)  # fmt: skip
"""One env of each suite of EnvPool. Without ids, the command measures these envs."""


def frames_per_second(name: str, num_envs: int, threads: int, seconds: float) -> tuple[str, float]:
    """Return the backend and the frames per second; the time of the first reset is not included."""
    env = make_env(EnvSpec(name=name, max_frame=1, num_envs=num_envs), 0, threads=threads)
    try:
        env.reset()
        action, steps, begin = env.sample(), 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            env.step(action)
            steps += 1
            action = env.sample()
        return env.backend, steps * num_envs / elapsed
    finally:
        env.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.envs", description="Measure the frames per second of envs with random actions.")
    parser.add_argument("ids", nargs="*", default=SUITES, metavar="ID", help="ids of envs (default: one env of each suite of EnvPool)")
    parser.add_argument("--num-envs", type=int, default=8, help="number of parallel envs (8)")
    parser.add_argument("--threads", type=int, default=1, help="number of threads of the env (1)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each measurement (3)")
    given = parser.parse_args()
    for name in given.ids:
        backend, fps = frames_per_second(name, given.num_envs, given.threads, given.seconds)
        sys.stdout.write(f"{name:<45} {backend:<8} {fps:>10,.0f} frames/s\n")


if __name__ == "__main__":
    main()
