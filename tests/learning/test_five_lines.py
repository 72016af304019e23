"""A short spec (algorithm, env, frames) trains in every env whose spaces agents support, and the trained agent acts from Python."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from slm_lab import Trial, load_agent, load_spec

FRAMES = 5000
IMAGE = {"obs_keys": ["image"]}
ENVS: list[tuple[str, str, dict[str, Any]]] = [
    ("PPO", "CartPole-v0", {}),
    ("DQN", "CartPole-v1", {}),
    ("DoubleDQN", "Acrobot-v1", {}),
    ("SARSA", "MountainCar-v0", {}),
    ("SoftActorCritic", "MountainCarContinuous-v0", {}),
    ("CrossQ", "Pendulum-v1", {}),
    ("PPO", "Blackjack-v1", {}),
    ("ActorCritic", "CliffWalking-v1", {"max_t": 200}),
    ("PPO", "FrozenLake-v1", {}),
    ("DQN", "FrozenLake8x8-v1", {}),
    ("Reinforce", "Taxi-v3", {}),
    ("VanillaDQN", "LunarLander-v3", {}),
    ("SIL", "LunarLander-v3", {"continuous": True}),
    ("PPOSIL", "BipedalWalker-v3", {}),
    ("PPO", "BipedalWalkerHardcore-v3", {}),
    ("PPO", "CarRacing-v3", {"max_t": 200}),
    ("PPO", "Ant-v5", {}),
    ("SoftActorCritic", "HalfCheetah-v5", {}),
    ("ActorCritic", "Hopper-v5", {}),
    ("PPO", "Hopper-v4", {}),
    ("PPO", "Ant-v4", {}),
    ("PPO", "Humanoid-v5", {}),
    ("PPO", "HumanoidStandup-v5", {}),
    ("PPO", "InvertedDoublePendulum-v5", {}),
    ("CrossQ", "InvertedPendulum-v5", {}),
    ("PPO", "Pusher-v5", {}),
    ("SoftActorCritic", "Reacher-v5", {}),
    ("PPO", "Swimmer-v5", {}),
    ("ActorCritic", "Walker2d-v5", {}),
    ("PPO", "ALE/Pong-v5", {}),
    ("DQN", "ALE/Breakout-v5", {}),
    ("ActorCritic", "ALE/SpaceInvaders-v5", {}),
    ("DoubleDQN", "ALE/Qbert-v5", {}),
    ("PPO", "ALE/Seaquest-v5", {}),
    ("PPO", "ALE/MsPacman-v5", {}),
    ("PPO", "minigrid:MiniGrid-Empty-5x5-v0", IMAGE),
    ("PPO", "minigrid:MiniGrid-DoorKey-5x5-v0", {"obs_keys": ["image", "direction"]}),
    ("DQN", "minigrid:MiniGrid-FourRooms-v0", IMAGE),
    ("ActorCritic", "minigrid:MiniGrid-LavaGapS5-v0", IMAGE),
    ("PPO", "minigrid:MiniGrid-MemoryS7-v0", {"obs_keys": ["direction", "image"]}),
    ("SoftActorCritic", "minigrid:MiniGrid-Dynamic-Obstacles-5x5-v0", IMAGE),
]


def test_there_are_forty() -> None:
    assert len({env for _, env, _ in ENVS}) == 40, "LunarLander is in it twice: with discrete and with continuous actions"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("algorithm", "env", "keys"), ENVS)
def test_a_short_spec_trains_and_acts(algorithm: str, env: str, keys: dict[str, Any], tmp_path: Path) -> None:
    spec = load_spec({
        "agent": {"algorithm": {"name": algorithm}},
        "env": {"name": env, "max_frame": FRAMES, **keys},
    })  # fmt: skip
    result = Trial(spec, tmp_path).run()
    assert result["status"] == "done"
    assert result.train["frame"].max() == FRAMES
    assert result.train["opt_step"].max() >= 1
    assert np.isfinite(result.train["loss"].dropna()).all()
    agent = load_agent(result.paths.root)
    if keys is IMAGE:
        whole, _ = gym.make(env).reset(seed=0)
        action, _ = agent.act(whole)  # the agent selects the image from the whole observation
        assert agent.action_space.contains(action), action
    agent.observation_space.seed(0)
    for _ in range(5):
        action, _ = agent.act(agent.observation_space.sample())
        assert agent.action_space.contains(action), action
