"""Handmade run folders as training leaves them, and a server that shows them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files.lock import RunLock
from slm_lab.experiment.files.paths import RunPaths, StudyPaths
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.spec.load.loader import dump_spec, load_spec

COLUMNS = ("frame", "wall_t", "fps", "opt_step", "total_reward", "current_return", "current_return_se", "current_epi", "entropy")
HOSTILE = '<img src=x onerror="window.hacked=1">'
EVERY = 100
"""Number of frames between two rows."""


@cache
def _spec() -> str:
    return json.dumps(dump_spec(load_spec("demo.json", "ppo_cartpole"))["ppo_cartpole"])


def saved_spec(sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a saved spec of PPO on CartPole with other values at some paths."""
    body: dict[str, Any] = json.loads(_spec())
    for path, value in {"env.max_frame": 1000, "meta.max_session": 2, "meta.random_seed": 0, **sets}.items():
        *parents, key = path.split(".")
        section = body
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return body


def stamp(index: int) -> str:
    return f"{datetime(2026, 1, 1) + timedelta(minutes=index):%Y_%m_%d_%H%M%S}"


def row_text(frame: int, value: float, fps: float = 100.0) -> str:
    return f"{frame},{frame / 100},{fps},{frame // 10},{value},{value},1.5,20,{0.7 - frame / 1e5}\n"


def _tenth(s: int, frame: int, add: float = 0.0) -> float:
    return add + frame / 10


def make_run(
    data: Path,
    index: int = 0,
    name: str = "ppo_cartpole",
    rows: int = 10,
    value: Callable[[int, int], float] = _tenth,
    *,
    ended: bool = True,
    **sets: Any,
) -> RunPaths:
    """Make a run with `rows` rows per Session; `value(session, frame)` is the return. `sets`: path__to__key=value."""
    paths = RunPaths(data / f"{name}_{stamp(index)}", name)
    paths.root.mkdir(parents=True)
    paths.make_dirs()
    start = {"began": f"{datetime(2026, 1, 1) + timedelta(minutes=index):%Y-%m-%dT%H:%M:%S+00:00}", "mode": "train"}
    body = saved_spec({"meta.run": [start]} | {key.replace("__", "."): one for key, one in sets.items()})
    for file in (paths.spec, paths.trial_spec()):
        file.write_text(json.dumps({name: body}))
    paths.lock.write_bytes(b"")
    sessions = body["meta"]["max_session"]
    for s in range(sessions):
        frames = range(EVERY, EVERY * (rows + 1), EVERY)
        paths.session_df(s).write_text(",".join(COLUMNS) + "\n" + "".join(row_text(frame, value(s, frame)) for frame in frames))
        paths.session_log(s).write_text(f"begins: index {s}\n")
    if ended:
        last = [value(s, EVERY * rows) for s in range(sessions)]
        content = {"current_return": sum(last) / len(last), "current_return_se": 2.5, "frame": EVERY * rows, "sessions": sessions}
        paths.trial_metrics().write_text(json.dumps(content | {"status": "done"}))
    return paths


def append(paths: RunPaths, frame: int, value: float, fps: float = 100.0, s: int = 0) -> None:
    with paths.session_df(s).open("a") as file:
        file.write(row_text(frame, value, fps))


def make_search(data: Path, metrics: tuple[float, ...] = (10.0, 40.0, 30.0), index: int = 50) -> RunPaths:
    """Make a finished search over lr and hid_layers; trial 1 is the best."""
    searched = {"agent": {"net": {"optim_spec": {"lr__loguniform": [1e-4, 1e-2]}, "hid_layers__choice": [[16], [64, 64]]}}}
    paths = make_run(data, index, "search", meta__max_session=1, meta__max_trial=len(metrics), search=searched)
    state = SearchState("current_return", 20.0, False)
    for trial, metric in enumerate(metrics):
        values = {"agent.net.optim_spec.lr": 10.0 ** -(2 + trial), "agent.net.hid_layers": [16] if trial % 2 else [64, 64]}
        state.trials.append(TrialState(trial, values, "finished", frame=1000, seconds=2.0, metric=metric))
        paths.trial_spec(trial).write_text(paths.spec.read_text())
        paths.session_df(0, "train", trial).write_text(",".join(COLUMNS) + "\n" + row_text(500, metric / 2) + row_text(1000, metric))
        paths.trial_log(trial).write_text(f"trial {trial}\n")
    state.exhausted = True
    state.save(paths.search_state)
    return paths


def make_study(data: Path, runs: int = 2, index: int = 70) -> StudyPaths:
    """Make a study of two entries with two seeds each, of which some runs have ended."""
    paths = StudyPaths(data / f"tiny_{stamp(index)}", "tiny")
    paths.results.mkdir(parents=True)
    entries = [{"spec": "base", "label": "A"}, {"spec": "base", "label": "B"}]
    paths.study.write_text(json.dumps({"tiny": {"study": {"entries": entries, "random_seed": [1, 2]}}, "$study": {}}))
    for number in range(runs):
        entry, seed = "ABC"[number // 2], 1 + number % 2
        folder = paths.runs / f"{entry}_{seed}"
        make_run(folder, index + 1, value=partial(_tenth, add=10.0 * number))
        identity = {"entry": entry, "env": "CartPole-v1", "random_seed": seed}
        (folder / "study_run.json").write_text(json.dumps(identity))
        (folder / "log.txt").write_text("of the study\n")
        (paths.results / f"{entry}_{seed}.json").write_text("{}")
    return paths


@contextmanager
def training(paths: RunPaths) -> Iterator[None]:
    """Hold the lock of a run, as a process that trains it does."""
    lock = RunLock(paths.lock)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def serving(data: Path) -> Iterator[str]:
    """Serve a data folder from a thread, and yield the address."""
    uvicorn = pytest.importorskip("uvicorn")
    from slm_lab.experiment.view.folders import DataFolder
    from slm_lab.experiment.view.index import Index
    from slm_lab.experiment.view.serve import _bind
    from slm_lab.experiment.view.server import make_app

    opened = _bind(None)
    port = opened.getsockname()[1]
    app = make_app(Index(DataFolder(data)), port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
