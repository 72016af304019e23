"""Tests of rollout workers in envs with several agents: transitions, frames and policies of each agent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slm_lab.env import make_env
from slm_lab.experiment.collect.workers.dataset import Dataset, DatasetBuilder, EndedEpisode, GroupRolloutReport
from slm_lab.experiment.collect.workers.shared import RolloutSlot, check_memory, fixed_policy_indices, rollout_bytes
from slm_lab.experiment.collect.workers.worker import EnvGroup
from slm_lab.experiment.files.sink import MemorySink
from slm_lab.experiment.session.session import Session
from slm_lab.lib.records import ActOut
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.test_games import played
from tests.experiment.workers.conftest import RECURRENT, pool_of, source_of, worker_spec
from tests.experiment.workers.test_session import DQN, REPLAY, SERIAL, assert_equal_runs
from tests.resume.runs import train

Open = Callable[[Spec], Session]
DUEL = {"backend": "tests.env.turn_games:Duel", "max_frame": 512}
LEAVING = {"name": "pettingzoo:tests.env.zoo:Countdown", "ends": (1, 3, 5), "comes": 2, "max_frame": 512}
IN_TURN = {"name": "pettingzoo:tests.env.zoo:Turns", "leaves": True, "max_frame": 512}
A2C = {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16}
VARIETY: dict[str, dict[str, Any]] = {
    "in turn": {"env": DUEL},
    "in turn, a2c, recurrent": {"env": DUEL, "algorithm": A2C, "net": RECURRENT},
    "at once, leaving and coming, truncated": {"env": LEAVING | {"max_t": 4}},
    "in turn, leaving, masks, recurrent": {"env": IN_TURN, "net": RECURRENT},
    "one agent": {"env": {"backend": "tests.env.turn_games:OneAgent", "max_frame": 512}},
}


def skip_without_package(sections: dict[str, Any]) -> None:
    if sections["env"].get("name", "").startswith("pettingzoo:"):
        pytest.importorskip("pettingzoo")


def without_workers(spec: Spec) -> Session:
    return Session(spec.with_meta(sampler=None))


def with_policies(spec: Spec, **policies: list[str]) -> Spec:
    return spec.model_copy(update={"agent": spec.agent.model_copy(update={"policies": policies})})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sections", VARIETY.values(), ids=VARIETY)
def test_one_worker_in_turns_learns_as_without_workers(sections: dict[str, Any]) -> None:
    skip_without_package(sections)
    spec = worker_spec(**sections, sampler={"num_workers": 1, "num_envs_per_worker": 4} | SERIAL)
    rows = assert_equal_runs(Session(spec), without_workers(spec))
    assert rows[-1]["frame"] == 512


def test_policies_of_agents_learn_as_without_workers() -> None:
    """Policies train the same with and without workers; only the random generators of the actions differ, so they are copied."""
    spec = with_policies(worker_spec(env=DUEL, sampler={"num_workers": 1, "num_envs_per_worker": 4} | SERIAL), one=["left"], two=["right"])
    session, other = Session(spec).build(), without_workers(spec).build()
    for policy, learner in zip(pool_of(session).workers[0].policies, other.learners, strict=True):
        policy.rng = copy.deepcopy(learner.agent.policy.rng)
    assert_equal_runs(session, other)
    one, two = session.learners
    assert one.window.returns == [-value for value in two.window.returns]


PROCESSES: dict[str, dict[str, Any]] = {
    "a policy drawn for each agent, recurrent": {"env": DUEL, "net": RECURRENT, "sampler": {"num_policies": 2}},
    "leaving and coming": {"env": LEAVING},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sections", PROCESSES.values(), ids=PROCESSES)
def test_processes_learn_as_one_process(sections: dict[str, Any], open_session: Open) -> None:
    skip_without_package(sections)
    sampler = sections.get("sampler", {})
    apart, together = (open_session(worker_spec(**sections | {"sampler": sampler | more})) for more in ({}, SERIAL))
    assert_equal_runs(apart, together)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("inference", ["local", "central"])
def test_async_workers_collect_for_policies_of_agents(inference: str, open_session: Open) -> None:
    sampler = {"async_rl": True, "inference": inference}
    session = open_session(with_policies(worker_spec(env=DUEL, net=RECURRENT, sampler=sampler), one=["left"], two=["right"]))
    sink = MemorySink()
    session.run(sink)
    for policy, learner in enumerate(session.learners):
        assert learner.clock.frame >= 512
        assert np.isfinite(sink.table_rows(policy, "train")[-1]["loss"] or np.nan)


def test_a_replay_of_what_workers_collect(open_session: Open) -> None:
    """In every stored observation it is the agent's turn, and the observed sum grows by its action and the other player's."""
    sampler = {"async_rl": True} | SERIAL
    session = open_session(worker_spec(env=DUEL | {"max_frame": 400}, algorithm=DQN, memory=REPLAY, sampler=sampler))
    session.run()
    batch: Any = session.agent.replay.sample()
    assert (batch.obs_B[:, 1] == 1.0).all()
    continues = batch.terminated_B == 0
    assert 0 < continues.sum() < len(continues)
    assert (batch.next_obs_B[continues, 1] == 1.0).all()
    others = (batch.next_obs_B[:, 0] - batch.obs_B[:, 0]) * 5 - batch.action_B
    assert (others[continues].round() >= 0).all()
    assert (others[continues].round() <= 2).all()
    assert (batch.reward_B[continues] == 0.0).all()
    assert set(batch.reward_B[~continues].tolist()) == {-1.0, 1.0}


# ---- games with given actions


def play_by_hand(fixed: list[int]) -> tuple[list[Dataset], RolloutSlot]:
    """Play a game: left adds 2, right 2, left 2 and wins; in the next game only left moves. Return each policy's dataset, and the slot.

    Args: fixed: the policies of left and right.
    """
    env = make_env(EnvSpec(name="CartPole-v1", backend=DUEL["backend"], max_frame=100), 0, num_envs=1)
    policy: Any = SimpleNamespace(action=env.info.action, state_size=0, initial_state=lambda n: None, env_action=lambda action_N: action_N)
    count = max(fixed) + 1
    group = EnvGroup(0, env, [policy] * count, np.ones(count, np.bool_), np.random.default_rng(0), np.array(fixed))
    slot, ended = RolloutSlot(env.info, 4, 0), list[EndedEpisode]()
    slot.begin()
    acting = []
    for step, action in enumerate((2, 2, 2, 1)):
        acting.append(group.acting_policy_N.tolist())
        group.step(slot, ActOut(np.full(2, action), np.zeros(2, np.float32), None, np.array([step, step])), ended)
    left, right = fixed
    assert acting == [[left, -1], [-1, right], [left, -1], [left, -1]]
    assert [(one.t, one.n, one.policy, one.episode.total_reward) for one in ended] == [(2, 0, left, 1.0), (2, 1, right, -1.0)]
    datasets = []
    for p in range(count):
        builder = DatasetBuilder(p, env.info, 3, 4, 0, 0, count == 1)
        builder.add(slot, GroupRolloutReport(list(slot.storage.truncations), ended))
        datasets.append(builder.take_dataset())
    return [dataset for dataset in datasets if dataset is not None], slot


def transitions(dataset: Dataset) -> list[list[tuple[float, int, float, int, bool]]]:
    """Return (observed sum, action, reward, version, whether the game ended) of each transition, for each column."""
    rollout = dataset.rollout()
    return [
        [
            (
                round(float(rollout.obs_TN[t, n, 0]) * 5),
                int(rollout.action_TN[t, n]),
                float(rollout.reward_TN[t, n]),
                int(rollout.version_TN[t, n]),
                bool(rollout.terminated_TN[t, n]),
            )
            for t in np.flatnonzero(rollout.valid_TN[:, n])
        ]
        for n in range(dataset.columns)
    ]


def test_a_reward_reaches_the_player_who_moved_before() -> None:
    """The loser's only transition ends with the winner's move; the transition of the last move is not yet complete."""
    (dataset,), _ = play_by_hand([0, 0])
    assert transitions(dataset) == [[(0, 2, 0.0, 0, False), (4, 2, 1.0, 2, True)], [(2, 2, -1.0, 1, True)]]
    assert dataset.frame_TN.sum(axis=1).tolist() == [1, 1, 1, 1], "frames are steps of the env"
    assert [(t, episode.total_reward) for t, episode in dataset.ended] == [(2, 1.0), (2, -1.0)]
    assert len(dataset.rollout().reward_TN) == 2, "no rows without transitions"


def test_each_policy_gets_the_transitions_of_its_agents() -> None:
    (one, two), _ = play_by_hand([0, 1])
    assert transitions(one) == [[(0, 2, 0.0, 0, False), (4, 2, 1.0, 2, True)]]
    assert transitions(two) == [[(2, 2, -1.0, 1, True)]]
    assert one.frame_TN[:, 0].tolist() == two.frame_TN[:, 0].tolist() == [True] * 4, "both play in every step"
    assert [episode.total_reward for _, episode in two.ended] == [-1.0]


def test_a_slot_may_be_sent_to_another_node() -> None:
    (expected, _), slot = play_by_hand([0, 1])
    sent = RolloutSlot(slot.storage.info, 4, 0)
    sent.use_arrays(pickle.loads(pickle.dumps(slot.arrays())))
    builder = DatasetBuilder(0, slot.storage.info, 3, 4, 0, 0, single_policy=False)
    builder.add(sent, GroupRolloutReport([], []))
    received = builder.take_dataset()
    assert received is not None
    assert transitions(received) == transitions(expected)
    assert np.array_equal(received.frame_TN, expected.frame_TN)


def test_a_policy_s_frames_are_the_steps_of_envs_in_which_it_plays(open_session: Open) -> None:
    """Datasets have the frames of a direct count over a rollout in which policies are drawn for each agent and game."""
    sizes = {"num_workers": 1, "num_envs_per_worker": 8, "num_batches_per_epoch": 2}
    session = open_session(worker_spec(env=DUEL, sampler={"num_policies": 3} | sizes | SERIAL)).build()
    source = source_of(session)
    worker = pool_of(session).workers[0]
    for p, policy in enumerate(worker.policies):
        policy.version = 100 + p
    report = worker.collect(0)
    (slot,) = source.arrays.slots[0][0]
    games = {tuple(pair) for t in range(16) for pair in slot.played_TN[t].reshape(-1, 2).tolist()}
    assert any(left != right for left, right in games), "not one policy for the whole game"
    found = 0
    for policy in range(3):
        builder = DatasetBuilder(policy, session.parts.env_info, 17, 16, 0, 0, single_policy=False)
        builder.add(slot, report.rollouts[0])
        dataset = builder.take_dataset()
        assert dataset is not None
        frames = sum(policy in slot.played_TN[t, 2 * e : 2 * e + 2] for t in range(16) for e in range(8))
        assert dataset.frame_TN.sum() == frames
        rollout = dataset.rollout()
        assert (rollout.version_TN[rollout.valid_TN] == 100 + policy).all(), "its own actions"
        found += int(rollout.valid_TN.sum())
        assert len(dataset.ended) == sum(one.policy == policy for one in report.rollouts[0].ended)
    assert found == slot.storage.slabs["valid"].sum()


def test_rows_of_policies() -> None:
    env = make_env(EnvSpec(name="CartPole-v1", backend=DUEL["backend"], max_frame=100), 0, num_envs=2)
    spec = worker_spec(env=DUEL)
    assert fixed_policy_indices(spec, env.info) is None
    found = fixed_policy_indices(with_policies(spec, one=["right"], two=["left"]), env.info)
    assert found is not None
    assert found.tolist() == [1, 0, 1, 0]


def test_memory_counts_agents(open_session: Open) -> None:
    session = open_session(worker_spec(env=DUEL, sampler=SERIAL)).build()
    info = session.parts.env_info
    assert info.num_envs == 8
    one_agent = replace(info, num_envs=4, agents=())
    assert rollout_bytes(session.spec, info) == 2 * rollout_bytes(session.spec, one_agent)
    check_memory(session.spec, info)
    three = replace(info, num_envs=12, agents=("left", "middle", "right"))
    groups = {"one": ["left"], "two": ["middle", "right"]}
    narrow_first, wide_first = (
        with_policies(session.spec, **{name: groups[name] for name in order}) for order in (groups, [*groups][::-1])
    )
    assert rollout_bytes(narrow_first, three) == rollout_bytes(wide_first, three), "the order of agent.policies does not matter"


# ---- populations, resume, refused specs


def test_a_population_of_players(open_session: Open) -> None:
    pbt = {"period": 128, "start": 128, "mutation_rate": 1.0, "reward_gap": 0.0, "replace_fraction": 0.4}
    sampler = {"num_policies": 3, "pbt": pbt} | SERIAL
    session = open_session(worker_spec(env=DUEL, sampler=sampler))
    session.run()
    assert all(learner.clock.frame >= 512 for learner in session.learners)
    assert len({learner.agent.lr for learner in session.learners}) == 3
    assert all(learner.total_reward is not None for learner in session.learners)


@pytest.mark.parametrize(
    ("agent", "meta", "path"),
    [
        ({}, {"self_play": {}}, "meta.self_play"),
        ({"policies": {"one": ["left"], "two": ["right"]}}, {"sampler": {"num_policies": 2}}, "meta.sampler.num_policies"),
        ({"policies": {"one": ["left"]}}, {}, "agent.policies"),
        ({"policies": {"one": ["left"], "two": ["rigth"]}}, {}, "agent.policies.two[0]"),
    ],
)
def test_what_cannot_be_combined(agent: dict[str, Any], meta: dict[str, Any], path: str) -> None:
    env = {"name": "CartPole-v1", **DUEL, "max_frame": 10_000}
    body = {"agent": {"algorithm": {"name": "PPO"}, **agent}, "env": env, "meta": {"sampler": {"async_rl": True}, **meta}}
    with pytest.raises(SpecError) as error:
        Session(load_spec({"run": body}, "run")).build()
    assert [problem.path for problem in error.value.problems] == [path]


@pytest.mark.slow
def test_policies_that_play_each_other_learn_tic_tac_toe(tmp_path: Path) -> None:
    """Two policies, drawn for each player and game, get 0.86 of the points against random moves; the run is deterministic."""
    exploring = {"name": "linear_decay", "start_val": 0.1, "end_val": 0.02, "start_step": 0, "end_step": 60_000}
    algorithm = {"name": "PPO", "gamma": 1.0, "lam": 0.7, "time_horizon": 16, "minibatch_size": 64, "entropy_coef_spec": exploring}
    net = {"name": "MLPNet", "hid_layers": [64, 64], "hid_layers_activation": "relu", "optim_spec": {"name": "Adam", "lr": 0.002}}
    sizes = {"num_workers": 2, "num_envs_per_worker": 16, "num_batches_per_epoch": 8}
    sampler = {"num_policies": 2, "serial_mode": True, "async_rl": False, **sizes}
    body = {
        "agent": {"algorithm": algorithm | {"training_epoch": 4}, "net": net},
        "env": {"name": "TicTacToe-v1", "max_frame": 60_000},
        "meta": {"random_seed": 1, "eval_episodes": 0, "sampler": sampler},
    }
    session, paths = train(load_spec({"run": body}, "run"), tmp_path / "run")
    assert all(60_000 <= learner.clock.frame < 60_000 + 32 for learner in session.learners)
    games = played(paths, against="random", episodes=200).games
    assert games is not None
    assert np.mean(games.scores) > 0.65
