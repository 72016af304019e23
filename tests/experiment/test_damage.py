"""Tests of files of a run in which one bit is flipped: each file must be refused or have unchanged content."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.experiment.deploy.load import load_agent
from slm_lab.experiment.execute.local.user_code import describe_failure
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import readable_checkpoint
from slm_lab.experiment.files.paths import RunPaths, new_run
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.files.storage import Location, StoredPath
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.run.experiment import check_writable
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.session import Session
from slm_lab.lib.files import checked_content, unwritable_reason, with_checksum
from slm_lab.spec.models.spec import Spec
from tests.resume.runs import differing

FLIPS = 200
DQN = {"algorithm": {"name": "DQN", "training_frequency": 4, "training_start_step": 100}, "memory": {"name": "Replay", "max_size": 400}}
SERIAL = {"num_workers": 2, "serial_mode": True}
Make = Callable[..., dict[str, Any]]


def of_session(body: dict[str, Any], folder: Path) -> RunPaths:
    """Run a Session and return the paths of its files."""
    paths = new_run(folder, "small")
    Session(Spec.model_validate({"name": "small", **body})).run(LocalSink(paths))
    return paths


def bundle_of(kind: str, spec_body: Make, folder: Path) -> Location:
    """Return a bundle of one of the kinds that a run writes."""
    few = {"env": {"max_frame": 400}}
    match kind:
        case "on-policy":
            return of_session(spec_body(**few), folder).checkpoint(0, "last")
        case "weights":
            return of_session(spec_body(**few), folder).checkpoint(0, "best")
        case "sampler":
            return of_session(spec_body(**few, meta={"sampler": SERIAL}), folder).checkpoint(0, "last")
        case "replay":
            body = spec_body(**few, meta={"save_replay": True})
            body["agent"] |= DQN
            return of_session(body, folder).checkpoint(0, "last")
        case "hogwild":
            trial = Trial(
                Spec.model_validate({"name": "small", **spec_body(**few, meta={"distributed": "shared", "max_session": 2})}), folder
            )
            trial.run()
            return trial.paths.trial_checkpoint()
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 4, 84, 84), np.uint8))
    state.save(folder / "images.pt", {"version": state.VERSION, "policies": [{"replay": {"frames": images, "seen": 64}}]})
    return folder / "images.pt"


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]


def count_refused(path: Path, bits: list[int]) -> int:
    """Flip each of these bits of a bundle, and return how often it was refused; in all other cases its content must be unchanged."""
    data, before, refusals = path.read_bytes(), state.load(path), []
    for bit in bits:
        path.write_bytes(flipped(data, bit))
        try:
            assert differing(before, state.load(path, mapped=bool(bit % 2))) == [], f"bit {bit}"
        except state.BundleError as error:
            refusals.append(str(error))
    assert all(str(path) in refusal for refusal in refusals)
    return len(refusals)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["on-policy", "weights", "sampler", "replay", "hogwild", "images"])
def test_no_flipped_bit_of_a_bundle_is_used(kind: str, spec_body: Make, tmp_path: Path) -> None:
    path = bundle_of(kind, spec_body, tmp_path)
    assert isinstance(path, Path)
    size = 8 * path.stat().st_size
    assert count_refused(path, random.Random(kind).sample(range(size), FLIPS)) >= FLIPS - 2  # only flips in the seal may be harmless


@pytest.mark.parametrize("older", [False, True])
def test_nor_is_any_bit_around_the_members(older: bool, tmp_path: Path) -> None:
    """The headers and the directory of the archive have no checksum, so a flipped bit there must not change the content either.

    For example, torch reads nothing from a member that is marked as a folder. Bundles of older versions have no checksum of the whole file.
    """
    path = tmp_path / "small.pt"
    bundle = {"version": state.VERSION, "weights": {"a": torch.arange(3)}, "x": [1.5, None, "abc"]}
    state.save(path, bundle)
    if older:
        torch.save(bundle, path)
    size = 8 * path.stat().st_size
    tail = 8 * 850  # the directory
    folders = [8 * (match.start() + 38) + 4 for match in re.finditer(b"PK\x01\x02", path.read_bytes())]
    assert len(folders) > 4
    count_refused(path, [*folders, *range(0, size - tail, 63), *range(size - tail, size, 9)])


def test_the_damaged_member_is_named(tmp_path: Path) -> None:
    path, weights = tmp_path / "small.pt", torch.full((5,), 0.25)
    state.save(path, {"version": state.VERSION, "weights": weights})
    data = path.read_bytes()
    path.write_bytes(flipped(data, 8 * data.index(weights.numpy().tobytes())))
    with pytest.raises(state.BundleError, match=r"small\.pt is damaged: its member '.*data/0' does not match its checksum"):
        state.load(path)
    with pytest.raises(state.BundleError, match="damaged"):
        state.load(StoredPath(f"file://{path}"))


def test_what_can_be_used_instead_is_named(spec_body: Make, tmp_path: Path) -> None:
    trial = Trial(Spec.model_validate({"name": "small", **spec_body()}), plan=Plan(data_dir=tmp_path))
    trial.run()
    paths = trial.paths
    best, last = paths.checkpoint(0, "best"), paths.checkpoint(0, "last")
    assert isinstance(best, Path)
    assert isinstance(last, Path)
    data = best.read_bytes()
    best.write_bytes(flipped(data, 8 * (len(data) // 2)))
    with pytest.raises(UserError, match=rf"{best} is damaged.*; this one can be read: {last}"):
        load_agent(paths.root)
    assert load_agent(paths.root, "last").path == last
    last.unlink()
    assert readable_checkpoint(paths) is None


def test_no_flipped_bit_of_a_search_is_used(tmp_path: Path) -> None:
    path, search = tmp_path / "state.json", SearchState("final_strength", -1.5, True)
    search.trials = [TrialState(0, {"a.b": [1, 2.5], "c": "x"}, "finished", frame=5, metric=2.0)]
    search.reports, search.proposer = [(0, 5, 2.0)], {"rng": {"state": 2**100}, "seen": {1: (2.0, float("inf"))}}
    search.save(path)
    data = path.read_bytes()
    refusals = []
    for bit in random.Random(0).sample(range(8 * len(data)), FLIPS):
        path.write_bytes(flipped(data, bit))
        try:
            assert SearchState.load(path) == search, f"bit {bit}"
        except UserError as error:
            refusals.append(str(error))
    assert refusals
    assert all(str(path) in refusal for refusal in refusals)


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message must name the read-only file system instead of a missing permission, without a traceback."""
    assert unwritable_reason(tmp_path) is None
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert unwritable_reason(tmp_path) == "no permission"
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    assert unwritable_reason(tmp_path) == "read-only file system"
    with pytest.raises(UserError, match=rf"{tmp_path}: read-only file system in"):
        check_writable(tmp_path)
    assert "read-only file system" in describe_failure(OSError(errno.EROFS, "Read-only file system"))
    assert "Traceback" not in describe_failure(OSError(errno.EROFS, "Read-only file system"))


def test_json_without_a_checksum_is_read_as_it_is() -> None:
    content = {"a": [1.5, None], "b": {"c": float("nan")}, "é": "ü"}
    assert (
        str(checked_content(content))
        == str(checked_content(json.loads(json.dumps(with_checksum(content), ensure_ascii=False))))
        == str(content)
    )
    with pytest.raises(ValueError, match="checksum"):
        checked_content({**with_checksum(content), "a": [1.25, None]})
