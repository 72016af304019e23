"""Envs of Gymnasium and ALE, to find typos without importing either. Generated: tools/generate.py writes known_envs.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONTENT: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

GYMNASIUM_VERSION: str = _CONTENT["_gymnasium_version"]
KNOWN: dict[str, str] = _CONTENT["_known"]
"""Id → kind of env (box2d, mujoco and jax need packages)."""
ATARI: frozenset[str] = frozenset(_CONTENT["_atari"])
"""Games X of ALE/X-v5."""
