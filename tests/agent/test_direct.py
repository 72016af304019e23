"""Tests of passes without an autograd graph against passes with one."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.passes import direct, direct_layers
from slm_lab.agent.net.passes.direct import CriticsPass, GraphFreePass, GraphFreeSequence
from slm_lab.agent.net.passes.direct_layers import ACTIVATIONS, NUMPY_PRODUCT_ROWS, NUMPY_PRODUCT_SIZE, GraphFreeLinear
from slm_lab.agent.net.q_nets import QCritics, SeparateCritics, build_critics
from slm_lab.agent.ops.arrays import as_array, ignore_float_errors
from slm_lab.agent.ops.autograd import GraphPass
from slm_lab.agent.ops.linear import MatmulMode
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import HydraMLPNetSpec, MLPNetSpec, NetSpec, RecurrentNetSpec, TorchArcNetSpec
from tests.agent.helpers import MLP, drive, gathered
from tests.agent.test_algorithms import ACTOR_CRITIC, PPO, REINFORCE
from tests.agent.test_soft_actor_critic import BRN
from tests.agent.test_soft_actor_critic import build as build_sac

VECTOR = ObservationSpace((5,))
CONTINUOUS, DISCRETE = ActionSpace("continuous", (), 2), ActionSpace("discrete", (3,), 1)


def build(rows: int = 150, critic: bool = True, **keys: Any) -> tuple[ActorCriticNet, FlatParams, torch.Tensor]:
    torch.manual_seed(2)
    net = ActorCriticNet(MLPNetSpec.model_validate({"name": "MLPNet", "hid_layers": [160, 144], **keys}), VECTOR, 3, critic=critic)
    flat = FlatParams(net)
    net.enable_graph_free_pass(flat)
    return net, flat, torch.randn(rows, 5)


def near(found: Any, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    """Assert equality up to the rounding errors of sums of several hundred terms."""
    scale = max(1.0, float(expected.detach().abs().max()))
    np.testing.assert_allclose(as_array(found), expected.detach().numpy(), rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("matmul_mode", [MatmulMode(), MatmulMode(onednn=1000)], ids=["torch", "onednn"])
@pytest.mark.parametrize("small", [True, False], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"hid_layers": [7]},
        {"layer_norm": True},
        {"shared": True},
        {"shared": True, "hid_layers_activation": "elu"},
        {"shared": True, "hid_layers": [300], "layer_norm": True, "out_layer_activation": "tanh"},
        *(
            {"hid_layers_activation": kind.__name__.lower(), "out_layer_activation": "tanh"}
            for kind, one in ACTIVATIONS.items()
            if one.backward
        ),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_autograd(
    keys: dict[str, Any], small: bool, matmul_mode: MatmulMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients equal those of autograd, also for a subset of rows whose gradients are added, and after parameter changes."""
    monkeypatch.setattr(direct_layers, "NUMPY_PRODUCT_ROWS", 512 if small else 0)
    net, flat, obs = build(**keys)
    for body in net.bodies:
        body.matmul_mode.onednn = matmul_mode.onednn
    flat.param.add_(torch.rand_like(flat.param), alpha=0.1)
    grad_params, grad_value, some = torch.randn(150, 3), torch.randn(150), np.array([0, 3, 149])
    outputs = net(obs)
    torch.autograd.backward(outputs, [grad_params, grad_value])
    torch.autograd.backward([x[some] for x in net(obs)], [grad_params[some], grad_value[some]])
    expected = flat.grad.clone()
    flat.grad.zero_()
    found, again = net.forward_pass(obs), net.forward_pass(obs)
    assert isinstance(found, GraphFreePass)
    near(found.values[0], outputs[0])
    near(found.values[1], outputs[1])
    near(net.values(obs), outputs[1])
    found.backward(grad_params.numpy().copy(), grad_value.numpy().copy())
    again = again.select_rows(slice(150)).select_rows(some)
    assert again.values[0].shape == (3, 3)
    again.backward(grad_params.numpy()[some], grad_value.numpy()[some])
    near(flat.grad, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_a_pickled_net_has_the_same_outputs_and_takes_a_graph(shared: bool) -> None:
    net, _, obs = build(shared=shared)
    copy = pickle.loads(pickle.dumps(net))
    assert copy.direct.get() is None
    for own, other in zip(net(obs), copy(obs), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("vectorized", [True, False], ids=["expm1", "exp"])
@pytest.mark.parametrize(("numpy_size", "torch_size"), [(0, 16384), (0, 10**6), (10**6, 16384)], ids=["many", "medium", "few"])
def test_elu(numpy_size: int, torch_size: int, vectorized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ELU equals torch's near 0, for numbers that are not finite, and at both ends of the range of float32."""
    monkeypatch.setattr(direct_layers, "VECTORIZED_EXPM1", vectorized)
    monkeypatch.setattr(direct_layers, "NUMPY_ELU_SIZE", numpy_size)
    monkeypatch.setattr(direct_layers, "TORCH_ACTIVATION_SIZE", torch_size)
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=20000), -np.logspace(-38, 38, 1000), [np.nan, np.inf, -np.inf, 0.0, -0.0]]).astype(np.float32)
    expected = torch.nn.functional.elu(torch.from_numpy(x)).numpy()
    found = x.copy()
    with ignore_float_errors():
        ACTIVATIONS[torch.nn.ELU].forward(found, found)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_body_with_tails_of_actor_and_critic(dtype: str) -> None:
    """Tails are computed in float32, and one of the two outputs may have no gradient."""
    torch.manual_seed(0)
    spec = HydraMLPNetSpec.model_validate(
        {"name": "HydraMLPNet", "hid_layers": [[[24]], [16], [[12, 8], [6]]], "shared": True, "dtype": dtype}
    )
    net = ActorCriticNet(spec, VECTOR, 3)
    flat = FlatParams(net)
    net.enable_graph_free_pass(flat)
    obs, grads = torch.randn(30, 5), [torch.randn(30, 3), torch.randn(30)]
    for used in ([0], [1], [0, 1]):
        outputs = net(obs)
        torch.autograd.backward([outputs[i] for i in used], [grads[i] for i in used])
        expected = flat.grad.clone()
        flat.grad.zero_()
        found = net.forward_pass(obs)
        assert isinstance(found, GraphFreePass)
        actor, critic = net.direct.fast or ()
        assert actor.trunk is critic.trunk
        assert [layer.matmul_mode.bfloat16 for layer in actor.trunk.layers if isinstance(layer, GraphFreeLinear)] == 2 * [
            dtype == "bfloat16"
        ]
        assert not any(layer.matmul_mode.bfloat16 for layer in actor.layers if isinstance(layer, GraphFreeLinear))
        for value, output in zip(found.values, outputs, strict=True):
            near(value, output, 1e-4 if dtype == "float32" else 2e-2)
        found.backward(*(grads[i].numpy().copy() if i in used else None for i in range(2)))
        assert float((flat.grad - expected).norm() / expected.norm()) < (1e-5 if dtype == "float32" else 5e-2)
        flat.grad.zero_()


def test_which_products_are_small() -> None:
    def rows(*sizes: int) -> int:
        net = torch.nn.Sequential(torch.nn.Linear(*sizes))
        flat = FlatParams(net)
        mlp = GraphFreeSequence.from_modules(list(net), MatmulMode())
        assert isinstance(mlp.layers[0], GraphFreeLinear)
        return mlp.layers[0].numpy_rows if flat.size else 0

    assert rows(64, 64) == NUMPY_PRODUCT_SIZE // 64**2
    assert rows(8, 8) == NUMPY_PRODUCT_ROWS
    assert rows(256, 256) == 32


RENORM_NET = {
    "name": "TorchArcNet",
    "arc": {
        "modules": {
            "body": {"Sequential": [{"LazyBatchRenorm1d": {"warmup_steps": 3}}, {"LazyLinear": {"out_features": 8}}, {"Tanh": None}]}
        }
    },
    "optim_spec": {"name": "Adam", "lr": 0.01},
}


@pytest.mark.parametrize("net", [MLP, RENORM_NET], ids=["mlp", "batch renorm"])
@pytest.mark.parametrize("algorithm", [REINFORCE, ACTOR_CRITIC, PPO], ids=lambda algorithm: algorithm["name"])
def test_an_update_is_that_of_autograd(algorithm: dict[str, Any], net: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, including those of moving statistics, equal those of autograd: the net learns in training mode."""
    after = []
    for on in (True, False):
        monkeypatch.setattr(direct, "DIRECT", on)
        agent = gathered(algorithm, "OnPolicyReplay" if algorithm is REINFORCE else "OnPolicyBatchReplay", net=net)
        start, passes = agent.algorithm.trainer.flat.buffer.clone(), list[Any]()
        forward_pass = agent.algorithm.net.forward_pass
        agent.algorithm.net.forward_pass = lambda *args, own=forward_pass, seen=passes, **keys: seen.append(own(*args, **keys)) or seen[-1]
        metrics, flat = agent.update(), agent.algorithm.trainer.flat
        assert passes
        assert all(isinstance(one, GraphFreePass if on else GraphPass) for one in passes)
        assert torch.equal(flat.buffer, start) == (net is MLP)
        after.append((metrics.loss, metrics.grad_norm, flat.param.clone(), flat.buffer.clone()))
    assert after[0][:2] == pytest.approx(after[1][:2], rel=1e-4)
    for own, expected in zip(after[0][2:], after[1][2:], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["CrossQ", "SoftActorCritic"])
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_updates_of_critics_with_batch_renorm_are_those_of_autograd(
    action: ActionSpace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = []
    for on in (True, False):
        monkeypatch.setattr(direct, "DIRECT", on)
        torch.manual_seed(3)
        agent, env = build_sac(action, name=name, critic_net=BRN)
        metrics = drive(agent, env, 12)
        algorithm = agent.algorithm
        flats = [algorithm.trainer.flat, algorithm.actor_trainer.flat]
        after.append(([m.loss for m in metrics], [x.clone() for flat in flats for x in (flat.param, flat.buffer)]))
    assert len(after[0][0]) > 3
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-3)
    assert after[0][1][1].any()
    for own, expected in zip(after[0][1], after[1][1], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


def arc(*layers: dict[str, Any]) -> NetSpec:
    graph = {"input": "x", "modules": {"body": ["x"]}, "output": "body"}
    return TorchArcNetSpec.model_validate(
        {"name": "TorchArcNet", "arc": {"modules": {"body": {"Sequential": list(layers)}}, "graph": graph}}
    )


def critic_specs(action: ActionSpace) -> dict[str, NetSpec]:
    linear = [{"LazyLinear": {"out_features": size}} for size in (40, 30)]
    norm = {"LayerNorm": {"normalized_shape": 7 if action is CONTINUOUS else 5}}
    return {
        "relu": MLPNetSpec(name="MLPNet", hid_layers=[40, 30]),
        "tanh": MLPNetSpec(name="MLPNet", hid_layers=[40, 30], hid_layers_activation="tanh"),
        "norm": MLPNetSpec(name="MLPNet", hid_layers=[40, 30], layer_norm=True),
        "arc": arc(linear[0], {"ReLU": None}, linear[1], {"Tanh": None}),
        "norm first": arc(norm, linear[0], {"ReLU": None}),
    }


def both_passes(
    critics: QCritics, flat: FlatParams, obs: torch.Tensor, actions: torch.Tensor | None, **how: bool
) -> tuple[CriticsPass, GraphPass]:
    """Return the pass without a graph and the pass through the modules."""
    graph = critics.forward_pass(obs, actions, **how)
    critics.enable_graph_free_pass(flat)
    graph_free_pass = critics.forward_pass(obs, actions, **how)
    critics.direct = direct.FastPass()
    assert isinstance(graph, GraphPass)
    assert isinstance(graph_free_pass, CriticsPass)
    return graph_free_pass, graph


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "stacked"])
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("name", critic_specs(CONTINUOUS))
def test_critics_are_those_of_autograd(name: str, action: ActionSpace, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients equal those of autograd. Gradients of actions are checked for all, some and none of the rows of a critic."""
    monkeypatch.setattr(direct, "SEPARATE_CRITICS_SIZE", 0 if apart else 2**40)
    torch.manual_seed(1)
    critics = build_critics(critic_specs(action)[name], VECTOR, action)
    flat = FlatParams(critics)
    flat.param.add_(torch.rand_like(flat.param), alpha=0.1)
    obs, actions = torch.randn(21, 5), torch.randn(21, 2) if action is CONTINUOUS else None
    found, expected = both_passes(critics, flat, obs, actions)
    assert found._is_stack != (apart or isinstance(critics, SeparateCritics))
    near(found.values[0], expected.values[0])
    grads = []
    for one in (found, expected):
        flat.grad.fill_(0.5)  # gradients are accumulated
        one.backward(torch.ones_like(one.values[0]).cumsum(1))
        grads.append(flat.grad.clone())
    near(grads[0], grads[1])
    if actions is None:
        return
    flat.grad.zero_()
    some = (torch.arange(21) % 3 == 0).float()
    for grad_q in (torch.stack((some, 1.0 - some)), torch.stack((torch.ones(21), torch.zeros(21))), torch.randn(2, 21)):
        own, theirs = (one.input_grad(grad_q.clone()) for one in both_passes(critics, flat, obs, actions, for_action_grad=True))
        near(own, theirs)
    assert not flat.grad.any(), "weights take no gradient"
    assert all(parameter.requires_grad for parameter in critics.parameters())


RENORM = [
    {"LazyBatchRenorm1d": {"momentum": 0.3, "warmup_steps": 4}},
    {"LazyLinear": {"out_features": 12}},
    {"ReLU": None},
    {"LazyBatchRenorm1d": {"momentum": 0.3, "r_max": 1.1, "d_max": 0.1, "warmup_steps": 0}},
    {"Tanh": None},
]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_batch_renorm_is_that_of_autograd(action: ActionSpace, training: bool) -> None:
    """Values, gradients and moving statistics equal those of autograd during and after the warm-up, also for a batch of one row."""
    pairs = []
    for _ in range(2):
        torch.manual_seed(1)
        critics = build_critics(arc(*RENORM), VECTOR, action)
        flat = FlatParams(critics)
        flat.param.add_(torch.randn_like(flat.param), alpha=0.3)
        pairs.append((critics.train(training), flat))
    (critics, flat), (others, other) = pairs
    assert len(flat.buffer)
    critics.enable_graph_free_pass(flat)
    for rows in (21, 8, 1, 21, 8, 21):
        obs, actions = 3.0 + torch.randn(rows, 5), torch.randn(rows, 2) if action is CONTINUOUS else None
        found, expected = critics.forward_pass(obs, actions), others.forward_pass(obs, actions)
        assert isinstance(found, CriticsPass)
        near(found.values[0], expected.values[0])
        weights = torch.randn(expected.values[0].shape)
        for one in (found, expected):
            one.backward(weights.clone())
        near(flat.grad, other.grad)
        torch.testing.assert_close(flat.buffer, other.buffer)
        if actions is not None and not training:  # the actor's step uses critics in evaluation mode
            some = (torch.arange(rows) % 3 == 0).float()
            for grad_q in (torch.stack((some, 1.0 - some)), torch.stack((some * 0.0, 1.0 - some)), torch.randn(2, rows)):
                own, theirs = (one.forward_pass(obs, actions, for_action_grad=True).input_grad(grad_q.clone()) for one in (critics, others))
                near(own, theirs)
        torch.testing.assert_close(flat.buffer, other.buffer)
    assert flat.buffer.equal(FlatParams(build_critics(arc(*RENORM), VECTOR, action)).buffer) != training


def test_batch_statistics_belong_to_one_pass() -> None:
    critics = build_critics(arc(*RENORM), VECTOR, DISCRETE)
    flat, obs, other = FlatParams(critics), torch.randn(4, 5), torch.randn(4, 5)
    critics.enable_graph_free_pass(flat)
    start, grads = flat.buffer.clone(), []
    for between in (False, True):  # a pass in evaluation mode keeps the batch statistics
        flat.buffer.copy_(start)
        flat.grad.zero_()
        passed = critics.forward_pass(obs, None)
        if between:
            critics.eval()
            critics.forward_pass(other, None)
            critics.train()
        passed.backward(torch.ones(2, 4, 3))
        grads.append(flat.grad.clone())
    assert torch.equal(*grads)
    passed = critics.forward_pass(obs, None)
    critics.forward_pass(other, None)  # a pass in training mode replaces them
    with pytest.raises(AssertionError, match="last forward pass"):
        passed.backward(torch.ones(2, 4, 3))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("change", ["frozen", "hook", "pre-hook", "hook of the body", "hook of the head"])
def test_frozen_layers_and_hooks_take_a_graph(change: str, shared: bool) -> None:
    net, *_ = build(shared=shared)
    passes = net.direct
    assert passes.get() is not None
    if change == "frozen":
        net.critic_parameters()[0].requires_grad_(False)
    elif change == "pre-hook":
        handle = net.actor_body.layers[0].register_forward_pre_hook(lambda *args: None)
    else:
        module = {"hook": net.actor_body.layers[0], "hook of the body": net.bodies[-1], "hook of the head": net.actor_head}[change]
        handle = module.register_forward_hook(lambda *args: None)
    assert passes.get() is None
    assert (passes.get(learn=False) is None) == (change != "frozen")
    if change != "frozen":
        handle.remove()
        assert passes.get() is not None


@pytest.mark.parametrize("keys", [{"hid_layers_activation": "silu"}, {"batch_norm": True}, {"shared": True, "batch_norm": True}], ids=str)
def test_other_nets_take_a_graph(keys: dict[str, Any]) -> None:
    net, *_ = build(**keys)
    assert net.direct.fast is None


def test_recurrent_nets_and_nets_that_are_not_flattened_take_a_graph() -> None:
    plain = ActorCriticNet(MLPNetSpec(name="MLPNet"), VECTOR, 3)
    recurrent = ActorCriticNet(RecurrentNetSpec(name="RecurrentNet"), VECTOR, 3)
    for net, vector in ((plain, FlatParams(torch.nn.Linear(2, 2))), (recurrent, FlatParams(recurrent))):
        net.enable_graph_free_pass(vector)
        assert net.direct.fast is None


def test_an_actor_alone_has_values_of_zero() -> None:
    net, flat, obs = build(critic=False)
    found = net.forward_pass(obs)
    assert isinstance(found, GraphFreePass)
    assert not found.values[1].any()
    grad_params = torch.randn(150, 3)
    net.actor(obs).backward(grad_params)
    expected = flat.grad.clone()
    flat.grad.zero_()
    found.backward(grad_params.numpy(), np.zeros(150, np.float32))
    near(flat.grad, expected)


def test_products_in_bfloat16_are_near() -> None:
    """Hidden layers are computed in bfloat16, which has 8 bits of mantissa, and outputs in float32."""
    net, flat, obs = build(dtype="bfloat16")
    (mlp, _) = net.direct.fast or (None, None)
    assert [isinstance(layer, GraphFreeLinear) and layer.matmul_mode.bfloat16 for layer in mlp.layers] == [True, True, False]
    assert [isinstance(layer, GraphFreeLinear) and layer.numpy_rows > 0 for layer in mlp.layers] == [False, False, True]
    for body in net.bodies:
        body.matmul_mode = MatmulMode()
    expected, grad_out = net.actor(obs), torch.randn(150, 3)
    expected.backward(grad_out)
    grad = flat.grad.clone()
    flat.grad.zero_()
    found = GraphFreePass([mlp], obs.numpy())
    near(found.values[0], expected, 2e-2)
    found.backward(grad_out.clone())
    assert float((flat.grad - grad).norm() / grad.norm()) < 5e-2


def test_numbers_that_are_not_finite_raise_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    net, flat, obs = build(hid_layers=[8], rows=5)
    for size in (torch.nan, 1e38):
        flat.param.fill_(size).neg_()
        with ignore_float_errors():
            found = net.forward_pass(obs)
            assert isinstance(found, GraphFreePass)
            found.backward(*(value.copy() for value in found.values))
        assert not flat.grad.isfinite().all()
    assert not recwarn.list
