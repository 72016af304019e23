"""`train@{run folder | latest}`: continue a run."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.parser import UsageError


def resume(file: str | None, name: str | None, where: str, arguments: Namespace) -> int:
    """Continue a run."""
    raise UsageError("train@ is not available yet")
