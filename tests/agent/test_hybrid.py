"""Tests of hybrid actions, whose distribution is the product of the distributions of their components."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as td

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.ops.distributions import Bernoulli, Beta, MultiArgmax, MultiCategorical, Normal, NormalTanh, Product
from slm_lab.agent.ops.masks import MASKED
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.policy.policy import Policy, build_distribution, build_policy
from slm_lab.lib.random_actions import draw_uniform_actions
from slm_lab.lib.records import ActionSpace, EnvInfo, ObservationSpace
from slm_lab.spec.models.algorithm import PPOSpec
from slm_lab.spec.models.net import MLPNetSpec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import MLP, spec

SPACE = ActionSpace("hybrid", (3, 2), 6, bits=2)
"""Two discrete components, two bits and two numbers: 3 + 2 + 2 + 2 · 2 parameters."""


def product() -> Product:
    choices, bits, numbers = SPACE.parts
    return Product(SPACE, [MultiCategorical(choices), Bernoulli(bits), Normal(numbers)])


def params(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=0.5, size=(rows, 11)).astype(np.float32)


def reference(p: Tensor) -> list[td.Distribution]:
    """Return the distribution of each component, in the order of the components."""
    choices: list[td.Distribution] = [td.Categorical(logits=p[:, :3]), td.Categorical(logits=p[:, 3:5])]
    bits = [td.Bernoulli(logits=p[:, 5]), td.Bernoulli(logits=p[:, 6])]
    return [*choices, *bits, td.Normal(p[:, 7], p[:, 9].exp()), td.Normal(p[:, 8], p[:, 10].exp())]


def test_the_parts_of_a_space_are_in_order() -> None:
    assert SPACE.parts == (
        ActionSpace("multi_discrete", (3, 2), 2),
        ActionSpace("multi_binary", dim=2),
        ActionSpace("continuous", dim=2),
    )
    assert ActionSpace("hybrid", (3,), 2, bounded=False).parts == (
        ActionSpace("multi_discrete", (3,), 1),
        ActionSpace("continuous", dim=1, bounded=False),
    )


def test_log_prob_and_entropy_are_sums_over_the_components() -> None:
    p, distribution = params(7), product()
    action, logp = distribution.sample(p, np.random.default_rng(1))
    components, tensors = reference(torch.from_numpy(p)), torch.from_numpy(action)
    expected: Any = sum(one.log_prob(tensors[:, index]) for index, one in enumerate(components))
    entropy: Any = sum(one.entropy() for one in components)  # type: ignore[no-untyped-call]
    found, own = distribution.evaluate(torch.from_numpy(p), tensors)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, entropy)
    np.testing.assert_allclose(logp, expected, rtol=1e-5)


def test_probabilities_of_all_combinations_of_a_countable_action_sum_to_one() -> None:
    space = ActionSpace("hybrid", (3, 2), 4, bits=2)
    distribution = Product(space, [MultiCategorical(space.parts[0]), Bernoulli(space.parts[1])])
    every = torch.tensor(list(itertools.product(range(3), range(2), range(2), range(2))), dtype=torch.float32)
    p = torch.from_numpy(params(1)[:, :7]).expand(len(every), -1)
    logp = distribution.log_prob(p, every)
    assert logp.exp().sum().item() == pytest.approx(1.0, rel=1e-5)
    assert -(logp.exp() * logp).sum().item() == pytest.approx(distribution.entropy(p)[0].item(), rel=1e-5)


def test_samples_have_the_frequencies_of_each_component_and_modes_are_theirs() -> None:
    one = params(1, 3)
    p, distribution = np.repeat(one, 20_000, axis=0), product()
    action, _ = distribution.sample(p, np.random.default_rng(0))
    assert action.dtype == np.float32
    for index, component in enumerate(reference(torch.from_numpy(one))):
        np.testing.assert_allclose(action[:, index].mean(), _mean(component), atol=0.05)
    mode = distribution.mode(one)[0]
    np.testing.assert_allclose(mode, [one[0, :3].argmax(), one[0, 3:5].argmax(), one[0, 5] > 0, one[0, 6] > 0, *one[0, 7:9]])
    np.testing.assert_array_equal(distribution.mode(torch.from_numpy(one)).numpy()[0], mode)
    assert len(distribution.sample_actions(p[:5], np.random.default_rng(0))) == 5


def _mean(component: td.Distribution) -> float:
    if isinstance(component, td.Categorical):
        return float((component.probs * torch.arange(component.probs.shape[1])).sum())
    return float(component.mean)


def test_uniform_actions_of_all_parts_with_their_density() -> None:
    valid = np.tile(np.array([True, False, True, False, True]), (1000, 1))
    action, logp = draw_uniform_actions(SPACE, 1000, np.random.default_rng(0), valid)
    assert set(action[:, 0]) == {0.0, 2.0}
    assert set(action[:, 1]) == {1.0}
    assert set(action[:, 2]) == {0.0, 1.0}
    assert (np.abs(action[:, 4:]) <= 1.0).all()
    np.testing.assert_allclose(logp, -math.log(2) - 2 * math.log(2) - 2 * math.log(2), rtol=1e-6)


def test_the_key_names_the_distribution_of_the_part_that_it_fits() -> None:
    def parts(name: str) -> list[type]:
        built = build_distribution(PPOSpec.model_validate({"name": "PPO", "action_pdtype": name}), SPACE)
        assert isinstance(built, Product)
        return [type(part) for part in built.parts]

    assert parts("default") == [MultiCategorical, Bernoulli, Normal]
    assert parts("Beta") == [MultiCategorical, Bernoulli, Beta]
    assert parts("Argmax") == [MultiArgmax, Bernoulli, Normal]
    for name, fits in (("Categorical", "Argmax, MultiCategorical, Bernoulli, Normal"), ("GumbelSoftmax", "Beta")):
        with pytest.raises(SpecError) as error:
            parts(name)
        assert error.value.problems[0].path == "agent.algorithm.action_pdtype"
        assert "hybrid actions (multi-discrete and multi-binary and continuous)" in str(error.value)
        assert fits in str(error.value)


def test_only_the_normal_part_is_squashed_for_the_env() -> None:
    choices, bits, numbers = SPACE.parts
    distribution = Product(SPACE, [MultiCategorical(choices), Bernoulli(bits), NormalTanh(numbers)])
    action = np.array([[2, 1, 1, 0, 3.0, -0.5]], np.float32)
    np.testing.assert_allclose(distribution.env_action(action), [[2, 1, 1, 0, math.tanh(3.0), math.tanh(-0.5)]], rtol=1e-6)


MASKED_OBS = ObservationSpace((4 + 5,), mask=(4, 9))


def observations(rows: int = 50) -> Tensor:
    obs = torch.randn(rows, 9, generator=torch.Generator().manual_seed(0))
    obs[:, 4:] = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    return obs


def test_a_mask_covers_the_discrete_choices_only_and_passes_agree() -> None:
    net = ActorCriticNet(MLPNetSpec.model_validate(MLP), MASKED_OBS, 11)
    flat = FlatParams(net)
    net.enable_graph_free_pass(flat)
    obs = observations()
    direct, graph = net.forward_pass(obs), net(obs)
    np.testing.assert_allclose(direct.values[0], graph[0].detach(), rtol=1e-5, atol=1e-6)
    assert (graph[0][:, [1, 3]] == MASKED).all()
    assert (graph[0][:, [0, 2, *range(4, 11)]] > MASKED).all()
    grad = np.random.default_rng(0).normal(size=(len(obs), 11)).astype(np.float32)
    flat.grad.zero_()
    direct.backward(grad, np.zeros(len(obs), np.float32))
    found = flat.grad.clone()
    flat.grad.zero_()
    (graph[0] * torch.from_numpy(grad)).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, flat.grad, rtol=1e-4, atol=1e-5)
    assert not net.actor_head.linear.weight.grad[[1, 3]].any()  # type: ignore[index]


@pytest.mark.parametrize("net", [MLP, {"name": "RecurrentNet", "rnn_hidden_size": 4}], ids=["MLP", "RNN"])
@pytest.mark.parametrize("rule", ["default", "random"])
def test_a_policy_takes_valid_actions(net: dict[str, Any], rule: str) -> None:
    agent = spec({"name": "PPO", "action_policy": rule}, net | {"log_std_init": 0.0}).agent
    policy: Policy = build_policy(agent, EnvInfo(50, MASKED_OBS, SPACE), np.random.default_rng(0))
    for deterministic in (False, True):
        out = policy.act(observations().numpy(), policy.initial_state(50), deterministic)
        assert out.action_N.shape == (50, 6)
        assert out.action_N.dtype == np.float32
        assert set(out.action_N[:, 0]) <= {0.0, 2.0}
        assert set(out.action_N[:, 1]) == {1.0}


def test_rules_over_action_values_are_refused() -> None:
    for rule in ("epsilon_greedy", "boltzmann"):
        with pytest.raises(SpecError, match=f"'{rule}' is not supported for hybrid actions; allowed: default, random"):
            build_distribution(PPOSpec.model_validate({"name": "PPO", "action_policy": rule}), SPACE)
