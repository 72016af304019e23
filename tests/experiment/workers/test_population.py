"""Tests of population-based training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.base import TunedHyperparameters
from slm_lab.experiment.files.paths import new_run
from slm_lab.experiment.files.sink import LocalSink, MemorySink
from slm_lab.experiment.report.run import read_columns
from slm_lab.experiment.report.sampler import pbt_figure
from slm_lab.experiment.report.trial_figures import FRAMES
from slm_lab.experiment.session.restore import state_dict
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.population import COLUMNS, PopulationBasedTraining, replace_policy
from slm_lab.lib.records import Episode
from slm_lab.spec.models.meta import PBTSpec
from slm_lab.spec.models.spec import Spec
from tests.experiment.workers.conftest import source_of, worker_spec

Open = Callable[[Spec], Session]


def records(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    columns = read_columns(path)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


BEST = 6.0
"""The best factor of the learning rate in the toy problem."""


class Toy:
    """A toy agent that is also its algorithm: weights, an optimizer state and a random generator."""

    def __init__(self, number: int, gamma: float = 0.99) -> None:
        self.algorithm, self.tuning = self, TunedHyperparameters()
        self.spec, self.own_gamma = SimpleNamespace(gamma=gamma), gamma
        self.weights, self.momentum, self.rng = float(number), 10.0 * number, 100 + number

    def apply_tuned_hyperparameters(self, tuning: TunedHyperparameters) -> None:
        self.tuning = tuning
        self.spec = SimpleNamespace(gamma=self.own_gamma if tuning.gamma is None else tuning.gamma)

    @property
    def lr(self) -> float:
        return 0.001 * self.tuning.lr

    @property
    def entropy_coef(self) -> float:
        return 0.01 * self.tuning.entropy_coef

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "momentum": self.momentum, "rng": self.rng, "tuning": tuple(self.tuning)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.momentum, self.rng = state["weights"], state["momentum"], state["rng"]
        self.apply_tuned_hyperparameters(TunedHyperparameters(*state["tuning"]))


class ToyLearner:
    """The part of PolicyLearner that Population uses."""

    def __init__(self, toy: Toy, total_reward: float | None) -> None:
        self.agent, self.total_reward = toy, total_reward
        self.clock, self.recorder = SimpleNamespace(frame=0), self

    def forget_episodes(self) -> None:
        self.total_reward = None


def make_population(
    rewards: Sequence[float | None], sink: Any = None, seed: int = 1, gamma: float = 0.99, **keys: Any
) -> PopulationBasedTraining:
    learners: list[Any] = [ToyLearner(Toy(number, gamma), reward) for number, reward in enumerate(rewards)]
    spec = PBTSpec(**{"start": 100, "period": 100, "replace_fraction": 0.25} | keys)
    population = PopulationBasedTraining(spec, learners, seed)
    population.begin(sink)
    return population


def toys(population: PopulationBasedTraining) -> list[Any]:
    return [learner.agent for learner in population.learners]


def test_the_population_moves_to_the_best_learning_rate() -> None:
    """The reward falls with the distance from the best learning rate; policy 0 is unchanged, for comparison."""
    one = make_population([0.0] * 8, mutation_rate=0.5, reward_gap=0.0)
    for round_ in range(80):
        for policy, learner in enumerate(one.learners):
            learner.clock.frame = 100 * (round_ + 1)
            learner.total_reward = -abs(np.log(toys(one)[policy].tuning.lr / BEST))
            one.step(policy)
    factors = [toy.tuning.lr for toy in toys(one)]
    assert factors[0] == 1.0
    assert BEST / 2 < median(factors[1:]) < BEST * 2
    assert toys(one)[0].state_dict() == Toy(0).state_dict()


def test_without_rewards_that_differ_nothing_is_replaced() -> None:
    """With equal rewards, no policy is replaced; so the move in the test above is not caused by mutation alone."""
    one = make_population([0.0] * 8, mutation_rate=0.5)
    for policy in [*range(8)] * 80:
        one.step(policy)
    assert [toy.weights for toy in toys(one)] == [*range(8)]


def test_a_round_is_due_by_a_policys_own_frames() -> None:
    one = make_population([1.0, 2.0])
    due = []
    for frame in (0, 99, 100, 150, 199, 200, 460, 470, 500):
        one.learners[1].clock.frame = frame
        if one.is_round_due(1):
            due.append(frame)
            one.step(1)
    assert due == [100, 200, 460, 500]
    assert not one.is_round_due(0)


@pytest.mark.parametrize(
    ("rewards", "keys", "sources"),
    [
        ([5.0, 1.0, 2.0, 3.0], {}, {0}),
        ([5.0, 1.0, 2.0, 5.0], {"replace_fraction": 0.5}, {0, 3}),
        ([1.2, 1.0, 1.1, 1.15], {"reward_gap": 0.1}, {0}),
        ([1.2, 1.0, 1.1, 1.15], {"reward_gap": 0.25}, {None}),
        ([-1.0, -2.0, -1.5, -1.5], {"reward_gap": 0.4}, {0}),
        ([-1.0, -2.0, -1.5, -1.5], {"reward_gap": 0.6}, {None}),
        ([5.0, 1.0, 2.0, 3.0], {"reward_gap_absolute": 3.9}, {0}),
        ([5.0, 1.0, 2.0, 3.0], {"reward_gap_absolute": 4.1}, {None}),
        ([5.0, None, 2.0, 3.0], {}, {None}),
        ([None, 1.0, None, None], {}, {None}),
        ([5.0, 1.0, 2.0, 3.0], {"replace_fraction": 0.0}, {None}),
        ([1.0, 5.0, 2.0, 3.0], {"replace_fraction": 0.75}, {None}),
        ([None, 1.0, None, 3.0], {"replace_fraction": 0.5}, {3}),
        ([5.0, 2.0, 1.0, 3.0], {"replace_fraction": 0.25}, {None}),
    ],
)
def test_which_policy_replaces_which(rewards: list[float | None], keys: dict[str, Any], sources: set[int | None]) -> None:
    """The policies that can replace policy 1, depending on the required gap and the replaced fraction."""
    found = set()
    for seed in range(30):
        one = make_population(rewards, seed=seed, mutation_rate=0.0, **keys)
        one.step(1)
        weights = int(toys(one)[1].weights)
        found.add(None if weights == 1 else weights)
    assert found == sources


def test_a_replaced_policy_copies_everything_but_the_random_stream() -> None:
    one = make_population([0.0, -5.0, 9.0, 1.0], mutation_rate=0.0)
    source = toys(one)[2]
    source.apply_tuned_hyperparameters(TunedHyperparameters(3.0, 0.5, 0.9))
    one.step(1)
    assert toys(one)[1].state_dict() == source.state_dict() | {"rng": 101}
    one.step(3)
    assert toys(one)[3].state_dict() == Toy(3).state_dict(), "not among the worst"


def test_without_replacement_all_policies_but_the_first_are_perturbed() -> None:
    one = make_population([0.0, 9.0, 2.0], mutation_rate=1.0, replace_fraction=0.0)
    for policy in range(3):
        one.step(policy)
    assert [toy.tuning == Toy(policy).tuning for policy, toy in enumerate(toys(one))] == [True, False, False]


@pytest.mark.parametrize(("policy", "rewards"), [(1, [1.0, 9.0, 2.0, 3.0]), (0, [-9.0, 1.0, 2.0, 3.0])])
def test_the_best_policy_and_policy_0_are_unchanged(policy: int, rewards: list[float]) -> None:
    one = make_population(rewards, mutation_rate=1.0, optimize_gamma=True)
    one.step(policy)
    assert toys(one)[policy].state_dict() == Toy(policy).state_dict()


@pytest.mark.parametrize("optimize_gamma", [False, True])
def test_how_hyperparameters_mutate(optimize_gamma: bool) -> None:
    """A mutation multiplies or divides by a factor within the bounds; for gamma, it changes the distance from 1."""
    factors: list[list[float]] = [[], [], []]
    for seed in range(200):
        one = make_population([None, None], seed=seed, mutation_rate=1.0, perturb_min=1.2, perturb_max=1.4, optimize_gamma=optimize_gamma)
        one.step(1)
        tuning = toys(one)[1].tuning
        factors[0].append(tuning.lr)
        factors[1].append(tuning.entropy_coef)
        if tuning.gamma is not None:
            factors[2].append((1 - tuning.gamma) / 0.01)
    assert len(factors[2]) == (200 if optimize_gamma else 0)
    for values in factors[: 2 + optimize_gamma]:
        up, down = [value for value in values if value > 1], [1 / value for value in values if value < 1]
        assert len(up) + len(down) == 200
        assert min(len(up), len(down)) > 60
        for some in (up, down):
            assert 1.2 - 1e-9 <= min(some) < 1.23
            assert 1.37 < max(some) <= 1.4 + 1e-9
    assert factors[0] != factors[1]


def test_how_often_hyperparameters_mutate() -> None:
    count = 0
    for seed in range(400):
        one = make_population([None, None], seed=seed, mutation_rate=0.25)
        one.step(1)
        count += toys(one)[1].tuning.lr != 1.0
    assert 70 < count < 130


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.999999])
def test_gamma_stays_a_discount(gamma: float) -> None:
    for seed in range(50):
        one = make_population([None, None], seed=seed, gamma=gamma, mutation_rate=1.0, perturb_max=3.0, optimize_gamma=True)
        one.step(1)
        assert 0.0 <= toys(one)[1].spec.gamma <= 0.99999


def test_a_restored_population_continues_as_the_original() -> None:
    one, other = (make_population(REWARDS, mutation_rate=0.7, optimize_gamma=True, reward_gap=0.0) for _ in range(2))
    play(one, 3)
    saved = copy.deepcopy((one.state_dict(), [toy.state_dict() for toy in toys(one)]))
    play(one, 4)
    other.load_state_dict(saved[0])
    for toy, state in zip(toys(other), saved[1], strict=True):
        toy.load_state_dict(state)
    for before, after in zip(one.learners, other.learners, strict=True):
        after.clock.frame = 300
        assert before.clock.frame == 700
    assert not other.is_round_due(1), "its rounds are restored"
    play(other, 4)
    assert [toy.state_dict() for toy in toys(one)] == [toy.state_dict() for toy in toys(other)]
    assert [toy.spec.gamma for toy in toys(one)] == [toy.spec.gamma for toy in toys(other)]
    assert one.state_dict() == other.state_dict()


REWARDS = [3.0, -2.0, 1.0, 0.5]


def play(one: PopulationBasedTraining, rounds: int) -> None:
    for _ in range(rounds):
        for policy, learner in enumerate(one.learners):
            learner.clock.frame += 100
            learner.total_reward = REWARDS[policy]
            assert one.is_round_due(policy)
            one.step(policy)


def test_the_table_of_rounds_can_be_drawn(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "small")
    sink = LocalSink(paths)
    one = make_population([2.0, -5.0, None], sink, mutation_rate=1.0, optimize_gamma=True, replace_fraction=0.3)
    one.learners[1].clock.frame = 1_234_567_891
    one.step(1)
    sink.close()
    rows = records(paths.pbt(0))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["frame"], row["policy"], row["total_reward"], row["source"]) for row in rows] == [
        ("0", "0", "2", ""),
        ("0", "1", "-5", ""),
        ("0", "2", "", ""),
        ("1234567891", "1", "-5", "0"),
    ]
    assert float(rows[3]["lr"]) == pytest.approx(toys(one)[1].lr)
    assert float(rows[3]["gamma"]) == pytest.approx(toys(one)[1].spec.gamma)
    assert float(rows[0]["entropy_coef"]) == 0.01
    figure = pbt_figure(read_columns(paths.pbt(0)), "small", FRAMES)
    assert figure is not None
    assert [panel.y_label for panel in figure.panels] == ["learning rate", "entropy coefficient", "gamma"]
    lines = {line.name: line for line in figure.first_panel.lines}
    assert lines["policy 1"].curve.frame.tolist() == [0.0, 1_234_567_891.0]
    assert [(mark.frame, mark.text) for mark in lines["policy 1"].marks] == [(1_234_567_891.0, "policy 1 copied the weights of policy 0")]
    assert lines["policy 0"].marks == ()


# ---- with real agents

SMALL = {"num_policies": 3, "async_rl": True, "serial_mode": True}
PBT = {"period": 128, "start": 128, "mutation_rate": 1.0, "reward_gap": 0.0, "replace_fraction": 0.4, "optimize_gamma": True}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop", "AdamW", "NAdam"])
def test_a_replaced_agent_is_equal_and_independent(optimizer: str, open_session: Open) -> None:
    """It gets the source's weights, optimizer state and hyperparameters; training one of the two does not change the other."""
    spec = worker_spec(sampler=SMALL, env={"max_frame": 256}, net={"optim_spec": {"name": optimizer, "lr": 0.01}})
    session = open_session(spec)
    session.run()
    poor, best, _ = (learner.agent for learner in session.learners)
    best.algorithm.apply_tuned_hyperparameters(TunedHyperparameters(2.0, 0.5, 0.9))
    streams = [copy.deepcopy(agent.algorithm.state_dict().get("rng")) for agent in (poor, best)]
    assert not same(poor, best, ("trainer",))
    replace_policy(poor, best)
    assert same(poor, best, ("trainer", "tuning"))
    assert poor.algorithm.spec == best.algorithm.spec
    assert poor.entropy_coef == best.entropy_coef
    assert [agent.algorithm.state_dict().get("rng") for agent in (poor, best)] == streams
    kept = copy.deepcopy(best.algorithm.state_dict())
    trainer = poor.algorithm.trainer
    assert trainer is not None
    trainer.begin_update(0)
    assert trainer.lr == pytest.approx(0.02)
    trainer.flat.grad.fill_(1.0)
    trainer.step()
    assert same(kept, best, ("trainer", "tuning"))
    assert not same(poor, best, ("trainer",))


def same(one: Agent | dict[str, Any], other: Agent, keys: Sequence[str]) -> bool:
    states = [state if isinstance(state, dict) else state.algorithm.state_dict() for state in (one, other)]
    return all(equal(states[0][key], states[1][key]) for key in keys)


def equal(one: Any, other: Any) -> bool:
    """Return whether two nested states are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def test_a_restored_agent_is_tuned_as_before(open_session: Open) -> None:
    """A restored agent applies its tuned learning rate, entropy coefficient and gamma."""
    entropy = {"entropy_coef_spec": {"name": "linear_decay", "start_val": 0.1, "end_val": 0.01, "start_step": 0, "end_step": 1000}}
    one, other = (open_session(worker_spec(sampler=SMALL, algorithm=entropy)).build().agent for _ in range(2))
    one.algorithm.apply_tuned_hyperparameters(TunedHyperparameters(3.0, 0.5, 0.8))
    assert (other.algorithm.spec.gamma, other.entropy_coef) == (0.99, 0.1)
    other.load_state_dict(one.state_dict())
    for agent in (one, other):
        assert agent.algorithm.trainer is not None
        agent.algorithm.trainer.begin_update(0)
    assert other.lr == one.lr
    assert other.entropy_coef == one.entropy_coef == pytest.approx(0.05)
    assert other.algorithm.spec.gamma == 0.8
    again = TunedHyperparameters(1.0, 2.0, None)
    for agent in (one, other):
        agent.algorithm.apply_tuned_hyperparameters(again)
    assert other.entropy_coef == one.entropy_coef == pytest.approx(0.2), "relative to the spec, not to the last tuning"
    assert other.algorithm.spec == one.algorithm.spec
    assert other.algorithm.spec.gamma == 0.99


def pbt_spec(**env: Any) -> Spec:
    return worker_spec(sampler=SMALL | {"pbt": PBT}, env={"max_frame": 1024} | env)


def test_a_run_of_a_population(tmp_path: Path, open_session: Open) -> None:
    """Each policy has rounds at its own frames; the table and checkpoints agree with the agents."""
    session = open_session(pbt_spec())
    paths = new_run(tmp_path, "small")
    sink = LocalSink(paths)
    session.run(sink)
    sink.close()
    rows = records(paths.pbt(0))
    for policy, learner in enumerate(session.learners):
        own = [row for row in rows if row["policy"] == str(policy)]
        frames = [int(row["frame"]) for row in own]
        assert frames[0] == 0
        assert len(frames) == 1 + len({frame // 128 for frame in frames[1:]})
        assert len(frames) >= 6
        assert float(own[-1]["gamma"]) == pytest.approx(learner.agent.algorithm.spec.gamma)
        assert (learner.agent.algorithm.tuning == TunedHyperparameters()) == (policy == 0)
        assert {row["source"] for row in own} <= {"", *("012".replace(str(policy), ""))}
    assert any(row["source"] for row in rows), "at least one was replaced"
    assert not any(row["source"] for row in rows if row["policy"] == "0")
    population = source_of(session).population
    assert population is not None
    assert state_dict(session)["population"] == population.state_dict()
    assert len({learner.agent.lr for learner in session.learners}) == 3


def test_the_episode_history_of_a_replaced_policy_starts_anew(open_session: Open) -> None:
    """A replaced policy's mean return counts only episodes after the replacement; the histories of the others continue."""
    session, sink = open_session(pbt_spec()).build(), MemorySink()
    session.sink = sink
    session.begin()
    population = source_of(session).population
    assert population is not None
    for learner, total_reward in zip(session.learners, (50.0, 10.0, 60.0), strict=True):
        learner.recorder.on_step([Episode(0, total_reward, 10)] * 3)
        learner.clock.frame = 128
    population.step(0)
    population.step(1)
    assert [learner.total_reward for learner in session.learners] == [50.0, None, 60.0]
    assert population._worst_and_best() == ([0], [2]), "it is not ranked before it has played"
    session.learners[1].recorder.on_step([Episode(0, 30.0, 10)])
    assert session.learners[1].total_reward == 30.0


@pytest.mark.slow
def test_a_full_disk_ends_the_table_of_rounds_but_not_the_run(tmp_path: Path, open_session: Open, caplog: Any) -> None:
    paths = new_run(tmp_path, "small")
    paths.pbt(0).symlink_to("/dev/full")
    sink = LocalSink(paths)
    session = open_session(pbt_spec())
    assert not session.run(sink).interrupted
    sink.close()
    assert session.learners[1].agent.algorithm.tuning != TunedHyperparameters(), "rounds go on"
    (message,) = caplog.messages
    assert message == "the table of population-based training cannot be written: No space left on device"
    assert min(int(records(paths.session_df(policy))[-1]["frame"]) for policy in range(3)) >= 1024
