"""Hyperparameter importance: which keys of a search decide the metric.

A random forest (Breiman, 2001) is fitted to the trials, and asked for its predictions over the whole search space: a sampler such as TPE
tries good regions more often, so that the trials themselves do not represent the space.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slm_lab.experiment.report.trial_record import TrialRecord
from slm_lab.spec.load.search_space import Picks, SearchSpace, draw
from slm_lab.spec.models.search import SearchKey, walk

METHOD = "total-effect Sobol index of a random forest"
EXPLANATION = "share of the variance of its predictions over the search space that is due to the key, interactions with other keys included"
MIN_TRIALS = 8
"""Minimum number of trials with a metric."""
_TREES, _SAMPLES, _LEAF = 100, 512, 2
"""Trees; points of the search space; minimum number of trials in a leaf."""
_WORST = 0.05
_SEED = 0
_RELIABLE = 0.3
"""Share of explained variance (`Importance.explained`) up to which the importances are called not reliable."""


@dataclass(frozen=True)
class Importance:
    """How much each key of a search matters."""

    shares: dict[str, float]
    """Path of a key → its share, from 0; the largest first. Shares of keys that act together add up to more than 1."""
    explained: float
    """Share of the variance of trials that the forest explains without having been fitted to them (out-of-bag R²); near 0 or below, the
    shares mean little."""
    trials: int
    """Number of trials it was fitted to."""
    method: str = f"{METHOD}: {EXPLANATION}"

    @property
    def quality(self) -> str:
        """How much of the variance the forest explains, in words."""
        text = f"explains {max(self.explained, 0.0):.0%} of the variance of trials left out of the fit"
        return text if self.explained > _RELIABLE else f"{text}: not reliable"


def key_importance(space: SearchSpace, records: Sequence[TrialRecord]) -> Importance | None:
    """Return the importance of each key, of trials that finished or were stopped; None for fewer than MIN_TRIALS, or equal metrics.

    The worst trials count as the one at the quantile _WORST, so that a trial that diverged does not decide alone.
    """
    known = [one for one in records if one.status in ("finished", "stopped") and one.known_metric is not None]
    metric_T = np.array([one.known_metric for one in known], dtype=np.float64)
    if len(known) < MIN_TRIALS or np.ptp(metric_T) == 0:
        return None
    rng, encoding = np.random.default_rng(_SEED), _Encoding(space)
    x_TD = np.stack([encoding.of_picks(space.picks_of(one.values)) for one in known])
    forest = _Forest(x_TD, np.maximum(metric_T, np.quantile(metric_T, _WORST)), rng)
    a_SD, b_SD = (np.stack([encoding.of_picks(_random_picks(space, rng)) for _ in range(_SAMPLES)]) for _ in range(2))
    prediction_S = forest.predict(a_SD)
    variance = float(prediction_S.var())
    shares = {
        key: float(np.mean((prediction_S - forest.predict(encoding.exchanged(key, a_SD, b_SD))) ** 2) / 2 / variance) if variance else 0.0
        for key in space.keys
    }
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return Importance(ordered, forest.explained, len(known))


class _Encoding:
    """Values of a search as numbers: a column for each range, one for each value of a choice; of inactive keys -1, or 0.

    Keys of one path, in different values of a choice, share their columns.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        same: dict[tuple[str, bool], list[SearchKey]] = {}
        for key in space.named.values():
            same.setdefault((key.text, key.has_options), []).append(key)
        self.options: dict[str, list[str]] = {}
        """Path of a key → its values as JSON."""
        self.columns: dict[tuple[str, bool], slice] = {}
        """Path, and whether it has options → its columns."""
        empty: list[float] = []
        for (text, has_options), keys in same.items():
            self.options[text] = [*dict.fromkeys(frozen(value) for key in keys if has_options for value in key.args)]
            inactive = [0.0] * len(self.options[text]) if has_options else [-1.0]
            self.columns[text, has_options] = slice(len(empty), len(empty) + len(inactive))
            empty += inactive
        self.empty = np.array(empty)
        self._range = {text: _joint_range(keys) for (text, has_options), keys in same.items() if not has_options}

    def of_picks(self, picks: Picks) -> np.ndarray:
        """Return the columns of one point, [D]."""
        row = self.empty.copy()
        for name, pick in picks.items():
            key = self.space.named[name]
            columns = self.columns[key.text, key.has_options]
            if key.has_options:
                row[columns.start + self.options[key.text].index(frozen(key.args[pick]))] = 1.0
            else:
                low, high, log = self._range[key.text]
                row[columns] = ((np.log(pick) if log else pick) - low) / (high - low)
        return row

    def exchanged(self, key: str, a_SD: np.ndarray, b_SD: np.ndarray) -> np.ndarray:
        """Return `a_SD` with the values of a key from `b_SD`, with all keys nested in it, where the key is active in both."""
        result = a_SD.copy()
        below = [one for one in self.space.named.values() if one.text == key]
        parts = [self.columns[one.text, one.has_options] for other in below for one, _ in walk([other])]
        own = [self.columns[one.text, one.has_options] for one in below]
        active_S = np.all([_active(x_SD, own, self.empty) for x_SD in (a_SD, b_SD)], axis=0)
        for part in parts:
            result[active_S, part] = b_SD[active_S, part]
        return result


def _active(x_SD: np.ndarray, columns: Sequence[slice], empty_D: np.ndarray) -> np.ndarray:
    return np.asarray(np.any([(x_SD[:, part] != empty_D[part]).any(axis=1) for part in columns], axis=0))


def _joint_range(keys: Sequence[SearchKey]) -> tuple[float, float, bool]:
    """Return the range of keys of one path together, and whether it is one of logarithms."""
    log = all(key.is_log for key in keys)
    ends = [(key.args[0] - 4 * key.args[1], key.args[0] + 4 * key.args[1]) if key.is_normal else key.bounds for key in keys]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    low, high = (np.log(low), np.log(high)) if log else (low, high)
    return float(low), float(high if high > low else low + 1.0), log


def frozen(value: object) -> str:
    """Return a value as text, equal for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def _random_picks(space: SearchSpace, rng: np.random.Generator) -> Picks:
    picks: Picks = {}

    def pick(name: str, key: SearchKey) -> object:
        picks[name] = draw(key, rng.random())
        return picks[name]

    space.values(pick)
    return picks


@dataclass(frozen=True)
class _Node:
    """A node of a regression tree; a leaf has no branches."""

    value: float
    column: int = 0
    threshold: float = 0.0
    low: _Node | None = None
    high: _Node | None = None

    def predict(self, x_SD: np.ndarray, rows: np.ndarray, out_S: np.ndarray) -> None:
        """Write the predictions of `rows` into `out_S`."""
        if self.low is None or self.high is None:
            out_S[rows] = self.value
            return
        is_low = x_SD[rows, self.column] <= self.threshold
        for branch, part in ((self.low, rows[is_low]), (self.high, rows[~is_low])):
            if len(part):
                branch.predict(x_SD, part, out_S)


class _Forest:
    """A random forest: regression trees, each fitted to a bootstrap sample of the trials."""

    def __init__(self, x_TD: np.ndarray, y_T: np.ndarray, rng: np.random.Generator) -> None:
        count = len(y_T)
        self.trees: list[_Node] = []
        total_T, votes_T = np.zeros(count), np.zeros(count)
        for _ in range(_TREES):
            chosen = rng.integers(count, size=count)
            tree = _grow(x_TD, y_T, chosen, rng)
            left_out = np.setdiff1d(np.arange(count), chosen)
            out_T = np.zeros(count)
            tree.predict(x_TD, left_out, out_T)
            total_T[left_out] += out_T[left_out]
            votes_T[left_out] += 1
            self.trees.append(tree)
        seen = votes_T > 0
        error = y_T[seen] - total_T[seen] / votes_T[seen]
        self.explained = float(1 - np.mean(error**2) / y_T.var())

    def predict(self, x_SD: np.ndarray) -> np.ndarray:
        out_S, mean_S = np.empty(len(x_SD)), np.zeros(len(x_SD))
        for tree in self.trees:
            tree.predict(x_SD, np.arange(len(x_SD)), out_S)
            mean_S += out_S
        return mean_S / len(self.trees)


def _grow(x_TD: np.ndarray, y_T: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> _Node:
    """Return the tree of some rows, split where that reduces the squared error most."""
    x, y = x_TD[rows], y_T[rows]
    mean = float(y.mean())
    if len(rows) < 2 * _LEAF or np.ptp(y) == 0:
        return _Node(mean)
    order = x.argsort(axis=0)
    sorted_x = np.take_along_axis(x, order, axis=0)
    below = (y[order] - mean).cumsum(axis=0)[:-1]  # the deviations on the other side are the negative of these
    count = np.arange(1, len(rows))[:, None]
    allowed = (sorted_x[1:] > sorted_x[:-1]) & (count >= _LEAF) & (len(rows) - count >= _LEAF)
    gain = np.where(allowed, below**2 * (1 / count + 1 / (len(rows) - count)), 0.0)
    split, column = divmod(int(gain.argmax()), gain.shape[1])
    if gain[split, column] <= 0:
        return _Node(mean)
    lower, upper = sorted_x[split, column], sorted_x[split + 1, column]
    threshold = float(lower + rng.random() * (upper - lower))
    part = x[:, column] <= threshold
    low, high = _grow(x_TD, y_T, rows[part], rng), _grow(x_TD, y_T, rows[~part], rng)
    return _Node(mean, column, threshold, low, high)
