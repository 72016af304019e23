"""Check the packages in dist/: python tools/package_check.py files | walk [--python PYTHON] [--keep FOLDER]

files: check that the wheel has exactly the files of slm_lab/ that git tracks, one version, and the metadata of pyproject.toml, and that the
source distribution has all files that its tests and documentation need. The exit status is 1 if a check fails.

walk: run the commands of a new user with the wheel, in an empty folder and an empty virtual environment, and print the time of each step.
The exit status is the number of commands that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
IN_SOURCE = ("README.md", "PYPI.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "docs/index.md", "tests/conftest.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("files", "walk"))
    parser.add_argument("--python", default=sys.executable, help="Python of the virtual environment")
    parser.add_argument("--keep", type=Path, help="folder for the virtual environment and the runs; by default a temporary one")
    arguments = parser.parse_args()
    wheel, source = newest("slm_lab-*.whl"), newest("slm_lab-*.tar.gz")
    if arguments.what == "files":
        problems = [*wheel_problems(wheel), *source_problems(source)]
        sys.stdout.write("".join(f"{problem}\n" for problem in problems))
        return int(bool(problems))
    with tempfile.TemporaryDirectory() as temporary:
        return walk(wheel, arguments.python, (arguments.keep or Path(temporary)).absolute())


def newest(pattern: str) -> Path:
    """Return the newest file in dist/ that matches a pattern. Raises SystemExit if there is none."""
    files = sorted(DIST.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not files:
        raise SystemExit(f"{DIST}: no file {pattern}; `make wheel` builds the file")
    return files[-1]


# ---- files


def tracked() -> set[str]:
    """Return the files of slm_lab/ that git tracks."""
    listed = subprocess.run(["git", "ls-files", "slm_lab"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def wheel_problems(wheel: Path) -> Iterator[str]:
    """Yield the problems of the files and metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = message_from_bytes(archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))))
        points = archive.read(next(name for name in names if name.endswith(".dist-info/entry_points.txt"))).decode()
    files = {name for name in names if ".dist-info/" not in name}
    yield from (f"{wheel.name}: lacks {name}" for name in sorted(tracked() - files))
    yield from (f"{wheel.name}: has {name}, which git does not track" for name in sorted(files - tracked()))
    if "slm-lab = slm_lab.cli:console" not in points:
        yield f"{wheel.name}: has no command slm-lab"
    if metadata["Version"] != version() or f"-{version()}-" not in wheel.name:
        yield f"{wheel.name}: version {metadata['Version']}, but slm_lab.__version__ is {version()}"
    if relative := re.search(r"\]\((?!https?:|#)[^)]*\)", str(metadata.get_payload())):
        yield f"{wheel.name}: the description has a relative link, {relative[0]}"


def source_problems(source: Path) -> Iterator[str]:
    """Yield the problems of the files of a source distribution."""
    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    yield from (f"{source.name}: lacks {name}" for name in IN_SOURCE if name not in files)
    yield from (f"{source.name}: lacks {name}" for name in sorted(tracked() - files))
    yield from (f"{source.name}: has {name}" for name in sorted(files) if re.search(r"\.pyc$|(^|/)(\.venv|data/[^.]|site/)", name))


def version() -> str:
    """Return slm_lab.__version__, read from the source."""
    match = re.search(r'^__version__ = "(.+)"$', (ROOT / "slm_lab/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match[1]


# ---- walk

SPEC = """{
  "my_cartpole": {
    "agent": {"algorithm": {"name": "PPO", "gamma": 0.98}},
    "env": {"name": "CartPole-v1", "max_frame": 8000}
  }
}
"""
TRAIN = ("--set", "meta.max_session=1", "--set")


@dataclass(frozen=True)
class Step:
    """A command of the walk: `slm-lab` or `python` with arguments, text that the output must contain, and the expected exit status."""

    words: tuple[str, ...]
    prints: str
    code: int = 0


STEPS = (
    Step(("slm-lab", "--version"), version()),
    Step(("python", "-m", "slm_lab", "--help"), "usage: python -m slm_lab"),
    Step(("slm-lab", "list", "specs"), "ppo_cartpole"),
    Step(("slm-lab", "demo.json", "ppo_cartpole", "train", *TRAIN, "env.max_frame=8000"), "report.html"),
    Step(("slm-lab", "my_spec.json", "my_cartpole", "train"), "report.html"),
    Step(("slm-lab", "new", "new_spec.json", "acrobot", "--env", "Acrobot-v1"), "slm-lab new_spec.json acrobot train"),
    Step(("slm-lab", "new_spec.json", "acrobot", "train", *TRAIN, "env.max_frame=4000"), "report.html"),
    Step(("slm-lab", "train@latest", "--set", "env.max_frame=6000"), "report.html"),
    Step(("slm-lab", "enjoy@latest", "--episodes", "1"), "mean return"),
    Step(("slm-lab", "doctor", "latest"), "checked:"),
    Step(("slm-lab", "check", "wrong.json"), "did you mean 'gamma'?", 2),
)
"""The first commands of README.md, and the commands for a spec with a mistake."""
EXTRAS = {
    "atari": ("slm-lab", "new", "x.json", "--env", "ALE/Pong-v5"),
    "box2d": ("slm-lab", "new", "x.json", "--env", "LunarLander-v3"),
    "mujoco": ("slm-lab", "new", "x.json", "--env", "HalfCheetah-v5"),
    "minigrid": ("slm-lab", "new", "x.json", "--env", "minigrid:MiniGrid-Empty-5x5-v0"),
    "minatar": ("slm-lab", "new", "x.json", "--env", "MinAtar/Breakout-v1"),
    "robotics": ("slm-lab", "new", "x.json", "--env", "AntMaze_UMaze-v5"),
    "envpool": ("slm-lab", "new", "x.json", "--env", "CheetahRun-v1"),
    "wandb": ("slm-lab", "my_spec.json", "my_cartpole", "train", "--set", 'meta.track=["wandb"]'),
    "mlflow": ("slm-lab", "my_spec.json", "my_cartpole", "train", "--set", 'meta.track=["mlflow"]'),
    "trackio": ("slm-lab", "my_spec.json", "my_cartpole", "train", "--set", 'meta.track=["trackio"]'),
    "tensorboard": ("slm-lab", "my_spec.json", "my_cartpole", "train", "--set", 'meta.track=["tensorboard"]'),
    "video": ("slm-lab", "enjoy@latest", "--episodes", "1", "--video"),
    "view": ("slm-lab", "view"),
    "onnx": ("slm-lab", "export", "latest", "--format", "onnx"),
    "hub": ("slm-lab", "pull", "someone/model"),
    "search": ("slm-lab", "dqn_cartpole_search.json", "dqn_cartpole_search", "search"),
    "cluster": ("slm-lab", "demo.json", "ppo_cartpole", "train", "--cluster", "local"),
    "minari": ("slm-lab", "demonstrations.json", "from_minari", "train"),
}
"""Extra → a command that needs the extra. Without the extra, the command prints the name of the extra, and its exit status is 2."""
MINARI = """{
  "from_minari": {
    "agent": {"algorithm": {"name": "BC"}},
    "env": {"name": "CartPole-v1", "max_frame": 1000},
    "meta": {"demonstrations": "minari:cartpole/expert-v0"}
  }
}
"""
OWN_ENV = '''
import gymnasium as gym
import numpy as np


class Line(gym.Env):
    """Walk along a line to its end."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0.0
        return self._observation(), {}

    def step(self, action):
        self.position += 0.1 if action == 1 else -0.1
        return self._observation(), float(self.position >= 0.95), abs(self.position) >= 0.95, False, {}

    def render(self):
        picture = np.full((64, 192, 3), 255, np.uint8)
        column = int(96 + 90 * self.position)
        picture[24:40, column - 4 : column + 4] = 0
        return picture

    def _observation(self):
        return np.array([np.clip(self.position, -1.0, 1.0)], np.float32)


gym.register(id="Line-v0", entry_point=Line, max_episode_steps=100)
'''
OWN_SPEC = SPEC.replace("my_cartpole", "line").replace("CartPole-v1", "line_env:Line-v0")
OWN_STEPS = (
    Step(("slm-lab", "check", "line.json", "--build"), "line"),
    Step(("slm-lab", "line.json", "line", "train"), "report.html"),
    Step(("slm-lab", "enjoy@latest", "--episodes", "2", "--video"), ".mp4"),
)
"""The commands for a user's own environment, with the extra `video`."""


def walk(wheel: Path, python: str, folder: Path) -> int:
    """Run the walk in a folder and print a table. Return the number of steps that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    here, binaries = folder / "empty", folder / "venv" / "bin"
    here.mkdir()
    (here / "my_spec.json").write_text(SPEC)
    (here / "wrong.json").write_text(SPEC.replace("gamma", "gama"))
    (here / "demonstrations.json").write_text(MINARI)
    (here / "line_env.py").write_text(OWN_ENV)
    (here / "line.json").write_text(OWN_SPEC)
    install = ("python", "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"))
    hints = tuple(Step(words, f"slm-lab[{extra}]", 2) for extra, words in EXTRAS.items())
    begin, failed = time.monotonic(), int(_run((python, "-m", "venv", str(folder / "venv")), here, Step((), "")))
    for step in (Step((*install, str(wheel)), ""), *STEPS, *hints, Step((*install, f"{wheel}[video]"), ""), *OWN_STEPS):
        failed += _run((str(binaries / step.words[0]), *step.words[1:]), here, step)
    sys.stdout.write(f"{time.monotonic() - begin:6.1f} s  in all; {failed} failed\n")
    return failed


def _run(words: tuple[str, ...], here: Path, step: Step) -> bool:
    """Run a command, print its time and result, and return whether the command failed. The output of a failed command is printed too."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "COLUMNS")}
    begin = time.monotonic()
    done = subprocess.run(words, cwd=here, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800)
    output = " ".join((done.stdout + done.stderr).split())
    failed = done.returncode != step.code or step.prints not in output
    shown = " ".join(Path(word).name if os.path.isabs(word) else word for word in words)
    sys.stdout.write(f"{time.monotonic() - begin:6.1f} s  {'FAILED' if failed else 'ok    '}  {shown}\n")
    if failed:
        sys.stdout.write(
            f"expected exit status {step.code} and {step.prints!r}; exit status {done.returncode}:\n{done.stdout}{done.stderr}\n"
        )
    sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(main())
