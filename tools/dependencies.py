"""Write the table of dependencies in CONTRIBUTING.md: python tools/dependencies.py

For each package that pyproject.toml names, the script measures the size of the package on disk, the size of the package together with all
packages that it needs (for a package of an extra: without the packages of the core), and the processor time of its import. The time of an
import is the median of three new processes, minus the time of an empty process. To find the files of slm_lab that import a package, the
script reads the syntax trees of the files. The purposes of the packages are in PURPOSES. For a package that is not installed, the cells of
sizes and time are empty.
"""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
_TABLE = re.compile(r"(<!-- dependencies -->\n).*?(<!-- end -->)", re.DOTALL)


class Purpose(NamedTuple):
    """The purpose of a package (`text`), and the module that the code imports from the package (`module`, or "" if there is none)."""

    module: str
    text: str


PURPOSES = {
    "gymnasium": Purpose("gymnasium", "environments, spaces, vector environments"),
    "matplotlib": Purpose("matplotlib.figure", "graphs as PNG; formulas of the site"),
    "numpy": Purpose("numpy", "arrays of environments, replay, statistics"),
    "pandas": Purpose("pandas", "`load_run` and `TrialResult` as DataFrames; not used in training"),
    "pillow": Purpose("PIL.Image", "writes graphs as PNG; matplotlib needs it too"),
    "plotly": Purpose("plotly.io", "interactive graphs; its script is copied beside the pages"),
    "pydantic": Purpose("pydantic", "models of specs: types, bounds, JSON Schema"),
    "ruamel-yaml": Purpose("ruamel.yaml", "specs in YAML 1.2, with the lines of mistakes"),
    "rich": Purpose("rich.console", "progress and tables on the screen"),
    "threadpoolctl": Purpose("threadpoolctl", "one thread of BLAS while acting, also after numpy is loaded"),
    "torch": Purpose("torch", "nets, gradients, optimizers"),
    "ale-py": Purpose("ale_py", "Atari, with its vector environment in C++"),
    "opencv-python": Purpose("cv2", "Atari frames scaled to 84 × 84, without EnvPool and ale-py's vector environment"),
    "minigrid": Purpose("minigrid", "MiniGrid and BabyAI"),
    "minatar": Purpose("minatar", "MinAtar"),
    "gymnasium-robotics": Purpose("gymnasium_robotics", "mazes with goals"),
    "envpool": Purpose("envpool", "environments in C++, in batches"),
    "pettingzoo": Purpose("pettingzoo", "environments with several agents"),
    "mpe2": Purpose("mpe2", "particles that cooperate or compete"),
    "minari": Purpose("minari", "recorded episodes"),
    "wandb": Purpose("wandb", "tracker"),
    "mlflow-skinny": Purpose("mlflow", "tracker"),
    "alembic": Purpose("alembic", "the SQLite store of mlflow"),
    "sqlalchemy": Purpose("sqlalchemy", "the SQLite store of mlflow"),
    "trackio": Purpose("trackio", "tracker"),
    "tensorboard": Purpose("tensorboard", "tracker"),
    "imageio-ffmpeg": Purpose("imageio_ffmpeg", "a program that writes MP4"),
    "starlette": Purpose("starlette.applications", "the server of `view`"),
    "uvicorn": Purpose("uvicorn", "the server of `view`"),
    "onnx": Purpose("onnx", "export to ONNX"),
    "onnxruntime": Purpose("onnxruntime", "compares an ONNX file with the policy; `enjoy` with it"),
    "onnxscript": Purpose("onnxscript", "torch's exporter to ONNX"),
    "huggingface-hub": Purpose("huggingface_hub", "`push` and `pull`"),
    "ray": Purpose("ray", "clusters; the schedulers ASHA and PBT of a search"),
    "optuna": Purpose("optuna", "TPE, importance of searched keys"),
    "mkdocs-material": Purpose("mkdocs", "the site"),
    "httpx": Purpose("httpx", "tests of `view`"),
    "hypothesis": Purpose("hypothesis", "tests with generated specs and observations"),
    "ipykernel": Purpose("ipykernel", "runs the notebook in a test"),
    "nbclient": Purpose("nbclient", "runs the notebook in a test"),
    "pytest": Purpose("pytest", "tests"),
    "pytest-timeout": Purpose("pytest_timeout", "tests that hang end"),
    "pytest-xdist": Purpose("xdist", "tests in several processes"),
    "safetensors": Purpose("safetensors", "compares files of weights in tests; slm_lab reads and writes these files without the package"),
    "scipy": Purpose("scipy.stats", "p-values with which tests compare those of `compare`"),
    "import-linter": Purpose("importlinter", "import contracts"),
    "mypy": Purpose("mypy", "types; its stubs say which systems lack a function"),
    "pandas-stubs": Purpose("", "types of pandas"),
    "ruff": Purpose("", "format and lint"),
    "build": Purpose("build", "`make wheel`"),
    "twine": Purpose("twine", "checks the description of the package"),
}
_CORE = "core"


def requirements() -> dict[str, list[str]]:
    """Return {package that pyproject.toml names: extras that contain the package, or "core"}."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, list[str]] = {}
    for extra, texts in {_CORE: project["dependencies"], **project["optional-dependencies"]}.items():
        for text in texts:
            requirement = Requirement(text)
            if canonicalize_name(requirement.name) != "slm-lab" and (extra == _CORE or not _is_core(requirement, project)):
                found.setdefault(_name_with_extras(requirement), []).append(extra)
    return found


def _is_core(requirement: Requirement, project: Mapping[str, list[str]]) -> bool:
    return not requirement.extras and any(Requirement(text).name == requirement.name for text in project["dependencies"])


def _name_with_extras(requirement: Requirement) -> str:
    return requirement.name + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else "")


def table() -> str:
    """Measure the packages, and return the table."""
    everything = requirements()
    empty = _seconds("pass")
    lines = ["| package | extra | what for | imported by | size, MB | with what it needs | import, s |", "|---|---|---|---|---|---|---|"]
    core = set().union(*(_closure(Requirement(name)) for name, extras in everything.items() if _CORE in extras))
    for text, extras in everything.items():
        requirement, meant = Requirement(text), purpose(text)
        closure = _closure(requirement) - (set() if _CORE in extras else core)
        if _installed(requirement.name) is None:
            cells = ["", "", ""]
        else:
            took = "" if not meant.module else f"{max(_seconds(f'import {meant.module}') - empty, 0.0):.2f}"
            size = 0.0 if requirement.extras and _CORE in everything.get(requirement.name, ()) else _size([requirement.name])
            cells = [_megabytes(size), _megabytes(_size(closure | ({requirement.name} if size else set()))), took]
        lines.append(f"| {text} | {', '.join(extras)} | {meant.text} | {users(text)} | {' | '.join(cells)} |")
    return "\n".join(lines)


_FEW = 9
"""Maximum number of importing files that the table shows as a number. A higher number would change with each new file."""


def purpose(package: str) -> Purpose:
    """Return the purpose of a package of the table."""
    requirement = Requirement(package)
    if requirement.name == "gymnasium" and requirement.extras:  # Gymnasium itself imports the packages of these extras
        return Purpose("", f"the environments of {', '.join(sorted(requirement.extras))}")
    return PURPOSES[canonicalize_name(requirement.name)]


def users(package: str) -> str:
    """Return the cell "imported by" of a package: the file of slm_lab that imports the package, or the number of files, up to _FEW."""
    files = importers().get(purpose(package).module.partition(".")[0], set())
    if len(files) > _FEW:
        return "many files"
    return f"`{next(iter(files))}`" if len(files) == 1 else f"{len(files)} files" if files else ""


@cache
def importers() -> Mapping[str, set[str]]:
    """Return {top-level module: files of slm_lab that import the module at run time, including imports inside functions}."""
    found = defaultdict[str, set[str]](set)
    for path in (ROOT / "slm_lab").rglob("*.py"):
        for module in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            found[module.partition(".")[0]].add(path.relative_to(ROOT / "slm_lab").as_posix())
    return found


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a syntax tree imports, without imports for type checkers."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            yield module
        case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
            yield module
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _closure(requirement: Requirement) -> set[str]:
    """Return the installed packages that a requirement needs, including the required package itself."""
    found, open_, seen = set[str](), [requirement], set[tuple[str, frozenset[str]]]()
    while open_:
        current = open_.pop()
        key = (canonicalize_name(current.name), frozenset(current.extras))
        if key in seen or (installed := _installed(current.name)) is None:
            continue
        seen.add(key)
        found.add(key[0])
        for text in installed.requires or ():
            child = Requirement(text)
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in ("", *current.extras)):
                open_.append(child)
    return found


def _size(names: Iterable[str]) -> float:
    """Return the size in bytes of the files of packages, without byte-code."""
    total = 0
    for name in names:
        installed = _installed(name)
        for file in (installed.files if installed is not None else None) or ():
            if not file.name.endswith(".pyc") and (path := Path(str(file.locate()))).is_file():
                total += path.stat().st_size
    return total


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f}" if size >= 10e6 else f"{size / 1e6:.1f}"


def _seconds(code: str) -> float:
    """Return the processor time (s) of a new process that runs `code`: the median of three, after a first process that compiles."""
    taken = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(taken[1:])


def rows(page: str) -> list[list[str]]:
    """Return the rows of the dependency table in the text of a page, without the header. A row is a list of cells."""
    match = _TABLE.search(page)
    assert match is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in match[0].splitlines() if line.startswith("| ")][1:]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", page), encoding="utf-8")
