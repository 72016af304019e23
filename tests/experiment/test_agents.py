"""Tests of training with several agents: transitions in turn-based envs, equality with single-agent training, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab import Session, load_spec
from slm_lab.experiment.collect.turns import TurnTransitionBuilder
from slm_lab.experiment.training.self_play import Rating, Snapshot, estimate_elo, game_score
from slm_lab.lib.log import PlainError
from slm_lab.lib.records import ActionSpace, ActOut, EnvInfo, ObservationSpace, VecStep
from slm_lab.spec.report import SpecError
from tests.experiment.small_runs import CARTPOLE, MLP, RECURRENT, REPLAYING, ROLLOUT, run
from tests.resume.runs import bundle, differing, train
from tests.resume.runs import rows as table

DUEL = {"backend": "tests.env.turn_games:Duel"}
TIMES = ("wall_t", "fps")


def vec_step(
    reward: list[float], acts: list[bool], ended: list[bool] | None = None, valid: list[bool] | None = None, obs: float = 0.0
) -> VecStep:
    """Return a step of two rows that terminates some of them; `obs` is the value of their observations."""
    over_N = np.array(ended or [False, False])
    obs_N = np.full((2, 1), obs, np.float32)
    valid_N = np.array(valid or [True, True])
    return VecStep(np.array(reward, np.float32), over_N, over_N & False, obs_N, obs_N, over_N, valid_N, [], np.array(acts))


def acted(*, rows: list[bool]) -> np.ndarray:
    return np.array(rows)


def out_of(left: int, right: int) -> ActOut:
    return ActOut(np.array([left, right]), np.array([-0.1, -0.2], np.float32), None, 7)


def test_a_reward_belongs_to_the_last_move_before_it() -> None:
    """Moves: left; right (left receives 0.5); left, which wins. The only transition of right must end with reward −1."""
    turns, first_N = TurnTransitionBuilder(2, 0), np.array([True, True])
    obs = [np.full((2, 1), float(t), np.float32) for t in range(3)]

    *_, none = turns.finish_transitions(
        obs[0], first_N, None, out_of(1, 0), vec_step([0.0, 0.0], [False, True], obs=1.0), acted(rows=[True, False])
    )
    assert not none.valid_N.any()

    seen, first, _, out, step = turns.finish_transitions(
        obs[1], ~first_N, None, out_of(0, 2), vec_step([0.5, 0.0], [True, False], obs=2.0), acted(rows=[False, True])
    )
    assert step.valid_N.tolist() == [True, False]
    assert (seen[0, 0], bool(first[0]), out.action_N[0], step.reward_N[0], step.last_obs_N[0, 0]) == (0.0, True, 1, 0.5, 2.0)
    assert not step.terminated_N.any()

    last = vec_step([1.0, -1.0], [False, True], ended=[True, True], obs=3.0)
    seen, _, _, out, step = turns.finish_transitions(obs[2], ~first_N, None, out_of(1, 0), last, acted(rows=[True, False]))
    assert step.valid_N.tolist() == step.terminated_N.tolist() == [True, True]
    assert step.reward_N.tolist() == [1.0, -1.0]
    assert seen[:, 0].tolist() == [2.0, 1.0]
    assert out.action_N.tolist() == [1, 2]
    assert not turns.open_N.any()


def test_an_episode_begins_with_the_first_move_of_an_agent() -> None:
    """right waits one step before its first move, and two steps in the next episode; its second move must not begin an episode."""
    turns, obs_N = TurnTransitionBuilder(2, 0), np.zeros((2, 1), np.float32)
    firsts = []
    moves = [
        (True, [True, False], [False, True], False),
        (False, [False, True], [False, True], False),
        (False, [False, True], [True, False], True),
        (True, [True, False], [True, False], False),
        (False, [True, False], [False, True], False),
        (False, [False, True], [True, False], True),
    ]
    for begins, acting, next_acting, over in moves:
        step = vec_step([0.0, 0.0], next_acting, ended=[over, over])
        _, first_N, *_, ended = turns.finish_transitions(obs_N, np.full(2, begins), None, out_of(0, 0), step, acted(rows=acting))
        firsts += [bool(first_N[1])] if ended.valid_N[1] else []
    assert firsts == [True, False, True]


def test_rewards_before_the_first_move_and_dummy_rows_belong_to_no_transition() -> None:
    turns = TurnTransitionBuilder(2, 0)
    obs_N, first_N = np.zeros((2, 1), np.float32), np.array([True, True])
    *_, step = turns.finish_transitions(
        obs_N, first_N, None, out_of(1, 1), vec_step([0.0, 5.0], [True, True], valid=[True, False]), acted(rows=[True, True])
    )
    assert step.valid_N.tolist() == [True, False]
    *_, step = turns.finish_transitions(obs_N, first_N, None, out_of(1, 1), vec_step([1.0, 2.0], [True, True]), acted(rows=[False, True]))
    assert (step.valid_N.tolist(), step.reward_N[1]) == ([False, True], 2.0)


def test_rows_of_agents() -> None:
    info = EnvInfo(6, ObservationSpace((1,)), ActionSpace("discrete", (2,)), agents=("a", "b", "c"))
    assert info.frames == 2
    assert info.agent_rows(("b",)).tolist() == [1, 4]
    assert info.agent_rows(("c", "a")).tolist() == [0, 2, 3, 5]


def rows(body: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """Return the rows of a run without time columns."""
    result = Session(load_spec({"run": {**body, "env": {**body["env"], **changes}}}, "run")).run()
    return [{key: value for key, value in row.items() if key not in TIMES} for row in result.rows]


BATCH, PLAIN = {"name": "OnPolicyBatchReplay"}, {**MLP, "update_type": None, "polyak_coef": None}
ONE_AGENT = {
    "PPO": run(CARTPOLE, {"name": "PPO", **ROLLOUT}, PLAIN, BATCH, normalize_obs=True),
    "A2C": run(CARTPOLE, {"name": "ActorCritic", "training_frequency": 8}, PLAIN, BATCH),
    "REINFORCE": run(CARTPOLE, {"name": "Reinforce"}, PLAIN, {"name": "OnPolicyReplay"}),
    "DQN": run(CARTPOLE, {"name": "DQN", **REPLAYING}),
    "recurrent PPO": run(CARTPOLE, {"name": "PPO", **ROLLOUT}, {**RECURRENT, "update_type": None, "polyak_coef": None}, BATCH),
    "recurrent DQN": run(CARTPOLE, {"name": "DQN", **REPLAYING}, RECURRENT),
    "recurrent SIL": run(CARTPOLE, {"name": "SIL"}, {**RECURRENT, "update_type": None, "polyak_coef": None}, {"name": "OnPolicyReplay"}),
    "SIL": run(CARTPOLE, {"name": "SIL"}, PLAIN, {"name": "OnPolicyReplay"}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ONE_AGENT)
def test_one_agent_learns_as_in_an_env_with_one_agent(name: str) -> None:
    """The rows must be equal to the digit, which covers storage, order of random draws, losses and statistics."""
    body = ONE_AGENT[name]
    assert rows(body, backend="sync") == rows(body, backend="tests.env.turn_games:OneAgent")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", list(ONE_AGENT))
def test_every_algorithm_learns_a_game_of_turns(name: str) -> None:
    body = ONE_AGENT[name]
    found = rows({**body, "env": {**body["env"], "max_frame": 600}}, **DUEL)
    assert found[-1]["frame"] == 600
    assert found[-1]["opt_step"] > 0
    assert np.isfinite(found[-1]["loss"])


SELF_PLAY = {"pool": 2, "snapshot_frequency": 300, "opponent": "prioritized", "rating_games": 4}


def duel(algorithm: str = "PPO", frames: int = 1200, **self_play: Any) -> dict[str, Any]:
    body = ONE_AGENT[algorithm]
    env = {**body["env"], **DUEL, "max_frame": frames, "normalize_obs": False}
    return {**body, "env": env, "meta": {**body["meta"], "self_play": {**SELF_PLAY, **self_play}}}


def test_a_rating_has_the_highest_likelihood() -> None:
    """The games are 30.5 points in 40 games against a rating of 100; the prior adds one draw against 0."""
    rating = estimate_elo([30.5], [40], [100.0])
    expected = [1.0 / (1.0 + 10.0 ** ((other - rating.elo) / 400.0)) for other in (100.0, 0.0)]
    assert 40 * expected[0] + expected[1] == pytest.approx(31.0)
    information = 40 * expected[0] * (1 - expected[0]) + expected[1] * (1 - expected[1])
    assert rating.error == pytest.approx(400.0 / np.log(10.0) / np.sqrt(information))
    assert estimate_elo([0.5], [1], [250.0], 250.0).elo == pytest.approx(250.0)
    assert 0 < estimate_elo([40.0], [40], [0.0]).elo < 2_000


def test_the_score_of_a_game() -> None:
    assert game_score(np.array([1.0, -1.0]), 0) == 1.0
    assert game_score(np.array([0.0, 0.0]), 1) == 0.5
    assert game_score(np.array([1.0, 2.0, 0.0]), 0) == 0.5


def test_self_play_rates_snapshots_and_keeps_the_newest() -> None:
    session = Session(load_spec({"run": duel()}, "run")).build()
    result = session.run()
    assert result.rows[-1]["elo"] is not None
    assert session.parts.self_play is not None
    assert [snapshot.frame for snapshot in session.parts.self_play.pool] == [900, 1200]


def test_a_snapshot_that_wins_every_game_is_rated_near_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prior draw, which keeps a rating finite, is against the previous snapshot; for the first snapshot, against random actions (0)."""
    session = Session(load_spec({"run": duel()}, "run")).build()
    self_play, policy = session.parts.self_play, session.agent.policy
    assert self_play is not None
    monkeypatch.setattr("slm_lab.experiment.training.self_play.play_match", lambda env, policy, opponent, games, *_: [1.0] * 40)
    first, second = Snapshot(0, 0, policy), Snapshot(1, 300, policy)
    self_play._rate(first)
    assert first.rating == estimate_elo([40.0], [40], [0.0], 0.0)
    self_play.pool.append(Snapshot(0, 0, policy, Rating(500.0, 10.0)))
    self_play._rate(second)
    assert second.rating == estimate_elo([40.0, 40.0], [40, 40], [0.0, 500.0], 500.0)
    assert second.rating.elo > 500.0
    session.close()


def test_a_policy_learns_only_from_its_own_moves_against_snapshots() -> None:
    """If every game is against a snapshot, half of the moves are the policy's own."""
    session = Session(load_spec({"run": duel(past_fraction=1.0)}, "run")).build()
    algorithm, counts = session.agent.algorithm, []
    learn = algorithm.learn

    def counted(rollout: Any) -> Any:
        counts.append(int(rollout.valid_TN.sum()))
        return learn(rollout)

    algorithm.learn = counted
    session.run()
    assert 0.35 < np.mean(counts) / (2 * 16) < 0.65


def test_stopped_and_continued_self_play_equals_straight(tmp_path: Path) -> None:
    """A stopped and continued run must equal an uninterrupted one in rows, ratings, pool, running games and weights."""
    spec = load_spec({"run": duel()}, "run")
    _, one = train(spec, tmp_path / "straight")
    _, other = train(spec, tmp_path / "stopped", (334, 556))
    assert table(one.session_df(0)) == table(other.session_df(0))
    assert len(table(one.elo(0))) == 5
    assert table(one.elo(0)) == table(other.elo(0))
    assert differing(bundle(one), bundle(other)) == []


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"env": {"name": CARTPOLE, "max_frame": 600}, "meta": {"self_play": {}}}, "meta.self_play"),
        ({"env": {"name": CARTPOLE, "max_frame": 600}, "agent": {"policies": {"one": ["left"]}}}, "agent.policies"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_its_path(keys: dict[str, Any], path: str) -> None:
    spec = load_spec({"run": {**keys, "agent": {"algorithm": {"name": "PPO"}, **keys.get("agent", {})}}}, "run")
    with pytest.raises(SpecError) as error:
        Session(spec).build()
    assert [problem.path for problem in error.value.problems] == [path]


def two_policies(**policies: list[str]) -> dict[str, Any]:
    body = duel()
    del body["meta"]["self_play"]
    body["meta"] |= {"eval_episodes": 2}
    return {**body, "agent": {**body["agent"], "policies": policies}}


def test_two_policies_learn_from_the_moves_of_their_agents(tmp_path: Path) -> None:
    """Each policy has a separate table and separate weights; in a two-player game with one winner, their returns are opposite."""
    spec = load_spec({"run": two_policies(first=["left"], second=["right"])}, "run")
    _, paths = train(spec, tmp_path / "run")
    one, other = (table(paths.session_df(i)) for i in range(2))
    assert len(one) == len(other) >= 9
    assert all(float(a["return_new"]) == -float(b["return_new"]) for a, b in zip(one, other, strict=True))
    assert [int(row["opt_step"]) for row in one] == [int(row["opt_step"]) for row in other]
    assert float(one[-1]["loss"]) != float(other[-1]["loss"])
    first, second = (table(paths.session_df(i, "eval")) for i in range(2))
    assert [float(row["return_new"]) for row in first] == [-float(row["return_new"]) for row in second]


def test_stopped_and_continued_policies_equal_straight(tmp_path: Path) -> None:
    spec = load_spec({"run": two_policies(first=["left"], second=["right"])}, "run")
    _, one = train(spec, tmp_path / "straight")
    _, other = train(spec, tmp_path / "stopped", (334, 556))
    for i in range(2):
        assert table(one.session_df(i)) == table(other.session_df(i))
        assert table(one.session_df(i, "eval")) == table(other.session_df(i, "eval"))
    assert differing(bundle(one), bundle(other)) == []


@pytest.mark.parametrize(
    ("policies", "path"),
    [
        ({"first": ["left"]}, "agent.policies"),
        ({"first": ["left"], "second": ["rigth"]}, "agent.policies.second[0]"),
    ],
)
def test_policies_must_fit_the_agents(policies: dict[str, list[str]], path: str) -> None:
    with pytest.raises(SpecError) as error:
        Session(load_spec({"run": two_policies(**policies)}, "run")).build()
    assert [problem.path for problem in error.value.problems] == [path]


def test_an_agent_has_one_policy() -> None:
    with pytest.raises(SpecError) as error:
        load_spec({"run": two_policies(first=["left"], second=["right", "left"])}, "run")
    assert [problem.path for problem in error.value.problems] == ["agent.policies.second[1]"]


@pytest.mark.parametrize(("goal", "words"), [(10**9, "did not end within 50 steps"), (5, "ended only for left")])
def test_self_play_needs_games_that_end_for_all_agents(goal: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slm_lab.experiment.training.self_play.MAX_STEPS", 50)
    body = duel()
    session = Session(load_spec({"run": {**body, "env": {**body["env"], "goal": goal}}}, "run")).build()
    assert session.parts.self_play is not None
    if goal == 5:
        backend = session.parts.self_play.env._backend
        step = backend.step

        def left_alone(action: np.ndarray) -> Any:
            raw = step(action)
            raw.terminated_N[1::2] = False
            return raw._replace(final=[(row, obs) for row, obs in raw.final or () if row % 2 == 0])

        backend.step = left_alone  # type: ignore[method-assign]
    with pytest.raises(PlainError, match=words):
        session.run()


def test_a_stop_during_rated_games_takes_no_snapshot() -> None:
    """The continued run takes the snapshot instead, with the same random stream and env."""
    session = Session(load_spec({"run": duel()}, "run")).build()
    self_play = session.parts.self_play
    assert self_play is not None
    before = self_play.state_dict(running_games=False)
    self_play.beat = lambda phase: setattr(self_play.stop, "requested", True)
    session.run()
    assert (self_play.taken, self_play.pool) == (0, [])
    assert self_play.state_dict(running_games=False)["rng"] == before["rng"]


def test_prioritized_opponents_are_those_that_the_policy_loses_against() -> None:
    """Scores of 0, 0.5 and 1 have the weights 1, 0.25 and 0, plus 0.001 for each."""
    session = Session(load_spec({"run": duel(pool=3, past_fraction=1.0)}, "run")).build()
    self_play = session.parts.self_play
    assert self_play is not None
    for score in (0.0, 0.5, 1.0):
        self_play.pool.append(Snapshot(len(self_play.pool), 0, session.agent.policy, score=score))
    drawn = np.bincount([self_play._draw_opponent() for _ in range(2000)], minlength=3) / 2000
    assert drawn == pytest.approx([0.799, 0.2, 0.001], abs=0.04)
    session.close()


def test_a_snapshot_that_left_the_pool_finishes_its_games() -> None:
    session = Session(load_spec({"run": duel(pool=1, past_fraction=1.0)}, "run")).build()
    self_play = session.parts.self_play
    assert self_play is not None
    self_play.take_snapshot_if_due()
    self_play.choose_opponents(np.ones(4, np.bool_))
    session.clock.tick(300)
    self_play.take_snapshot_if_due()
    assert ([one.index for one in self_play.pool], [one.index for one in self_play.retired]) == ([1], [0])
    assert self_play.opponent_E.tolist() == [0, 0]
    self_play.choose_opponents(np.array([True, True, False, False]))
    assert (self_play.opponent_E.tolist(), len(self_play.retired)) == ([1, 0], 1)
    self_play.choose_opponents(np.array([False, False, True, True]))
    assert (self_play.opponent_E.tolist(), self_play.retired) == ([1, 1], [])
    session.close()
