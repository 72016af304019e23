"""Tests of the command verify: an unchanged run is reproduced byte for byte, and every change is found and named."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slm_lab import cli
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import Training
from slm_lab.experiment.files.lock import RunLock
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.provenance import package_versions
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.nondeterminism import nondeterminism_reason
from slm_lab.experiment.run.verify.bundle_difference import PartDifference, differing_parts
from slm_lab.experiment.run.verify.verify import Verification, _part_finding, _restarted_workers, verify
from slm_lab.experiment.run.verify.window import Checkpoint, last_inexact_continuation
from slm_lab.experiment.session.resume import read_run
from slm_lab.experiment.training.resolve import complete_spec
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import SPEC_VERSION, Spec
from tests.resume.runs import NET, small, train

NORMALIZED = {"backend": "sync", "num_envs": 2, "normalize_obs": True, "normalize_reward": True}
ROUNDS = {"async_rl": False, "num_workers": 2, "num_envs_per_worker": 2}
SHORT = {"time_horizon": 16, "minibatch_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "PPO, normalised, with evaluation": {
        "algorithm_name": "PPO",
        "env_id": "CartPole-v1",
        "env": NORMALIZED,
        "meta": {"rigorous_eval": 2, "eval_frequency": 100, "checkpoint_frequency": 100, "log_frequency": 40},
    },
    "DQN": {"algorithm_name": "DQN", "env_id": "CartPole-v1", "net": NET, "meta": {"save_replay": True, "log_frequency": 40}},
    "SAC": {
        "algorithm_name": "SoftActorCritic",
        "env_id": "Pendulum-v1",
        "net": NET,
        "meta": {"save_replay": True, "log_frequency": 40},
        "algorithm": {"training_start_step": 200},
    },
    "rollout workers in rounds": {
        "algorithm_name": "PPO",
        "env_id": "CartPole-v1",
        "meta": {"sampler": ROUNDS, "log_frequency": 40},
        "algorithm": SHORT,
    },
    "two policies": {
        "algorithm_name": "PPO",
        "env_id": "CartPole-v1",
        "meta": {"sampler": {**ROUNDS, "num_policies": 2, "serial_mode": True}, "log_frequency": 40},
        "algorithm": SHORT,
    },
}
FRAMES, BREAK = 330, 160
"""Number of frames of the runs, and the frame at which they were stopped and continued, whose state was kept."""


def spec_of(**sections: Any) -> Spec:
    """Return a complete spec, as the command line saves it."""
    return complete_spec(small(frames=FRAMES, **sections))


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the hash of the content and the modification time of each file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def verified(paths: RunPaths, **options: Any) -> Verification:
    return verify(Training(paths), **options)


def test_an_untouched_run(run: RunPaths) -> None:
    """The run is verified from its beginning and from the state before the last; its folder must not change."""
    before = digests(run.root)
    late, whole = verified(run), verified(run, begin=0, end=332)
    assert (late.findings, whole.findings) == ([], [])
    assert [(*window_of(one), one.rows) for one in (late, whole)] == [(BREAK, 332, 5), (0, 332, 9)]
    assert [name for name, _, _ in late.checkpoints] == ["ckpt-200", "ckpt-300", "ckpt-last"]
    assert digests(run.root) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_untouched_run_of_each_kind(name: str, tmp_path: Path) -> None:
    _, paths = train(spec_of(**CASES[name]), tmp_path / "run", (BREAK,))
    before = digests(paths.root)
    late, whole = verified(paths), verified(paths, begin=0, end=state_frame(paths))
    assert (late.findings, whole.findings) == ([], [])
    assert late.window is not None
    assert late.window.begin >= BREAK
    assert [(name, frame) for name, frame, _ in late.checkpoints][-1] == ("ckpt-last", state_frame(paths))
    assert len(whole.checkpoints) >= len(late.checkpoints)
    assert late.rows >= 2
    assert digests(paths.root) == before


def test_evaluation_envs_have_the_backend_that_auto_chose_for_their_number(tmp_path: Path) -> None:
    """Here auto chooses native for four training envs and sync for two evaluation envs, so the two backends are recorded separately."""
    meta = {"eval_episodes": 2, "log_frequency": 40, "checkpoint_frequency": 100}
    spec = spec_of(algorithm_name="PPO", env_id="CartPole-v1", env={"num_envs": 4}, meta=meta, algorithm=SHORT)
    session, paths = train(spec, tmp_path / "run")
    content = json.loads(paths.spec.read_text(encoding="utf-8"))
    content["small"]["meta"]["run"] = [{"spec_version": SPEC_VERSION, **session.parts.chosen_settings}]
    paths.spec.write_text(json.dumps(content), encoding="utf-8")
    assert [session.parts.chosen_settings[key] for key in ("backend", "eval_backend")] == ["native", "sync"]
    assert verified(paths, begin=0, end=state_frame(paths)).findings == []


def state_frame(paths: RunPaths) -> int:
    return int(state.read_header(paths.checkpoint(0, "last"))["frames"][0])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return a run with numbered checkpoints, whose state at frame BREAK was kept."""
    meta = {"checkpoint_frequency": 100, "log_frequency": 40}
    spec = spec_of(algorithm_name="PPO", env_id="CartPole-v1", env={"num_envs": 4}, meta=meta, algorithm=SHORT)
    return train(spec, tmp_path_factory.mktemp("run") / "a", (BREAK,))[1]


@pytest.fixture
def run(original: RunPaths, tmp_path: Path) -> RunPaths:
    shutil.copytree(original.root, tmp_path / "copy")
    return RunPaths(tmp_path / "copy", "small")


def window_of(found: Verification) -> tuple[int, int]:
    assert found.window is not None
    return found.window.begin, found.window.end


def test_windows(run: RunPaths) -> None:
    """--from 0 ends at the first checkpoint after an update; --to starts at the latest state before it, and may compare only rows."""
    assert window_of(verified(run, begin=0)) == (0, 100)
    rows = verified(run, end=90)
    assert (window_of(rows), rows.is_equal, rows.rows, rows.checkpoints) == ((0, 90), True, 2, [])
    assert "rows and weights" not in rows.text()
    late = verified(run, end=220)
    assert (window_of(late), [name for name, _, _ in late.checkpoints]) == ((BREAK, 220), ["ckpt-200"])


def test_a_window_longer_than_the_limit(run: RunPaths) -> None:
    with pytest.raises(UserError, match="--frames 100"):
        verified(run, frames=100)
    assert verified(run, frames=200).is_equal


@pytest.mark.parametrize(
    ("options", "says"),
    [({"begin": 7}, "0 or 160"), ({"end": 340}, "332"), ({"begin": 160, "end": 160}, "above 160"), ({"session": 1}, "0 to 0")],
)
def test_frames_that_do_not_exist(options: dict[str, int], says: str, run: RunPaths) -> None:
    with pytest.raises(UserError, match=says):
        verified(run, **options)


def test_a_byte_of_a_checkpoint(run: RunPaths) -> None:
    """The checksum of the file must detect the changed byte before anything is trained."""
    path = Path(str(run.checkpoint(0, "best")))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = verified(run)
    assert found.window is None
    assert [(one.kind, path.name in one.where) for one in found.findings] == [("file", True)]


def test_weights_under_a_valid_checksum(run: RunPaths) -> None:
    """One weight of the last checkpoint is changed by the smallest possible step; then the initial state of the window is changed."""
    path = run.checkpoint(0, "last")
    bundle = state.load(path)
    name = next(name for name, value in bundle["policies"][0]["weights"].items() if value.dim() > 1)
    weight = bundle["policies"][0]["weights"][name]
    before = float(weight[0, 0])
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(10.0))
    state.save(path, bundle)
    (finding,) = verified(run).findings
    assert (finding.kind, finding.detail["parts"]) == ("weights", [f"policies/0/weights/{name}"])
    assert finding.detail["largest"] == pytest.approx(abs(float(weight[0, 0]) - before), rel=1e-3)
    begun = state.load(run.checkpoint(0, "previous"))
    begun["policies"][0]["agent"] = bundle["policies"][0]["agent"]
    state.save(run.checkpoint(0, "previous"), begun)
    assert {one.kind for one in verified(run).findings} >= {"rows", "weights"}


def change_row(path: Path, frame: str, change: Callable[[dict[str, str]], None]) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    change(next(row for row in rows if row["frame"] == frame))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def test_a_row(run: RunPaths) -> None:
    """A changed return is named by its row and column. A changed row before the window still fails the checksum of the last checkpoint."""
    table = run.session_df(0)
    change_row(table, "240", lambda row: row.update(total_reward="500"))
    row, checksum = verified(run).findings
    assert (checksum.kind, row.kind) == ("rows", "rows")
    assert (row.detail["frame"], row.detail["row"], row.detail["column"], row.detail["a"]) == (240, 6, "total_reward", "500")


def test_a_row_before_the_window(run: RunPaths) -> None:
    change_row(run.session_df(0), "80", lambda row: row.update(loss="0"))
    (finding,) = verified(run).findings
    assert (finding.kind, finding.where) == ("rows", run.session_df(0).name)


def test_the_time_of_a_row_is_no_result_but_has_a_checksum(run: RunPaths) -> None:
    change_row(run.session_df(0), "332", lambda row: row.update(wall_t="0.001"))  # the row is after the last checkpoint
    assert verified(run).is_equal


@pytest.mark.parametrize("says", ["missing", "does not write"])
def test_rows_that_are_missing_or_too_many(says: str, run: RunPaths) -> None:
    table = run.session_df(0)
    lines = table.read_text().splitlines(keepends=True)
    if says == "missing":
        table.write_text("".join(lines[:6] + lines[7:]))
    else:
        table.write_text("".join([*lines[:7], lines[6].replace("240,", "260,", 1), *lines[7:]]))
    assert any(says in one.text for one in verified(run).findings)


def test_a_key_of_the_spec(run: RunPaths) -> None:
    content = json.loads(run.spec.read_text())
    content["small"]["agent"]["algorithm"]["gamma"] = 0.5
    run.spec.write_text(json.dumps(content))
    found = verified(run)
    assert found.window is None
    assert [(one.kind, one.where, one.detail["file"]) for one in found.findings] == [("spec", "agent.algorithm.gamma", 0.5)]


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"distributed": "shared", "max_session": 2}, "distributed"),
        ({"sampler": {"num_workers": 2, "num_envs_per_worker": 2}}, "async_rl"),
        ({"sampler": {**ROUNDS, "inference": "central"}}, "inference"),
    ],
)
def test_training_that_is_not_deterministic(meta: dict[str, Any], says: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small")
    paths.make_dirs()
    paths.spec.write_text(json.dumps(dump_spec(small("PPO", "CartPole-v1", meta=meta, algorithm=SHORT))))
    with pytest.raises(UserError, match=says):
        verified(paths)


@pytest.mark.parametrize(
    ("gpu", "device", "deterministic"), [(True, None, False), (True, "cpu", True), (False, None, True), (False, "cuda:1", False)]
)
def test_automatic_inference_is_central_on_a_gpu(gpu: bool, device: str | None, deterministic: bool) -> None:
    keys = {"agent.net.gpu": gpu, "meta.sampler.inference": "auto", "meta.sampler.async_rl": False}
    assert (nondeterminism_reason(keys, device=device) is None) == deterministic


def test_a_run_that_was_killed(run: RunPaths) -> None:
    """The last state is older than the last rows, so training stops at the frame of this state."""
    Path(str(run.checkpoint(0, "previous"))).replace(str(run.checkpoint(0, "last")))
    found = verified(run, end=BREAK)
    assert found.findings == []
    assert [(name, frame) for name, frame, _ in found.checkpoints] == [("ckpt-100", 100), ("ckpt-best", BREAK), ("ckpt-last", BREAK)]


def test_other_versions_and_another_processor_are_named(run: RunPaths) -> None:
    """verify lists them, and train@ gives them as reasons why the result will not be exact."""
    known = package_versions()
    content = json.loads(run.spec.read_text(encoding="utf-8"))
    versions = {**known, "torch": "0.1", "absent": "1"}
    content["small"]["meta"]["run"] = [{"spec_version": SPEC_VERSION, "versions": versions, "cpu": "a slow one"}]
    run.spec.write_text(json.dumps(content), encoding="utf-8")
    machine = verified(run, end=BREAK + 50).machine
    assert {key: before for key, (before, _) in machine.items()} == {"torch": "0.1", "absent": "1", "cpu": "a slow one"}
    assert (machine["torch"], machine["absent"]) == (("0.1", known["torch"]), ("1", None))
    lost = read_run(run, ["env.max_frame=600"]).starts[0].lost
    assert lost[-2:] == (f"torch 0.1 is now {known['torch']}", "absent 1 is no longer installed")


def test_a_run_that_trains(run: RunPaths) -> None:
    lock = RunLock(run.lock)
    try:
        with pytest.raises(UserError, match="in use"):
            verified(run)
    finally:
        lock.release()


def test_a_run_that_was_continued_inexactly(run: RunPaths) -> None:
    """Frames before the inexact continuation cannot be trained again."""
    starts: list[dict[str, Any]] = [
        {"spec_version": SPEC_VERSION},
        {"spec_version": SPEC_VERSION, "continues": {"0": {"frame": BREAK, "exact": False, "lost": ["open episodes are dropped"]}}},
    ]
    assert last_inexact_continuation(starts, 0) == (BREAK, "open episodes are dropped")
    assert last_inexact_continuation(starts, 1) == (0, "")
    content = json.loads(run.spec.read_text())
    content["small"]["meta"]["run"] = starts
    run.spec.write_text(json.dumps(content))
    with pytest.raises(UserError, match="160"):
        verified(run, begin=0)
    assert verified(run).is_equal
    Path(str(run.checkpoint(0, "previous"))).unlink()
    with pytest.raises(UserError, match="open episodes are dropped"):
        verified(run)


def test_parts_that_differ() -> None:
    one = {
        "policies": [{"weights": {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([float("nan")])}, "clock": {"frame": 3, "wall_t": 1.0}}]
    }
    other = {
        "policies": [{"weights": {"w": torch.tensor([1.0, 2.5]), "b": torch.tensor([float("nan")])}, "clock": {"frame": 4, "wall_t": 2.0}}],
        "done": True,
    }
    assert differing_parts(one, one) == []
    assert differing_parts(one, other) == [("policies/0/weights/w", 0.5), ("policies/0/clock/frame", 1.0)]
    assert differing_parts({"a": torch.zeros(2)}, {"a": torch.zeros(3)}) == [("a", None)]
    assert differing_parts({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}) == [("a", 0.0)], "not the same byte"


def test_the_largest_difference_is_that_of_weights() -> None:
    checkpoint = Checkpoint("best", "t0_s0", Path("t0_s0_ckpt-best.pt"), 3, {})
    parts = [PartDifference("policies/0/weights/w", 0.5), PartDifference("frame", 9000.0), PartDifference("rng", 1e38)]
    finding = _part_finding(checkpoint, parts)
    assert finding.detail["largest"] == 0.5
    assert "another frame in the repetition" in finding.text
    assert finding.text.endswith("policies/0/weights/w differ; largest difference 0.5; 2 other entries differ")
    assert _part_finding(checkpoint, parts[1:]).detail["largest"] is None


@pytest.mark.parametrize(("source", "count"), [({"restarts": 2}, 1), ({"restarts": 0}, 0), ({}, 0), (None, 0)])
def test_restarted_workers_are_named(source: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "load", lambda path: {"source": source})
    found = _restarted_workers(Checkpoint("last", "t0_s0", Path("t0_s0_ckpt-last.pt"), 3, {}))
    assert [finding.detail for finding in found] == [{"restarts": 2}] * count


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.tensor(1.5), torch.tensor(1.5).expand(1), torch.zeros(0), torch.ones(2, 3).T, torch.tensor([True, False])),
        *(torch.ones(3, dtype=torch.bfloat16), torch.arange(6).reshape(1, 2, 3), torch.ones(4)[::2], torch.tensor([2.0]).expand(3)),
    ],
)
def test_tensors_of_every_layout(tensor: torch.Tensor) -> None:
    assert differing_parts({"a": tensor}, {"a": tensor.clone()}) == []
    differ = differing_parts({"a": tensor}, {"a": torch.zeros_like(tensor)})
    assert [part.name for part in differ] == ["a"] * (tensor.numel() > 0)


def test_exit_codes_and_json(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["verify", str(run.root), "--to", "90", "--json"]
    assert cli.main(line) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["equal"], content["from"], content["to"], content["rows"]) == (True, 0, 90, 2)
    change_row(run.session_df(0), "80", lambda row: row.update(epi="0"))
    assert cli.main(line) == 1
    content = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in content["differences"]] == ["rows", "rows"]
    assert cli.main([*line, "--from", "3"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets", [["meta.max_session=2", "meta.save_interval=0"], ["meta.distributed=synced", "meta.max_session=1", "meta.save_interval=0"]]
)
def test_a_run_of_the_command_line(sets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verify works for Sessions in separate processes and for a single Session of a shared net."""
    options = [word for one in [*sets, "env.max_frame=4000"] for word in ("--set", one)]
    data = ["--data-dir", str(tmp_path)]
    assert cli.main(["demo.json", "ppo_cartpole", "train", "--seed", "7", *options, *data]) == 0
    capsys.readouterr()
    for session in range(2 if "meta.max_session=2" in sets else 1):
        assert cli.main(["verify", "latest", "--session", str(session), *data]) == 0
