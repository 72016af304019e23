"""Tests of initial weights against torch.nn.init: every layer uses the gain of the hidden activation, and biases are 0."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.q_nets import QNet, build_critics
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import NETS, NetSpec
from tests.agent.helpers import CONTINUOUS, DISCRETE

VECTOR, IMAGE = ObservationSpace((4,)), ObservationSpace((3, 12, 12), "uint8")
GAINS = {"tanh": 5 / 3, "relu": math.sqrt(2), "sigmoid": 1.0, "selu": 0.75, "leaky_relu": math.sqrt(2 / 1.0001), "identity": 1.0}
ARC = {"modules": {"body": {"Sequential": [{"LazyLinear": [7]}, {"LayerNorm": [7]}, {"LazyLinear": [5]}, "Tanh"]}}}
LAYERS: dict[str, dict[str, Any]] = {
    "MLPNet": {"hid_layers": [7, 5]},
    "DuelingMLPNet": {"hid_layers": [7, 5]},
    "HydraMLPNet": {"hid_layers": [[[6], [7]], [5], [[4], [3]]]},
    "ConvNet": {"conv_hid_layers": [[6, 4, 2], [5, 3, 1]], "fc_hid_layers": [9], "batch_norm": False},
    "DuelingConvNet": {"conv_hid_layers": [[6, 4, 2], [5, 3, 1]], "fc_hid_layers": [9]},
    "RecurrentNet": {"fc_hid_layers": [7], "rnn_hidden_size": 5},
    "TorchArcNet": {"arc": ARC},
}


def spec_of(name: str, **keys: Any) -> NetSpec:
    return NETS[name].model_validate({"name": name, **LAYERS[name], **keys})


def net_of(spec: NetSpec) -> nn.Module:
    obs = IMAGE if spec.name.endswith("ConvNet") else VECTOR
    return QNet(spec, obs, (3,)) if spec.dueling else ActorCriticNet(spec, obs, 3)


def assert_orthogonal(weight: Tensor, gain: float) -> None:
    """Assert that the rows (or the columns, if there are fewer) are orthogonal and have length `gain`."""
    rows = weight.detach().flatten(1)
    rows = rows if rows.shape[0] <= rows.shape[1] else rows.T
    assert torch.allclose(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-5)


def layers_of(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, nn.Linear | nn.Conv2d)]


@pytest.mark.parametrize("act", GAINS)
@pytest.mark.parametrize("name", LAYERS)
def test_orthogonal(name: str, act: str) -> None:
    net = net_of(spec_of(name, init_fn="orthogonal_", hid_layers_activation=act.replace("_", "")))
    layers = layers_of(net)
    assert len(layers) >= 4, "output layers are among them"
    for layer in layers:
        assert_orthogonal(layer.weight, GAINS[act])
        assert not layer.bias.any()
    for cell in (module for module in net.modules() if isinstance(module, nn.GRU)):
        assert_orthogonal(cell.weight_ih_l0, GAINS[act])
        assert_orthogonal(cell.weight_hh_l0, GAINS[act])
        assert not cell.bias_ih_l0.any()
        assert not cell.bias_hh_l0.any()


@pytest.mark.parametrize("name", ["MLPNet", "TorchArcNet"])
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_critics(name: str, action: ActionSpace) -> None:
    """Weights of stacked and of separate critics are orthogonal."""
    critics = build_critics(spec_of(name, init_fn="orthogonal_"), VECTOR, action)
    weights = [parameter for parameter in critics.parameters() if parameter.dim() > 1]
    matrices = [matrix for weight in weights for matrix in (weight if weight.dim() == 3 else [weight]) if matrix.shape[1] > 1]
    matrices = [matrix for matrix in matrices if matrix.any()]  # the biases of stacked critics are [C, 1, O]
    assert len(matrices) >= 4
    for matrix in matrices:
        assert_orthogonal(matrix, math.sqrt(2))


@pytest.mark.parametrize("name", LAYERS)
def test_xavier(name: str) -> None:
    """Weights are uniform within gain √(6 / (inputs + outputs)), where inputs and outputs are multiplied by the area of the kernel."""
    torch.manual_seed(0)
    for layer in layers_of(net_of(spec_of(name, init_fn="xavier_uniform_", hid_layers_activation="tanh"))):
        outputs, inputs, *kernel = layer.weight.shape
        bound = 5 / 3 * math.sqrt(6.0 / ((inputs + outputs) * math.prod(kernel)))
        largest = float(layer.weight.detach().abs().max())
        assert largest <= bound * (1 + 1e-6)
        assert largest > 0.8 * bound or layer.weight.numel() < 20


@pytest.mark.parametrize("name", LAYERS)
def test_output_layers_by_their_own_std(name: str) -> None:
    net = net_of(spec_of(name, init_fn="orthogonal_", actor_init_std=0.01, critic_init_std=3.0))
    assert_orthogonal(net.actor_head.linear.weight, 0.01)  # type: ignore[union-attr, arg-type]
    critic = net.value_head if isinstance(net, QNet) else net.critic_head
    assert_orthogonal(layers_of(critic)[-1].weight, 3.0)  # type: ignore[arg-type]


def test_absent_is_torchs_default() -> None:
    torch.manual_seed(3)
    net = ActorCriticNet(spec_of("MLPNet", shared=True), VECTOR, 3)
    torch.manual_seed(3)
    twin = [nn.Linear(4, 7), nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(5, 1)]
    for layer, plain in zip(layers_of(net), twin, strict=True):
        assert torch.equal(layer.weight, plain.weight)
        assert torch.equal(layer.bias, plain.bias)


def test_absent_activation_of_an_arc_is_relu() -> None:
    for layer in layers_of(net_of(spec_of("TorchArcNet", init_fn="orthogonal_"))):
        assert_orthogonal(layer.weight, math.sqrt(2))


@pytest.mark.parametrize("layer", [{"LazyWeightNormLinear": [8]}, {"WeightNormLinear": [4, 8]}])
def test_weight_norm_keeps_its_weights(layer: dict[str, Any]) -> None:
    arc = {"modules": {"body": {"Sequential": [layer, "Tanh"]}}}
    weights = []
    for init_fn in ("orthogonal_", None):
        torch.manual_seed(0)
        net = net_of(spec_of("TorchArcNet", arc=arc, init_fn=init_fn))
        first = next(module for module in net.modules() if type(module).__name__ == "WeightNormLinear")
        weights.append(first.direction)
        assert bool(first.bias.any()) is (init_fn is None)  # type: ignore[union-attr]
    assert torch.equal(*weights)  # type: ignore[arg-type]
