"""Layers of SimbaV2 (arXiv:2502.15280, section 4).

Feature vectors and the weight vector of each output have norm 1, and learnable vectors scale the outputs of layers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slm_lab.agent.ops.linear import normalize_rows

EXPANSION = 4
"""Ratio of the number of hidden units of a UnitBlock to the number of its inputs."""
SHIFT = 3.0
"""Constant that is appended to an input vector before scaling to norm 1, so that the result still depends on the norm of the input."""


def normalize_vectors(x_BF: Tensor) -> Tensor:
    """Return the vectors x_BF [B, F], each scaled to norm 1."""
    return F.normalize(x_BF, dim=1, eps=1e-8)


def constrain_row_norms(weight: Tensor) -> None:
    """Scale the rows of a weight to norm 1, and set `weight.unit_rows`, so that each optimizer step scales the rows again."""
    weight.unit_rows = True  # type: ignore[attr-defined]
    normalize_rows(weight)


class UnitLinear(nn.Linear):
    """Linear layer without bias. The weight vector of each output has norm 1. The initial weight matrix is orthogonal."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)
        nn.init.orthogonal_(self.weight)
        constrain_row_norms(self.weight)


class Scaler(nn.Module):
    """Layer that computes s ⊙ x with a learnable vector s.

    Args: initial: initial value of s. initial_gain: initial value of the parameter g in s = (initial / initial_gain) · g. The initial gain
    determines how far one step of Adam changes s, because the size of Adam's step does not depend on the size of the gradient.
    """

    def __init__(self, size: int, initial: float, initial_gain: float) -> None:
        super().__init__()
        self.gain, self.factor = nn.Parameter(torch.full((size,), initial_gain)), initial / initial_gain

    def forward(self, x_BF: Tensor) -> Tensor:
        return x_BF * (self.gain * self.factor)


def _scaler(size: int) -> Scaler:
    """Return the Scaler of a hidden layer with `size` outputs."""
    return Scaler(size, math.sqrt(2.0 / size), math.sqrt(2.0 / size))


class UnitEmbedding(nn.Module):
    """First layer of SimbaV2, which computes ℓ2(s ⊙ W ℓ2([x, 3])) for inputs x [B, D].

    In this formula, 3 is the constant SHIFT that is appended to x, ℓ2 scales a vector to norm 1, W is the weight matrix of a UnitLinear,
    and s is the learnable vector of a Scaler.
    """

    def __init__(self, n_in: int, width: int) -> None:
        super().__init__()
        self.linear, self.scaler = UnitLinear(n_in + 1, width), _scaler(width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return normalize_vectors(self.scaler(self.linear(normalize_vectors(F.pad(x_BD, (0, 1), value=SHIFT)))))


class UnitBlock(nn.Module):
    """Block of SimbaV2, which computes ℓ2((1 − α) ⊙ h + α ⊙ ℓ2(W₂ ReLU(s ⊙ W₁ h))) for h [B, F].

    The hidden layer of the block has 4 F units. The initial value of α is 1 / (blocks + 1).

    Args: blocks: number of blocks of the net.
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.expand, self.scaler = UnitLinear(width, EXPANSION * width), _scaler(EXPANSION * width)
        self.contract = UnitLinear(EXPANSION * width, width)
        self.alpha = Scaler(width, 1.0 / (blocks + 1), 1.0 / math.sqrt(width))

    def forward(self, h_BF: Tensor) -> Tensor:
        changed_BF = normalize_vectors(self.contract(F.relu(self.scaler(self.expand(h_BF)))))
        return normalize_vectors(h_BF + self.alpha(changed_BF - h_BF))


class UnitLastHiddenLayer(nn.Module):
    """Layer of SimbaV2 before the output layer, which computes s ⊙ W h."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear, self.scaler = UnitLinear(n_in, n_out), Scaler(n_out, 1.0, 1.0)

    def forward(self, h_BF: Tensor) -> Tensor:
        return self.scaler(self.linear(h_BF))
