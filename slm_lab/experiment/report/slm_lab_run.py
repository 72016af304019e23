"""Run folders of SLM Lab v4 and v5: import their tables and spec into a run folder of ours.

Their files, of which {name}_t0_trial_metrics_scalar.json and graphs have the names of ours:

    {name}_spec.json (of a search), {name}_t0_spec.json, {name}_t0_s0_spec.json: one flat object {name, agent, env, meta}
    info/{name}_t0_s0_session_df_train.csv and …_eval.csv, written by pandas; frame is a float in v5
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.experiment.files.paths import DataMode, RunPaths, imported_run
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.run import numbers, read_columns
from slm_lab.experiment.training.observers.base import COLUMNS
from slm_lab.lib.files import replace_file
from slm_lab.spec.compat.migrate import migrate
from slm_lab.spec.load.tidy import drop_nulls
from slm_lab.spec.models.meta import MetaSpec
from slm_lab.spec.report import Report, value_at

LAST_EPISODES = "last episode of each env"
"""Those of which SLM Lab's total_reward is the mean."""
_REQUIRED = ("frame", "total_reward")
_MISSING = {
    "opt_step": "training_efficiency",
    "loss": "the graph of the loss",
    "entropy": "the graph of the entropy",
    "explore_var": "the graph of explore_var",
    "wall_t": "wall-clock time",
}
"""Column → what cannot be computed without it."""
_COUNTS = ("frame", "epi", "t", "opt_step")
_ROWS = 100
"""Rows of which total_reward_ma is the mean."""
_OTHER_SIMULATORS = re.compile(r"Roboschool|.*BulletEnv")
"""Envs whose current id is that of another simulator, with other rewards."""


def is_slm_lab_run(folder: Path) -> bool:
    """Return whether SLM Lab wrote the run in this folder."""
    return _spec_in(folder) is not None


def import_run(folder: Path) -> tuple[RunPaths, list[str]]:
    """Write the tables and the spec as a run folder of ours inside `folder`; return its paths, and remarks on what differs or is missing.

    Raises UserError if no table can be used, OSError.
    """
    raw = _spec_in(folder)
    assert raw is not None
    name, old_env = str(raw["name"]), _env_name(raw)
    body = _body(raw, folder)
    if _OTHER_SIMULATORS.match(old_env):
        body["env"]["name"] = old_env
    tables = _tables(folder, name)
    if body["meta"].get("rigorous_eval"):
        tables |= {(t, s, "eval"): table for (t, s, mode), table in _tables(folder, name, "eval").items()}
    if not any(_length(table) for table in tables.values()):
        raise UserError(f"'{folder}' has no rows: no {name}_t*_s*_session_df_train.csv in {folder / 'info'} has a row")
    for (t, s, _), table in tables.items():
        if lacking := [column for column in _REQUIRED if column not in table]:
            raise UserError(f"'{folder}' cannot be analyzed: its table of trial {t}, session {s} has no column {' and '.join(lacking)}")
    paths = imported_run(folder, name)
    paths.root.mkdir(exist_ok=True)
    paths.make_dirs()
    text = (json.dumps({name: body}, indent=2, ensure_ascii=False) + "\n").encode()
    for path in (paths.spec, *(paths.trial_spec(t) for t in sorted({t for t, _, _ in tables}))):
        replace_file(path, text)
    for (t, s, mode), table in tables.items():
        replace_file(paths.session_df(s, mode, t), _csv(table))
    return paths, _remarks(folder, body, tables, old_env)


def _spec_in(folder: Path) -> dict[str, Any] | None:
    """Return the content of SLM Lab's spec file, that of the experiment or of the first trial; None if there is none."""
    for path in sorted(folder.glob("*_spec.json"), key=lambda path: (len(path.name), path.name)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and isinstance(content.get("name"), str) and {"agent", "env", "meta"} <= content.keys():
            return content
    return None


def _body(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return agent, env and meta in the current form, without what SLM Lab adds to meta when it runs."""
    body = {key: raw[key] for key in ("agent", "env", "meta")}
    report = Report()
    migrate(body, report)
    if report.problems:
        raise UserError(f"'{folder}' cannot be analyzed: {'; '.join(map(str, report.problems))}")
    if not all(isinstance(section, dict) for section in body.values()):
        raise UserError(f"'{folder}' cannot be analyzed: agent, env and meta of its spec must be objects")
    body["meta"] = {key: value for key, value in body["meta"].items() if key in MetaSpec.model_fields}
    drop_nulls(body)
    return body


def _env_name(raw: Mapping[str, Any]) -> str:
    return str(value_at(raw, ("env", 0, "name")) or value_at(raw, ("env", "name")))


Tables = dict[tuple[int, int, DataMode], dict[str, list[str]]]
"""(trial, session, mode) → columns as text."""


def _tables(folder: Path, name: str, mode: DataMode = "train") -> Tables:
    pattern = re.compile(re.escape(name) + rf"_t(\d+)_s(\d+)_session_df_{mode}\.csv")
    found = {path: match for path in sorted((folder / "info").glob("*.csv")) if (match := pattern.fullmatch(path.name))}
    return {(int(match[1]), int(match[2]), mode): read_columns(path) for path, match in found.items()}


def _length(table: Mapping[str, list[str]]) -> int:
    return len(next(iter(table.values()), []))


def _csv(table: Mapping[str, list[str]]) -> bytes:
    """Return a table with our columns in our order, then the others; a missing total_reward_ma is computed."""
    columns = dict(table)
    for name in _COUNTS:
        if name in columns:
            columns[name] = [f"{value:.0f}" if np.isfinite(value) else "" for value in numbers(columns[name])]
    if "total_reward_ma" not in columns:
        columns["total_reward_ma"] = _moving_average(numbers(columns["total_reward"]))
    names = [name for name in dict.fromkeys((*COLUMNS, *columns)) if name in columns]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*(columns[name] for name in names), strict=True))
    return text.getvalue().encode()


def _moving_average(values: np.ndarray) -> list[str]:
    windows = (values[max(0, end - _ROWS) : end] for end in range(1, len(values) + 1))
    means = (float(np.nanmean(window)) if np.isfinite(window).any() else np.nan for window in windows)
    return [f"{mean:.8g}" if np.isfinite(mean) else "" for mean in means]


def _remarks(folder: Path, body: Mapping[str, Any], tables: Tables, old_env: str) -> list[str]:
    env = body["env"]["name"]
    remarks = [f"{folder} is a run of SLM Lab; its total_reward is the mean return of the {LAST_EPISODES}"]
    if _OTHER_SIMULATORS.match(old_env):
        remarks.append(f"not computed: strength and the metrics made of it, which need the random baseline of {old_env}")
    elif env != old_env:
        remarks.append(f"{old_env} is now {env}, whose random baseline is used")
    missing = [column for column in _MISSING if not any(_known(table, column) for table in tables.values())]
    lacking = [f"{_MISSING[column]} (no {column} in its tables)" for column in missing]
    if body["meta"].get("distributed"):
        lacking.append("graphs over global frames (its tables have the frames of each session)")
    return remarks + ([f"not computed: {', '.join(lacking)}"] if lacking else [])


def _known(table: Mapping[str, list[str]], column: str) -> bool:
    return bool(np.isfinite(numbers(table.get(column, []))).any())
