from __future__ import annotations

import errno
import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from slm_lab.experiment import checkpoint


def killed_while_saving(path: Path, where: str) -> None:
    """Save {"x": 2} in a forked process that is killed (SIGKILL) in the middle of it."""

    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(bundle: object, file: object) -> None:
        file.write(b"PK half of a bundle")  # type: ignore[attr-defined]
        file.flush()  # type: ignore[attr-defined]
        die()

    child = os.fork()
    if child == 0:
        match where:
            case "writing":
                torch.save = half
            case "synced":
                os.replace = die  # type: ignore[assignment]
            case "replaced":
                os.open = die  # type: ignore[assignment]
        checkpoint.save(path, {"x": 2})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(("where", "then"), [("writing", 1), ("synced", 1), ("replaced", 2)])
def test_a_kill_leaves_the_old_bundle_or_the_new(tmp_path: Path, where: str, then: int) -> None:
    path = tmp_path / "small_t0_s0_ckpt-last.pt"
    checkpoint.save(path, {"x": 1})
    killed_while_saving(path, where)
    assert checkpoint.load(path) == {"x": then}
    assert list(tmp_path.glob("*ckpt-*.pt")) == [path], "what is left behind looks like a checkpoint"
    checkpoint.save(path, {"x": 3})
    assert checkpoint.load(path) == {"x": 3}
    assert os.listdir(tmp_path) == [path.name]


def test_an_error_leaves_the_old_bundle_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ckpt-last.pt"
    checkpoint.save(path, {"x": 1})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(path, {"x": 2})
    assert checkpoint.load(path) == {"x": 1}
    assert os.listdir(tmp_path) == [path.name]


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    """Not torch's "unexpected pos"."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            checkpoint.save(tmp_path / "ckpt-last.pt", {"x": torch.zeros(100_000)})
        except OSError as error:
            os._exit(0 if error.errno == errno.EFBIG and not os.listdir(tmp_path) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def draw(source: str) -> float:
    sources: dict[str, Callable[[], float]] = {
        "python": random.random,
        "numpy": lambda: float(np.random.normal()),
        "torch": lambda: float(torch.rand(())),
    }
    return sources[source]()


@pytest.mark.parametrize("source", ["python", "numpy", "torch"])
def test_generators_go_on_from_a_saved_state(tmp_path: Path, source: str) -> None:
    draw(source)  # numpy keeps a second normal number back, which belongs to the state
    checkpoint.save(tmp_path / "rng.pt", checkpoint.rng_state("cpu"))
    expected = [draw(source) for _ in range(3)]
    checkpoint.set_rng_state(checkpoint.load(tmp_path / "rng.pt"), "cpu")
    assert [draw(source) for _ in range(3)] == expected
