"""Tests of checkpoints at a URL.

A checkpoint is written completely or not at all, it is found again, and it is never reported as absent when the store does not respond.
"""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from slm_lab.cli.entry import main
from slm_lab.experiment.deploy.load import load_agent
from slm_lab.experiment.execute.ray.connect import probe_node
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import checkpoint_names
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.storage import StoredPath
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.resume import read_run
from slm_lab.spec.models.spec import Spec
from tests.experiment.commands import rows

BUNDLE: dict[str, Any] = {"version": state.VERSION, "weights": torch.arange(100_000.0), "names": ["a", None, 1]}


class _Limited:
    """File that accepts only `room` bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "no room in the store")
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _Limited:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


class Faulty(LocalFileSystem):  # type: ignore[misc]
    """Local file system that can fail as a remote store does."""

    protocol = "faulty"
    room: int | None = None
    error: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("faulty://"))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        return file if self.room is None or mode == "rb" else _Limited(file, self.room)

    def mv(self, *paths: str, **options: Any) -> None:
        self._fail()
        super().mv(*paths, **options)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._fail()
        return dict(super().info(path, **options))

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredPath]:
    """Yield a saved checkpoint in a store that can fail."""
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    path = StoredPath(f"faulty://{tmp_path}/store") / "a_ckpt-last.pt"
    state.save(path, BUNDLE)
    yield path
    monkeypatch.undo()
    Faulty.clear_instance_cache()


def test_a_bundle_comes_back(tmp_path: Path) -> None:
    folder = StoredPath(f"file://{tmp_path}/run")
    path = folder / "a_ckpt-last.pt"
    assert not path.exists()
    assert folder.iterdir() == []
    for names in (["old"], ["new"]):
        state.save(path, BUNDLE | {"names": names})
    loaded = state.load(path)
    assert torch.equal(loaded["weights"], BUNDLE["weights"])
    assert loaded["names"] == ["new"]
    assert folder.iterdir() == [path]
    assert (path.name, path.stem, str(path)) == ("a_ckpt-last.pt", "a_ckpt-last", f"file://{tmp_path}/run/a_ckpt-last.pt")
    (tmp_path / "run" / path.name).write_bytes(b"PK half a file")
    with pytest.raises(state.BundleError, match="damaged"):
        state.load(path)


@pytest.mark.parametrize("how", [{"room": 100_000}, {"error": PermissionError("no")}, {"error": RuntimeError("the client gave up")}])
def test_a_bundle_that_cannot_be_written_leaves_the_old_one(
    how: dict[str, Any], faulty: StoredPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in how.items():
        monkeypatch.setattr(Faulty, name, value)
    with pytest.raises(OSError, match=r"^no$|no room in the store|RuntimeError: the client gave up"):
        state.save(faulty, BUNDLE | {"names": ["new"]})
    monkeypatch.undo()
    assert state.load(faulty)["names"] == BUNDLE["names"]
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["a_ckpt-last.pt"]


def test_a_store_that_does_not_answer_has_no_absent_files(faulty: StoredPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's `exists` returns False in this case, and a Session would start again from frame 0."""
    monkeypatch.setattr(Faulty, "error", RuntimeError("timeout"))
    with pytest.raises(OSError, match="timeout"):
        faulty.exists()


def test_a_node_that_reads_but_cannot_write_says_so(faulty: StoredPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = faulty.with_name("token")
    token.write_text("hello")
    assert probe_node(token)["problem"] == ""
    monkeypatch.setattr(Faulty, "error", PermissionError(errno.EACCES, "only for reading"))
    found = probe_node(token)
    assert (found["token"], found["problem"]) == ("hello", "only for reading")
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"a_ckpt-last.pt", "token"}


def test_folders_are_made_but_not_what_contains_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        (StoredPath(f"file://{tmp_path}/no_bucket/run") / "x").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_unknown_protocols_are_told_with_the_nearest() -> None:
    with pytest.raises(OSError, match="unknown protocol 'gsc'; did you mean 'gs'"):
        (StoredPath("gsc://bucket") / "x").write_text("x")


@pytest.fixture
def stored_run(make_spec: Callable[..., Spec], tmp_path: Path) -> RunPaths:
    """Return a run of 1000 frames whose checkpoints are at a URL."""
    trial = Trial(make_spec(), plan=Plan(data_dir=tmp_path / "data"))
    trial.run()
    shutil.move(trial.paths.model_dir, tmp_path / "store")
    trial.paths.model_dir.mkdir()
    body = json.loads(trial.paths.spec.read_text())
    body["small"]["meta"]["run"][0]["checkpoints"] = f"file://{tmp_path}/store"
    trial.paths.spec.write_text(json.dumps(body))
    return RunPaths(trial.paths.root, "small")


def test_a_run_finds_its_checkpoints_again(stored_run: RunPaths, make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    assert checkpoint_names(stored_run) == ["best", "last"]
    assert load_agent(stored_run.root).path == StoredPath(f"file://{tmp_path}/store/small_t0_s0_ckpt-best.pt")
    Trial.resume(stored_run.root, ["env.max_frame=2000"]).run()
    assert list(stored_run.model_dir.iterdir()) == []
    assert read_run(RunPaths(stored_run.root, "small")).starts[0].status == "finished"
    straight = Trial(make_spec(env={"max_frame": 2000}), plan=Plan(data_dir=tmp_path / "straight")).run()
    assert rows(stored_run.session_df(0)) == rows(straight.paths.session_df(0))


def test_a_checkpoint_that_cannot_be_read_is_a_user_error(stored_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def info(self: LocalFileSystem, path: str, **options: Any) -> dict[str, Any]:
        raise RuntimeError("the store is away")

    monkeypatch.setattr(LocalFileSystem, "info", info)
    with pytest.raises(UserError, match=r"ckpt-last.pt cannot be read: RuntimeError: the store is away"):
        Trial.resume(stored_run.root)


def test_paths_say_the_same_where_the_folder_is_not_seen(stored_run: RunPaths, tmp_path: Path) -> None:
    body = json.loads(stored_run.spec.read_text())
    body["small"]["meta"]["sampler"] = {"num_policies": 2}
    stored_run.spec.write_text(json.dumps(body))
    sent = pickle.dumps(stored_run)
    stored_run.root.rename(tmp_path / "elsewhere")
    seen = pickle.loads(sent)
    assert seen.policies == 2
    assert seen.checkpoint(1, "best") == StoredPath(f"file://{tmp_path}/store/small_t0_s0_p1_ckpt-best.pt")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "--storage", "s3://bucket"], "--storage s3://bucket: only a run on a cluster"),
        (["train", "--cluster", "local", "--storage", "/shared"], "invalid URL '/shared'"),
        (["search", "--cluster", "local", "--storage", "s3://bucket"], "--storage s3://bucket has no effect with search"),
        (["study", "--cluster", "local", "--storage", "s3://bucket"], "--storage s3://bucket has no effect with study"),
        (["dev", "--storage", "s3://bucket"], "--storage s3://bucket has no effect with dev"),
        (["train@latest", "--storage", "s3://bucket"], "--storage s3://bucket has no effect with train@"),
    ],
)
def test_where_storage_does_not_apply(words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["demo.json", "ppo_cartpole", *words, "--data-dir", str(tmp_path)])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
