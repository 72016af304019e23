"""Tests of env.schedule: arguments and attributes of envs that change when an episode ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slm_lab.env.make import make_env
from slm_lab.env.vec import Env
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.env_schedule import Rule, parse_rule
from slm_lab.spec.report import SpecError
from tests.env.toys import PREFIX

STEPS = [[0, 3], [10, 5], [20, 2]]


def course(schedule: dict[str, Any], num_envs: int = 1, training: bool = True, **keys: Any) -> Env:
    spec = EnvSpec.model_validate({"name": PREFIX + "Course-v0", "max_frame": 100, "schedule": schedule, **keys})
    return make_env(spec, 0, num_envs=num_envs, training=training)


def episodes(env: Env, steps: int, frame: int = 0) -> list[tuple[int, int, float, dict[str, float]]]:
    """Step an env; return the end (frame), length, return and info of each episode."""
    found, count = [], env.info.num_envs
    for _ in range(steps):
        frame += count
        env.set_frame(frame)
        found += [(frame, one.length, one.total_reward, one.info) for one in env.step(env.sample()).episodes]
    return found


@pytest.mark.parametrize(("num_envs", "backend"), [(1, "sync"), (2, "sync"), pytest.param(2, "async", marks=pytest.mark.slow)])
def test_an_argument_changes_when_an_episode_ends(num_envs: int, backend: str) -> None:
    """An episode has the value for the frame at which the previous episode ended; with n envs, a vector step is n frames."""
    env = course({"length": [[n * num_envs, value] for n, value in STEPS]}, num_envs, backend=backend)
    env.reset()
    found = episodes(env, 30)
    ends = [3, 6, 9, 12, 17, 22, 24, 26, 28, 30]  # in vector steps; the episode from step 12 on is the first of length 5
    lengths = [3, 3, 3, 3, 5, 5, 2, 2, 2, 2]
    assert [end for end, *_ in found] == [num_envs * end for end in ends for _ in range(num_envs)]
    assert [length for _, length, *_ in found] == [length for length in lengths for _ in range(num_envs)]
    assert all(info == {"env.length": length} for _, length, _, info in found)
    env.close()


def test_attributes_are_set_also_to_texts() -> None:
    linear = {"name": "linear_decay", "start_val": 0.0, "end_val": 1.0, "start_step": 0, "end_step": 12}
    env = course({"bonus": linear, "label": [[0, "easy"], [6, "hard"]]})
    env.reset()
    found = episodes(env, 15)
    np.testing.assert_allclose([total for _, _, total, _ in found], [3 * (1 + bonus) for bonus in (0.0, 0.25, 0.5, 0.75, 1.0)])
    assert [info["env.label"] for *_, info in found] == [0.0, 0.0, 1.0, 1.0, 1.0]  # positions of the labels in the schedule
    assert env._backend.env.unwrapped.label == "hard"  # type: ignore[attr-defined]
    env.close()


def test_a_rule_by_return_goes_on_after_episodes_with_the_present_value() -> None:
    """The value changes after two episodes with a mean return of at least 3, then of at least 6; the returns are 3 · (1 + bonus)."""
    env = course({"bonus": {"by": "return", "start": 0.0, "steps": [[3, 1.0], [6, 0.5], [100, 9.0]], "episodes": 2}})
    env.reset()
    totals = [total for *_, total, _ in episodes(env, 36)]
    # the episode after the second one had already begun with the same value when the second one was counted
    assert totals == [3.0, 3.0, 3.0, 6.0, 6.0, 6.0, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5]
    env.close()


def test_evaluation_has_the_last_values() -> None:
    env = course({"length": STEPS, "bonus": {"by": "return", "start": 0.0, "steps": [[3, 2.0]]}}, training=False)
    env.reset()
    assert {(length, total) for _, length, total, _ in episodes(env, 10)} == {(2, 6.0)}
    env.close()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_continued_env_equals_one_without_a_break(num_envs: int) -> None:
    """This includes an env that still has an older value than a new episode would have, and the seeds of rebuilt envs."""
    schedule = {"length": [[0, 9], [4, 5], [30, 7], [60, 3]], "bonus": {"by": "return", "start": 0.0, "steps": [[8, 0.5]], "episodes": 3}}
    one, other = course(schedule, num_envs), course(schedule, num_envs)
    one.reset()
    other.reset()
    frame = 7 * num_envs
    episodes(one, 7)
    other.load_state_dict(one.state_dict())
    assert other.resume()
    assert other._backend._envs[0].unwrapped.length == 9  # type: ignore[attr-defined]
    for _ in range(50):
        frame += num_envs
        one.set_frame(frame)
        other.set_frame(frame)
        action_N = one.sample()
        a, b = one.step(action_N), other.step(action_N)
        np.testing.assert_array_equal(a.obs_N, b.obs_N)
        np.testing.assert_array_equal(a.reward_N, b.reward_N)
        assert a.episodes == b.episodes
    assert one.state_dict()["curriculum"] == other.state_dict()["curriculum"]
    one.close()
    other.close()


def test_rebuilt_envs_have_streams_of_their_own_that_repeat() -> None:
    def observations(seed: int) -> np.ndarray:
        spec = EnvSpec.model_validate({"name": PREFIX + "Course-v0", "max_frame": 9, "schedule": {"length": STEPS}})
        env = make_env(spec, seed, num_envs=2)
        seen = [env.reset()]
        for step in range(30):
            env.set_frame(2 * step)
            seen.append(env.step(env.sample()).obs_N)
        env.close()
        return np.stack(seen)

    one = observations(0)
    np.testing.assert_array_equal(one, observations(0))
    assert len(np.unique(one)) == one.size
    assert (one[20:] != observations(1)[20:]).all()


def test_rules() -> None:
    def values(rule: Rule, frames: list[int]) -> list[Any]:
        return [rule.at(frame) for frame in frames]

    assert values(parse_rule([[0, "a"], [10, "b"]]), [0, 9, 10, 99]) == ["a", "a", "b", "b"]
    assert values(parse_rule({"name": "linear_decay", "start_val": 0, "end_val": 1, "end_step": 10}), [0, 5, 99]) == [0, 0.5, 1]
    by_return = parse_rule({"by": "return", "start": 1, "steps": [[5, 2]]})
    assert (by_return.values, by_return.episodes) == ((1, 2), 20)
    assert parse_rule([[0, True]]).to_number(True) == 1.0
    assert values(parse_rule([[0, (1, 2)], [10, None], [20, (3, 4)]]), [0, 10, 20]) == [(1, 2), None, (3, 4)]  # from Python


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "must be a list of one or more pairs [frame, value], not []"),
        ([[0, 1], [5]], "must be a list of pairs [frame, value] with numbers as frames; item 1 is [5]"),
        ([[5, 1]], "the first frame must be 0, not 5"),
        ([[0, 1], [5, 2], [5, 3]], "the frames must increase"),
        (
            {"name": "linear_decay", "start_val": 1, "end_val": 2, "start_step": 9, "end_step": 5},
            "end_step must be at least start_step (9), not 5",
        ),
        ([[0, 1], [5, "x"], [6, 3.0]], "the values must be of one kind"),
        ({"by": "return", "start": "easy", "steps": [[5, 1]]}, "the values must be of one kind"),
        ({"by": "reward", "start": 0}, '"by" must be "return"'),
        ({"by": "return", "steps": [[1, 2]]}, '"start" is missing; keys: by, start, steps, episodes'),
        ({"by": "return", "start": 1, "steps": []}, '"steps" must be a list of one or more pairs [return, value], not []'),
        (
            {"by": "return", "start": 1, "steps": [[1, 2], [True, 3]]},
            '"steps" must be a list of pairs [return, value] with numbers as returns; ',
        ),
        ({"by": "return", "start": 1, "steps": [[1, 2]], "window": 3}, 'unknown key "window"'),
        ({"by": "return", "start": 1, "steps": [[1, 2]], "episodes": 0}, '"episodes" must be a whole number'),
        ({"name": "linear", "start_val": 1}, "must be [[frame, value], …], a schedule such as"),
        ({"name": "linear_decay", "start_val": 1, "end_val": 2}, "end_step: field required; must be"),
        (3, "must be [[frame, value], …]"),
    ],
    ids=str,
)
def test_other_rules_are_refused_by_path(value: Any, message: str) -> None:
    body = {"agent": {"algorithm": {"name": "PPO"}}, "env": {"name": "CartPole-v1", "max_frame": 1000, "schedule": {"gravity": value}}}
    with pytest.raises(SpecError) as error:
        load_spec({"s": body}, "s")
    (problem,) = error.value.problems
    assert problem.path == "env.schedule.gravity"
    assert message in problem.message


def test_an_empty_schedule_is_refused() -> None:
    body = {"agent": {"algorithm": {"name": "PPO"}}, "env": {"name": "CartPole-v1", "max_frame": 1000, "schedule": {}}}
    with pytest.raises(SpecError, match=r"env\.schedule: must be an object \(not empty\), not \{\}"):
        load_spec({"s": body}, "s")


def refused(name: str, schedule: dict[str, Any], minimal: bool = False, **keys: Any) -> tuple[str, str]:
    spec = EnvSpec.model_validate({"name": name, "max_frame": 100, "schedule": schedule, **keys})
    with pytest.raises(SpecError) as error:
        make_env(spec, 0, training=False, minimal_num_envs=minimal).close()
    (problem,) = error.value.problems
    return problem.path, problem.message


@pytest.mark.parametrize("backend", ["auto", pytest.param("async", marks=pytest.mark.slow)])
def test_a_key_that_the_env_does_not_take_names_the_nearest(backend: str) -> None:
    path, message = refused(PREFIX + "Course-v0", {"lenght": STEPS}, backend=backend)
    assert path == "env.schedule.lenght"
    assert "no argument and no attribute 'lenght'; did you mean 'length'" in message
    assert "bonus" in message


def test_other_misuse_is_refused_by_path() -> None:
    assert refused(PREFIX + "Course-v0", {"length": STEPS}, length=4) == (
        "env.schedule.length",
        "is also given as env.length; remove one of them",
    )
    assert refused("CartPole-v1", {"num_envs": STEPS})[0] == "env.schedule.num_envs"
    path, message = refused("CartPole-v1", {"gravity": [[0, 9.8], [10, 5.0]]}, backend="native")
    assert path == "env.backend"
    assert "its envs cannot change (env.schedule); sync and async can" in message
    path, message = refused("envpool:Pong-v5", {"noop_max": STEPS})
    assert (path, message.partition(",")[0]) == ("env.schedule", "has no effect on envpool:Pong-v5: it runs in EnvPool")
    path, message = refused(PREFIX + "Growing-v0", {"size": [[0, 2], [10, 3]]}, minimal=True)
    assert path == "env.schedule.size"
    assert "with size = 2 the observation space is" in message
    path, message = refused(PREFIX + "Course-v0", {"sutton_barto_reward": [[0, 1]]})
    assert path == "env.schedule.sutton_barto_reward"
    path, message = refused("CartPole-v1", {"np_random_seed": [[0, 1]]})  # a property without a setter
    assert path == "env.schedule.np_random_seed"
    assert message.startswith("the env's attribute 'np_random_seed' cannot be set to 1: AttributeError: property")
    path, message = refused("CartPole-v1", {"sutton_barto_reward": [[0, 1], [5, False]], "max_steps": [[0, 4]]})
    assert path == "env.schedule.max_steps"


def test_gymnasiums_own_envs() -> None:
    """Without a schedule, auto would choose CartPole's own vector env for 4 envs; with a schedule, it chooses sync."""
    spec = EnvSpec.model_validate({"name": "CartPole-v1", "max_frame": 100, "schedule": {"gravity": [[0, 9.8], [20, 1.0]]}})
    env = make_env(spec, 0, num_envs=4)
    assert env.backend == "sync"
    env.reset()
    episodes(env, 120)
    assert [one.unwrapped.gravity for one in env._backend._envs] == [1.0] * 4  # type: ignore[attr-defined]
    env.close()


def test_envs_in_processes_are_rebuilt_with_the_seeds_of_those_in_this_process() -> None:
    def observations(backend: str) -> np.ndarray:
        keys = {"backend": backend, "max_t": 3, "schedule": {"sutton_barto_reward": [[0, False], [4, True]]}}
        env = make_env(EnvSpec.model_validate({"name": "CartPole-v1", "max_frame": 100, **keys}), 7, num_envs=2)
        found = [env.reset()]
        for step in range(8):
            env.set_frame(2 * step)
            found.append(env.step(np.zeros(2, np.int64)).obs_N.copy())
        env.close()
        return np.array(found)

    parallel = observations("async")
    np.testing.assert_array_equal(parallel, observations("sync"))
    assert not np.array_equal(parallel[-1][0], parallel[-1][1])
