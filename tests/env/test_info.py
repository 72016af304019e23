"""Tests of Episode.info: entries of the env's info."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from slm_lab.env import Env, make_env
from slm_lab.env.envpool_suites import InfoTracker
from slm_lab.env.outcome import row_info, select_numbers
from slm_lab.lib.records import Episode
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import SpecError
from tests.env.toys import Toy

NAMES = ("won", "score", "part.depth", "part.none", "word", "absent")


class Informed(Toy):
    """Reports its step in `info`, which is the same object in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        obs, _ = super().reset(seed=seed)
        self.info.update(score=-1, won=False)
        return obs, self.info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        self.info.update(score=np.int64(self._t), won=self._t % 2 == 0, part={"depth": self._t / 2, "none": None}, word="a")
        return obs, reward, terminated, truncated, self.info


gym.register("Informed-v0", entry_point=f"{__name__}:Informed", max_episode_steps=9)


def episodes(env: Env, steps: int = 40) -> list[Episode]:
    env.reset()
    found = [episode for _ in range(steps) for episode in env.step(env.sample()).episodes]
    env.close()
    assert found
    return found


def built(name: str, backend: str, names: tuple[str, ...] = NAMES, num_envs: int = 2, **keys: Any) -> Env:
    return make_env(EnvSpec(name=name, max_frame=1, num_envs=num_envs, backend=backend, **keys), 1, track_info=names)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_numbers_of_the_last_step(backend: str) -> None:
    found = episodes(built(f"{__name__}:Informed-v0", backend))
    for episode in found:
        assert episode.info == {"won": 1 - episode.length % 2, "score": episode.length, "part.depth": episode.length / 2}
    assert {episode.info["won"] for episode in found} == {0, 1}


def test_none_unless_asked_for() -> None:
    assert {len(episode.info) for episode in episodes(built(f"{__name__}:Informed-v0", "sync", ()))} == {0}


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_native(mode: str) -> None:
    """Toy's info is {"final_obs": step}."""
    found = episodes(built(f"tests.env.toys:Toy{mode}-v0", "native", ("final_obs",)))
    assert all(episode.info == {"final_obs": episode.length} for episode in found)


def test_ale() -> None:
    pytest.importorskip("ale_py")
    names = ("episode_frame_number", "lives")
    with pytest.raises(SpecError) as error:  # ALE returns only the reset's info at the end of an episode
        built("ALE/Pong-v5", "ale", names, max_t=20)
    assert [problem.path for problem in error.value.problems] == ["meta.track_info"]
    for episode in episodes(built("ALE/Pong-v5", "sync", names, num_envs=1, max_t=20)):
        assert episode.info["episode_frame_number"] >= 80


def test_envpool() -> None:
    pytest.importorskip("envpool")
    pytest.importorskip("mujoco")
    found = episodes(built("HalfCheetah-v5", "envpool", ("x_position", "x_velocity"), max_t=20))
    assert all(episode.info.keys() == {"x_position", "x_velocity"} for episode in found)


def test_over_the_steps_of_an_episode() -> None:
    pytest.importorskip("envpool")
    names = ("reward_run", "reward_run:sum", "reward_run:mean", "reward_run:max", "reward_run:min")
    env = built("HalfCheetah-v5", "envpool", names, max_t=5)
    env.reset()
    seen: list[list[float]] = [[], []]
    for _ in range(12):
        step = env.step(env.sample())
        for row in range(2):
            seen[row].append(float(env._backend.episode_info(row)["reward_run"]))
        for episode in step.episodes:
            values = seen[episode.env][-5:]
            expected = (values[-1], sum(values), sum(values) / 5, max(values), min(values))
            assert [episode.info[name] for name in names] == pytest.approx(expected)
    env.close()
    with pytest.raises(SpecError) as error:
        built("HalfCheetah-v5", "sync", ("reward_run:sum",))
    assert [problem.path for problem in error.value.problems] == ["meta.track_info"]


def test_success_counts_in_any_step() -> None:
    tracker = InfoTracker(["success:max", "success", "absent:max"], ["reward", "info:success"])
    found = []
    for elapsed, success in ((1, 0.0), (2, 1.0), (3, 0.0), (0, 1.0), (1, 0.0)):
        tracker.add([np.zeros(1), np.array([success])], np.array([elapsed]))
        found.append(tracker.combined_entries(0)["success:max"])
    assert found == [0, 1, 1, 1, 0]


def test_a_backend_without_infos() -> None:
    assert {len(e.info) for e in episodes(built("Counting-v0", "tests.env.own_backend:Counting"))} == {0}


def test_what_counts_as_a_number() -> None:
    info = {"a.b": 1, "a": {"b": 2, "c": np.True_}, "array": np.array([3.5]), "two": np.zeros(2), "nan": np.nan, "text": "1"}
    assert select_numbers(info, ["a.b", "a.c", "a", "array", "two", "nan", "text", "a.b.c"]) == {"a.b": 1.0, "a.c": 1.0, "array": 3.5}


def test_row_of_a_vector_envs_infos() -> None:
    infos = {"x": np.array([1.0, 2.0]), "_x": np.array([True, False]), "part": {"y": np.array([3, 4])}, "z": [5, 6]}
    assert row_info(infos, 0) == {"x": 1.0, "part": {"y": 3}, "z": 5}
    assert row_info(infos, 1) == {"part": {"y": 4}, "z": 6}
