"""Batch renormalisation against the paper's formula."""

import pytest
import torch

from slm_lab.agent.net.batch_renorm import BatchRenorm1d, LazyBatchRenorm1d


def test_formula() -> None:
    """Algorithm 1 of arXiv:1702.03275 by hand, past the warm-up, with moving statistics of their own and clipping of both kinds."""
    torch.manual_seed(0)
    layer = BatchRenorm1d(3, momentum=0.1, eps=1e-3, warmup_steps=0)
    layer.running_mean.copy_(torch.tensor([0.1, -30.0, 0.0]))  # the second is so far off that d is clipped
    layer.running_var.copy_(torch.tensor([2.0, 1.0, 0.01]))  # the third so narrow that r is clipped
    x = torch.randn(16, 3)
    mean, std = x.mean(0), torch.sqrt(x.var(0, unbiased=False) + 1e-3)
    running_std = torch.sqrt(layer.running_var + 1e-3)
    r = torch.clamp(std / running_std, 1 / 3, 3.0)
    d = torch.clamp((mean - layer.running_mean) / running_std, -5.0, 5.0)
    assert float(d[1]) == 5.0
    assert float(r[2]) == 3.0
    expected_mean = layer.running_mean + 0.1 * (mean - layer.running_mean)
    assert torch.allclose(layer(x), (x - mean) / std * r + d, atol=1e-5)
    assert torch.allclose(layer.running_mean, expected_mean, atol=1e-6)


def test_starts_as_batch_norm_and_ends_on_moving_statistics() -> None:
    layer, plain = BatchRenorm1d(2, momentum=0.1, eps=1e-5, warmup_steps=10), torch.nn.BatchNorm1d(2, eps=1e-5)
    x = torch.randn(32, 2) * 3 + 1
    assert torch.allclose(layer(x), plain(x), atol=1e-5)
    for _ in range(500):
        layer(x)
    # once the moving statistics agree with the batch, training and evaluation give the same
    trained = layer(x)
    assert torch.allclose(trained, layer.eval()(x), atol=1e-3)


def test_gradient_does_not_flow_through_the_correction() -> None:
    layer = BatchRenorm1d(1, eps=1e-12, warmup_steps=0)
    layer.running_var.fill_(4.0)
    x = torch.tensor([[1.0], [3.0], [8.0]], requires_grad=True)
    (layer(x) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
    assert x.grad is not None
    assert float(x.grad.sum()) == pytest.approx(0.0, abs=1e-5)  # the batch mean is subtracted, with gradient


def test_lazy_takes_its_size() -> None:
    layer = LazyBatchRenorm1d(momentum=0.2)
    assert layer(torch.randn(4, 6)).shape == (4, 6)
    assert type(layer) is BatchRenorm1d
    assert layer.num_features == 6


def test_channels_of_convolutions() -> None:
    """[B, C, H, W] is normalised by the statistics of each channel over all samples and places, as rows of so many features are."""
    torch.manual_seed(0)
    lazy, flat = LazyBatchRenorm1d(momentum=0.2, warmup_steps=10), BatchRenorm1d(3, momentum=0.2, warmup_steps=10)
    for _ in range(3):
        x = 2.0 * torch.randn(4, 3, 5, 2) + 1.0
        rows = x.movedim(1, -1).reshape(-1, 3)
        assert torch.allclose(lazy(x), flat(rows).reshape(4, 5, 2, 3).movedim(-1, 1), atol=1e-5)
    assert torch.allclose(lazy.running_var, flat.running_var, atol=1e-5)
