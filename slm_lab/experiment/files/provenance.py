"""Provenance of a run: the versions, machine and command of each start, which are saved in meta.run of the run's spec."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import slm_lab
from slm_lab.lib.limits import cores
from slm_lab.spec.models.spec import SPEC_VERSION
from slm_lab.spec.report import diff

_PACKAGES = ("torch", "gymnasium", "numpy", "envpool", "ale-py", "mujoco")


def provenance(choices: Mapping[str, str | int], mode: str = "train") -> dict[str, Any]:
    """Return a dict with the start time, code version, package versions, spec version, machine, command and mode of a run that starts now.

    Args: choices: settings that were chosen for this machine (env backend, library for matrix products, number of threads), which are added
        to the dict.
    """
    return {
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": git_sha(Path(slm_lab.__file__).parent.parent),
        "versions": package_versions(),
        "spec_version": SPEC_VERSION,
        "host": {"name": platform.node(), "system": platform.platform(), "cores": cores()},
        **choices,
        "mode": mode,
    }


def git_sha(checkout: Path) -> str | None:
    """Return the commit hash of the git checkout in a folder, or None if the folder is not a git checkout.

    If tracked files have changed since the commit, "+" is appended to the hash.
    """
    if not (checkout / ".git").exists():
        return None
    sha = _git(checkout, "rev-parse", "HEAD")
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return f"{sha}+" if sha and changed else sha


def _git(checkout: Path, *arguments: str) -> str | None:
    """Run a git command in a checkout, and return its output, or None if the command fails."""
    try:
        result = subprocess.run(
            ["git", "-C", os.fspath(checkout), *arguments], capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def changed_versions(start: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the packages with a different version now than at a start of a run, as a dict: package → (version then, version now).

    The second version of a pair is None if the package is not installed now.

    Args: start: the entry of meta.run that describes the start of the run.
    """
    then, now = start.get("versions", {}), package_versions()
    return diff(then, {package: now.get(package) for package in then})


def data_digest(where: str | None) -> str | None:
    """Return the SHA-256 digest of the file in meta.demonstrations or, if it is a folder, of the files in the folder.

    Returns None if there is no such file or folder, as for the id of a Minari data set.
    """
    if where is None:
        return None
    path = Path(where).expanduser()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(file.relative_to(path).as_posix().encode())
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    except OSError:
        return None
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """Return the versions of slm_lab, of Python, and of the packages on which results depend."""
    versions = {"slm_lab": slm_lab.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
