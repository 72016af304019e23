"""Read a run folder: the spec, tables, metrics and status of a run.

The functions of this module write no file, and the run may still be training.

`read_columns`, the only CSV reader of the analysis, uses only the standard library, since importing pandas takes 0.25 s, which is 6 % of a
short run. pandas is imported only when a DataFrame is requested.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from glob import glob, has_magic
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic_core import PydanticUndefined, to_jsonable_python

from slm_lab.experiment.files.lock import in_use
from slm_lab.experiment.files.named_model import check_no_model
from slm_lab.experiment.files.paths import (
    DataMode,
    RunPaths,
    StudyRunFolder,
    not_a_run_message,
    number_of_policies,
    policy_names,
    run_paths_in,
)
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.metrics import Table, curve
from slm_lab.lib.log import notice
from slm_lab.spec.models.spec import models_at
from slm_lab.spec.report import KeyPath, flatten_leaves, nearest_hint

if TYPE_CHECKING:
    import pandas as pd


Status = Literal["done", "stopped", "failed", "running"]
"""Status of a run or of a Session. The status "stopped" means stopped early or killed, "failed" means that a Session failed, and "running"
means that a process is training the run."""
_IGNORED_KEY_PREFIXES = (
    "meta.random_seed",
    "meta.run",
    "meta.save_",
    "meta.checkpoint_frequency",
    "meta.stall_",
    "meta.max_restart",
    "meta.observers",
    "meta.track",
)
"""Prefixes of the paths of spec keys that do not affect learning."""
_COUNTS = ("frame", "global_frame", "epi", "t", "opt_step", "epi_new")
_TAIL = 4_096
"""Minimum number of bytes that are read from the end of a CSV file to find its last row."""


class Run:
    """One trial of a run folder. Files are read on first use and cached. To read changed files again, create a new Run.

    `train` and `eval` are pandas DataFrames. The analysis itself uses the numpy arrays of `tables`, and does not need pandas.
    """

    def __init__(self, paths: RunPaths, trial: int = 0) -> None:
        self.paths, self.trial = paths, trial
        self._tables: dict[DataMode, dict[int, Table]] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.paths.root)!r}, {self.status})"

    @property
    def train(self) -> pd.DataFrame:
        """DataFrame with the training rows of all Sessions.

        The columns are session and policy, followed by the columns of the CSV files.
        """
        return self._data_frame("train")

    @property
    def eval(self) -> pd.DataFrame:
        """DataFrame with the evaluation rows of all Sessions.

        The columns are session and policy, followed by the columns of the CSV files.
        """
        return self._data_frame("eval")

    @cached_property
    def name(self) -> str:
        """Name of the spec."""
        return self._named_spec[0]

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The saved spec of the run. The spec is not validated, since another version of the program may have saved the spec.

        Raises UserError if the spec file cannot be read.
        """
        return self._named_spec[1]

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the trial from its metrics file, or {} if this file has not been written yet."""
        return self._trial_metrics or {}

    @cached_property
    def _trial_metrics(self) -> dict[str, Any] | None:
        return self._read_if_current(self.paths.trial_metrics(self.trial))

    @cached_property
    def status(self) -> Status:
        """The status of the run: "running", or how the run ended."""
        if in_use(self.paths.lock):
            return "running"
        if (metrics := self._trial_metrics) is None:
            return "stopped"
        status: Status = "failed" if metrics.get("failed") else metrics.get("status", "done")
        return status

    @cached_property
    def sessions(self) -> dict[int, Status]:
        """Dict: index of each Session that has a table or has failed → status of the Session."""
        with_tables = {index // self.policies for index in self.paths.table_numbers("train", self.trial)}
        return {s: self._session_status(s) for s in sorted(with_tables.union(map(int, self.metrics.get("failures", ()))))}

    @cached_property
    def policies(self) -> int:
        """Number of policies that each Session trains."""
        return number_of_policies(self.spec)

    @cached_property
    def policy_names(self) -> list[str]:
        """Names of the policies of each Session: the names in agent.policies or, without such names, the numbers of the policies."""
        return policy_names(self.spec)

    @cached_property
    def env(self) -> str:
        """Name of the env, without the module that registers it."""
        return str(self.spec.get("env", {}).get("name", "?")).rpartition(":")[2]

    @property
    def is_standalone(self) -> bool:
        """Whether the run is neither a trial of a search nor part of a study."""
        return not self.paths.has_several_trials and not StudyRunFolder(self.paths.root.absolute().parent).identity.is_file()

    @property
    def has_evaluation_curve(self) -> bool:
        """Whether the run uses meta.rigorous_eval, so that its metrics and curves are computed from the evaluation rows."""
        return bool(self.settings().get("meta.rigorous_eval"))

    @property
    def shares_one_net(self) -> bool:
        """Whether the Sessions train one shared net."""
        return shares_one_net(self.tables("train"))

    @property
    def has_new_returns(self) -> bool:
        """Whether all training tables have the column return_new. Tables that SLM Lab has written do not have this column."""
        return all("return_new" in table for table in self.tables("train").values() if len(table["frame"]))

    def tables(self, mode: DataMode) -> dict[int, Table]:
        """Return a dict: index of a table (see RunPaths.session_df) → training table (mode "train") or evaluation table (mode "eval").

        The dict has the indices of all training tables. If a table does not exist or cannot be read, the dict has an empty table. If a
        table cannot be read, a notice is printed too.
        """
        if mode not in self._tables:
            indices = self.paths.table_numbers("train", self.trial)
            self._tables[mode] = {index: _read_table_or_empty(self.paths.session_df(index, mode, self.trial)) for index in indices}
        return self._tables[mode]

    def tables_per_training(self, mode: DataMode) -> dict[int, Table]:
        """Return `tables(mode)` or, if the Sessions are workers that train a shared net, a single joint table of all workers.

        The key of the joint table in the returned dict is ALL_WORKERS.
        """
        return tables_per_training(self.tables(mode))

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The entries of meta.run: command, versions and machine of each start of the run."""
        starts = self.spec.get("meta", {}).get("run") or [{}]
        return starts if isinstance(starts, list) else [starts]

    @cached_property
    def mode(self) -> str:
        """The mode of the run: "train" or "dev"."""
        return str(self.starts[0].get("mode", "train"))

    def settings(self) -> dict[str, Any]:
        """Return a dict with the settings that affect the results of the run: path of the spec key → value.

        The settings are the mode and all spec keys except keys about seeds, provenance and saving. A key that is missing in the saved spec
        has its default value, so that a run that was saved before the key existed does not count as different.
        """
        keys = self.flat_spec()
        ignored = _IGNORED_KEY_PREFIXES if keys["meta.distributed"] else (*_IGNORED_KEY_PREFIXES, "meta.max_session")
        return {key: value for key, value in keys.items() if not key.startswith(ignored)}

    def flat_spec(self) -> dict[str, Any]:
        """Return a dict with the mode and all spec keys except meta.run: path of the key → value.

        A key that is missing in the saved spec has its default value.
        """
        agent = {key: _with_name_key(value) if key in ("net", "critic_net") else value for key, value in self.spec.get("agent", {}).items()}
        spec = self.spec | {"agent": agent, "meta": self.spec.get("meta", {})}
        body = {**_with_defaults(spec, (), spec), "mode": self.mode}
        return {key: value for key, value in flatten_leaves(body) if value != {} and not key.startswith("meta.run")}

    @cached_property
    def _named_spec(self) -> tuple[str, dict[str, Any]]:
        file, of_trial = self.paths.spec, self.paths.trial_spec(self.trial)
        if self.paths.has_several_trials and of_trial.is_file():
            file = of_trial
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if {"agent", "env", "meta"} <= set(content):
                folder = self.paths.root
                raise UserError(f"'{folder}' is a run of SLM Lab; import it first with: slm-lab retro_analyze {shlex.quote(str(folder))}")
            ((name, body),) = content.items()
            return str(name), dict(body)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{file} cannot be read as a saved spec: {error}") from None

    def _read_if_current(self, file: Path) -> dict[str, Any] | None:
        """Return the content of a metrics file, or None if the file does not exist or the run was continued after the file was written."""
        if len(self.starts) > 1 and file.is_file():
            with suppress(ValueError, KeyError, TypeError):
                if file.stat().st_mtime < datetime.fromisoformat(self.starts[-1]["began"]).timestamp():
                    return None
        return read_json(file)

    def _session_status(self, s: int) -> Status:
        """Return the status of Session `s` from its metrics file, or the status of the run if there is no current metrics file."""
        metrics = self._read_if_current(self.paths.session_metrics(s * self.policies, self.trial))
        status: Status = self.status if metrics is None else metrics.get("status", "done")
        return status

    def _data_frame(self, mode: DataMode) -> pd.DataFrame:
        import pandas as pd

        frames = [
            pd.DataFrame(
                {"session": index // self.policies, "policy": index % self.policies}
                | {name: _counts_as_int(name, values) for name, values in table.items()}
            )
            for index, table in self.tables(mode).items()
            if len(table["frame"])
        ]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["session", "policy", "frame"])


def load_run(folder: str | Path) -> Run:
    """Return the Run in a run folder.

    Raises UserError if the folder is not a run folder, if the run has several trials, or if the spec of the run cannot be read.

    >>> run = load_run("data/ppo_cartpole_2026_01_31_120000")
    >>> run.train.groupby("session").current_return.last(), run.metrics["strength"], run.spec["env"], run.status
    """
    folder = Path(folder)
    paths = run_paths_in(folder) if folder.is_dir() else None
    if paths is None:
        children = sorted(folder.iterdir()) if folder.is_dir() else []
        inside = next((path for path in children if path.is_dir() and run_paths_in(path)), None)
        hint = f"; did you mean {inside}?" if inside else ""
        raise UserError(not_a_run_message(folder) + hint)
    trials = paths.trials()
    if len(trials) > 1:
        raise UserError(f"'{folder}' contains {len(trials)} trials; expected one")
    run = Run(paths, trials[0] if trials else 0)
    _ = run.spec  # read the spec here, so that a damaged spec raises an error immediately
    return run


def with_data_dir(word: str, data_dir: Path) -> str:
    """Return the path `data_dir`/`word` if `word` is the name of a folder in `data_dir`. Return any other word unchanged.

    Raises UserError if `word` names a folder with an exported model.
    """
    check_no_model(word, data_dir)
    named = word not in {"", "latest"} and not Path(word).is_dir() and (data_dir / word).is_dir()
    return str(data_dir / word) if named else word


def run_folders(word: str) -> list[Path]:
    """Return the folder `word` or, if `word` is a pattern with *, ? or [, all run folders that match the pattern.

    Raises UserError if no folder matches `word`.
    """
    if word and Path(word).is_dir():
        return [Path(word)]
    if word and has_magic(word):
        found = sorted(path for path in map(Path, glob(word)) if path.is_dir() and run_paths_in(path))
        if found:
            return found
        raise UserError(f"no run folder matches '{word}'")
    parent = Path(word).parent
    siblings = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    longer = [name for name in siblings if Path(word).name and name.startswith(Path(word).name)]  # `word` may lack the timestamp
    hint = f"; did you mean '{max(longer)}'?" if longer else nearest_hint(Path(word).name, siblings, 0.5)
    raise UserError(f"'{word}' is not a folder{hint}; expected a run folder, such as data/ppo_cartpole_2026_01_31_120000")


def read_columns(path: Path) -> dict[str, list[str]]:
    """Return a dict: column name → cells of the column as text. The dict is empty if the file does not exist or is empty.

    A last line without a newline is dropped, even if the line looks complete, since a process may still be writing the line or may have
    been killed while writing. Lines with a wrong number of cells are dropped too.

    Raises OSError if the file exists but cannot be read, and csv.Error if the file is not a CSV file.
    """
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        text = file.read()
    reader = csv.reader(StringIO(text[: text.rfind("\n") + 1]))
    names = next(reader, [])
    rows = [row for row in reader if len(row) == len(names)]
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def read_table(path: Path) -> Table:
    """Return the table in a CSV file of a Session, without rows whose frame is 0. Raises the same errors as read_columns."""
    columns = {name: parse_numbers(cells) for name, cells in read_columns(path).items()}
    frame = columns.get("frame")
    if frame is None:
        return {"frame": np.empty(0)}
    return {name: values[frame > 0] for name, values in columns.items()}


def last_row(path: Path | str) -> dict[str, float]:
    """Return a dict with the finite numbers in the last complete row of a CSV file: column → number.

    The dict is empty if the file has no complete row or cannot be read. Only the beginning and the end of the file are read.
    """
    try:
        with open(path, "rb") as file:
            head = file.readline()
            tail = max(_TAIL, 2 * len(head))  # with many columns, a row is about as long as the header
            file.seek(max(len(head), os.fstat(file.fileno()).st_size - tail))
            lines = file.read(tail).split(b"\n")[:-1]
    except OSError:
        return {}
    names = head.decode(errors="replace").strip().split(",")
    cells = next((cells for cells in (line.split(b",") for line in reversed(lines)) if len(cells) == len(names)), [])
    return {name: value for name, cell in zip(names, cells, strict=False) if math.isfinite(value := _parsed_number(cell))}


def parse_numbers(cells: Sequence[str | bytes]) -> np.ndarray:
    """Convert the texts of table cells to numbers, float64 [cells]. A text that is not a number becomes NaN."""
    return np.array([_parsed_number(cell) for cell in cells], dtype=np.float64)


def _parsed_number(cell: str | bytes) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


def last_frame(table: Table) -> int | None:
    frame = curve(table, "frame").value
    return int(frame[-1]) if len(frame) else None


def _read_table_or_empty(path: Path) -> Table:
    try:
        return read_table(path)
    except Exception as error:
        notice(f"cannot read {path.name}: {error}")
        return {"frame": np.empty(0)}


def _counts_as_int(name: str, values: np.ndarray) -> np.ndarray:
    """Return the values of a column as int64 if the column contains counts and all values are finite.

    Return the values of any other column unchanged.
    """
    return values.astype(np.int64) if name in _COUNTS and np.isfinite(values).all() else values


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None if the file does not exist.

    If the file cannot be read, a notice is printed and {} is returned.
    """
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        notice(f"cannot read {path}: {error}")
        return {}


def _with_name_key(net: Any) -> Any:
    """Return the spec section of a net, with the key `type` renamed to `name` as in the pydantic model of the net."""
    return {"name": net["type"]} | {key: value for key, value in net.items() if key != "type"} if "type" in (net or ()) else net


def _with_defaults(section: Mapping[str, Any], path: KeyPath, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return `section`, which is the section at `path` of a saved spec, with the default values of missing keys added."""
    models = models_at(path, spec)
    fields = models[0].model_fields if len(models) == 1 else {}
    defaults = {key: field.default for key, field in fields.items() if field.default not in (None, PydanticUndefined)}
    filled = {key: _with_defaults(value, (*path, key), spec) if isinstance(value, dict) else value for key, value in section.items()}
    return {**to_jsonable_python(defaults, exclude_none=True), **filled}


ALL_WORKERS = -1
"""Index of the joint table of all workers of a shared net. The joint table belongs to no single Session."""
_SUMMED = ("epi", "t", "opt_step")
"""Columns with counts that each worker makes separately. In the joint table, these counts are summed over the workers."""


def shares_one_net(tables: Mapping[int, Table]) -> bool:
    """Return whether the Sessions to which the tables belong train one shared net."""
    return any("global_frame" in table for table in tables.values())


def tables_per_training(tables: Mapping[int, Table]) -> dict[int, Table]:
    """Return `tables` or, if the Sessions are workers that train a shared net, a dict with a single joint table of all workers."""
    return {ALL_WORKERS: join_worker_tables(tables)} if shares_one_net(tables) else dict(tables)


def join_worker_tables(tables: Mapping[int, Table]) -> Table:
    """Return the joint table of all workers of a shared net, in which the rows of all workers are ordered by global frame.

    The column frame of the joint table is the global frame (the number of frames of all workers together). The numbers of episodes, vector
    steps and optimizer steps are sums over all workers. To compute the sum at a row, the number of each worker is interpolated between the
    rows of this worker. The time wall_t is changed so that wall_t never decreases. All other columns are unchanged.
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
    if "wall_t" in rows:  # each worker measures wall_t from its own start, but a row with a higher global frame is always later
        rows["wall_t"] = np.fmax.accumulate(rows["wall_t"])
    for name in _SUMMED:
        if name in rows:
            counts = [curve(table, name, "global_frame") for table in parts]
            rows[name] = np.sum([np.interp(frame, [0.0, *one.frame], [0.0, *one.value]) for one in counts], axis=0).round()
    return rows
