"""The tables of Sessions that train one net (meta.distributed), as those of one experiment over global frames."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slm_lab.experiment.report.curves import Table, curve

ALL_WORKERS = -1
"""Index of the table of all workers, in place of a Session's."""
_SUMMED = ("epi", "t", "opt_step")
"""Counts of a worker; those of the trial are their sums."""


def distributed(tables: Mapping[int, Table]) -> bool:
    """Whether the Sessions of these tables train one net together."""
    return any("global_frame" in table for table in tables.values())


def independent(tables: Mapping[int, Table], mode: str) -> dict[int, Table]:
    """Return the tables of what was trained independently: one of all workers of a net, else those given."""
    return {ALL_WORKERS: global_table(tables, mode)} if distributed(tables) else dict(tables)


def global_table(tables: Mapping[int, Table], mode: str = "train") -> Table:
    """Return the rows of all workers in order of global frames, which are the frames of this table.

    Episodes, vector steps and optimizer steps are those of all workers, interpolated between the rows of each; seconds never decrease;
    other columns are as in the worker's row.
    """
    parts = [table for table in tables.values() if np.isfinite(table.get("global_frame", np.empty(0))).any()]
    parts = [{name: values[np.isfinite(table["global_frame"])] for name, values in table.items()} for table in parts]
    if not parts:
        return {"frame": np.empty(0)}
    names = dict.fromkeys(name for table in parts for name in table)
    joined = {name: np.concatenate([table.get(name, np.full(len(table["frame"]), np.nan)) for table in parts]) for name in names}
    order = np.argsort(joined["global_frame"], kind="stable")
    rows = {name: values[order] for name, values in joined.items()}
    frame = rows["frame"] = rows["global_frame"]
    if "wall_t" in rows:  # each worker counts from its own start; what comes later in global frames comes later in time
        rows["wall_t"] = np.fmax.accumulate(rows["wall_t"])
    for name in _SUMMED:
        if name in rows:
            counts = [curve(table, name, "global_frame") for table in parts]
            rows[name] = np.sum([np.interp(frame, [0.0, *one.frame], [0.0, *one.value]) for one in counts], axis=0).round()
    return rows
