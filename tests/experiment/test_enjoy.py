"""Tests of mode enjoy: choice of the run and the checkpoint, number of episodes, changes of the env, and recording."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest

from slm_lab.cli import main
from slm_lab.env import render
from slm_lab.env.make import make_env
from slm_lab.env.render import with_rendering
from slm_lab.experiment.deploy import enjoy as module
from slm_lab.experiment.deploy.enjoy import EnjoyOptions, enjoy, format_summary
from slm_lab.experiment.files.find import Training, find_run
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.training import evaluate
from slm_lab.experiment.training.evaluate import play_episodes
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.spec import SPEC_VERSION
from slm_lab.spec.report import SpecError
from tests.experiment.test_load import trained


class Coin(gym.Env[Any, Any]):
    """Env whose episodes have one or `long` steps, chosen by a coin flip; each step has the reward `reward`. It renders a bar."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(self, long: int = 50, reward: float = 1.0, size: int = 2, high: float = 1.0, render_mode: str | None = None) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = gym.spaces.Box(-high, high, (1,), np.float32)
        self.long, self.reward, self.render_mode = long, reward, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 1 if self.np_random.random() < 0.5 else self.long
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.left -= 1
        obs = np.full(self.observation_space.shape, float(np.tanh(action[0])), np.float32)
        return obs, self.reward + 1e-3 * float(action[0]), self.left == 0, False, {}

    def render(self) -> Any:
        frame = np.zeros((73, 45, 3), np.uint8)  # odd sizes, which H.264 does not support
        frame[:, :40] = (255, 128, 0)
        return frame


gym.register("Coin-v0", entry_point=Coin)
gym.register("OtherCoin-v0", entry_point=Coin, kwargs={"reward": 10.0, "high": 3.0})
gym.register("WideCoin-v0", entry_point=Coin, kwargs={"size": 3})
PENDULUM = {"name": "Pendulum-v1", "max_t": 20, "normalize_obs": True}


@pytest.fixture
def coin(tmp_path: Path) -> RunPaths:
    """Return a run trained in Coin."""
    return trained(tmp_path, {"name": "Coin-v0"})


def frames(path: Path) -> int:
    """Return the number of frames of a video."""
    return int(imageio_ffmpeg.count_frames_and_secs(str(path))[0])


def play_coin(num_envs: int, episodes: int | None) -> list[float]:
    env = make_env(EnvSpec(name="Coin-v0", max_frame=1), 0, num_envs=num_envs, training=False)
    try:
        return play_episodes(env, lambda obs_N, first_N: np.zeros((len(obs_N), 1), np.float32), Stop(), episodes=episodes)
    finally:
        env.close()


@pytest.mark.parametrize(("num_envs", "episodes"), [(1, 1), (1, 5), (3, 3), (4, 10), (8, 20), (3, None)])
def test_as_many_episodes_as_asked(num_envs: int, episodes: int | None) -> None:
    assert len(play_coin(num_envs, episodes)) == (num_envs if episodes is None else episodes)


def test_short_episodes_are_not_preferred() -> None:
    """The mean return is 25.5; nearly all of the first 36 episodes to end would be short."""
    returns = play_coin(32, 36)
    assert set(returns) == {1.0, 50.0}
    assert abs(np.mean(returns) - 25.5) < 10


def test_episodes_that_do_not_end(coin: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Such episodes are left out, and a notice says so; the step limit applies to one episode, so many episodes together may be longer."""
    monkeypatch.setattr(evaluate, "MAX_STEPS", 60)
    assert len(play_coin(1, 10)) == 10
    monkeypatch.setattr(evaluate, "MAX_STEPS", 30)
    returns = play_coin(4, 40)
    assert set(returns) == {1.0}
    assert 0 < len(returns) < 40
    assert f"{40 - len(returns)} of 40 episodes did not end" in caplog.text
    with pytest.raises(UserError, match="no episode of Never-v0"):
        enjoy(Training(coin), EnjoyOptions(sets=["env.name=Never-v0"]), Plan())


class Never(Coin):
    """Env whose episodes do not end."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, False, truncated, info


gym.register("Never-v0", entry_point=Never)


def test_the_same_again(tmp_path: Path) -> None:
    """Playing the mode of the distribution differs from playing samples, and both are repeatable."""
    paths = trained(tmp_path, PENDULUM)
    first, again = (enjoy(Training(paths), EnjoyOptions(episodes=3), Plan()).returns for _ in range(2))
    mode, mode_again = (enjoy(Training(paths), EnjoyOptions(episodes=3, deterministic=True), Plan()).returns for _ in range(2))
    assert first == again
    assert mode == mode_again
    assert mode != first


def test_eval_deterministic_of_the_spec(tmp_path: Path) -> None:
    paths = trained(tmp_path, PENDULUM, rigorous_eval=1, eval_deterministic=True)
    assert (
        enjoy(Training(paths), EnjoyOptions(episodes=2), Plan()).returns
        == enjoy(Training(paths), EnjoyOptions(episodes=2, deterministic=True), Plan()).returns
    )


def test_the_env_can_be_changed(coin: RunPaths) -> None:
    """Episode length, constructor arguments and wrappers can be changed, also the env, if its spaces are equal except for bounds."""

    def returns(*sets: str) -> list[float]:
        return enjoy(Training(coin), EnjoyOptions(episodes=12, deterministic=True, sets=sets), Plan()).returns

    assert {round(value) for value in returns()} == {1, 50}
    assert {round(value) for value in returns("env.max_t=7")} == {1, 7}
    assert {round(value) for value in returns("env.long=5", "env.reward=2")} == {2, 10}
    assert {round(value) for value in returns("env.name=OtherCoin-v0")} == {10, 500}
    assert {round(value) for value in returns('env.wrappers=[{"name": "TimeLimit", "max_episode_steps": 3}]')} == {1, 3}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("env.name=WideCoin-v0", ["(2,)", "(3,)", "Coin-v0", "WideCoin-v0"]),
        ("env.name=CartPole-v1", ["Discrete(2)", "(1,)", "(4,)"]),
        ("env.num_envs=3", ["env.num_envs", "no effect", "env.max_t"]),
        ("env.normalize_obs=true", ["env.normalize_obs", "no effect"]),
        ("env.max_frame=10", ["env.max_frame", "no effect"]),
        ("agent.algorithm.gamma=0.5", ["agent.algorithm.gamma", "no effect"]),
        ("meta.random_seed=5", ["meta.random_seed", "no effect"]),
        ("envs=5", ["envs", "no effect"]),
        ("env.lng=5", ["env.lng", "did you mean 'long'", "(from --set)"]),
        ("env.name=Coinage-v0", ["Coinage-v0", "unknown env"]),
        ("env.max_t=0", ["env.max_t"]),
    ],
)
def test_what_cannot_be_changed(setting: str, named: list[str], coin: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"enjoy@{coin.root}", "-s", setting]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    for word in named:
        assert word in message, message


def test_the_interval_is_within_the_possible_returns(tmp_path: Path) -> None:
    """The range of CartPole is 0 to 500; with another time limit it is unknown, and the interval is not clipped."""
    training = Training(trained(tmp_path, {"name": "CartPole-v1"}))
    played = enjoy(training, EnjoyOptions(episodes=2), Plan())
    assert "[0, 500]" in format_summary(played._replace(returns=[100.0, 400.0]))
    limited = enjoy(training, EnjoyOptions(episodes=2, sets=["env.max_t=600"]), Plan())
    assert "[-1655.9, 2155.9]" in format_summary(limited._replace(returns=[100.0, 400.0]))


def test_the_checkpoint_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint can be best, last or numbered, from the best Session or from a given one."""
    paths = trained(tmp_path, {"name": "CartPole-v1"}, max_session=2)
    for session in (0, 1):
        shutil.copy(paths.checkpoint(session, "last"), paths.model_dir / f"small_t0_s{session}_ckpt-100.pt")
    shutil.copy(paths.checkpoint(1, "last"), paths.model_dir / "small_t0_s1_ckpt-20.pt")

    def played(*options: str) -> str:
        assert main([f"enjoy@{paths.root}", "--episodes", "1", *options]) == 0
        return Path(capsys.readouterr().out.splitlines()[0]).name

    assert played() in ("small_t0_s0_ckpt-best.pt", "small_t0_s1_ckpt-best.pt")
    assert played("--session", "0") == "small_t0_s0_ckpt-best.pt"
    assert played("--session", "1", "--checkpoint", "last") == "small_t0_s1_ckpt-last.pt"
    assert played("--checkpoint", "100", "--session", "0") == "small_t0_s0_ckpt-100.pt"
    assert played("--checkpoint", "20") == "small_t0_s1_ckpt-20.pt"
    for options, named in (
        (["--checkpoint", "200"], "expected one of best, last, 20, 100"),
        (["--checkpoint", "20", "--session", "0"], "of session 0 in"),
        (["--session", "7"], "sessions: 0, 1"),
    ):
        assert main([f"enjoy@{paths.root}", *options]) == 2
        assert named in capsys.readouterr().err


def test_which_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`latest` is the newest run of all specs, or of the spec named; a folder needs neither FILE nor NAME."""
    first = trained(tmp_path / "made", {"name": "CartPole-v1"}).root
    data = tmp_path / "data"
    data.mkdir()

    def copied(name: str, stamp: str) -> Path:
        root = data / f"{name}_{stamp}"
        shutil.copytree(first, root)
        for path in sorted(root.rglob("small_*")):
            path.rename(path.with_name(name + path.name.removeprefix("small")))
        saved = root / f"{name}_spec.json"
        saved.write_text(json.dumps({name: next(iter(json.loads(saved.read_text()).values()))}))
        return root

    old = copied("zebra", "2026_01_01_000000")
    new = copied("ant", "2026_01_02_000000")
    broken = copied("bee", "2026_01_03_000000")
    (broken / "bee_spec.json").write_text("{half")
    (data / "cat_2026_01_04_000000").mkdir()
    (data / "compare_2026_01_05_000000").mkdir()
    specs = tmp_path / "specs.json"
    specs.write_text(json.dumps({name: next(iter(json.loads((new / "ant_spec.json").read_text()).values())) for name in ("zebra", "ant")}))

    def plays(*words: str) -> str:
        assert main([*words, "--data-dir", str(data), "--episodes", "1"]) == 0
        return capsys.readouterr().out.splitlines()[0].rpartition(": ")[2]

    assert main(["enjoy@latest", "--data-dir", str(data)]) == 2, "another run is not taken in place of one that cannot be read"
    assert str(broken / "bee_spec.json") in capsys.readouterr().err
    broken = broken.rename(tmp_path / broken.name)
    assert plays("enjoy@latest").startswith(f"{new}/")
    assert plays(str(specs), "zebra", "enjoy@latest").startswith(f"{old}/")
    assert plays(f"enjoy@{old}").startswith(f"{old}/")
    assert plays(f"enjoy@{old.name}").startswith(f"{old}/")
    assert plays("run", f"enjoy@{old}/").startswith(f"{old}/")
    for where, named in (("nowhere", ("'nowhere'", str(new))), (str(broken), ("bee_spec.json",))):
        assert main([f"enjoy@{where}", "--data-dir", str(data)]) == 2
        text = capsys.readouterr().err
        assert all(part in text for part in named)
    assert main(["enjoy@latest", "--data-dir", str(tmp_path / "none")]) == 2
    assert "no run of mode train in" in capsys.readouterr().err
    assert find_run("latest", None, data) == RunPaths(new, "ant")

    newest = copied("fox", "2026_01_06_000000") / "fox_spec.json"
    body = json.loads(newest.read_text())
    body["fox"]["meta"]["run"] = [{"mode": "dev", "spec_version": SPEC_VERSION}]
    newest.write_text(json.dumps(body))
    assert find_run("latest", None, data) == RunPaths(new, "ant"), "a run of dev is not the latest"
    assert plays(f"enjoy@{newest.parent}").startswith(f"{newest.parent}/")
    shutil.rmtree(new), shutil.rmtree(old)
    assert main(["enjoy@latest", "--data-dir", str(data)]) == 2
    assert str(newest.parent) in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["enjoy@latest", "demo.json", "ppo_cartpole"],
        ["enjoy"],
        ["dev@latest"],
        ["enjoi@latest"],
        ["enjoy@"],
        ["enjoy@latest", "--jobs", "2"],
        ["enjoy@latest", "--render", "--video"],
        ["demo.json", "ppo_cartpole", "train", "--episodes", "3"],
        ["demo.json", "ppo_cartpole", "--session", "0"],
        ["check", "demo.json", "--video"],
    ],
)
def test_a_command_that_is_wrong(words: list[str], coin: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(coin.root.parent.rglob("*"))
    assert main([*words, *([] if words[0] == "check" else ["--data-dir", str(coin.root.parent)])]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert sorted(coin.root.parent.rglob("*")) == before


@pytest.mark.slow
def test_a_video_has_a_frame_for_each_step(coin: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """All requested episodes are recorded in one file, which appears only when it is complete."""
    assert main([f"enjoy@{coin.root}", "--video", "--episodes", "4", "--deterministic"]) == 0
    output = capsys.readouterr().out
    (video,) = (coin.root / "video").iterdir()
    assert str(video) in output
    played = enjoy(Training(coin), EnjoyOptions(episodes=4, deterministic=True, show="video"), Plan())
    steps = sum(50 if value > 10 else 1 for value in played.returns)
    assert frames(video) == steps
    assert f"4 episodes, {steps} frames" in output
    reader = imageio_ffmpeg.read_frames(str(video))
    about = next(reader)
    assert (about["fps"], about["size"]) == (7.0, (226, 366)), "enlarged five times; sizes are even"
    picture = np.frombuffer(next(reader), np.uint8).reshape(366, 226, 3)
    drawn = picture[180, : 5 * 39].mean(0)
    assert drawn[0] > 200
    assert drawn[2] < 60, drawn


def test_without_a_number_of_episodes_a_video_is_short(coin: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording ends with the episode that reaches the frame limit; all episodes are played."""
    monkeypatch.setattr(module, "VIDEO_FRAMES", 60)
    played = enjoy(Training(coin), EnjoyOptions(show="video"), Plan())
    lengths = np.array([50 if value > 10 else 1 for value in played.returns])
    assert len(lengths) == 10
    assert lengths.sum() > 100
    recorded = int(np.argmax(lengths.cumsum() >= 60)) + 1
    assert (played.video.episodes, played.video.frames) == (recorded, lengths[:recorded].sum())
    assert frames(played.video.path) == played.video.frames


def missing_package(self: Coin) -> None:
    raise gym.error.DependencyNotInstalled("pygame is not installed")


def test_a_video_that_cannot_be_made(coin: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors without ffmpeg, for an env that does not render, or if the folder cannot be made; no file is left."""

    def refused(*options: str) -> str:
        assert main([f"enjoy@{coin.root}", "--video", *options]) == 2
        return capsys.readouterr().err

    assert "cannot be drawn" in refused("-s", "env.name=Blind-v0")
    assert "tests.env.own_backend" in refused("-s", "env.backend=tests.env.own_backend:Counting")
    assert not (coin.root / "video").exists()
    (coin.root / "video").write_text("a file")
    assert "cannot write" in refused()
    (coin.root / "video").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Coin, "render", missing_package)
        assert "pygame is not installed" in refused()
    monkeypatch.setattr(Coin, "step", lambda self, action: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        enjoy(Training(coin), EnjoyOptions(show="video"), Plan())
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert "pip install 'slm-lab[video]'" in refused()
    assert not (coin.root / "video").exists()


class Blind(Coin):
    """Env that does not render."""

    metadata = {"render_modes": []}


gym.register("Blind-v0", entry_point=Blind)


def test_an_interrupted_video_leaves_nothing(coin: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = Coin.step, iter(range(30))

    def interrupted(self: Coin, action: Any) -> Any:
        if next(count, None) is None:
            raise KeyboardInterrupt
        return step(self, action)

    monkeypatch.setattr(Coin, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        enjoy(Training(coin), EnjoyOptions(show="video", episodes=10), Plan())
    assert list((coin.root / "video").iterdir()) == []


def test_no_window_without_a_display(coin: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for display in ("", ":931"):
        monkeypatch.setenv("DISPLAY", display)
        assert main([f"enjoy@{coin.root}", "--render"]) == 2
        assert "--render needs a display" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "size", "rate"), [({"name": "HalfCheetah-v5"}, (480, 480), 20.0), ({"name": "ALE/Pong-v5", "noop_max": 1}, (320, 420), 15.0)]
)
def test_videos_of_mujoco_and_atari(env: dict[str, Any], size: tuple[int, int], rate: float, tmp_path: Path) -> None:
    """Videos are in colour, and the camera follows the robot."""
    pytest.importorskip("mujoco" if env["name"].startswith("Half") else "ale_py")
    net = {"name": "ConvNet"} if "Pong" in env["name"] else {"name": "MLPNet", "hid_layers": [16], "hid_layers_activation": "tanh"}
    paths = trained(tmp_path, env, net=net)
    video = enjoy(Training(paths), EnjoyOptions(episodes=2, show="video", sets=["env.max_t=40"]), Plan()).video
    assert frames(video.path) == video.frames == 80
    reader = imageio_ffmpeg.read_frames(str(video.path))
    about = next(reader)
    assert (about["size"], about["fps"]) == (size, rate)
    pictures = [np.frombuffer(data, np.uint8).reshape(size[1], size[0], 3).astype(int) for data in reader]
    assert np.abs(pictures[39] - pictures[0]).max() > 100, "nothing moves"
    colour = np.abs(pictures[0][..., 0] - pictures[0][..., 2]).max()
    assert colour > 60, "it is gray"


def test_the_camera_follows_the_robot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The camera tracks the robot unless the spec chooses another one.

    Without a display, MuJoCo renders off screen with the library that is installed.
    """
    pytest.importorskip("mujoco")
    monkeypatch.setattr(render, "has_display", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    spec = EnvSpec(name="HalfCheetah-v5", max_frame=1)
    for installed, expected in (({"EGL", "OSMesa"}, "egl"), ({"OSMesa"}, "osmesa")):
        monkeypatch.setenv("MUJOCO_GL", "")
        monkeypatch.delenv("MUJOCO_GL")
        monkeypatch.setattr(ctypes.util, "find_library", lambda name, installed=installed: name if name in installed else None)
        drawn = with_rendering(spec, "rgb_array")
        assert os.environ["MUJOCO_GL"] == expected
        assert (drawn.backend, drawn.kwargs) == ("sync", {"render_mode": "rgb_array", "camera_name": "track"})
    own = with_rendering(EnvSpec(name="HalfCheetah-v5", max_frame=1, camera_id=0), "rgb_array")
    assert own.kwargs == {"render_mode": "rgb_array", "camera_id": 0}
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(SpecError, match="install EGL or OSMesa"):
        with_rendering(spec, "rgb_array")
