"""Write and read the result files of a study, one small JSON file for each run.

All tables and figures of the study are created from these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.experiment.files.paths import DataMode, RunPaths
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.metrics import Table, round_to_five_digits
from slm_lab.experiment.report.run import Run
from slm_lab.lib.files import checked_content, replace_file, with_checksum
from slm_lab.lib.limits import processor_description

VERSION = 1
MAX_ROWS = 100
"""Maximum number of rows of a table in a result file. In tables with more rows, consecutive rows are merged."""
_COLUMNS = (
    "frame", "global_frame", "wall_t", "opt_step", "epi_new", "return_new", "current_return", "current_return_se", "total_reward",
    "total_reward_ma", "grad_norm", "staleness", "lock_wait", "lag_mean",
)  # fmt: skip
_EVALUATION_COLUMNS = ("frame", "global_frame", "wall_t", "opt_step", "total_reward")


def write_result(file: Path, run: Run, identity: Mapping[str, Any], seconds: float | None = None) -> None:
    """Write a JSON file with the result of a study run that has ended.

    Args:
        identity: dict with the keys entry, env, random_seed, digest, settings and spec_version, which are copied into the file.
        seconds: duration of the run including the analysis, or None if the duration is unknown, for example because the run was continued.

    Raises OSError if the result file cannot be written.
    """
    content = {
        "version": VERSION,
        **identity,
        "status": run.status,
        "spec_name": run.name,
        "policies": run.policies,
        "seconds": seconds,
        "versions": run.starts[-1].get("versions", {}),
        "git": run.starts[-1].get("git"),
        "processor": _processor_model(processor_description()),
        "sessions": {str(index): status for index, status in run.sessions.items()},
        "failures": run.metrics.get("failures", {}),
        "train": _tables(run, "train"),
        "eval": _tables(run, "eval"),
    }
    replace_file(file, (json.dumps(with_checksum(content), ensure_ascii=False, allow_nan=False) + "\n").encode(), sync=True)


def _processor_model(description: str) -> str:
    """Return the model name in a processor description, or the first line of the description if the description has no model name."""
    lines = description.splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, lines[0] if lines else "")


def _tables(run: Run, mode: DataMode) -> dict[str, dict[str, list[float | None]]]:
    columns = _COLUMNS if mode == "train" else _EVALUATION_COLUMNS
    return {
        str(index): {
            name: [round_to_five_digits(value) for value in values.tolist()]
            for name, values in merge_rows(table).items()
            if name in columns
        }
        for index, table in run.tables(mode).items()
        if len(table["frame"])
    }


def merge_rows(table: Table, rows: int = MAX_ROWS) -> Table:
    """Return a table with at most `rows` rows, each of which replaces several consecutive rows of `table`.

    A new row has the values of the last row that it replaces, with two exceptions: epi_new is the number of new episodes in all replaced
    rows, and return_new is the mean return of these new episodes.
    """
    count = len(table["frame"])
    if count <= rows:
        return table
    ends = np.unique(np.linspace(-1, count - 1, rows + 1).round().astype(int))[1:]
    begins = np.append(0, ends[:-1] + 1)
    thinned = {name: values[ends] for name, values in table.items()}
    if "epi_new" in table and "return_new" in table:
        counts = np.nan_to_num(table["epi_new"])
        episodes, total = (np.add.reduceat(values, begins) for values in (counts, counts * np.nan_to_num(table["return_new"])))
        thinned |= {"epi_new": episodes, "return_new": np.where(episodes > 0, total / np.maximum(episodes, 1.0), np.nan)}
    return thinned


class ResultRun(Run):
    """A Run that is read from the result file of a study instead of a run folder. Raises UserError if the result file cannot be read."""

    def __init__(self, file: Path) -> None:
        try:
            self.content = checked_content(json.loads(file.read_text(encoding="utf-8")))
            if (version := self.content["version"]) != VERSION:
                raise UserError(f"{file} has version {version}; expected {VERSION}: it was written by another version of slm_lab")
            super().__init__(RunPaths(file, str(self.content["entry"])))
            self._named_spec = str(self.content["entry"]), {}
            self.env, self.mode, self.policies = str(self.content["env"]), "train", int(self.content["policies"])
            self.status, self.metrics = self.content["status"], {"failures": self.content["failures"]}
            self.sessions = {int(index): status for index, status in self.content["sessions"].items()}
            self.random_seed = int(self.content["random_seed"])
            for mode in ("train", "eval"):
                tables = self.content[mode]
                self._tables[mode] = {
                    int(index): {name: np.array(values, dtype=np.float64) for name, values in table.items()}
                    for index, table in tables.items()
                }
                for index in set(self.content["train"]) - set(tables):
                    self._tables[mode][int(index)] = {"frame": np.empty(0)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            again = "delete this file; the study then creates it again from the run folder, or repeats the run"
            raise UserError(f"{file} cannot be read as a result of a study: {error}; {again}") from None

    def settings(self) -> dict[str, Any]:
        return dict(self.content["settings"])
