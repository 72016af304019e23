"""Cost of training several agents: `python -m bench.agents [CASE …] [--pairs 10]`.

Each case compares a run with several agents and a run with one agent:

- pair: an env with two agents that act simultaneously, against two envs with one agent. Both runs have the same CartPoles, rows and
  updates.
- connect_four: self-play without opponents (both players learn), against an env with one player that has the same games, observations,
  net and transitions per step.

Both runs of a pair are executed at the same time on one core. The command prints the ratio of their frames per second of processor time:
the geometric mean over the pairs with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from bench.paired import T95, last_line, ratio, start_python
from slm_lab.env.backend import EnvRequest, RawStep
from slm_lab.env.gym_backends import Sync
from slm_lab.env.native_backends import EnvPoolAgents

Value = TypeVar("Value")


class Pair(Sync):
    """An env in which two CartPoles are the two agents."""

    agents = ("one", "other")
    name = ""

    def __init__(self, target: EnvRequest) -> None:
        super().__init__(replace(target, num_envs=2 * target.num_envs))

    def reset(self, seeds: Sequence[int] | None) -> Any:
        return super().reset(None if seeds is None else [seed + agent for seed in seeds for agent in range(2)])


class OnePlayer(EnvPoolAgents):
    """ConnectFour as an env with one player, who makes the moves of both sides and observes what the side that moves next observes."""

    name = ""

    def __init__(self, target: EnvRequest) -> None:
        super().__init__(replace(target, id="ConnectFour-v1", registration=None))
        self.agents = ()

    def _moving_rows(self, values: Any) -> Any:
        """Return the rows of the sides that move next."""
        rows = 2 * self._envs_N + self._turn_N
        return {key: value[rows] for key, value in values.items()} if isinstance(values, dict) else values[rows]

    def reset(self, seeds: Sequence[int] | None) -> Any:
        self.agents = ("one", "other")
        return self._as_one_player(self._moving_rows(super().reset(seeds)))

    def step(self, action: np.ndarray) -> RawStep:
        self.agents = ("one", "other")
        raw = super().step(action.repeat(2))
        flags = (self._moving_rows(raw.reward_N), self._moving_rows(raw.terminated_N), self._moving_rows(raw.truncated_N))
        return self._as_one_player(RawStep(self._moving_rows(raw.obs), *flags, None))

    def _as_one_player(self, value: Value) -> Value:
        """Set the attributes to those of an env with one player, and return `value`."""
        self.agents, self.acts_N = (), None
        return value


def _case(algorithm: dict[str, Any], env: dict[str, Any], width: int) -> dict[str, Any]:
    net = {"name": "MLPNet", "hid_layers": [width, width], "hid_layers_activation": "relu", "optim_spec": {"name": "Adam", "lr": 0.001}}
    meta = {"eval_episodes": 0, "random_seed": 0}
    return {"agent": {"algorithm": {"name": "PPO", **algorithm}, "net": net}, "env": {"name": "CartPole-v1", **env}, "meta": meta}


_PAIR = {"time_horizon": 32, "minibatch_size": 64, "training_epoch": 4}
_GAME = {"time_horizon": 32, "minibatch_size": 512, "training_epoch": 4}
CASES = {
    "pair": (
        _case(_PAIR, {"backend": "bench.agents:Pair", "num_envs": 4, "max_frame": 40_000}, 64),
        _case(_PAIR, {"backend": "sync", "num_envs": 8, "max_frame": 80_000}, 64),
        2.0,
    ),
    "connect_four": (
        _case(_GAME, {"name": "ConnectFour-v1", "num_envs": 64, "max_frame": 100_000}, 256),
        _case(_GAME, {"backend": "bench.agents:OnePlayer", "num_envs": 64, "max_frame": 100_000}, 256),
        1.0,
    ),
}
"""Name → (spec with several agents, spec with one agent, number of frames of the second spec that correspond to one frame of the first)."""

RUN = """
import json, sys, time
import slm_lab
session = slm_lab.Session(slm_lab.load_spec({"run": json.loads(sys.argv[1])}, "run")).build()
begin = time.process_time()
frames = session.run().frame
print(frames / (time.process_time() - begin))
"""


def start(body: dict[str, Any], core: int) -> subprocess.Popen[str]:
    """Start a run on a core. The run prints its frames per second of processor time."""
    return start_python(["-c", RUN, json.dumps(body)], core)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agents", description="Measure the cost of training several agents.")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--pairs", type=int, default=10, choices=[n + 1 for n in T95], help="number of pairs (10)")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"unknown case {unknown[0]!r}; expected one of {', '.join(CASES)}")
    import torch

    sys.stdout.write(f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}\n")
    for name in arguments.cases:
        several, one, factor = CASES[name]
        ratios = []
        for number in range(arguments.pairs):
            runs = [start(body, number % (os.cpu_count() or 1)) for body in (several, one)]
            fps = [float(last_line(run)) for run in runs]
            ratios.append(factor * fps[0] / fps[1])
        mean, low, high = ratio(ratios)
        sys.stdout.write(f"{name}: {mean:.3f} ({low:.3f} to {high:.3f}) of the frames per second with one agent\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
