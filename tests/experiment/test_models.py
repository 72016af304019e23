"""Tests of named policies (models): the files written, the commands that accept a name, refusals, and the model card."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import struct
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from ruamel.yaml import YAML

import slm_lab
from slm_lab.cli import main
from slm_lab.cli.files import model_lines
from slm_lab.experiment.deploy import export, register
from slm_lab.experiment.deploy.load import load_agent
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files import tensor_file
from slm_lab.experiment.files.find import find_training, find_weights
from slm_lab.experiment.files.named_model import ModelPaths, check_name, find_model, new_model
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.tensor_file import TensorFileError
from slm_lab.experiment.plan import UserError
from slm_lab.spec.models.spec import SPEC_VERSION
from tests.experiment.test_load import NET, PPO, RNN, trained

FILES = ["README.md", "model.safetensors", "policy.onnx", "spec.json"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder with a run of Pendulum and the model "swing" exported from it; tests must not change it."""
    folder = tmp_path_factory.mktemp("data")
    trained(folder, {"name": "Pendulum-v1", "normalize_obs": True, "max_frame": 1000}, PPO, NET, log_frequency=400)
    assert main(["export", "latest", "--data-dir", str(folder), "--as", "swing"]) == 0
    return folder


@pytest.fixture
def own(data: Path, tmp_path: Path) -> Path:
    """Return a data folder with a copy of the model, which a test may change."""
    shutil.copytree(data / "models", tmp_path / "data/models")
    return tmp_path / "data"


def run_of(data: Path) -> RunPaths:
    return find_training("latest", None, data).paths


def test_the_files_of_a_model(data: Path) -> None:
    """The folder contains only these files; the weights are those of the best checkpoint."""
    model = data / "models/swing"
    assert sorted(path.name for path in model.iterdir()) == FILES
    assert [path.name for path in model.parent.iterdir()] == ["swing"]
    best, own = state.load(run_of(data).checkpoint(0, "best")), state.load(model / "model.safetensors")
    assert own["weights"].keys() == best["weights"].keys()
    assert all(torch.equal(value, own["weights"][name]) for name, value in best["weights"].items())
    assert own["source"] == f"{run_of(data).root.name}/{run_of(data).checkpoint(0, 'best').name}"
    assert state.read_header(model / "model.safetensors")["frame"] == best["frame"]


def test_a_name_is_accepted_like_a_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """load_agent, enjoy@, export and meta.init_from accept the model's name, its path in the data folder, and its full path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(data)
    run = load_agent(run_of(data).root)
    obs = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    expected = run.act(obs, deterministic=True)[0]
    for where in ("swing", "models/swing", str(data / "models/swing")):
        agent = load_agent(where)
        assert np.array_equal(agent.act(obs, deterministic=True)[0], expected)
        assert "model swing" in repr(agent)
    given = ["--data-dir", str(data)]
    assert main(["enjoy@swing", "--episodes", "1", *given]) == 0
    assert main(["export", "swing", *given, "--out", str(tmp_path / "again.onnx")]) == 0
    session = onnxruntime.InferenceSession(str(tmp_path / "again.onnx"))
    assert np.allclose(session.run(None, {"obs": obs})[0], expected, atol=1e-5)
    path, weights = find_weights("swing", data)
    assert path == data / "models/swing/model.safetensors"
    assert torch.equal(weights["weights"]["actor_head.linear.bias"], run.saved["weights"]["actor_head.linear.bias"])


def test_a_model_is_compared_with_a_run_by_its_keys(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = next(path for path in data.iterdir() if path.name != "models" and path.is_dir())
    assert main(["diff", "swing", str(run), "--data-dir", str(data)]) == 0
    text = capsys.readouterr().out
    assert "A is a model" in text.splitlines()[-1]
    assert "has none yet" not in text


@pytest.mark.parametrize("words", ["report swing", "compare swing", "retro_analyze swing", "doctor swing", "verify swing", "train@swing"])
def test_a_model_has_no_rows(words: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the run from which the model was exported, if it is in the data folder."""
    assert main([*words.split(), "--data-dir", str(data)]) == 2
    error = capsys.readouterr().err
    assert f"{data / 'models/swing'} is a model" in error
    assert error.endswith(f"from which it was exported: {run_of(data).root}\n")


def test_a_folder_takes_precedence_over_a_name(own: Path, tmp_path: Path) -> None:
    """export must refuse a name that a run folder already uses, since the model would not be found by this name."""
    run = trained(own, {"name": "CartPole-v1"})
    run.root.rename(own / "swing")
    assert find_training("swing", None, own).paths.root == own / "swing"
    with pytest.raises(UserError, match="precedence"):
        register.register(find_training("models/swing", None, own), "swing", own, replace=True)
    assert find_model("swing", own) is None


def test_options_that_choose_a_run_are_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--trial", "0"], ["--entry", "a"], ["--checkpoint", "last"], ["--session", "1"]):
        assert main(["enjoy@swing", "--data-dir", str(data), *options]) == 2
        assert "models/swing" in capsys.readouterr().err
    assert main(["demo.json", "ppo_cartpole", "enjoy@swing", "--data-dir", str(data)]) == 2
    assert "'small', not of 'ppo_cartpole'" in capsys.readouterr().err
    assert main(["enjoy@swign", "--data-dir", str(data)]) == 2
    assert "did you mean 'swing'?" in capsys.readouterr().err


def test_names(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", ".", "..", "a/b", "../x", "-x", ".hidden", "latest", "a..b", "x" * 97, "a b", "a\n", "ä", "a\\b", "C:"):
        with pytest.raises(UserError, match="invalid name"):
            check_name(name)
    for name in ("a", "PPO_CartPole-v1.best", "x" * 96, "7"):
        check_name(name)
    before = sorted(own.rglob("*"))
    assert main(["export", "swing", "--data-dir", str(own), "--as", "../swing"]) == 2
    assert main(["export", "swing", "--data-dir", str(own), "--as", "swing"]) == 2
    assert "--replace" in capsys.readouterr().err
    assert main(["export", "swing", "--data-dir", str(own), "--replace"]) == 2
    assert main(["export", "swing", "--data-dir", str(own), "--as", "x", "--out", str(own / "x.onnx")]) == 2
    assert sorted(own.rglob("*")) == before


@pytest.mark.parametrize("data_dir", [Path("data"), Path("other folder")])
def test_the_lines_that_are_printed_name_the_model(data_dir: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    own.rename("moved")
    Path("moved").rename(data_dir)
    play, load, share = (line.partition(":")[2].strip() for line in model_lines("swing", data_dir).splitlines())
    assert main([*shlex.split(play)[1:], "--episodes", "1"]) == 0
    load_agent(ast.literal_eval(load.removeprefix("load_agent(").removesuffix(")")))
    assert shlex.split(share)[:4] == ["slm-lab", "push", "swing", "USER/REPO"]


def test_replace(own: Path) -> None:
    """The model's old files are removed; other files are kept."""
    (own / "models/swing/policy.pt2").write_text("older")
    (own / "models/swing/video").mkdir()
    (own / "models/swing/video/a.mp4").write_text("film")
    done = register.register(find_training("swing", None, own), "swing", own, replace=True)
    assert done.path == own / "models/swing/policy.onnx"
    assert sorted(path.name for path in (own / "models/swing").iterdir()) == [*FILES, "video"]
    assert (own / "models/swing/video/a.mp4").read_text() == "film"
    assert [path.name for path in (own / "models").iterdir()] == ["swing"]


def test_a_failure_leaves_the_old_model(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old model must be intact after a failure at any step, even while folders are renamed."""
    before = {path: path.read_bytes() for path in (own / "models/swing").iterdir()}
    source = find_training("swing", None, own)
    rename = Path.rename

    def fail(self: Path, target: Any) -> Any:
        if self.name.endswith(".tmp"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(UserError, match="No space left"):
            register.register(source, "swing", own, replace=True)
    with monkeypatch.context() as patch:
        patch.setattr(register, "model_card", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            register.register(source, "swing", own, replace=True)
    assert {path: path.read_bytes() for path in (own / "models/swing").iterdir()} == before
    assert [path.name for path in (own / "models").iterdir()] == ["swing"]
    with pytest.raises(UserError, match="exists"), new_model("swing", own, replace=False):
        pass


def test_folders_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    """Only old folders that no process uses are deleted."""
    killed, new = (tmp_path / f"models/.{name}.tmp" for name in ("killed", "new"))
    for folder in (killed, new):
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text("{}")
    with new_model("first", tmp_path, replace=False) as used:
        for folder in (killed, used):
            os.utime(folder, (0.0, 0.0))
        with new_model("second", tmp_path, replace=False):
            assert (killed.exists(), new.exists(), used.exists()) == (False, True, True)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".new.tmp", "first", "second"]


def test_a_policy_that_cannot_be_exported_has_a_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is registered without the exported file, and a notice says so; if the format was requested, this is an error."""

    def fail(*_: Any) -> Any:
        raise UserError("it cannot be exported")

    monkeypatch.setattr(export, "_write_checked", fail)
    source = find_training("swing", None, data)
    with pytest.raises(UserError, match="cannot be exported"):
        register.register(source, "bare", tmp_path, "torch")
    assert not list((tmp_path / "models").iterdir())
    done = register.register(source, "bare", tmp_path)
    assert done.path == tmp_path / "models/bare/model.safetensors"
    assert "cannot be exported" in caplog.text
    assert load_agent(tmp_path / "models/bare").act(np.zeros(3, np.float32), deterministic=True)[0].shape == (1,)
    assert "policy.onnx" not in (tmp_path / "models/bare/README.md").read_text()


def test_in_python(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = slm_lab.export(data / "models/swing", name="mine")
    assert done.path == Path("data/models/mine/policy.onnx")
    assert done.card == Path("data/models/mine/README.md")
    assert load_agent("mine").saved["source"] == load_agent(data / "models/swing").saved["source"], "the first source is kept"
    with pytest.raises(UserError, match="out="):
        slm_lab.export(data / "models/swing", out="x.onnx", name="other")


def test_the_list(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "models/broken").mkdir()
    (own / "models/broken/spec.json").write_text("{")
    assert main(["models", "--data-dir", str(own), "--json"]) == 0
    broken, swing = (row for row in json.loads(capsys.readouterr().out)["models"] if not row["pretrained"])
    assert (broken["name"], "problem" in broken) == ("broken", True)
    assert {key: swing[key] for key in ("name", "env", "algorithm", "policy")} == {
        "name": "swing",
        "env": "Pendulum-v1",
        "algorithm": "PPO",
        "policy": "policy.onnx",
    }
    saved = state.load(own / "models/swing/model.safetensors")
    assert (swing["return"], swing["frames"]) == (saved["current_return"], saved["frame"])
    assert main(["models", "--data-dir", str(own)]) == 0
    header, row, problem, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "env", "algorithm", "return", "frames", "date"]
    assert row.split()[:3] == ["swing", "Pendulum-v1", "PPO"]
    assert problem.startswith("broken: ")
    assert main(["models", "--data-dir", str(own / "none")]) == 0
    assert "no model" in capsys.readouterr().out
    assert main(["models", "x"]) == 2


def header_of(card: str) -> dict[str, Any]:
    """Return the YAML header of a model card."""
    _, header, _ = card.split("---\n", 2)
    return dict(YAML(typ="safe").load(StringIO(header)))


def test_the_card(data: Path) -> None:
    card = (data / "models/swing/README.md").read_text()
    saved, header = state.load(data / "models/swing/model.safetensors"), header_of(card)
    assert (header["library_name"], header["pipeline_tag"]) == ("slm-lab", "reinforcement-learning")
    assert {"slm-lab", "reinforcement-learning", "Pendulum-v1", "PPO"} <= set(header["tags"])
    assert "license" not in header, "it is left to the user"
    ((model,),) = (header["model-index"],)
    (result,) = model["results"]
    assert model["name"] == "swing"
    assert result["dataset"] == {"name": "Pendulum-v1", "type": "Pendulum-v1"}
    (metric,) = result["metrics"]
    assert metric["value"] == pytest.approx(saved["current_return"], rel=1e-5)
    assert metric["args"]["standard_error"] == saved["current_return_se"]
    assert str(saved["current_epi"]) in metric["args"]["over"]
    _, row = json.loads((data / "models/swing/spec.json").read_text()).popitem()
    for text in (
        f"at frame {saved['frame']:,}",
        f"{saved['current_epi']} training episode",
        "Box([-1. -1. -8.], [1. 1. 8.], (3,), float32)",
        "running mean and standard deviation",
        f"{row['meta']['random_seed']} (meta.random_seed)",
        'load_agent("swing")',
        'action, params = session.run(None, {"obs": obs})',
        f"torch {torch.__version__.partition('+')[0]}",
        "selected by this return",
    ):
        assert text in card, text


def test_the_card_of_a_recurrent_policy(own: Path) -> None:
    """The card shows how to pass the hidden state."""
    done = register.register(find_training(trained(own, {"name": "CartPole-v1"}, PPO, RNN).root, None, own), "memory", own)
    card = (done.path.parent / "README.md").read_text()
    assert "action, state = agent.act(obs, state, deterministic=True)" in card
    assert "| state | float32 [batch, 16] |" in card
    assert 'session.run(None, {"obs": obs, "state": state})' in card


def test_huggingface_hub_reads_the_card(data: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    metadata = hub.ModelCard.load(data / "models/swing/README.md").data
    (result,) = metadata.eval_results
    assert (result.task_type, result.dataset_type, result.metric_type) == ("reinforcement-learning", "Pendulum-v1", "mean_reward")
    assert metadata.library_name == "slm-lab"


def test_a_card_beside_a_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """The card is written again unless a person has edited it."""
    given = ["export", "latest", "--data-dir", str(data), "--out", str(tmp_path / "policy.onnx")]
    assert main(given) == 0
    card = tmp_path / "policy.md"
    assert str(card) in capsys.readouterr().out
    first = card.read_text()
    assert 'InferenceSession("policy.onnx")' in first
    assert "load_agent" not in first
    assert main(given) == 0
    assert card.read_text() == first
    edited = first.replace("# license: choose one", "license: mit #")
    card.write_text(edited)
    assert main(given) == 0
    assert card.read_text() == edited
    assert "is not overwritten" in caplog.text


def test_no_machine_or_folder_is_named(tmp_path: Path) -> None:
    """A model may be published, so meta.run must keep package versions but no host and no command."""
    run = trained(tmp_path, {"name": "CartPole-v1"})
    content = json.loads(run.spec.read_text())
    start = {"command": ["/home/someone/x"], "host": {"name": "secret"}, "versions": {"torch": "1"}, "spec_version": SPEC_VERSION}
    content["small"]["meta"]["run"] = [start]
    run.spec.write_text(json.dumps(content))
    done = register.register(find_training(run.root, None, tmp_path), "public", tmp_path)
    for path in done.path.parent.iterdir():
        for private in (b"someone", b"secret", str(tmp_path).encode()):
            assert private not in path.read_bytes(), (path.name, private)
    assert "torch 1" in (done.path.parent / "README.md").read_text()


TREE: dict[str, Any] = {
    "version": 6,
    "a": {"w": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor(7, dtype=torch.int64)},
    "list": [1.5, None, "text", torch.tensor([True, False])],
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "double": torch.tensor([[0.1]], dtype=torch.float64),
}


def equal(one: Any, other: Any) -> bool:
    match one:
        case dict():
            return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
        case list():
            return len(one) == len(other) and all(map(equal, one, other))
        case torch.Tensor():
            return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)


def test_safetensors(tmp_path: Path) -> None:
    """The safetensors library reads the same tensors from the file, and reading the file returns the values that were written."""
    path = tmp_path / "x.safetensors"
    tensor_file.save(path, TREE)
    assert equal(tensor_file.load(path), TREE)
    assert tensor_file.load_values(path)["list"][:3] == [1.5, None, "text"]
    library = pytest.importorskip("safetensors.torch")
    assert equal(library.load_file(path), {
        "a.w": TREE["a"]["w"], "a.b": TREE["a"]["b"], "list.3": TREE["list"][3], "half": TREE["half"], "empty": TREE["empty"],
        "double": TREE["double"],
    })  # fmt: skip


def test_damaged_safetensors(tmp_path: Path) -> None:
    """Every changed byte must be detected, and crafted headers must be refused."""
    path = tmp_path / "x.safetensors"
    tensor_file.save(path, TREE)
    good = path.read_bytes()
    size = struct.unpack("<Q", good[:8])[0]
    for at in range(0, len(good), 3):
        if good[at : at + 1] == b" " and at < 8 + size:
            continue  # whitespace between JSON values
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(TensorFileError):
            tensor_file.load(path)
    for data in (b"", b"x", good[:20], good[:-1], struct.pack("<Q", 2**63) + good[8:], struct.pack("<Q", 2) + b"[]", b"\x80\x04pickle.."):
        path.write_bytes(data)
        with pytest.raises(TensorFileError):
            tensor_file.load(path)
        with pytest.raises(state.BundleError, match=r"x\.safetensors"):
            state.load(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 28]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [-8, 16]},
        {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2.0, 3], "data_offsets": [0, 24]},
        {"dtype": "__class__", "shape": [2, 3], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [10**9, 10**9 + 24]},
        7,
    ],
)
def test_crafted_entries(entry: Any) -> None:
    with pytest.raises(TensorFileError, match="tensor 'w' is invalid"):
        tensor_file._read_tensor("w", entry, memoryview(b"\0" * 24))


def test_paths_of_a_model(own: Path) -> None:
    model = find_model("swing", own)
    assert isinstance(model, ModelPaths)
    assert (model.spec_name, model.policy, model.has_several_trials) == ("small", own / "models/swing/policy.onnx", False)
    assert find_model("latest", own) is None


@pytest.mark.slow
def test_the_winner_of_a_search_in_one_line_each(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best trial of a search is played, exported, registered and loaded with one command each."""
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    short = [word for key in ("meta.max_trial=2", "meta.max_session=1", "env.max_frame=3000") for word in ("-s", key)]
    assert main(["dqn_cartpole_search.json", "dqn_cartpole_search", "search", *short]) == 0
    (folder,) = Path("data").iterdir()
    paths = find_training(folder, None, Path("data"))
    assert main([f"enjoy@{folder}", "--episodes", "2"]) == 0
    assert main(["export", str(folder)]) == 0
    assert main(["export", str(folder), "--as", "winner"]) == 0
    assert f"trial {paths.trial} of the search" in capfd.readouterr().out
    obs = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    expected = load_agent(folder).act(obs, deterministic=True)[0]
    assert np.array_equal(load_agent("winner").act(obs, deterministic=True)[0], expected)
    session = onnxruntime.InferenceSession("data/models/winner/policy.onnx")
    assert np.array_equal(session.run(None, {"obs": obs})[0], expected)
    assert f"trial {paths.trial} of the search" in Path("data/models/winner/README.md").read_text()
