"""Tests of action masks: invalid actions have probability 0 and no gradient, and no algorithm or action rule chooses one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab import Session, load_spec
from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.q_nets import QNet
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.ops.distributions import Categorical, MultiCategorical
from slm_lab.agent.ops.masks import MASKED, ActionMask
from slm_lab.agent.ops.objective import (
    Objective,
    ObjectiveCoefficients,
    ObjectiveTerms,
    differentiate,
    discrete_actor_loss,
    discrete_soft_value,
)
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.masks import draw_valid_actions, uniform_logp
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import DuelingMLPNetSpec, MLPNetSpec, RecurrentNetSpec

ROWS, ACTIONS, INPUTS = 6, 5, 3
SPACE = ObservationSpace((INPUTS + ACTIONS,), mask=(INPUTS, INPUTS + ACTIONS))
MLP = {"name": "MLPNet", "hid_layers": [8], "optim_spec": {"name": "Adam", "lr": 0.01}}


def observations(seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, ACTIONS)) < 0.5
    mask[:, 1] = True
    return torch.from_numpy(np.concatenate([rng.normal(size=(ROWS, INPUTS)), mask], axis=1).astype(np.float32))


def valid_of(obs: torch.Tensor) -> torch.Tensor:
    return obs[:, INPUTS:] != 0


def test_log_probabilities_entropies_and_gradients_are_those_of_the_renormalised_distribution() -> None:
    """The reference for each row is a Categorical of torch.distributions over the valid logits of the row."""
    obs, generator = observations(), torch.Generator().manual_seed(1)
    valid, logits = valid_of(obs), torch.randn(ROWS, ACTIONS, generator=generator)
    action, advantage = torch.ones(ROWS, dtype=torch.int64), torch.randn(ROWS, generator=generator)
    coefs, distribution = ObjectiveCoefficients(0.0, 0.1), Categorical(ActionSpace("discrete", (ACTIONS,)))
    leaf = logits.clone().requires_grad_()
    loss = torch.zeros(())
    for row in range(ROWS):
        chosen = torch.distributions.Categorical(logits=leaf[row][valid[row]])
        place = int(valid[row][:1].sum())  # index of action 1 among the valid actions
        loss = loss - (advantage[row] * chosen.log_prob(torch.tensor(place)) + 0.1 * chosen.entropy()) / ROWS
    loss.backward()

    def by_autograd(params: torch.Tensor, value: torch.Tensor) -> ObjectiveTerms:
        logp, entropy = distribution.evaluate(params, action)
        policy_loss = -(logp * advantage).mean()
        return ObjectiveTerms(policy_loss - 0.1 * entropy.mean(), policy_loss, 0.0, entropy.mean(), logp)

    masked, nothing = ActionMask.from_observation_space(SPACE)(logits, obs), torch.zeros(ROWS)  # type: ignore[misc]
    with ignore_float_errors():
        closed = Objective(distribution)([masked, nothing], action, nothing, advantage, nothing, coefs)
    for found in (closed, differentiate(by_autograd, [masked, nothing])):
        assert float(found.terms.loss) == pytest.approx(loss.item(), rel=1e-5)
        gradient = torch.as_tensor(np.asarray(found.outputs[0]))
        np.testing.assert_allclose(gradient, leaf.grad, atol=1e-6)
        assert (gradient[~valid] == 0).all()


def test_discrete_soft_values_and_losses_ignore_invalid_actions() -> None:
    obs = observations()
    valid, generator = valid_of(obs), torch.Generator().manual_seed(2)
    logits, q = torch.randn(ROWS, ACTIONS, generator=generator), torch.randn(ROWS, ACTIONS, generator=generator)
    masked = ActionMask.from_observation_space(SPACE)(logits, obs)  # type: ignore[misc]
    values = discrete_soft_value(masked, q, 0.2)
    found = discrete_actor_loss(masked, q, 0.2, penalty=0.5)
    for row in range(ROWS):
        logp = torch.log_softmax(logits[row][valid[row]], 0)
        expected = (logp.exp() * (q[row][valid[row]] - 0.2 * logp)).sum()
        assert values[row].item() == pytest.approx(expected.item(), rel=1e-5)
    assert (found.grad_params_BA[~valid] == 0).all()
    assert torch.isfinite(found.loss)


@pytest.mark.parametrize("critic", [True, False])
def test_the_passes_of_a_net_agree_and_invalid_outputs_have_no_gradient(critic: bool) -> None:
    net = ActorCriticNet(MLPNetSpec.model_validate(MLP), SPACE, ACTIONS, critic=critic)
    flat = FlatParams(net)
    net.enable_graph_free_pass(flat)
    obs, weight = observations(), net.actor_head.linear.weight
    valid = valid_of(obs)
    only = valid.any(dim=0)  # action 0 may be invalid in all rows used below
    obs[:, INPUTS] = 0.0
    valid, only = valid_of(obs), valid_of(obs).any(dim=0)
    graph, direct = net(obs)[0], net.forward_pass(obs)
    np.testing.assert_allclose(graph.detach(), direct.values[0], rtol=1e-5)
    assert (graph[~valid] == MASKED).all()
    assert (graph[valid] > MASKED).all()
    flat.grad.zero_()
    direct.backward(np.ones((ROWS, ACTIONS), np.float32), np.zeros(ROWS, np.float32))
    own = weight.grad.clone()  # type: ignore[union-attr]
    flat.grad.zero_()
    graph.sum().backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(own, weight.grad, rtol=1e-4, atol=1e-6)
    assert not own[~only].any()
    assert own[only].any()


def test_masks_do_not_reach_the_layers() -> None:
    """Layers do not read the mask: equal numbers with different masks give equal features, in feed-forward and recurrent nets."""
    one, other = observations(), observations()
    other[:, INPUTS:] = 1.0
    for model, keys in ((MLPNetSpec, MLP), (RecurrentNetSpec, {"name": "RecurrentNet", "rnn_hidden_size": 4})):
        net = ActorCriticNet(model.model_validate(keys), SPACE, ACTIONS)
        if net.state_size:
            outputs = [
                net.unroll(obs[None], torch.ones(1, ROWS, dtype=torch.bool), torch.zeros(ROWS, net.state_size)) for obs in (one, other)
            ]
            (params, value, _), (whole, same, _) = outputs
            params, whole = params[0], whole[0]
        else:
            (params, value), (whole, same) = net(one), net(other)
        torch.testing.assert_close(value, same)
        torch.testing.assert_close(params, torch.where(valid_of(one), whole, MASKED))


def test_action_values_of_a_dueling_net_are_centred_over_the_valid_actions() -> None:
    net, obs = QNet(DuelingMLPNetSpec.model_validate(MLP | {"name": "DuelingMLPNet"}), SPACE, (ACTIONS,)), observations()
    valid = valid_of(obs)
    assert net.value_head is not None
    features = net.actor_body(obs)
    value, advantage = net.value_head(features), net.actor_head(features)
    q = net.critic(obs)
    for row in range(ROWS):
        own = advantage[row][valid[row]]
        torch.testing.assert_close(q[row][valid[row]], value[row] + own - own.mean())
    assert (q[~valid] == MASKED).all()


def masked_policy(rule: Any, nvec: tuple[int, ...] = (ACTIONS,)) -> tuple[Policy, np.ndarray, np.ndarray]:
    """Return a policy that acts by action values, many equal observations, and their mask."""
    action = ActionSpace("discrete", nvec) if len(nvec) == 1 else ActionSpace("multi_discrete", nvec, len(nvec))
    size = sum(nvec)
    space = ObservationSpace((INPUTS + size,), mask=(INPUTS, INPUTS + size))
    torch.manual_seed(0)
    net = QNet(MLPNetSpec.model_validate(MLP), space, nvec)
    distribution = Categorical(action) if len(nvec) == 1 else MultiCategorical(action)
    policy = Policy(
        action, np.random.default_rng(0), net, distribution, rule, flat=FlatParams(net), mask=ActionMask.from_observation_space(space)
    )
    mask = np.tile(np.array([0, 1, 1, 0, 1] if size == ACTIONS else [1, 0, 1, 0, 1, 1, 0], np.float32), (6000, 1))
    return policy, np.concatenate([np.full((6000, INPUTS), 0.3, np.float32), mask], axis=1), mask[0] != 0


def test_epsilon_greedy_explores_the_valid_actions_alone_and_equally() -> None:
    policy, obs, valid = masked_policy("epsilon_greedy")
    policy.explore_var = 0.6
    out = policy.act(obs)
    share = np.bincount(out.action_N, minlength=ACTIONS) / len(obs)
    greedy = int(policy.act(obs[:1], deterministic=True).action_N[0])
    expected = np.where(valid, 0.2, 0.0)
    expected[greedy] += 0.4
    assert (share[~valid] == 0).all()
    np.testing.assert_allclose(share, expected, atol=0.03)
    np.testing.assert_allclose(np.exp(out.logp_N), expected[out.action_N], rtol=1e-5)


def test_boltzmann_uniform_and_random_actions_are_valid() -> None:
    for rule, uniform in (("boltzmann", False), ("default", False), ("default", True), ("epsilon_greedy", True)):
        policy, obs, valid = masked_policy(rule)
        policy.explore_var, policy.uniform = 0.01, uniform
        out = policy.act(obs)
        assert valid[out.action_N].all()
        elsewhere = policy.act_from_params(policy.forward(obs, None)[0], None)  # inference in another process
        assert valid[elsewhere.action_N].all()
        if uniform:
            np.testing.assert_allclose(out.logp_N, -np.log(3), rtol=1e-6)
    nothing = Policy(policy.action, np.random.default_rng(0), mask=policy.mask)
    assert set(nothing.act(obs).action_N) == {1, 2, 4}


def test_each_component_of_a_multi_discrete_action_has_its_mask() -> None:
    policy, obs, _ = masked_policy("epsilon_greedy", (3, 4))
    policy.explore_var = 0.8
    out = policy.act(obs)
    assert set(out.action_N[:, 0]) == {0, 2}
    assert set(out.action_N[:, 1]) == {1, 2}
    greedy = policy.act(obs[:1], deterministic=True).action_N[0]
    same = (out.action_N == greedy).all(axis=1)
    np.testing.assert_allclose(np.exp(out.logp_N), np.where(same, 0.4, 0.2), rtol=1e-5)


def test_uniform_valid_actions_by_hand() -> None:
    valid = np.array([[1, 0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 1, 1, 1]], bool)
    drawn = np.stack([draw_valid_actions(valid, (3, 4), np.random.default_rng(seed)) for seed in range(400)])
    assert set(map(tuple, drawn[:, 0].tolist())) == {(0, 1), (2, 1)}
    assert set(map(tuple, drawn[:, 1].tolist())) == {(1, 0), (1, 1), (1, 2), (1, 3)}
    np.testing.assert_allclose(uniform_logp(valid, (3, 4)), -np.log([2, 4]), rtol=1e-6)


FORBIDDING = {"name": "tests.env.masked:Forbidding-v0"}
NETS: dict[str, dict[str, Any]] = {
    "mlp": MLP,
    "dueling": MLP | {"name": "DuelingMLPNet"},
    "recurrent": {"name": "RecurrentNet", "rnn_hidden_size": 8, "seq_len": 4},
    "conv": {"name": "ConvNet", "conv_hid_layers": [[4, 3, 2]], "fc_hid_layers": [8]},
}
COMPONENTS = {"name": "tests.env.masked:Components-v0"}
RUNS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "ppo": ({"name": "PPO"}, "mlp", FORBIDDING | {"where": "info", "action_mask": "action_mask"}),
    "ppo recurrent": ({"name": "PPO"}, "recurrent", FORBIDDING | {"num_envs": 1}),
    "ppo images": ({"name": "PPO", "time_horizon": 32}, "conv", FORBIDDING | {"pixels": True, "max_frame": 128}),
    "a2c": ({"name": "ActorCritic"}, "mlp", FORBIDDING | {"normalize_obs": True}),
    "reinforce": ({"name": "Reinforce"}, "mlp", FORBIDDING),
    "dqn": ({"name": "DQN"}, "dueling", FORBIDDING),
    "double dqn, boltzmann": (
        {"name": "DoubleDQN", "action_policy": "boltzmann", "explore_var_spec": {"name": "no_decay", "start_val": 1.0}},
        "mlp",
        FORBIDDING,
    ),
    "dqn recurrent": ({"name": "DQN"}, "recurrent", FORBIDDING),
    "sarsa": ({"name": "SARSA"}, "mlp", FORBIDDING),
    "sac": ({"name": "SoftActorCritic", "training_start_step": 40}, "mlp", FORBIDDING),
    "imitation": ({"name": "PPOSIL"}, "mlp", FORBIDDING),
    "random": ({"name": "Random"}, "mlp", FORBIDDING),
    "components": ({"name": "PPO"}, "mlp", COMPONENTS),
    "components, values": ({"name": "DQN"}, "mlp", COMPONENTS),
    "combinations": ({"name": "DQN"}, "mlp", COMPONENTS | {"joint": True}),
}
QUICK = ("ppo", "ppo images", "dqn", "sac", "components", "combinations")


def session_of(folder: Path, algorithm: dict[str, Any], net: dict[str, Any], env: dict[str, Any], **meta: Any) -> Session:
    agent = {"algorithm": algorithm, "net": net}
    body = {"agent": agent, "env": {"max_frame": 400, "num_envs": 2, **env}, "meta": {"max_session": 1, "log_frequency": 100, **meta}}
    file = folder / "spec.json"
    file.write_text(json.dumps({"masked": body}))
    return Session(load_spec(str(file), "masked")).build()


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS])
def test_no_algorithm_takes_an_invalid_action(name: str, tmp_path: Path) -> None:
    """Runs end without the error that the envs raise for an invalid action."""
    algorithm, net, env = RUNS[name]
    result = session_of(tmp_path, algorithm, NETS[net], env).run()
    assert result.frame == env.get("max_frame", 400)


def test_the_target_entropy_of_soft_actor_critic_is_a_fraction_of_what_valid_actions_allow(tmp_path: Path) -> None:
    """With two of 40 valid actions the entropy is at most ln 2. A target of 0.6 ln 40 exceeds it, so α would grow without bound."""
    for keys, scale in (({}, np.log(2) / np.log(40)), ({"target_entropy": 0.3}, 1.0)):
        session = session_of(tmp_path, {"name": "SoftActorCritic", "training_start_step": 40, **keys}, MLP, FORBIDDING | {"max_frame": 64})
        session.run()
        (learner,) = session.learners
        algorithm: Any = learner.agent.algorithm
        assert algorithm._entropy_scale(algorithm.memory.sample()) == pytest.approx(scale)


@pytest.mark.slow
def test_a_masked_policy_learns(tmp_path: Path) -> None:
    """PPO learns in 100,000 steps without an invalid action. Two of 40 actions are valid, so random actions are right half of the time."""
    net = MLP | {"hid_layers": [64], "optim_spec": {"name": "Adam", "lr": 0.003}}
    env = FORBIDDING | {"max_frame": 100_000, "num_envs": 8}
    session = session_of(tmp_path, {"name": "PPO"}, net, env, log_frequency=10_000)
    assert session.run().rows[-1]["total_reward"] > 17


def test_the_critic_alone_reads_privileged_entries(tmp_path: Path) -> None:
    """A privileged entry changes values, but neither the outputs of the actor nor their gradients."""
    env = {"name": "tests.env.masked:Privileged-v0", "critic_keys": ["secret"], "max_frame": 64}
    for algorithm in ({"name": "PPO", "time_horizon": 16}, {"name": "SoftActorCritic", "training_start_step": 20}):
        session = session_of(tmp_path, algorithm, MLP, env)
        session.run()
        (learner,) = session.learners
        net = learner.agent.policy.net
        obs = torch.randn(4, 5)
        other = obs.clone()
        other[:, 2:] += 1.0  # the entries of `state` come first
        assert net is not None
        torch.testing.assert_close(net.actor(obs), net.actor(other))
        if algorithm["name"] == "PPO":
            assert not torch.equal(net.critic(obs), net.critic(other))
        else:
            critics = learner.agent.algorithm.critics  # type: ignore[attr-defined]
            action = torch.zeros(4, 2)
            assert not torch.equal(critics(obs, action), critics(other, action))
