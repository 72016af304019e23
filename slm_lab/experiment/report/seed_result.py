"""Results of one seed of a run: its curves, its final return, and where it reached a threshold.

A seed is one independent training: a Session with all its policies. In a distributed run, whose Sessions train one shared net, all Sessions
together are one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slm_lab.experiment.report.metrics import (
    Curve,
    ReachedPoint,
    Table,
    aggregate_known,
    curve,
    first_reached,
    interpolate,
    is_recent,
    last_value,
)
from slm_lab.experiment.report.run import Run, Status, join_worker_tables

SOLVE_EPISODES = 10
"""Minimum number of episodes whose mean return is compared with a threshold."""
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
    """Evaluation tables with at least one row if the run uses meta.rigorous_eval, else an empty sequence."""
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
        """The evaluation tables of this seed. The tables of workers that train a shared net are joined to one table, whose column frame is
        the global frame."""
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
