"""Tests of nets: shapes, initialisation, recurrence, and the implementation in numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.arc import ArcGraph
from slm_lab.agent.net.body import build_body
from slm_lab.agent.net.passes.direct_layers import ACTIVATIONS
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.policy.policy import build_numpy_actor
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import ConvNetSpec, DuelingConvNetSpec, MLPNetSpec, RecurrentNetSpec, TorchArcNetSpec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import agent_of
from tests.contract.combinations import Case

VECTOR = ObservationSpace((4,))
IMAGE = ObservationSpace((3, 20, 20), "uint8")


def obs(space: ObservationSpace, *batch: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if space.dtype == "uint8":
        return torch.from_numpy(rng.integers(0, 256, (*batch, *space.shape)).astype(np.uint8))
    return torch.from_numpy(rng.normal(size=(*batch, *space.shape)).astype(np.float32))


@pytest.mark.parametrize("activation", [kind.__name__ for kind in ACTIVATIONS])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_fast_path_is_the_net(activation: str, layer_norm: bool) -> None:
    spec = MLPNetSpec(name="MLPNet", hid_layers=[16, 8], hid_layers_activation=activation.lower(), layer_norm=layer_norm)
    net = ActorCriticNet(spec, VECTOR, 4)
    flat = FlatParams(net)
    fast = build_numpy_actor(net.actor_body, net.actor_head)
    assert fast is not None
    x = obs(VECTOR, 9)
    for _ in range(2):
        assert np.allclose(fast(x.numpy()), net.actor(x).detach().numpy(), atol=1e-5)
        flat.param.add_(0.3)  # numpy sees the change, because the memory is shared


@pytest.mark.parametrize(
    "spec",
    [
        MLPNetSpec(name="MLPNet", batch_norm=True),
        MLPNetSpec(name="MLPNet", hid_layers_activation="gelu"),
        RecurrentNetSpec(name="RecurrentNet"),
    ],
)
def test_what_has_no_numpy_actor_acts_through_torch(spec: Any) -> None:
    net = ActorCriticNet(spec, VECTOR, 2)
    assert build_numpy_actor(net.actor_body, net.actor_head) is None


def test_shared_and_separate_bodies() -> None:
    x = obs(VECTOR, 5)
    shared = ActorCriticNet(MLPNetSpec(name="MLPNet", shared=True), VECTOR, 3)
    separate = ActorCriticNet(MLPNetSpec(name="MLPNet"), VECTOR, 3)
    for net in (shared, separate):
        params, value = net(x)
        assert params.shape == (5, 3)
        assert value.shape == (5,)
        assert torch.equal(params, net.actor(x))
        assert torch.equal(value, net.critic(x))
    shared.critic(x).sum().backward()
    assert shared.actor_body.layers[0].weight.grad is not None
    separate.critic(x).sum().backward()
    assert separate.actor_body.layers[0].weight.grad is None


@pytest.mark.parametrize("cell", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("shared", [True, False])
def test_unroll_is_step_by_step(cell: str, shared: bool) -> None:
    """Unrolling a sequence with episode starts equals single steps in which the state is carried and reset by hand."""
    spec = RecurrentNetSpec(name="RecurrentNet", cell_type=cell, fc_hid_layers=[6], rnn_hidden_size=5, rnn_num_layers=2, shared=shared)
    net = ActorCriticNet(spec, VECTOR, 3)
    T, N = 11, 4
    x, first = obs(VECTOR, T, N), torch.rand(T, N) < 0.3
    state0 = torch.randn(N, net.state_size)
    params, value, last = net.unroll(x, first, state0)
    state, never = state0, torch.zeros(1, N, dtype=torch.bool)
    for t in range(T):
        state = torch.where(first[t].unsqueeze(1), 0.0, state)
        p, v, state = net.unroll(x[t : t + 1], never, state)
        assert torch.allclose(p[0], params[t], atol=1e-6)
        assert torch.allclose(v[0], value[t], atol=1e-6)
    assert torch.allclose(state, last, atol=1e-6)


def test_hidden_state_matters_and_resets() -> None:
    net = ActorCriticNet(RecurrentNetSpec(name="RecurrentNet"), VECTOR, 3)
    x = obs(VECTOR, 2, 1)
    no, yes = torch.zeros(2, 1, dtype=torch.bool), torch.tensor([[False], [True]])
    zero = torch.zeros(1, net.state_size)
    carried, fresh = net.unroll(x, no, zero)[0][1], net.unroll(x, yes, zero)[0][1]
    alone = net.unroll(x[1:], no[:1], zero)[0][0]
    assert not torch.allclose(carried, alone, atol=1e-4)
    assert torch.allclose(fresh, alone, atol=1e-6)


def test_conv() -> None:
    spec = ConvNetSpec(name="ConvNet", conv_hid_layers=[[8, 4, 2], [8, 3, 1, 1]], fc_hid_layers=[16], normalize=True)
    net = ActorCriticNet(spec, IMAGE, 4)
    x = obs(IMAGE, 2)
    assert net(x)[0].shape == (2, 4)
    assert torch.allclose(net(x)[0], net(x.float() / 255.0)[0], atol=1e-5)  # uint8 is scaled, floats are not
    with pytest.raises(SpecError, match="channels, height, width"):
        build_body(spec, VECTOR, "actor")
    too_deep = ConvNetSpec(name="ConvNet", conv_hid_layers=[[8, 15, 1], [8, 9, 1]])
    with pytest.raises(SpecError, match=r"conv_hid_layers\[1\]"):
        build_body(too_deep, IMAGE, "actor")


def test_norm_of_convolutions() -> None:
    """By default, images are not normalised and batch norm follows the activation of each convolution but the first.

    Fully connected layers have no batch norm, and DuelingConvNet has batch norm only if the spec sets it.
    """
    layers, x = [[4, 4, 2], [5, 3, 1], [6, 3, 1]], obs(IMAGE, 3)
    for kind, asked, normed in ((ConvNetSpec, None, (1, 2)), (DuelingConvNetSpec, None, ()), (DuelingConvNetSpec, True, (1, 2))):
        keys = {"name": kind.__name__.removesuffix("Spec"), "conv_hid_layers": layers, "fc_hid_layers": [7], "batch_norm": asked}
        body = build_body(kind.model_validate({key: value for key, value in keys.items() if value is not None}), IMAGE, "actor").train()
        convs = [layer for layer in body.modules() if isinstance(layer, torch.nn.Conv2d)]
        (linear,) = [layer for layer in body.modules() if isinstance(layer, torch.nn.Linear)]
        expected = x.float()
        for index, conv in enumerate(convs):
            expected = torch.relu(torch.nn.functional.conv2d(expected, conv.weight, conv.bias, conv.stride))
            if index in normed:
                mean, var = expected.mean((0, 2, 3), keepdim=True), expected.var((0, 2, 3), unbiased=False, keepdim=True)
                expected = (expected - mean) / torch.sqrt(var + 1e-5)
        expected = torch.relu(expected.flatten(1) @ linear.weight.T + linear.bias)
        assert torch.allclose(body(x), expected, atol=1e-4, rtol=1e-4)
    assert ConvNetSpec(name="ConvNet").normalize is DuelingConvNetSpec(name="DuelingConvNet").normalize is False
    assert TorchArcNetSpec(name="TorchArcNet").normalize is False


def test_norm_before_activations() -> None:
    """With batch_norm "before", every hidden layer equals a chain of torch's modules with batch norm before the activation."""
    spec = ConvNetSpec(name="ConvNet", conv_hid_layers=[[4, 4, 2], [5, 3, 1]], fc_hid_layers=[7], batch_norm="before")
    torch.manual_seed(0)
    body = build_body(spec, IMAGE, "actor").train()
    a, b, c = [layer for layer in body.modules() if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)]
    nn = torch.nn
    twin = nn.Sequential(a, nn.BatchNorm2d(4), nn.ReLU(), b, nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), c, nn.BatchNorm1d(7), nn.ReLU())
    assert torch.allclose(body(obs(IMAGE, 3)), twin(obs(IMAGE, 3).float()), atol=1e-5)


ARC = {
    "modules": {
        "body": {"Sequential": [{"LazyLinear": {"out_features": 8}}, {"Tanh": None}]},
        "left": {"LazyLinear": {"out_features": 3}},
        "right": {"Linear": {"in_features": 8, "out_features": 3}},
        "mix": {"Bilinear": [3, 3, 5]},
    },
    "graph": {"input": "x", "modules": {"mix": ["left", "right"], "left": ["body"], "right": ["body"], "body": ["x"]}, "output": "mix"},
}


def test_arc_graph() -> None:
    spec = TorchArcNetSpec(name="TorchArcNet", arc=ARC)
    net = ActorCriticNet(spec, VECTOR, 2)
    assert build_numpy_actor(net.actor_body, net.actor_head) is None  # the graph has branches
    x = obs(VECTOR, 6)
    assert net(x)[0].shape == (6, 2)
    graph = net.actor_body.layers[0]
    assert isinstance(graph, ArcGraph)
    hidden = graph.nodes["body"](x)
    expected = graph.nodes["mix"](graph.nodes["left"](hidden), graph.nodes["right"](hidden))
    assert torch.equal(graph(x), expected)
    FlatParams(net)  # lazy layers are initialised


def test_simple_arc_acts_in_numpy() -> None:
    body = {"Sequential": [{"LazyLinear": {"out_features": 8}}, {"Tanh": {}}]}
    simple = {"modules": {"body": body}, "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"}}
    net = ActorCriticNet(TorchArcNetSpec(name="TorchArcNet", arc=simple), VECTOR, 2)
    fast = build_numpy_actor(net.actor_body, net.actor_head)
    assert fast is not None
    x = obs(VECTOR, 6)
    assert np.allclose(fast(x.numpy()), net.actor(x).detach().numpy(), atol=1e-6)


def test_actor_and_critic_arcs_differ() -> None:
    other = {"modules": {"body": {"Sequential": [{"LazyLinear": {"out_features": 5}}, "ReLU"]}}}
    net = ActorCriticNet(TorchArcNetSpec(name="TorchArcNet", actor_arc=ARC, critic_arc=other), VECTOR, 2)
    assert net.critic_body.features == 5


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"modules": {"body": {"LazyLinear": {"out": 3}}}}, "out"),
        ({"graph": {"input": "x", "modules": {"body": ["y"]}, "output": "body"}}, "no module produces y"),
        ({"graph": {"input": "x", "modules": {"body": ["x"]}, "output": "head"}}, "head"),
        ({"modules": {"body": {"Conv2d": [3, 8, 3]}}, "graph": None}, "cannot run"),
        ({"modules": {"body": {"Unflatten": [1, [2, 2]]}}, "graph": None}, "Flatten"),
        ({"modules": {"body": {"LazyLinear": [3]}, "spare": {"LazyLinear": [3]}}}, "spare: unused module"),
    ],
)
def test_bad_arcs_are_spec_errors(change: dict[str, Any], part: str) -> None:
    arc = {
        "modules": {"body": {"LazyLinear": {"out_features": 3}}},
        "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"},
        **change,
    }
    with pytest.raises(SpecError, match=part):
        build_body(TorchArcNetSpec(name="TorchArcNet", arc=arc), VECTOR, "actor")


def test_a_net_larger_than_memory_is_a_spec_error() -> None:
    case = Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet")
    with pytest.raises(SpecError) as error:
        agent_of(case.spec(2, {"hid_layers": [10**7, 10**7]}), case.info())
    assert [problem.path for problem in error.value.problems] == ["agent"]
