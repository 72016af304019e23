"""Run one speed case in Sample Factory, with the hyperparameters of specs.json: `python -m bench.peer_sf CASE`.

The script runs with the Python of the peer's virtual environment and does not import slm_lab. The last line of the output is
{"fps": ..., "frames": ..., "version": ...}.
"""

import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import gymnasium as gym
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner


class Stopwatch(AlgoObserver):
    """Records frames and time after each training step."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, float]] = []

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        self.marks.append((sum(runner.env_steps.values()), perf_counter()))


def arguments(spec: dict[str, Any], folder: str) -> list[str]:
    """Return the spec as command line arguments of the peer."""
    algorithm, net, env = spec["agent"]["algorithm"], spec["agent"]["net"], spec["env"]
    sampler = spec["meta"]["sampler"]
    return [
        "--algo=APPO",
        f"--env={env['name']}",
        "--experiment=bench",
        f"--train_dir={folder}",
        "--device=cpu",
        f"--async_rl={sampler['async_rl']}",
        f"--num_workers={sampler['num_workers']}",
        f"--num_envs_per_worker={sampler['num_envs_per_worker']}",
        "--worker_num_splits=2",
        f"--rollout={algorithm['time_horizon']}",
        f"--batch_size={algorithm['minibatch_size']}",
        f"--num_batches_per_epoch={sampler['num_batches_per_epoch']}",
        f"--num_epochs={algorithm['training_epoch']}",
        f"--gamma={algorithm['gamma']}",
        f"--gae_lambda={algorithm['lam']}",
        f"--learning_rate={net['optim_spec']['lr']}",
        "--use_rnn=False",
        "--actor_critic_share_weights=False",
        f"--nonlinearity={net['hid_layers_activation']}",
        "--encoder_mlp_layers",
        *map(str, net["hid_layers"]),
        "--normalize_input=False",
        "--normalize_returns=False",
        f"--train_for_env_steps={env['max_frame']}",
        f"--seed={spec['meta']['random_seed']}",
    ]


def make_env(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """Make an env. The peer calls this function in its workers."""
    return gym.make(name, render_mode=render_mode)


def main(case: str) -> None:
    spec = json.loads((Path(__file__).parent / "specs.json").read_text())[case]
    name = spec["env"]["name"]
    register_env(name, make_env)
    folder = tempfile.mkdtemp()
    words = arguments(spec, folder)
    parser, _ = parse_sf_args(words)
    cfg = parse_full_cfg(parser, words)
    cfg, runner = make_runner(cfg)
    stopwatch = Stopwatch()
    runner.register_observer(stopwatch)
    runner.init()
    runner.run()
    shutil.rmtree(folder, ignore_errors=True)
    first, last = next(mark for mark in stopwatch.marks if mark[0] >= spec["meta"]["log_frequency"]), stopwatch.marks[-1]
    frames = last[0] - first[0]
    result = {"fps": frames / (last[1] - first[1]), "frames": frames, "version": version("sample-factory")}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
