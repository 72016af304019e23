"""A toy algorithm whose return is a known function of its keys."""

from __future__ import annotations

import math
from typing import Any, Literal

from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.search_space import SearchSpace, Values
from slm_lab.spec.models.algorithm import AlgorithmSpec
from slm_lab.spec.models.base import Fraction, Positive, PositiveReal

SEARCH: dict[str, Any] = {
    "rate__loguniform": [1e-5, 1e-1],
    "bonus__uniform": [0, 1],
    "rule__choice": ["sum", "mean", "max"],
    "width__qrandint": [16, 256, 16],
    "noise__uniform": [0, 1],
}


class ToySpec(AlgorithmSpec):
    """A spec whose return is computed by `toy_return`, without training."""

    rate: PositiveReal = 1e-4
    bonus: Fraction = 0.5
    rule: Literal["sum", "mean", "max"] = "sum"
    width: Positive = 64
    noise: Fraction = 0.5
    """Has no effect."""

    @classmethod
    def implementation(cls) -> Any:
        return object


def toy_space(search: dict[str, Any] | None = None, **meta: Any) -> SearchSpace:
    """Return the search space of a toy spec; the keys of `search` are those of the algorithm."""
    algorithm = {"name": f"{__name__}:ToySpec"}
    body = {
        "agent": {"algorithm": algorithm, "memory": {"name": "OnPolicyBatchReplay"}, "net": {"type": "MLPNet", "hid_layers": [8]}},
        "env": {"name": "CartPole-v1", "max_frame": 1000},
        "meta": {"max_trial": 40, **meta},
        "search": {"agent": {"algorithm": SEARCH if search is None else search}},
    }
    return SearchSpace(load_spec(body))


def toy_return(values: Values) -> float:
    """Return the return, at most 100: rate has the largest effect, then rule and bonus; width has a small one, noise none."""
    given = {key.rpartition(".")[2]: value for key, value in values.items()}
    rate = math.exp(-(((math.log10(given["rate"]) + 2.5) / 1.2) ** 2))
    rule = {"sum": 1.0, "mean": 0.85, "max": 0.6}[given["rule"]]
    bonus = 1 - 0.5 * (given["bonus"] - 0.7) ** 2
    width = 1 - 0.05 * abs(given["width"] - 128) / 128
    return 100 * rate * rule * bonus * width
