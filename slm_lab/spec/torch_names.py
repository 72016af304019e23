"""Names in torch → their arguments in one string, required ones marked with !. Generated: tools/generate.py writes torch_names.json."""

from __future__ import annotations

import json
from pathlib import Path

_TABLES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

OPTIMIZERS, SCHEDULERS, LOSSES = _TABLES["_optimizers"], _TABLES["_schedulers"], _TABLES["_losses"]
ACTIVATIONS, INIT_FUNCTIONS, LAYERS = _TABLES["_activations"], _TABLES["_init_functions"], _TABLES["_layers"]
