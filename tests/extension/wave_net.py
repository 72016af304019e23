"""A user's net in one file: one hidden layer of sine waves (arXiv:2006.09661)."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.models.base import Positive, PositiveReal
from slm_lab.spec.models.net import NetSpec


class WaveNetSpec(NetSpec):
    """One hidden layer with sine activations."""

    name: str
    waves: Positive = 32
    """Number of hidden units."""
    frequency: PositiveReal = 1.0
    """Factor by which the inputs of the sine are multiplied."""

    @classmethod
    def implementation(cls) -> Any:
        import torch
        from torch import Tensor, nn

        from slm_lab.lib.records import ObservationSpace

        class WaveNet(nn.Module):
            """obs [B, *shape] → features [B, waves]."""

            def __init__(self, spec: WaveNetSpec, obs: ObservationSpace, role: str) -> None:
                super().__init__()
                self.frequency, self.features = spec.frequency, spec.waves
                self.linear = nn.Linear(torch.Size(obs.shape).numel(), spec.waves)

            def forward(self, obs_B: Tensor) -> Tensor:
                return torch.sin(self.frequency * self.linear(obs_B.flatten(1)))

        return WaveNet
