"""Tests of saved env states: the random streams of spaces, and states that do not fit the env."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from slm_lab.env.snapshot import NotSavable, env_state, load_env_state, seed_spaces
from slm_lab.experiment.files import bundle


class Places(gym.Env[Any, Any]):
    """Has two equal spaces, a space that belongs to the class, and an inner env."""

    action_space = spaces.Discrete(10**6)

    def __init__(self, inner: gym.Env[Any, Any] | None = None) -> None:
        self.start, self.goal = (spaces.Box(0.0, 1.0, (2,), np.float64) for _ in range(2))
        self.observation_space = self.start
        self.moves = type(self).action_space
        self.inner = inner


def draws(env: Places) -> list[list[float]]:
    return [[float(value) for value in np.ravel(space.sample())] for space in (env.start, env.goal, env.action_space)]


def test_each_space_has_a_random_stream_of_its_own() -> None:
    first, again, other = (Places(Places()) for _ in range(3))
    for env, seed in ((first, 5), (again, 5), (other, 6)):
        seed_spaces(gym.wrappers.TimeLimit(env, 3), seed)
    start, goal, action = draws(first)
    assert start != goal
    assert start != np.random.default_rng(5).random(2).tolist()  # the stream of env.np_random
    assert draws(again) == [start, goal, action]
    assert all(one != two for one, two in zip(draws(other), (start, goal, action), strict=True))
    assert first.inner is not None
    assert again.inner is not None
    inner = draws(first.inner)
    assert inner == draws(again.inner)
    assert all(one != two for one, two in zip(inner, (start, goal, action), strict=True))


def test_a_space_of_the_class_is_saved_for_each_env() -> None:
    env, other = Places(), Places()
    for one in (env, other):
        seed_spaces(one, 5)
    state = env_state(env)
    expected = [draws(env) for _ in range(3)]
    load_env_state(other, state)
    assert [draws(other) for _ in range(3)] == expected
    assert other.moves is other.action_space is not env.action_space
    assert Places.action_space._np_random is None


@pytest.mark.parametrize("inner", [None, gym.make("CartPole-v1")])
def test_another_inner_env_is_refused(inner: gym.Env[Any, Any] | None) -> None:
    state = env_state(Places(Places()))
    with pytest.raises(NotSavable):
        load_env_state(Places(inner), state)


class Weather(Enum):
    DRY = 0
    WET = 1


class Coin:
    """Object that an env creates in the middle of an episode."""

    def __init__(self, value: float, env: Game) -> None:
        self.value, self.env, self.pay = value, env, self.pay_once
        self.rivals: list[Coin] = []

    def pay_once(self) -> float:
        self.pay = self.pay_nothing
        return self.value

    def pay_nothing(self) -> float:
        return 0.0


def bonus(coin: Coin) -> float:
    return 10 * coin.value


class Game(gym.Env[Any, Any]):
    """Env whose attributes change their kind during an episode."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.phase, self.weather = 0, self.begin, Weather.DRY
        self.coin: Coin | None = None
        self.coins: list[Coin] = []
        self.score: Callable[[Coin], float] | None = None
        return np.zeros(1, np.float32), {}

    def begin(self) -> float:
        return 1.0

    def __private(self) -> Game:
        return self

    def private(self) -> Callable[[], Game]:
        return self.__private

    def end(self) -> float:
        assert self.coin is not None
        assert self.score is not None
        return self.coin.pay() + sum(self.score(coin) for coin in self.coins) + self.coin.rivals[0].value + self.coin.env.t

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        if self.t == 2:
            self.phase, self.weather, self.score = self.end, Weather.WET, bonus
            self.coin = Coin(3.0, self)
            self.coins = [self.coin, Coin(5.0, self)]
            self.coin.rivals = self.coins
        return np.zeros(1, np.float32), self.phase(), False, self.t >= 9, {"weather": self.weather}


def outcomes(env: gym.Env[Any, Any]) -> list[Any]:
    return [env.step(0)[1:] for _ in range(3)]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_objects_methods_and_functions_that_change_within_an_episode(steps: int) -> None:
    env, other = gym.wrappers.TimeLimit(Game(), 20), gym.wrappers.TimeLimit(Game(), 20)
    for one in (env, other):
        one.reset(seed=0)
    for _ in range(steps):
        env.step(0)
    state = env_state(env)
    expected = outcomes(env)
    load_env_state(other, state)
    assert outcomes(other) == expected
    game: Any = other.unwrapped
    assert game.coin is None or (game.coin is game.coins[0] and game.coin.rivals is game.coins and game.coin.env is game)


def test_two_attributes_that_referred_to_one_object_get_an_object_each() -> None:
    env, other = Game(), Game()
    for one in (env, other):
        one.reset(seed=0)
        one.coin = one.last = Coin(1.0, one)  # type: ignore[attr-defined]
    env.coin = Coin(2.0, env)
    load_env_state(other, env_state(env))
    assert other.coin is not None
    assert (other.coin.value, other.last.value) == (2.0, 1.0)  # type: ignore[attr-defined]


def begun() -> tuple[Game, Game]:
    """Return two envs that have been reset."""
    env, other = Game(), Game()
    for one in (env, other):
        one.reset(seed=0)
    return env, other


@pytest.mark.parametrize(
    "name",
    ["tempfile._TemporaryFileCloser", f"{__name__}.{tempfile.__name__}._TemporaryFileCloser", f"{__name__}.{tempfile.__name__}.mkdtemp"],
    ids=["class of another package", "the class through a module of this package", "a function through a module of this package"],
)
@pytest.mark.parametrize("kind", ["object", "named"])
def test_a_saved_state_gives_access_to_no_other_package(kind: str, name: str) -> None:
    """A module of the env's package, such as this one, also contains other modules."""
    env, other = begun()
    env.coin = Coin(2.0, env)
    state = env_state(gym.wrappers.TimeLimit(env, 9))
    _, number, (saved, *rest) = state[1]["attributes"]["coin"]
    assert saved == f"{Coin.__module__}.Coin"
    state[1]["attributes"]["coin"] = (kind, number, (name, *rest) if kind == "object" else name)
    with pytest.raises(NotSavable):
        load_env_state(gym.wrappers.TimeLimit(other, 9), state)


def test_values_that_refer_to_the_env() -> None:
    """An object in a container has the env's random generator, and attributes are methods of other objects and of the env."""
    env, other = begun()
    env.extra = {"coins": [Coin(2.0, env), Coin(3.0, env)], "moves": [env.begin], "kinds": (Coin, bonus), "place": Path("a/b")}  # type: ignore[attr-defined]
    coins = env.extra["coins"]  # type: ignore[attr-defined]
    coins[0].rng, env.pay, env.score = env.np_random, coins[1].pay_once, bonus  # type: ignore[attr-defined]
    env.secret = env.private()  # type: ignore[attr-defined]
    load_env_state(other, env_state(env))
    extra: Any = other.extra  # type: ignore[attr-defined]
    assert extra["coins"][0].rng is other.np_random is not env.np_random
    assert other.pay() == 3.0  # type: ignore[attr-defined]
    assert extra["coins"][1].pay() == 0.0
    assert extra["moves"][0].__self__ is other
    assert (extra["kinds"], extra["place"]) == ((Coin, bonus), Path("a/b"))
    assert other.secret() is other  # type: ignore[attr-defined]


def test_a_method_that_does_not_exist_now_is_refused() -> None:
    env, other = begun()
    state = env_state(env)
    kind, number, (owner, name) = state[0]["attributes"]["phase"]
    assert name == "begin"
    state[0]["attributes"]["phase"] = kind, number, (owner, "start")
    with pytest.raises(NotSavable):
        load_env_state(other, state)


def test_an_object_of_the_class_is_not_changed() -> None:
    class Shared(Game):
        coin = Coin(0.0, Game())

    envs = [Shared() for _ in range(2)]
    states = []
    for value, env in enumerate(envs, 1):
        env.reset(seed=0)
        env.coin = Coin(value, env)
        states.append(env_state(env))
    for state, env in zip(states, envs, strict=True):
        del env.coin
        load_env_state(env, state)
    assert [Shared.coin.value, *(env.coin.value for env in envs)] == [0.0, 1, 2]


def local_class() -> type:
    class Local:
        """Class that is not an attribute of a module, so that a saved state cannot refer to it by name."""

    return Local


def nested_tuples(depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize(
    "value",
    [{1, 2}, [local_class()()], np.zeros(9)[1:], BaseException(), nested_tuples(500), [MethodType(partial(bonus), [])]],
    ids=["set", "local class", "view of an array", "exception", "nested tuples", "method of a list"],
)
def test_values_that_cannot_be_saved(value: Any) -> None:
    env = Game()
    env.reset(seed=0)
    env.extra = value  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray):
        env.base = value.base  # type: ignore[attr-defined]
    with pytest.raises(NotSavable):
        env_state(env)


@pytest.mark.parametrize("depth", [90, 110])
def test_values_that_are_nested_too_deeply_for_a_file_cannot_be_saved(depth: int, tmp_path: Path) -> None:
    env, other = Game(), Game()
    for one in (env, other):
        one.reset(seed=0)
    env.coin = Coin(1.0, env)
    for _ in range(depth // 2):  # a coin and its list of rivals are two levels
        coin = Coin(1.0, env)
        coin.rivals, env.coin = [env.coin], coin
    if depth > 100:
        with pytest.raises(NotSavable):
            env_state(env)
        return
    bundle.save(tmp_path / "state.pt", {"version": bundle.VERSION, "env": env_state(env)})
    load_env_state(other, bundle.load(tmp_path / "state.pt")["env"])
    assert other.coin is not None
    assert other.coin.rivals[0].rivals[0].value == 1.0
