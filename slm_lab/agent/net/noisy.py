"""Noisy nets (arXiv:1706.10295): linear layers with noise in their weights. The scale of the noise is learned."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slm_lab.agent.ops.device import upload

ONE_PRODUCT_ROWS = 8
"""Minimum number of rows for which a noisy layer adds the noise to its weights and computes one product. For fewer rows, two products are
faster: one with the means, and one with the scales of the noise. For one row and a layer with 3,136 inputs and 512 outputs, two products
take 0.26 ms and one product takes 0.92 ms on one core. For a layer with 256 inputs and 128 outputs, both methods take equally long at about
8 rows."""


class NoisyLinear(nn.Linear):
    """Linear layer with noise in its weights: y = (μ_w + σ_w ⊙ ε_w) x + μ_b + σ_b ⊙ ε_b (arXiv:1706.10295, equation 9).

    The noise is factorised: ε_w = ε_out ε_inᵀ and ε_b = ε_out. `weight` and `bias` are the means μ_w and μ_b. If `noise` is None, the layer
    is an ordinary linear layer with `weight` and `bias`.

    Args: sigma_0: √inputs times the initial value of σ_w and σ_b.
    """

    def __init__(self, inputs: int, outputs: int, sigma_0: float) -> None:
        super().__init__(inputs, outputs)  # torch's default is the μ of section 3.2, uniform in ±1 / √inputs
        sigma = sigma_0 / math.sqrt(inputs)
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma))
        self.noise: tuple[Tensor, Tensor] | None = None
        """The noise ε_in [I] and ε_out [O], or None for a layer without noise."""

    def forward(self, x: Tensor) -> Tensor:
        if self.noise is None:
            return F.linear(x, self.weight, self.bias)
        eps_in, eps_out = self.noise
        if x.numel() < ONE_PRODUCT_ROWS * self.in_features:  # σ_w ⊙ (ε_out ε_inᵀ) x = ε_out ⊙ σ_w (ε_in ⊙ x)
            noise = eps_out * F.linear(x * eps_in, self.weight_sigma, self.bias_sigma)
            return F.linear(x, self.weight, self.bias) + noise
        weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(eps_out, eps_in))
        return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, eps_out))


class NoiseSource:
    """Source of the noise of all noisy layers in `nets`. A NoiseSource is falsy if `nets` contain no noisy layers."""

    def __init__(self, *nets: nn.Module | None) -> None:
        modules = [module for net in nets if net is not None for module in net.modules()]
        self.layers = [module for module in modules if isinstance(module, NoisyLinear)]
        self.sizes = [size for layer in self.layers for size in (layer.in_features, layer.out_features)]

    def __bool__(self) -> bool:
        return bool(self.layers)

    def draw(self, rng: np.random.Generator) -> None:
        """Draw new noise for all noisy layers: sgn(x) √|x| with standard normal x (arXiv:1706.10295, equations 10 and 11)."""
        if not self.layers:
            return
        x = rng.standard_normal(sum(self.sizes), dtype=np.float32)
        eps = upload(torch.from_numpy(np.sign(x) * np.sqrt(np.abs(x))), self.layers[0].weight.device)
        parts = eps.split(self.sizes)
        for layer, eps_in, eps_out in zip(self.layers, parts[::2], parts[1::2], strict=True):
            layer.noise = eps_in, eps_out

    def remove(self) -> None:
        """Remove the noise from all noisy layers, which then compute as ordinary linear layers."""
        for layer in self.layers:
            layer.noise = None
