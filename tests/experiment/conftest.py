"""Specs small enough to run in a test, and commands that end with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.report import analyze
from slm_lab.experiment.report.baseline import Baseline
from slm_lab.lib.store import create_shared_file
from slm_lab.spec.models.spec import Spec
from tests.experiment.commands import Command


def _spec(**sections: Any) -> dict[str, Any]:
    """A PPO spec of CartPole as it stands in a file; `sections` hold what differs."""
    algorithm = {"name": "PPO", "time_horizon": 32, "minibatch_size": 64, "training_epoch": 2}
    net = {"name": "MLPNet", "hid_layers": [16], "hid_layers_activation": "tanh"}
    return {
        "agent": {
            "name": "PPO",
            "algorithm": algorithm | sections.get("algorithm", {}),
            "memory": {"name": "OnPolicyBatchReplay"},
            "net": net,
        },
        "env": {"name": "CartPole-v1", "num_envs": 4, "max_frame": 1000} | sections.get("env", {}),
        "meta": {"max_session": 1, "log_frequency": 250, "random_seed": 5} | sections.get("meta", {}),
    }


@pytest.fixture
def spec_body() -> Callable[..., dict[str, Any]]:
    """spec_body(env={…}, meta={…}, algorithm={…}): the body of a spec."""
    return _spec


@pytest.fixture
def make_spec() -> Callable[..., Spec]:
    """The same as a Spec, called small."""
    return lambda **sections: Spec.model_validate({"name": "small", **_spec(**sections)})


@pytest.fixture
def fd() -> Iterator[int]:
    """A file for shared arrays."""
    file = create_shared_file()
    yield file
    os.close(file)


@pytest.fixture
def no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random baseline is not measured in this process, which takes ten more envs."""
    from slm_lab.experiment.report import analyze

    monkeypatch.setattr(analyze, "measure_baseline", lambda *arguments: None)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """The folder of a run called small; the random baseline is 20."""
    monkeypatch.setattr(analyze, "known_baseline", lambda spec: Baseline(20.0))
    run = RunPaths(tmp_path, "small")
    run.make_dirs()
    return run


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """command(body): what it starts is killed after the test."""
    made: list[Command] = []

    def make(body: dict[str, Any], **environ: str) -> Command:
        made.append(Command(tmp_path, body, **environ))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
