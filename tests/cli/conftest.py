"""Fixtures for the tests of the command line: a spec file, and the removal of registered envs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

SMALL: dict[str, Any] = {
    "agent": {
        "name": "PPO",
        "algorithm": {"name": "PPO", "time_horizon": 32, "minibatch_size": 64, "training_epoch": 2},
        "memory": {"name": "OnPolicyBatchReplay"},
        "net": {"name": "MLPNet", "hid_layers": [16], "hid_layers_activation": "tanh"},
    },
    "env": {"name": "CartPole-v1", "num_envs": 4, "max_frame": 1000},
    "meta": {"max_session": 1, "log_frequency": 250, "random_seed": 5},
}


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """Return a file with two specs, small and other."""
    path = tmp_path / "specs.json"
    path.write_text(json.dumps({"small": SMALL, "other": SMALL | {"meta": {"random_seed": 1}}}))
    return path


_OTHERS = ("minigrid", "envs_of_others")
"""Packages that register envs when they are imported."""


@pytest.fixture(autouse=True)
def forget_registrations() -> Iterator[None]:
    """After each test, unload the packages in `_OTHERS` that the test imported, and delete their envs from Gymnasium's registry."""
    before, modules = set(gymnasium.registry), set(sys.modules)
    yield
    for name in set(gymnasium.registry) - before:
        maker = gymnasium.registry[name].entry_point
        if str(getattr(maker, "__module__", maker)).startswith(_OTHERS):
            del gymnasium.registry[name]
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in _OTHERS:
            del sys.modules[name]
