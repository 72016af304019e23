"""Tests of SARSA and the Q-learning family: targets, losses, target nets, exploration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.dqn import QLearning, Sarsa
from slm_lab.agent.ops.arrays import as_tensor
from slm_lab.agent.ops.targets import action_value, double_q_value, max_value, one_step_target
from slm_lab.agent.replay.replay import Transitions
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.records import ActOut, VecStep
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, RNN, ToyEnv, agent_of, changed, drive, info, spec

EXPLORE = {"action_policy": "epsilon_greedy", "explore_var_spec": {"name": "no_decay", "start_val": 0.2}}
COLUMNS = ("obs_B", "action_B", "logp_B", "reward_B", "next_obs_B", "terminated_B")
DUELING = {**MLP, "name": "DuelingMLPNet"}


def q_spec(name: str, memory: str = "Replay", net: dict[str, Any] | None = None, **algorithm: Any) -> Spec:
    net = net or {**MLP, "update_type": "replace", "update_frequency": 12}
    return changed(spec({"name": name, **EXPLORE, "gamma": 0.9, **algorithm}, net, memory), memory={"batch_size": 8, "max_size": 60})


def q_agent(name: str, **options: Any) -> tuple[Agent, QLearning]:
    agent = agent_of(q_spec(name, **options), info())
    assert isinstance(agent.algorithm, QLearning)
    return agent, agent.algorithm


def batch_of(algorithm: QLearning, weight: list[float] | None = None) -> Transitions:
    rng = np.random.default_rng(3)
    obs, next_obs = (torch.from_numpy(rng.normal(size=(4, 4)).astype(np.float32)) for _ in range(2))
    terminated = torch.tensor([0.0, 1.0, 0.0, 0.0])
    reward = torch.tensor([1.0, 2.0, -1.0, 0.5])
    weights = None if weight is None else torch.tensor(weight)
    action = torch.tensor([0, 2, 1, 1])
    return Transitions(obs, action, torch.zeros(4), reward, next_obs, terminated, weights, np.arange(4))


def test_target_by_hand() -> None:
    rows = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0]), torch.tensor([0.0, 1.0])
    target = one_step_target(*rows, 0.9)
    assert one_step_target(*(row.numpy() for row in rows), 0.9).tolist() == target.tolist()
    assert target.tolist() == [10.0, 2.0]
    with pytest.raises(ValueError, match="the same shape"):
        one_step_target(torch.zeros(2), torch.zeros(2, 1), torch.zeros(2), 0.9)


def test_values_by_hand() -> None:
    chooser, valuer = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]]), torch.tensor([[7.0, -1.0, 9.0], [0.5, 6.0, 8.0]])
    assert max_value(valuer).tolist() == [9.0, 8.0]
    assert double_q_value(chooser, valuer).tolist() == [-1.0, 0.5]
    assert max_value(valuer.numpy()).tolist() == [9.0, 8.0]
    assert double_q_value(chooser.numpy(), valuer.numpy()).tolist() == [-1.0, 0.5]
    assert action_value(valuer, torch.tensor([2, 0])).tolist() == [9.0, 0.5]


@pytest.mark.parametrize("weights", [[1.0, 0.5, 0.25, 0.0], None])
def test_loss_weighs_by_importance_and_tells_errors(weights: list[float] | None) -> None:
    _, algorithm = q_agent("DoubleDQN", memory="PrioritizedReplay")
    batch = batch_of(algorithm, weights)
    with torch.no_grad():
        error = as_tensor(algorithm._targets(batch)) - action_value(algorithm.net.critic(batch.obs_B), batch.action_B)
    told: list[tuple[np.ndarray, torch.Tensor]] = []
    algorithm.memory.update_priorities = lambda rows, errors: told.append((rows, errors.detach()))  # type: ignore[method-assign]  # a spy
    algorithm.meter.begin()
    algorithm._step(batch)
    assert algorithm.meter.end().loss == pytest.approx(float((torch.tensor(weights or [1.0]) * error**2).mean()), rel=1e-5)
    assert torch.allclose(told[0][1], error, atol=1e-6)
    assert told[0][0].tolist() == [0, 1, 2, 3]


def test_dueling_values() -> None:
    """Eq. 9 of arXiv:1511.06581: Q = V + A − mean A. Acting by the advantages chooses the same actions as acting by the values."""
    _, algorithm = q_agent("DQN", net=DUELING)
    net, obs = algorithm.net, torch.randn(5, 4)
    with torch.no_grad():
        features = net.actor_body(obs)
        assert net.value_head is not None
        advantage, value = net.actor_head(features), net.value_head(features)
        assert torch.allclose(net.critic(obs), value + advantage - advantage.mean(1, keepdim=True), atol=1e-6)
        assert torch.equal(net.critic(obs).argmax(1), net.actor(obs).argmax(1))
        assert torch.allclose(net.critic(obs).softmax(1), net.actor(obs).softmax(1), atol=1e-6)


@pytest.mark.parametrize("name", ["VanillaDQN", "DQN", "DoubleDQN"])
def test_targets_take_layers_as_for_acting(name: str) -> None:
    """Targets use the moving statistics of batch norm, as acting does, and do not change them."""
    _, algorithm = q_agent(name, net={**MLP, "batch_norm": True})
    algorithm.meter.begin()
    before = algorithm.trainer.flat.buffer.clone()
    batch = batch_of(algorithm)
    target = as_tensor(algorithm._targets(batch))
    assert torch.equal(before, algorithm.trainer.flat.buffer)
    rows = [batch._replace(**{k: getattr(batch, k)[i : i + 1] for k in COLUMNS}) for i in range(4)]
    one_by_one = torch.cat([as_tensor(algorithm._targets(row)) for row in rows])
    assert torch.allclose(target, one_by_one, atol=1e-6)
    assert any(module.training for module in algorithm.net.modules() if hasattr(module, "running_mean"))


def test_training_counts() -> None:
    """From training_start_step on, at most one training call per vector step runs training_iter batches of training_batch_iter steps."""
    agent, algorithm = q_agent("DQN", training_iter=3, training_batch_iter=2, training_frequency=2, training_start_step=30)
    metrics = drive(agent, ToyEnv(info(), seed=0), 20)
    assert len(metrics) == 11  # 3 transitions per step: training starts at the tenth step
    assert agent.clock.opt_step == 11 * 6
    assert algorithm.memory.seen == 60


def test_vanilla_dqn_solves_a_chain_by_hand() -> None:
    """In a chain of two states, values converge to those of the Bellman equation: truncations are bootstrapped, terminations are not."""
    net = {"name": "MLPNet", "hid_layers": [], "optim_spec": {"name": "Adam", "lr": 0.05}}
    toy = q_spec("VanillaDQN", net=net, gamma=0.5)
    agent = agent_of(toy, info(1, DISCRETE, (2,)))
    algorithm = agent.algorithm
    assert isinstance(algorithm, QLearning)
    a, b = np.eye(2, dtype=np.float32)
    # in a: action 0 stays (reward 1, truncated), 1 goes to b (reward 0), 2 terminates (reward 3); in b every action goes to a (reward 2)
    rows = [(a, 0, 1.0, a, False, True), (a, 1, 0.0, b, False, False), (a, 2, 3.0, b, True, False)]
    rows += [(b, action, 2.0, a, False, False) for action in range(3)]
    for obs, action, reward, after, terminated, truncated in rows * 8:
        step = VecStep(
            np.array([reward], np.float32), np.array([terminated]), np.array([truncated]), after[None], after[None],
            np.array([terminated or truncated]), np.array([True]), [],
        )  # fmt: skip
        algorithm.observe(obs[None], np.array([True]), None, ActOut(np.array([action]), np.zeros(1, np.float32)), step)
    for _ in range(800):
        algorithm.update()
    # V(a) = 3 by terminating; V(b) = 2 + V(a)/2 = 3.5; staying: 1 + V(a)/2 = 2.5; going to b: V(b)/2 = 1.75
    with torch.no_grad():
        q = algorithm.net.critic(torch.eye(2))
    assert torch.allclose(q, torch.tensor([[2.5, 1.75, 3.0], [3.5, 3.5, 3.5]]), atol=0.05)


@pytest.mark.parametrize("net", [MLP, RNN, DUELING])
def test_sarsa_takes_the_next_action_that_was_taken(net: dict[str, Any]) -> None:
    toy = spec({"name": "SARSA", **EXPLORE, "gamma": 0.9, "training_frequency": 12}, net)
    agent = agent_of(toy, info())
    algorithm = agent.algorithm
    assert isinstance(algorithm, Sarsa)
    calls, choose = [], algorithm._next_actions

    def check(rollout: Rollout, next_q_TNA: torch.Tensor) -> torch.Tensor:
        calls.append(rollout)
        action_TN = choose(rollout, next_q_TNA)
        kept_TN = ~rollout.truncated_TN[:-1]
        assert torch.equal(action_TN[:-1][kept_TN], rollout.action_TN[1:][kept_TN])
        assert ((action_TN >= 0) & (action_TN < 3)).all()
        return action_TN

    algorithm._next_actions = check  # type: ignore[method-assign]  # a spy
    drive(agent, ToyEnv(info(), seed=4), 60)
    assert len(calls) == 5


def test_sarsa_loss_by_hand() -> None:
    toy = spec({"name": "SARSA", **EXPLORE, "gamma": 0.9, "training_frequency": 6}, MLP)
    agent = agent_of(toy, info())
    algorithm = agent.algorithm
    assert isinstance(algorithm, Sarsa)
    taken: dict[str, Any] = {}
    learn, choose = algorithm.learn, algorithm._next_actions

    def spy(rollout: Any) -> Any:
        with torch.no_grad():
            taken.update(rollout=rollout, q=algorithm.net.critic(rollout.obs_TN.flatten(0, 1)).view(7, 3, 3))
            taken["cut"] = algorithm.net.critic(rollout.truncations.obs_K)
        return learn(rollout)

    def spy_actions(rollout: Any, q: Any) -> Any:
        taken["next"] = choose(rollout, q)
        return taken["next"]

    algorithm.learn, algorithm._next_actions = spy, spy_actions  # type: ignore[method-assign]  # spies
    (metrics,) = drive(agent, ToyEnv(info(), seed=5), 6)
    rollout, q, errors = taken["rollout"], taken["q"], []
    cuts = {(int(t), int(n)): k for k, (t, n) in enumerate(zip(rollout.truncations.t_K, rollout.truncations.n_K, strict=True))}
    assert cuts, "the toy truncates"
    for t in range(6):
        for n in range(3):
            after = taken["cut"][cuts[t, n]] if (t, n) in cuts else q[t + 1, n]
            bootstrap = 0.0 if rollout.terminated_TN[t, n] else 0.9 * after[taken["next"][t, n]]
            errors.append(float(q[t, n, rollout.action_TN[t, n]] - rollout.reward_TN[t, n] - bootstrap))
    assert metrics.loss == pytest.approx(np.square(errors).mean(), rel=1e-4)


def test_boltzmann_and_epsilon_explore_as_said() -> None:
    _, algorithm = q_agent("DQN", action_pdtype="Categorical")
    policy = algorithm.policy
    q = np.tile(np.array([[1.0, 2.0, 0.0]], np.float32), (30_000, 1))
    policy.explore_var = 0.3
    action, logp = policy._epsilon_greedy(q)
    share = np.bincount(action, minlength=3) / len(action)
    assert np.allclose(share, [0.1, 0.8, 0.1], atol=0.01)
    assert np.allclose(np.exp(logp), np.array([0.1, 0.8, 0.1])[action], atol=1e-6)
    policy.explore_var = 0.5
    action, logp = policy._boltzmann(q)
    probability = np.exp(q[0] / 0.5) / np.exp(q[0] / 0.5).sum()
    assert np.allclose(np.bincount(action, minlength=3) / len(action), probability, atol=0.01)
    assert np.allclose(np.exp(logp), probability[action], atol=1e-5)
    policy.explore_var = 0.0
    action, logp = policy._epsilon_greedy(q)
    assert (action == 1).all()
    assert (logp == 0.0).all()


@pytest.mark.parametrize("name", ["DQN", "SARSA"])
def test_needs_discrete_actions(name: str) -> None:
    toy = q_spec(name) if name == "DQN" else spec({"name": "SARSA", **EXPLORE})
    with pytest.raises(SpecError, match=r"agent\.algorithm\.name: '\w+' requires a discrete action.*continuous.*SoftActorCritic"):
        agent_of(toy, info(action=CONTINUOUS))
