"""Tests of push and pull against a local server that implements the calls of the Hugging Face Hub."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab.cli import main
from slm_lab.experiment.deploy import hub as deploy_hub
from slm_lab.experiment.deploy.load import load_agent
from slm_lab.experiment.files import tensor_file
from tests.experiment.hub_server import TOKEN, Hub, Repo, running_hub
from tests.experiment.test_load import trained

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model, which tests must not change."""
    data = tmp_path_factory.mktemp("data")
    trained(data, {"name": "CartPole-v1"})
    assert main(["export", "latest", "--data-dir", str(data), "--as", "cart"]) == 0
    return data / "models/cart"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield the server; the user's files and token are replaced by those of the test."""
    with running_hub(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def published(hub: Hub, model: Path) -> Repo:
    """Return a repository that contains the model."""
    repo = hub.repos["me/cart"] = Repo()
    repo.files = {path.name: path.read_bytes() for path in model.iterdir()}
    return repo


def pull(data: Path, *words: str) -> int:
    return main(["pull", *words, "--data-dir", str(data)])


def refused(data: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the message of a refused download, which must not leave a file."""
    before = {*data.rglob("*"), data / "models"}
    capsys.readouterr()
    assert pull(data, *words) == 2
    assert {*data.rglob("*"), data / "models"} == before
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def test_there_and_back(hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The downloaded model acts as the uploaded one. A second upload removes files that the model no longer has."""
    data = tmp_path / "data"
    shutil.copytree(model, data / "models/cart")
    (data / "models/cart/private.txt").write_text("of this machine")
    assert main(["push", "cart", "me/cart", "--data-dir", str(data), "--private"]) == 0
    repo = hub.repos["me/cart"]
    assert repo.private
    assert repo.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert f"{hub.url}/me/cart" in capsys.readouterr().out
    assert pull(data, "me/cart", "--as", "back") == 0
    assert {path.name: path.read_bytes() for path in (data / "models/back").iterdir()} == repo.files
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    one, other = (load_agent(data / "models" / name).act(obs, deterministic=True)[0] for name in ("cart", "back"))
    assert np.array_equal(one, other)
    assert "back" in capsys.readouterr().out
    repo.files |= {"policy.pt2": b"old", "notes.md": b"of someone"}
    assert main(["push", "cart", "me/cart", "--data-dir", str(data)]) == 0
    assert "policy.pt2" not in repo.files
    assert repo.files["notes.md"] == b"of someone"
    repo.private = False
    assert main(["push", "cart", "me/cart", "--data-dir", str(data), "--private"]) == 2
    assert "is public" in capsys.readouterr().err
    assert len(repo.commits) == 2


def test_names_and_revisions(published: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull(tmp_path, f"me/cart@{published.sha}") == 0
    assert (tmp_path / "models/cart").is_dir()
    assert "--replace" in refused(tmp_path, capsys, "me/cart")
    assert pull(tmp_path, "me/cart@main", "--replace") == 0
    assert "revision" in refused(tmp_path, capsys, "me/cart@v2", "--as", "second")
    assert "invalid name" in refused(tmp_path, capsys, "me/cart", "--as", "../second")
    for words in ([], ["cart"], ["../x"], ["me/../x"], ["me/cart/x"], ["https://huggingface.co/me/cart"], ["me/cart", "more"]):
        refused(tmp_path, capsys, *words)


def test_only_known_files_are_downloaded(hub: Hub, published: Repo, tmp_path: Path) -> None:
    """Files that could be unpickled and paths outside the folder must not be downloaded."""
    published.files |= {"policy.pt2": b"x", "../../evil": b"x", "/etc/evil": b"x", "pytorch_model.bin": b"x", "sub/spec.json": b"x"}
    assert pull(tmp_path, "me/cart") == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([
        *("models", "cart", "README.md", "model.safetensors", "policy.onnx", "spec.json")
    ])  # fmt: skip
    got = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert got == {"README.md", "model.safetensors", "policy.onnx", "spec.json"}


class Evil:
    """Object that executes code when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


def test_nothing_is_unpickled(published: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = dict(published.files)
    published.files["model.safetensors"] = pickle.dumps(Evil())
    assert "model.safetensors is not a safetensors file" in refused(tmp_path, capsys, "me/cart")
    del published.files["model.safetensors"]
    published.files["model.pt"] = pickle.dumps(Evil())
    message = refused(tmp_path, capsys, "me/cart")
    assert "model.safetensors missing" in message
    assert "model.pt: such files can execute code" in message
    published.files = {**good, "model.safetensors": good["model.safetensors"][:-1] + b"?"}
    assert "damaged" in refused(tmp_path, capsys, "me/cart")


def test_a_spec_that_names_code(published: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code named in a downloaded spec is imported only if the user trusts it."""
    name, body = json.loads(published.files["spec.json"]).popitem()
    body["env"]["name"] = "tests.experiment.never_imported:CartPole-v1"
    published.files["spec.json"] = json.dumps({name: body}).encode()
    assert "env.name: 'tests.experiment.never_imported:CartPole-v1'" in refused(tmp_path, capsys, "me/cart")
    body["env"]["name"] = "antigravity:3DCartPole-v1"
    published.files["spec.json"] = json.dumps({name: body}).encode()
    assert "env.name: 'antigravity:3DCartPole-v1'" in refused(tmp_path, capsys, "me/cart")
    body["env"] |= {"name": "CartPole-v1", "wrappers": [{"name": "subprocess:Popen"}]}
    published.files["spec.json"] = json.dumps({name: body}).encode()
    assert "env.wrappers[0].name: 'subprocess:Popen'" in refused(tmp_path, capsys, "me/cart")
    body["env"]["wrappers"] = []
    body["agent"]["net"]["name"] = "antigravity:Net"
    published.files["spec.json"] = json.dumps({name: body}).encode()
    refused(tmp_path, capsys, "me/cart")
    assert "antigravity" not in sys.modules
    body["agent"]["net"]["name"] = "MLPNet"
    body["env"]["name"] = "gymnasium:CartPole-v1"
    published.files["spec.json"] = json.dumps({name: body}).encode()
    assert pull(tmp_path, "me/cart", "--trust-code") == 0


def test_crafted_files(published: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """Each crafted file is refused with the reason, without a traceback."""
    good = dict(published.files)
    bundle = tensor_file.load(model / "model.safetensors")

    def with_weights(**changed: Any) -> bytes:
        tensor_file.save(tmp_path / "x.safetensors", {key: value for key, value in {**bundle, **changed}.items() if value != "gone"})
        data = (tmp_path / "x.safetensors").read_bytes()
        (tmp_path / "x.safetensors").unlink()
        return data

    data = tmp_path / "data"
    data.mkdir()
    for changed in (
        {"spec.json": b"[1]"},
        {"spec.json": b'{"a": {}, "b": {}}'},
        {"spec.json": b"\xff\xfe"},
        {"spec.json": good["spec.json"].replace(b'"small"', b'"sm\\u001b[2Jall"')},
        {"model.safetensors": with_weights(version=5)},
        {"model.safetensors": with_weights(spaces="gone")},
        {"model.safetensors": with_weights(spaces={"observation": {"type": "Box"}, "action": 3})},
        {"model.safetensors": with_weights(frame="\x1b[2J")},
        {"model.safetensors": with_weights(weights={})},
        {"model.safetensors": with_weights(current_return="many", current_epi=[])},
    ):
        published.files = {**good, **changed}
        assert "me/cart cannot be used" in refused(data, capsys, "me/cart")


def test_sizes(published: Repo, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the size that the Hub reports and the size of the received data are limited."""
    published.sizes["model.safetensors"] = 10**12
    assert "model.safetensors has 1,000,000,000,000 bytes" in refused(tmp_path, capsys, "me/cart")
    published.sizes["model.safetensors"] = 10
    monkeypatch.setitem(deploy_hub.LARGEST, "model.safetensors", 1000)
    assert "allowed: 1,000" in refused(tmp_path, capsys, "me/cart")


def test_who_may(hub: Hub, published: Repo, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Messages state whether the token is missing or not valid, or lacks write access.

    A private repository and one that does not exist have the same message.
    """
    words = ["--data-dir", str(model.parent.parent)]

    def push(repo: str) -> str:
        capsys.readouterr()
        assert main(["push", "cart", repo, *words]) == 2
        return capsys.readouterr().err

    assert "write access" in push("someone/cart")
    assert "no model 'kart'" in (main(["push", "kart", "me/x", *words]) and capsys.readouterr().err)
    assert "USER/REPO" in push("cart")
    assert "did you mean 'me/cart'?" in push("https://huggingface.co/me/cart")
    assert main(["push", "cart", *words]) == 2
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "token is not valid" in push("me/new")
    monkeypatch.delenv("HF_TOKEN")
    assert "no token" in push("me/new")
    assert "me/new" not in hub.repos
    assert pull(tmp_path, "me/cart") == 0, "a public repository needs no token"
    published.private = True
    message = refused(tmp_path, capsys, "me/cart", "--as", "second")
    assert message.split("(")[0].replace("cart", "none") == refused(tmp_path, capsys, "me/none", "--as", "second").split("(")[0]


def test_no_network(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot reach http://127.0.0.1:9" in refused(tmp_path, capsys, "me/cart")
    assert main(["push", "cart", "me/cart", "--data-dir", str(model.parent.parent)]) == 2
    assert "cannot reach http://127.0.0.1:9" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(tmp_path, capsys, "me/cart")


def test_an_error_without_a_message(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(*_: Any, **__: Any) -> Any:
        raise ValueError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    assert "me/cart: ValueError (http://" in refused(tmp_path, capsys, "me/cart")


def test_without_the_package(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'slm-lab[hub]'" in refused(tmp_path, capsys, "me/cart")
    assert main(["push", "cart", "me/cart", "--data-dir", str(model.parent.parent)]) == 2
