"""TEMPORARY, until the search space is merged: flat keys only."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np

from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.loader import dump_spec, load_spec
from slm_lab.spec.report import Report, show_path, to_path
from slm_lab.spec.search import parse_search
from slm_lab.spec.spec import Spec
from slm_lab.spec.variables import override

Values = dict[str, Any]


class SearchSpace:
    def __init__(self, spec: Spec) -> None:
        self.spec, self._keys = spec, parse_search(spec.search)
        if not self._keys:
            raise SpecError(spec.name, [Problem("search", "is absent: nothing to search")])
        self.keys = tuple(show_path(key.path) for key in self._keys)

    @property
    def grid(self) -> tuple[Values, ...]:
        keys = [key for key in self._keys if key.distribution == "grid_search"]
        return tuple(
            dict(zip([show_path(k.path) for k in keys], values, strict=True)) for values in itertools.product(*(k.args for k in keys))
        )

    def sample(self, rng: np.random.Generator) -> Values:
        values: Values = {}
        for key in self._keys:
            name, args = show_path(key.path), key.args
            if key.distribution in ("choice", "grid_search"):
                values[name] = args[int(rng.integers(len(args)))]
            elif key.distribution == "randint":
                values[name] = int(rng.integers(args[0], args[1]))
            elif key.distribution.startswith("log"):
                values[name] = float(math.exp(rng.uniform(math.log(args[0]), math.log(args[1]))))
            else:
                values[name] = float(rng.uniform(args[0], args[1]))
        return values

    def apply(self, values: Values) -> Spec:
        body = copy.deepcopy(dump_spec(self.spec)[self.spec.name])
        body.pop("search", None)
        meta = body.get("meta", {})
        for key in [key for key in meta if key.startswith("search_") or key == "max_trial"]:
            del meta[key]
        for key, value in values.items():
            override(body, to_path(key), value, Report())
        return load_spec({self.spec.name: body}, self.spec.name)
