"""Names and defaults of torch, from a file that tools/generate.py writes: specs are read without torch."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any

_FILE: dict[str, Any] = json.loads(FilePath(__file__).with_name("torch_names.json").read_text(encoding="utf-8"))
NAMES: dict[str, dict[str, str]] = {table: entries for table, entries in _FILE.items() if table != "_learning_rates"}
"""Table → names in torch → their arguments in one string, required ones marked with !."""
LEARNING_RATES: dict[str, float] = _FILE["_learning_rates"]
"""Optimizer → its default learning rate."""
