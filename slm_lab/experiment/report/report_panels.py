"""Define the graphs of an HTML report: the title, the unit and the table columns of each graph.

A column that is not listed in this module, for example an entry of the env's `info`, has its own graph in the last group of graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.report.metrics import Table
from slm_lab.experiment.training.observers.base import info_column, score_column

COUNTS = ("frame", "global_frame", "wall_t", "opt_step", "epi", "t")
"""Table columns of counts and times. The values of these columns never decrease, and these columns have no graph."""
RETURNS = {
    "current_return": "current return (recent episodes)",
    "total_reward": "last 100 episodes (total_reward)",
    "total_reward_ma": "moving average, 100 rows (total_reward_ma)",
    "return_new": "new episodes of each row",
}
"""Table column with returns → name of this column in the graph of the return."""
_QUIET = ("lock_wait", "lag_masked", "bytes_pushed", "bytes_pulled", "entropy_coef", "epi_truncated")
"""Table columns that are drawn only if at least one of their values is not 0."""
_NOT_DRAWN = (*COUNTS, "epi_new", "current_return_se", "current_epi", "elo_se")


class PanelSpec(NamedTuple):
    """Description of a graph in the report. The graph shows one or several table columns."""

    title: str
    unit: str
    columns: tuple[str, ...]
    note: str = ""


_SLM_LAB = "Metrics of SLM Lab"
_SCORE = score_column("")
_SCORES = PanelSpec("Score", "mean per game", ("score_random", "score_previous"), "1: won, 0.5: drawn, 0: lost")
"""Graph of the scores of self-play. The columns of the scores against fixed opponents are added to this graph."""
_ERRORS = {"elo": "elo_se"}
"""Table column → column of its standard errors, which are drawn as a band around the line."""
_GROUPS: dict[str, tuple[PanelSpec, ...]] = {
    "Episodes": (
        PanelSpec("Length of episodes", "steps", ("epi_len", "epi_len_max")),
        PanelSpec("Truncated episodes", "share", ("epi_truncated",), "cut by a time limit"),
    ),
    "Self-play": (
        PanelSpec(
            "Elo rating", "points", ("elo",), "± standard error, of each snapshot; 0: random actions; 400 points: 10 wins for each loss"
        ),
        _SCORES,
    ),
    "Policy": (
        PanelSpec("Entropy of the policy", "nats", ("entropy",), "0: the policy always takes the same action"),
        PanelSpec("Exploration", "explore_var", ("explore_var",), "epsilon or temperature of the action policy"),
        PanelSpec("Entropy coefficient", "", ("entropy_coef",)),
        PanelSpec("Temperature alpha", "", ("alpha",), "weight of the entropy in the objective"),
        PanelSpec("KL divergence per update", "nats", ("approx_kl",), "how far an update moves the policy; usually 0.003 to 0.03"),
        PanelSpec("Clipped transitions", "share", ("clip_fraction",), "share of ratios outside 1 ± ε"),
    ),
    "Value function": (
        PanelSpec("Explained variance", "", ("explained_variance",), "1: predicts the returns; 0 or less: no better than their mean"),
        PanelSpec("Mean Q value", "return", ("q_mean",)),
        PanelSpec("TD error", "return", ("td_error",), "mean absolute error"),
    ),
    "Losses": (
        PanelSpec("Loss", "", ("loss",)),
        PanelSpec("Policy loss", "", ("policy_loss",)),
        PanelSpec("Value loss", "", ("value_loss",)),
        PanelSpec("Critic loss", "", ("critic_loss",)),
        PanelSpec("Actor loss", "", ("actor_loss",)),
        PanelSpec("Self-imitation loss", "", ("sil_loss",)),
    ),
    "Optimizer": (
        PanelSpec("Learning rate", "", ("lr",)),
        PanelSpec("Gradient norm", "before clipping", ("grad_norm",)),
    ),
    "Off-policy data and shared weights": (
        PanelSpec("Policy lag", "gradient steps", ("lag_mean", "lag_min", "lag_max"), "age of the policy that collected the data"),
        PanelSpec("Masked transitions", "share", ("lag_masked",), "transitions above max_policy_lag"),
        PanelSpec("Staleness", "updates", ("staleness",), "updates of other workers between pull and push"),
        PanelSpec("Wait for the lock", "ms per update", ("lock_wait",)),
        PanelSpec("Sent to the parameter server", "bytes per update", ("bytes_pushed",)),
        PanelSpec("Received from the parameter server", "bytes per update", ("bytes_pulled",)),
        PanelSpec("Return of each worker", "mean of 100 episodes", ("worker_reward",)),
    ),
    "Speed": (
        PanelSpec("Speed", "frames per second", ("fps",)),
        PanelSpec("Where the time goes", "busy share", ("rollout_busy", "inference_busy", "learner_busy")),
    ),
    _SLM_LAB: (
        PanelSpec("Strength", "return above random", ("strength",)),
        PanelSpec("Sample efficiency", "1 / frame", ("sample_efficiency",)),
        PanelSpec("Training efficiency", "1 / gradient step", ("training_efficiency",)),
        PanelSpec("Stability", "", ("stability",), "1: the return never falls"),
    ),
}
"""Title of each group → graphs of the group, in the order of the report."""
_OTHER = "Other diagnostics"
_LABELS = {
    "epi_len": "mean",
    "epi_len_max": "longest",
    "lag_mean": "mean",
    "lag_min": "minimum",
    "lag_max": "maximum",
    "score_random": "against random actions",
    "score_previous": "against the previous snapshot",
    "rollout_busy": "rollout: stepping envs",
    "inference_busy": "inference: computing actions",
    "learner_busy": "learner: training",
}


def panels(modes: Mapping[str, Mapping[int, Table]]) -> list[dict[str, Any]]:
    """Return the entry `panels` of the report's data (see report_data.py): the descriptions of all graphs whose columns have values.

    Args: modes: mode ("train", "eval" or "trial") → dict of the tables of this mode: index of the table → table.
    """
    known = {name for table in modes["train"].values() for name, values in table.items() if np.isfinite(values).any()}
    drawn = {name for panels in _GROUPS.values() for panel in panels for name in panel.columns}
    quiet = {name for name in _QUIET if not _has_values(modes["train"], name)}
    opponents = tuple(sorted(name for name in known - drawn if name.startswith(_SCORE)))
    found = [
        _panel(group, panel._replace(columns=own))
        for group, panels in _GROUPS.items()
        for panel in panels
        if (own := tuple(name for name in (*panel.columns, *(opponents if panel is _SCORES else ())) if name in known - quiet))
    ]
    if modes["trial"]:
        consistency = PanelSpec("Consistency", "", ("consistency",), "1: all seeds have the same curve")
        found.append(_panel(_SLM_LAB, consistency, "trial"))
    others = sorted(known - drawn - set(opponents) - set(_NOT_DRAWN) - set(RETURNS))
    return found + [_panel(_OTHER, PanelSpec(name.removeprefix(info_column("")), "", (name,))) for name in others]


def _has_values(tables: Mapping[int, Table], column: str) -> bool:
    return any(np.nan_to_num(table[column]).any() for table in tables.values() if column in table)


def _panel(group: str, panel: PanelSpec, mode: str = "train") -> dict[str, Any]:
    columns = [{"column": name, "label": _label(name), **({"error": _ERRORS[name]} if name in _ERRORS else {})} for name in panel.columns]
    joint, core = group == _SLM_LAB, group == _SLM_LAB and panel.title != "Strength"
    shown = {"group": group, "title": panel.title, "unit": panel.unit, "note": panel.note}
    return {**shown, "mode": mode, "core": core, "joint": joint, "columns": columns}


def _label(column: str) -> str:
    return _LABELS.get(column, f"against {column.removeprefix(_SCORE)}" if column.startswith(_SCORE) else column)
