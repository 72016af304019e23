"""What a run has left in its folder: its spec and the tables of its Sessions. Read only; the run may still go on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from slm_lab.experiment.analysis.figures import distributed
from slm_lab.experiment.analysis.table import Table, read_table
from slm_lab.experiment.paths import RunPaths, run_in
from slm_lab.experiment.plan import UserError
from slm_lab.lib.log import notice
from slm_lab.spec.report import nearest


@dataclass(frozen=True)
class Run:
    """One trial, by its tables of training."""

    root: Path
    name: str
    """The spec's."""
    body: Mapping[str, Any]
    """The spec, as saved."""
    groups: list[list[Table]]
    """Of the Sessions that have rows: those of each Session, of which there are several where it trains several policies; of Sessions that
    train one net together all in one."""

    @property
    def tables(self) -> list[Table]:
        return [table for group in self.groups for table in group]

    @property
    def env(self) -> str:
        return str(self.body.get("env", {}).get("name", "?")).rpartition(":")[2]

    @property
    def distributed(self) -> bool:
        """Whether its Sessions train one net together."""
        return distributed(self.tables)

    @property
    def policies(self) -> int:
        """Of each Session."""
        return _policies(self.body)

    def settings(self) -> dict[str, Any]:
        """Every key of the spec by its path, without what differs between two runs of one setting: seed and provenance."""
        return {key: value for key, value in _flat(self.body) if key != "meta.random_seed" and not key.startswith("meta.run.")}


def run_folders(word: str) -> list[Path]:
    """The folder `word`, or those that match it where it is a pattern with *, ? or [. Raises UserError where there is none."""
    if word and Path(word).is_dir():
        return [Path(word)]
    if word and has_magic(word):
        found = sorted(path for path in map(Path, glob(word)) if path.is_dir())
        if found:
            return found
        raise UserError(f"no folder matches '{word}'")
    parent = Path(word).parent
    beside = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    begun = [name for name in beside if Path(word).name and name.startswith(Path(word).name)]  # without its timestamp, say
    hint = f"; did you mean '{max(begun)}'?" if begun else nearest(Path(word).name, beside, 0.5)
    raise UserError(f"'{word}' is no folder{hint}; allowed: run folders, as under data/")


def read_run(folder: Path) -> Run:
    """The run in a folder. Raises UserError: not a run's folder, several trials, no rows. A run that has not ended is a notice."""
    paths = run_in(folder)
    if paths is None:
        inside = next((path for path in sorted(folder.iterdir()) if path.is_dir() and run_in(path)), None)
        hint = f"; there is one in it: {inside}" if inside else ""
        raise UserError(f"'{folder}' is no run folder: it has no *_spec.json{hint}")
    name, body = _spec(paths)
    trials = paths.trials()
    if len(trials) > 1:
        raise UserError(f"'{folder}' holds {len(trials)} trials; allowed: folders of one")
    tables = _tables(paths, trials[0]) if trials else {}
    if not tables:
        raise UserError(f"'{folder}' has no rows yet: no table of a Session in {paths.info_dir}")
    if distributed(tables.values()):
        return Run(folder, name, body, [list(tables.values())])
    of_sessions: dict[int, list[Table]] = {}
    for index, table in tables.items():
        of_sessions.setdefault(index // _policies(body), []).append(table)
    return Run(folder, name, body, list(of_sessions.values()))


def _policies(body: Mapping[str, Any]) -> int:
    sampler = body.get("meta", {}).get("sampler") or {}
    return int(sampler.get("num_policies", 1))


def _spec(paths: RunPaths) -> tuple[str, dict[str, Any]]:
    """Name and body of the saved spec; not validated, since it may be of another version."""
    try:
        ((name, body),) = json.loads(paths.spec.read_text(encoding="utf-8")).items()
        return name, dict(body)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{paths.spec} cannot be read as a saved spec: {error}") from None


def _tables(paths: RunPaths, t: int) -> dict[int, Table]:
    """The tables with rows, by index; of a run of which Sessions failed only those that ended well, as in its own metrics."""
    indices = paths.sessions("train", t)
    failed = _failed(paths, t)
    if failed:
        indices = [index for index in indices if paths.session_metrics(index, t).is_file()]
        notice(f"{paths.root}: {failed} Session{'s' if failed > 1 else ''} failed; compared: the {len(indices)} that ended well")
    try:
        tables = {index: read_table(paths.session_df(index, t=t)) for index in indices}
    except OSError as error:
        raise UserError(f"{paths.root}: a table cannot be read: {error}") from None
    return {index: table for index, table in tables.items() if len(table["frame"])}


def _failed(paths: RunPaths, t: int) -> int:
    """Number of Sessions that failed."""
    try:
        return int(json.loads(paths.trial_metrics(t).read_text(encoding="utf-8")).get("failed", 0))
    except FileNotFoundError:
        notice(f"{paths.root}: the run has not ended; compared is what there is so far")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        notice(f"{paths.trial_metrics(t)} cannot be read: {error}")
    return 0


def _flat(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in body.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
