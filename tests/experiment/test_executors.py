"""Tests of the contract that every executor must fulfil."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slm_lab.experiment.execute.executor import Context, TaskFailed, run_task
from slm_lab.experiment.execute.local.fork_server import server_in_use
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.execute.ray.ray_executor import RayExecutor
from slm_lab.experiment.plan import Stop, UserError
from slm_lab.lib.process import temporary_environment
from slm_lab.testing import ExecutorContract, FakeExecutor
from tests.experiment.cluster.conftest import RAY, Nodes


class TestLocalExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self) -> Iterator[LocalExecutor]:
        with server_in_use(), LocalExecutor(stall_notice=None) as executor:
            yield executor


class TestFakeExecutor(ExecutorContract):
    prints = False

    @pytest.fixture
    def executor(self) -> FakeExecutor:
        return FakeExecutor()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start a Ray cluster with two cores on this machine."""
    pytest.importorskip("ray")
    from slm_lab.experiment.execute.ray.connect import connect_cluster

    with temporary_environment(RAY):
        nodes = Nodes(1, 2)
        try:
            with connect_cluster(nodes.address, None):
                yield
        finally:
            nodes.close()


def test_an_order_to_end_requests_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Ray, the order to end may arrive before the call of `stop`."""
    pytest.importorskip("ray")
    monkeypatch.setattr(sys, "path", [*sys.path])
    from slm_lab.experiment.execute.ray.connect import pack
    from slm_lab.experiment.execute.ray.task_actor import Limits, TaskActor

    actor = TaskActor("task", 0, Path.cwd(), Limits(None, None))
    actor.receive_orders(0, pack("work"))
    assert not actor.context.stop.requested
    actor.receive_orders(1, pack(None))
    assert actor.context.stop.requested


class TestRayExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self, cluster: None) -> Iterator[RayExecutor]:
        with RayExecutor(stall_notice=None) as executor:
            yield executor


def answer(context: Context, kind: str) -> None:
    match kind:
        case "messages":
            context.send("one", 1)
            context.send("two", 2)
        case "user_error":
            context.send("user_error", UserError("yours"))
        case "failed":
            raise ValueError("ours")
        case "blocked":
            context.receive()


def test_a_single_task_returns_its_messages_or_raises_its_error() -> None:
    executor = FakeExecutor()
    messages = run_task(executor, "one", answer, "messages", stop=Stop())
    assert [(message.kind, message.content) for message in messages] == [("one", (1,)), ("two", (2,))]
    with pytest.raises(UserError, match="yours"):
        run_task(executor, "one", answer, "user_error", stop=Stop())
    with pytest.raises(TaskFailed, match=r"one failed: .*ours"):
        run_task(executor, "one", answer, "failed", stop=Stop())
    stop = Stop()
    stop.requested = True
    with pytest.raises(KeyboardInterrupt):
        run_task(executor, "one", answer, "blocked", stop=stop)
    assert executor.tasks == []
