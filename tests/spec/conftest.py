"""Spec files for the tests of the spec package."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.wording import check_wording

PPO: dict[str, Any] = {
    "agent": {"name": "PPO", "algorithm": {"name": "PPO"}, "memory": {"name": "OnPolicyBatchReplay"}, "net": {"type": "MLPNet"}},
    "env": {"name": "CartPole-v1", "num_envs": 4, "max_frame": 1000},
    "meta": {"max_session": 2},
}


_REGISTERED = dict(gym.registry)


@pytest.fixture(scope="module", autouse=True)
def gymnasium_ids() -> None:
    """Restore Gymnasium's own registrations: an import of gymnasium-robotics by another test replaces the old ids of MuJoCo."""
    gym.registry.update(_REGISTERED)


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with keys set by dotted path; the value ... removes a key."""
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

    def __init__(self, folder: Path, log: pytest.LogCaptureFixture, test: str) -> None:
        self.folder, self.log, self.test = folder, log, test

    def file(self, content: Any, name: str = "specs.json") -> Path:
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    def load(self, changes: dict[str, Any] | None = None, sets: list[str] | None = None) -> Spec:
        """Load the changed PPO spec, under the name "ppo"."""
        return load_spec(self.file({"ppo": changed(PPO, changes or {})}), "ppo", sets or [])

    def problems(self, changes: dict[str, Any], sets: list[str] | None = None) -> list[str]:
        """Return the problems of the changed PPO spec: the path of each, and its code unless it is "invalid"."""
        return self.found(self.load, changes, sets)

    def messages(self, changes: dict[str, Any]) -> list[str]:
        """Return the full texts of the problems of the changed PPO spec."""
        with pytest.raises(SpecError) as caught:
            self.load(changes)
        return [str(problem) for problem in caught.value.problems]

    def found(self, call: Callable[..., Any], *arguments: Any) -> list[str]:
        """Return the problems of the SpecError that a call raises, in the form of `problems`."""
        with pytest.raises(SpecError) as caught:
            call(*arguments)
        problems = caught.value.problems
        check_wording(self.test, [str(problem).replace(str(self.folder), "FOLDER") for problem in problems])
        return [f"{problem.path} ({problem.code})" if problem.code != "invalid" else problem.path for problem in problems]

    def notices(self) -> list[str]:
        """Return the paths of the notices so far; "--set x" for a variable that nothing uses."""
        texts = [record.getMessage() for record in self.log.records]
        check_wording(self.test, texts)
        return [text.split(": ")[0 if text.startswith("--set") else 1] for text in texts]

    def told(self) -> list[str]:
        """Return the full texts of the notices so far."""
        return [record.getMessage() for record in self.log.records]


@pytest.fixture
def specs(tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Specs:
    caplog.set_level(logging.WARNING, logger="slm_lab")
    return Specs(tmp_path, caplog, f"{request.path.stem}.{request.node.originalname}")
