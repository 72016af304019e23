"""Schedulers, which decide whether running trials of a search continue. The schedulers of Ray Tune are called directly.

Ray Tune is imported only when a scheduler is created, since the import takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import numpy as np

from slm_lab.experiment.files.search_state import TrialState
from slm_lab.experiment.session.resume import is_changeable_key
from slm_lab.lib.log import notice
from slm_lab.spec.load.search_space import SearchSpace, Values
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

_OPTIONS, _SAMPLES = 20, 200
"""The values of a key count as an ordered list of options if the key has at most _OPTIONS different values. To count the different values
of the keys, _SAMPLES samples are drawn from the search space."""
_PERTURBATIONS = 10
"""Number of perturbations per trial in population-based training if meta.search_scheduler is absent."""


@dataclass(frozen=True)
class Exploit:
    """Decision of population-based training: the trial continues from the state of a better trial, with new values of the searched keys.

    `source` is the index of the better trial.
    """

    source: int
    values: Values


Decision = Literal["stop"] | Exploit
Reports = Iterable[tuple[TrialState, int, float]]
"""(trial, frame, metric) for each report from earlier starts of the search, in order of arrival."""


class Scheduler(Protocol):
    """Protocol of schedulers, which decide from the intermediate metrics of trials which trials continue."""

    def decide(self, trial: TrialState, frame: int, metric: float) -> Decision | None:
        """Process the metric of a running trial at a frame, and return a decision, or None if the trial continues unchanged."""

    def record_end(self, trial: TrialState) -> None:
        """Record that a trial has ended."""


class _TuneTrial:
    """A trial with the attributes that the schedulers of Ray Tune require."""

    def __init__(self, trial: TrialState) -> None:
        self.trial_id, self.config, self.evaluated_params = str(trial.trial), trial.values, dict(trial.values)
        self.experiment_tag, self.status, self.finished = "", "RUNNING", False
        self.run_metadata = SimpleNamespace(checkpoint_manager=SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None)))

    def is_finished(self) -> bool:
        return self.finished


class Asha:
    """Asynchronous successive halving (Li et al., 2020, arXiv:1810.05934), by ray.tune.schedulers.ASHAScheduler.

    At grace_period · reduction_factor^k frames (k = 0, 1, …), a trial continues only if its metric is in the best fraction 1 /
    reduction_factor of the metrics of all trials that have reached this frame so far.
    """

    def __init__(self, grace_period: int, reduction_factor: float, max_frame: int, reports: Reports = ()) -> None:
        from ray.tune.schedulers import ASHAScheduler

        self._asha: Any = ASHAScheduler(
            time_attr="frame", metric="metric", mode="max", max_t=max_frame, grace_period=grace_period, reduction_factor=reduction_factor
        )
        self._trials: dict[int, _TuneTrial] = {}
        for trial, frame, metric in reports:
            self.decide(trial, frame, metric)

    def decide(self, trial: TrialState, frame: int, metric: float) -> Decision | None:
        tune_trial = self._trials.get(trial.trial)
        if tune_trial is None:
            tune_trial = self._trials[trial.trial] = _TuneTrial(trial)
            self._asha.on_trial_add(None, tune_trial)
        return "stop" if self._asha.on_trial_result(None, tune_trial, {"frame": frame, "metric": metric}) == self._asha.STOP else None

    def record_end(self, trial: TrialState) -> None: ...


class Pbt:
    """Population-based training (Jaderberg et al., 2017, arXiv:1711.09846), by ray.tune.schedulers.PopulationBasedTraining.

    Every `interval` frames, a trial in the worst quarter of the running trials copies the state of a trial in the best quarter. Each
    searched key of the copying trial gets a new value. The new value is the value of the better trial times 0.8 or 1.2, clipped to the
    searched range, or, with probability 0.25, a new sample. For a key with options, the new value is a neighbouring option or a new sample.
    """

    def __init__(self, space: SearchSpace, interval: int, seed: int, reports: Reports = ()) -> None:
        self._space, self._rng = space, np.random.default_rng(seed)
        self._controller = SimpleNamespace(search_alg=None, get_trials=list)
        self._decision: Decision | None = None
        self._ranges: dict[str, tuple[float, float]] = {}
        """Key without options → (smallest drawn value, largest drawn value)."""
        self._trials: dict[int, _TuneTrial] = {}
        self._pbt: Any = self._make_tune_scheduler(interval)
        for trial, frame, metric in reports:
            self.decide(trial, frame, metric)

    def _make_tune_scheduler(self, interval: int) -> Any:
        """Return the scheduler of Ray Tune. A decision to exploit is stored in the Pbt object instead of being executed by Tune's
        controller."""
        from ray.tune.schedulers import PopulationBasedTraining

        def exploit(scheduler: Any, trial: _TuneTrial, controller: Any, upper: list[_TuneTrial], lower: list[_TuneTrial]) -> None:
            if trial in lower:
                source = upper[int(self._rng.integers(len(upper)))]
                values, _ = scheduler._get_new_config(trial, source)
                self._decision = Exploit(int(source.trial_id), values)

        scheduler = type("_Scheduler", (PopulationBasedTraining,), {"_checkpoint_or_exploit": exploit})
        return scheduler(
            time_attr="frame",
            metric="metric",
            mode="max",
            perturbation_interval=interval,
            hyperparam_mutations=self._mutations(),
            custom_explore_fn=self._make_valid,
            log_config=False,
        )

    def _mutations(self) -> dict[str, Any]:
        """Return a dict: key → ordered list of the key's options, or a function that draws a value of the key."""
        draws = [self._space.sample(self._rng) for _ in range(_SAMPLES)]
        mutations: dict[str, Any] = {}
        for key in self._space.keys:
            options = {repr(draw[key]): draw[key] for draw in draws}
            distinct = list(options.values())
            numbers = all(isinstance(value, int | float) for value in distinct)
            if len(distinct) <= _OPTIONS:
                mutations[key] = sorted(distinct) if numbers else distinct
            else:
                mutations[key], self._ranges[key] = self._value_sampler(key), (min(distinct), max(distinct))
        return mutations

    def _value_sampler(self, key: str) -> Callable[[], Any]:
        return lambda: self._space.sample(self._rng)[key]

    def _make_valid(self, values: Values) -> Values:
        """Return perturbed values, clipped to the ranges of their keys. If the clipped values are not valid in the spec, return new
        samples."""
        values = values | {key: min(max(values[key], low), high) for key, (low, high) in self._ranges.items()}
        try:
            self._space.trial_spec(values)
        except SpecError:
            return self._space.sample(self._rng)
        return values

    def decide(self, trial: TrialState, frame: int, metric: float) -> Decision | None:
        tune_trial = self._trials.get(trial.trial)
        if tune_trial is None:
            tune_trial = self._trials[trial.trial] = _TuneTrial(trial)
            self._pbt.on_trial_add(self._controller, tune_trial)
        tune_trial.config, self._decision = trial.values, None
        self._pbt.on_trial_result(self._controller, tune_trial, {"frame": frame, "metric": metric})
        return self._decision

    def record_end(self, trial: TrialState) -> None:
        if trial.trial in self._trials:
            self._trials[trial.trial].finished = True


def check_evaluation(spec: Spec) -> None:
    """Raise SpecError if trials would be stopped by returns of training episodes, but finally compared by returns of evaluations."""
    meta = spec.meta
    schedules = meta.search_scheduler is not None or meta.search_algorithm == "pbt"
    if schedules and meta.search_metric in (None, "current_return") and meta.eval_episodes not in ("auto", 0):
        what = f"{meta.eval_episodes}: trials that are stopped early would be compared by training episodes, and others by evaluation"
        allowed = "expected 0, or meta.rigorous_eval instead, with which all trials are compared by evaluation"
        raise SpecError(spec.name, [Problem("meta.eval_episodes", f"{what}; {allowed}")])


def check_pbt(spec: Spec, space: SearchSpace) -> None:
    """Raise SpecError if a searched key does not support population-based training.

    A key is not supported if its value cannot be changed while a trial runs, or if the key exists only with certain values of another key.
    """
    draw = space.sample(np.random.default_rng(0))
    problems = [
        Problem(f"search.{key}", "population-based training changes values while a trial runs, which is not possible for this key")
        for key in space.keys
        if not is_changeable_key(key)
    ]
    problems += [
        Problem(f"search.{key}", "population-based training does not support keys inside a value of another key")
        for key in space.keys
        if key not in draw
    ]
    if problems:
        raise SpecError(spec.name, problems)


def make_scheduler(spec: Spec, space: SearchSpace, reports: Reports) -> Scheduler | None:
    """Return the scheduler of a search, which has processed the reports of earlier starts, or None if the search has no scheduler."""
    wanted, frames = spec.meta.search_scheduler, spec.session_frames
    if spec.meta.search_algorithm == "pbt":
        interval = max(1, frames // _PERTURBATIONS) if wanted is None else wanted.grace_period
        return Pbt(space, interval, spec.meta.random_seed, reports)
    if wanted is None:
        return None
    if wanted.grace_period >= frames:
        grace = f"meta.search_scheduler.grace_period {wanted.grace_period:,}"
        notice(f"{grace} is not below the {frames:,} frames of a trial: no trial is stopped early")
        return None
    return Asha(wanted.grace_period, wanted.reduction_factor, frames, reports)
