"""Tests of `make gpu` on a machine without a GPU, and of its dry run."""

import json
from pathlib import Path

import pytest
import torch

from bench import gpu
from slm_lab.agent.optim import trainer


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "finds no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_dry_run_checks_and_measures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--dry-run", "--out", str(tmp_path / "gpu.json")]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found["checks"]) == set(gpu.CHECKS)
    assert set(found["checks"].values()) == {"ok"}
    assert [row["algorithm"] for row in found["rows"]] == ["PPO", "SoftActorCritic", "CrossQ"]
    assert all(row[key] > 0.0 for row in found["rows"] for key in ("cpu", "device", "plain torch"))
    assert "gradient steps/s" in capsys.readouterr().out


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails if the steps on the device are wrong; here they clip gradients to another norm."""
    step = trainer.Trainer._step_on_device
    monkeypatch.setattr(trainer.Trainer, "_step_on_device", lambda self: (setattr(self, "clip", 1e-3), step(self))[1])
    assert gpu.check_updates(gpu.CHECKS["PPO"], "cuda:0", True)


@pytest.mark.slow
def test_workers_train_one_net() -> None:
    assert gpu.check_workers(False) == ""
