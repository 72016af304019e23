"""Tests of normalisation: running statistics against brute force with both kinds of autoreset, rewards, saving and evaluation."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slm_lab.env import InvalidOutcome, make_env, make_normalizers
from slm_lab.env.normalize import Moments, Normalizers, RewardNormalizer, RunningStats
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import SpecError
from tests.env.by_hand import play
from tests.env.test_step import SEED, build, random_actions
from tests.env.toys import PREFIX


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.floats(-1e6, 1e6), st.integers(0, 2**31))
def test_running_stats_equal_numpy(sizes: list[int], offset: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = [rng.normal(offset, 3.0, (size, 2)).astype(np.float32) for size in sizes]
    stats = RunningStats((2,))
    for batch in batches:
        stats.update(batch)
    everything = np.concatenate(batches).astype(np.float64)
    assert stats.count == len(everything)
    np.testing.assert_allclose(stats.mean, everything.mean(0), rtol=1e-12, atol=1e-9)
    if len(everything) > 1:
        np.testing.assert_allclose(stats.inv_std, 1 / np.sqrt(everything.var(0) + 1e-8), rtol=1e-5)


@pytest.mark.parametrize(("name", "backend"), [("Toy-v0", "sync"), ("ToyNextStep-v0", "native")])
def test_observations_against_brute_force(name: str, backend: str) -> None:
    """Every observation counts once, including the last of an episode and the first of the next."""
    actions = random_actions(60, 3, 3)
    raw_env, env = build(PREFIX + name, backend=backend), build(PREFIX + name, backend=backend, normalize_obs=True, clip_obs=1.5)
    raw_obs, obs = raw_env.reset(), env.reset()
    seen = [raw_obs]
    for action in actions:
        raw, ours = raw_env.step(action), env.step(action)
        seen.append(raw.obs_N)
        if backend == "sync":
            seen.append(raw.last_obs_N[raw.first_N])
        everything = np.concatenate(seen).astype(np.float64)
        mean, std = everything.mean(0), np.sqrt(everything.var(0) + 1e-8)
        np.testing.assert_allclose(ours.obs_N, np.clip((raw.obs_N - mean) / std, -1.5, 1.5), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours.last_obs_N, np.clip((raw.last_obs_N - mean) / std, -1.5, 1.5), rtol=1e-4, atol=1e-5)
    assert obs.dtype == ours.obs_N.dtype == ours.last_obs_N.dtype == np.float32
    assert np.abs(ours.obs_N).max() <= 1.5


@pytest.mark.parametrize(("name", "backend"), [("Toy-v0", "sync"), ("ToyNextStep-v0", "native")])
def test_rewards_against_brute_force(name: str, backend: str) -> None:
    """Discounted returns restart with each episode, and dummy rows are not counted."""
    gamma, actions = 0.99, random_actions(60, 3, 3)
    raw_env, env = build(PREFIX + name, backend=backend), build(PREFIX + name, backend=backend, normalize_reward=True)
    raw, ours = play(raw_env, actions), play(env, actions)
    returns, seen = np.zeros(3), []
    for before, after in zip(raw.steps, ours.steps, strict=True):
        for i in np.flatnonzero(before.valid_N):
            returns[i] = returns[i] * gamma + before.reward_N[i]
            seen.append(returns[i])
        expected = np.clip(before.reward_N / np.sqrt(np.var(seen) + 1e-8), -10, 10)
        np.testing.assert_allclose(after.reward_N[before.valid_N], expected[before.valid_N], rtol=1e-4)
        returns[before.terminated_N | before.truncated_N] = 0
    assert raw.episodes == ours.episodes  # the reported returns are not normalised
    assert ours.steps[0].reward_N.dtype == np.float32


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [-3.0, 0.5, 20.0]),
        ({"clip_reward": True}, [-1.0, 1.0, 1.0]),
        ({"clip_reward": 2.0}, [-2.0, 0.5, 2.0]),
        ({"clip_reward": [-1, 5]}, [-1.0, 0.5, 5.0]),
        ({"clip_reward": [1.5, 2.5]}, [1.5, 1.5, 2.5]),
        ({"clip_reward": [-1.5, 10.0], "reward_scale": 2.0}, [-1.5, 1.0, 10.0]),
        ({"clip_reward": False}, [-3.0, 0.5, 20.0]),
        ({"reward_scale": 0.5}, [-1.5, 0.25, 10.0]),
        ({"reward_scale": "sign"}, [-1.0, 1.0, 1.0]),
        ({"reward_scale": 0.5, "clip_reward": 1.0}, [-1.0, 0.25, 1.0]),
    ],
)
def test_what_rewards_become(keys: dict[str, Any], expected: list[float]) -> None:
    normalize = RewardNormalizer(EnvSpec(name="X", max_frame=1, **keys), 3, 0.99)
    np.testing.assert_allclose(normalize(np.array([-3.0, 0.5, 20.0])), expected)


@pytest.mark.parametrize(
    ("keys", "reward"),
    [
        ({}, 1.0),
        ({"reward_scale": 0.5}, 0.5),
        ({"reward_scale": "sign"}, 1.0),
        ({"clip_reward": 0.25}, 0.25),
        ({"clip_reward": [0.0, 0.5]}, 0.5),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_an_env_gives_rewards_as_its_keys_say(keys: dict[str, Any], reward: float, training: bool) -> None:
    """CartPole's rewards are 1; in evaluation they are not changed."""
    env = build("CartPole-v1", training=training, **keys)
    env.reset()
    reward_N = env.step(np.zeros(3, np.int64)).reward_N
    env.close()
    assert reward_N.dtype == np.float32
    np.testing.assert_allclose(reward_N, reward if training else 1.0)


def test_clip_obs_alone() -> None:
    env = build(PREFIX + "Toy-v0", clip_obs=2.0)
    assert env.reset()[0, 2] == 2.0
    assert env.state_dict()["obs_stats"] is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "keys"),
    [("Toy-v0", {}), ("ToyNextStep-v0", {}), ("Toy-v0", {"backend": "async"})],
)
def test_state_round_trip(name: str, keys: dict[str, Any]) -> None:
    """Statistics and random streams are saved, as JSON and as torch's weights-only files; the loaded env makes the same steps."""
    keys = {"normalize_obs": True, "normalize_reward": True, **keys}
    env, actions = build(PREFIX + name, **keys), random_actions(40, 3, 3)
    play(env, actions)
    buffer = io.BytesIO()
    torch.save(env.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert json.dumps(state) == json.dumps(env.state_dict())
    other = build(PREFIX + name, seed=99, **keys)
    other.load_state_dict(state)
    np.testing.assert_array_equal(env.sample(), other.sample())
    ours, theirs = play(env, actions), play(other, actions)
    for a, b in zip(ours.steps, theirs.steps, strict=True):
        for left, right in zip(a[:7], b[:7], strict=True):
            np.testing.assert_array_equal(left, right)
    env.close()
    other.close()


def test_resume_without_visible_streams_goes_on_with_new_ones() -> None:
    pytest.importorskip("envpool")
    first = build("CartPole-v1", backend="envpool")
    start = first.reset()
    state = first.state_dict()
    resumed = [build("CartPole-v1", backend="envpool") for _ in range(2)]
    for env in resumed:
        env.load_state_dict(state)
    one, two = (env.reset() for env in resumed)
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, start)


def test_evaluation_is_frozen_and_raw() -> None:
    keys = {"normalize_obs": True, "normalize_reward": True, "clip_reward": 1.0}
    train, evaluation, raw_env = (
        build(PREFIX + "Toy-v0", **keys),
        build(PREFIX + "Toy-v0", training=False, **keys),
        build(PREFIX + "Toy-v0"),
    )
    actions = random_actions(40, 3, 3)
    play(train, actions)
    evaluation.normalizers.copy_obs_statistics(train.state_dict())
    before = evaluation.state_dict()["obs_stats"]
    ours, raw = play(evaluation, actions), play(raw_env, actions)
    assert evaluation.state_dict()["obs_stats"] == before == train.state_dict()["obs_stats"]
    mean, std = np.array(before["mean"]), np.sqrt(np.array(before["m2"]) / before["count"] + 1e-8)
    for a, b in zip(ours.steps, raw.steps, strict=True):
        np.testing.assert_array_equal(a.reward_N, b.reward_N)
        np.testing.assert_allclose(a.obs_N, np.clip((b.obs_N - mean) / std, -10, 10), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("key", "value"), [("normalize_obs", True), ("clip_obs", 5.0)])
def test_images_are_not_normalised(key: str, value: Any) -> None:
    pytest.importorskip("Box2D")
    with pytest.raises(SpecError) as error:
        build("CarRacing-v3", 1, **{key: value})
    assert [problem.path for problem in error.value.problems] == [f"env.{key}"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_change_no_statistics(bad: float) -> None:
    """This holds for own statistics, shared statistics and merged deltas. The other rows of the batch count."""
    batch = np.array([[1.0, 2.0], [bad, 3.0], [4.0, 6.0]], np.float32)
    expected = RunningStats((2,))
    expected.update(batch[[0, 2]])
    alone, shared, merged = RunningStats((2,)), RunningStats((2,)), RunningStats((2,))
    SharedArrays(create_shared_file()).attach({"stats": shared})
    for stats in (alone, shared):
        with np.errstate(all="raise"):
            assert not stats.update(batch)
            assert not stats.update(batch[1:2])
    merged.merge(alone.moments())
    merged.merge(Moments(1, np.array([bad, 0.0]), np.array([np.nan, 0.0])))
    for stats in (alone, shared, merged):
        assert stats.state_dict() == expected.state_dict()
        np.testing.assert_array_equal(stats.inv_std, expected.inv_std)


def test_large_finite_samples_count_without_a_warning() -> None:
    """The squares of these samples overflow in float32, but not in float64."""
    batch = np.array([[1e25, 1.0], [-3e25, 2.0]], np.float32)
    stats = RunningStats((2,))
    with np.errstate(all="raise"):
        assert stats.update(batch)
    np.testing.assert_allclose(stats.mean, [-1e25, 1.5], rtol=1e-6)
    np.testing.assert_allclose(1.0 / stats.inv_std, [2e25, 0.5], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_spoils_no_return(bad: float) -> None:
    normalize, clean = (RewardNormalizer(EnvSpec(name="X", max_frame=1, normalize_reward=True), 2, 0.9) for _ in range(2))
    normalize(np.array([1.0, 2.0])), clean(np.array([1.0, 2.0]))
    with np.errstate(all="raise"):
        normalize(np.array([bad, 3.0]))
    assert normalize.stats.count == 3
    np.testing.assert_allclose(normalize.return_N, [1.0, 2.0 * 0.9 + 3.0])
    assert np.isfinite(normalize(np.array([1.0, 1.0]))).all()


def test_an_env_that_fails_once_leaves_finite_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    env = build(PREFIX + "Toy-v0", normalize_obs=True, normalize_reward=True)
    env.reset()
    step = env._backend.step

    def broken(action: np.ndarray) -> Any:
        raw = step(action)
        obs = np.array(raw.obs)
        obs[1, 1] = np.nan
        return raw._replace(obs=obs)

    monkeypatch.setattr(env._backend, "step", broken)
    for action in random_actions(5, 3, 3):
        with pytest.raises(InvalidOutcome, match="the observation contains nan"):
            env.step(action)
    assert env.normalizers.reward is not None
    env.normalizers.reward(np.array([1.0, 2.0, np.nan]))  # in a step of the env, this reward is an error
    assert np.isfinite(env.normalizers.statistics_vector).all()
    assert env.state_dict()["reward_stats"]["count"] == 17


def shared_pair(**keys: Any) -> list[Any]:
    """Return two envs whose normalisers share one file, as in two processes."""
    fd, envs = create_shared_file(), [build(PREFIX + "Toy-v0", seed=seed, **keys) for seed in (1, 2)]
    for index, env in enumerate(envs):
        SharedArrays(fd, index, 2).attach({"normalizers": env.normalizers})
    return envs


def test_shared_statistics_equal_those_of_one_that_saw_both() -> None:
    keys = {"normalize_obs": True, "normalize_reward": True}
    envs, raw_envs = shared_pair(**keys), [build(PREFIX + "Toy-v0", seed=seed) for seed in (1, 2)]
    one = make_normalizers(EnvSpec(name="X", max_frame=1, num_envs=3, **keys), envs[0].info, 0.99)
    other = make_normalizers(EnvSpec(name="X", max_frame=1, num_envs=3, **keys), envs[0].info, 0.99)
    other.reward.stats = other.reward.delta = one.reward.stats  # separate returns, common statistics
    for env, raw in zip(envs, raw_envs, strict=True):
        env.reset()
        one.obs.update(raw.reset())
    for action in random_actions(30, 3, 3):
        for env, raw, reward in zip(envs, raw_envs, (one.reward, other.reward), strict=True):
            env.step(action)
            step = raw.step(action)
            reward(step.reward_N.astype(np.float64), step.terminated_N | step.truncated_N, step.valid_N)
            one.obs.update(step.obs_N)
            if step.first_N.any():
                one.obs.update(step.last_obs_N[step.first_N])
    np.testing.assert_array_equal(envs[0].normalizers.statistics_vector, envs[1].normalizers.statistics_vector)
    np.testing.assert_allclose(envs[0].normalizers.statistics_vector, one.statistics_vector, rtol=1e-6)
    assert envs[0].normalizers.obs.stats.count == one.obs.stats.count  # type: ignore[union-attr]


def test_a_process_that_joins_later_normalises_by_what_the_others_saw() -> None:
    fd, keys = create_shared_file(), {"normalize_obs": True}
    first = build(PREFIX + "Toy-v0", **keys)
    SharedArrays(fd, 0, 2).attach({"normalizers": first.normalizers})
    play(first, random_actions(20, 3, 3))
    late = build(PREFIX + "Toy-v0", **keys)
    SharedArrays(fd, 1, 2, fresh=False).attach({"normalizers": late.normalizers})
    assert late.normalizers.state_dict()["obs_stats"] == first.normalizers.state_dict()["obs_stats"]
    np.testing.assert_array_equal(late.normalizers.obs.stats.inv_std, first.normalizers.obs.stats.inv_std)  # type: ignore[union-attr]


def test_deltas_and_vector() -> None:
    """A learner without an env merges the worker's deltas, and the worker normalises by the statistics that the learner sends."""
    keys = {"normalize_obs": True, "normalize_reward": True}
    worker, alone = (build(PREFIX + "Toy-v0", **keys) for _ in range(2))
    learner = make_normalizers(EnvSpec(name=PREFIX + "Toy-v0", max_frame=1, num_envs=3, **keys), worker.info, 0.99)
    worker.normalizers.accumulate_deltas()
    actions = random_actions(20, 3, 3)
    steps = play(worker, actions).steps
    play(alone, actions)
    np.testing.assert_allclose(steps[-1].obs_N, np.clip(build_raw_last(actions), -10, 10))  # not normalised yet
    learner.merge_deltas(worker.normalizers.take_deltas())
    np.testing.assert_allclose(learner.statistics_vector, alone.normalizers.statistics_vector, rtol=1e-9)
    worker.normalizers.statistics_vector = learner.statistics_vector
    np.testing.assert_array_equal(worker.normalizers.statistics_vector, learner.statistics_vector)
    assert [delta.samples for delta in worker.normalizers.take_deltas()] == [0, 0]
    assert len(Normalizers().statistics_vector) == 0


def build_raw_last(actions: list[np.ndarray]) -> np.ndarray:
    return play(build(PREFIX + "Toy-v0"), actions).steps[-1].obs_N


def test_running_episodes_go_on_where_the_backend_exposes_them() -> None:
    keys = {"normalize_obs": True, "normalize_reward": True}
    env, other = build("CartPole-v1", 4, max_t=20, **keys), build("CartPole-v1", 4, seed=99, max_t=20, **keys)
    actions = random_actions(120, 4, 2)
    play(env, actions[:50])
    state = json.loads(json.dumps(env.state_dict()))
    other.load_state_dict(state)
    assert other.resume()
    for action in actions[50:]:
        ours, theirs = env.step(action), other.step(action)
        assert ours.episodes == theirs.episodes
        for left, right in zip(ours[:7], theirs[:7], strict=True):
            np.testing.assert_array_equal(left, right)
    lander = build("LunarLander-v3", backend="sync")
    lander.reset()
    other = build("LunarLander-v3", backend="sync")
    other.load_state_dict(lander.state_dict())
    assert not other.resume()  # the simulator is in C++: open episodes cannot be saved


@pytest.mark.parametrize(("name", "backend"), [("Toy-v0", "sync"), ("ToyNextStep-v0", "native")])
def test_deferred_normalisation_is_that_of_the_normalising_env(name: str, backend: str) -> None:
    """With deferred normalisation, steps have raw observations and rewards that are only scaled; the statistics are the same."""
    keys: dict[str, Any] = {"backend": backend, "normalize_obs": True, "normalize_reward": True, "reward_scale": 0.5}
    plain, env = build(PREFIX + name, backend=backend), build(PREFIX + name, **keys)
    raw_env = make_env(EnvSpec(name=PREFIX + name, max_frame=1000, num_envs=3, **keys), SEED, defer_normalization=True)
    rewards = raw_env.normalizers.reward
    assert rewards is not None
    obs, raw_obs = env.reset(), raw_env.reset()
    np.testing.assert_array_equal(raw_obs, plain.reset())
    np.testing.assert_array_equal(raw_env.policy_inputs(raw_obs), obs)
    for action in random_actions(60, 3, 3):
        step, raw, expected = env.step(action), raw_env.step(action), plain.step(action)
        np.testing.assert_array_equal(raw.obs_N, expected.obs_N)
        np.testing.assert_array_equal(raw.last_obs_N, expected.last_obs_N)
        np.testing.assert_array_equal(raw.reward_N, 0.5 * expected.reward_N)
        np.testing.assert_array_equal(raw_env.policy_inputs(raw.obs_N), step.obs_N)
        np.testing.assert_allclose(rewards.normalize(raw.reward_N), step.reward_N, rtol=1e-6)
        assert env.policy_inputs(step.obs_N) is step.obs_N
    assert raw_env.normalizers.state_dict() == env.normalizers.state_dict()


def test_rewards_without_statistics_are_not_deferred() -> None:
    keys: dict[str, Any] = {"backend": "sync", "normalize_obs": True, "reward_scale": 3.0, "clip_reward": 2.0}
    spec = EnvSpec(name=PREFIX + "Toy-v0", max_frame=1000, num_envs=3, **keys)
    env, raw_env = make_env(spec, SEED), make_env(spec, SEED, defer_normalization=True)
    env.reset()
    raw_env.reset()
    for action in random_actions(20, 3, 3):
        np.testing.assert_array_equal(raw_env.step(action).reward_N, env.step(action).reward_N)


def test_episodes_of_a_state_with_normalised_observations_do_not_continue() -> None:
    """Version 0.2.0 saved such states, which have no entry "deferred"."""
    spec = EnvSpec(name="CartPole-v1", max_frame=1000, num_envs=3, normalize_obs=True)
    env = make_env(spec, SEED, defer_normalization=True)
    env.reset()
    state = env.state_dict()
    for saved, continues in ((state, True), ({name: value for name, value in state.items() if name != "deferred"}, False)):
        other = make_env(spec, SEED, defer_normalization=True)
        other.load_state_dict(saved)
        assert other.resume() == continues
