"""Tests of PettingZoo's envs: agents that act at once or in turn, that come or leave, masks, the state for a critic, and faults."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from slm_lab.env import make_env
from slm_lab.env.backend import EnvRequest
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.env.pettingzoo_backend import PettingZoo
from slm_lab.env.render import with_rendering
from slm_lab.spec.compat import env_ids
from slm_lab.spec.compat.env_ids import pettingzoo_envs, unavailable_reason
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import SpecError
from tests.env.test_agents import assert_continues
from tests.packages import needs

packages = needs("pettingzoo")

COUNTDOWN, TURNS = "tests.env.zoo:Countdown", "tests.env.zoo:Turns"


def zoo(name: str, num_envs: int = 1, kwargs: dict[str, Any] | None = None, **keys: Any) -> PettingZoo:
    return PettingZoo(EnvRequest(f"pettingzoo:{name}", None, kwargs or {}, num_envs, **keys))


def who(backend: PettingZoo) -> tuple[list[bool], list[bool]]:
    assert backend.present_N is not None
    assert backend.acts_N is not None
    return backend.present_N.tolist(), backend.acts_N.tolist()


def test_agents_that_act_at_once_and_leave_by_hand() -> None:
    backend = zoo(COUNTDOWN, 2)
    assert backend.agents == ("a", "b", "c")
    obs = backend.reset([1, 2])
    drawn = [obs[0, 2], obs[3, 2]]
    assert obs[:, :2].tolist() == [[0, 0], [1, 0], [2, 0]] * 2
    assert who(backend) == ([True] * 6, [True] * 6)
    first = backend.step(np.array([0, 1, 2, 2, 1, 0]))
    assert first.reward_N.tolist() == [10, 21, 32, 12, 21, 30]
    assert first.terminated_N.tolist() == [True, False, False] * 2
    assert first.final is None
    assert first.obs[:, :2].tolist() == [[0, 1], [1, 1], [2, 1]] * 2, "the last observation of the agent that leaves"
    assert who(backend) == ([False, True, True] * 2, [False, True, True] * 2)
    second = backend.step(np.zeros(6, np.int64))
    assert second.reward_N.tolist() == [0, 20, 30] * 2
    assert not second.terminated_N.any()
    third = backend.step(np.zeros(6, np.int64))
    assert third.terminated_N.tolist() == [False, True, True] * 2
    assert third.final is not None
    assert [(row, last.tolist()) for row, last in third.final] == [(row, [row % 3, 3, drawn[row // 3]]) for row in (1, 2, 4, 5)]
    assert third.obs[:, 1].tolist() == [0] * 6, "a new episode"
    assert who(backend) == ([True] * 6, [True] * 6)
    backend.close()


def test_agents_that_act_in_turn_by_hand() -> None:
    """The order is a, b, b, so that b acts twice. A sum of 4 ends the game, and all agents get their reward in this step."""
    backend = zoo(TURNS)
    obs = backend.reset([0])
    masks = []
    for mover, action in (("a", 1), ("b", 1), ("b", 1), ("a", 1)):
        assert who(backend) == ([True, True], [mover == "a", mover == "b"])
        masks.append(obs["action_mask"].tolist())
        actions = np.full(2, 2)
        actions["ab".index(mover)] = action
        step = backend.step(actions)
        obs = step.obs
    assert masks == [[[0, 1, 1], [1, 1, 1]], *[[[1, 1, 1], [0, 1, 1]]] * 2, [[0, 1, 1], [1, 1, 1]]]
    assert step.reward_N.tolist() == [1, -1]
    assert step.terminated_N.tolist() == [True, True]
    assert step.final is not None
    assert [(row, last["observation"].tolist()) for row, last in step.final] == [(0, [4, 0]), (1, [4, 1])]
    assert obs["observation"].tolist() == [[0, 0], [0, 1]]
    assert who(backend) == ([True, True], [True, False])
    backend.close()


def test_an_agent_that_leaves_a_game_in_turns() -> None:
    backend = zoo(TURNS, kwargs={"order": "abc", "leaves": True})
    backend.reset([0])
    step = backend.step(np.array([0, 1, 1]))
    assert step.terminated_N.tolist() == [True, False, False]
    assert who(backend) == ([False, True, True], [False, True, False])
    movers = []
    for _ in range(4):
        movers.append(who(backend)[1].index(True))
        step = backend.step(np.array([0, 1, 1]))
    assert movers == [1, 2, 1, 2]
    assert step.terminated_N.tolist() == [False, True, True]
    assert step.reward_N.tolist() == [0, -1, 1]
    assert who(backend) == ([True] * 3, [True, False, False])
    backend.close()


def test_an_agent_that_comes() -> None:
    backend = zoo(COUNTDOWN, kwargs={"comes": 2})
    assert backend.reset([1])[:, :2].tolist() == [[0, 0], [1, 0], [0, 0]], "the row of an absent agent is a copy of another one"
    assert who(backend) == ([True, True, False], [True, True, False])
    backend.step(np.zeros(3, np.int64))
    step = backend.step(np.zeros(3, np.int64))
    assert step.reward_N.tolist() == [0, 20, 0]
    assert step.obs[2, :2].tolist() == [2, 2]
    assert who(backend) == ([False, True, True], [False, True, True])
    step = backend.step(np.zeros(3, np.int64))
    assert step.reward_N.tolist() == [0, 20, 30]
    assert step.terminated_N.tolist() == [False, True, True]
    assert who(backend)[0] == [True, True, False]
    backend.close()


def test_names_that_are_numbers() -> None:
    backend = zoo("tests.env.zoo:Numbered")
    assert backend.agents == ("0", "1")
    backend.reset([1])
    assert backend.step(np.array([1, 2])).reward_N.tolist() == [1, 2]
    backend.close()


def test_a_time_limit_truncates_the_agents_that_are_present() -> None:
    backend = zoo(COUNTDOWN, max_t=2)
    backend.reset([1])
    backend.step(np.zeros(3, np.int64))
    step = backend.step(np.zeros(3, np.int64))
    assert step.truncated_N.tolist() == [False, True, True]
    assert not step.terminated_N.any()
    assert step.final is not None
    assert [(row, last[1]) for row, last in step.final] == [(1, 2), (2, 2)]
    assert backend.episode_info(2) == {"steps": 2}
    backend.close()


def test_seeds_and_episodes() -> None:
    """Each env has its own stream, and each episode its own seed."""
    backend = zoo(COUNTDOWN, 2, {"ends": (1,)})
    drawn = [backend.reset([5, 6])[:, 2]] + [backend.step(np.zeros(2, np.int64)).obs[:, 2] for _ in range(3)]
    assert len({tuple(one) for one in drawn}) == 4
    again = zoo(COUNTDOWN, 1, {"ends": (1,)})
    assert again.reset([5])[0, 2] == drawn[0][0]
    assert again.step(np.zeros(1, np.int64)).obs[0, 2] == drawn[1][0]
    backend.close()
    again.close()


@pytest.mark.parametrize(("name", "rows"), [(COUNTDOWN, 6), (TURNS, 4)])
@pytest.mark.parametrize("steps", [1, 5, 8])
def test_saved_episodes_continue(name: str, rows: int, steps: int) -> None:
    rng = np.random.default_rng(0)
    action_TN = rng.integers(1, 3, (steps + 9, rows))
    straight, other = zoo(name, 2), zoo(name, 2)
    straight.reset([3, 4])
    for action_N in action_TN[:steps]:
        straight.step(action_N)
    other.reset([0, 0])
    other.set_rng_states(straight.rng_states() or [])
    other.set_episode_state(straight.episode_state())
    assert who(other) == who(straight)
    for action_N in action_TN[steps:]:
        one, two = straight.step(action_N), other.step(action_N)
        np.testing.assert_equal(two, one)
        assert who(other) == who(straight)
    assert (other.rng_states(), other.episode_state()) == (straight.rng_states(), straight.episode_state())


@pytest.mark.parametrize("name", [COUNTDOWN, TURNS])
def test_a_loaded_env_continues(name: str) -> None:
    assert_continues(EnvSpec(name=f"pettingzoo:{name}", max_frame=1, num_envs=3))


def test_masks_of_infos() -> None:
    backend = zoo(COUNTDOWN, kwargs={"masks": True}, action_mask="action_mask")
    obs = backend.reset([1])
    assert isinstance(backend.observation_space, spaces.Dict)
    assert obs["action_mask"].tolist() == [[1, 0, 0], [1, 0, 1], [1, 0, 1]]
    assert backend.step(np.zeros(3, np.int64)).obs["action_mask"].tolist() == [[1, 1, 1], [1, 0, 1], [1, 0, 1]]
    with pytest.raises(InvalidOutcome, match=r"set env\.action_mask to 'action_mask' to use it"):
        zoo(COUNTDOWN, kwargs={"masks": True}).reset([1])


@pytest.mark.parametrize("has_state", [True, False])
def test_the_state_is_for_the_critic(has_state: bool) -> None:
    spec = EnvSpec(name=f"pettingzoo:{COUNTDOWN}", max_frame=1, critic_keys=["state"], state=has_state)
    env = make_env(spec, 0)
    obs = env.reset()
    drawn = obs[0, 2]
    state = [0, drawn] if has_state else [0, 0, drawn, 1, 0, drawn, 2, 0, drawn]
    assert obs.tolist() == [[index, 0, drawn, *state] for index in range(3)]
    known = env.info.observation
    assert (known.critic_begin, known.space_for(critic=False).shape) == (3, (3,))
    assert env.info.agents == ("a", "b", "c")
    assert (env.info.num_envs, env.info.frames) == (3, 1)
    env.close()


def test_a_chosen_entry_keeps_the_mask() -> None:
    spec = EnvSpec(name=f"pettingzoo:{TURNS}", max_frame=1, obs_keys=["observation"], critic_keys=["state"])
    env = make_env(spec, 0)
    assert env.reset().tolist() == [[0, 0, 0, 0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 1, 1, 1, 1]]
    env.close()


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"0": {"b": ...}}, "agent 'b' has no observation"),
        ({"0": {"b": np.zeros(2)}}, "the observation of agent 'b'"),
        ({"1": {"b": "x"}}, "agent 'b' has the reward 'x'; expected a finite number"),
        ({"1": {"b": float("nan")}}, "agent 'b' has the reward nan; expected a finite number"),
        ({"1": {"b": ...}}, "agent 'b' has no reward"),
        ({"1": {"bb": 1.0}}, "the dict of rewards has an unknown agent 'bb'; env.possible_agents: a, b, c"),
        ({"2": {"b": ...}}, "agent 'b' has no entry in terminated"),
        ({"3": {"b": 7}}, "for truncated of agent 'b'; expected true or false"),
        ({"agents": ["b", "c", "d"]}, "env.agents has an unknown agent 'd'"),
        ({"agents": ["a", "b", "c"]}, "agent 'a' is in env.agents after its episode has ended"),
        ({"agents": ["b"]}, "agent 'c' has left env.agents, but is neither terminated nor truncated"),
    ],
)
def test_faults_name_env_agent_and_step(faults: dict[str, Any], words: str) -> None:
    env = make_env(EnvSpec(name=f"pettingzoo:{COUNTDOWN}", max_frame=1, num_envs=2), 0)
    env.reset()
    backend: Any = env._backend
    backend._games[1].env.faults = faults
    with pytest.raises(InvalidOutcome) as error:
        env.step(np.zeros(6, np.int64))
    assert words in str(error.value)
    assert f"pettingzoo:{COUNTDOWN}, env 1, step 1: " in str(error.value)
    env.close()


def test_an_agent_that_acts_after_its_end() -> None:
    backend = zoo(TURNS, kwargs={"order": "abc", "leaves": True})
    backend.reset([0])
    backend.step(np.array([0, 1, 1]))
    backend._games[0].env.selected = "a"
    with pytest.raises(InvalidOutcome, match=r"agent 'a' is to act \(env.agent_selection\) after its episode has ended"):
        backend.step(np.array([0, 1, 1]))


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        (
            {"name": "pettingzoo:tests.env.zoo:not_an_env"},
            "env.name",
            "a value of the type object; expected a pettingzoo.ParallelEnv",
        ),
        ({"name": "pettingzoo:tests.env.zoo:Nothing"}, "env.name", "tests.env.zoo has no 'Nothing'"),
        ({"name": "pettingzoo:nowhere.zoo:Env"}, "env.name", "no package 'nowhere'"),
        ({"name": "pettingzoo:tictactoe_v2"}, "env.name", "did you mean 'tictactoe_v3'?"),
        ({"name": "pettingzoo:pettingzoo.classic.tictactoe_v3"}, "env.name", "did you mean 'tictactoe_v3'?"),
        ({"name": "pettingzoo:a-b:c"}, "env.name", "must be pettingzoo:NAME or pettingzoo:package.module:Class"),
        ({"wrappers": [{"name": "ClipAction"}]}, "env.wrappers", "has no effect on pettingzoo:"),
        ({"schedule": {"ends": [[0, [1]], [5, [2]]]}}, "env.schedule", "has no effect on pettingzoo:"),
        ({"ens": [1]}, "env.ens", "unexpected keyword argument 'ens'"),
        ({"backend": "sync"}, "env.backend", "is not registered with Gymnasium"),
        ({"name": "CartPole-v1", "backend": "pettingzoo"}, "env.backend", "CartPole-v1 is not an env of PettingZoo"),
        ({"critic_keys": ["stat"]}, "env.critic_keys[0]", "no entry 'stat' in the observation"),
    ],
)
def test_faults_of_a_spec(keys: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        make_env(EnvSpec(**{"name": f"pettingzoo:{COUNTDOWN}", "max_frame": 1, **keys}), 0)
    (problem,) = error.value.problems
    assert problem.path == path
    assert words in problem.message


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = env_ids._is_installed
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: package not in ("rlcard", "mpe2") and real(package))
    for name, package, extra in (
        ("leduc_holdem_v4", "rlcard", "pettingzoo[classic]"),
        ("simple_spread_v3", "mpe2", "slm-lab[pettingzoo]"),
    ):
        assert unavailable_reason(f"pettingzoo:{name}") == f"pettingzoo:{name} needs the package {package}: pip install '{extra}'"
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: package != "pettingzoo" and real(package))
    assert "needs the package pettingzoo: pip install 'slm-lab[pettingzoo]'" in (unavailable_reason("pettingzoo:rps_v2") or "")


def test_tic_tac_toe() -> None:
    """player_1 takes the cells 0, 1 and 2. Rewards reach both players in the step that ends the game."""
    pytest.importorskip("pygame")
    backend = zoo("tictactoe_v3")
    assert backend.agents == ("player_1", "player_2")
    backend.reset([0])
    for turn, cell in enumerate((0, 3, 1, 4, 2)):
        assert who(backend)[1] == [turn % 2 == 0, turn % 2 == 1]
        step = backend.step(np.full(2, cell))
        assert step.terminated_N.tolist() == [turn == 4] * 2
    assert step.reward_N.tolist() == [1, -1]
    assert not step.obs["observation"].any()
    backend.close()


def test_simple_spread_has_a_state() -> None:
    if importlib.util.find_spec("mpe2") is None:
        pytest.skip("needs mpe2")
    env = make_env(EnvSpec(name="pettingzoo:simple_spread_v3", max_frame=1, num_envs=2, critic_keys=["state"]), 0)
    obs = env.reset()
    assert obs.shape == (6, 18 + 54)
    np.testing.assert_array_equal(obs[:3, :18].ravel(), obs[0, 18:])
    step = env.step(np.zeros(6, np.int64))
    assert len(set(step.reward_N[:3].tolist())) == 1
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(pettingzoo_envs()) if importlib.util.find_spec("pettingzoo") else [])
def test_every_name(name: str) -> None:
    if reason := unavailable_reason(f"pettingzoo:{name}"):
        pytest.skip(reason)
    env = make_env(EnvSpec(name=f"pettingzoo:{name}", max_frame=1, num_envs=2, max_t=20), 0)
    rows = 2 * len(env.info.agents)
    assert env.reset().shape == (rows, *env.info.observation.shape)
    for _ in range(30):
        step = env.step(env.sample())
        assert step.obs_N.shape == (rows, *env.info.observation.shape)
        assert np.isfinite(step.reward_N).all()
    env.close()


class Frames:
    """Recorder that keeps the frames of each episode."""

    def __init__(self) -> None:
        self.episodes: list[list[Any]] = []

    def begin_episode(self) -> bool:
        self.episodes.append([])
        return True

    def add_frame(self, frame_HWC: np.ndarray, fps: float) -> None:
        self.episodes[-1].append(frame_HWC)


def test_frames_of_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last frame of a game shows its end."""
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    frames = Frames()
    env = make_env(with_rendering(EnvSpec(name="pettingzoo:tictactoe_v3", max_frame=1), "rgb_array", frames), 0)
    env.reset()
    for cell in (0, 3, 1, 4, 2, 5):
        env.step(np.full(2, cell))
    assert [len(episode) for episode in frames.episodes] == [5, 1]
    shown = [frame for episode in frames.episodes for frame in episode]
    assert {frame.shape[-1] for frame in shown} == {3}
    assert all((one != other).any() for one, other in itertools.pairwise(shown))
    env.close()
