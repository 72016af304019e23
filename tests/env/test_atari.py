"""Tests of Atari envs: all backends have the same settings and, where the emulator is deterministic, return the same frames."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from slm_lab.env import Env, make_env
from slm_lab.env.single import register_atari
from slm_lab.spec.models.env import EnvSpec
from tests.env.by_hand import Played, play

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

DETERMINISTIC = {"repeat_action_probability": 0.0, "noop_max": 0}


def build(game: str = "Breakout", num_envs: int = 2, *, seed: int = 3, training: bool = True, **keys: Any) -> Env:
    return make_env(EnvSpec(name=f"ALE/{game}-v5", max_frame=1000, num_envs=num_envs, **keys), seed, training=training)


def played(game: str, actions: list[np.ndarray], **keys: Any) -> Played:
    """Make an env, step it with the given actions and close it."""
    env = build(game, len(actions[0]), **keys)
    try:
        return play(env, actions)
    finally:
        env.close()


def random_actions(count: int, num_envs: int = 2, choices: int = 4, seed: int = 1) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(choices, size=(count, num_envs)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "keys",
    [{}, {"life_loss_info": True, "max_t": 40, "use_fire_reset": False}, {"frameskip": 3, "maxpool": False, "stack_num": 2, "max_t": 30}],
)
def test_sync_equals_ale_frame_for_frame(keys: dict[str, Any]) -> None:
    actions = random_actions(150)
    ours, theirs = (played("Breakout", actions, backend=backend, **DETERMINISTIC, **keys) for backend in ("sync", "ale"))
    assert ours.episodes == theirs.episodes
    ended = 0
    for a, b in zip(ours.steps, theirs.steps, strict=True):
        for left, right in zip(a[:7], b[:7], strict=True):
            np.testing.assert_array_equal(left, right)
        ended += int((a.terminated_N | a.truncated_N).sum())
    assert ended > 0


@pytest.mark.slow
def test_ale_against_the_emulator_by_hand() -> None:
    """The reported returns are unclipped and of whole games, although a lost life terminates and the agent's rewards are clipped."""
    actions = random_actions(500, choices=6)
    ours = played("SpaceInvaders", actions, life_loss_info=True, use_fire_reset=False, **DETERMINISTIC)
    register_atari()
    single = gym.make("ALE/SpaceInvaders-v5", repeat_action_probability=0.0, disable_env_checker=True)
    lost = 0
    for i in range(2):
        _, info = single.reset(seed=0)
        lives, total, length, games = info["lives"], 0.0, 0, []
        for action, step in zip(actions, ours.steps, strict=True):
            _, reward, over, _, info = single.step(action[i])
            total, length = total + float(reward), length + 1
            life = not over and info["lives"] < lives
            lost += life
            assert step.reward_N[i] == np.sign(float(reward))
            assert bool(step.terminated_N[i]) == bool(step.first_N[i]) == (over or life)
            if over:
                games.append((total, length))
                total, length = 0.0, 0
                _, info = single.reset()
            lives = info["lives"]
        assert ours.episodes[i] == games
        assert max(total for total, _ in games) > 20
    assert lost > 2


@pytest.mark.slow
def test_episodic_life_means_the_same_in_every_backend() -> None:
    actions = random_actions(120)
    first, second = (played("Breakout", actions, **DETERMINISTIC, **{key: True}) for key in ("episodic_life", "life_loss_info"))
    assert first.episodes == second.episodes
    for a, b in zip(first.steps, second.steps, strict=True):
        np.testing.assert_array_equal(a.terminated_N, b.terminated_N)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["ale", "sync", "envpool"])
def test_defaults_of_every_backend(backend: str) -> None:
    if backend == "envpool":
        pytest.importorskip("envpool")
    env = build("SpaceInvaders", backend=backend, training=False, max_t=100)
    assert env.info.observation.shape == (4, 84, 84)
    assert env.info.observation.dtype == "uint8"
    assert env.info.action.nvec == (6,)
    played = play(env, random_actions(205, choices=6, seed=0))
    env.close()
    rewards = np.stack([step.reward_N for step in played.steps])
    assert rewards.max() >= 5  # the backend does not clip rewards
    assert [length for _, length in played.episodes[0]] == [100, 100]
    assert all(bool(t.truncated) == (index % 100 == 99) for index, t in enumerate(played.transitions[0][:200]))
    assert played.steps[3].obs_N.dtype == np.uint8
    # sticky actions and the number of no-ops make the two envs differ
    assert not np.array_equal(played.steps[90].obs_N[0], played.steps[90].obs_N[1])


@pytest.mark.slow
def test_envpool_counts_lives_as_ale_does() -> None:
    pytest.importorskip("envpool")
    ends = {}
    for backend in ("envpool", "ale"):
        found = played("Breakout", random_actions(300), backend=backend, life_loss_info=True)
        lost = sum(t.terminated for row in found.transitions for t in row)
        games = sum(len(row) for row in found.episodes)
        ends[backend] = (lost, games)
        assert games >= 2
        assert abs(lost / games - 5) < 2.5  # Breakout has five lives
    assert all(lost > 3 * games for lost, games in ends.values())


@pytest.mark.slow
def test_training_reward_is_its_sign_by_default() -> None:
    keys = {"use_fire_reset": False, **DETERMINISTIC}
    rewards = {}
    for name, more in {"default": {}, "raw": {"clip_reward": False}, "two": {"clip_reward": 2.0}}.items():
        found = played("SpaceInvaders", random_actions(150, 1, choices=6, seed=0), **keys, **more)
        rewards[name] = np.concatenate([step.reward_N for step in found.steps])
    assert rewards["raw"].max() >= 5
    np.testing.assert_array_equal(rewards["default"], np.sign(rewards["raw"]))
    np.testing.assert_array_equal(rewards["two"], np.clip(rewards["raw"], -2, 2))


def test_mode_is_for_backends_that_have_it() -> None:
    env = build("Pong", 1, mode=1)
    assert env.backend == "sync"
    env.close()


def test_plain_env_with_obs_type() -> None:
    env = build("Pong", 1, obs_type="ram")
    assert env.backend == "sync"
    assert env.reset().shape == (1, 128)
    env.close()


@pytest.mark.slow
def test_continuous_actions_and_colour() -> None:
    for backend in ("ale", "sync"):
        env = build("Pong", 2, continuous=True, grayscale=False, backend=backend)
        assert env.info.action.kind == "continuous"
        assert env.info.observation.shape == (12, 84, 84)
        env.reset()
        assert env.step(env.sample()).obs_N.shape == (2, 12, 84, 84)
        env.close()
