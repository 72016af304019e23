"""Tests of the updates of target nets: each algorithm against its rule, written out in this file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.lib.records import ActionSpace
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, ToyEnv, agent_of, drive_on, info

ENVS = 3


def agent(name: str, action: ActionSpace = DISCRETE, net: dict[str, Any] | None = None, **algorithm: Any) -> Agent:
    keys = {"name": name, "training_start_step": 30, **algorithm}
    body = {"algorithm": keys, "memory": {"name": "Replay", "batch_size": 8, "max_size": 60}, "net": {**MLP, **(net or {})}}
    toy = Spec.model_validate({"name": "toy", "agent": body, "env": {"name": "Toy-v0", "num_envs": ENVS, "max_frame": 1000}})
    return agent_of(toy, info(ENVS, action))


def target_of(toy: Agent) -> TargetNet[Any]:
    assert toy.algorithm.target is not None
    return toy.algorithm.target


def steps(toy: Agent, number: int) -> Iterator[bool]:
    """Return an iterator over vector steps that yields whether the agent trained in each step."""
    return (metrics is not None for metrics in islice(drive_on(toy, ToyEnv(toy.algorithm.info, seed=1)), number))


def source(toy: Agent) -> Tensor:
    return target_of(toy).source.param.clone()


def critics_after_policy_steps(toy: Agent) -> list[Tensor]:
    """Return a list to which the critics' parameters are appended at each step of the actor."""
    seen: list[Tensor] = []
    algorithm = toy.algorithm
    assert isinstance(algorithm, SoftActorCritic)
    step = algorithm._actor_step

    def spy(*arguments: Any) -> Any:
        seen.append(source(toy))
        return step(*arguments)

    algorithm._actor_step = spy  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("frequency", [3, 12])
@pytest.mark.parametrize("name", ["DQN", "DoubleDQN"])
def test_q_learning_moves_by_polyak_after_each_vector_step(name: str, frequency: int) -> None:
    toy = agent(name, net={"update_type": "polyak", "polyak_coef": 0.1}, training_frequency=frequency)
    expected, trainings, moved_without = target_of(toy).flat.param.clone(), 0, 0
    for trained in steps(toy, 40):
        before = expected.clone()
        expected = expected + 0.1 * (source(toy) - expected)
        torch.testing.assert_close(target_of(toy).flat.param, expected)
        trainings += trained
        moved_without += not trained and not torch.allclose(before, expected)
    assert trainings == (31 if frequency == 3 else 8)
    assert bool(moved_without) == (frequency == 12)


@pytest.mark.parametrize(("update_frequency", "training_frequency"), [(12, 3), (12, 6), (15, 12), (1, 6)])
def test_q_learning_copies_by_frames_trained_or_not(update_frequency: int, training_frequency: int) -> None:
    toy = agent("DQN", net={"update_type": "replace", "update_frequency": update_frequency}, training_frequency=training_frequency)
    expected, copies = target_of(toy).flat.param.clone(), 0
    for _ in steps(toy, 60):
        if toy.clock.frame % update_frequency < ENVS:
            expected, copies = source(toy), copies + 1
        assert torch.equal(target_of(toy).flat.param, expected)
    assert copies == 180 // max(update_frequency, ENVS) == target_of(toy).updates_done


@pytest.mark.parametrize("name", ["DQN", "SoftActorCritic"])
def test_without_update_type_the_target_net_is_a_copy(name: str) -> None:
    toy = agent(name, training_frequency=3)
    for _ in steps(toy, 20):
        assert torch.equal(target_of(toy).flat.param, source(toy))
    assert not torch.equal(source(toy), source(agent(name)))


@pytest.mark.parametrize("name", ["DQN", "SoftActorCritic"])
def test_a_polyak_coef_of_0_keeps_the_target_net(name: str) -> None:
    """With a coefficient of 0 no update is due, which the checks of mode dev rely on."""
    toy = agent(name, DISCRETE, {"update_type": "polyak", "polyak_coef": 0.0})
    before = target_of(toy).flat.param.clone()
    assert sum(steps(toy, 40)) > 5
    assert torch.equal(target_of(toy).flat.param, before)
    assert target_of(toy).updates_done == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize(("training_iter", "delay", "frequency"), [(1, 1, 3), (5, 2, 3), (2, 3, 9)])
def test_soft_actor_critic_moves_by_polyak_with_each_update_of_the_policy(
    action: ActionSpace, training_iter: int, delay: int, frequency: int
) -> None:
    net = {"update_type": "polyak", "polyak_coef": 0.2}
    toy = agent("SoftActorCritic", action, net, training_iter=training_iter, policy_delay=delay, training_frequency=frequency)
    critics, expected, gradient_steps = critics_after_policy_steps(toy), target_of(toy).flat.param.clone(), 0
    for trained in steps(toy, 40):
        gradient_steps += training_iter * trained
        for param in critics:
            expected = expected + 0.2 * (param - expected)
        critics.clear()
        torch.testing.assert_close(target_of(toy).flat.param, expected)
    assert target_of(toy).updates_done == gradient_steps // delay > 5


@pytest.mark.parametrize(("update_frequency", "frequency", "delay"), [(12, 3, 1), (21, 6, 2), (1, 3, 1)])
def test_soft_actor_critic_copies_in_the_first_training_past_a_multiple(update_frequency: int, frequency: int, delay: int) -> None:
    net = {"update_type": "replace", "update_frequency": update_frequency}
    toy = agent("SoftActorCritic", net=net, training_iter=3, policy_delay=delay, training_frequency=frequency)
    critics, expected, due, copies = critics_after_policy_steps(toy), target_of(toy).flat.param.clone(), False, 0
    for trained in steps(toy, 60):
        due |= toy.clock.frame % update_frequency < ENVS
        if trained and critics and due:  # copied after each gradient step, so the last copy remains
            expected, copies, due = critics[-1], copies + len(critics), False
        critics.clear()
        assert torch.equal(target_of(toy).flat.param, expected)
    assert target_of(toy).updates_done == copies > 5
