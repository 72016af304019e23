"""Tests of SimBa nets: outputs against a numpy implementation, initialisation, and passes without a graph against autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.passes import direct_layers
from slm_lab.agent.net.passes.direct import CriticsPass, GraphFreePass
from slm_lab.agent.net.q_nets import QNet, build_critics
from slm_lab.agent.ops.arrays import as_array, ignore_float_errors
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import SimbaNetSpec

VECTOR = ObservationSpace((5,))
CONTINUOUS = ActionSpace("continuous", (), 2)


def spec(**keys: Any) -> SimbaNetSpec:
    return SimbaNetSpec.model_validate({"name": "SimbaNet", "width": 24, "blocks": 2, **keys})


def shaken(flat: FlatParams) -> None:
    """Move gains away from 1 and biases away from 0."""
    flat.param.add_(torch.rand_like(flat.param), alpha=0.1)


def normed(x: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(1, keepdims=True)
    out: np.ndarray = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * gain + bias
    return out


def twin(net: torch.nn.Module, prefix: str, x: np.ndarray) -> np.ndarray:
    """Return the features of a body, computed layer by layer as in the paper's figure."""
    w = {name: value.numpy().astype(np.float64) for name, value in net.state_dict().items()}
    x = x @ w[f"{prefix}.0.weight"].T + w[f"{prefix}.0.bias"]
    for block in (1, 2):
        at = f"{prefix}.{block}"
        hidden = normed(x, w[f"{at}.norm.weight"], w[f"{at}.norm.bias"]) @ w[f"{at}.expand.weight"].T + w[f"{at}.expand.bias"]
        x = x + np.maximum(hidden, 0.0) @ w[f"{at}.contract.weight"].T + w[f"{at}.contract.bias"]
    return normed(x, w[f"{prefix}.3.weight"], w[f"{prefix}.3.bias"])


def test_the_forward_pass_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    net = ActorCriticNet(spec(), VECTOR, 3)
    shaken(FlatParams(net))
    obs = torch.randn(7, 5)
    params, value = net(obs)
    head = net.actor_head.linear
    actor, critic = twin(net, "actor_body.layers", obs.numpy()), twin(net, "critic_body.layers", obs.numpy())
    np.testing.assert_allclose(params.detach(), actor @ head.weight.detach().numpy().T + head.bias.detach().numpy(), rtol=1e-4, atol=1e-5)
    weight, bias = (one.detach().numpy() for one in net.critic_head.parameters())
    np.testing.assert_allclose(value.detach(), (critic @ weight.T + bias)[:, 0], rtol=1e-4, atol=1e-5)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    net = ActorCriticNet(spec(width=64, actor_init_std=0.1), VECTOR, 3)
    embedding, block, *_, last = net.actor_body.layers
    assert torch.allclose(embedding.weight.T @ embedding.weight, torch.eye(5), atol=1e-5)
    assert block.expand.weight.shape == (256, 64)
    for layer in (block.expand, block.contract):
        assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(2.0 / layer.in_features), rel=0.03)
    assert torch.allclose(net.actor_head.linear.weight @ net.actor_head.linear.weight.T, 0.01 * torch.eye(3), atol=1e-5)
    assert float(net.critic_head.weight.detach().norm()) == pytest.approx(1.0, rel=1e-5)
    assert type(last) is torch.nn.LayerNorm
    assert not any(parameter.any() for name, parameter in net.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("small", [True, False], ids=["numpy", "torch"])
@pytest.mark.parametrize("keys", [{}, {"width": 160, "blocks": 1}, {"blocks": 3}], ids=str)
def test_gradients_are_those_of_autograd(keys: dict[str, Any], small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients equal those of autograd for all rows, and for some rows of a pass that is no longer the latest one."""
    if not small:
        for name in ("NUMPY_PRODUCT_ROWS", "TORCH_ACTIVATION_SIZE"):
            monkeypatch.setattr(direct_layers, name, 0)
    torch.manual_seed(1)
    net = ActorCriticNet(spec(**keys), VECTOR, 3)
    flat = FlatParams(net)
    net.enable_graph_free_pass(flat)
    shaken(flat)
    obs, other, grad_params, grad_value, some = torch.randn(150, 5), torch.randn(20, 5), torch.randn(150, 3), torch.randn(150), [0, 3, 149]
    outputs = net(obs)
    torch.autograd.backward(outputs, [grad_params, grad_value])
    torch.autograd.backward([x[some] for x in net(obs)], [grad_params[some], grad_value[some]])
    expected = flat.grad.clone()
    flat.grad.zero_()
    with ignore_float_errors():
        found, again = net.forward_pass(obs), net.forward_pass(obs).select_rows(some)
        assert isinstance(found, GraphFreePass)
        np.testing.assert_allclose(found.values[0], outputs[0].detach(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(net.values(obs), outputs[1].detach(), rtol=1e-4, atol=1e-4)
        net.forward_pass(other)
        found.backward(grad_params.numpy().copy(), grad_value.numpy().copy())
        again.backward(grad_params[some].numpy(), grad_value[some].numpy())
    scale = float(expected.abs().max())
    np.testing.assert_allclose(flat.grad, expected, rtol=1e-3, atol=1e-5 * scale)


def test_critics_and_the_gradient_of_their_actions() -> None:
    """Critics and action gradients equal autograd, also for rows in which only one critic has a gradient, as with the minimum."""
    torch.manual_seed(2)
    critics = build_critics(spec(), VECTOR, CONTINUOUS)
    flat = FlatParams(critics)
    critics.enable_graph_free_pass(flat)
    shaken(flat)
    obs, action, grad = torch.randn(30, 5), torch.rand(30, 2, requires_grad=True), torch.randn(2, 30)
    grad[0, ::2] = 0.0
    values = critics(obs, action)
    values.backward(grad)
    expected = flat.grad.clone()
    flat.grad.zero_()
    with ignore_float_errors():
        found = critics.forward_pass(obs, action.detach())
        assert isinstance(found, CriticsPass)
        np.testing.assert_allclose(found.values[0], values.detach(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.input_grad(grad.clone()), action.grad, rtol=1e-3, atol=1e-5)
        assert not flat.grad.any()
        found.backward(grad.clone())
    np.testing.assert_allclose(flat.grad, expected, rtol=1e-3, atol=1e-4)


def test_action_values() -> None:
    net = QNet(spec(), VECTOR, (3,))
    flat = FlatParams(net)
    net.enable_graph_free_pass(flat)
    obs = torch.randn(4, 5)
    with ignore_float_errors():
        np.testing.assert_allclose(as_array(net.values(obs)), net(obs)[0].detach(), rtol=1e-4, atol=1e-5)
    assert net.direct.get() is not None


def test_images_become_vectors() -> None:
    net = ActorCriticNet(spec(), ObservationSpace((3, 6, 6), "uint8"), 3)
    params, _ = net(torch.zeros(2, 3, 6, 6, dtype=torch.uint8))
    assert params.shape == (2, 3)
