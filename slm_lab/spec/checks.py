"""The static part of the command `check FILE [NAME]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath

from slm_lab.spec.loader import load
from slm_lab.spec.search import parse_search
from slm_lab.spec.spec import Spec


def check(path: str | FilePath, name: str | None = None, sets: Sequence[str] = ()) -> list[str]:
    """Validate one spec of a file (all that spec_params makes of it), or all specs; lines to print, notes first.

    Raises: SpecError with every problem of every spec.
    """
    loaded = load(path, name, sets)
    return [*dict.fromkeys(loaded.notes), *(summary(spec) for spec in loaded.specs)]


def summary(spec: Spec) -> str:
    """One line about a valid spec."""
    net = f" {spec.agent.net.name}" if spec.agent.net is not None else ""
    search = f", searches {len(parse_search(spec.search))} keys" if spec.search else ""
    env = f"{spec.env.name} × {spec.env.num_envs}, {spec.env.max_frame:,} frames"
    return f"{spec.name}: ok ({spec.agent.algorithm.name}{net}, {env}, {spec.meta.max_session} sessions{search})"
