"""Tests of the phase before the first training call: number of transitions, and the policy that acts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.replay.replay import Replay
from slm_lab.lib.records import ActionSpace
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, ToyEnv, agent_of, info, steps_of

NET = {**MLP, "batch_norm": True}


def toy_spec(name: str, batch: int = 8, **algorithm: Any) -> Spec:
    body: dict[str, Any] = {
        "agent": {
            "algorithm": {"name": name, **algorithm},
            "memory": {"name": "Replay", "batch_size": batch, "max_size": 5000},
            "net": NET,
        },
        "env": {"name": "CartPole-v1", "num_envs": 3, "max_frame": 9000},
    }
    return load_spec({"toy": body}, "toy")


def built(spec: Spec, action: ActionSpace = DISCRETE) -> tuple[Agent, Replay]:
    agent = agent_of(spec, info(3, action))
    assert isinstance(agent.replay, Replay)
    return agent, agent.replay


@pytest.mark.parametrize(
    ("name", "batch", "algorithm", "start"),
    [
        ("SoftActorCritic", 8, {}, 1000),
        ("CrossQ", 2000, {}, 2000),
        ("SoftActorCritic", 8, {"training_start_step": 40}, 40),
        ("DQN", 32, {}, 32),
        ("VanillaDQN", 32, {}, 32),
        ("DoubleDQN", 32, {"training_start_step": 40}, 40),
    ],
)
def test_training_starts(name: str, batch: int, algorithm: dict[str, Any], start: int) -> None:
    spec = toy_spec(name, batch, **algorithm)
    assert spec.agent.algorithm.model_dump()["training_start_step"] == start, "as it is saved"
    agent, replay = built(spec)
    next(None for _ in steps_of(agent, ToyEnv(info(3))) if agent.ready())
    assert replay.seen - 3 < start <= replay.seen


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("name", ["SoftActorCritic", "CrossQ"])
def test_actions_are_uniform_before_it(name: str, action: ActionSpace) -> None:
    agent, _ = built(toy_spec(name, training_start_step=30), action)
    obs = np.zeros((3, 4), np.float32)
    for frame in range(0, 60, 3):
        rng = copy.deepcopy(agent.policy.rng)
        uniform = rng.uniform(-1.0, 1.0, (3, 2)).astype(np.float32) if action is CONTINUOUS else rng.integers(3, size=3)
        generator = copy.deepcopy(agent.policy.rng.bit_generator.state)
        out = agent.act(obs)
        if frame < 30:
            np.testing.assert_array_equal(out.action_N, uniform)
        else:
            agent.policy.rng.bit_generator.state = generator
            np.testing.assert_array_equal(out.action_N, agent.policy.clone(agent.policy.rng).act(obs).action_N)
        agent.clock.tick(3)
    assert not np.array_equal(out.action_N, uniform) or action is DISCRETE


def test_q_learning_explores_by_its_policy_from_the_start() -> None:
    agent, _ = built(toy_spec("DQN", training_start_step=3000, explore_var_spec={"name": "no_decay", "start_val": 0.0}))
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    with torch.no_grad():
        best = agent.algorithm.net.critic(torch.from_numpy(obs)).argmax(1)
    np.testing.assert_array_equal(agent.act(obs).action_N, best)


def test_evaluations_are_not_random() -> None:
    agent, _ = built(toy_spec("SoftActorCritic"), CONTINUOUS)
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    agent.act(obs)
    assert agent.acts_at_random
    with torch.no_grad():
        mode = torch.tanh(agent.algorithm.net.actor(torch.from_numpy(obs))[:, :2])
    np.testing.assert_allclose(agent.action_function(deterministic=True)(obs, np.ones(3, bool)), mode, atol=1e-6)
