"""Functions that stop Sessions at a frame, continue them from their run folder, and compare the results."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.session import Session
from slm_lab.lib.records import Episode
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.models.spec import Spec

MEASURED = ("wall_t", "fps", "rollout_busy", "inference_busy", "learner_busy")
"""Columns that depend on the speed of the machine."""
NET = {"type": "MLPNet", "hid_layers": [16], "hid_layers_activation": "tanh"}


def small(algorithm_name: str, env_id: str, frames: int = 900, **sections: Any) -> Spec:
    """Return a spec of a short run."""
    agent: dict[str, Any] = {"name": algorithm_name, "algorithm": {"name": algorithm_name, **sections.get("algorithm", {})}}
    agent |= {key: sections[key] for key in ("memory", "net") if key in sections}
    meta = {"random_seed": 3, "log_frequency": 100, "save_interval": 1e9, **sections.get("meta", {})}
    body = {"agent": agent, "env": {"name": env_id, "max_frame": frames, **sections.get("env", {})}, "meta": meta}
    return load_spec({"small": body}, "small")


class StopAt:
    """Observer that requests a stop at a frame."""

    def __init__(self, stop: Stop, frame: int) -> None:
        from slm_lab.experiment.training.observers.base import Observer, ObserverContext

        class _StopAt(Observer):
            def __init__(self, context: ObserverContext) -> None:
                super().__init__(context)

            def on_step(self, episodes: list[Episode]) -> None:
                if self.context.clock.frame >= frame:
                    stop.requested = True

        self.observer = _StopAt


def train(spec: Spec, root: Path, stops: Sequence[int] = ()) -> tuple[Session, RunPaths]:
    """Train Session 0 of a spec in a folder, with a stop and a continuation at each frame of `stops`; return the last Session."""
    paths = RunPaths(root, spec.name)
    root.mkdir()
    paths.make_dirs()
    paths.spec.write_text(json.dumps(dump_spec(spec)))
    for number, frame in enumerate((*stops, None)):
        stop = Stop()
        observers = [] if frame is None else [StopAt(stop, frame).observer]
        context = SessionContext(stop, resumed=paths if number else None)
        session = Session(spec, observers=observers, context=context).build()
        sink = LocalSink(paths)
        session.run(sink)
        sink.close()
    return session, paths


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table without the columns that depend on the speed of the machine."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in MEASURED} for row in csv.DictReader(file)]


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two bundles differ, except for times."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differing(one[key], other[key], f"{path}/{key}") if not _is_time(f"{path}/{key}")]
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        return [found for index, pair in enumerate(zip(one, other, strict=True)) for found in differing(*pair, f"{path}/{index}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = (one.shape, one.dtype) == (other.shape, other.dtype) and one.numpy().tobytes() == other.numpy().tobytes()  # NaN equals NaN
    else:
        same = one == other or (one != one and other != other)
    return [] if same or _is_time(path) else [path]


def _is_time(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name in ("wall_t", "resumes", "tables") or "means/rollout_busy" in path or "means/learner_busy" in path or "_busy/" in path


def bundle(paths: RunPaths, index: int = 0, which: Literal["last", "best"] = "last") -> dict[str, Any]:
    """Return the last checkpoint of a Session, or the best checkpoint of a table."""
    return state.load(paths.checkpoint(index * (paths.policies if which == "last" else 1), which))
