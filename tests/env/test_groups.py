"""Tests of envs whose agents have different spaces: each agent has its own, and everything else is as with equal spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slm_lab.env import make_env
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.env.vec import Env
from slm_lab.lib.padding import pad_rows, remove_padding
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import SpecError
from tests.env.test_agents import assert_continues
from tests.packages import needs

packages = needs("pettingzoo")

UNEQUAL, TURNS = "pettingzoo:tests.env.zoo:Unequal", "pettingzoo:tests.env.zoo:UnequalTurns"


def env_of(name: str = UNEQUAL, num_envs: int = 1, **keys: Any) -> Env:
    return make_env(EnvSpec(name=name, max_frame=1, num_envs=num_envs, **keys), 3)


def test_padding_by_hand() -> None:
    wide, narrow = ActionSpace("continuous", dim=2), ActionSpace("discrete", (3,))
    assert pad_rows(np.array([1, 2]), wide).tolist() == [[1.0, 0.0], [2.0, 0.0]]
    assert pad_rows(np.array([1, 2]), wide).dtype == np.float32
    back = remove_padding(np.array([[1.0, 0.0], [2.0, 0.0]], np.float32), narrow)
    assert (back.tolist(), back.dtype) == ([1, 2], np.int64)
    seen = pad_rows(np.ones((2, 1), np.float32), ObservationSpace((3,)))
    assert seen.tolist() == [[1, 0, 0]] * 2
    assert remove_padding(seen, ObservationSpace((1,))).tolist() == [[1], [1]]


def test_observations_and_actions_by_hand() -> None:
    """Agent a leaves after one step. Agent b observes the drawn number too; the others observe two numbers, padded with a 0."""
    env = env_of(num_envs=2)
    assert [group.agents for group in env.info.groups] == [("a", "c"), ("b",)]
    assert [(group.observation.shape, group.action.nvec, group.num_envs) for group in env.info.groups] == [((2,), (3,), 4), ((3,), (4,), 2)]
    own = env.info.for_agents(("c",))
    assert (own.agents, own.num_envs, own.observation.shape, own.action.nvec, own.groups) == (("c",), 2, (2,), (3,), ())
    with pytest.raises(ValueError, match="the spaces of the agents a, b differ"):
        env.info.for_agents(("b", "a"))
    obs = env.reset()
    drawn = [obs[1, 2], obs[4, 2]]
    assert obs.tolist() == [[index % 3, 0, drawn[index // 3] if index % 3 == 1 else 0] for index in range(6)]
    first = env.step(np.array([0, 3, 2, 2, 1, 0]))
    assert first.reward_N.tolist() == [10, 23, 32, 12, 21, 30]
    assert first.terminated_N.tolist() == [True, False, False] * 2
    assert [(one.env, one.total_reward, one.length) for one in first.episodes] == [(0, 10, 1), (3, 12, 1)]
    assert first.acts_N is not None
    assert first.acts_N.tolist() == [False, True, True] * 2
    second = env.step(np.array([0, 0, 1, 0, 3, 2]))
    assert second.valid_N.tolist() == [False, True, True] * 2
    assert second.reward_N.tolist() == [0, 20, 31, 0, 23, 32]
    third = env.step(np.zeros(6, np.int64))
    assert third.terminated_N.tolist() == [False, True, True] * 2
    assert third.last_obs_N[[1, 2, 4, 5]].tolist() == [[1, 3, drawn[0]], [2, 3, 0], [1, 3, drawn[1]], [2, 3, 0]]
    assert third.obs_N[:, 1].tolist() == [0] * 6
    assert third.first_N.tolist() == [True] * 6
    assert [(one.env, one.total_reward, one.length) for one in third.episodes] == [(1, 63, 3), (2, 93, 3), (4, 64, 3), (5, 92, 3)]
    env.close()


def test_discrete_and_continuous_agents() -> None:
    """Actions of agent b in [−1, 1] are scaled to its bounds, −2 to 2; the env itself checks the type of each action."""
    env = env_of(continuous=True)
    assert (env.info.action.shape, env.info.action.dtype) == ((2,), np.float32)
    env.reset()
    step = env.step(np.array([[2, 0], [0.25, 0.5], [1, 0]], np.float32))
    assert step.reward_N.tolist() == [12, 21.5, 31]
    drawn = np.array([env.sample() for _ in range(200)])
    assert set(drawn[:, [0, 2], 0].ravel().tolist()) == {0, 1, 2}
    assert not drawn[:, [0, 2], 1].any()
    assert drawn[:, 1].min() < -0.9
    assert drawn[:, 1].max() > 0.9
    env.close()


@pytest.mark.parametrize("keys", [{}, {"comes": 2}, {"masks": True, "action_mask": "action_mask"}, {"max_t": 2}])
def test_rows_are_those_of_equal_spaces_with_zeros(keys: dict[str, Any]) -> None:
    _assert_alike(UNEQUAL, **keys)


@pytest.mark.parametrize("keys", [{}, {"order": "abcb", "leaves": True}])
def test_rows_of_agents_in_turn_are_those_of_equal_spaces_with_zeros(keys: dict[str, Any]) -> None:
    _assert_alike(TURNS, **keys)


def _assert_alike(name: str, **keys: Any) -> None:
    """Assert that the steps equal those of an env whose agents have equal spaces, in which the masks of a and c have an additional 0."""
    env, twin = env_of(name, 3, **keys), env_of(name, 3, alike=True, **keys)
    assert not twin.info.groups
    masked = twin.info.observation.mask is not None

    def same(obs_N: np.ndarray, twin_N: np.ndarray) -> None:
        for number, group in enumerate(env.info.groups):
            rows = env.info.agent_rows(group.agents)
            own, other = remove_padding(obs_N[rows], group.observation), twin_N[rows]
            if number == 0 and masked:
                other = other[:, [0, 1, 3, 4, 5]]
            np.testing.assert_array_equal(own, other if number or masked else other[:, :2])

    same(env.reset(), twin.reset())
    ends = 0
    for _ in range(40):
        action_N = env.sample()
        step, other = env.step(action_N), twin.step(action_N)
        same(step.obs_N, other.obs_N)
        rows = step.valid_N
        np.testing.assert_array_equal(step.last_obs_N[rows & step.truncated_N][:, :2], other.last_obs_N[rows & step.truncated_N][:, :2])
        for field in ("reward_N", "terminated_N", "truncated_N", "first_N", "valid_N", "acts_N", "episodes"):
            np.testing.assert_equal(getattr(step, field), getattr(other, field))
        ends += len(step.episodes)
    assert ends > 10
    env.close()
    twin.close()


def test_statistics_are_those_of_the_agents_with_equal_spaces() -> None:
    env = env_of(normalize_obs=True, normalize_reward=True)
    obs = env.reset()
    one, other = env.normalizers_of(("c",)), env.normalizers_of(("b",))
    assert one is env.normalizers_of(("a", "c"))
    assert one.obs is not None
    assert one.obs.stats is not None
    assert other.obs is not None
    assert other.obs.stats is not None
    assert (one.obs.stats.count, one.obs.stats.mean.tolist()) == (2, [1.0, 0.0])
    assert (other.obs.stats.count, other.obs.stats.mean[:2].tolist()) == (1, [1.0, 0.0])
    assert obs[0, :2] == pytest.approx([-1.0, 0.0])
    assert obs[2, :2] == pytest.approx([1.0, 0.0])
    assert not obs[[0, 2], 2].any()
    env.close()


@pytest.mark.parametrize("has_state", [True, False])
def test_a_state_for_the_critics(has_state: bool) -> None:
    """If the env has no state, the state is the observations of all agents: two, three and two numbers."""
    env = env_of(critic_keys=["state"], state=has_state)
    obs = env.reset()
    drawn = obs[1, 2]
    state = [0, drawn] if has_state else [0, 0, 1, 0, drawn, 2, 0]
    assert obs[1].tolist() == [1, 0, drawn, *state]
    assert obs[2].tolist() == [2, 0, *state, 0]
    assert [group.observation.critic_begin for group in env.info.groups] == [2, 3]
    env.close()


def test_an_agent_that_has_not_come_yet_and_is_alone_has_zeros() -> None:
    env = env_of(ends=(1, 3), comes=2, critic_keys=["state"])
    assert env.reset()[1].tolist() == [0.0] * 8
    env.close()


def test_masks_are_those_of_each_agent() -> None:
    env = env_of(masks=True, action_mask="action_mask")
    assert [group.observation.mask for group in env.info.groups] == [(2, 5), (3, 7)]
    obs = env.reset()
    assert obs[0].tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert obs[1, 3:].tolist() == [0, 1, 1, 1]
    drawn = np.array([env.sample() for _ in range(100)])
    assert [set(one.tolist()) for one in drawn.T] == [{1, 2}, {1, 2, 3}, {1, 2}]
    env.close()


@pytest.mark.parametrize(
    "keys",
    [{"normalize_obs": True, "normalize_reward": True}, {"continuous": True}, {"comes": 2}, {"masks": True, "action_mask": "action_mask"}],
)
def test_a_loaded_env_continues(keys: dict[str, Any]) -> None:
    assert_continues(EnvSpec(name=UNEQUAL, max_frame=1, num_envs=3, **keys))


def test_a_loaded_env_of_agents_in_turn_continues() -> None:
    assert_continues(EnvSpec(name=TURNS, max_frame=1, num_envs=3))


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"0": {"b": np.zeros(2)}}, "the observation of agent 'b'"),
        ({"1": {"b": float("nan")}}, "agent 'b' has the reward nan; expected a finite number"),
    ],
)
def test_faults_name_env_agent_and_step(faults: dict[str, Any], words: str) -> None:
    env = env_of(num_envs=2)
    env.reset()
    backend: Any = env._backend
    backend._games[1].env.faults = faults
    with pytest.raises(InvalidOutcome) as error:
        env.step(np.zeros(6, np.int64))
    assert words in str(error.value)
    assert f"{UNEQUAL}, env 1, step 1: " in str(error.value)
    env.close()


@pytest.mark.parametrize(
    "keys",
    [
        {"last": np.nan},  # equal spaces
        {"last": np.nan, "width": 3},
        {"width": 40, "images": True},  # the bytes of images are not float32 numbers
        {"first": np.inf, "width": 3, "normalize_obs": True},
    ],
    ids=str,
)
def test_allowed_observations_that_are_not_finite(keys: dict[str, Any]) -> None:
    """Observations of terminated agents may contain NaN. Infinite numbers are allowed if the observations will be clipped."""
    spec = EnvSpec(name="pettingzoo:tests.env.zoo:Leaving", max_frame=100, num_envs=2, **keys)
    env = make_env(spec, 3, training=True, defer_normalization=spec.normalize_obs)
    assert env.reset().shape[0] == 4
    for _ in range(9):
        played = env.step(env.sample())
        if played.obs_N.dtype == np.float32 and not spec.normalize_obs:
            assert np.isfinite(played.obs_N).all()
            assert np.isfinite(played.last_obs_N).all()
    env.close()


def test_an_empty_mask_names_env_agent_and_step() -> None:
    env = env_of(num_envs=2, masks=True, action_mask="action_mask")
    env.reset()
    backend: Any = env._backend
    backend._games[1].env.faults = {"4": {"c": {"action_mask": np.zeros(3)}}}
    with pytest.raises(InvalidOutcome, match=f"{UNEQUAL}, env 1, step 1: the action mask for c has no valid action"):
        env.step(np.ones(6, np.int64))
    env.close()


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        (
            {"name": "pettingzoo:tests.env.zoo:Pictures"},
            "env.name",
            "the agents have observations of different kinds (0: image 10 × 10, 3 channels last, 0 to 255; 1: image 12 × 10",
        ),
        ({"critic_keys": ["stat"]}, "env.critic_keys[0]", "agents a, c: no entry 'stat' in the observation"),
        ({"continuous": True, "action_mask": "action_mask"}, "env.action_mask", "masks Discrete and MultiDiscrete actions"),
        ({"obs_keys": ["observation"]}, "env.obs_keys", "the observation space is a Box"),
    ],
)
def test_faults_of_a_spec(keys: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        make_env(EnvSpec(**{"name": UNEQUAL, "max_frame": 1, **keys}), 0)
    (problem,) = error.value.problems
    assert problem.path == path
    assert words in problem.message
