"""Runs that are killed at random moments and resumed, and the checks of the finished runs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_lab.experiment.files.paths import RunPaths, runs_of_spec
from tests.experiment.commands import frame_of
from tests.resume.launcher import Launcher, Running
from tests.resume.runs import bundle, differing, rows

NET = {"type": "MLPNet", "hid_layers": [16], "hid_layers_activation": "tanh"}
_PPO = {"algorithm": {"time_horizon": 16, "minibatch_size": 32}, "net": NET}
_ROUNDS = {"async_rl": False, "num_workers": 2, "num_envs_per_worker": 2}
_PBT = {"num_policies": 2, "pbt": {"period": 600, "start": 600}}


@dataclass(frozen=True)
class Case:
    """Spec whose runs are killed.

    Attributes:
        sections: sections of the spec's body: env, algorithm, net, memory, policies, meta.
        exact: each resume must report that it is exact.
    """

    algorithm: str
    env: str
    frames: int
    sections: dict[str, Any]
    exact: bool = True

    def body(self) -> dict[str, Any]:
        """Return the body of the spec, which the caller may change."""
        parts = self.sections
        agent: dict[str, Any] = {"name": self.algorithm, "algorithm": {"name": self.algorithm, **parts.get("algorithm", {})}}
        agent |= {key: parts[key] for key in ("memory", "net", "policies") if key in parts}
        meta = {"random_seed": 3, "log_frequency": 100, "save_interval": 0.05, **parts.get("meta", {})}
        return deepcopy({"agent": agent, "env": {"name": self.env, "max_frame": self.frames, **parts.get("env", {})}, "meta": meta})


_REPLAY = {"name": "Replay", "batch_size": 16, "max_size": 5000}
CASES: dict[str, Case] = {
    "PPO": Case("PPO", "CartPole-v1", 8000, {**_PPO, "env": {"num_envs": 4}, "meta": {"rigorous_eval": 2, "eval_frequency": 1000}}),
    "A2C": Case("ActorCritic", "CartPole-v1", 6000, {"net": NET, "env": {"num_envs": 4, "normalize_obs": True}}),
    "DQN": Case("DQN", "CartPole-v1", 2000, {"net": NET, "memory": _REPLAY, "meta": {"save_replay": True}}),
    "SAC": Case(
        "SoftActorCritic",
        "Pendulum-v1",
        1200,
        {"net": {"type": "MLPNet", "hid_layers": [16]}, "algorithm": {"training_start_step": 200}, "meta": {"save_replay": True}},
    ),
    "SIL": Case("SIL", "CartPole-v1", 3000, {"net": NET, "env": {"num_envs": 2}, "meta": {"save_replay": True}}),
    "several Sessions": Case("PPO", "CartPole-v1", 6000, {**_PPO, "env": {"num_envs": 4}, "meta": {"max_session": 3}}),
    "shared": Case(
        "ActorCritic",
        "CartPole-v1",
        12000,
        {"net": NET, "env": {"num_envs": 4}, "meta": {"max_session": 2, "distributed": "shared"}},
        exact=False,
    ),
    "synced with one worker": Case(
        "ActorCritic", "CartPole-v1", 6000, {"net": NET, "env": {"num_envs": 4}, "meta": {"max_session": 1, "distributed": "synced"}}
    ),
    "sampler, serial": Case("PPO", "CartPole-v1", 6400, {**_PPO, "meta": {"sampler": {**_ROUNDS, "serial_mode": True}}}),
    "sampler in turns": Case("PPO", "CartPole-v1", 6400, {**_PPO, "meta": {"sampler": _ROUNDS}}),
    "sampler, asynchronous": Case("PPO", "CartPole-v1", 20000, {**_PPO, "meta": {"sampler": {**_ROUNDS, "async_rl": True}}}, exact=False),
    "agents with different spaces": Case(
        "PPO",
        "pettingzoo:tests.env.zoo:Unequal",
        3000,
        {
            **_PPO,
            "policies": {"outer": ["a", "c"], "inner": ["b"]},
            "env": {"num_envs": 4, "continuous": True, "comes": 2, "normalize_obs": True, "normalize_reward": True},
            "meta": {"rigorous_eval": 2, "eval_frequency": 500},
        },
    ),
    "two policies with PBT": Case("PPO", "CartPole-v1", 4000, {**_PPO, "meta": {"sampler": {**_ROUNDS, **_PBT, "serial_mode": True}}}),
}
QUICK = ("PPO",)


class Killed:
    """Runs of a case that are killed and resumed, and one run that is not killed for comparison.

    Args: seed: seed of the moments of the kills, which a failing test prints.
    """

    def __init__(self, case: Case, launcher: Launcher, folder: Path, seed: int) -> None:
        self.case, self.launcher, self.folder, self.random = case, launcher, folder, random.Random(seed)
        folder.mkdir()
        (folder / "spec.json").write_text(json.dumps({"small": case.body()}))
        begin = time.monotonic()
        self.straight = self._trained("straight")
        self.seconds = time.monotonic() - begin
        check_complete(self.straight, case)

    def _trained(self, data: str) -> RunPaths:
        code, text = self.launcher.run(["spec.json", "small", "train", "--data-dir", data], self.folder)
        assert code == 0, text
        return RunPaths(runs_of_spec(self.folder / data, "small")[-1], "small")

    def chain(self, number: int, kills: int) -> int:
        """Kill and resume a run up to `kills` times, then finish and check it. Return the number of kills that ended a running process."""
        data, done = f"chain_{number}", 0
        told: list[str] = []
        for _ in range(kills):
            running = self.launcher.start(self._words(data), self.folder)
            how = self._kill(running, data)
            told.append(how)
            if running.wait() == 0:
                break
            assert running.status == -9, f"{told}\n{running.text}"
            done += 1
        code, text = self.launcher.run(self._words(data), self.folder)
        try:
            assert code == 0, text
            paths = self._paths(data)
            assert paths is not None
            check_complete(paths, self.case)
            exact = check_starts(paths, self.case)
            if exact:
                check_equal(self.straight, paths, self.case)
        except AssertionError as error:
            error.add_note(f"after these kills of {self.folder / data}: {told}; last output:\n{text}")
            raise
        return done

    def _words(self, data: str) -> list[str]:
        """Return the command that resumes the run if its first start has saved the spec, and else trains it."""
        paths = self._paths(data)
        begun = paths is not None and paths.spec.is_file()
        return ["train@latest" if begun else "spec.json", *([] if begun else ["small", "train"]), "--data-dir", data]

    def _paths(self, data: str) -> RunPaths | None:
        found = runs_of_spec(self.folder / data, "small")
        return RunPaths(found[-1], "small") if found else None

    def _kill(self, running: Running, data: str) -> str:
        """Kill the first process or all processes of a run, at a random moment or frame; return a description of the kill."""
        group, at_frame = self.random.random() < 0.5, self.random.random() < 0.5
        frames = self.case.frames // (self.case.sections.get("meta", {}).get("max_session", 1) if not self.case.exact else 1)
        frame, delay = self.random.randrange(1, frames), self.random.uniform(0.0, 1.2 * self.seconds)
        end = time.monotonic() + (60.0 if at_frame else delay)
        while running.poll() is None and time.monotonic() < end and not (at_frame and self._frame(data) >= frame):
            time.sleep(0.005)
        if at_frame:
            time.sleep(self.random.uniform(0.0, 0.05))
        if running.poll() is None:
            running.kill(group=group)
        return f"{'all' if group else 'first'} at {f'frame {frame}' if at_frame else f'{delay:.2f} s'}: exit {running.status}"

    def _frame(self, data: str) -> int:
        with suppress(OSError, ValueError, IndexError):
            return frame_of(self._paths(data), 0)
        return 0


def tables(paths: RunPaths, case: Case) -> Iterator[int]:
    """Yield the indices of the tables of a run."""
    meta = case.sections.get("meta", {})
    yield from range(meta.get("max_session", 1) * paths.policies)


def check_complete(paths: RunPaths, case: Case) -> None:
    """Check that each row on the grid of log_frequency exists once, that each line is complete, and that all Sessions have metrics."""
    body = json.loads(paths.spec.read_text())["small"]
    meta = body["meta"]
    sessions = meta["max_session"]
    limit = body["env"]["max_frame"] // (sessions if meta["distributed"] else 1)
    for table in tables(paths, case):
        path = paths.session_df(table)
        assert path.read_bytes().endswith(b"\n")
        check_frames([int(row["frame"]) for row in rows(path)], meta["log_frequency"], limit, str(path))
        assert all(None not in row and None not in row.values() for row in rows(path))
        if meta["rigorous_eval"]:
            check_frames([int(row["frame"]) for row in rows(paths.session_df(table, "eval"))], meta["eval_frequency"], limit, str(path))
    metrics = json.loads(paths.trial_metrics().read_text())
    assert (metrics["status"], metrics["sessions"], metrics.get("failed", 0)) == ("done", sessions, 0)
    assert metrics["frame"] >= limit
    for name in ("final_return", "final_strength", "max_strength", "sample_efficiency", "stability"):
        assert metrics[name] is not None
    assert list(paths.root.rglob(".*.tmp")) == [], "temporary files are overwritten or removed"


def check_frames(frames: list[int], every: int, limit: int, name: str) -> None:
    """Check that there is one row per `every` frames, at the first step that reaches a multiple of it, and one at the end."""
    grid = [frame // every for frame in frames]
    assert frames == sorted(set(frames)), f"{name}: rows repeat or go back: {frames}"
    assert frames[-1] >= limit, f"{name}: ends at {frames[-1]}"
    inner = grid if frames[-1] % every == 0 or grid[-1] != grid[-2] else grid[:-1]
    assert inner == list(range(1, inner[-1] + 1)), f"{name}: rows are missing: {frames}"


def check_starts(paths: RunPaths, case: Case) -> bool:
    """Check that the recorded starts are exact if the case requires it; return whether all Sessions continued exactly."""
    history = json.loads(paths.spec.read_text())["small"]["meta"]["run"]
    grades = [start.get("exact", start.get("status") in ("finished", "new")) for one in history[1:] for start in one["continues"].values()]
    if case.exact:
        assert all(grades), f"not exact: {[one['continues'] for one in history[1:]]}"
    return all(grades) and case.exact


def check_equal(one: RunPaths, other: RunPaths, case: Case) -> None:
    """Check that two runs have the same rows and the same final state."""
    for table in tables(one, case):
        for mode in ("train", "eval"):
            assert rows(one.session_df(table, mode)) == rows(other.session_df(table, mode))
    for session in range(case.sections.get("meta", {}).get("max_session", 1)):
        assert differing(_without_history(bundle(one, session)), _without_history(bundle(other, session))) == []
        assert rows(one.pbt(session)) == rows(other.pbt(session))
    for table in tables(one, case):
        assert differing(bundle(one, table, "best"), bundle(other, table, "best")) == []


def _without_history(saved: dict[str, Any]) -> dict[str, Any]:
    for body in saved["spec"].values():
        body["meta"].pop("run", None)
    return saved
