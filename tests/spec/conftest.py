"""Spec files for the tests of the spec room."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slm_lab.spec.base import SpecError
from slm_lab.spec.loader import load_spec
from slm_lab.spec.spec import Spec

PPO: dict[str, Any] = {
    "agent": {"name": "PPO", "algorithm": {"name": "PPO"}, "memory": {"name": "OnPolicyBatchReplay"}, "net": {"type": "MLPNet"}},
    "env": {"name": "CartPole-v1", "num_envs": 4, "max_frame": 1000},
    "meta": {"max_session": 2},
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of `base` with keys set by dotted path; ... removes a key."""
    result = copy.deepcopy(base)
    for path, value in changes.items():
        node: Any = result
        *above, last = path.split(".")
        for key in above:
            node = node.setdefault(key, {})
        if value is ...:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return result


class Specs:
    """Writes a spec file and loads it."""

    def __init__(self, folder: Path, log: pytest.LogCaptureFixture) -> None:
        self.folder, self.log = folder, log

    def file(self, content: Any, name: str = "specs.json") -> Path:
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    def load(self, changes: dict[str, Any] | None = None, sets: list[str] | None = None) -> Spec:
        """The PPO spec with changes, under the name "ppo"."""
        return load_spec(self.file({"ppo": changed(PPO, changes or {})}), "ppo", sets or [])

    def problems(self, changes: dict[str, Any], sets: list[str] | None = None) -> list[str]:
        """The problems of the changed PPO spec, as lines."""
        with pytest.raises(SpecError) as caught:
            self.load(changes, sets)
        return [str(problem) for problem in caught.value.problems]

    def notices(self) -> list[str]:
        """Notices told so far."""
        return [record.getMessage() for record in self.log.records]


@pytest.fixture
def specs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Specs:
    caplog.set_level(logging.WARNING, logger="slm_lab")
    return Specs(tmp_path, caplog)


@pytest.fixture
def spec_error() -> Callable[[Callable[[], Any]], list[str]]:
    """Runs something and gives the problems of its SpecError."""

    def run(call: Callable[[], Any]) -> list[str]:
        with pytest.raises(SpecError) as caught:
            call()
        return [str(problem) for problem in caught.value.problems]

    return run
