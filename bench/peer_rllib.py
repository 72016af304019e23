"""Run one speed case in RLlib, with the hyperparameters of specs.json: `python -m bench.peer_rllib CASE`.

The script runs with the Python of the peer's virtual environment and does not import slm_lab. The last line of the output is
{"fps": ..., "frames": ..., "version": ...}.
"""

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def algorithm_config(spec: dict[str, Any], batch: int) -> Any:
    """Return RLlib's configuration of the algorithm of a spec.

    Args: batch: number of transitions of an update.
    """
    algorithm, net = spec["agent"]["algorithm"], spec["agent"]["net"]
    common = {
        "lr": net["optim_spec"]["lr"],
        "gamma": algorithm["gamma"],
        "grad_clip": net["clip_grad_val"],
        "grad_clip_by": "global_norm",
        "vf_loss_coeff": algorithm["val_loss_coef"],
        "entropy_coeff": algorithm["entropy_coef_spec"]["start_val"],
        "train_batch_size_per_learner": batch,
    }
    if algorithm["name"] != "PPO":
        return IMPALAConfig().training(vtrace=True, **common)
    return PPOConfig().training(
        lambda_=algorithm["lam"],
        clip_param=algorithm["clip_eps_spec"]["start_val"],
        use_kl_loss=False,
        num_epochs=algorithm["training_epoch"],
        minibatch_size=algorithm["minibatch_size"],
        **common,
    )


def config_of(spec: dict[str, Any]) -> Any:
    """Return the spec as the peer's configuration."""
    algorithm, net, sampler = spec["agent"]["algorithm"], spec["agent"]["net"], spec["meta"]["sampler"]
    steps = algorithm["time_horizon" if algorithm["name"] == "PPO" else "training_frequency"]
    batch = sampler["num_workers"] * sampler["num_envs_per_worker"] * steps
    return (
        algorithm_config(spec, batch)
        .environment(spec["env"]["name"])
        .env_runners(
            num_env_runners=sampler["num_workers"],
            num_envs_per_env_runner=sampler["num_envs_per_worker"],
            rollout_fragment_length=steps,
        )
        .learners(num_learners=0)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=net["hid_layers"],
                fcnet_activation=net["hid_layers_activation"],
                head_fcnet_hiddens=[],
                vf_share_layers=False,
            )
        )
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=batch)
        .debugging(seed=spec["meta"]["random_seed"], log_level="ERROR")
    )


def main(case: str) -> None:
    spec = json.loads((Path(__file__).parent / "specs.json").read_text())[case]
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    algorithm = config_of(spec).build_algo()
    marks: list[tuple[int, float]] = []
    while not marks or marks[-1][0] < spec["env"]["max_frame"]:
        result = algorithm.train()
        marks.append((int(result["num_env_steps_sampled_lifetime"]), perf_counter()))
    algorithm.stop()
    ray.shutdown()
    first, last = next(mark for mark in marks if mark[0] >= spec["meta"]["log_frequency"]), marks[-1]
    frames = last[0] - first[0]
    result = {"fps": frames / (last[1] - first[1]), "frames": frames, "version": version("ray")}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
