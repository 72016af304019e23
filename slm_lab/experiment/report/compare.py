"""Compare runs: group runs that differ only in their seeds into a setting, and summarize the results of each setting.

A seed is one independent training: a Session with all its policies. In a distributed run, whose Sessions train one shared net, all Sessions
together are one seed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.files.find import BEST, TrainingChoice, find_training
from slm_lab.experiment.files.lock import unfinished_notice
from slm_lab.experiment.files.paths import StudyPaths, run_paths_in, study_in
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.metrics import (
    AlignedCurves,
    Bounds,
    Curve,
    Estimate,
    Median,
    ReachedPoint,
    Table,
    aggregate_known,
    curve,
    estimate_mean,
    first_reached,
    interpolate,
    is_recent,
    last_value,
    median_point,
)
from slm_lab.experiment.report.return_range import return_range
from slm_lab.experiment.report.run import Run, Status, join_worker_tables, load_run, run_folders, with_data_dir
from slm_lab.experiment.report.statistics import bootstrap_statistic, interquartile_mean
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.lib.log import notice
from slm_lab.spec.report import diff, nearest_hint

SOLVE_EPISODES = 10
"""Minimum number of episodes whose mean return is compared with a threshold."""
_SHOWN_KEYS, _SHOWN_LETTERS = 3, 30
"""Maximum number of spec keys in the name of a setting, and maximum number of letters of each value."""


TRAINING = "training episodes"
"""Value of SeedResult.source for a seed without evaluations."""
TOTAL = "total_reward, the mean return of the last 100 episodes"
RULES = {
    "evaluation": "the mean return of at least one evaluation",
    "return_new": f"the mean return of the most recent episodes (those since the previous table row, and at least {SOLVE_EPISODES})",
    "total_reward": f"{TOTAL} (tables of SLM Lab have no column return_new),",
}
"""Kind of data that is compared with a threshold → description of the data, which is used as the subject of a clause."""


@dataclass(frozen=True)
class SeedResult:
    """Results of one seed. `tables` has one training table per policy, or a single joint table of all workers that train a shared net."""

    tables: list[Table]
    status: Status = "done"
    worker_tables: Sequence[Table] = ()
    """The table of each worker if this seed consists of the workers that train a shared net, else an empty sequence."""
    evaluation: Sequence[Table] = ()
    """If the run uses meta.rigorous_eval, the evaluation tables that have rows, else an empty sequence."""
    few_evaluations: Sequence[Table] = ()
    """If the run uses meta.eval_episodes, the evaluation table that belongs to each of `tables`. These evaluation tables have too few
    evaluations for a curve, and are used only for the final return. The sequence is empty if the last evaluation in any of these tables is
    not recent."""
    deterministic: bool = True
    """Whether evaluations use the mode of the action distribution instead of sampled actions."""

    @property
    def source(self) -> str:
        """Description of the episodes from which the final current return is computed: training episodes or evaluation episodes."""
        if not (self.evaluation or self.few_evaluations):
            return TRAINING
        return f"evaluation with {'deterministic' if self.deterministic else 'sampled'} actions"

    def curve(self, column: str, x_column: str) -> Curve:
        """Return the curve of `column` over `x_column`. If the seed has several tables, return the mean of their curves.

        Args:
            column: a column of the training tables, "evaluation" (the return of the evaluation rows), or "training_return" (the current
                return of the training episodes). If the seed has evaluation rows, "current_return" means the same as "evaluation".
            x_column: frame, global_frame, wall_t (seconds) or opt_step.
        """
        curves = self._curves(column, x_column)
        return curves[0] if len(curves) == 1 else interpolate(curves).mean()

    def _curves(self, column: str, x_column: str = "frame") -> list[Curve]:
        """Return the curve of a column for each training table, or for each evaluation table if the column is a return of evaluations."""
        if column == "evaluation" or (column == "current_return" and self.evaluation):
            return [_curve(table, "total_reward", x_column) for table in self._evaluation_tables]
        return [_curve(table, training_column(column), x_column) for table in self.tables]

    @property
    def threshold_rule(self) -> str:
        """Key of RULES for the data of this seed that are compared with a threshold: "evaluation", "return_new" or "total_reward"."""
        if self.evaluation:
            return "evaluation"
        return "return_new" if all("return_new" in table for table in self.tables) else "total_reward"

    def first_reached(self, threshold: float | None, x_column: str, rule: str = "") -> ReachedPoint | None:
        """Return the lowest value of `x_column` at which a table of this seed reached the threshold.

        If the threshold is reached between two evaluations, the value of `x_column` is interpolated linearly. Between two training rows,
        the value of `x_column` is not interpolated, since the return of a training row is a mean over the time before the row. If the
        first row is already at or above the threshold, the returned value of `x_column` is only an upper limit. Returns None if no table
        reached the threshold, or if `threshold` is None.

        Args: rule: name of the data to compare with the threshold: "evaluation", "return_new" or another column, by default
            `threshold_rule`.
        """
        if threshold is None:
            return None
        rule = rule or self.threshold_rule
        between = bool(self.evaluation) and rule in ("evaluation", "current_return")
        if rule not in RULES or (rule == "total_reward" and self.threshold_rule != rule):
            curves = self._curves(rule, x_column)
        elif rule == "return_new":  # the tables of all workers together count each episode once
            curves = [recent_returns(table, x_column) for table in self.worker_tables or self.tables]
        else:
            curves = [_curve(table, "total_reward", x_column) for table in self._evaluation_tables or self.worker_tables or self.tables]
        points = [first_reached(one, threshold, between=between) for one in curves]
        return min((point for point in points if point is not None), default=None)

    def final_return(self, metric: str = "current_return") -> float | None:
        """Return the last value of the column `metric`, averaged over the tables of this seed, or None if no episode ended.

        For metric="current_return", the return of the last evaluation is used if the run of the seed has evaluations.
        """
        if metric == "current_return" and self.few_evaluations:
            return aggregate_known(last_value(table, metric) for table in self.few_evaluations)
        return aggregate_known(one.value[-1] for one in self._curves(metric) if len(one.value))

    @property
    def _evaluation_tables(self) -> list[Table]:
        """Evaluation tables of this seed.

        If the seed consists of the workers of a shared net, the list has their joint table, whose frame is the global frame.
        """
        shared = len(self.worker_tables) > 1 and self.evaluation
        return [join_worker_tables(dict(enumerate(self.evaluation)))] if shared else list(self.evaluation)

    def grad_norm(self) -> float | None:
        """Return the mean gradient norm over the rows of each table, averaged over the tables of this seed."""
        return aggregate_known(one.value.mean() for one in self._curves("grad_norm") if len(one.value))

    def updates_per_second(self) -> float | None:
        """Return the number of optimizer steps per second, summed over the tables of this seed, or None if the training time is unknown."""
        steps = self._curves("opt_step", "wall_t")
        known = [float(one.value[-1] / one.frame[-1]) for one in steps if len(one.frame) and one.frame[-1] > 0]
        return sum(known) if known else None


def training_column(metric: str) -> str:
    """Return the name of the column of training tables that has the values of `metric`."""
    return "current_return" if metric == "training_return" else metric


class ComparableMetric(NamedTuple):
    """The metric by which all seeds of a comparison can be compared, and the reason if this metric is not the requested metric."""

    metric: str
    reason: str = ""
    """Reason why `metric` is not the requested metric, or "" if `metric` is the requested metric."""


def comparable_metric(metric: str, settings: Iterable[Setting]) -> ComparableMetric:
    """Return `metric` if `metric` is measured in the same way for all seeds, else another metric by which all seeds can be compared.

    The current return of a seed is computed from training episodes, from evaluations with deterministic actions, or from evaluations with
    sampled actions. If the seeds differ in this respect, the metric training_return (the current return of training episodes) is returned.
    If training episodes are compared and a run has no column current_return, the metric total_reward is returned.
    """
    if training_column(metric) != "current_return":
        return ComparableMetric(metric)
    settings = list(settings)
    sources: dict[str, set[str]] = {}
    for setting in settings:  # in a study, settings of different envs have the same name
        sources.setdefault(setting.name, set()).update(seed.source for seed in setting.seeds)
    all_sources = set[str]().union(*sources.values())
    if metric == "current_return" and len(all_sources) < 2 and all_sources != {TRAINING}:
        return ComparableMetric(metric)
    for setting in settings:
        if not all("current_return" in table for seed in setting.all_seeds for table in seed.tables):
            return ComparableMetric("total_reward", f"{setting.name} has no column current_return, so the comparison uses {TOTAL}")
    if metric == "training_return" or len(all_sources) < 2:
        return ComparableMetric(metric)
    differing = "; ".join(f"{name}: {' and '.join(sorted(kinds))}" for name, kinds in sources.items())
    reason = f"The current returns at the end differ in kind ({differing}), so the comparison uses the returns of training episodes"
    return ComparableMetric("training_return", reason)


@dataclass(frozen=True)
class Setting:
    """Runs in the same env that differ only in their seeds or have the same --label. The runs of a setting are drawn as one curve."""

    name: str
    runs: list[Run]
    label: str = ""
    """Name of the setting without the env, or "" if the label is equal to `name`. Settings of the same agent in different envs have the
    same label."""

    @cached_property
    def all_seeds(self) -> list[SeedResult]:
        return [seed for run in self.runs for seed in seed_results(run)]

    @property
    def seeds(self) -> list[SeedResult]:
        """The seeds to compare: all seeds whose training is done, or all seeds if no seed is done."""
        return [seed for seed in self.all_seeds if seed.status == "done"] or self.all_seeds

    @property
    def status(self) -> str:
        """Text that says how the runs of the seeds ended, such as "done", "1 failed (left out)", or, if no seed is done, "2 stopped"."""
        each = (status for run in self.runs for status in ([run.status] if run.shares_one_net else run.sessions.values()))
        counts = Counter(status for status in each if status != "done")
        left_out = " (left out)" if any(seed.status == "done" for seed in self.all_seeds) else ""
        return f"{', '.join(f'{count} {status}' for status, count in counts.items())}{left_out}" if counts else "done"

    @property
    def sessions(self) -> int:
        return sum(len(seed.worker_tables) or 1 for seed in self.seeds)

    @property
    def shares_one_net(self) -> bool:
        return any(run.shares_one_net for run in self.runs)

    @property
    def env(self) -> str:
        """Name of the env, which is the same for all runs of the setting."""
        return self.runs[0].env

    @cached_property
    def bounds(self) -> Bounds | None:
        """Lowest and highest possible return of the env, or None if these bounds are unknown or differ between the runs."""
        ranges = {return_range(run.settings()) for run in self.runs}
        return ranges.pop() if len(ranges) == 1 else None

    def scores(self, metric: str = "current_return") -> np.ndarray:
        """Return the final return of each seed that has a final return, float64 [seeds]."""
        return np.array([value for seed in self.seeds if (value := seed.final_return(metric)) is not None], dtype=np.float64)

    def aligned_curves(self, column: str, x_column: str) -> AlignedCurves:
        """Return the curves of `seeds` (`column` over `x_column`), interpolated at F common points. value_SF has the shape [seeds, F].

        The common points are in the range of `x_column` that all nonempty curves cover.
        """
        return interpolate([seed.curve(column, x_column) for seed in self.seeds])

    def count_text(self) -> str:
        """Return the number of seeds as text, such as "3 seeds", "1 seed with 4 sessions" or "2 seeds with 4 policies each"."""
        count, policies = len(self.seeds), max(run.policies for run in self.runs)
        parts = f"{self.sessions // count} sessions" if self.shares_one_net else f"{policies} policies" if policies > 1 else ""
        return f"{count} seed{'s' * (count != 1)}{f' with {parts}' if parts else ''}{' each' if parts and count != 1 else ''}"


def seed_results(run: Run) -> list[SeedResult]:
    """Return the results of those seeds of a run that have training rows."""
    tables, evaluation = ({i: one for i, one in run.tables(mode).items() if len(one["frame"])} for mode in ("train", "eval"))
    if run.shares_one_net:
        return [_seed_result([join_worker_tables(tables)], run, run.status, evaluation, list(tables.values()))] if tables else []
    indices: dict[int, list[int]] = {}
    for index in tables:
        indices.setdefault(index // run.policies, []).append(index)
    return [
        _seed_result([tables[i] for i in of_session], run, run.sessions[s], {i: evaluation[i] for i in of_session if i in evaluation})
        for s, of_session in indices.items()
    ]


def _seed_result(
    tables: list[Table], run: Run, status: Status, evaluation: Mapping[int, Table], worker_tables: Sequence[Table] = ()
) -> SeedResult:
    """Return the results of one seed (see SeedResult).

    Args: evaluation: index → evaluation table, for the evaluation tables of the seed that have rows.
    """
    evaluation_tables = list(evaluation.values())
    if run.has_evaluation_curve:
        deterministic = bool(run.settings().get("meta.eval_deterministic"))
        return SeedResult(tables, status, worker_tables, evaluation_tables, deterministic=deterministic)
    few = [join_worker_tables(evaluation)] if worker_tables and evaluation_tables else evaluation_tables
    recent = len(few) == len(tables) and all(map(is_recent, few, tables))
    return SeedResult(tables, status, worker_tables, few_evaluations=few if recent else ())


def _check_labels(words: Sequence[str], labels: Sequence[str]) -> None:
    """Raise UserError if no run is given, if the number of labels differs from the number of runs, or if a label is empty."""
    if not words:
        raise UserError("RUN is missing; expected run folders, such as data/ppo_cartpole_2026_01_31_120000")
    if labels and len(labels) != len(words):
        runs = f"{len(words)} RUN{'s' if len(words) > 1 else ''}"
        raise UserError(f"--label is given {len(labels)} times for {runs}; expected one for each RUN, or none")
    if not all(label.strip() for label in labels):
        raise UserError("--label is empty; expected a name for each RUN")


def read_settings(
    words: Sequence[str], labels: Sequence[str] = (), choice: TrainingChoice = BEST, data_dir: Path = Path("data")
) -> list[Setting]:
    """Read the runs that `words` name, and group them into settings.

    Runs are grouped by label or, without labels, by the content of their specs except the seeds (see Run.settings). Each word names a run
    folder, the folder of a search or a study (with or without `data_dir`), a pattern of run folders, or anything else that `find_training`
    accepts. If a word names a search, the trial `choice.trial` is used or, by default, the best trial (the best confirmed trial if trials
    were confirmed). If a word names a study, all its runs are used, or only the runs with the entry, env and seed of `choice`. Failed runs
    and runs of mode dev that match a pattern are left out with a notice, but are compared if their folders are named. Runs in different
    envs belong to different settings, even if their labels are equal. If different specs have the same name, the spec keys that differ are
    appended to the name of each setting, for example "ppo_cartpole gamma=0.5". Of several runs with the same spec and the same seeds,
    one run is compared, and the others are left out with a notice, since repetitions are not independent seeds.

    Raises UserError if a word, a label or `choice` is invalid, or if a run has no rows. A notice is printed for runs with the same label
    but different specs, and for runs that failed or have not ended.
    """
    _check_labels(words, labels)
    groups, seen = dict[tuple[str, str, str], list[Run]](), set[tuple[Path, int]]()
    for index, word in enumerate(with_data_dir(word, data_dir) for word in words):
        for run in study_runs(word, choice) or _named_runs(word, choice, data_dir):
            if not seed_results(run):
                raise UserError(f"'{run.paths.root}' has no rows yet: no session table in {run.paths.info_dir}")
            folder = run.paths.root.resolve(), run.trial
            if folder in seen:
                notice(f"{run.paths.root} is given more than once; duplicates are ignored")
                continue
            seen.add(folder)
            content = "" if labels else json.dumps(run.settings(), sort_keys=True)
            groups.setdefault((labels[index] if labels else run.name, run.env, content), []).append(run)
    settings, notices = _settings_from_groups(groups)
    for text in notices:
        notice(text)
    for setting in settings:
        _report_status(setting)
        if differing := differing_keys([run.settings() for run in setting.runs]):
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            notice(f"the runs of '{setting.name}' differ in {', '.join(differing[:3])}{more}")
    return settings


def _separate_repetitions(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return (the runs of a setting without repetitions, a notice for each run that is left out).

    Of several runs with the same spec and the same seeds, only the run with the most finished seeds is kept. Runs that are not reproducible
    are all kept.
    """
    kept: dict[Any, Run] = {}
    notices = []
    for number, run in enumerate(runs):
        keys = run.settings()
        # absent in runs of SLM Lab, whose seeds depend on the time
        seed = run.random_seed if isinstance(run, ResultRun) else run.spec.get("meta", {}).get("random_seed")
        key = (json.dumps(keys, sort_keys=True), seed, run.trial) if seed is not None and _is_reproducible(keys) else number
        other = kept.setdefault(key, run)
        if other is not run:
            kept[key], out = (run, other) if _finished_seeds(run) > _finished_seeds(other) else (other, run)
            notices.append(
                f"{out.paths.root} is left out: it repeats {kept[key].paths.root}, with the same spec and meta.random_seed {seed}"
            )
    return list(kept.values()), notices


def _is_reproducible(keys: Mapping[str, Any]) -> bool:
    """Return whether repeated training with these settings gives the same results, except on other processors or versions."""
    if keys.get("meta.distributed") and keys.get("meta.max_session", 1) > 1:
        return False
    asynchronous = keys.get("meta.sampler.async_rl", False) or keys.get("meta.sampler.inference") == "central"
    return not asynchronous or bool(keys.get("meta.sampler.serial_mode"))


def _finished_seeds(run: Run) -> int:
    return sum(seed.status == "done" for seed in seed_results(run))


def group_runs(runs: Iterable[Run]) -> list[Setting]:
    """Group runs into settings, as `read_settings` does without labels: runs whose specs differ only in the seeds are one setting."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.name, run.env, json.dumps(run.settings(), sort_keys=True)), []).append(run)
    return _settings_from_groups(groups)[0]


def study_runs(word: str, choice: TrainingChoice = BEST) -> list[Run]:
    """Return the runs of the study in folder `word` that match `choice`, or [] if `word` is not the folder of a study.

    The runs are read from the result files of the study. Raises UserError if the study has no result file, or no result file that matches
    `choice`.
    """
    paths = study_in(Path(word))
    if paths is None:
        return []
    order = _entry_order(paths)
    found = sorted(
        (ResultRun(file) for file in paths.results.glob("*.json")),
        key=lambda one: (one.env, order.get(one.name, len(order)), one.name, one.random_seed),
    )
    if not found:
        raise UserError(f"no run of the study '{word}' has ended")
    for part, key in (("entry", "entry"), ("env", "env"), ("seed", "random_seed")):
        wanted = getattr(choice, part)
        known = {one.content[key] for one in found}
        if wanted is not None and wanted not in known:
            near = nearest_hint(str(wanted), map(str, sorted(known)))
            raise UserError(f"{part} {wanted}: the runs of {word} have {', '.join(map(str, sorted(known)))}{near}")
        found = [one for one in found if wanted in (None, one.content[key])]
    return list(found)


def _entry_order(paths: StudyPaths) -> dict[str, int]:
    """Return a dict: label of each study entry → position of the entry. The dict is empty if the study file is damaged.

    The baseline entry has the position 0, and all other entries of the study follow in the order of the study file.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        study = json.loads(paths.study.read_text(encoding="utf-8"))[paths.name]["study"]
        labels = [study.get("baseline"), *(one.get("label") or one["spec"].rpartition(":")[2] for one in study["entries"])]
        return {label: position for position, label in enumerate(dict.fromkeys(labels))}
    return {}


def _named_runs(word: str, choice: TrainingChoice, data_dir: Path) -> list[Run]:
    """Return the runs that `word` names. If `word` is a pattern with *, ? or [, failed runs and runs of mode dev are left out.

    Raises UserError if `word` is invalid.
    """
    if word == "latest" or _is_search(Path(word)):
        return [_chosen_run(word, choice, data_dir)]
    runs = [load_run(folder) for folder in run_folders(word)]
    if Path(word).is_dir():
        return runs
    out = [run for run in runs if run.mode == "dev" or run.status == "failed"]
    why = [f"{run.paths.root} ({'mode dev' if run.mode == 'dev' else 'failed'})" for run in out]
    if out and len(out) == len(runs):
        raise UserError(f"'{word}' matches only failed runs and runs of mode dev: {', '.join(why)}; name a run by its folder to compare it")
    if out:
        notice(f"left out: {', '.join(why)}; name a run by its folder to compare it")
    return [run for run in runs if run not in out]


def _is_search(folder: Path) -> bool:
    paths = run_paths_in(folder) if folder.is_dir() else None
    return paths is not None and paths.has_several_trials and (paths.search_state.exists() or folder.name == "confirm")


def _chosen_run(word: str, choice: TrainingChoice, data_dir: Path) -> Run:
    """Return a trial of the search `word` (`choice.trial` or else the best trial) or, for word="latest", the latest run in mode train."""
    training = find_training(word, None, data_dir, TrainingChoice(trial=choice.trial))
    if training.name:
        notice(f"{word}: comparing {training.name}")
    return Run(training.paths, training.trial)


def _settings_from_groups(groups: dict[tuple[str, str, str], list[Run]]) -> tuple[list[Setting], list[str]]:
    """Return (a Setting for each group of runs in `groups`, notices about repetitions that are left out).

    Args: groups: (name, env, content of the spec) → runs.

    If several groups have the same name, the env or the spec keys that differ are appended to the name of the setting.
    """
    settings, notices = list[Setting](), list[str]()
    names: Counter[str] = Counter()
    for (name, env, content), runs in groups.items():
        alike = {key: others[0].settings() for key, others in groups.items() if key[0] == name}
        label = f"{name} ({env})" if len({key[1] for key in alike}) > 1 else name
        same_env = [own for key, own in alike.items() if key[1] == env]
        differing = ""
        if content and len(same_env) > 1:
            differing = f" {_difference_text(runs[0].settings(), differing_keys(same_env))}"
        label += differing
        names[label] += 1
        number = "" if names[label] == 1 else f" ({names[label]})"
        kept, repetitions = _separate_repetitions(runs)
        settings.append(Setting(f"{label}{number}", kept, f"{name}{differing}{number}"))
        notices += repetitions
    return settings, notices


def differing_keys(specs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the sorted paths of the spec keys in which `specs` differ.

    If specs use different components, such as different algorithms, keys that only some components have are omitted.

    Args: specs: each spec is a flat dict: path of the key → value.
    """
    keys = sorted({key for spec in specs[1:] for key in diff(specs[0], spec)})
    sections = tuple(key.removesuffix("name") for key in keys if key.endswith(".name"))

    def implied(key: str) -> bool:
        values = [spec[key] for spec in specs if key in spec]
        return len(values) < len(specs) and all(value == values[0] for value in values)

    return [key for key in keys if key.endswith(".name") or not key.startswith(sections) or not implied(key)]


def _difference_text(spec: dict[str, Any], keys: Sequence[str]) -> str:
    """Return the values of the first few `keys` of a spec as text, such as "gamma=0.5 lr=0.1".

    A key is shown as the last part of its path or, if several keys have the same last part, as the full path.
    """
    short = {key: ".".join(key.split(".")[-2:]) if key.endswith((".name", ".type")) else key.rpartition(".")[2] for key in keys}
    counts = Counter(short.values())
    shown = [f"{short[key] if counts[short[key]] == 1 else key}={_value_text(spec.get(key))}" for key in keys[:_SHOWN_KEYS]]
    return " ".join([*shown, *(["…"] if len(keys) > _SHOWN_KEYS else [])])


def _value_text(value: Any) -> str:
    text = value if isinstance(value, str) else "default" if value is None else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _SHOWN_LETTERS else f"{text[: _SHOWN_LETTERS - 1]}…"


def _report_status(setting: Setting) -> None:
    any_done = any(seed.status == "done" for seed in setting.all_seeds)
    outcome = "left out" if any_done else f"compared, since no seed of '{setting.name}' is done"
    for run in setting.runs:
        if run.status == "running":
            notice(f"{run.paths.root}: the run has not ended; {outcome}")
            continue
        if (left := unfinished_notice(run.paths.root, run.paths.lock)) is not None:
            notice(left)
        sessions = Counter(status for status in run.sessions.values() if status != "done")
        for status, count in sessions.items():
            notice(f"{run.paths.root}: {count} session{'s' if count > 1 else ''} {status}; {outcome}")


class Summary(NamedTuple):
    """The results of a setting, which are one row of the comparison tables. An unknown result is None."""

    name: str
    label: str
    """Name of the setting without the env (see Setting.label)."""
    env: str
    seeds: int
    sessions: int
    status: str
    """How the seeds ended (see Setting.status)."""
    solved: int | None
    """Number of seeds that reached the threshold, or None if there is no threshold."""
    solved_by: str | None
    """Key of RULES that names the data that were compared with the threshold. If this key differs between seeds, the keys are joined by the
    word "and"."""
    seconds_to_threshold: Median | None
    """Median, over the seeds, of the time until the threshold was reached, in seconds since the start of training. The median is infinite
    if at least half of the seeds did not reach the threshold. The field is None if there is no threshold."""
    steps_to_threshold: Median | None
    """Median, over the seeds, of the number of global frames until the threshold was reached. The field is infinite or None in the same
    cases as seconds_to_threshold."""
    final_return: Estimate | None
    """Mean of the final returns over the seeds. The fields opt_steps_per_second and grad_norm are also means over the seeds."""
    final_return_median: float | None
    interquartile_mean: Estimate | None
    """Interquartile mean of the final returns, with the bootstrap interval over seeds."""
    opt_steps_per_second: float | None
    grad_norm: float | None


def summarize(
    setting: Setting, threshold: float | None, metric: str = "current_return", seeds: Sequence[SeedResult] | None = None, rule: str = ""
) -> Summary:
    """Return the Summary of a setting: its results over the seeds.

    A seed counts as solved if one of its tables reaches `threshold` (see SeedResult.first_reached).

    Args:
        metric: the column whose last value is the final return of a seed.
        seeds: the seeds to summarize, by default `setting.seeds`.
        rule: name of the data to compare with the threshold (see SeedResult.first_reached).
    """
    seeds = setting.seeds if seeds is None else seeds
    steps = [seed.first_reached(threshold, "global_frame", rule) for seed in seeds]
    seconds = [seed.first_reached(threshold, "wall_t", rule) for seed in seeds]
    finals = [seed.final_return(metric) for seed in seeds]
    judged, known = threshold is not None, np.array([value for value in finals if value is not None])
    return Summary(
        name=setting.name,
        label=setting.label or setting.name,
        env=setting.env,
        seeds=len(seeds),
        sessions=setting.sessions,
        status=setting.status,
        solved=sum(value is not None for value in steps) if judged else None,
        solved_by=" and ".join(sorted({seed.threshold_rule for seed in seeds})) if judged else None,
        seconds_to_threshold=median_point(seconds) if judged else None,
        steps_to_threshold=median_point(steps) if judged else None,
        final_return=estimate_mean(finals, setting.bounds),
        final_return_median=aggregate_known(finals, np.median),
        interquartile_mean=bootstrap_statistic([known], interquartile_mean) if len(known) else None,
        opt_steps_per_second=aggregate_known(seed.updates_per_second() for seed in seeds),
        grad_norm=aggregate_known(seed.grad_norm() for seed in seeds),
    )


def recent_returns(table: Table, x_column: str) -> Curve:
    """Return a curve over the rows of a table: the mean return of the most recent episodes, at least SOLVE_EPISODES episodes at each row.

    The mean is over the episodes of the row and of as few previous rows as are necessary for SOLVE_EPISODES episodes. The curve begins at
    the first row up to which at least SOLVE_EPISODES episodes have ended.
    """
    counts = np.nan_to_num(table["epi_new"])
    episodes, total = np.cumsum(counts), np.cumsum(counts * np.nan_to_num(table["return_new"]))
    # number of rows that precede the rows of the mean; in these preceding rows, at most `episodes - SOLVE_EPISODES` episodes ended
    before = np.searchsorted(np.append(0.0, episodes), episodes - SOLVE_EPISODES, "right") - 1
    enough = before >= 0
    number = episodes - np.append(0.0, episodes)[before]
    mean = (total - np.append(0.0, total)[before]) / np.maximum(number, 1.0)
    return _curve({**table, "recent": np.where(enough, mean, np.nan)}, "recent", x_column)


def _curve(table: Table, column: str, x_column: str) -> Curve:
    """Return the curve of `column` over `x_column`. If the table has no column global_frame, the global frame is equal to the frame."""
    return curve(table, column, "frame" if x_column == "global_frame" and x_column not in table else x_column)
