"""Run one speed case in rl_games, with the hyperparameters of specs.json: `python -m bench.peer_rl_games CASE [THREADS]`.

rl_games 2 is in no package index: set PYTHONPATH to a checkout of https://github.com/Denys88/rl_games. The script runs with the Python of
the peer's virtual environment and does not import slm_lab. The last line of the output is {"fps": ..., "frames": ..., "version": ...,
"env_us": ...}; "frames" are transitions, and "env_us" is the time of a transition in EnvPool (µs).
"""

import json
import os
import sys
import tempfile
import tomllib
from pathlib import Path
from time import perf_counter
from typing import Any

try:
    import rl_games
except ImportError:
    raise SystemExit("rl_games is not installed: set PYTHONPATH to a checkout of https://github.com/Denys88/rl_games") from None

from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import DefaultAlgoObserver
from rl_games.envs.envpool import Envpool
from rl_games.torch_runner import Runner

from bench.envpool_clock import EnvPoolClock


class Stopwatch(DefaultAlgoObserver):
    """Records frames and time after each rollout and its updates."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[int, float]] = []

    def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
        super().after_print_stats(frame, epoch_num, total_time)
        self.marks.append((frame, perf_counter()))


class OnePart(Envpool):
    """An env of EnvPool whose observation is one part of the env's Dict observation."""

    observation_space: Any
    """Space of the part, of a class that depends on the version of rl_games."""

    def __init__(self, config_name: str, num_actors: int, part: str, **kwargs: Any) -> None:
        super().__init__(config_name, num_actors, **kwargs)
        self.part, self.observation_space = part, self.observation_space[part]

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs[self.part], *rest

    def reset(self) -> Any:
        return super().reset()[self.part]


vecenv.register("ONE_PART", OnePart)
env_configurations.register("one_part", {"vecenv_type": "ONE_PART"})


FIXED = {
    "device": "cpu",
    "normalize_advantage": True,
    "value_bootstrap": True,
    "reward_shaper": {"scale_value": 1},
    "lr_schedule": None,
    "truncate_grads": True,
    "clip_value": False,
    "bounds_loss_coef": None,
    "name": "bench",
}
"""Keys of the peer's configuration that are the same for all specs."""


def env_keys(env: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the peer's configuration that describe the env."""
    if parts := env.get("obs_keys"):
        return {"env_name": "one_part", "env_config": {"env_name": env["name"], "part": parts[0]}}
    return {"env_name": "envpool", "env_config": {"env_name": env["name"], "flatten_obs": env["name"] == "CheetahRun-v1"}}


def network(net: dict[str, Any]) -> dict[str, Any]:
    """Return the net of a spec as the peer's configuration."""
    actor = {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": net["log_std_init"]},
        "fixed_sigma": True,
    }
    mlp = {"units": net["hid_layers"], "activation": net["hid_layers_activation"], "initializer": {"name": "default"}}
    return {"name": "actor_critic", "separate": not net["shared"], "space": {"continuous": actor}, "mlp": mlp}


def training(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the peer's configuration that come from the algorithm, the optimizer and the env of a spec."""
    algorithm, net, env = spec["agent"]["algorithm"], spec["agent"]["net"], spec["env"]
    return {
        "gamma": algorithm["gamma"],
        "tau": algorithm["lam"],
        "e_clip": algorithm["clip_eps_spec"]["start_val"],
        "entropy_coef": algorithm["entropy_coef_spec"]["start_val"],
        "critic_coef": 2 * algorithm["val_loss_coef"],  # the peer halves this coefficient
        "learning_rate": net["optim_spec"]["lr"],
        "grad_norm": net["clip_grad_val"],
        "num_actors": env["num_envs"],
        "horizon_length": algorithm["time_horizon"],
        "minibatch_size": algorithm["minibatch_size"],
        "mini_epochs": algorithm["training_epoch"],
        "max_epochs": env["max_frame"] // (env["num_envs"] * algorithm["time_horizon"]),
        "normalize_input": env["normalize_obs"],
        "normalize_value": algorithm["normalize_v_targets"],
    }


def config(spec: dict[str, Any], threads: int) -> dict[str, Any]:
    """Return the spec as the peer's configuration. Values that are not in the spec are those of the peer's file for HalfCheetah."""
    return {
        "torch_threads": threads,
        "seed": spec["meta"]["random_seed"] + 1,  # for the peer, 0 means no seed
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": network(spec["agent"]["net"]),
        "config": {**training(spec), **FIXED, **env_keys(spec["env"])},
    }


def installed_version() -> str:
    """Return the version of the peer from the pyproject.toml of its checkout."""
    return str(tomllib.loads((Path(rl_games.__file__).parent.parent / "pyproject.toml").read_text())["project"]["version"])


def main(case: str, threads: str = "1") -> None:
    spec = json.loads((Path(__file__).parent / "specs.json").read_text())[case]
    watch, clock, version = Stopwatch(), EnvPoolClock(), installed_version()
    clock.start()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        runner = Runner(watch)
        runner.load({"params": config(spec, int(threads))})
        runner.run({"train": True})
    first, last = next(mark for mark in watch.marks if mark[0] >= spec["meta"]["log_frequency"]), watch.marks[-1]
    transitions, env_us = clock.between(first[0], last[0])
    result = {"fps": transitions / (last[1] - first[1]), "frames": transitions, "version": version, "env_us": env_us}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
