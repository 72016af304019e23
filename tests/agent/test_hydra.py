"""Tests of HydraMLPNet: heads that read the observation, a common body, and a tail for each output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.body import build_body
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.policy.policy import build_numpy_actor
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import HydraMLPNetSpec
from tests.agent.helpers import ToyEnv, agent_of, drive, info, spec

VECTOR, HEADS, COMMON = ObservationSpace((4,)), [[6, 5], [7]], [8]


def hydra(tails: list[list[int]], heads: list[list[int]] = HEADS, **keys: Any) -> HydraMLPNetSpec:
    return HydraMLPNetSpec(name="HydraMLPNet", hid_layers=[heads, COMMON, tails], hid_layers_activation="tanh", **keys)


def linears(module: torch.nn.Module | None) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of each Linear layer of a module, in order."""
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, torch.nn.Linear)]


TRUNK = [(4, 6), (6, 5), (4, 7), (12, 8)]


@pytest.mark.parametrize(
    ("tails", "actor", "critic", "outputs"),
    [
        ([], [], [], (8, 8)),
        ([[3]], [(8, 3)], [(8, 3)], (3, 3)),
        ([[3], [9, 2]], [(8, 3)], [(8, 9), (9, 2)], (3, 2)),
        ([[], [9]], [], [(8, 9)], (8, 9)),
    ],
)
def test_layers_of_each_role(
    tails: list[list[int]], actor: list[tuple[int, int]], critic: list[tuple[int, int]], outputs: tuple[int, int]
) -> None:
    separate = ActorCriticNet(hydra(tails), VECTOR, 2)
    assert linears(separate.actor_body) == TRUNK + actor
    assert linears(separate.critic_body) == TRUNK + critic
    assert linears(separate.actor_head) == [(outputs[0], 2)]
    assert linears(separate.critic_head) == [(outputs[1], 1)]
    shared = ActorCriticNet(hydra(tails, shared=True), VECTOR, 2)
    assert shared.critic_body is None
    assert linears(shared.actor_body) == TRUNK
    assert sorted(linears(shared.actor_head)) == sorted([*actor, (outputs[0], 2)])
    assert linears(shared.critic_head) == [*critic, (outputs[1], 1)]
    values = build_body(hydra(tails, shared=True), VECTOR, "actor")  # of a Q-net: one output, one tail
    assert linears(values) == TRUNK + actor


def test_it_computes_what_it_says() -> None:
    """Outputs equal those computed by hand: the heads in parallel, then body, tail and output layer."""
    net = ActorCriticNet(hydra([[3], [9]], shared=True), VECTOR, 2)
    layers = [m for m in net.modules() if isinstance(m, torch.nn.Linear)]
    by_size = {(m.in_features, m.out_features): m for m in layers}
    x = torch.randn(5, 4)

    def run(y: torch.Tensor, *sizes: tuple[int, int]) -> torch.Tensor:
        for size in sizes:
            y = torch.tanh(by_size[size](y))
        return y

    common = run(torch.cat([run(x, (4, 6), (6, 5)), run(x, (4, 7))], dim=1), (12, 8))
    params, value = net(x)
    assert torch.allclose(params, by_size[3, 2](run(common, (8, 3))), atol=1e-6)
    assert torch.allclose(value, by_size[9, 1](run(common, (8, 9))).squeeze(1), atol=1e-6)
    assert torch.equal(net.actor(x), params)
    assert torch.equal(net.critic(x), value)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("norm", [{}, {"layer_norm": True}, {"batch_norm": True}])
@pytest.mark.parametrize("tails", [[], [[3]], [[3], [9, 2]]])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_every_parameter_has_a_gradient(shared: bool, norm: dict[str, bool], tails: list[list[int]], shape: tuple[int, ...]) -> None:
    net = ActorCriticNet(hydra(tails, shared=shared, **norm), ObservationSpace(shape), 2)
    flat = FlatParams(net)
    params, value = net(torch.randn(6, *shape))
    assert params.shape == (6, 2)
    assert value.shape == (6,)
    (params.square().sum() + value.square().sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        # a bias before batch norm has no gradient by design
        if not norm.get("batch_norm") or not name.endswith("bias"):
            assert float(parameter.grad.abs().max()) > 0.0, name
    assert len(net.actor_parameters()) + len(net.critic_parameters()) == len(list(net.parameters()))
    assert float(flat.grad.abs().max()) > 0.0


def test_tails_are_apart() -> None:
    """The critic's gradient reaches the shared body and the critic's tail, but not the actor's tail."""
    net = ActorCriticNet(hydra([[3], [9]], shared=True), VECTOR, 2)
    net.critic(torch.randn(6, 4)).sum().backward()
    assert all(p.grad is not None for p in [*net.actor_body.parameters(), *net.critic_parameters()])
    assert all(p.grad is None for p in net.actor_head.parameters())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tails", [[], [[3]]])
def test_fast_path_of_a_chain(shared: bool, tails: list[list[int]]) -> None:
    chain = ActorCriticNet(hydra(tails, heads=[[6, 5]], shared=shared), VECTOR, 2)
    fast = build_numpy_actor(chain.actor_body, chain.actor_head)
    assert fast is not None
    x = torch.randn(5, 4)
    assert np.allclose(fast(x.numpy()), chain.actor(x).detach().numpy(), atol=1e-6)
    branched = ActorCriticNet(hydra(tails, shared=shared), VECTOR, 2)
    assert build_numpy_actor(branched.actor_body, branched.actor_head) is None


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads", [HEADS, [[6]], [[], [6]]])
def test_an_agent_learns_with_it(shared: bool, heads: list[list[int]]) -> None:
    net = {"name": "HydraMLPNet", "hid_layers": [heads, COMMON, [[3], [4]]], "shared": shared}
    agent = agent_of(spec({"name": "PPO", "time_horizon": 8, "minibatch_size": 12}, net), info(3))
    before = agent.weights()
    assert len(drive(agent, ToyEnv(info(3), 2), 20)) == 2
    after = agent.weights()
    assert all(not torch.equal(before[name], after[name]) for name in before)
