"""Tests of envs with several agents: rows, turns, masks, ends of episodes, and exact continuation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slm_lab.env import make_env
from slm_lab.env.backend import EnvRequest, RawStep
from slm_lab.env.native_backends import EnvPool, EnvPoolAgents
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.spec.compat.env_ids import envpool_envs
from slm_lab.spec.models.env import EnvSpec
from tests.packages import needs

packages = needs("envpool")


def game(name: str, num_envs: int = 1, **keys: Any) -> EnvPoolAgents:
    target = EnvRequest(name, None, {}, num_envs, **keys)
    backend = EnvPool.backend_class_for(target)(target)
    assert isinstance(backend, EnvPoolAgents)
    return backend


def drawn(obs: Any, rng: np.random.Generator) -> np.ndarray:
    """Return a random valid action for each row."""
    return np.array([rng.choice(np.flatnonzero(mask)) for mask in obs["legal_action_mask"]])


def acting(backend: EnvPoolAgents) -> list[bool]:
    assert backend.acts_N is not None
    return backend.acts_N.tolist()


def test_one_player_envs_stay_as_they_are() -> None:
    assert EnvPool.backend_class_for(EnvRequest("CheetahRun-v1", None, {}, 1)) is EnvPool


def test_a_game_by_hand() -> None:
    """The player who begins takes the cells 0, 1 and 2, and wins; the other one takes 3 and 4."""
    backend = game("TicTacToe-v1")
    obs = backend.reset([7])
    assert backend.agents == ("player_0", "player_1")
    first = acting(backend).index(True)
    for turn, cell in enumerate((0, 3, 1, 4, 2)):
        mover = (first + turn) % 2
        assert acting(backend) == [mover == 0, mover == 1]
        free = [one not in (0, 3, 1, 4)[:turn] for one in range(9)]
        assert obs["legal_action_mask"].tolist() == [free if row == mover else [True] * 9 for row in (0, 1)]
        action = np.full(2, 8)  # the action of the waiting player is ignored
        action[mover] = cell
        step = backend.step(action)
        obs = step.obs
        own, other = obs["observation"].reshape(2, 9, 2)[mover].T.tolist()
        mine = [one for number, one in enumerate((0, 3, 1, 4, 2)) if number <= turn and number % 2 == turn % 2]
        assert own == [one in mine for one in range(9)]
        assert sum(other) == turn // 2 + turn % 2
        assert step.terminated_N.tolist() == [turn == 4] * 2
        assert step.reward_N.tolist() == ([0.0, 0.0] if turn < 4 else [1.0, -1.0] if first == 0 else [-1.0, 1.0])
        assert not step.truncated_N.any()
        assert step.final is None
    assert acting(backend) == [False, False]
    assert obs["legal_action_mask"].all()
    dummy = backend.step(np.zeros(2, np.int64))
    assert not dummy.obs["observation"].any()
    assert sum(acting(backend)) == 1
    assert not dummy.reward_N.any()
    assert not dummy.terminated_N.any()
    backend.close()


def test_a_time_limit_truncates_all_players_and_resets_in_the_same_step() -> None:
    backend = game("TicTacToe-v1", 3, max_t=2)
    rng, obs = np.random.default_rng(0), backend.reset([1, 2, 3])
    obs = backend.step(drawn(obs, rng)).obs
    step = backend.step(drawn(obs, rng))
    assert step.truncated_N.all()
    assert step.final is not None
    assert [row for row, _ in step.final] == list(range(6))
    assert [int(last["observation"].sum()) for _, last in step.final] == [2] * 6
    assert not step.obs["observation"].any()
    assert sum(acting(backend)) == 3
    backend.close()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    """With several threads, EnvPool returns the envs in the order in which they finish; this must not change the results."""

    def played(threads: int) -> bytes:
        backend, rng = game("Go9x9-v1", 8, threads=threads), np.random.default_rng(0)
        obs, content = backend.reset(list(range(8))), b""
        for _ in range(60):
            step = backend.step(drawn(obs, rng))
            obs = step.obs
            content += obs["observation"].tobytes() + bytes(acting(backend)) + step.reward_N.tobytes()
        backend.close()
        return content

    assert played(1) == played(4)


def test_envs_that_are_returned_in_another_order() -> None:
    one, other = game("TicTacToe-v1", 3), game("TicTacToe-v1", 3)
    obs = one.reset([1, 2, 3])
    other.reset([1, 2, 3])
    receive, rng = other._pool._recv, np.random.default_rng(0)

    def shuffled() -> list[np.ndarray]:
        order = rng.permutation(3)
        rows = (order[:, None] * 2 + [0, 1]).ravel()
        return [array[order if len(array) == 3 else rows] for array in receive()]

    other._pool._recv = shuffled
    for _ in range(12):
        action = drawn(obs, rng)
        step, same = one.step(action), other.step(action)
        obs = step.obs
        np.testing.assert_equal(same, step)
        assert acting(other) == acting(one)
    one.close()
    other.close()


def test_vehicles_act_at_once() -> None:
    backend = game("intersection-multi-agent-v0", 2)
    rows, *size = backend.reset([0, 1]).shape
    assert rows == 4
    assert size in ([5, 5], [15, 7])  # EnvPool before and since 1.2.7
    assert backend.agents == ("vehicle_0", "vehicle_1")
    assert acting(backend) == [True] * 4
    ended = 0
    for _ in range(30):
        over = np.repeat(backend._over_N, 2)
        step = backend.step(np.ones(4, np.int64))
        assert step.obs.shape == (4, *size)
        assert not (step.terminated_N & over).any()
        pairs = (step.terminated_N | step.truncated_N).reshape(2, 2)
        assert (pairs[:, 0] == pairs[:, 1]).all()
        ended += int(pairs[:, 0].sum())
    assert ended
    assert backend.rng_states() is None
    assert "players.crashed" in backend.episode_info(3)
    backend.close()


def continued(name: str, steps: int) -> int:
    """Assert that restored games continue like uninterrupted ones; return how many games ended after the restore."""

    def play(backend: EnvPoolAgents, obs: Any, rng: np.random.Generator) -> list[tuple[RawStep, list[bool]]]:
        found = []
        for _ in range(steps):
            step = backend.step(drawn(obs, rng))
            obs = step.obs
            found.append((step, acting(backend)))
        return found

    straight, rng = game(name, 3), np.random.default_rng(1)
    obs = play(straight, straight.reset([11, 12, 13]), rng)[-1][0].obs
    rngs, episodes, drawing = straight.rng_states(), straight.episode_state(), rng.bit_generator.state
    assert rngs is not None
    expected = play(straight, obs, rng)
    other = game(name, 3)
    other.reset([1, 1, 1])
    other.set_rng_states(rngs)
    other.set_episode_state(episodes)
    rng.bit_generator.state = drawing
    for (one, acts), (two, acts_too) in zip(expected, play(other, obs, rng), strict=True):
        assert acts == acts_too
        assert [one.obs[key].tobytes() for key in one.obs] == [two.obs[key].tobytes() for key in two.obs]
        assert [array.tobytes() for array in one[1:4]] == [array.tobytes() for array in two[1:4]]
    assert (other.rng_states(), other.episode_state()) == (straight.rng_states(), straight.episode_state())
    straight.close()
    other.close()
    return sum(int(step.terminated_N.sum()) for step, _ in expected) // len(straight.agents)


@pytest.mark.parametrize("name", ["TicTacToe-v1", "ConnectFour-v1", "Othello-v1", "KuhnPoker-v1"])
@pytest.mark.parametrize("steps", [20, 121])
def test_saved_games_continue(name: str, steps: int) -> None:
    assert continued(name, steps) or steps < 100


def assert_continues(spec: EnvSpec) -> None:
    """Assert that an env with a loaded state makes the same steps as the one whose state was saved."""
    straight, other = make_env(spec, 7), make_env(spec, 7)
    straight.reset()
    for _ in range(40):
        straight.step(straight.sample())
    state = straight.state_dict()
    actions, steps = [], []
    for _ in range(30):
        actions.append(straight.sample())
        steps.append(straight.step(actions[-1]))
    other.load_state_dict(state)
    assert other.resume()
    for action_N, step in zip(actions, steps, strict=True):
        for one, two in zip(other.step(action_N), step, strict=True):
            np.testing.assert_equal(one, two)
    assert sum(len(step.episodes) for step in steps)
    straight.close()
    other.close()


def test_a_loaded_env_continues() -> None:
    assert_continues(EnvSpec(name="TicTacToe-v1", max_frame=1, num_envs=3))


def test_a_user_s_backend() -> None:
    env = make_env(EnvSpec(name="Counting-v0", max_frame=1, num_envs=2, backend="tests.env.own_backend:Pairs"), 0)
    assert (env.info.num_envs, env.info.frames, env.info.agents) == (4, 2, ("a", "b"))
    assert env.reset().shape == (4, 1)
    acts_N = env.step(env.sample()).acts_N
    assert acts_N is not None
    assert acts_N.tolist() == [False, True] * 2
    env.close()


GAMES = sorted({env.ids[0] for env in envpool_envs().values() if env.suite == "pgx" and env.players > 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_every_game_continues(name: str) -> None:
    if name == "Backgammon-v1":  # rolls its dice during steps
        assert (game(name).rng_states(), game(name).episode_state()) == (None, None)
    else:
        continued(name, 150)


def test_errors_name_env_and_agent() -> None:
    """A reward that is not finite is an error, which names the second env and its second agent."""
    env = make_env(EnvSpec(name="CartPole-v1", backend="tests.env.turn_games:Duel", num_envs=2, max_frame=100), 0)
    env.reset()
    step = env._backend.step

    def broken(action: np.ndarray) -> RawStep:
        raw = step(action)
        raw.reward_N[3] = np.nan
        return raw

    env._backend.step = broken  # type: ignore[method-assign]
    with pytest.raises(InvalidOutcome, match=r"env 1.*nan for right"):
        env.step(np.zeros(4, np.int64))
