"""The state of a search, which is saved as a JSON file in the run folder. An interrupted or killed search continues from its state file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from slm_lab.experiment.plan import UserError
from slm_lab.lib.files import checked_content, replace_file, with_checksum
from slm_lab.spec.load.search_space import Values

VERSION = 1
TrialStatus = Literal["waiting", "running", "finished", "stopped", "failed"]
"""Status of a trial. A "waiting" trial has not started yet or will be retried, and a "stopped" trial was stopped by the scheduler."""


@dataclass
class TrialState:
    """The state of a trial of a search."""

    trial: int
    values: Values
    status: TrialStatus = "waiting"
    failures: int = 0
    """Number of starts of the trial that failed."""
    frame: int = 0
    """The last frame that all Sessions of the trial have reached."""
    seconds: float = 0.0
    """Run time of the trial in seconds, summed over all starts."""
    metric: float | None = None
    """Value of the search metric, from the trial's last report or, after the trial has ended, from the metrics of the trial."""
    metrics: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    """Reason why the trial failed."""
    take_over: int | None = None
    """Index of another trial, or None. At its next start, this trial continues from the checkpoints of the other trial (population-based
    training)."""

    @property
    def has_ended(self) -> bool:
        return self.status in ("finished", "stopped", "failed")


def best_first(trials: Iterable[TrialState]) -> list[TrialState]:
    """Return the trials that ended without failure and have a metric, sorted from best to worst. Finished trials precede stopped trials."""
    ended = [trial for trial in trials if trial.status in ("finished", "stopped") and trial.metric is not None]
    return sorted(ended, key=lambda trial: (trial.status != "finished", -(trial.metric or 0.0)))


@dataclass
class SearchState:
    """The trials of a search, and all other state that is needed to continue the search."""

    metric: str
    """Name of the metric that is maximised."""
    baseline: float | None
    """Mean return of random actions in the env, which is needed to compute the strength of an agent, or None if it is unknown."""
    common_seeds: bool
    trials: list[TrialState] = field(default_factory=list)
    reports: list[tuple[int, int, float]] = field(default_factory=list)
    """Reported metrics, as (trial, frame, metric) in order of arrival. The state of the scheduler is rebuilt from `reports`."""
    exploits: list[dict[str, Any]] = field(default_factory=list)
    """Steps of population-based training in which a trial copied the state of another trial.

    Each entry is a dict with the trial, the frame, the trial whose state was copied (source), and the new hyperparameter values.
    """
    exhausted: bool = False
    """Whether the proposer has no more hyperparameter values to propose for new trials."""
    proposer: dict[str, Any] = field(default_factory=dict)
    confirm: int = 0
    """Number of best trials that are trained again with new seeds."""
    confirm_seed: int | None = None
    """The random_seed of the confirmations, or None before the confirmations begin."""
    confirmations: list[TrialState] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the state of the search to a JSON file atomically. Raises OSError if writing fails."""
        content = with_checksum(_to_json_value({"version": VERSION, **asdict(self)}))
        replace_file(path, json.dumps(content, indent=1).encode(), sync=True)

    @classmethod
    def load(cls, path: Path) -> SearchState:
        """Read the state of a search from a JSON file. Raises UserError if the file is damaged or has another version."""
        try:
            content = _from_json_value(checked_content(json.loads(path.read_text(encoding="utf-8"))))
            version = content.pop("version")
            if version == VERSION:
                for name in ("trials", "confirmations"):
                    content[name] = [TrialState(**trial) for trial in content[name]]
                return cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} cannot be read: {error}; the search cannot be continued") from None
        raise UserError(f"{path} has version {version}; expected {VERSION}: it was written by another version of slm_lab")


def _to_json_value(value: Any) -> Any:
    """Convert a plain Python value to a JSON value. Bytes, tuples, and dicts with keys other than strings become JSON objects with one
    key."""
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"$tuple": [_to_json_value(item) for item in value]}
    if isinstance(value, list):
        return [_to_json_value(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _to_json_value(item) for key, item in value.items()}
        return {"$items": [[_to_json_value(key), _to_json_value(item)] for key, item in value.items()]}
    return value


def _from_json_value(value: Any) -> Any:
    """Convert a JSON value that `_to_json_value` has returned back to the plain Python value."""
    if isinstance(value, list):
        return [_from_json_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tuple": items}:
            return tuple(_from_json_value(item) for item in items)
        case {"$items": items}:
            return {_from_json_value(key): _from_json_value(item) for key, item in items}
    return {key: _from_json_value(item) for key, item in value.items()}
