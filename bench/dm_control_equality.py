"""Compare EnvPool's DeepMind Control envs with dm_control: `python -m bench.dm_control_equality PYTHON`.

PYTHON is the interpreter of a virtual environment with dm_control and mujoco 3 (pip install dm_control "mujoco<4"). slm_lab steps each env
of EnvPool with smooth random actions. dm_control then repeats the steps in two ways: each step from the state in EnvPool's observation, and
all steps from the first state. The command prints the largest differences of observations and rewards, and the number of steps after which
the second way differs by 0.001.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

STEPS, SEED = 1_000, 1
TASKS = {"CheetahRun-v1": ("cheetah", "run"), "WalkerWalk-v1": ("walker", "walk"), "CartpoleSwingup-v1": ("cartpole", "swingup")}


def smooth_actions(size: int) -> np.ndarray:
    """Return actions between −1 and 1, float64 [STEPS, size]: sums of two sines with random frequencies and phases."""
    rng = np.random.default_rng(SEED)
    frequency, phase = rng.uniform(0.02, 0.2, (2, 1, size)), rng.uniform(0, 2 * np.pi, (2, 1, size))
    return np.asarray(np.sin(np.arange(STEPS)[:, None] * frequency + phase).mean(0))


def recorded(name: str) -> dict[str, np.ndarray]:
    """Step an env of EnvPool through slm_lab, and return the actions, the rewards, and each part of the observations, [STEPS + 1, …]."""
    import gymnasium as gym

    from slm_lab.env.make import choose_backend, make_env_request
    from slm_lab.spec.models.env import EnvSpec

    spec = EnvSpec(name=name, max_frame=1, num_envs=1)
    target = make_env_request(spec, 1)
    backend = choose_backend(spec, target)(target)
    assert isinstance(backend.action_space, gym.spaces.Box)
    actions = smooth_actions(backend.action_space.shape[0])
    observations, rewards = [backend.reset([SEED])], []
    for action in actions[:-1]:  # the last step would reset the env
        raw = backend.step(action[None])
        observations.append(raw.obs)
        rewards.append(raw.reward_N[0])
    backend.close()
    parts = {key: np.stack([observation[key][0] for observation in observations]) for key in observations[0]}
    return {"action": actions[:-1], "reward": np.array(rewards), **{f"obs_{key}": value for key, value in parts.items()}}


def planar_angles(cos_sin: np.ndarray, physics: Any) -> list[float]:
    """Return the hinge angles of walker, each relative to the parent body, from the orientations (xx, xz) of its bodies."""
    angles = np.arctan2(cos_sin[1::2], cos_sin[::2])
    parents = [None, 0, 1, 2, 0, 4, 5]  # torso, right thigh, leg, foot, left thigh, leg, foot
    relative = [angle - (0.0 if parent is None else angles[parent]) for angle, parent in zip(angles, parents, strict=True)]
    signs = physics.model.jnt_axis[2:, 1]
    return [float((angle + np.pi) % (2 * np.pi) - np.pi) * sign for angle, sign in zip(relative, signs, strict=True)]


def cheetah_state(obs: dict[str, np.ndarray], physics: Any) -> np.ndarray:
    """Return qpos of cheetah."""
    return np.concatenate([[0.0], obs["position"]])


def walker_state(obs: dict[str, np.ndarray], physics: Any) -> np.ndarray:
    """Return qpos of walker, in which the height is relative to the position of the torso in the model."""
    offset = physics.model.body_pos[physics.model.name2id("torso", "body"), 2]
    return np.array([obs["height"].item() - offset, 0.0, *planar_angles(obs["orientations"], physics)])


def cartpole_state(obs: dict[str, np.ndarray], physics: Any) -> np.ndarray:
    """Return qpos of cartpole."""
    x, cos, sin = obs["position"]
    return np.array([x, np.arctan2(sin, cos) * physics.model.jnt_axis[1, 1]])


POSITIONS: dict[str, Callable[[dict[str, np.ndarray], Any], np.ndarray]] = {
    "cheetah": cheetah_state,
    "walker": walker_state,
    "cartpole": cartpole_state,
}
"""Domain → function that computes qpos from an observation. The horizontal position of cheetah and walker is 0, since no observation
contains it and no force depends on it."""


def compared(name: str, data: dict[str, np.ndarray]) -> dict[str, Any]:
    """Repeat the recorded steps in dm_control, and return the differences for both ways of repetition.

    In the first way, each step starts from the recorded state; in the second way, all steps follow from the first recorded state.
    """
    from dm_control import suite

    domain, task = TASKS[name]
    env = suite.load(domain, task)
    parts = {key.removeprefix("obs_"): value for key, value in data.items() if key.startswith("obs_")}

    def restore(step: int) -> None:
        obs = {key: value[step] for key, value in parts.items()}
        with env.physics.reset_context():
            env.physics.data.qpos[:] = POSITIONS[domain](obs, env.physics)
            env.physics.data.qvel[:] = obs["velocity"]

    def difference(step: int, timestep: Any) -> float:
        return max(float(np.abs(np.ravel(timestep.observation[key]) - np.ravel(value[step + 1])).max()) for key, value in parts.items())

    result: dict[str, Any] = {}
    for way, each in (("each step", True), ("all steps", False)):
        env.reset()
        restore(0)
        steps = []
        for step, action in enumerate(data["action"]):
            if each and step:
                restore(step)
            timestep = env.step(action)
            steps.append((difference(step, timestep), abs(timestep.reward - data["reward"][step]), timestep.reward))
        result[way] = summary(np.array(steps), data["reward"])
    return result


def summary(steps: np.ndarray, rewards: np.ndarray) -> dict[str, Any]:
    """Return the largest and median differences and both returns.

    Args:
        steps: [steps, 3]: for each step, the largest difference of an observation, the difference of the reward, and dm_control's reward.
        rewards: [steps]: EnvPool's rewards.
    """
    obs, reward, other_rewards = steps.T
    far = np.flatnonzero(obs > 1e-3)
    return {
        "largest difference of an observation": float(obs.max()),
        "median": float(np.median(obs)),
        "largest difference of a reward": float(reward.max()),
        "steps until 0.001": int(far[0]) if len(far) else len(obs),
        "returns": [float(rewards.sum()), float(other_rewards.sum())],
    }


def main(python: str) -> None:
    """Record the steps of each task, and compare them in a process of `python`."""
    with tempfile.TemporaryDirectory() as folder:
        for name in TASKS:
            file = Path(folder) / f"{name}.npz"
            arrays: dict[str, Any] = recorded(name)  # for mypy, arrays could also be the parameter allow_pickle
            np.savez(file, **arrays)
            done = subprocess.run([python, __file__, "--compare", name, str(file)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{python} failed:\n{done.stderr[-3000:]}")
            sys.stdout.write(f"{name} {json.dumps(json.loads(done.stdout.splitlines()[-1]), indent=1)}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.stdout.write(json.dumps(compared(sys.argv[2], dict(np.load(sys.argv[3])))) + "\n")
    else:
        main(*sys.argv[1:])
