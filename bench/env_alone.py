"""EnvPool's env of a speed case without an agent: `python -m bench.env_alone CASE [THREADS]`.

Actions are normally distributed random numbers, like those of an untrained policy. The last line of the output is
{"fps": ..., "frames": ..., "version": ...}.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import numpy as np

from slm_lab.env.envpool_suites import import_envpool

SECONDS = 5.0


def main(case: str, threads: str = "1") -> None:
    env = json.loads((Path(__file__).parent / "specs.json").read_text())[case]["env"]
    several = 2 * int(threads) if int(threads) > 1 else 1  # as many threads as slm_lab uses
    pool = import_envpool().make(env["name"], env_type="gymnasium", num_envs=env["num_envs"], num_threads=several, seed=1)
    rng, space = np.random.default_rng(0), pool.action_space
    actions = [rng.normal(size=(env["num_envs"], *space.shape)).clip(space.low, space.high).astype(space.dtype) for _ in range(64)]
    pool.reset()
    command, steps, begin = pool._from(actions[0]), 0, perf_counter()
    while (elapsed := perf_counter() - begin) < SECONDS:
        command[-1] = actions[steps % len(actions)]
        pool._send(command)
        pool._recv()
        steps += 1
    frames = steps * env["num_envs"]
    sys.stdout.write(json.dumps({"fps": frames / elapsed, "frames": frames, "version": version("envpool")}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
