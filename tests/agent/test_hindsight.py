"""Tests of hindsight experience replay: the goals, rewards and terminations of replayed transitions."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

import slm_lab
from slm_lab.agent.replay.hindsight import HindsightReplay
from slm_lab.env.bit_flip import BitFlip
from slm_lab.env.goals import GoalReward, _compute_terminations
from slm_lab.env.make import make_env
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActionSpace, ActOut, EnvInfo, ObservationSpace, VecStep
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.memory import HindsightReplaySpec
from slm_lab.spec.report import SpecError
from slm_lab.testing.spec_contract import SpecContract
from tests.env.toys import PREFIX, Goal

BITS = "slm_lab.env.bit_flip:BitFlip-v0"


def memory(num_envs: int = 1, capacity: int = 100, **keys: Any) -> HindsightReplay:
    """Return a memory for observations [position, achieved, desired] of one number each; goals are reached at a distance of 0.5."""
    space = ObservationSpace((3,), goals=((1, 2), (2, 3)))
    info = EnvInfo(num_envs, space, ActionSpace("discrete", (2,)), max_frame=10_000)
    spec = HindsightReplaySpec(name="HindsightReplay", max_size=capacity, **{"batch_size": 64, **keys})
    found = HindsightReplay(spec, info, Clock(), np.random.default_rng(0))
    found.goal_reward = GoalReward(EnvSpec(name="any", max_frame=1), 0.5)
    return found


def walk(found: HindsightReplay, length: int, *, terminated: bool = False, goal: float = -9.0, start: float = 0.0, n: int = 0) -> None:
    """Add an episode of one env with positions start, start + 1, …. Every step has the reward −7, which no replayed reward has."""
    num_envs = len(found._open)
    for t in range(length):
        now, after = (np.full((num_envs, 3), [start + k, start + k, goal], np.float32) for k in (t, t + 1))
        only, last = np.arange(num_envs) == n, t == length - 1
        flags = only & last & terminated, only & last & (not terminated)
        reward = np.full(num_envs, -7.0, np.float32)
        step = VecStep(reward, *flags, after, after, only & last, only, [])
        found.add(now, np.full(num_envs, t == 0), None, ActOut(np.full(num_envs, t % 2), reward), step)


def goals(found: HindsightReplay) -> list[tuple[float, float, float, float]]:
    """Return position, goal, reward and termination of each transition of a batch whose goal was replaced."""
    batch = found.sample()
    columns = zip(batch.obs_B.numpy(), batch.next_obs_B.numpy(), batch.reward_B.tolist(), batch.terminated_B.tolist(), strict=True)
    rows = []
    for obs, after, reward, terminated in columns:
        assert obs[2] == after[2]
        assert after[0] == obs[0] + 1.0 == after[1]  # only the goal is replaced
        if obs[2] < 0.0:
            assert (reward, obs[2]) == (-1.0, -9.0)
        else:
            rows.append((float(obs[0]), float(obs[2]), reward, terminated))
    return rows


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [("future", lambda at: range(at + 1, 6)), ("final", lambda at: [5]), ("episode", lambda at: range(1, 6))],
)
def test_each_strategy_draws_its_goals(strategy: str, wanted: Any) -> None:
    """Each strategy draws its goals from the episode of the transition.

    An episode of 5 steps from 0 achieves 1, 2, 3, 4, 5. The episodes before and after it are at distant positions.
    """
    found = memory(batch_size=20_000, goal_strategy=strategy)
    walk(found, 4, start=50.0)
    walk(found, 5)
    walk(found, 4, start=70.0)
    seen: dict[int, list[int]] = {}
    for at, goal, reward, _ in goals(found):
        assert reward == (0.0 if at + 1 == goal else -1.0)
        if at < 6:
            seen.setdefault(int(at), []).append(int(goal))
        else:
            assert int(at) // 10 == int(goal) // 10
    for at in range(5):
        assert set(seen[at]) == set(wanted(at))
    counts = np.bincount(seen[0], minlength=6)[list(wanted(0))]
    assert counts.min() > 0.6 * counts.max()  # each with the same probability


def test_k_goals_for_each_real_one() -> None:
    found = memory(batch_size=5000, goals=3)
    walk(found, 5)
    assert 0.72 < len(goals(found)) / 5000 < 0.78


def test_a_recorded_termination_stays_if_the_env_does_not_say_otherwise() -> None:
    found = memory(batch_size=500)
    walk(found, 3, terminated=True)
    rows = goals(found)
    assert {terminated for at, _, _, terminated in rows if at == 2.0} == {1.0}
    assert {terminated for at, _, _, terminated in rows if at < 2.0} == {0.0}


def test_a_termination_of_the_env_replaces_the_recorded_one() -> None:
    """The last step was terminated for the real goal. With another goal, the steps that reach that goal are terminated instead."""
    found = memory(batch_size=500, goal_strategy="episode")
    found.goal_reward = lambda achieved, desired: ((achieved == desired)[:, 0] - 1.0, (achieved == desired)[:, 0])
    walk(found, 3, terminated=True)
    rows = goals(found)
    assert {(reward, terminated) for at, goal, reward, terminated in rows if at + 1 == goal} == {(0.0, 1.0)}
    assert {(reward, terminated) for at, goal, reward, terminated in rows if at + 1 != goal} == {(-1.0, 0.0)}


def test_reward_and_termination_of_the_env_itself() -> None:
    """Example with two bits: one transition reaches the goal 01, none reaches the goal 11."""
    reward = GoalReward(EnvSpec(name=BITS, max_frame=1, n=2, reward_scale=2.0), None)
    outcome = reward(np.array([[0.0, 1.0], [0.0, 1.0]], np.float32), np.array([[0.0, 1.0], [1.0, 1.0]], np.float32))
    assert outcome.reward_K.tolist() == [0.0, -2.0]
    assert outcome.terminated_K is not None
    assert outcome.terminated_K.tolist() == [True, False]


def test_only_complete_episodes_are_replayed_and_old_ones_go() -> None:
    found = memory(2, 8, batch_size=400)
    walk(found, 3, n=0)
    assert (found.seen, found.size, found.ready) == (3, 3, True)
    now = np.full((2, 3), [40.0, 40.0, -9.0], np.float32)
    only = np.array([False, True])
    none = np.zeros(2, np.bool_)
    found.add(now, only, None, ActOut(np.zeros(2, int), np.zeros(2)), VecStep(np.zeros(2), none, none, now, now, none, only, []))
    assert (found.seen, found.observed) == (3, 4)
    walk(found, 5, start=10.0, n=0)
    walk(found, 4, start=20.0, n=0)  # rows of the first episode and one of the second are overwritten
    rows = goals(found)
    assert {int(at) for at, *_ in rows} == {11, 12, 13, 14, 20, 21, 22, 23}
    assert all(int(at) // 10 == (int(goal) - 1) // 10 and goal > at for at, goal, *_ in rows)
    found.strategy = "episode"
    assert {int(goal) for at, goal, *_ in goals(found) if at < 20} == {12, 13, 14, 15}  # 11 is overwritten


def test_a_saved_memory_goes_on_with_its_open_episodes() -> None:
    found, file = memory(2), io.BytesIO()
    walk(found, 3, n=1)
    now = np.full((2, 3), [0.0, 0.0, -9.0], np.float32)
    valid, none = np.ones(2, np.bool_), np.zeros(2, np.bool_)
    after = now + np.array([1, 1, 0], np.float32)
    found.add(now, valid, None, ActOut(np.array([0, 1]), np.zeros(2)), VecStep(np.zeros(2), none, none, after, after, none, valid, []))
    torch.save((found.contents(), found.state_dict()), file)
    file.seek(0)
    contents, state = torch.load(file, weights_only=True)
    twin = memory(2)
    twin.load_contents(contents)
    twin.load_state_dict(state)
    batches = []
    for one in (found, twin):
        walk(one, 2, start=1.0, n=0)
        batches.append(one.sample())
    for name in ("obs_B", "next_obs_B", "reward_B", "action_B", "terminated_B"):
        assert torch.equal(getattr(batches[0], name), getattr(batches[1], name)), name
    assert twin.observed == found.observed == 7


# ---- in specs


def spec(env: dict[str, Any] | None = None, name: str = "HindsightReplay", *, eval_episodes: int = 0, **keys: Any) -> slm_lab.Spec:
    net = {"name": "MLPNet", "hid_layers": [64], "hid_layers_activation": "tanh", "optim_spec": {"name": "Adam", "lr": 0.003}}
    agent = {
        "algorithm": {"name": "DQN", "gamma": 0.95, "training_frequency": 4, "training_start_step": 100},
        "memory": {"name": name, "batch_size": 32, "max_size": 5000, **keys},
        "net": net | {"update_type": "polyak", "polyak_coef": 0.02},
    }
    raw = {"agent": agent, "env": {"name": BITS, "n": 4, "num_envs": 2, "max_frame": 600, **(env or {})}}
    meta = {"random_seed": 5, "log_frequency": 100, "save_replay": True, "eval_episodes": eval_episodes}
    return slm_lab.load_spec({"her": raw | {"meta": meta}}, "her")


class TestContract(SpecContract):
    """Runs with hindsight replay repeat and resume exactly (with open episodes), and their agents act alone."""

    def spec(self) -> slm_lab.Spec:
        return spec()


def problems(changed: slm_lab.Spec) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        slm_lab.Session(changed).build()
    return [(one.path, one.message) for one in caught.value.problems]


def test_envs_without_goals_or_rewards_of_goals_are_refused_by_path() -> None:
    ((path, message),) = problems(_cartpole())
    assert path == "agent.memory.name"
    assert "needs a Dict observation with achieved_goal and desired_goal" in message


def _cartpole() -> slm_lab.Spec:
    raw = {"agent": {"algorithm": {"name": "DQN"}, "memory": {"name": "HindsightReplay"}}, "env": {"name": "CartPole-v1", "max_frame": 500}}
    return slm_lab.load_spec({"her": raw}, "her")


@pytest.mark.parametrize(("key", "value"), [("clip_obs", 5.0), ("normalize_reward", True)])
def test_what_changes_stored_goals_or_rewards_is_refused(key: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"env\.{key}: cannot be combined with HindsightReplay"):
        spec({key: value})


def test_goals_are_replaced_before_observations_are_normalised() -> None:
    """Rewards and goals equal those of a memory without normalisation."""
    plain, normalising = memory(), memory()
    for found in (plain, normalising):
        walk(found, 9)
    normalising.set_normalizers(lambda obs: obs * np.float32(2.0) + np.float32(1.0), None)
    expected, batch = plain.sample(), normalising.sample()
    assert torch.equal(batch.obs_B, expected.obs_B * 2.0 + 1.0)
    assert torch.equal(batch.next_obs_B, expected.next_obs_B * 2.0 + 1.0)
    assert torch.equal(batch.reward_B, expected.reward_B)
    assert set(batch.reward_B.tolist()) == {0.0, -1.0}


@pytest.mark.parametrize("keys", [{}, {"clip_obs": 2.0}])
def test_a_session_normalises_goals(keys: dict[str, Any]) -> None:
    session = slm_lab.Session(spec({"normalize_obs": True, "max_frame": 300, **keys})).build()
    session.run()
    found, normalizer = session.agent.replay, session.learners[0].normalizers.obs
    assert isinstance(found, HindsightReplay)
    assert normalizer is not None
    stored = found.store.observations(np.arange(found.size))
    assert set(np.unique(stored)) == {0.0, 1.0}, "bits"
    assert found.obs_normalizer is normalizer
    assert set(np.unique(found.sample().obs_B.numpy())) != {0.0, 1.0}


def test_fetch_needs_the_distance_at_which_a_goal_is_reached() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(SpecError, match=r"agent\.memory\.goal_threshold: missing; FetchReach-v4 has no compute_reward"):
        GoalReward(EnvSpec(name="FetchReach-v4", max_frame=1), None)
    env = make_env(EnvSpec(name="FetchReach-v4", max_frame=1), 0, num_envs=4)
    assert env.info.observation.goals is not None
    (begin, end), (other, last) = env.info.observation.goals
    reward = GoalReward(EnvSpec(name="FetchReach-v4", max_frame=1), 0.05)
    env.reset()
    for _ in range(60):  # for the env's own goals, the function returns the env's own rewards
        step = env.step(env.sample())
        outcome = reward(step.last_obs_N[:, begin:end], step.last_obs_N[:, other:last])
        assert outcome.reward_K.tolist() == step.reward_N.tolist()
    env.close()


GOAL = {"name": PREFIX + "Goal-v0", "n": None, "max_frame": 600}


def replayed(threshold: float | None, **env: Any) -> tuple[set[float], set[float]]:
    """Train on the toy env; return the rewards of a large batch for real goals, and those for replaced goals."""
    session = slm_lab.Session(spec({**GOAL, **env}, goal_threshold=threshold))
    session.run()
    found: Any = session.learners[0].agent.replay
    found.batch_size = 2000
    batch = found.sample()
    real_B = batch.obs_B.numpy()[:, found._desired][:, 0] == 9.0
    assert 0 < real_B.sum() < 2000
    reward_B = batch.reward_B.numpy()
    return set(reward_B[real_B].tolist()), set(reward_B[~real_B].tolist())


def test_all_rewards_of_a_batch_have_one_scale(caplog: pytest.LogCaptureFixture) -> None:
    """The env returns −10 where no goal is reached. With a threshold the agent learns from −1 instead, also for real goals."""
    assert replayed(0.5, unit=10.0) == ({-1.0}, {-1.0, 0.0})
    start = "agent.memory.goal_threshold: the agent learns from rewards for this threshold (-1 in the first step), not from those of "
    assert [text for text in caplog.messages if "goal" in text] == [start + "tests.env.toys:Goal-v0 (-10)"]
    caplog.clear()
    assert replayed(0.5, reward_scale=0.25) == replayed(None, reward_scale=0.25) == ({-0.25}, {-0.25, 0.0})
    assert not [text for text in caplog.messages if "goal" in text]


@pytest.mark.parametrize("episodes", [0, 2])
def test_every_env_is_closed(episodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every env is closed, including those for compute_reward, for the trial step and for evaluation."""
    made, closed = list[Goal](), list[Goal]()
    new = Goal.__init__

    def counted(env: Goal, *arguments: Any, **keywords: Any) -> None:
        new(env, *arguments, **keywords)
        made.append(env)

    monkeypatch.setattr(Goal, "__init__", counted)
    monkeypatch.setattr(Goal, "close", lambda env: closed.append(env))
    session = slm_lab.Session(spec({**GOAL, "max_frame": 200}, eval_episodes=episodes))
    session.build()
    goals = session.learners[0].agent.replay.goal_reward  # type: ignore[attr-defined]
    assert goals._env in made
    assert goals._env not in closed
    session.run()
    assert sorted(map(id, closed)) == sorted(map(id, made))  # each is closed once


def test_rewards_that_compute_reward_does_not_return_are_refused_by_path() -> None:
    ((path, message),) = problems(spec({**GOAL, "unit": 10.0}))
    assert path == "agent.memory.goal_threshold"
    assert "tests.env.toys:Goal-v0 returned the reward -10 where its compute_reward returns -1" in message
    ((path, message),) = problems(spec({**GOAL, "wrappers": [PREFIX + "HalfInStep"]}))
    assert path == "agent.memory.goal_threshold"
    assert "its compute_reward without env.wrappers (tests.env.toys:HalfInStep) returns -1" in message


def test_an_error_of_compute_reward_is_a_problem_of_the_spec() -> None:
    ((path, message),) = problems(spec({**GOAL, "reads_info": True}))
    assert path == "agent.memory.goal_threshold"
    assert "raised KeyError: 'known'" in message


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_wrappers_for_rewards_are_refused_by_path(threshold: float | None) -> None:
    wrappers = ["RecordEpisodeStatistics", PREFIX + "HalfReward"]
    ((path, message),) = problems(spec({**GOAL, "wrappers": wrappers}, goal_threshold=threshold))
    assert path == "env.wrappers[1]"
    assert (
        message == "'HalfReward' changes rewards, which HindsightReplay computes without wrappers; use env.reward_scale or env.clip_reward"
    )


def test_the_bits_that_an_action_flips() -> None:
    env = BitFlip(3)
    first, _ = env.reset(seed=0)
    env.goal = first["achieved_goal"] ^ np.array([1, 0, 1], np.int8)
    obs, reward, terminated, truncated, info = env.step(0)
    assert (obs["observation"] ^ first["observation"]).tolist() == [1, 0, 0]
    assert (reward, terminated, truncated, info["is_success"]) == (-1.0, False, False, False)
    _, reward, terminated, truncated, info = env.step(2)
    assert (reward, terminated, truncated, info["is_success"]) == (0.0, True, False, True)
    env.reset(seed=1)
    env.goal = env.state ^ 1
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


@pytest.mark.slow
def test_dqn_reaches_goals_of_12_bits_with_hindsight_and_none_without() -> None:
    scores = {}
    for name in ("HindsightReplay", "Replay"):
        raw = spec({"n": 12, "max_frame": 30_000, "num_envs": 4}, name)
        rows = slm_lab.Session(raw).run().rows
        scores[name] = rows[-1]["total_reward"]
    assert scores["HindsightReplay"] > -8.0
    assert scores["Replay"] < -11.5


def test_terminations_of_an_env_that_takes_a_single_goal() -> None:
    """The mazes of Gymnasium-Robotics return one bool even for a batch of goals, so terminations are computed for each goal."""

    def ends(achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> bool:
        return bool(np.linalg.norm(achieved - desired) <= 0.5)

    achieved = np.array([[0.0, 0.0], [3.0, 0.0], [1.0, 0.4]])
    np.testing.assert_array_equal(
        _compute_terminations(ends, achieved, np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])), [True, False, True]
    )
