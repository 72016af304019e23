"""Tests of the pool of worker processes: the rollouts it requests, and restarts of dead workers. The workers are fake, without envs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from slm_lab.experiment.collect.workers import task_pool as child_module
from slm_lab.experiment.collect.workers import task_pool as pool_module
from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset
from slm_lab.experiment.collect.workers.link import CONNECT, LOAD, MemoryEndpoint, SharedMemoryLink
from slm_lab.experiment.collect.workers.shared import WorkerConfig
from slm_lab.experiment.collect.workers.task_pool import TaskPool
from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.execute.local.user_code import WorkerFailed
from slm_lab.experiment.plan import Interrupted, Stop
from slm_lab.experiment.training.experience import no_beat
from slm_lab.spec.models.spec import Spec
from slm_lab.testing import FakeExecutor
from tests.experiment.commands import PATIENCE, until
from tests.experiment.workers import puppets
from tests.experiment.workers.conftest import worker_spec
from tests.experiment.workers.puppets import AT_START, INFO, PuppetArrays
from tests.experiment.workers.test_dataset import columns_of, make_builder


def parts(spec: Spec) -> tuple[WorkerConfig, LocalExecutor, SharedMemoryLink]:
    """Return the first arguments of a pool of processes."""
    return WorkerConfig(spec, None), LocalExecutor(), SharedMemoryLink()  # type: ignore[arg-type]


class Pool(TaskPool):
    """A started pool of fake workers."""

    def __init__(self, rounds: int | None, columns: int, spare: int, max_restart: int, deaths: dict[tuple[int, int], int]) -> None:
        spec = worker_spec(sampler={"async_rl": rounds is None}, meta={"max_restart": max_restart})
        super().__init__(*parts(spec), Stop(), no_beat)
        self.wait_for_env_info()
        self.puppets = PuppetArrays()
        for key, rollout in deaths.items():
            self.puppets.deaths_WR[key] = rollout
        assert self.store is not None
        self.store.attach({"puppets": self.puppets})
        arrays: Any = SimpleNamespace(weights=[SimpleNamespace(acting_state=[])])
        self.connect(arrays, RolloutAssembler(self.puppets.slots, [make_builder(columns, spare)], rounds), INFO)
        self.start()

    @property
    def filled(self) -> list[int]:
        """Return the number of rollouts of each worker so far."""
        return [int(count) for count in self.puppets.filled_W]

    def wait_for_rollouts(self, count: int) -> None:
        """Wait for `count` rollouts, then check that no further one follows within 0.2 s."""
        end = time.monotonic() + PATIENCE
        while sum(self.filled) < count:
            assert time.monotonic() < end, self.filled
            time.sleep(0.01)
        time.sleep(0.2)
        assert sum(self.filled) == count

    def dataset(self) -> Dataset:
        end = time.monotonic() + PATIENCE
        while (item := self.next_dataset()) is None:
            assert time.monotonic() < end, "no dataset"
        return item[1]


MakePool = Callable[..., Pool]


def train(pool: Pool) -> None:
    for _ in range(9):
        pool.release(0, pool.dataset())


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    """Return make_pool(rounds, columns, spare, max_restart, deaths): two fake workers; deaths: {(worker, restart): rollout}."""
    opened: list[Pool] = []
    monkeypatch.setattr(child_module, "run_worker", puppets.run_worker)

    def make(
        rounds: int | None, columns: int, spare: int = 0, max_restart: int = 1, deaths: dict[tuple[int, int], int] | None = None
    ) -> Pool:
        opened.append(Pool(rounds, columns, spare, max_restart, deaths or {}))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
        assert not one.thread.is_alive()
        assert not any(worker.running for worker in one.workers)


def test_back_pressure(make_pool: MakePool) -> None:
    """Workers stop when datasets and slots are full, and continue when the learner returns a dataset."""
    pool = make_pool(None, 6, spare=2)
    full = 3 * 6 // 3  # three datasets of two slots each
    pool.wait_for_rollouts(full)
    dataset = pool.dataset()
    pool.wait_for_rollouts(full)  # taken, but not yet returned
    pool.release(0, dataset)
    pool.wait_for_rollouts(full + 2)


def test_in_turns_workers_wait_for_the_learner(make_pool: MakePool) -> None:
    pool = make_pool(2, 12)
    for number in range(3):
        dataset = pool.dataset()
        time.sleep(0.05)
        assert pool.filled == [2 * (number + 1)] * 2
        first, second = 2 * number + 1, 2 * number + 2
        expected = [first] * 3 + [10 + first] * 3 + [second] * 3 + [10 + second] * 3
        assert [column // 10 for column in columns_of(dataset)] == expected
        pool.release(0, dataset)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rollout", range(5))
def test_the_rollouts_of_a_dead_worker_are_collected_again(rollout: int, make_pool: MakePool, caplog: Any) -> None:
    """Whether a worker dies during a round or before it is ready, every round is complete and has no partly written rollout."""
    pool = make_pool(2, 12, deaths={(1, 0): rollout})
    for _ in range(3):
        dataset = pool.dataset()
        numbers = [column // 10 for column in columns_of(dataset)]
        assert 99 not in numbers
        assert [number // 10 for number in numbers] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
        pool.release(0, dataset)
    assert [worker.task.restart for worker in pool.workers] == [0, 1]
    assert pool.restarts == 1
    (message,) = (message for message in caplog.messages if "no progress" not in message)  # such a notice appears on a busy machine
    assert message == "rollout worker 1 killed by SIGKILL (often: out of memory); restarting it (1 of 1)"


@pytest.mark.parametrize("rollouts", [(2, 2), (AT_START, AT_START)])
def test_a_worker_that_dies_too_often(rollouts: tuple[int, int], make_pool: MakePool) -> None:
    deaths = {(1, restart): rollout for restart, rollout in enumerate(rollouts)}
    with pytest.raises(WorkerFailed) as failed:
        train(make_pool(1, 6, deaths=deaths))
    first, *printed = str(failed.value).splitlines()
    assert first == "rollout worker 1 killed by SIGKILL (often: out of memory) after 1 restart (meta.max_restart)"
    assert printed == ["the last line"]


def test_a_process_that_cannot_be_started_again(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(1, 6, deaths={(1, 0): 2})

    def refuse(*args: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pool.executor, "restart", refuse)
    with pytest.raises(WorkerFailed, match=r"rollout worker 1 killed by .*; a new process could not be started: Cannot allocate memory"):
        train(pool)


def test_a_continued_run_loads_states_and_restarted_workers_draw_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarted workers of a continued run use random streams that no earlier start used; the loss of a node does not count as a death."""
    orders: dict[tuple[int, int], Any] = {}

    def record(context: Context, config: WorkerConfig, link: MemoryEndpoint) -> None:
        context.send("built", INFO)
        assert context.receive() == CONNECT
        context.send("ready")
        orders[config.index, config.restart] = context.receive()
        while context.receive() is not None:
            pass

    monkeypatch.setattr(child_module, "run_worker", record)
    executor, spec = FakeExecutor(), worker_spec(meta={"max_restart": 1})
    pool = TaskPool(WorkerConfig(spec, None), executor, SharedMemoryLink(), Stop(), no_beat)  # type: ignore[arg-type]
    pool.wait_for_env_info()
    arrays: Any = SimpleNamespace(weights=[SimpleNamespace(acting_state=[])])
    pool.connect(arrays, RolloutAssembler(PuppetArrays().slots, [make_builder(6, 0)], 1), INFO)
    pool.start(["first", "second"], resumes=2)
    for restart in (1, 2, 3):
        until(lambda: pool.workers[1].ready and (1, restart - 1) in orders)  # noqa: B023
        executor.report_death(next(task for task in executor.tasks if task.name == "rollout worker 1"), lost=restart != 2)
    until(lambda: (1, 3) in orders)
    pool.close()
    assert orders.pop((0, 0)) == (LOAD, "first", 2)
    assert orders.pop((1, 0)) == (LOAD, "second", 2)
    assert orders == dict.fromkeys([(1, 1), (1, 2), (1, 3)], (LOAD, None, 2))
    assert pool.workers[1].deaths == 1


@pytest.mark.parametrize("stage", ["info", "start"])
def test_a_stop_while_workers_begin(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop request ends the start of the pool without waiting for envs that take long to build."""
    monkeypatch.setattr(child_module, "run_worker", puppets.sleep)
    monkeypatch.setattr(pool_module, "_CLOSE_SECONDS", 0.2)
    stop = Stop()
    pool = TaskPool(*parts(worker_spec()), stop, no_beat)
    pids = [worker.task.pid for worker in pool.workers]
    threading.Timer(0.3, lambda: setattr(stop, "requested", True)).start()
    begin = time.monotonic()
    if stage == "info":
        with pytest.raises(Interrupted):
            pool.wait_for_env_info()
    else:
        pool.start()
        assert not pool.thread.is_alive()
    assert time.monotonic() < begin + 2
    pool.close()
    assert time.monotonic() < begin + 3
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
