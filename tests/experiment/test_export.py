"""Tests of policies exported to ONNX and torch.export: they act as the agent does, or the export is refused."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from slm_lab.cli import main
from slm_lab.env.spaces import leaves
from slm_lab.experiment.deploy import export
from slm_lab.experiment.deploy.export import Format, export_training
from slm_lab.experiment.deploy.exported import ExportedPolicy
from slm_lab.experiment.deploy.load import LoadedAgent, load_agent
from slm_lab.experiment.files.find import Training, find_weights
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import UserError
from slm_lab.spec.models.net import NetSpec
from tests.env.test_layout import CUE, STACK
from tests.env.toys import Spaced
from tests.experiment.test_load import CASES, NET, PPO, RNN, trained

SAC = {"name": "SoftActorCritic", "training_frequency": 4, "training_start_step": 40}


class Camera(Spaced):
    """Env with a nested observation of an image, integers, bits and numbers; its action space is named by `action`."""

    def __init__(self, action: str = "multi") -> None:
        spaces = gym.spaces
        inside = spaces.Dict({"camera": spaces.Box(0, 255, (12, 14, 3), np.uint8), "depth": spaces.Box(0.0, 1.0, (9, 9, 1), np.float32)})
        rest = spaces.Tuple([spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3), spaces.Box(-5, 5, (2,))])
        self.observation_space = spaces.Dict({"hand": inside, "rest": rest})
        self.action_space = {
            "multi": spaces.MultiDiscrete([2, 3], start=[1, -1]),
            "bits": spaces.MultiBinary(4),
            "whole": spaces.Box(-7, 9, (2,), np.int32),
            "start": spaces.Discrete(3, start=-1),
        }[action]


gym.register("ExportCamera-v0", entry_point=Camera, max_episode_steps=20)
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **CASES,
    "masked image": ({"name": "tests.env.masked:Forbidding-v0", "pixels": True}, PPO, {"name": "ConvNet"}),
    "image and more": ({"name": "ExportCamera-v0", "normalize_obs": True}, PPO, {"name": "ConvNet"}),
    "planes": ({"name": CUE, "form": "planes"}, PPO, {"name": "ConvNet", "normalize": True}),
    "codes": ({"name": CUE, "form": "codes"}, PPO, NET),
    "stack": ({"name": CUE, "form": "floats_255", "wrappers": STACK}, PPO, {"name": "ConvNet", "normalize": True}),
    "bits": ({"name": "ExportCamera-v0", "action": "bits"}, PPO, NET),
    "whole numbers": ({"name": "ExportCamera-v0", "action": "whole", "clip_obs": 0.5}, PPO, NET),
    "start": ({"name": "ExportCamera-v0", "action": "start", "obs_keys": ["rest"]}, PPO, RNN),
    "beta": ({"name": "Pendulum-v1"}, PPO | {"action_pdtype": "Beta"}, NET),
    "log-normal": ({"name": "Pendulum-v1"}, PPO | {"action_pdtype": "LogNormal"}, NET),
    "free standard deviation": ({"name": "Pendulum-v1"}, PPO, NET | {"log_std_init": -0.5}),
    "two layers": ({"name": "Pendulum-v1"}, PPO, RNN | {"cell_type": "GRU", "rnn_num_layers": 2}),
}


def observations(space: gym.Space[Any], count: int) -> Any:
    """Return a batch of observations sampled from the space."""
    space.seed(3)
    samples = [space.sample() for _ in range(count)]
    return gym.vector.utils.concatenate(space, samples, gym.vector.utils.create_empty_array(space, count))


def runner(path: Path, agent: LoadedAgent) -> Any:
    """Return a function that runs the exported file: (batch of observations, hidden state) → outputs."""
    entries = leaves(agent.acting_space)

    def inputs(obs: Any, state: np.ndarray | None) -> list[np.ndarray]:
        found = []
        for path, _ in entries:
            part = obs
            for key in path:
                part = part[key]
            found.append(np.ascontiguousarray(part))
        return [*found, *([] if state is None else [state])]

    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return lambda obs, state=None: [out.numpy() for out in module(*map(torch.from_numpy, inputs(obs, state)))]
    session = onnxruntime.InferenceSession(str(path))
    names = [one.name for one in session.get_inputs()]
    return lambda obs, state=None: session.run(None, dict(zip(names, inputs(obs, state), strict=True)))


def never(*_: Any) -> bytes:
    raise AssertionError("the slow exporter is called")


QUICK = {("normalised", "onnx"), ("masked values", "onnx"), ("privileged", "onnx"), ("recurrent", "torch"), ("dict to box", "torch")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "format"),
    [
        pytest.param(case, format, marks=() if (case, format) in QUICK else pytest.mark.slow)
        for case in POLICIES
        for format in ("onnx", "torch")
    ],
)
def test_it_acts_as_the_agent(case: str, format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file maps any number of observations, in the env's form, to actions in the env's form and the next hidden state.

    A trace must suffice for the export.
    """
    monkeypatch.setattr(export, "_export_to_onnx", never)
    env, algorithm, net = POLICIES[case]
    paths = trained(tmp_path, env, algorithm, net)
    done, _ = export_training(Training(paths), format)
    agent = load_agent(paths.root)
    assert done.checkpoint == agent.path
    assert done.path == agent.path.with_suffix({"onnx": ".onnx", "torch": ".pt2"}[format])
    run = runner(done.path, agent)
    for count in (1, 7):
        obs = observations(agent.observation_space, count)
        state = agent.policy.initial_state(count)
        if state is not None:
            state = np.random.default_rng(0).uniform(-0.5, 0.5, state.shape).astype(np.float32)
        expected, after = agent.act(obs, state, deterministic=True)
        own = None if state is None else state[:, : agent.policy.net.actor_body.state_size]  # type: ignore[union-attr]
        action, params, *rest = run(obs, own)
        assert action.dtype == expected.dtype
        assert action.shape == expected.shape
        assert np.allclose(action, expected, atol=1e-5)
        assert len(params) == count
        assert all(agent.action_space.contains(one) for one in action)
        if after is not None:
            assert np.allclose(rest[0], after[:, : rest[0].shape[1]], atol=1e-5)
    assert list(done.outputs) == ["action", "params", *(["next_state"] if state is not None else [])]


def test_a_part_that_is_a_tuple_itself(tmp_path: Path) -> None:
    """The agent accepts either the whole observation or only the part that env.obs_keys keeps."""
    agent = load_agent(trained(tmp_path, {"name": "ExportCamera-v0", "obs_keys": ["rest"]}).root)
    whole = Camera().observation_space.sample()
    assert np.array_equal(agent.act(whole, deterministic=True)[0], agent.act(whole["rest"], deterministic=True)[0])


def test_names_and_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = trained(tmp_path, {"name": "ExportCamera-v0"}, PPO, RNN)
    assert main(["export", str(paths.root)]) == 0
    output = capsys.readouterr().out
    for line in (
        "input obs.hand.camera: uint8 [batch, 12, 14, 3]",
        "input obs.rest.0: int64 [batch]",
        "input obs.rest.2: int8 [batch, 3]",
        "input state: float32 [batch, 16]",
        "output action: int64 [batch, 2]",
        "output params: float32 [batch, 5]",
        "output next_state: float32 [batch, 16]",
        "checked on 1,000 observations",
    ):
        assert line in output, output
    session = onnxruntime.InferenceSession(str(next(paths.model_dir.glob("*.onnx"))))
    assert [one.name for one in session.get_outputs()] == ["action", "params", "next_state"]
    assert session.get_inputs()[0].name == "obs.hand.camera"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("env", "algorithm"),
    [
        ({"name": "CartPole-v1", "normalize_obs": True}, PPO),
        ({"name": "HalfCheetah-v5", "normalize_obs": True, "backend": "sync"}, SAC),
    ],
    ids=["CartPole", "HalfCheetah"],
)
def test_the_same_returns_in_onnxruntime(env: dict[str, Any], algorithm: dict[str, Any], tmp_path: Path) -> None:
    """Three episodes are cut at 100 steps, because the dynamics of a robot amplify rounding differences."""
    if env["name"] == "HalfCheetah-v5":
        pytest.importorskip("mujoco")
    paths = trained(tmp_path, env, algorithm)
    agent, run = load_agent(paths.root), runner(export_training(Training(paths))[0].path, load_agent(paths.root))
    returns: dict[str, list[float]] = {"agent": [], "file": []}
    actions: dict[str, list[Any]] = {"agent": [], "file": []}
    for who in returns:
        single = gym.make(env["name"], max_episode_steps=100)
        for seed in range(3):
            obs, _ = single.reset(seed=seed)
            total, over = 0.0, False
            while not over:
                action = agent.act(obs, deterministic=True)[0] if who == "agent" else run(np.asarray(obs)[None])[0][0]
                obs, reward, terminated, truncated, _ = single.step(action)
                total, over = total + float(reward), terminated or truncated
                actions[who].append(action)
            returns[who].append(total)
        single.close()
    assert np.allclose(actions["agent"], actions["file"], atol=1e-3)
    assert np.allclose(returns["agent"], returns["file"], atol=1e-2)
    assert len(actions["agent"]) > 20


class Fickle(nn.Module):
    """A net whose control flow depends on the values of its input."""

    features = 4

    def __init__(self, spec: Any, obs: Any, role: str) -> None:
        super().__init__()
        self.linear = nn.Linear(obs.shape[0], 4)

    def forward(self, obs_B: Tensor) -> Tensor:
        return self.linear(obs_B) if float(obs_B.sum()) > 0 else -self.linear(obs_B)


class Asserting(Fickle):
    """A net with a condition on the number of observations; a trace cannot tell whether the condition matters."""

    def forward(self, obs_B: Tensor) -> Tensor:
        assert obs_B.shape[0] > 0
        return self.linear(obs_B)


class AssertingSpec(NetSpec):
    """Spec model of the net Asserting."""

    name: str

    @classmethod
    def implementation(cls) -> Any:
        return Asserting


class FickleSpec(NetSpec):
    """Spec model of the net Fickle."""

    name: str

    @classmethod
    def implementation(cls) -> Any:
        return Fickle


class Sums(nn.Module):
    """A net that reads packed observations."""

    features = 1

    def __init__(self, spec: Any, obs: Any, role: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, obs_B: Tensor) -> Tensor:
        return obs_B.float().sum(1, keepdim=True) * self.weight


class SumsSpec(NetSpec):
    """Spec model of the net Sums."""

    name: str

    @classmethod
    def implementation(cls) -> Any:
        return Sums


def refused(paths: RunPaths, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the message of a refused export, which must not write a file."""
    before = sorted(paths.root.rglob("*"))
    assert main(["export", str(paths.root), *options]) == 2
    assert sorted(paths.root.rglob("*")) == before
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("env", "algorithm", "net", "named"),
    [
        ("CartPole-v1", {"name": "Random"}, None, "at random"),
        ("CartPole-v1", PPO | {"action_policy": "random"}, NET, "at random"),
        ("CartPole-v1", PPO, {"name": f"{__name__}:FickleSpec"}, "the net cannot be exported"),
        ("ExportCamera-v0", PPO, {"name": f"{__name__}:SumsSpec"}, "Sums reads packed observations"),
    ],
)
def test_what_cannot_be_exported(
    env: str, algorithm: dict[str, Any], net: dict[str, Any] | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = trained(tmp_path, {"name": env}, algorithm, net or NET)
    for format in ("onnx", "torch"):
        message = refused(paths, capsys, "--format", format)
        assert named in message
        assert str(load_agent(paths.root).path) in message


@pytest.mark.slow
def test_a_net_that_cannot_be_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a net is exported by torch.export instead of by a trace."""
    paths = trained(tmp_path, {"name": "CartPole-v1"}, PPO, {"name": f"{__name__}:AssertingSpec"})
    done, _ = export_training(Training(paths))
    agent, run = load_agent(paths.root), runner(done.path, load_agent(paths.root))
    obs = observations(agent.observation_space, 7)
    assert np.array_equal(run(obs)[0], agent.act(obs, deterministic=True)[0])
    monkeypatch.setattr(export, "_export_to_onnx", never)
    with pytest.raises(UserError, match="slow exporter"):
        export_training(Training(paths))


@pytest.mark.parametrize("what", ["action", *(pytest.param(what, marks=pytest.mark.slow) for what in ("params", "batch"))])
def test_a_file_that_acts_differently_is_not_written(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older file at the same path stays unchanged."""
    paths = trained(tmp_path, {"name": "Pendulum-v1"})
    old = paths.checkpoint(0, "best").with_suffix(".onnx")
    old.write_text("older")
    act = ExportedPolicy._actions

    def other(self: ExportedPolicy, features_BF: Tensor, mask_BP: Tensor | None) -> tuple[Tensor, Tensor]:
        action, params = act(self, features_BF, mask_BP)
        return (action + 0.01, params) if what == "action" else (action, params * 1.01) if what == "params" else (action[:1], params)

    monkeypatch.setattr(ExportedPolicy, "_actions", other)
    assert ("acts differently" in refused(paths, capsys)) or what == "batch"
    assert old.read_text() == "older"


def test_where_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = trained(tmp_path, {"name": "CartPole-v1"})
    data = ["--data-dir", str(tmp_path)]
    (tmp_path / "newest.pt2").write_text("older")
    assert main(["export", "latest", *data, "--out", str(tmp_path / "newest.pt2"), "--checkpoint", "last"]) == 0
    assert str(paths.checkpoint(0, "last")) in capsys.readouterr().out
    torch.export.load(tmp_path / "newest.pt2")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "is a folder" in refused(paths, capsys, "--out", str(tmp_path))
    assert "must end with .pt2" in refused(paths, capsys, "--format", "torch", "--out", str(tmp_path / "x.onnx"))
    assert "must end with .onnx or .pt2" in refused(paths, capsys, "--out", str(tmp_path / "x.txt"))
    assert "no folder" in refused(paths, capsys, "--out", str(tmp_path / "nowhere" / "x.onnx"))
    assert "expected one of best, last" in refused(paths, capsys, "--checkpoint", "300")
    assert "sessions: 0" in refused(paths, capsys, "--session", "3")
    for words in (["export"], ["export", "latest", "onnx"], ["export", str(tmp_path / "none")], ["export", "latest", "--episodes", "3"]):
        assert main([*words, *data]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk_and_a_read_only_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = trained(tmp_path, {"name": "CartPole-v1"})

    def fails(number: int) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fails(errno.ENOSPC))
        assert os.strerror(errno.ENOSPC) in refused(paths, capsys, "--format", "torch")
    monkeypatch.setattr("os.replace", fails(errno.EROFS))
    monkeypatch.setattr(Path, "unlink", fails(errno.EROFS))
    assert main(["export", str(paths.root), "--format", "torch"]) == 2
    assert os.strerror(errno.EROFS) in capsys.readouterr().err


def test_the_folder_of_a_search_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command must not silently use trial 0."""
    paths = trained(tmp_path, {"name": "CartPole-v1"})
    paths.search_state.write_text("{}")
    for words in (["export", str(paths.root)], [f"enjoy@{paths.root}"]):
        assert main(words) == 2
        assert str(paths.root) in capsys.readouterr().err
    with pytest.raises(UserError, match=r"meta\.init_from"):
        find_weights(str(paths.root), tmp_path)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_without_the_packages(package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An export to ONNX names the missing package; an export with torch.export needs none of them."""
    paths = trained(tmp_path, {"name": "CartPole-v1"})
    monkeypatch.setitem(sys.modules, package, None)
    message = refused(paths, capsys)
    assert f"the package {package}," in message
    assert "pip install 'slm-lab[onnx]'" in message
    export_training(Training(paths), "torch")


def test_a_run_without_checkpoint(tmp_path: Path) -> None:
    paths = trained(tmp_path, {"name": "CartPole-v1"})
    for path in paths.model_dir.iterdir():
        path.unlink()
    with pytest.raises(UserError, match="no checkpoint in"):
        export_training(Training(paths))
    assert json.loads(paths.spec.read_text())


def test_a_special_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "policy.onnx")
    with pytest.raises(UserError, match="is a special file"):
        export.choose_format(fifo, None)
