"""Test slm_lab with several versions of Python and of other packages: python tools/matrix.py [CASE …] [--steps STEP …] [--extra NAME]

A case is PYTHON-newest or PYTHON-lowest, such as 3.11-lowest. A case uses the newest versions that pyproject.toml allows, or the lowest
versions of the packages that pyproject.toml names (`uv pip install --resolution lowest-direct`). Each case has its own virtual environment
in .matrix/, which is kept (9 GB with torch's CUDA build); uv is installed in .matrix/ too. A Python that is not on the PATH is skipped with
a note.

uv does not read the settings of pip. UV_TORCH_BACKEND=cpu installs torch's CPU build from the index of PyTorch. UV_CACHE_DIR should be on
the disk of .matrix/, so that the environments can share files.

Steps: install, collect (the tests), train (three short trainings), test (the quick tests). At the end, a table is printed and written to
.matrix/table.md. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".matrix"
CASES = ("3.11-newest", "3.12-newest", "3.13-newest", "3.11-lowest")
STEPS = ("install", "collect", "train", "test")
SHOWN = ("torch", "numpy", "gymnasium", "pydantic", "pandas", "ray")
TRAININGS = (
    ("demo.json", "ppo_cartpole", "env.max_frame=8000", "meta.max_session=2"),
    ("dqn_cartpole.json", "dqn_cartpole", "env.max_frame=3000", "meta.max_session=1"),
    ("a3c_gae_cartpole.json", "a3c_gae_cartpole", "env.max_frame=8000", "meta.max_session=2"),
)
"""(file, spec, values of keys) of each training: on-policy with two Sessions, off-policy, and processes that train one shared net."""


@dataclass
class Case:
    """A Python version and a resolution of versions, with the results of the steps and the installed versions."""

    name: str
    results: dict[str, str] = field(default_factory=dict)
    """Step → the time of the step, or the reason why the step failed."""
    versions: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    @property
    def python(self) -> str:
        return self.name.partition("-")[0]

    @property
    def folder(self) -> Path:
        return HOME / self.name

    def run(self, words: Sequence[str | Path], log: str, **variables: str) -> tuple[bool, str, float]:
        """Run a command in the checkout. Return (whether the command succeeded, output, time in s). The output is also written to a log."""
        begin = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VIRTUAL_ENV": str(self.folder), **variables}
        done = subprocess.run(list(map(str, words)), cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        output = done.stdout + done.stderr
        (HOME / f"{self.name}_{log}.log").write_text(output, encoding="utf-8")
        return done.returncode == 0, output, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--extra", default="test", help="extra of pyproject.toml to install (default: test); none: only the core")
    parser.add_argument("--jobs", default="2", help="number of processes of the quick tests (2)")
    arguments = parser.parse_args()
    for name in arguments.cases:
        if not re.fullmatch(r"\d\.\d+-(newest|lowest)", name):
            parser.error(f"invalid case {name!r}; expected PYTHON-newest or PYTHON-lowest, such as 3.12-newest")
    HOME.mkdir(exist_ok=True)
    uv = _uv()
    cases = [Case(name) for name in arguments.cases]
    for case in cases:
        _try(case, uv, arguments)
        sys.stdout.write(f"{case.name}: {', '.join(f'{step} {result}' for step, result in case.results.items())}\n")
        sys.stdout.flush()
    text = table(cases)
    (HOME / "table.md").write_text(text, encoding="utf-8")
    sys.stdout.write(f"\n{text}")
    return int(any(case.failed for case in cases) or not any(case.versions for case in cases))


def _uv() -> Path:
    """Return the path of uv, which is installed in its own virtual environment."""
    tool = HOME / "uv" / "bin" / "uv"
    if not tool.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME / "uv")], check=True)
        subprocess.run([str(HOME / "uv/bin/python"), "-m", "pip", "install", "--quiet", "uv"], check=True)
    return tool


def _try(case: Case, uv: Path, arguments: argparse.Namespace) -> None:
    if shutil.which(f"python{case.python}") is None or not _works(case.python):
        case.results["install"] = "left out: this Python is not on the PATH"
        case.failed = arguments.cases is not CASES  # the user asked for this case by name
        return
    if "install" not in arguments.steps and not (case.folder / "bin" / "python").exists():
        case.results[arguments.steps[0]], case.failed = "FAILED: not installed; add install to --steps", True
        return
    steps = {
        "install": lambda: _install(case, uv, arguments.extra),
        "collect": lambda: _collect(case),
        "train": lambda: _train(case),
        "test": lambda: _test(case, arguments.jobs),
    }
    for step in arguments.steps:
        case.results[step] = steps[step]()
        if step == "install" and case.failed:
            return
    _, output, _ = case.run([uv, "pip", "list", "--python", case.folder / "bin" / "python", "--format", "freeze"], "versions")
    versions = dict(line.split("==") for line in output.splitlines() if "==" in line)
    case.versions = {name: versions[name] for name in SHOWN if name in versions}


def _works(python: str) -> bool:
    """Return whether a version of Python runs. The command may be a launcher of a version manager that lacks this version."""
    return subprocess.run([f"python{python}", "-c", ""], capture_output=True).returncode == 0


def _install(case: Case, uv: Path, extra: str) -> str:
    if not (case.folder / "bin" / "python").exists():
        subprocess.run([f"python{case.python}", "-m", "venv", str(case.folder)], check=True)
    resolution = "lowest-direct" if case.name.endswith("lowest") else "highest"
    python = case.folder / "bin" / "python"
    package = str(ROOT) if extra == "none" else f"{ROOT}[{extra}]"
    good, output, seconds = case.run([uv, "pip", "install", "--python", python, "--resolution", resolution, package], "install")
    if not good:
        case.failed = True
        return f"FAILED: {_last(output)}"
    case.run([uv, "pip", "uninstall", "--python", python, "slm-lab"], "uninstall")  # the steps test the checkout
    size = sum(path.stat().st_size for path in case.folder.rglob("*") if path.is_file())
    return f"{seconds:.0f} s, {size / 1e9:.1f} GB"


def _collect(case: Case) -> str:
    good, output, _ = case.run([case.folder / "bin/python", "-m", "pytest", "-q", "-n", "0", "--collect-only", "-m", ""], "collect")
    case.failed |= not good
    count = re.search(r"(\d+) tests? collected", output)
    errors = re.search(r"(\d+) errors?", output)
    return f"{count[1] if count else 0} tests" + ("" if good else f", {errors[0] if errors else 'FAILED'}: {_last(output)}")


def _train(case: Case) -> str:
    took = 0.0
    for file, spec, *keys in TRAININGS:
        words = [str(case.folder / "bin/python"), "-m", "slm_lab", file, spec, "train", "--data-dir", str(HOME / f"{case.name}_data")]
        good, output, seconds = case.run([*words, *(word for key in keys for word in ("--set", key))], f"train_{spec}")
        took += seconds
        if not good:
            case.failed = True
            return f"FAILED in {spec}: {_last(output)}"
    return f"{took:.0f} s"


def _test(case: Case, jobs: str) -> str:
    good, output, seconds = case.run(
        [case.folder / "bin/python", "-m", "pytest", "-q", "-n", jobs, "--ignore", "tests/package/test_constraints.py"], "test"
    )
    case.failed |= not good
    return f"{output.strip().splitlines()[-1] if output.strip() else 'FAILED'} ({seconds:.0f} s)"


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200].replace("|", "/") if lines else "no output"


def table(cases: Sequence[Case]) -> str:
    """Return the results as a table."""
    head = ["case", *SHOWN, *STEPS]
    rows = [[case.name, *(case.versions.get(one, "") for one in SHOWN), *(case.results.get(one, "") for one in STEPS)] for case in cases]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    sys.exit(main())
