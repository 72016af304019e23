"""Tests of EnvPool's suites: ids, spaces, options, time limits, and steps of every id."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from slm_lab.env import envpool_suites, make_env
from slm_lab.env.envpool_suites import ObservationReader, TruncationReader, correct_action_space, correct_observation_space
from slm_lab.env.make import choose_backend, make_env_request
from slm_lab.env.render import with_rendering
from slm_lab.spec.compat import env_ids
from slm_lab.spec.compat.env_ids import envpool_envs
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import SpecError
from tests.env.every_id import names
from tests.env.test_step import build
from tests.packages import needs

packages = needs("envpool")

TINY, HUGE = np.finfo(np.float64).tiny, np.finfo(np.float64).max


def problems(name: str, **keys: Any) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as error:
        build(name, **keys)
    return [(one.path, one.message) for one in error.value.problems]


@pytest.mark.parametrize("name", ["CheetahRun-v1", "envpool:CartPole-v1", "MiniGrid-DoorKey-8x8-v0", "Jumanji/Game2048-v1"])
def test_envpool_is_chosen_for_its_own_ids(name: str) -> None:
    spec = EnvSpec(name=name, max_frame=1, num_envs=1)
    assert choose_backend(spec, make_env_request(spec, 1)).name == "envpool"


def test_gymnasium_s_ids_keep_their_meaning() -> None:
    spec = EnvSpec(name="CartPole-v1", max_frame=1, num_envs=1)
    assert make_env_request(spec, 1).registration is not None


def test_bounds_that_mean_none() -> None:
    fitted = correct_observation_space(spaces.Dict(a=spaces.Box(TINY, HUGE, (2,), np.float64), b=spaces.Box(-1.0, 2.0, (1,), np.float64)))
    assert isinstance(fitted, spaces.Dict)
    assert (fitted["a"].low == -np.inf).all()
    assert (fitted["a"].high == np.inf).all()
    assert (fitted["b"].low[0], fitted["b"].high[0]) == (-1, 2)
    single = np.finfo(np.float32)
    actions = correct_action_space(spaces.Box(float(single.tiny), float(single.max), (3,), np.float32))
    assert (actions.low == -np.inf).all()


def test_actions_below_zero_reach_vizdoom() -> None:
    """The bounds that ViZDoom declares contain no action below zero, but its envs accept such actions."""
    env = build("D1Basic-v1", 1)
    assert not env.info.action.bounded
    assert env._decode(np.array([[-1.0, 0.0, 1.0]])).tolist() == [[-1, 0, 1]]
    env.close()


def test_whole_numbers_are_choices() -> None:
    fitted = correct_action_space(spaces.Box(np.array([0, 1]), np.array([3, 9]), dtype=np.int32))
    assert isinstance(fitted, spaces.MultiDiscrete)
    assert (fitted.nvec.tolist(), fitted.start.tolist()) == ([4, 9], [0, 1])
    env = build("Jumanji/Tetris-v0", 2)
    assert (env.info.action.kind, env.info.action.nvec) == ("discrete", (40,))  # the mask has one entry per combination
    env.close()


def test_codes_of_minigrid_are_no_image() -> None:
    env = build("MiniGrid-Empty-5x5-v0", 2, obs_keys=["image"])
    obs = env.reset()
    assert obs.shape == (2, 147)
    objects = (obs.reshape(2, 49, 3)[..., 0] * 10).round().astype(int)
    floor, wall = 1, 2
    assert {floor, wall} <= {*objects.ravel().tolist()} <= {*range(11)}
    assert obs.max() <= 1
    env.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gfootball/academy_empty_goal-v1", "image 72 × 96, 4 channels last, 0 to 255"),
        ("D1Basic-v1", "image 84 × 84, 4 channels first, 0 to 255"),
        ("highway-fast-v0", "vector of 25 numbers (5 × 5)"),
        ("racetrack-v0", "vector of 288 numbers (2 × 12 × 12)"),
    ],
)
def test_images_and_vectors(name: str, text: str) -> None:
    env = build(name, 1)
    assert env.info.observation.text == text
    env.close()


def test_counters_are_fractions() -> None:
    space = spaces.Dict({"step_count": spaces.Discrete(101), "room": spaces.Discrete(3)})
    read = ObservationReader(space, ["reward", "obs:room", "obs:step_count"])
    found = read([np.zeros(2), np.array([1, 2]), np.array([0, 50])])
    assert found["step_count"].tolist() == [[0.0], [0.5]]
    assert found["room"].tolist() == [1, 2]
    assert isinstance(read.space, spaces.Dict)
    assert read.space["step_count"].shape == (1,)


def test_a_selected_part() -> None:
    both, one = build("CheetahRun-v1", 2), build("CheetahRun-v1", 2, obs_keys=["velocity"])
    np.testing.assert_array_equal(both.reset()[:, 8:], one.reset())
    assert one.info.observation.shape == (9,)
    both.close()
    one.close()
    assert problems("CheetahRun-v1", obs_keys=["velocty"])[0][0] == "env.obs_keys[0]"


@pytest.mark.parametrize(
    ("name", "keys", "path", "words"),
    [
        ("CheetahRun-v1", {"frame_skp": 2}, "env.frame_skp", "did you mean 'frame_skip'?"),
        ("CheetahRun-v1", {"frame_skip": "2"}, "env.frame_skip", 'invalid value "2": expected a whole number, such as 1'),
        ("CheetahRun-v1", {"frame_skip": True}, "env.frame_skip", "expected a whole number"),
        ("CheetahRun-v1", {"max_episode_steps": 9}, "env.max_episode_steps", "use env.max_t"),
        ("CheetahRun-v1", {"env_seed": [9]}, "env.env_seed", "use meta.random_seed"),
        ("MiniGrid-Empty-5x5-v0", {"agent_start_pos": [2]}, "env.agent_start_pos", "such as [1, 1]"),
        ("D1Basic-v1", {"reward_config": {"HEALTH": 1}}, "env.reward_config", 'an object, such as {"AMMO0": ['),
        ("CheetahRun-v1", {"backend": "sync"}, "env.backend", "it is an env of EnvPool"),
        ("CheetahRun-v1", {"wrappers": [{"name": "ClipAction"}]}, "env.wrappers", "cannot be wrapped"),
        ("envpool:CartPol-v1", {}, "env.name", "did you mean 'CartPole-v1'?"),
        ("VizdoomCustom-v1", {"cfg_path": "no.cfg"}, "env.name", "does not exist"),
    ],
)
def test_faults(name: str, keys: dict[str, Any], path: str, words: str) -> None:
    ((found, message),) = problems(name, **keys)
    assert found == path
    assert words in message


def test_options_reach_the_env() -> None:
    env = build("D1Basic-v1", 1, use_combined_action=True, selected_weapon_reward_config={"0": 1}, reward_config={"HEALTH": [1, 2]})
    assert env.info.action.kind == "discrete"
    env.close()
    slow, fast = build("CheetahRun-v1", 1), build("CheetahRun-v1", 1, frame_skip=2)
    first, action = slow.reset(), slow.sample()
    np.testing.assert_array_equal(first, fast.reset())
    slow.step(action)
    np.testing.assert_array_equal(slow.step(action).obs_N, fast.step(action).obs_N)
    slow.close()
    fast.close()


def test_the_true_last_observation_of_a_truncated_episode() -> None:
    short, long = build("CheetahRun-v1", 2, max_t=20), build("CheetahRun-v1", 2)
    short.reset()
    long.reset()
    for t in range(1, 41):
        action = long.sample()
        ended, running = short.step(action), long.step(action)
        assert ended.truncated_N.tolist() == [t % 20 == 0] * 2
        if t <= 20:
            np.testing.assert_array_equal(ended.last_obs_N, running.obs_N)
    assert not running.truncated_N.any()
    short.close()
    long.close()


def test_the_seed_of_an_env_does_not_depend_on_their_number() -> None:
    few, many = build("CheetahRun-v1", 2), build("CheetahRun-v1", 4)
    np.testing.assert_array_equal(few.reset(), many.reset()[:2])
    assert not np.array_equal(many.reset()[0], many.reset()[1])
    few.close()
    many.close()


def ends(name: str, steps: int, **keys: Any) -> set[tuple[bool, bool, bool]]:
    """Step random actions; return the set of (truncated, return is not 0, length is the limit) of the episodes."""
    env = build(name, 16, **keys)
    limit = env._backend.max_steps
    env.reset()
    found = {(e.truncated, e.total_reward != 0, e.length == limit) for _ in range(steps) for e in env.step(env.sample()).episodes}
    env.close()
    return found


def test_an_env_s_own_time_limit_truncates() -> None:
    """These envs end episodes at a built-in limit, whatever limit EnvPool is given; such an end without another reason is a truncation."""
    assert {(late, truncated) for truncated, _, late in ends("highway-fast-v0", 200)} >= {(True, True), (False, False)}
    assert {truncated for truncated, _, late in ends("highway-fast-v0", 200) if not late} == {False}
    assert ends("MiniGrid-Empty-5x5-v0", 300) >= {(True, False, True), (False, True, False)}
    assert {truncated for truncated, won, _ in ends("BabyAI-GoToObj-v0", 300) if won} == {False}
    assert {truncated for truncated, won, _ in ends("BabyAI-GoToObj-v0", 300) if not won} == {True}
    assert False in {truncated for truncated, won, _ in ends("BabyAI-PickupDistDebug-v0", 300) if not won}, "a wrong object picked up"


def test_an_end_in_the_last_step_allowed_is_a_termination_if_the_arrays_say_why() -> None:
    late = np.array([True, True, False])
    highway = TruncationReader(["trunc", "reward", "info:speed", "info:crashed"])
    assert highway([late, np.ones(3), np.ones(3), np.array([False, True, True])]).tolist() == [True, False, False]
    minigrid = TruncationReader(["reward", "trunc"])
    assert minigrid([np.array([0.0, 0.1, 0.9]), late]).tolist() == [True, False, False]
    assert late.tolist() == [True, True, False], "the pool's array is unchanged"


def test_minigrid_s_reward_does_not_depend_on_max_t() -> None:
    """The reward is 1 − 0.9 × steps / limit, where the limit is the env's own (100), not max_t."""
    env = build("MiniGrid-Empty-5x5-v0", 16, max_t=50)
    env.reset()
    won = [e for _ in range(300) for e in env.step(env.sample()).episodes if e.total_reward]
    env.close()
    assert won
    for episode in won:
        assert episode.total_reward == pytest.approx(1 - 0.9 * episode.length / 100)


class Frames:
    """Recorder that keeps the frames of episodes."""

    def __init__(self) -> None:
        self.episodes, self.frames = 0, list[np.ndarray]()

    def begin_episode(self) -> bool:
        self.episodes += 1
        return True

    def add_frame(self, frame_HWC: np.ndarray, fps: float) -> None:
        self.frames.append(frame_HWC)


@pytest.mark.parametrize(("name", "shape"), [("highway-fast-v0", (150, 600, 3)), ("Jumanji/Snake-v1", (256, 256, 3))])
def test_frames_of_a_video(name: str, shape: tuple[int, ...]) -> None:
    frames = Frames()
    spec = EnvSpec(name=name, max_frame=1, action_mask=False)  # without a mask, random actions end episodes of Snake at once
    env = make_env(with_rendering(spec, "rgb_array", frames), 0, num_envs=1, training=False)
    env.reset()
    ended = sum(len(env.step(env.sample()).episodes) for _ in range(40))
    env.close()
    assert ended > 0
    assert frames.episodes == 1 + ended
    assert {frame.shape for frame in frames.frames} == {shape}
    assert len(frames.frames) == 40 - ended
    assert any((frame != frames.frames[0]).any() for frame in frames.frames)


def test_what_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="EnvPool cannot draw the envs of gfootball"):
        with_rendering(EnvSpec(name="gfootball/academy_empty_goal-v1", max_frame=1), "rgb_array", Frames())
    monkeypatch.setattr(envpool_suites, "find_library", lambda name: None)
    monkeypatch.setattr(envpool_suites.sys, "platform", "linux")
    with pytest.raises(SpecError, match="apt-get install libegl1 libgl1"):
        with_rendering(EnvSpec(name="CheetahRun-v1", max_frame=1), "rgb_array", Frames())


SUITES = sorted({env.suite for env in envpool_envs().values()} - {"myosuite"})


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_every_id(suite: str, tmp_path: Path) -> None:
    if suite == "procgen" and env_ids.find_library("Qt5Gui") is None:
        pytest.skip("needs Qt 5")
    command = [sys.executable, "-m", "tests.env.every_id", suite]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env={"PYTHONPATH": str(root), "PATH": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert {name: fault for name, fault in found.items() if fault} == {}
    assert list(found) == names(suite)
    assert {file.name for file in tmp_path.iterdir()} <= {"MUJOCO_LOG.TXT"}  # warnings of the MuJoCo library inside EnvPool


GO1 = "MuJoCoPlayground/Go1JoystickFlatTerrain-v1"


def go1_states(steps: int, **keys: Any) -> tuple[np.ndarray, np.ndarray]:
    """Step random actions; return the observations [T, N, 48], those of the reset first, and the actions [T − 1, N, 12]."""
    env = build(GO1, 8, obs_keys=["state"], **keys)
    observations, actions = [env.reset()], [env.sample() for _ in range(steps)]
    observations += [env.step(action).obs_N for action in actions]
    env.close()
    return np.stack(observations), np.stack(actions)


@pytest.mark.slow
def test_go1_s_observation_is_that_of_mujoco_playground() -> None:
    """Columns: linear velocity, gyro, gravity (3 each), joint angles − default pose, joint velocities, action (12 each), command (3)."""
    state, action = go1_states(15, noise_level=0.0)
    assert state.shape[-1] == 48
    gravity, angle, velocity, last_action, command = np.split(state[..., 6:], [3, 15, 27, 39], axis=-1)
    np.testing.assert_allclose(np.linalg.norm(gravity, axis=-1), 1.0, rtol=1e-5)
    assert (gravity[0, :, 2] < -0.9).all(), "in the robot's frame; it begins upright"
    np.testing.assert_allclose(angle[0], 0.0, atol=1e-5)
    np.testing.assert_allclose(last_action[:2], 0.0)
    np.testing.assert_allclose(last_action[2:], action[:-1], rtol=1e-6)  # the action before the one that led to the observation
    limits = np.array([1.5, 0.8, 1.2])
    assert (np.abs(command) <= limits + 1e-6).all()
    assert np.abs(command).max() > 0.1
    change = np.diff(angle, axis=0) / 0.02  # a step takes 0.02 s
    between = (velocity[1:] + velocity[:-1]) / 2
    assert np.corrcoef(change.ravel(), between.ravel())[0, 1] > 0.8
    wider, _ = go1_states(1, command_a0=15.0)
    assert np.abs(wider[..., 45]).max() > 1.5
    noisy, _ = go1_states(15)
    assert 0.01 < np.abs(np.linalg.norm(noisy[..., 6:9], axis=-1) - 1).max() < 0.05 * 3**0.5


# ---- env.stagger_episodes


def episode_lengths(env: Any, steps: int) -> tuple[list[list[int]], list[list[bool]], list[list[int]]]:
    """Step an env with action 0; return, for each env, the lengths of its episodes, whether each was truncated, and the lengths of the
    episodes that the env reports."""
    lengths: list[list[int]] = [[] for _ in range(env.info.num_envs)]
    cut: list[list[bool]] = [[] for _ in range(env.info.num_envs)]
    reported: list[list[int]] = [[] for _ in range(env.info.num_envs)]
    env.reset()
    counts = np.zeros(env.info.num_envs, int)
    for _ in range(steps):
        step = env.step(np.stack([env.sample()[0] * 0 for _ in range(env.info.num_envs)]))
        counts += step.valid_N
        for row in np.flatnonzero(step.terminated_N | step.truncated_N):
            lengths[row].append(int(counts[row]))
            cut[row].append(bool(step.truncated_N[row]))
            counts[row] = 0
        for episode in step.episodes:
            reported[episode.env].append(episode.length)
    return lengths, cut, reported


@pytest.mark.parametrize(("name", "limit"), [("CheetahRun-v1", 40), ("Pendulum-v1", 200)])
def test_first_episodes_are_staggered(name: str, limit: int) -> None:
    keys = {"max_t": limit} if name == "CheetahRun-v1" else {}
    env = build(name, num_envs=4, backend="envpool", stagger_episodes=True, **keys)
    for _ in range(2):  # each reset of all envs staggers them again
        lengths, cut, reported = episode_lengths(env, 2 * limit + limit // 4)
        first = [limit // 4, limit // 2, 3 * limit // 4, limit]
        assert [row[0] for row in lengths] == first
        assert [row[1:] for row in lengths] == [[limit, limit], [limit], [limit], [limit]]
        assert all(all(row) for row in cut)
        assert reported == [[limit, limit], [limit], [limit], [limit, limit]]
    env.close()


def test_an_env_that_ends_before_its_first_limit_gets_the_whole_limit_next() -> None:
    env = build("envpool:CartPole-v1", num_envs=2, backend="envpool", stagger_episodes=True, max_t=60)
    obs, lengths, counts = env.reset(), [], np.zeros(2, int)
    while len(lengths) < 2:
        balance = (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)
        step = env.step(balance if lengths else np.zeros(2, np.int64))  # with action 0, the pole falls
        obs, counts = step.obs_N, counts + step.valid_N
        if step.terminated_N[0] or step.truncated_N[0]:
            lengths.append((int(counts[0]), bool(step.truncated_N[0])))
            counts[0] = 0
    assert lengths[0][0] < 30
    assert not lengths[0][1]
    assert lengths[1] == (60, True)
    env.close()


def test_evaluation_envs_are_not_staggered() -> None:
    env = make_env(EnvSpec(name="CheetahRun-v1", max_frame=1, num_envs=2, max_t=20, stagger_episodes=True), 0, training=False)
    assert episode_lengths(env, 20)[0] == [[20], [20]]
    env.close()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("CartPole-v1", {"num_envs": 2, "backend": "sync"}),
        ("CheetahRun-v1", {"num_envs": 1}),
        ("ConnectFour-v1", {"num_envs": 2}),
        ("lane-keeping-v0", {"num_envs": 2}),
    ],
)
def test_staggering_that_is_not_possible(name: str, keys: dict[str, Any]) -> None:
    assert [path for path, _ in problems(name, stagger_episodes=True, **keys)] == ["env.stagger_episodes"]
