"""Fixtures: specs that are small enough to run in a test, and commands whose processes are killed after the test."""

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
    """Return the body of a PPO spec of CartPole, as in a spec file; `sections` override single keys."""
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
    """Return the function spec_body(env={…}, meta={…}, algorithm={…}), which returns the body of a spec."""
    return _spec


@pytest.fixture
def make_spec() -> Callable[..., Spec]:
    """Return a function with the same arguments as spec_body, which returns a Spec named small."""
    return lambda **sections: Spec.model_validate({"name": "small", **_spec(**sections)})


@pytest.fixture
def fd() -> Iterator[int]:
    """Yield the descriptor of a file for shared arrays."""
    file = create_shared_file()
    yield file
    os.close(file)


@pytest.fixture
def no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of the random baseline in this process, which would build ten more envs."""
    from slm_lab.experiment.report import analyze

    monkeypatch.setattr(analyze, "measure_baseline", lambda *arguments: None)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Return the folder of a run named small; the random baseline is 20."""
    monkeypatch.setattr(analyze, "known_baseline", lambda spec: Baseline(20.0))
    run = RunPaths(tmp_path, "small")
    run.make_dirs()
    return run


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Yield the function command(body); all processes that it starts are killed after the test."""
    made: list[Command] = []

    def make(body: dict[str, Any], **environ: str) -> Command:
        made.append(Command(tmp_path, body, **environ))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
