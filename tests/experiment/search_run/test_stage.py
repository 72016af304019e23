"""Tests of a search stage without Ray: which trials it starts, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slm_lab.experiment.execute.executor import Event, TaskDied
from slm_lab.experiment.files.search_state import TrialState
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.run.search.schedule import Decision, Exploit
from slm_lab.experiment.run.search.trial_task import Update
from slm_lab.spec.report import Problem, SpecError
from tests.experiment.search_run.conftest import failing, finishing

MakeStage = Callable[..., Any]


def statuses(trials: list[TrialState]) -> list[str]:
    return [trial.status for trial in trials]


def test_as_many_trials_run_as_were_asked_for_none_twice(make_stage: MakeStage) -> None:
    saved: list[list[str]] = []
    trials: list[TrialState] = []
    stage, executor, printed = make_stage(
        lambda trial, start: finishing(trial), 5, trials=trials, save=lambda: saved.append(statuses(trials))
    )
    stage.run(Stop())
    assert sorted(executor.started) == [0, 1, 2, 3, 4]
    assert statuses(trials) == ["finished"] * 5
    assert saved[0] == ["running"]  # saved before the first trial writes a file
    assert "trial 4  final_strength 4" in printed.getvalue()


def test_a_continued_search_runs_what_was_running_and_what_is_missing(make_stage: MakeStage) -> None:
    trials = [TrialState(0, {}, "finished"), TrialState(1, {}, "running"), TrialState(2, {}, "stopped"), TrialState(3, {}, "waiting")]
    stage, executor, _ = make_stage(lambda trial, start: finishing(trial), 5, trials=trials)
    stage.run(Stop())
    assert sorted(executor.started) == [1, 3, 4]
    assert statuses(trials) == ["finished", "finished", "stopped", "finished", "finished"]


def test_a_trial_that_fails_is_retried_once_then_marked(make_stage: MakeStage) -> None:
    ended: list[tuple[int, str]] = []

    def script(trial: int, start: int) -> list[Update]:
        return failing() if trial == 1 or (trial == 2 and start == 1) else finishing(trial)

    stage, executor, printed = make_stage(script, 4, on_end=lambda trial: ended.append((trial.trial, trial.status)))
    stage.run(Stop())
    assert [executor.started.count(trial) for trial in range(4)] == [1, 2, 2, 1]
    assert sorted(ended) == [(0, "finished"), (1, "failed"), (2, "finished"), (3, "finished")]
    assert "trial 1 failed: broken" in printed.getvalue()


def test_an_invalid_combination_is_not_retried(make_stage: MakeStage) -> None:
    def job(trial: TrialState, slot: int) -> Any:
        raise SpecError("small", [Problem("agent.x", "does not fit")])

    stage, executor, _ = make_stage(lambda trial, start: failing("SpecError", retry=False), 1)
    stage.run(Stop())
    assert executor.started == [0]
    stage, executor, _ = make_stage(lambda trial, start: [], 2, make_job=job)
    stage.run(Stop())
    assert executor.started == []
    assert statuses(stage.trials) == ["failed", "failed"]
    assert "does not fit" in stage.trials[0].cause


def test_a_stop_lets_running_trials_continue_later(make_stage: MakeStage) -> None:
    stop = Stop()

    def report(trial: TrialState, frame: int, metric: float) -> None:
        stop.requested = stop.requested or trial.trial == 2

    stage, executor, _ = make_stage(lambda trial, start: finishing(trial), 6, on_report=report)
    stage.run(stop)
    assert executor.playing == []
    assert statuses(stage.trials) == ["finished", "finished", "running", "running"]


def test_a_proposer_may_end_early(make_stage: MakeStage) -> None:
    stage, executor, _ = make_stage(lambda trial, start: finishing(trial), 9, propose=lambda trial: {"x": 1} if trial < 3 else None)
    stage.run(Stop())
    assert executor.started == [0, 1, 2]
    assert stage.target == 3


class Decisions:
    """A scheduler that stops or replaces trial 1 at its first report."""

    def __init__(self, decision: Decision) -> None:
        self.decision: Decision | None = decision
        self.completed: list[int] = []

    def decide(self, trial: TrialState, frame: int, metric: float) -> Decision | None:
        if trial.trial != 1:
            return None
        decision, self.decision = self.decision, None
        return decision

    def record_end(self, trial: TrialState) -> None:
        self.completed.append(trial.trial)


def test_a_trial_that_the_scheduler_stops_counts_as_done(make_stage: MakeStage) -> None:
    scheduler = Decisions("stop")
    stage, _, printed = make_stage(lambda trial, start: finishing(trial), 3, scheduler=scheduler)
    stage.run(Stop())
    assert statuses(stage.trials) == ["finished", "stopped", "finished"]
    assert sorted(scheduler.completed) == [0, 1, 2]
    assert "trial 1 stopped at frame" in printed.getvalue()


def test_a_trial_takes_over_the_state_of_another(make_stage: MakeStage) -> None:
    jobs: list[tuple[int, int | None, dict[str, Any]]] = []

    def script(trial: int, start: int) -> list[Update]:
        return [Update(20, ((20, 1.0),)), Update(30), Update(40), *finishing(trial)]

    stage, _, _ = make_stage(script, 2, scheduler=Decisions(Exploit(0, {"x": 7})))
    make_job = stage.make_job

    def job(trial: TrialState, slot: int) -> Any:
        jobs.append((trial.trial, trial.take_over, dict(trial.values)))
        return make_job(trial, slot)

    stage.make_job = job
    stage.run(Stop())
    assert jobs == [(0, None, {"x": 0}), (1, None, {"x": 1}), (1, 0, {"x": 7})]
    assert statuses(stage.trials) == ["finished", "finished"]
    assert stage.trials[1].take_over is None


def test_a_trial_whose_process_dies_is_retried_and_one_whose_node_is_lost_continues(make_stage: MakeStage) -> None:
    stage, executor, printed = make_stage(lambda trial, start: finishing(trial), 3)
    ends = {0: TaskDied(None, "killed by SIGKILL", "printed"), 1: TaskDied(None, "its node is gone", "", lost=True)}
    events = executor.events

    def dying(seconds: float) -> Iterator[Event]:
        for task in list(executor.playing):
            if (died := ends.pop(task.job.trial, None)) is not None:
                executor.playing.remove(task)
                yield died._replace(task=task)
        yield from events(seconds)

    executor.events = dying
    stage.run(Stop())
    assert statuses(stage.trials) == ["finished"] * 3
    assert [trial.failures for trial in stage.trials] == [1, 0, 0]
    assert [executor.started.count(trial) for trial in range(3)] == [2, 2, 1]
    assert "trial 0 failed and is retried: printed" in printed.getvalue()
    assert "trial 1: its node is gone; the trial continues on another node" in printed.getvalue()


@pytest.mark.parametrize("concurrent", [1, 2])
def test_each_running_trial_has_a_slot_of_its_own(make_stage: MakeStage, concurrent: int) -> None:
    """The number of running trials never exceeds the concurrency, and each has a separate slot."""
    slots: dict[int, int] = {}
    stage, executor, _ = make_stage(lambda trial, start: finishing(trial), 5)
    stage.concurrent = concurrent
    make_job = stage.make_job

    def job(trial: TrialState, slot: int) -> Any:
        assert len(executor.playing) < concurrent
        assert slot not in [slots[task.job.trial] for task in executor.playing]
        slots[trial.trial] = slot
        return make_job(trial, slot)

    stage.make_job = job
    stage.run(Stop())
    assert sorted(slots) == sorted(executor.started) == [0, 1, 2, 3, 4]
    assert {*slots.values()} == {*range(concurrent)}
