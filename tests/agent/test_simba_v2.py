"""Tests of SimbaV2 nets against numbers computed by hand and numpy; weights stay on the hypersphere in every kind of step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.hypersphere import UnitBlock, UnitEmbedding, UnitLastHiddenLayer
from slm_lab.agent.net.q_nets import build_critics
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import SimbaV2NetSpec
from tests.agent.helpers import CONTINUOUS, drive
from tests.agent.test_soft_actor_critic import build

VECTOR = ObservationSpace((5,))


def spec(**keys: Any) -> SimbaV2NetSpec:
    return SimbaV2NetSpec.model_validate({"name": "SimbaV2Net", "width": 12, "blocks": 2, **keys})


def set_to(layer: torch.nn.Linear, rows: list[list[float]]) -> None:
    layer.weight.data.copy_(torch.tensor(rows))


def test_the_embedding_by_hand() -> None:
    """[4, 0, 3] has norm 5. If W has the rows e₁ and e₃, the features are [0.8, 0.6] · √(2/2), which have norm 1."""
    embedding = UnitEmbedding(2, 2)
    set_to(embedding.linear, [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(embedding(torch.tensor([[4.0, 0.0], [0.0, -4.0]])), torch.tensor([[0.8, 0.6], [0.0, 1.0]]))
    torch.testing.assert_close(embedding(torch.zeros(1, 2)), torch.tensor([[0.0, 1.0]]))  # only the appended constant remains


def test_a_block_by_hand() -> None:
    """h = [0.6, 0.8]; the hidden units are h₁, h₂, −h₁, −h₂, twice. The block's MLP returns [1, 0], and α is 1/2 with one block."""
    block = UnitBlock(2, 1)
    set_to(block.expand, [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]] * 2)
    set_to(block.contract, [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    mean = np.array([0.8, 0.4])
    np.testing.assert_allclose(block(torch.tensor([[0.6, 0.8]])).detach(), [mean / np.linalg.norm(mean)], atol=1e-6)
    block.alpha.gain.data.zero_()
    torch.testing.assert_close(block(torch.tensor([[0.6, 0.8]])), torch.tensor([[0.6, 0.8]]))


def test_what_the_scales_are_at_first() -> None:
    block, top, embedding = UnitBlock(8, 3), UnitLastHiddenLayer(8, 8), UnitEmbedding(5, 8)
    found = [(one.gain[0].item() * one.factor, one.gain[0].item()) for one in (embedding.scaler, block.scaler, block.alpha, top.scaler)]
    root = math.sqrt(2.0 / 8)
    np.testing.assert_allclose(found, [(root, root), (root / 2, root / 2), (1 / 4, 1 / math.sqrt(8)), (1.0, 1.0)], rtol=1e-6)


def unit(x: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = x / np.linalg.norm(x, axis=1, keepdims=True)
    return scaled


def twin(net: torch.nn.Module, prefix: str, x: np.ndarray, width: int = 12, blocks: int = 2) -> np.ndarray:
    """Compute the features of a body in numpy, from the equations of the paper."""
    w = {name.removeprefix(f"{prefix}."): value.numpy().astype(np.float64) for name, value in net.state_dict().items()}
    x = unit(np.concatenate([x, np.full((len(x), 1), 3.0)], 1))
    x = unit(w["0.scaler.gain"] * (x @ w["0.linear.weight"].T))
    for block in range(1, blocks + 1):
        hidden = np.maximum(w[f"{block}.scaler.gain"] * (x @ w[f"{block}.expand.weight"].T), 0.0)
        alpha = w[f"{block}.alpha.gain"] * math.sqrt(width) / (blocks + 1)
        x = unit((1.0 - alpha) * x + alpha * unit(hidden @ w[f"{block}.contract.weight"].T))
    return w[f"{blocks + 1}.scaler.gain"] * (x @ w[f"{blocks + 1}.linear.weight"].T)


def test_the_forward_pass_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    net = ActorCriticNet(spec(), VECTOR, 3)
    flat = FlatParams(net)
    flat.param.add_(torch.rand_like(flat.param), alpha=0.1)
    obs = torch.randn(7, 5)
    params, value = net(obs)
    w = {name: one.detach().numpy() for name, one in net.named_parameters()}
    actor, critic = twin(net, "actor_body.layers", obs.numpy()), twin(net, "critic_body.layers", obs.numpy())
    expected = actor @ w["actor_head.linear.weight"].T + w["actor_head.linear.bias"]
    np.testing.assert_allclose(params.detach(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value.detach(), (critic @ w["critic_head.weight"].T + w["critic_head.bias"])[:, 0], rtol=1e-4, atol=1e-5)


def row_norms(flat: FlatParams) -> torch.Tensor:
    """Return the norms of the rows of all matrices of a net."""
    return torch.cat([weight.detach().norm(dim=1) for weight in flat.params if weight.dim() == 2])


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Muon", "Lookahead", "GlobalRMSprop"])
def test_weights_have_norm_1_after_each_step(optimizer: str) -> None:
    torch.manual_seed(0)
    keys = spec(optim_spec={"name": optimizer, "lr": 0.1})
    critics = build_critics(keys, VECTOR, ActionSpace("continuous", (), 2), outputs=3)
    flat = FlatParams(critics)
    trainer = Trainer(flat, keys, ("critic",))
    torch.testing.assert_close(row_norms(flat), torch.ones(2 * 4 * 12 * 2 + 2 * 12 * 4 + 6))
    before = flat.param.clone()
    for _ in range(3):
        critics(torch.randn(8, 5), torch.randn(8, 2)).square().mean().backward()
        trainer.begin_update(0)
        trainer.step()
        torch.testing.assert_close(row_norms(flat), torch.ones_like(row_norms(flat)))
    assert (flat.param != before).float().mean() > 0.9
    gains = [one for name, one in critics.named_parameters() if name.endswith("gain")]
    assert any((gain.detach() - gain.detach()[0]).abs().max() > 1e-3 for gain in gains)  # scales are not normalised


def test_critics_of_images_stay_on_the_sphere_too() -> None:
    """Weights of critics of images, whose actions enter after the body, lie on the hypersphere too."""
    critics = build_critics(spec(), ObservationSpace((3, 4, 4), "uint8"), ActionSpace("continuous", (), 2))
    flat = FlatParams(critics)
    assert "joint.0.linear.weight" in "".join(name for name, _ in critics.named_parameters())
    torch.testing.assert_close(row_norms(flat), torch.ones_like(row_norms(flat)))
    assert len(flat.unit_rows) == sum(parameter.dim() == 2 for parameter in flat.params)
    assert critics(torch.zeros(6, 3, 4, 4, dtype=torch.uint8), torch.zeros(6, 2)).shape == (2, 6)


def test_a_frozen_weight_keeps_its_norm() -> None:
    keys = spec(optim_spec={"name": "SGD", "lr": 0.1})
    net = ActorCriticNet(keys, VECTOR, 3, critic=False)
    flat = FlatParams(net)
    trainer = Trainer(flat, keys)
    weight = net.actor_head.linear.weight
    weight.requires_grad_(False).mul_(2.0)
    trainer.begin_update(0)
    net.actor(torch.randn(4, 5)).sum().backward()
    trainer.step()
    torch.testing.assert_close(weight.norm(dim=1), torch.full((3,), 2.0))


def test_all_nets_of_an_agent_that_learns() -> None:
    """Updates keep actor and critics on the hypersphere. Target nets are averages, so their rows are shorter."""
    net = {"name": "SimbaV2Net", "width": 8, "blocks": 1, "optim_spec": {"name": "Adam", "lr": 0.01}}
    agent, env = build(CONTINUOUS, name="DistributionalSAC", net=net | {"update_type": "polyak", "polyak_coef": 0.3})
    drive(agent, env, 40)
    algorithm: Any = agent.algorithm
    assert algorithm.critic_steps > 10
    for trainer in (algorithm.trainer, algorithm.actor_trainer):
        torch.testing.assert_close(row_norms(trainer.flat), torch.ones_like(row_norms(trainer.flat)))
    norms = row_norms(algorithm.target.flat)  # means of weights of norm 1 are shorter
    assert norms.max() < 1.0 + 1e-5
    assert norms.min() < 1.0 - 1e-4
