"""Tests of batch renormalisation against the formula of the paper."""

import pytest
import torch

from slm_lab.agent.net.normalization import BatchRenorm1d, LazyBatchRenorm1d


def test_formula() -> None:
    """Algorithm 1 of arXiv:1702.03275 after the warm-up, with moving statistics for which both r and d are clipped."""
    torch.manual_seed(0)
    layer = BatchRenorm1d(3, momentum=0.1, eps=1e-3, warmup_steps=0)
    layer.running_mean.copy_(torch.tensor([0.1, -30.0, 0.0]))  # the second mean is so far off that d is clipped
    layer.running_var.copy_(torch.tensor([2.0, 1.0, 0.01]))  # the third variance is so small that r is clipped
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


def test_defaults_and_bounds_during_the_warm_up() -> None:
    """Defaults and warm-up: over 10,000 batches r_max rises from 1 to 3 and d_max from 0 to 5. eps is added under the square root."""
    torch.manual_seed(0)
    for done in (0, 2_500, 9_999, 10_000, 30_000):
        layer, x = BatchRenorm1d(2), 1e-3 * torch.randn(8, 2)
        layer.running_mean.copy_(torch.tensor([0.4, -0.3]))
        layer.running_var.copy_(torch.tensor([1e-6, 4.0]))
        layer.steps.fill_(done)
        share = min(done / 10_000, 1.0)
        r_max, d_max = 1.0 + 2.0 * share, 5.0 * share
        mean, std, moving_std = x.mean(0), (x.var(0, unbiased=False) + 1e-5).sqrt(), (layer.running_var + 1e-5).sqrt()
        r = (std / moving_std).clamp(1.0 / r_max, r_max)
        d = ((mean - layer.running_mean) / moving_std).clamp(-d_max, d_max)
        moved = 0.99 * layer.running_var + 0.01 * x.var(0, unbiased=False)
        assert torch.allclose(layer(x), (x - mean) / std * r + d, atol=1e-5)
        assert torch.allclose(layer.running_var, moved)
        assert int(layer.steps) == done + 1
        rows = (x - layer.running_mean) / (layer.running_var + 1e-5).sqrt()
        assert torch.allclose(layer.eval()(x), rows, rtol=1e-4)


def test_order_of_arguments() -> None:
    layer = LazyBatchRenorm1d(0.1, 0.2, 4.0, 6.0, 7)
    assert (layer.eps, layer.momentum, layer.r_max, layer.d_max, layer.warmup_steps) == (0.1, 0.2, 4.0, 6.0, 7)
    other = BatchRenorm1d(3, 0.1, 0.2, 4.0, 6.0, 7)
    layer(torch.randn(4, 3))
    assert type(layer) is BatchRenorm1d
    assert layer.num_features == 3
    assert vars(layer).keys() == vars(other).keys()
    with pytest.raises(ValueError, match="r_max"):
        BatchRenorm1d(3, r_max=0.5)


def test_gradient_does_not_flow_through_the_correction() -> None:
    layer = BatchRenorm1d(1, eps=1e-12, warmup_steps=0)
    layer.running_var.fill_(4.0)
    x = torch.tensor([[1.0], [3.0], [8.0]], requires_grad=True)
    (layer(x) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
    assert float(x.grad.sum()) == pytest.approx(0.0, abs=1e-5)  # the gradient includes that of the subtracted batch mean


@pytest.mark.slow
def test_statistics_of_bfloat16_inputs_are_float32() -> None:
    torch.manual_seed(0)
    x_BF = (5.0 + torch.randn(64, 3)).bfloat16()
    ours, theirs = BatchRenorm1d(3, momentum=0.5), BatchRenorm1d(3, momentum=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        out_BF = ours(x_BF)
    torch.testing.assert_close(out_BF.float(), theirs(x_BF.float()), rtol=0.02, atol=0.02)
    assert torch.equal(ours.running_mean, theirs.running_mean)
    assert torch.equal(ours.running_var, theirs.running_var)


def test_channels_of_convolutions() -> None:
    """[B, C, H, W] inputs are normalised by the statistics of each channel over all samples and positions, like rows of C features."""
    torch.manual_seed(0)
    lazy, flat = LazyBatchRenorm1d(momentum=0.2, warmup_steps=10), BatchRenorm1d(3, momentum=0.2, warmup_steps=10)
    for _ in range(3):
        x = 2.0 * torch.randn(4, 3, 5, 2) + 1.0
        rows = x.movedim(1, -1).reshape(-1, 3)
        assert torch.allclose(lazy(x), flat(rows).reshape(4, 5, 2, 3).movedim(-1, 1), atol=1e-5)
    assert torch.allclose(lazy.running_var, flat.running_var, atol=1e-5)
