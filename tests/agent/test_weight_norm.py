"""Tests of weight normalisation against torch's implementation, and in a TorchArc graph."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.normalization import LazyWeightNormLinear, WeightNormLinear
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import TorchArcNetSpec


def test_as_torchs_parametrization() -> None:
    """Outputs and gradients, at the start and after a step, are those of torch's weight_norm of nn.Linear drawn with the same seed."""
    torch.manual_seed(1)
    layer = WeightNormLinear(4, 3)
    torch.manual_seed(1)
    plain = nn.Linear(4, 3)
    x = torch.randn(6, 4)
    assert torch.allclose(layer(x), plain(x), atol=1e-6)
    twin = weight_norm(plain)
    ours, theirs = torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        for net, optimizer in ((layer, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert torch.allclose(layer(x), twin(x), atol=1e-5)
    assert torch.allclose(layer.length, twin.parametrizations.weight.original0, atol=1e-5)  # type: ignore[union-attr]
    assert not torch.allclose(layer(x), x @ layer.direction.T + layer.bias)


def test_lazy_takes_its_size() -> None:
    layer = LazyWeightNormLinear(5, bias=False)
    assert layer(torch.randn(2, 7)).shape == (2, 5)
    assert type(layer) is WeightNormLinear
    assert layer.bias is None
    assert torch.allclose(layer.length.flatten(), layer.direction.norm(dim=1))


def test_in_a_graph() -> None:
    layers = [{"LazyWeightNormLinear": {"out_features": 8}}, "Tanh", {"WeightNormLinear": [8, 6]}, "Tanh"]
    net = ActorCriticNet(TorchArcNetSpec(name="TorchArcNet", arc={"modules": {"body": {"Sequential": layers}}}), ObservationSpace((3,)), 2)
    before = net(x := torch.randn(5, 3))[0]
    flat = FlatParams(net)
    assert torch.equal(net(x)[0], before)
    net(x)[0].square().sum().backward()
    assert flat.grad.abs().sum() > 0
