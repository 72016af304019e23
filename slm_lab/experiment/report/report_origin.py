"""Create the sections of an HTML report about the origin of a run: settings, versions, commands, files and published scores."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from slm_lab.experiment.files.paths import DataMode, RunPaths, stamped_folders, study_in
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.progress import format_number
from slm_lab.experiment.report.run import Run
from slm_lab.lib.files import display_path
from slm_lab.spec.models.spec import models_at
from slm_lab.spec.report import KeyPath, diff

REPORT = "report.html"
_LETTERS = 200
"""Maximum number of characters of a spec value in a table of the report."""
_MODES: tuple[DataMode, ...] = ("train", "eval")


def run_settings(run: Run) -> dict[str, Any]:
    """Return the settings of a run as a dict: the spec as text (key "spec"), and two tables of spec keys ("changed" and "previous").

    The table "changed" has the spec keys whose values are not the defaults. The table "previous" has the spec keys whose values differ from
    those in the previous run with the same name, or is None if there is no previous run.
    """
    body = {**run.spec, "meta": {key: value for key, value in run.spec.get("meta", {}).items() if key != "run"}}
    rows = [[path, _text(value), _text(default)] for path, value, default in changed_settings(body)]
    return {
        "changed": {"columns": ["key", "value", "default"], "rows": rows},
        "previous": _differences_from_previous_run(run),
        "spec": json.dumps({run.name: body}, indent=2, ensure_ascii=False, default=str),
    }


def changed_settings(spec: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value, default) for each spec key whose value is not the default.

    For a required key, which has no default, the yielded default is None.

    Args: path: path of the section of the spec whose keys are compared with their defaults.
    """
    models = models_at(path, spec)
    fields = models[0].model_fields if len(models) == 1 else {}
    section: Any = spec
    for key in path:
        section = section[key]
    for key, value in section.items():
        if isinstance(value, dict):
            yield from changed_settings(spec, (*path, key))
            continue
        default = fields[key].get_default(call_default_factory=True) if key in fields and not fields[key].is_required() else None
        default = None if default is PydanticUndefined else to_jsonable_python(default, fallback=str)
        if value != default:
            yield ".".join(map(str, (*path, key))), value, default


def _text(value: Any) -> str:
    text = "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def _differences_from_previous_run(run: Run) -> dict[str, Any] | None:
    """Return the table of the spec keys that differ from the previous run with the same name, or None if there is no previous run."""
    other = previous_run(run)
    if other is None:
        return None
    name = other.paths.root.name
    rows = [[key, _text(value), _text(previous)] for key, (value, previous) in diff(run.settings(), other.settings()).items()]
    current = other.metrics.get("current_return")
    note = f"{other.status}, current return {format_number(current)}" if isinstance(current, int | float) else other.status
    href = f"../{name}/{REPORT}" if (other.paths.root / REPORT).is_file() else None
    return {"name": name, "href": href, "note": note, "columns": ["key", "this run", name], "rows": rows}


def previous_run(run: Run) -> Run | None:
    """Return the newest earlier run with the same spec name and mode in the same data folder, or None if there is no such run."""
    root = run.paths.root.absolute()
    earlier = [folder for folder in stamped_folders(root.parent, run.paths.stem) if folder.name < root.name]
    for folder in reversed(earlier):
        other = Run(RunPaths(folder, run.paths.spec_name))
        with suppress(UserError):
            if other.name == run.name and other.mode == run.mode and not other.paths.search_state.is_file():
                return other
    return None


def origin(run: Run) -> list[dict[str, str]]:
    """Return the origin of a run as {label, value} entries: folder, start times, command, seed, git commit, versions and host."""
    last, meta = run.starts[-1], run.spec.get("meta", {})
    host = last.get("host") or {}
    versions = ", ".join(f"{name} {version}" for name, version in (last.get("versions") or {}).items())
    command = last.get("command") or []
    found = {
        "folder": str(display_path(run.paths.root.absolute())),
        "began": ", ".join(str(start["began"]) for start in run.starts if "began" in start),
        "command": shlex.join(map(str, command)) if isinstance(command, list) else str(command),
        "random_seed": str(meta.get("random_seed", "")),
        "git commit": str(last.get("git") or ""),
        "versions": versions,
        "host": f"{host.get('name', '?')}, {host.get('cores', '?')} cores, {host.get('system', '?')}" if host else "",
        "env backend": str(last.get("backend") or ""),
        "env backend of evaluation": str(last.get("eval_backend") or ""),
        "matrix products": f"{last['matmul']}, {last.get('threads', '?')} threads" if "matmul" in last else "",
        "checkpoints": str(last.get("checkpoints") or ""),
    }
    return [{"label": label, "value": value} for label, value in found.items() if value]


def commands(run: Run) -> list[dict[str, str]]:
    """Return the shell commands that continue, play, export and compare a run, as {label, command} entries."""
    folder = shlex.quote(str(display_path(run.paths.root.absolute())))
    of_search = run.paths.has_several_trials
    trial = f" --trial {run.trial}" if of_search else ""
    found = {}
    if not of_search:
        frames = run.spec.get("env", {}).get("max_frame")
        done = run.status == "done" and isinstance(frames, int | float)
        more = f" --set env.max_frame={2 * frames:g}" if done and isinstance(frames, int | float) else ""
        found["train on" if done else "continue"] = f"slm-lab train@{folder}{more}"
    found["play"] = f"slm-lab enjoy@{folder}{trial}"
    found["export"] = f"slm-lab export {folder}{trial}"
    other = None if of_search else previous_run(run)
    if other is not None:
        found["compare"] = f"slm-lab compare {shlex.quote(str(display_path(other.paths.root)))} {folder}"
    found["this page"] = f"slm-lab report {folder}{trial}"
    return [{"label": label, "command": command} for label, command in found.items()]


def files(run: Run) -> list[dict[str, str]]:
    """Return the existing files of a run as {label, href} entries for links. The paths `href` are relative to the run folder."""
    paths, t = run.paths, run.trial
    tables = [paths.session_df(index, mode, t) for mode in _MODES for index in paths.table_numbers("train", t)]
    found = [(f"rows: {path.name}", path) for path in tables]
    for session in sorted({index // run.policies for index in paths.table_numbers("train", t)}):
        found += [(f"log: {paths.session_log(session, t).name}", paths.session_log(session, t))]
        found += [(f"timeline of the processes of session {session}", paths.timeline_graph(session, "html", t))]
        found += [(f"population-based training, session {session}", paths.session_graph(session, "pbt", "html", t=t))]
    found += [("Elo ratings", paths.trial_graph("elo", "html", t))]
    found += [("spec", paths.spec), ("metrics", paths.trial_metrics(t))]
    return [{"label": label, "href": path.relative_to(paths.root).as_posix()} for label, path in found if path.is_file()]


def published_levels(run: Run) -> list[dict[str, Any]]:
    """Return the published score, and the return that counts as solved, as {value, label} entries for horizontal lines.

    The published score and the return that counts as solved are defined in the study to which the run belongs. If the study does not define
    one of the two values, the entry of this value is omitted. The list is empty if the run does not belong to a study.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        folder = run.paths.root.absolute().parent
        about = json.loads((folder / "study_run.json").read_text(encoding="utf-8"))
        study = study_in(folder.parents[1])
        content = json.loads(study.study.read_text(encoding="utf-8")) if study else {}
        body = next(value for key, value in content.items() if not key.startswith("$"))["study"]
        found = {"published score": _published_score(body, about), "solved": _study_env_entry(body, about).get("solve", body.get("solve"))}
        return [{"value": float(value), "label": label} for label, value in found.items() if value is not None]
    return []


def _study_env_entry(body: Mapping[str, Any], about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the element of the list `envs` of a study that describes the env of a run, or {} if the list has no such element.

    Args:
        body: content of the study.
        about: content of study_run.json, which names the entry and the env of the run.
    """
    envs = body.get("envs") or []
    return next((one for one in envs if about["env"] in (one.get("label"), one["name"].rpartition(":")[2])), {})


def _published_score(body: Mapping[str, Any], about: Mapping[str, Any]) -> float | None:
    """Return the published score for the env and the entry of a run in a study, or None. The arguments are as in `_study_env_entry`."""
    entry = about["entry"]
    score = _study_env_entry(body, about).get("published")
    score = score.get(entry) if isinstance(score, dict) else score
    if score is not None:
        return float(score)
    own = (one for one in body["entries"] if entry in (one.get("label"), one["spec"].rpartition(":")[2]))
    known = [one["published"] for one in own if one.get("published") is not None and one.get("env", about["env"]) == about["env"]]
    return float(known[0]) if known else None
