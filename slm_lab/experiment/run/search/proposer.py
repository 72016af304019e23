"""Proposers, which choose the values of the searched keys for each trial of a search."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slm_lab.experiment.plan import UserError
from slm_lab.spec.load.search_space import (
    KeyChoices,
    SearchSpace,
    Values,
    create_frozen_trial,
    round_to_range,
    suggest_choice,
    value_at_quantile,
)
from slm_lab.spec.models.search import SearchKey
from slm_lab.spec.report import Problem, SpecError

if TYPE_CHECKING:
    import optuna

_ATTEMPTS = 100
"""Maximum number of draws to find a combination of values that is valid in the spec.

If no combination is valid, the last drawn combination is proposed, and its trial fails with the reason.
"""
_STREAM = 1
"""Spawn key of numpy's SeedSequence that separates the random streams of proposers from those of Sessions."""
STARTUP_TRIALS = 10
"""Number of trials with random values before the TPE sampler proposes values."""
_GOOD, _MOST_GOOD = 0.15, 25
"""_GOOD is the fraction of the trials that the TPE sampler counts as good (as in Bergstra et al.). _MOST_GOOD is the maximum number of good
trials."""
_CANDIDATES = 8
"""Number of candidates that the TPE sampler draws to propose the best candidate."""
_PRIOR = 3.0
"""Weight of the prior of the TPE sampler, where each trial has weight 1.

With Optuna's defaults (prior weight 1, 24 candidates, a tenth of the trials good), 12 of 40 searches on the landscape in
tests/experiment/search stay in a bad category for 100 trials. With the values _PRIOR, _CANDIDATES and _GOOD of this module, none of the 40
searches stays in a bad category.
"""


class Proposer(Protocol):
    """Protocol of proposers, which propose the values of each trial. Trials may run concurrently and end in any order."""

    def ask(self, trial: int) -> Values | None:
        """Return the values of the searched keys for a trial, or None if no values are left to propose."""

    def tell(self, trial: int, metric: float | None) -> None:
        """Record the metric of a trial that has ended (higher is better). If the trial failed, `metric` is None."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the proposer as plain Python objects."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state returned by `state_dict`. After loading, all further proposals are the same as without an interruption."""


def make_proposer(space: SearchSpace, algorithm: str, seed: int) -> Proposer:
    """Return the proposer for a value of meta.search_algorithm: "optuna", "random" or "grid".

    If all keys of the search space are grid_search keys, a GridProposer is returned for each value of `algorithm`. Raises SpecError for
    "grid" without grid_search keys, or UserError if optuna is not installed.
    """
    if algorithm == "grid" or (space.is_grid and algorithm in ("optuna", "random")):
        return GridProposer(space, seed)
    if algorithm == "random":
        return RandomProposer(space, seed)
    if algorithm == "optuna":
        return TPEProposer(space, seed)
    raise ValueError(f"unknown search algorithm '{algorithm}'")


class RandomProposer:
    """Proposer that draws the values of each trial at random. The values of a trial depend only on the seed and on the index of the
    trial."""

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
    """Proposer that proposes each combination of the values of the grid_search keys once.

    The values of searched keys without grid_search are drawn at random. If the search has keys without grid_search, the grid is repeated
    after its last combination.
    """

    def __init__(self, space: SearchSpace, seed: int) -> None:
        super().__init__(space, seed)
        if space.grid_choices == ({},):
            raise SpecError(space.spec.name, [Problem("meta.search_algorithm", "'grid' needs keys with grid_search, and there are none")])

    def ask(self, trial: int) -> Values | None:
        points = self.space.grid_choices
        if self.space.is_grid and trial >= len(points):
            return None
        fixed, rng = points[trial % len(points)], _generator(self.seed, trial)
        for _ in range(1 if self.space.is_grid else _ATTEMPTS):
            values = self.space.trial_values(lambda name, key: fixed[name] if name in fixed else value_at_quantile(key, rng.random()))
            if _is_valid(self.space, values):
                break
        return values


@dataclass
class _Proposal:
    """The proposed values of a trial, and the metric of the trial."""

    trial: int
    choices: KeyChoices
    """The proposed values in the form that the TPE sampler uses, see `suggest_choice`."""
    metric: float | None = None
    done: bool = False


@dataclass
class TPEProposer:
    """Proposer that uses Optuna's multivariate tree-structured Parzen estimator (TPE, Bergstra et al., NeurIPS 2011).

    Keys that exist only with a certain value of another key have separate estimators. Running trials count as bad trials, so that
    concurrent trials differ ("constant liar"). Each proposal depends only on the results so far, the seed and the index of the trial.

    The constructor raises UserError if optuna is not installed.
    """

    space: SearchSpace
    seed: int
    history: list[_Proposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        _import_optuna()

    def ask(self, trial: int) -> Values | None:
        study, refused = self._study(trial), 0
        while True:
            asked, choices = study.ask(), KeyChoices()

            def choose(name: str, key: SearchKey, asked: Any = asked, choices: KeyChoices = choices) -> Any:
                choices[name] = suggest_choice(asked, name, key)
                return _value_from_choice(key, choices[name])

            values = self.space.trial_values(choose)
            if refused >= _ATTEMPTS or _is_valid(self.space, values):
                self.history.append(_Proposal(trial, choices))
                return values
            study.tell(asked, state=_import_optuna().trial.TrialState.FAIL)
            refused += 1
            if refused > STARTUP_TRIALS:  # the estimator may repeat proposals that the spec rejects
                study.sampler = _import_optuna().samplers.RandomSampler(seed=self._seed(trial, refused))

    def tell(self, trial: int, metric: float | None) -> None:
        for proposal in reversed(self.history):
            if proposal.trial == trial:
                proposal.metric = metric if metric is not None and math.isfinite(metric) else None
                proposal.done = True
                return

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": [
                {"trial": proposal.trial, "picks": {**proposal.choices}, "metric": proposal.metric, "done": proposal.done}
                for proposal in self.history
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = [
            _Proposal(proposal["trial"], proposal["picks"], proposal["metric"], proposal["done"]) for proposal in state["history"]
        ]

    def _study(self, trial: int) -> optuna.Study:
        """Return an Optuna study that contains the trials of the search so far."""
        library = _import_optuna()
        states = library.trial.TrialState
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna marks the arguments multivariate and group as experimental
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
        for proposal in self.history:
            state = states.RUNNING if not proposal.done else states.FAIL if proposal.metric is None else states.COMPLETE
            study.add_trial(create_frozen_trial(library, self.space, proposal.choices, proposal.metric, state))
        return study

    def _seed(self, trial: int, attempt: int) -> int:
        return int(np.random.SeedSequence([self.seed, trial, attempt], spawn_key=(_STREAM,)).generate_state(1)[0])


def _good_trials(count: int) -> int:
    return min(math.ceil(_GOOD * count), _MOST_GOOD)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError(
            "search_algorithm 'optuna' needs the package optuna: pip install 'slm-lab[search]'; or set meta.search_algorithm to 'random'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _value_from_choice(key: SearchKey, choice: Any) -> Any:
    return choice if key.has_options else value_at_quantile(key, choice) if key.is_normal else round_to_range(key, choice)


def _generator(seed: int, trial: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, trial], spawn_key=(_STREAM,)))


def _is_valid(space: SearchSpace, values: Values) -> bool:
    try:
        space.trial_spec(values)
    except SpecError:
        return False
    return True
