"""Tests of action distributions against torch.distributions, and of samples against their own densities."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as td

from slm_lab.agent.ops.distributions import DISTRIBUTIONS, ActionDistribution, Normal, SquashedNormal
from slm_lab.lib.records import ActionSpace

SPACES = {
    "discrete": ActionSpace("discrete", (4,), 1),
    "multi_discrete": ActionSpace("multi_discrete", (2, 3), 2),
    "multi_binary": ActionSpace("multi_binary", (), 3),
    "continuous": ActionSpace("continuous", (), 2),
}
ALL = sorted(DISTRIBUTIONS)


def make(name: str) -> ActionDistribution:
    return DISTRIBUTIONS[name](SPACES[DISTRIBUTIONS[name].kinds[0]])


def params(dist: ActionDistribution, rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=0.5, size=(rows, dist.param_dim)).astype(np.float32)


def reference(name: str, p: Tensor) -> td.Distribution:
    """Return the same distribution, built from torch.distributions."""
    match name:
        case "Categorical" | "Argmax" | "GumbelSoftmax":
            return td.Categorical(logits=p)
        case "Bernoulli":
            return td.Independent(td.Bernoulli(logits=p), 1)
        case "Normal":
            return td.Independent(td.Normal(p[:, :2], p[:, 2:].exp()), 1)
        case "NormalTanh":
            squash = td.transforms.TanhTransform()
            return td.Independent(td.TransformedDistribution(td.Normal(p[:, :2], p[:, 2:].exp()), [squash]), 1)
        case "LogNormal":
            return td.Independent(td.LogNormal(p[:, :2], p[:, 2:].exp()), 1)
        case "Gumbel":
            return td.Independent(td.Gumbel(p[:, :2], p[:, 2:].exp()), 1)
        case "Beta":
            shape = torch.nn.functional.softplus(p) + 1.0
            stretch = td.transforms.AffineTransform(-1.0, 2.0)
            return td.Independent(td.TransformedDistribution(td.Beta(shape[:, :2], shape[:, 2:]), [stretch]), 1)
        case "MultivariateNormal":
            tril = torch.diag_embed(p[:, 2:4].exp())
            tril[:, 1, 0] = p[:, 4]
            return td.MultivariateNormal(p[:, :2], scale_tril=tril)
    raise AssertionError(name)


@pytest.mark.parametrize("name", [n for n in ALL if n != "MultiCategorical"])
def test_log_prob_and_entropy(name: str) -> None:
    dist, rng = make(name), np.random.default_rng(1)
    p = params(dist, 6)
    action, logp = dist.sample(p, rng)
    torch_p, torch_a = torch.from_numpy(p), torch.from_numpy(action)
    expected = reference(name, torch_p)
    wanted = expected.log_prob(torch.from_numpy(dist.env_action(action)).float())
    assert torch.allclose(dist.log_prob(torch_p, torch_a), wanted, atol=1e-4)
    assert np.allclose(logp, wanted.numpy(), atol=1e-4)
    both = dist.evaluate(torch_p, torch_a)
    assert torch.allclose(both[0], wanted, atol=1e-4)
    assert torch.allclose(both[1], dist.entropy(torch_p), atol=1e-5)
    if name == "NormalTanh":
        grid = torch.linspace(-8.0, 8.0, 20_001, dtype=torch.float64).unsqueeze(1)
        for row, entropy in zip(torch_p.double(), both[1], strict=True):
            loc, std = row[:2], row[2:].exp()
            slope = (1.0 - torch.tanh(loc + std * grid).square()).log() * torch.exp(-0.5 * grid.square()) / np.sqrt(2.0 * np.pi)
            plain = td.Normal(loc, std).entropy().sum() + torch.trapezoid(slope.sum(1), grid[:, 0])
            assert float(entropy) == pytest.approx(float(plain), abs=1e-3)
    elif name != "Beta":  # torch has no entropy for transformed distributions
        assert torch.allclose(dist.entropy(torch_p), expected.entropy(), atol=1e-4)
    else:
        shape = torch.nn.functional.softplus(torch_p) + 1.0
        plain = td.Beta(shape[:, :2], shape[:, 2:]).entropy().sum(1) + 2 * np.log(2.0)
        assert torch.allclose(dist.entropy(torch_p), plain, atol=1e-4)


def test_multi_categorical_is_independent_categoricals() -> None:
    dist = make("MultiCategorical")
    p = torch.from_numpy(params(dist, 5))
    action = torch.tensor([[0, 2], [1, 0], [1, 1], [0, 0], [1, 2]])
    parts = [td.Categorical(logits=p[:, :2]), td.Categorical(logits=p[:, 2:])]
    assert torch.allclose(dist.log_prob(p, action), parts[0].log_prob(action[:, 0]) + parts[1].log_prob(action[:, 1]), atol=1e-5)
    assert torch.allclose(dist.entropy(p), parts[0].entropy() + parts[1].entropy(), atol=1e-5)


@pytest.mark.parametrize("name", [n for n in ALL if n != "Argmax"])
def test_entropy_is_the_mean_of_minus_logp(name: str) -> None:
    """Samples, log_prob and entropy belong to one distribution (Monte Carlo, within 4 standard errors)."""
    dist = make(name)
    p = np.repeat(params(dist, 1, seed=3), 20_000, axis=0)
    _, logp = dist.sample(p, np.random.default_rng(2))
    entropy = float(dist.entropy(torch.from_numpy(p[:1])))
    assert -logp.mean() == pytest.approx(entropy, abs=4 * logp.std() / np.sqrt(len(logp)) + 1e-4)


@pytest.mark.parametrize("name", ALL)
def test_shapes_dtypes_and_mode(name: str) -> None:
    dist = make(name)
    p = params(dist, 7)
    for action in (dist.sample(p, np.random.default_rng(0))[0], dist.sample_actions(p, np.random.default_rng(0)), dist.mode(p)):
        kind = dist.action.kind
        assert action.shape == ((7,) if kind == "discrete" else (7, dist.action.dim))
        assert action.dtype == (np.float32 if kind == "continuous" else np.int64)
    if name != "NormalTanh":  # its mode is that of the normal distribution before tanh
        draws = np.stack([dist.sample(p, np.random.default_rng(i))[0] for i in range(50)])
        best = dist.log_prob(torch.from_numpy(p), torch.from_numpy(dist.mode(p)))
        for draw in draws:
            assert (dist.log_prob(torch.from_numpy(p), torch.from_numpy(draw)) <= best + 1e-6).all()


def test_categorical_frequencies() -> None:
    dist = make("Categorical")
    p = np.repeat(np.log([[0.1, 0.2, 0.3, 0.4]]).astype(np.float32), 20_000, axis=0)
    counts = np.bincount(dist.sample_actions(p, np.random.default_rng(0)), minlength=4) / 20_000
    assert counts.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.015)


def test_extreme_parameters_stay_finite() -> None:
    for name in ALL:
        dist = make(name)
        for size in (-60.0, 60.0):
            p = np.full((3, dist.param_dim), size, np.float32)
            action, logp = dist.sample(p, np.random.default_rng(0))
            assert np.isfinite(logp).all(), (name, size)
            assert name == "LogNormal" or np.isfinite(action).all(), (name, size)


def test_free_log_std_is_the_same_normal() -> None:
    """A log standard deviation shared by all states gives the same results and gradients as one that the actor outputs."""
    space, log_std = SPACES["continuous"], torch.tensor([-0.3, 0.4], requires_grad=True)
    free, full = DISTRIBUTIONS["Normal"](space, log_std), DISTRIBUTIONS["Normal"](space)  # type: ignore[call-arg]  # Normal's own
    loc = torch.from_numpy(params(free, 5)).requires_grad_()
    both = torch.cat([loc, log_std.expand(5, -1)], dim=1)
    action, logp = free.sample(loc.detach().numpy(), np.random.default_rng(0))
    same, same_logp = full.sample(both.detach().numpy(), np.random.default_rng(0))
    assert np.array_equal(action, same)
    assert np.allclose(logp, same_logp)
    gradients = []
    for dist, p in ((free, loc), (full, both)):
        log_prob, entropy = dist.evaluate(p, torch.from_numpy(action))
        assert entropy.shape == dist.entropy(p).shape == (5,)
        gradients.append(torch.autograd.grad((log_prob + 0.1 * entropy).mean(), (loc, log_std)))
        assert np.allclose(log_prob.detach().numpy(), logp, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squashed_normal_is_finite_at_the_ends(dtype: torch.dtype) -> None:
    dist = SquashedNormal(ActionSpace("continuous", (), 2))
    params, action = torch.zeros(1, 4, dtype=dtype, requires_grad=True), torch.tensor([[1.0, -1.0]], dtype=dtype, requires_grad=True)
    logp = dist.log_prob(params, action)
    logp.sum().backward()
    assert params.grad is not None
    assert action.grad is not None
    assert all(x.isfinite().all() for x in (logp, params.grad, action.grad))


@pytest.mark.parametrize("name", [*ALL, "SquashedNormal"])
def test_mode_of_tensors_and_of_arrays(name: str) -> None:
    """The mode is the same for arrays and for tensors, which the export of policies uses."""
    dist = SquashedNormal(SPACES["continuous"]) if name == "SquashedNormal" else make(name)
    p = params(dist, 50, seed=4) * 3
    assert np.allclose(dist.env_action(dist.mode(torch.from_numpy(p))).numpy(), dist.env_action(dist.mode(p)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("free", [False, True])
def test_log_std_lies_between_minus_5_and_2(free: bool) -> None:
    """Results equal those of torch's Normal with the clipped standard deviations; beyond the bounds the gradient is 0."""
    given, clipped = torch.tensor([-9.0, -4.0, 6.0]), torch.tensor([-5.0, -4.0, 2.0])
    space, loc = ActionSpace("continuous", (), 3), torch.tensor([[0.3, -1.0, 2.0]])
    log_std = given.clone().requires_grad_()
    distribution = Normal(space, log_std) if free else Normal(space)
    params = loc if free else torch.cat((loc, log_std[None]), dim=1)
    twin = torch.distributions.Normal(loc, clipped.exp())
    action = loc + torch.tensor([[0.004, 0.01, -3.0]])
    logp, entropy = distribution.evaluate(params, action)
    assert torch.allclose(logp, twin.log_prob(action).sum(1), atol=1e-5)
    assert torch.allclose(entropy, twin.entropy().sum(1), atol=1e-5)
    logp.sum().backward()
    assert log_std.grad is not None
    assert (log_std.grad != 0).tolist() == [False, True, False]
    drawn, drawn_logp = distribution.sample(params.detach().numpy(), np.random.default_rng(0))
    noise = np.random.default_rng(0).standard_normal((1, 3), dtype=np.float32)
    assert np.allclose(drawn, loc.numpy() + clipped.exp().numpy() * noise, atol=1e-5)
    assert np.allclose(drawn_logp, twin.log_prob(torch.from_numpy(drawn)).sum(1), atol=1e-3)


def test_a_log_std_that_moves_in_memory_is_read_where_it_is() -> None:
    """Current values are read although FlatParams replaces the data of the parameter and steps change the data in place."""
    log_std = torch.nn.Parameter(torch.zeros(2))
    dist = Normal(ActionSpace("continuous", dim=2, bounded=True), log_std)
    loc = np.zeros((1, 2), np.float32)
    assert dist.loc_and_log_scale(loc)[1].tolist() == [[0.0, 0.0]]
    log_std.data = torch.full((2,), -1.0)
    assert dist.loc_and_log_scale(loc)[1].tolist() == [[-1.0, -1.0]]
    log_std.data.add_(0.5)
    assert dist.loc_and_log_scale(loc)[1].tolist() == [[-0.5, -0.5]]
