from __future__ import annotations

import errno
import os
import random
import resource
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.experiment.files import bundle as state


def bundle(x: Any) -> dict[str, Any]:
    return {"version": state.VERSION, "x": x}


def killed_while_saving(path: Path, where: str) -> None:
    """Save bundle(2) in a forked process that is killed with SIGKILL while it saves."""

    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(content: object, file: object) -> None:
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
        state.save(path, bundle(2))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(("where", "then"), [("writing", 1), ("synced", 1), ("replaced", 2)])
def test_a_kill_leaves_the_old_bundle_or_the_new(tmp_path: Path, where: str, then: int) -> None:
    path = tmp_path / "small_t0_s0_ckpt-last.pt"
    state.save(path, bundle(1))
    killed_while_saving(path, where)
    assert state.load(path) == bundle(then)
    assert list(tmp_path.glob("*ckpt-*.pt")) == [path], "what is left behind looks like a checkpoint"
    state.save(path, bundle(3))
    assert state.load(path) == bundle(3)
    assert os.listdir(tmp_path) == [path.name]


def test_an_error_leaves_the_old_bundle_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ckpt-last.pt"
    state.save(path, bundle(1))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        state.save(path, bundle(2))
    assert state.load(path) == bundle(1)
    assert os.listdir(tmp_path) == [path.name]


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    """The error must name the full disk, instead of torch's message "unexpected pos" or any other."""
    large = bundle(torch.zeros(100_000))  # before the fork: the child has no torch threads and would wait for them
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            state.save(tmp_path / "ckpt-last.pt", large)
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


def test_generators_continue_from_a_saved_state(tmp_path: Path) -> None:
    """The state must include the second normal number, which numpy's generator keeps for the next draw."""
    sources = ("python", "numpy", "torch")
    [draw(source) for source in sources]
    state.save(tmp_path / "rng.pt", {"version": state.VERSION, **state.rng_state("cpu")})
    expected = [draw(source) for source in sources for _ in range(3)]
    state.set_rng_state(state.load(tmp_path / "rng.pt"), "cpu")
    assert [draw(source) for source in sources for _ in range(3)] == expected


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving must succeed on file systems that refuse to open or to sync a folder."""
    path, fsync, opened = tmp_path / "ckpt-last.pt", os.fsync, os.open
    refused = []

    def refuse_fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            refused.append("fsync")
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    def refuse_open(name: Any, *arguments: Any, **options: Any) -> int:
        if os.path.isdir(name):
            refused.append("open")
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(name, *arguments, **options)

    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    monkeypatch.setattr(os, "fsync", refuse_fsync)
    state.save(path, bundle(1))
    monkeypatch.setattr(os, "open", refuse_open)
    state.save(path, bundle(2))
    monkeypatch.undo()
    assert refused == ["fsync", "open"]
    assert state.load(path) == bundle(2)
    assert os.listdir(tmp_path) == [path.name]
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"", "damaged or not a checkpoint"),
        (b"PK half", "damaged or not a checkpoint"),
        ({"weights": torch.zeros(2)}, "is not an slm_lab checkpoint"),
        (torch.zeros(2), "is not an slm_lab checkpoint"),
        ({"version": 3, "x": 1}, "has version 3 of the checkpoint format, and this slm_lab reads version 6"),
        ({"version": state.VERSION, "x": Path("evil")}, "damaged or not a checkpoint"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(content: Any, says: str, tmp_path: Path) -> None:
    """The file is missing, damaged, or from another program or version, or contains objects other than tensors and plain Python."""
    path = tmp_path / "ckpt-best.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(state.BundleError) as caught:
        state.load(path)
    assert str(caught.value).startswith(f"{path} ")
    assert says in str(caught.value)


def test_a_header_is_read_without_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header has the bundle's values and is readable even if tensors are damaged, unless all bytes are checked."""
    path, spec = tmp_path / "ckpt-last.pt", {"name": {"env": {"name": "é" * 300}}}
    content = {**bundle(torch.full((1000,), 0.25)), "frames": [5, 7], "tables": {"a.csv": (3, 2**31)}, "spec": spec, "other": 1}
    state.save(path, content)
    loaded: list[object] = []
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: loaded.append(arguments))
    expected = {"version": state.VERSION, "frames": [5, 7], "tables": {"a.csv": [3, 2**31]}, "spec": spec}
    assert state.read_header(path) == state.read_header(path, check=True) == expected
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((9,), 0.25).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert state.read_header(path) == expected
    with pytest.raises(state.BundleError, match="is damaged: its member"):
        state.read_header(path, check=True)
    assert loaded == []


def test_a_bundle_without_a_header_is_read_whole(tmp_path: Path) -> None:
    """A header that is too large is not written. If the header is damaged, nothing of the bundle is used."""
    path = tmp_path / "ckpt-last.pt"
    content = {**bundle(1), "spec": {"text": random.Random(0).randbytes(200_000).hex()}}
    state.save(path, content)
    assert state.load(path) == content
    assert state.read_header(path) == {"version": state.VERSION, "spec": content["spec"]}
    state.save(path, {**bundle(1), "done": True})
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)
    with pytest.raises(state.BundleError, match="does not match its checksum"):
        state.read_header(path)


def test_which_weights_are_the_best() -> None:
    """The order is: weights from an evaluation, from at least five training episodes, others; among equals, the higher return wins."""

    def saved(value: float | None, episodes: int, mode: str = "train") -> dict[str, Any]:
        return {"current_return": value, "current_epi": episodes, "mode": mode}

    kept = [saved(0.0, 1, "eval"), saved(9.0, 4), saved(2.0, 5), None, saved(-1.0, 1, "eval"), saved(1.0, 5)]
    assert sorted(kept, key=state.weights_sort_key) == [kept[index] for index in (3, 1, 5, 2, 4, 0)]
    assert {state.weights_sort_key(one) for one in (saved(None, 0), saved(np.nan, 5), {})} == {state.weights_sort_key(None)}
