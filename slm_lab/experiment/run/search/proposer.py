"""Proposers: which values a trial of a search gets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slm_lab.experiment.plan import UserError
from slm_lab.spec.load.search_space import Picks, SearchSpace, Values, draw, snap
from slm_lab.spec.models.search import SearchKey
from slm_lab.spec.report import Problem, SpecError

if TYPE_CHECKING:
    import optuna

_ATTEMPTS = 100
"""Draws of a combination that the spec accepts; then the last one is proposed, and its trial fails with the reason."""
_STREAM = 1
"""Spawn key of the random streams, apart from those of Sessions."""
STARTUP_TRIALS = 10
"""Random trials before TPE proposes."""
_GOOD, _MOST_GOOD = 0.15, 25
"""Share of the trials that count as good, as in Bergstra et al., and their maximum number."""
_CANDIDATES = 8
"""Samples among which the best is proposed."""
_PRIOR = 3.0
"""Weight of the prior; that of a trial is 1. With Optuna's values (1, 24 candidates, a tenth of the trials as good ones) 12 of 40
searches of the landscape in tests/experiment/search stay in a bad category for 100 trials; with these none does."""


class Proposer(Protocol):
    """Proposes the values of each trial. Trials may run at the same time and end in any order."""

    def ask(self, trial: int) -> Values | None:
        """Return the values of a trial; None: nothing is left to propose."""

    def tell(self, trial: int, metric: float | None) -> None:
        """Add the result of a trial, of which more is better; None: it failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain Python."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state: proposals continue as they would have without a break."""


def make_proposer(space: SearchSpace, algorithm: str, seed: int) -> Proposer:
    """Return the proposer of meta.search_algorithm "optuna", "random" or "grid".

    A space whose keys are all grid_search is a grid with each of them. Raises SpecError for "grid" without grid_search keys, UserError if
    optuna is not installed.
    """
    if algorithm == "grid" or (space.is_grid and algorithm in ("optuna", "random")):
        return GridProposer(space, seed)
    if algorithm == "random":
        return RandomProposer(space, seed)
    if algorithm == "optuna":
        return TPEProposer(space, seed)
    raise ValueError(f"unknown search algorithm '{algorithm}'")


class RandomProposer:
    """Draws each trial's values independently. A trial's values depend on the seed and its index alone."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self.space, self.seed = space, seed

    def ask(self, trial: int) -> Values | None:
        rng = _generator(self.seed, trial)
        for _ in range(_ATTEMPTS):
            values = self.space.sample(rng)
            if _is_valid(self.space, values):
                break
        return values

    def tell(self, trial: int, metric: float | None) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class GridProposer(RandomProposer):
    """Proposes every combination of the values of grid_search keys once.

    With other keys, which are drawn at random, the combinations repeat after the last one.
    """

    def __init__(self, space: SearchSpace, seed: int) -> None:
        super().__init__(space, seed)
        if space.grid_picks == ({},):
            raise SpecError(space.spec.name, [Problem("meta.search_algorithm", "'grid' needs keys with grid_search, and there are none")])

    def ask(self, trial: int) -> Values | None:
        points = self.space.grid_picks
        if self.space.is_grid and trial >= len(points):
            return None
        fixed, rng = points[trial % len(points)], _generator(self.seed, trial)
        for _ in range(1 if self.space.is_grid else _ATTEMPTS):
            values = self.space.values(lambda name, key: fixed[name] if name in fixed else draw(key, rng.random()))
            if _is_valid(self.space, values):
                break
        return values


@dataclass
class _Trial:
    """A proposal and its result, in the order of proposals."""

    trial: int
    picks: Picks
    """What TPE sees of the values, see _suggest."""
    metric: float | None = None
    done: bool = False


@dataclass
class TPEProposer:
    """Proposes by a tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011) of all keys together, as Optuna implements it.

    Keys inside values of a choice have estimators of their own. Running trials count as bad ones, so that trials at the same time
    differ ("constant liar"). Each proposal depends on the results so far, the seed and the index of the trial alone.

    Raises UserError if optuna is not installed.
    """

    space: SearchSpace
    seed: int
    history: list[_Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        _optuna()

    def ask(self, trial: int) -> Values | None:
        study, refused = self._study(trial), 0
        while True:
            asked, picks = study.ask(), Picks()

            def suggest(name: str, key: SearchKey, asked: Any = asked, picks: Picks = picks) -> Any:
                picks[name] = _suggest(asked, name, key)
                return _value(key, picks[name])

            values = self.space.values(suggest)
            if refused >= _ATTEMPTS or _is_valid(self.space, values):
                self.history.append(_Trial(trial, picks))
                return values
            study.tell(asked, state=_optuna().trial.TrialState.FAIL)
            refused += 1
            if refused > STARTUP_TRIALS:  # the estimator may insist on what the spec refuses
                study.sampler = _optuna().samplers.RandomSampler(seed=self._seed(trial, refused))

    def tell(self, trial: int, metric: float | None) -> None:
        for one in reversed(self.history):
            if one.trial == trial:
                one.metric = metric if metric is not None and math.isfinite(metric) else None
                one.done = True
                return

    def state_dict(self) -> dict[str, Any]:
        return {"history": [{"trial": one.trial, "picks": {**one.picks}, "metric": one.metric, "done": one.done} for one in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = [_Trial(**one) for one in state["history"]]

    def _study(self, trial: int) -> optuna.Study:
        """Return a study that knows the trials so far."""
        library = _optuna()
        states, named = library.trial.TrialState, self.space.named
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate and group are marked as experimental
            sampler = library.samplers.TPESampler(
                n_startup_trials=STARTUP_TRIALS,
                n_ei_candidates=_CANDIDATES,
                gamma=_good_trials,
                prior_weight=_PRIOR,
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=self._seed(trial, 0),
            )
        study: optuna.Study = library.create_study(sampler=sampler, direction="maximize")
        for one in self.history:
            state = states.RUNNING if not one.done else states.FAIL if one.metric is None else states.COMPLETE
            distributions = _distributions(library, named, one.picks)
            study.add_trial(library.trial.create_trial(state=state, value=one.metric, params=one.picks, distributions=distributions))
        return study

    def _seed(self, trial: int, attempt: int) -> int:
        return int(np.random.SeedSequence([self.seed, trial, attempt], spawn_key=(_STREAM,)).generate_state(1)[0])


def _good_trials(count: int) -> int:
    return min(math.ceil(_GOOD * count), _MOST_GOOD)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError(
            "search_algorithm 'optuna' needs the package optuna: pip install 'slm-lab[search]'; or set meta.search_algorithm to 'random'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _suggest(asked: Any, name: str, key: SearchKey) -> Any:
    """Ask an Optuna trial for a pick: an index, a quantile of a normal distribution, or a value of a range."""
    if key.has_options:
        return asked.suggest_categorical(name, range(len(key.args)))
    if key.is_normal:
        return asked.suggest_float(name, 0.0, 1.0)
    low, high = key.bounds
    if key.is_whole:
        return asked.suggest_int(name, int(low), int(high), log=key.is_log, step=1 if key.is_log else int(key.step or 1))
    return asked.suggest_float(name, low, high, log=key.is_log, step=None if key.is_log else key.step)


def _distributions(library: Any, named: Mapping[str, SearchKey], picks: Picks) -> dict[str, Any]:
    """Return the distributions that `_suggest` asked for."""
    asked = library.trial.FixedTrial(picks)
    for name in picks:
        _suggest(asked, name, named[name])
    return dict(asked.distributions)


def _value(key: SearchKey, pick: Any) -> Any:
    return pick if key.has_options else draw(key, pick) if key.is_normal else snap(key, pick)


def _generator(seed: int, trial: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, trial], spawn_key=(_STREAM,)))


def _is_valid(space: SearchSpace, values: Values) -> bool:
    try:
        space.apply(values)
    except SpecError:
        return False
    return True
