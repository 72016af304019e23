"""Write constraints.txt, the exact versions that the make targets install: python tools/constraints.py [--keep NAME … | --keep-all]

For each package that any extra needs, the script writes the version that pip would install. Nothing is installed.

--keep: packages whose version in constraints.txt does not change; by default torch, whose newest build may need several GB.
--keep-all: no version changes. Packages that pyproject.toml newly needs are added, and packages that are no longer needed are removed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "constraints.txt"
HEAD = """\
# The exact versions that the make targets install (Python 3.11 to 3.13, Linux). pyproject.toml has the ranges.
# make constraints renews this file; make constraints KEEP=all only adds and removes packages.
"""


def pins() -> dict[str, str]:
    """Return {normalised name of a package: pinned version}."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {normalised(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def normalised(name: str) -> str:
    """Return the normalised name of a package, by which package indexes compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def text(versions: Mapping[str, str]) -> str:
    """Return the content of constraints.txt, without local version labels such as "+cpu" in 2.13.0+cpu.

    Args: versions: {name: version}.
    """
    lines = [f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(versions.items(), key=lambda item: normalised(item[0]))]
    return HEAD + "".join(lines)


def resolve(kept: Mapping[str, str]) -> dict[str, str]:
    """Return {name: version} of the packages that pip would install for all extras.

    Args: kept: {name: version} of packages whose versions are fixed.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    with tempfile.TemporaryDirectory() as folder:
        constraint, report = Path(folder) / "kept.txt", Path(folder) / "report.json"
        constraint.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()))
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report), "-c", str(constraint)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, f"{ROOT}[{','.join(extras)}]"], check=True)
        content = json.loads(report.read_text(encoding="utf-8"))
    packages = [package["metadata"] for package in content["install"]]
    return {package["name"]: package["version"] for package in packages if normalised(package["name"]) != "slm-lab"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs="*", default=["torch"], metavar="NAME")
    parser.add_argument("--keep-all", action="store_true")
    arguments = parser.parse_args()
    before = pins()
    kept = before if arguments.keep_all else {name: before[normalised(name)] for name in arguments.keep}
    FILE.write_text(text(resolve(kept)), encoding="utf-8")
    after = pins()
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            sys.stdout.write(f"{name}: {before.get(name, 'new')} → {after.get(name, 'removed')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
