"""Train one agent of another library, and write the returns of its episodes: `python bench/peer_training.py PROGRAM ENV FRAMES SEED FILE`.

bench/peers.py starts this script with the Python of the peer's virtual environment; the script does not import slm_lab. FILE is a JSON file
with these keys:

- `episodes`: [frame, seconds, return] of each training episode
- `evaluations`: [frame, seconds, [returns]] of each evaluation
- `frames`
- `seconds`: training time, without the time of evaluations
- `versions`
- `settings`: the arguments that are not defaults

Returns are those of the environment itself, before any normalisation. There is no current package of CleanRL: set PYTHONPATH to a checkout
of https://github.com/vwxyzjn/cleanrl.
"""

import importlib.metadata
import importlib.util
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import torch

EVALUATIONS, EVALUATION_EPISODES = 10, 10
"""Number of evenly spaced evaluations of an off-policy algorithm, and number of episodes of each evaluation. Actions are deterministic."""
Results = dict[str, Any]


class Log:
    """Records the returns of training episodes, and counts the steps of all envs with a Recorder."""

    def __init__(self) -> None:
        self.frame, self.begin, self.paused = 0, perf_counter(), 0.0
        self.episodes: list[tuple[int, float, float]] = []
        self.evaluations: list[tuple[int, float, list[float]]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the first step, without the time of evaluations."""
        return perf_counter() - self.begin - self.paused


class Recorder(gym.Wrapper):
    """Writes the return of each episode to a log."""

    def __init__(self, env: gym.Env, log: Log) -> None:
        super().__init__(env)
        self.log, self.total = log, 0.0

    def reset(self, **kwargs: Any) -> Any:
        self.total = 0.0
        if not self.log.frame:
            self.log.begin = perf_counter()
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.log.frame += 1
        self.total += float(reward)
        if terminated or truncated:
            self.log.episodes.append((self.log.frame, self.log.seconds, self.total))
            self.total = 0.0
        return obs, reward, terminated, truncated, info


# ---- CleanRL


def cleanrl_ppo(env: str, frames: int, seed: int, log: Log) -> Results:
    """Run CleanRL's ppo_continuous_action.py, unchanged, with its defaults.

    The script was written for an older version of Gymnasium. Three adaptations make the installed version behave like that version: vector
    envs reset in the step that ends an episode; their `final_info`, which the script prints, is removed; and TransformObservation receives
    the observation space of its env.
    """
    package = importlib.util.find_spec("cleanrl")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("CleanRL is not found: set PYTHONPATH to a checkout of https://github.com/vwxyzjn/cleanrl")
    script = Path(next(iter(package.submodule_search_locations))) / "ppo_continuous_action.py"
    make, transform = gym.make, gym.wrappers.TransformObservation

    class SameStep(gym.vector.SyncVectorEnv):
        def __init__(self, makers: Any) -> None:
            super().__init__(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            return *rest, {key: value for key, value in infos.items() if "final_info" not in key}

    arguments = {"env-id": env, "total-timesteps": frames, "seed": seed}
    sys.argv = [str(script), *(word for key, value in arguments.items() for word in (f"--{key}", str(value))), "--no-cuda"]
    with (
        patch.object(gym, "make", lambda *args, **kwargs: Recorder(make(*args, **kwargs), log)),
        patch.object(
            gym.wrappers, "TransformObservation", lambda base_env, function: transform(base_env, function, base_env.observation_space)
        ),
        patch.object(gym.vector, "SyncVectorEnv", SameStep),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return {"program": "ppo_continuous_action.py of CleanRL"}


# ---- Stable-Baselines3 and SBX


def learner(library: str, algorithm: str, settings: Results, *, evaluated: bool) -> Callable[[str, int, int, Log], Results]:
    """Return a function that trains an algorithm of a library with `settings`; other arguments have their defaults.

    Args: evaluated: whether the function also evaluates the agent (see EVALUATIONS).
    """

    def train(env: str, frames: int, seed: int, log: Log) -> Results:
        import numpy as np
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.evaluation import evaluate_policy
        from stable_baselines3.common.monitor import Monitor
        from stable_baselines3.common.noise import NormalActionNoise

        class Evaluate(BaseCallback):
            def __init__(self, every: int) -> None:
                super().__init__()
                self.every, self.env = every, Monitor(gym.make(env))
                self.env.reset(seed=seed + 500)

            def _on_step(self) -> bool:
                if self.num_timesteps % self.every == 0:
                    begin, seconds = perf_counter(), log.seconds
                    returns, _ = evaluate_policy(self.model, self.env, EVALUATION_EPISODES, return_episode_rewards=True)
                    log.evaluations.append((self.num_timesteps, seconds, [float(one) for one in returns]))
                    log.paused += perf_counter() - begin
                return True

        kind = getattr(importlib.import_module(library), algorithm)
        made = Recorder(gym.make(env), log)
        given = dict(settings)
        if "action_noise" in given:
            assert isinstance(made.action_space, gym.spaces.Box)
            size = made.action_space.shape[0]
            given["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, given["action_noise"]))
        model = kind("MlpPolicy", made, seed=seed, device="cpu", **given)
        model.learn(frames, callback=Evaluate(max(1, frames // EVALUATIONS)) if evaluated else None)
        return {"program": f"{algorithm} of {library}", **settings}

    return train


NETS = {"net_arch": {"pi": [256, 256], "qf": [2048, 2048]}}
PROGRAMS: dict[str, Callable[[str, int, int, Log], Results]] = {
    "cleanrl_ppo": cleanrl_ppo,
    "sb3_ppo": learner("stable_baselines3", "PPO", {}, evaluated=False),
    # the settings of RL Zoo's files for these envs
    "sb3_sac": learner("stable_baselines3", "SAC", {"learning_starts": 10000}, evaluated=True),
    "sb3_td3": learner(
        "stable_baselines3",
        "TD3",
        {
            "learning_starts": 10000,
            "learning_rate": 1e-3,
            "batch_size": 256,
            "action_noise": 0.1,
            "policy_kwargs": {"net_arch": [400, 300]},
        },
        evaluated=True,
    ),
    "sbx_crossq": learner(
        "sbx", "CrossQ", {"learning_starts": 5000, "learning_rate": 1e-3, "policy_delay": 3, "policy_kwargs": NETS}, evaluated=True
    ),
}
"""Name → function (env, frames, seed, log) that trains the program and returns the settings that it used."""


def versions() -> dict[str, str]:
    """Return package → version of the relevant packages that are installed."""
    packages = ("stable-baselines3", "sbx-rl", "gymnasium", "mujoco", "torch", "jax")
    installed = {}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def main(program: str, env: str, frames: str, seed: str, file: str) -> None:
    torch.set_num_threads(1)
    log, target = Log(), Path(file).absolute()
    with tempfile.TemporaryDirectory() as folder:  # the programs write to the current folder
        os.chdir(folder)
        settings = PROGRAMS[program](env, int(frames), int(seed), log)
        os.chdir(target.parent)
    content = {
        "episodes": log.episodes,
        "evaluations": log.evaluations,
        "frames": log.frame,
        "seconds": log.seconds,
        "versions": versions(),
        "settings": settings,
    }
    target.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
