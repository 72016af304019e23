"""Run one speed case in Stable-Baselines3, its contrib package or SBX: `python -m bench.peer_sb3 CASE [THREADS]`.

The hyperparameters are those of specs.json. The script runs with the Python of the peer's virtual environment and does not import slm_lab.
SBX is used if it is installed, otherwise Stable-Baselines3. The last line of the output is {"fps": ..., "frames": ..., "version": ...}.
"""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

try:
    import sbx as library  # SBX has algorithms with the same names and arguments, and installs Stable-Baselines3
except ImportError:
    import stable_baselines3 as library


class Stopwatch(BaseCallback):
    """Records frames and time at the start of each rollout, which is the end of the previous update, and at the end of training."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[int, float]] = []

    def _on_rollout_start(self) -> None:
        self.marks.append((self.num_timesteps, perf_counter()))

    def _on_training_end(self) -> None:
        self.marks.append((self.num_timesteps, perf_counter()))

    def _on_step(self) -> bool:
        return True

    def since(self, warm_up: int) -> tuple[int, float]:
        """Return the frames and seconds from the first mark at or after `warm_up` frames to the end."""
        frame, start = next(mark for mark in self.marks if mark[0] >= warm_up)
        last_frame, end = self.marks[-1]
        return last_frame - frame, end - start


def build(spec: dict[str, Any]) -> BaseAlgorithm:
    """Return the peer's algorithm with the hyperparameters of the spec."""
    return (on_policy if "lam" in spec["agent"]["algorithm"] else off_policy)(spec)


def make_env(spec: dict[str, Any]) -> VecEnv:
    """Return the vector env of the spec, with the peer's wrappers for Atari and for normalisation."""
    env = spec["env"]
    if env["name"].startswith("ALE/"):
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        return VecFrameStack(make_atari_env(env["name"], n_envs=env["num_envs"], seed=spec["meta"]["random_seed"]), n_stack=4)
    if ":" in env["name"]:  # an env in bench, which needs only Gymnasium
        sys.path.insert(0, str(Path(__file__).parent.parent))
    made = make_vec_env(env["name"], n_envs=env["num_envs"], seed=spec["meta"]["random_seed"])
    obs, reward = env.get("normalize_obs", False), env.get("normalize_reward", False)
    return VecNormalize(made, norm_obs=obs, norm_reward=reward, gamma=spec["agent"]["algorithm"]["gamma"]) if obs or reward else made


def off_policy(spec: dict[str, Any]) -> BaseAlgorithm:
    """Return an off-policy algorithm.

    DQN (64 × 64, relu), SAC (256 × 256, relu) and SBX's CrossQ have the default nets of the peer's policy; QR-DQN and TD3 have the layer
    widths of the spec, with relu.
    """
    algorithm, net, memory = spec["agent"]["algorithm"], spec["agent"]["net"], spec["agent"]["memory"]
    common: dict[str, Any] = {
        "policy": "MlpPolicy",
        "env": make_env(spec),
        "learning_rate": net["optim_spec"]["lr"],
        "gamma": algorithm["gamma"],
        "batch_size": memory["batch_size"],
        "buffer_size": memory["max_size"],
        "learning_starts": algorithm["training_start_step"],
        "train_freq": algorithm["training_frequency"],
        "gradient_steps": algorithm["training_iter"],
        "seed": spec["meta"]["random_seed"],
        "device": "cpu",
    }
    if algorithm["name"] == "CrossQ":
        return library.CrossQ(policy_delay=algorithm["policy_delay"], **common)
    if algorithm["name"] == "SoftActorCritic":
        return library.SAC(tau=net["polyak_coef"], **common)
    return (td3 if algorithm["name"] == "TD3" else dqn)(spec, common)


def td3(spec: dict[str, Any], common: dict[str, Any]) -> BaseAlgorithm:
    """Return TD3.

    Args: common: arguments of all off-policy algorithms.
    """
    algorithm, net = spec["agent"]["algorithm"], spec["agent"]["net"]
    dim = common["env"].action_space.shape[0]
    return library.TD3(
        tau=net["polyak_coef"],
        policy_delay=algorithm["policy_delay"],
        target_policy_noise=algorithm["target_noise"],
        target_noise_clip=algorithm["target_noise_clip"],
        action_noise=NormalActionNoise(np.zeros(dim), np.full(dim, algorithm["explore_var_spec"]["start_val"])),
        policy_kwargs={"net_arch": widths(net)},
        **common,
    )


def dqn(spec: dict[str, Any], common: dict[str, Any]) -> BaseAlgorithm:
    """Return DQN or QR-DQN.

    Args: common: arguments of all off-policy algorithms.
    """
    algorithm, net = spec["agent"]["algorithm"], spec["agent"]["net"]
    kind, explore, others = library.DQN, algorithm["explore_var_spec"], {}
    if library.__name__ != "sbx":  # SBX does not clip gradients
        others["max_grad_norm"] = net["clip_grad_val"]
    if algorithm["name"] == "QRDQN":
        import sb3_contrib

        kind = sb3_contrib.QRDQN
        others["policy_kwargs"] = {"n_quantiles": algorithm["num_quantiles"], "net_arch": widths(net)}
    return kind(
        target_update_interval=net["update_frequency"],
        exploration_fraction=explore["end_step"] / spec["env"]["max_frame"],
        exploration_final_eps=explore["end_val"],
        **others,
        **common,
    )


def on_policy(spec: dict[str, Any]) -> BaseAlgorithm:
    """Return PPO or A2C with separate tanh nets or, for images, with shared convolutional layers as in Mnih et al. 2015."""
    algorithm, net = spec["agent"]["algorithm"], spec["agent"]["net"]
    lr, optimizer = net["optim_spec"]["lr"], net["optim_spec"]["name"]
    common: dict[str, Any] = {
        "policy": "CnnPolicy" if net["name"] == "ConvNet" else "MlpPolicy",
        "env": make_env(spec),
        "learning_rate": (lambda left: lr * left) if "lr_scheduler_spec" in net else lr,
        "gamma": algorithm["gamma"],
        "gae_lambda": algorithm["lam"],
        "ent_coef": algorithm["entropy_coef_spec"]["start_val"],
        "vf_coef": algorithm["val_loss_coef"],
        "max_grad_norm": net["clip_grad_val"],
        "normalize_advantage": True,
        "policy_kwargs": {} if net["name"] == "ConvNet" else {"net_arch": {"pi": widths(net), "vf": widths(net)}},
        "seed": spec["meta"]["random_seed"],
        "device": "cpu",
    }
    if optimizer == "AdamW":
        common["policy_kwargs"]["optimizer_class"] = torch.optim.AdamW
    if algorithm["name"] == "ActorCritic":
        return library.A2C(n_steps=algorithm["training_frequency"], use_rms_prop=True, rms_prop_eps=net["optim_spec"]["eps"], **common)
    kind = library.PPO
    if spec["env"].get("action_mask"):
        import sb3_contrib

        kind = sb3_contrib.MaskablePPO
    return kind(
        n_steps=algorithm["time_horizon"],
        batch_size=algorithm["minibatch_size"],
        n_epochs=algorithm["training_epoch"],
        clip_range=algorithm["clip_eps_spec"]["start_val"],
        **common,
    )


def widths(net: dict[str, Any]) -> list[int]:
    """Return the widths of the hidden layers of an MLPNet, or of a TorchArcNet with one chain of layers."""
    if net["name"] == "MLPNet":
        return list(net["hid_layers"])
    return [layer["LazyLinear"]["out_features"] for layer in net["arc"]["modules"]["body"]["Sequential"] if "LazyLinear" in layer]


def main(case: str, threads: str = "1") -> None:
    torch.set_num_threads(int(threads))
    spec = json.loads((Path(__file__).parent / "specs.json").read_text())[case]
    watch = Stopwatch()
    build(spec).learn(spec["env"]["max_frame"], callback=watch)
    frames, seconds = watch.since(spec["meta"]["log_frequency"])
    sys.stdout.write(json.dumps({"fps": frames / seconds, "frames": frames, "version": library.__version__}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
