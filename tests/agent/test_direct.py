"""Actor and critic without an autograd graph, against those with one."""

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.net import direct, numpy_mlp
from slm_lab.agent.net.actor_critic import ActorCriticNet
from slm_lab.agent.net.direct import DirectPass, direct_mlps, direct_pass
from slm_lab.agent.ops.linear import Products
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.net import MLPNetSpec
from tests.agent.test_algorithms import ACTOR_CRITIC, PPO, gathered

VECTOR = ObservationSpace((5,))


def build(**keys: Any) -> tuple[ActorCriticNet, FlatParams, torch.Tensor]:
    torch.manual_seed(2)
    net = ActorCriticNet(MLPNetSpec.model_validate({"name": "MLPNet", "hid_layers": [160, 144], **keys}), VECTOR, 3)
    return net, FlatParams(net), torch.randn(150, 5)


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("keys", [{}, {"hid_layers_activation": "tanh", "out_layer_activation": "tanh"}, {"hid_layers": [7]}], ids=str)
def test_outputs_and_gradients_are_those_of_autograd(keys: dict[str, Any], onednn: bool) -> None:
    """Also of some rows only, and added to what is there."""
    net, flat, obs = build(**keys)
    for body in net.bodies:
        body.products = Products(onednn=onednn)
    of_params, of_value, some = torch.randn(150, 3), torch.randn(150), np.array([0, 3, 149])
    outputs = net(obs)
    torch.autograd.backward(outputs, [of_params, of_value])
    torch.autograd.backward([x[some] for x in net(obs)], [of_params[some], of_value[some]])
    expected = flat.grad.clone()
    flat.grad.zero_()
    found = direct_pass(direct_mlps(net), obs)
    assert found is not None
    np.testing.assert_allclose(found.params_BP, outputs[0].detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.value_B, outputs[1].detach().numpy(), rtol=1e-4, atol=1e-5)
    found.backward(of_params.numpy().copy(), of_value.numpy().copy())
    again = DirectPass(*(direct_mlps(net) or ()), obs).select(slice(150)).select(some)
    assert again.params_BP.shape == (3, 3)
    again.backward(of_params.numpy()[some], of_value.numpy()[some])
    torch.testing.assert_close(flat.grad, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("algorithm", [ACTOR_CRITIC, PPO], ids=lambda algorithm: algorithm["name"])
def test_an_update_is_that_of_autograd(algorithm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_mlp, "NUMPY_LEARNING", False)
    after = []
    for on in (True, False):
        monkeypatch.setattr(direct, "DIRECT", on)
        agent = gathered(algorithm, "OnPolicyBatchReplay")
        assert (agent.algorithm.record(np.zeros((2, 4), np.float32)) is not None) == on
        metrics = agent.update()
        after.append((metrics.loss, metrics.grad_norm, agent.weights()))
    assert after[0][:2] == pytest.approx(after[1][:2], rel=1e-5)
    for name, value in after[0][2].items():
        torch.testing.assert_close(value, after[1][2][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["frozen", "hook", "pre-hook"])
def test_frozen_layers_and_hooks_take_a_graph(change: str) -> None:
    net, flat, obs = build()
    mlps = direct_mlps(net)
    assert direct_pass(mlps, obs) is not None
    if change == "frozen":
        net.critic_parameters()[0].requires_grad_(False)
    elif change == "hook":
        net.actor_body.layers[0].register_forward_hook(lambda *args: None)
    else:
        net.actor_body.layers[0].register_forward_pre_hook(lambda *args: None)
    assert direct_pass(mlps, obs) is None
    del flat


@pytest.mark.parametrize(
    "keys", [{"shared": True}, {"hid_layers_activation": "elu"}, {"layer_norm": True}, {"batch_norm": True}, {"dtype": "bfloat16"}], ids=str
)
def test_other_nets_take_a_graph(keys: dict[str, Any]) -> None:
    net, flat, _ = build(**keys)
    assert direct_mlps(net) is None
    del flat


def test_a_net_that_is_not_flattened_takes_a_graph() -> None:
    assert direct_mlps(ActorCriticNet(MLPNetSpec(name="MLPNet"), VECTOR, 3)) is None
