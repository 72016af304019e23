"""Net of a user for tests: `tests.agent.user_net:UserNetSpec`."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.models.net import NetSpec


class UserNetSpec(NetSpec):
    """Spec of a net with two linear layers of 8 units, with tanh."""

    name: str

    @classmethod
    def implementation(cls) -> Any:
        from torch import nn

        class UserNet(nn.Sequential):
            def __init__(self, spec: NetSpec, obs: Any, role: str) -> None:
                super().__init__(nn.Linear(obs.shape[0], 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
                self.features = 8

        return UserNet
