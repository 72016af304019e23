"""Tests of engines: how the Sessions of a trial run, and how many run at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from slm_lab.agent.torch_settings import cpu_name, resolve_matmul_library
from slm_lab.experiment import plan
from slm_lab.experiment.events import CheckpointWritten, Event, Progress, Row, SessionEnded
from slm_lab.experiment.execute.executor import Context, Resources
from slm_lab.experiment.files.paths import RunPaths, new_run
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.experiment.run import sessions, trial
from slm_lab.experiment.run.engine import ENGINES, choose_engine, failures
from slm_lab.experiment.run.sessions import SessionsJob
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.session.session_process import SessionTask
from slm_lab.experiment.training.resolve import complete_spec
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.spec import Spec
from slm_lab.testing import FakeExecutor
from tests.experiment.commands import rows

MakeSpec = Callable[..., Spec]
SAMPLER = {"num_workers": 3, "num_envs_per_worker": 2}


@pytest.mark.parametrize(
    ("meta", "name"),
    [({}, "inline"), ({"max_session": 2}, "processes"), ({"distributed": "synced"}, "processes"), ({"sampler": SAMPLER}, "inline")],
)
def test_which_engine_runs_a_spec(meta: dict[str, object], name: str, make_spec: MakeSpec) -> None:
    assert choose_engine(make_spec(meta=meta)) == name
    assert choose_engine(make_spec(meta=meta), Plan(cluster="auto")) == "ray"


def test_engines_agree(make_spec: MakeSpec, tmp_path: Path) -> None:
    """Engines must agree in the rows, in the emitted events (which contain no rows), and in how the Session ended."""
    tables, kinds = {}, {}
    for name in ("inline", "processes"):
        run = ENGINES[name]
        events: list[Event] = []
        opened: list[Mapping[str, str | int]] = []
        paths = new_run(tmp_path / name, "small")

        def open_run(choices: Mapping[str, str | int], paths: RunPaths = paths, opened: list[Mapping[str, str | int]] = opened) -> RunPaths:
            opened.append(choices)
            return paths

        ends = run(SessionsJob(make_spec(), Plan(), 0, open_run, events.append, Stop()))
        assert ends == [SessionEnded(0, "done")]
        assert opened == [
            {
                "backend": "native",
                "matmul": resolve_matmul_library("auto"),
                "threads": 1,
                "cpu": cpu_name(),
                "eval_episodes": 0,
                "time_limit": 500,
            }
        ]
        assert events[-1] == ends[0]
        assert not [event for event in events if isinstance(event, Row)]
        tables[name] = rows(paths.session_df(0))
        kinds[name] = [event for event in events if isinstance(event, CheckpointWritten)]
        assert [event.frame for event in events if isinstance(event, Progress) and event.row is not None] == [252, 500, 752, 1000]
        assert "begins: index 0" in paths.session_log(0).read_text()
    assert tables["inline"] == tables["processes"]
    assert kinds["inline"] == kinds["processes"] == [CheckpointWritten(0, 1000)]


def test_a_continued_session_whose_process_dies_before_it_begins_is_continued_by_the_next(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster, a Session with a separate net is restarted; the new process must continue the run and not start from frame 0."""
    before, seen = RunPaths(tmp_path, "small"), list[RunPaths | None]()

    def target(context: Context, task: SessionTask) -> None:
        seen.append(task.resumed)
        if context.restart:  # the first process ends without a message
            context.send("ready", {})
            context.receive()
            context.send("event", SessionEnded(0, "done"))

    class Host:
        executor, concurrent, resources, restarts = FakeExecutor(), 1, Resources(), True

        def task(self, index: int) -> SessionTask:
            return SessionTask(make_spec(), index, 0, Plan(), None, resumed=before)

        def poll(self, paths: RunPaths | None) -> None: ...

    monkeypatch.setattr(sessions, "run_session", target)
    job = SessionsJob(make_spec(), Plan(), 0, lambda choices: before, lambda event: None, Stop(), resumed=before)
    assert sessions.Sessions(job, Host()).run() == [SessionEnded(0, "done")]
    assert seen == [before, before]


def test_a_further_engine_is_a_line_in_the_table(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is a function that opens the run, emits events and returns how each Session ended."""

    def one_after_the_other(job: SessionsJob) -> list[SessionEnded]:
        from slm_lab.experiment.files.sink import LocalSink

        ends, paths = [], None
        for index in range(job.spec.meta.max_session):
            session = Session(job.spec, index, job.plan, trial=job.trial, context=SessionContext(job.stop)).build()
            paths = paths or job.open_run(session.parts.chosen_settings)
            session.run(LocalSink(paths, job.trial, job.emit))
            ends.append(SessionEnded(index, "done"))
        return ends

    monkeypatch.setitem(ENGINES, "in turns", one_after_the_other)
    monkeypatch.setattr(trial, "choose_engine", lambda *spec: "in turns")
    made = Trial(make_spec(meta={"max_session": 2}), tmp_path)
    assert made.run()["sessions"] == 2
    assert made.paths.table_numbers() == [0, 1]


def test_failures_are_those_that_failed() -> None:
    assert failures([SessionEnded(0, "done"), SessionEnded(3, "failed", "why"), SessionEnded(1, "stopped")]) == {3: "why"}


@pytest.mark.parametrize(
    ("cores", "jobs", "meta", "concurrent_sessions"),
    [
        (4, None, {"max_session": 10}, 4),
        (4, None, {"max_session": 3}, 3),
        (1, None, {"max_session": 3}, 1),
        (4, 7, {"max_session": 10}, 7),
        (1, 1, {"max_session": 5, "distributed": "shared"}, 5),
        (8, None, {"max_session": 4, "sampler": SAMPLER}, 2),
        (2, None, {"max_session": 4, "sampler": SAMPLER}, 1),
        (8, None, {"max_session": 9, "sampler": SAMPLER | {"serial_mode": True}}, 8),
        (8, None, {"max_session": 9, "sampler": SAMPLER | {"inference": "central"}}, 1),
    ],
)
def test_sessions_at_a_time(
    cores: int, jobs: int | None, meta: dict[str, object], concurrent_sessions: int, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number depends on the cores within the container's limits; each Session counts with its workers and the inference process."""
    monkeypatch.setattr(plan, "cores", lambda: cores)
    assert Plan(jobs=jobs).concurrent_sessions(make_spec(meta=meta).meta) == concurrent_sessions


def test_no_more_processes_than_that(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a container count, instead of the machine's number of cores."""
    monkeypatch.setattr(plan, "cores", lambda: 2)
    running: list[int] = []
    begin = sessions.Sessions._begin

    def spy(self: sessions.Sessions) -> None:
        running.append(len(self.running))
        begin(self)

    monkeypatch.setattr(sessions.Sessions, "_begin", spy)
    assert Trial(make_spec(meta={"max_session": 5}, env={"max_frame": 200}), tmp_path).run()["sessions"] == 5
    assert max(running) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("module", ["trial", "engine", "search.search", "study.study"])
def test_processes_that_only_start_others_import_no_torch(module: str) -> None:
    """Sessions and the build check of a search run in other processes, so the parent need not spend 2 s on importing torch."""
    script = f"import sys, slm_lab.experiment.run.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("frames", "given", "expected"), [(60_000, None, 1200), (1000, None, 20), (10**6, None, 10_000), (60_000, 5000, 5000)]
)
def test_a_run_has_50_rows_unless_the_spec_says_otherwise(make_spec: MakeSpec, frames: int, given: int | None, expected: int) -> None:
    """The default log_frequency also applies to a trial of a search, whose spec is complete except for this key."""
    body = dump_spec(make_spec(env={"max_frame": frames}))["small"]
    body["meta"] = {} if given is None else {"log_frequency": given}
    assert complete_spec(load_spec({"small": body}, "small")).meta.log_frequency == expected
    search = {"agent": {"algorithm": {"gamma__uniform": [0.9, 0.99]}}}
    space = SearchSpace(load_spec({"small": {**body, "search": search}}, "small"))
    trial = complete_spec(space.trial_spec({space.keys[0]: 0.95}))
    assert trial.meta.log_frequency == expected
    assert load_spec(dump_spec(trial), "small") == trial, "the saved spec names it"
    if frames == 1000:
        assert len(Session(trial).run().rows) == 50
