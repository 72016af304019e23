"""Run the steps of Containerfile without a container engine: python tools/container_steps.py [--keep FOLDER | --root FOLDER] [--index]

COPY and RUN are executed in a temporary folder that represents the root of the container, with a virtual environment in place of the
image's Python. Three things are not checked: the base image, the installation of system packages (`apt-get install` is simulated with the
packages of this machine), and the creation of users.

--root: a folder with a Debian system that has Python 3.11. The steps use this folder as their root (`unshare --root`): they install system
packages in the folder, create users, and run the program as the user that Containerfile names. This option requires root privileges. To
create such a folder:
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm FOLDER

By default, the line of Containerfile with --index-url, for torch's CPU build, is omitted, so that pip's own settings apply; with --index,
it is kept. At the end, the entry point trains for a few thousand frames, and images of a MuJoCo env and of an Atari env are drawn.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAINING = ("demo.json", "ppo_cartpole", "train", "--set", "env.max_frame=8000")
DRAWING = """
import os
os.environ.setdefault("MUJOCO_GL", "egl")
import ale_py, cv2, gymnasium
gymnasium.register_envs(ale_py)
for name in ("HalfCheetah-v5", "ALE/Pong-v5", "LunarLander-v3"):
    env = gymnasium.make(name, render_mode="rgb_array")
    env.reset(seed=0)
    print(name, env.render().shape)
"""
"""Code that loads the libraries that need system packages."""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, arguments) for each instruction of a Containerfile. Comments are omitted, and continued lines are joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


class Steps:
    """Runs instructions in a folder.

    Args:
        root: the folder that represents the root of the container.
        index: whether lines with --index-url are kept.
    """

    def __init__(self, root: Path, index: bool) -> None:
        self.root, self.index = root, index
        self.folder, self.entry, self.user = root, list[str](), "0"
        self.environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.ignored = (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines()

    def run(self, word: str, rest: str) -> None:
        """Run one instruction. Raises CalledProcessError if a command fails, and ValueError if the instruction is unknown."""
        match word:
            case "FROM":
                self._begin()
            case "ARG" | "ENV":
                name, _, value = rest.partition("=")
                self.environment.setdefault(name, value)
            case "USER":
                self.user = rest
            case "WORKDIR":
                self.folder = self.root / rest.lstrip("/")
                self.folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = rest.split()
                for source in sources:
                    self._copy(source, self.folder / target)
            case "RUN":
                self._shell(rest)
            case "ENTRYPOINT":
                self.entry = [one.strip(' "') for one in rest.strip("[]").split(",")]
            case "CMD":
                pass
            case _:
                raise ValueError(f"Containerfile: unknown instruction {word}")

    def _copy(self, source: str, target: Path) -> None:
        if f"!{source}" not in self.ignored:
            raise ValueError(f"Containerfile copies {source}, which .containerignore leaves out")
        path = ROOT / source
        if path.is_dir():
            hidden = [pattern.removeprefix("**/") for pattern in self.ignored if pattern.startswith("**/")]
            shutil.copytree(path, target, ignore=lambda _, names: {name for name in names if any(fnmatch(name, one) for one in hidden)})
        else:
            shutil.copy(path, target)

    def _begin(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(self.root / "venv")], check=True)
        self.environment["PATH"] = f"{self.root / 'venv/bin'}:{self.environment['PATH']}"

    def _shell(self, command: str) -> None:
        command = command.replace("apt-get install", "apt-get install --simulate").replace("rm -rf /var/lib/apt/lists/*", "true")
        command = re.sub(r"useradd [^&]*", "true ", re.sub(r"chown [^&]*", "true ", command)).replace(" /lab", f" {self.root}/lab")
        self._execute("sh", "-euc", self._without_index(command), stdout=subprocess.DEVNULL)

    def _without_index(self, command: str) -> str:
        return command if self.index else re.sub(r"--index-url \S+?(?=[\"'\s])", "", command)

    def _execute(self, *words: str, stdout: int | None = None) -> None:
        subprocess.run(words, cwd=self.folder, env=self.environment, check=True, stdout=stdout)

    def start(self, *words: str) -> None:
        """Run the entry point with arguments."""
        self._execute(*self.entry, *words)

    def draw(self) -> None:
        """Draw images of environments."""
        self._execute("python", "-c", DRAWING)


class StepsInRoot(Steps):
    """Runs instructions in a folder with a Debian system, as a container engine does: processes see no files outside the folder."""

    def _begin(self) -> None:
        self.environment |= {"PATH": "/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp"}
        self._execute("python3", "-m", "venv", "/venv")

    def _shell(self, command: str) -> None:
        self._execute("sh", "-euc", self._without_index(command), stdout=subprocess.DEVNULL)

    def _execute(self, *words: str, stdout: int | None = None) -> None:
        inside = f"/{self.folder.relative_to(self.root)}"
        ready = f'mount -t tmpfs tmpfs /dev/shm && cd {inside} && exec setpriv --reuid {self.user} --regid {self.user} --clear-groups "$@"'
        namespace = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--root", str(self.root), "--mount-proc"]
        subprocess.run(
            [*namespace, "sh", "-euc", f"mkdir -p /dev/shm; {ready}", "sh", *words], env=self.environment, check=True, stdout=stdout
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder, which is kept")
    where.add_argument("--root", type=Path, metavar="FOLDER", help="a folder with a Debian system, which is kept")
    parser.add_argument("--index", action="store_true", help="install torch's CPU build from the index that Containerfile names")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.root or arguments.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        steps = StepsInRoot(folder, arguments.index) if arguments.root else Steps(folder, arguments.index)
        for word, rest in instructions((ROOT / "Containerfile").read_text(encoding="utf-8")):
            begin = time.monotonic()
            steps.run(word, rest)
            sys.stdout.write(f"{time.monotonic() - begin:6.1f} s  {word} {shlex.join(rest.split())[:100]}\n")
            sys.stdout.flush()
        steps.draw()
        steps.start(*TRAINING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
