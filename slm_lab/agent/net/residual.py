"""The residual block of SimBa (arXiv:2410.09754)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 4
"""Ratio of the number of hidden units of a ResidualBlock to the number of its inputs."""


class ResidualBlock(nn.Module):
    """Block of SimBa, which computes x + W₂ ReLU(W₁ LayerNorm(x) + b₁) + b₂ for x [B, F] (arXiv:2410.09754, section 4.1).

    The hidden layer of the block has 4 F units. The weights have He initialisation (arXiv:1502.01852), and the initial biases are 0.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, EXPANSION * width), nn.Linear(EXPANSION * width, width)
        for layer in (self.expand, self.contract):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        return x_BF + self.contract(F.relu(self.expand(self.norm(x_BF))))
