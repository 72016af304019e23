"""TEMPORARY, until the analysis of searches is merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slm_lab.experiment.paths import RunPaths
from slm_lab.spec.spec import Spec

if TYPE_CHECKING:
    from slm_lab.experiment.search.result import TrialRecord


@dataclass(frozen=True)
class SearchSummary:
    best: TrialRecord | None
    importance: dict[str, float] = field(default_factory=dict)
    method: str = ""
    files: list[Path] = field(default_factory=list)


def write_search(paths: RunPaths, spec: Spec, records: Sequence[TrialRecord]) -> SearchSummary:
    lines = ["trial,metric,status,frame,seconds,confirmed"]
    lines += [f"{r.trial},{r.metric},{r.status},{r.frame},{r.seconds:.1f},{r.confirmed}" for r in records]
    file = paths.root / f"{paths.stem}_experiment_df.csv"
    file.write_text("\n".join(lines) + "\n")

    def key(record: TrialRecord) -> Any:
        return (record.confirmed is not None, record.confirmed if record.confirmed is not None else record.metric)

    done = [record for record in records if record.metric is not None]
    return SearchSummary(max(done, key=key, default=None), files=[file])
