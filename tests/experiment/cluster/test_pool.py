"""Tests of a cluster's pool of rollout workers; the workers run in threads of this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.cli.entry import main
from slm_lab.experiment.collect.workers import link as worker_task
from slm_lab.experiment.collect.workers import worker_pool as pool
from slm_lab.experiment.collect.workers.link import MessageLink
from slm_lab.experiment.collect.workers.worker import RolloutReport, RolloutWorker
from slm_lab.experiment.execute.executor import Event, Message
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.execute.local.user_code import WorkerFailed
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.resolve import resolve_inference
from slm_lab.lib.records import Metrics
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.testing import FakeExecutor
from tests.experiment.cluster.direct import _sent

SAMPLER = {"num_workers": 2, "num_envs_per_worker": 4, "num_batches_per_epoch": 4, "async_rl": False}
TIMES = ("wall_t", "fps", "rollout_busy", "inference_busy", "learner_busy")
MakeSpec = Callable[..., Spec]


class Sending(FakeExecutor):
    """An executor that pickles messages and shared content, as between processes."""

    def put_shared(self, content: Any) -> Any:
        return _sent(content)

    def events(self, timeout: float) -> Iterator[Event]:
        for event in super().events(timeout):
            yield event._replace(content=_sent(event.content)) if isinstance(event, Message) else event


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeExecutor]:
    """Return an executor whose workers do not seed the random generators of this process, which the learner uses."""
    fake, threads = Sending(), torch.get_num_threads()
    monkeypatch.setattr(pool, "RayExecutor", lambda *limits: fake)
    monkeypatch.setattr(worker_task, "seed_process", lambda config: None)
    yield fake
    torch.set_num_threads(threads)
    assert fake.tasks == []


@pytest.fixture
def sampler_spec(spec_body: Callable[..., dict[str, Any]]) -> MakeSpec:
    def make(frames: int = 3000, **sampler: Any) -> Spec:
        body = spec_body(env={"max_frame": frames, "normalize_obs": True}, meta={"sampler": SAMPLER | sampler, "log_frequency": 500})
        del body["env"]["num_envs"]
        return load_spec({"small": body}, "small")

    return make


def without_times(session: Session) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in session.run().rows]


def test_in_turns_it_collects_what_workers_of_this_process_do(sampler_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronous collection gives the same data as workers in this process. Processes are used: threads share the learner's generators."""
    monkeypatch.setattr(pool, "RayExecutor", LocalExecutor)
    ours = without_times(Session(sampler_spec(), context=SessionContext(open_pool=pool.open_cluster_pool)))
    assert len(ours) == 6
    assert ours == without_times(Session(sampler_spec(serial_mode=True)))


def test_lag_is_measured_and_what_is_too_old_left_out(
    executor: FakeExecutor, sampler_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With max_policy_lag, the learner does not train on older transitions.

    The speed of the workers determines how many transitions are masked, and whether a whole dataset is skipped.
    """
    learn, lags = Agent.learn, []

    def recorded(self: Agent, rollout: Rollout) -> Metrics:
        lags.append(int((self.clock.opt_step - rollout.version_TN)[rollout.valid_TN].max()))
        return learn(self, rollout)

    monkeypatch.setattr(Agent, "learn", recorded)
    rows = Session(sampler_spec(async_rl=True), context=SessionContext(open_pool=pool.open_cluster_pool)).run().rows
    assert max(row["lag_max"] or 0.0 for row in rows) >= 8.0  # one update has 8 gradient steps
    assert max(lags) >= 8
    lags.clear()
    rows = Session(sampler_spec(async_rl=True, max_policy_lag=7), context=SessionContext(open_pool=pool.open_cluster_pool)).run().rows
    assert rows[-1]["frame"] == 3000
    assert max(lags) <= 7, "what is learned from"
    assert all(row["lag_masked"] for row in rows if (row["lag_max"] or 0.0) > 7.0)


def test_a_worker_whose_node_is_gone_is_replaced_and_not_counted(
    executor: FakeExecutor, sampler_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose node is lost is replaced without counting towards meta.max_restart, also more often than that limit."""
    take, arrived, lost = MessageLink.receive_rollout, list[int](), set[int]()

    def lose(self: MessageLink, worker: int, slot: int, report: RolloutReport, *groups: Any) -> RolloutReport:
        arrived.append(worker)
        starts = executor.started.count("rollout worker 1")
        # once for each of the first three starts; a rollout may arrive after the loss of its worker
        if arrived[-1] == 1 and arrived.count(1) > 1 and starts <= 3 and starts not in lost:
            lost.add(starts)
            executor.report_death(next(task for task in executor.tasks if task.name == "rollout worker 1"), "its node is gone", lost=True)
        return take(self, worker, slot, report, *groups)

    monkeypatch.setattr(MessageLink, "receive_rollout", lose)
    rows = Session(sampler_spec(20_000, async_rl=True), context=SessionContext(open_pool=pool.open_cluster_pool)).run().rows
    assert rows[-1]["frame"] == 20_000
    assert executor.started[2:] == ["rollout worker 1"] * 3
    assert arrived.count(1) > 5


def test_a_worker_that_fails_ends_the_session(executor: FakeExecutor, sampler_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RolloutWorker, slot: int) -> None:
        raise ArithmeticError("the pole is broken")

    monkeypatch.setattr(RolloutWorker, "collect", broken)
    with pytest.raises(WorkerFailed, match=r"rollout worker \d failed: .*the pole is broken"):
        Session(sampler_spec(), context=SessionContext(open_pool=pool.open_cluster_pool)).run()


def test_central_inference_is_refused_before_anything_is_started(
    spec_body: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Central inference is refused with its key path, before a cluster is looked for."""
    body = spec_body(meta={"sampler": SAMPLER | {"inference": "central", "worker_num_splits": 2}})
    del body["env"]["num_envs"]
    (tmp_path / "spec.json").write_text(json.dumps({"small": body}))
    words = [str(tmp_path / "spec.json"), "small", "train", "--cluster", "127.0.0.1:1", "--data-dir", str(tmp_path / "data")]
    assert main(words) == 2
    assert "meta.sampler.inference: 'central'" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_inference_that_is_left_open_is_local(sampler_spec: MakeSpec) -> None:
    """On a cluster, unspecified inference is local, also with a GPU; on one machine with a GPU it would be central."""
    sampler = pool.with_local_inference(sampler_spec(worker_num_splits=2)).meta.sampler
    assert sampler is not None
    assert sampler.inference == "local"
    assert resolve_inference(pool.with_local_inference(sampler_spec()), "cuda").meta.sampler == sampler_spec(inference="local").meta.sampler
    serial = sampler_spec(serial_mode=True)
    assert pool.with_local_inference(serial) is serial


def test_serial_mode_stays_in_one_process(executor: FakeExecutor, sampler_spec: MakeSpec) -> None:
    assert len(without_times(Session(sampler_spec(500, serial_mode=True), context=SessionContext(open_pool=pool.open_cluster_pool)))) == 1
    assert executor.started == []
