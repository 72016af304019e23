"""RayPool, with its workers in this process."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.cli.entry import main
from slm_lab.experiment.collect.workers import ray_pool as pool
from slm_lab.experiment.collect.workers.ray_worker import RolloutActor
from slm_lab.experiment.execute.local.failures import WorkerFailed
from slm_lab.experiment.session.context import SessionContext
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.resolve import resolve_inference
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from tests.experiment.cluster.fake_ray import FakeRay

SAMPLER = {"num_workers": 2, "num_envs_per_worker": 4, "num_batches_per_epoch": 4, "async_rl": False}
TIMES = ("wall_t", "fps", "rollout_busy", "inference_busy", "learner_busy")
MakeSpec = Callable[..., Spec]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Its workers do not seed the generators of this process, which is the learner's."""
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    build = RolloutActor.build

    def unseeded(self: RolloutActor) -> Any:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return build(self)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])

    monkeypatch.setattr(RolloutActor, "build", unseeded)
    return fake


@pytest.fixture
def sampler_spec(spec_body: Callable[..., dict[str, Any]]) -> MakeSpec:
    def make(frames: int = 3000, **sampler: Any) -> Spec:
        body = spec_body(env={"max_frame": frames, "normalize_obs": True}, meta={"sampler": SAMPLER | sampler, "log_frequency": 500})
        del body["env"]["num_envs"]
        return load_spec({"small": body}, "small")

    return make


def without_times(session: Session) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in session.run().rows]


def test_in_turns_it_collects_what_workers_of_this_process_do(ray: FakeRay, sampler_spec: MakeSpec) -> None:
    ours = without_times(Session(sampler_spec(), context=SessionContext(open_pool=pool.open_pool)))
    assert len(ours) == 6
    assert ours == without_times(Session(sampler_spec(serial_mode=True)))
    assert len(ray.actors) == 2
    assert all(actor.dead for actor in ray.actors)


def test_lag_is_measured_and_what_is_too_old_left_out(ray: FakeRay, sampler_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    rows = Session(sampler_spec(async_rl=True), context=SessionContext(open_pool=pool.open_pool)).run().rows
    assert max(row["lag_max"] or 0.0 for row in rows) >= 8.0  # an update has 8 gradient steps
    assert "exceed" not in caplog.text
    rows = Session(sampler_spec(async_rl=True, max_policy_lag=7), context=SessionContext(open_pool=pool.open_pool)).run().rows
    assert rows[-1]["frame"] == 3000
    assert max(row["lag_max"] or 0.0 for row in rows) <= 7.0
    assert "all transitions of a dataset exceed meta.sampler.max_policy_lag (7 gradient steps)" in caplog.text


def test_a_worker_whose_node_is_gone_is_replaced_and_not_counted(ray: FakeRay, sampler_spec: MakeSpec) -> None:
    """Also more often than meta.max_restart."""
    take = pool.RayPool._arrived
    arrived: list[int] = []

    def lose(self: pool.RayPool, index: int, slot: int, sent: Any) -> None:
        arrived.append(index)
        if len(arrived) in (4, 7, 9):
            self.workers[1].actor.dead = True
        take(self, index, slot, sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.RayPool, "_arrived", lose)
        rows = Session(sampler_spec(async_rl=True), context=SessionContext(open_pool=pool.open_pool)).run().rows
    assert rows[-1]["frame"] == 3000
    assert len(ray.actors) >= 4
    assert {0, 1} <= {*arrived[10:]}


def test_a_worker_that_fails_ends_the_session(ray: FakeRay, sampler_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RolloutActor) -> None:
        raise ArithmeticError("the pole is broken")

    monkeypatch.setattr(RolloutActor, "collect", broken)
    with pytest.raises(WorkerFailed, match="the pole is broken"):
        Session(sampler_spec(), context=SessionContext(open_pool=pool.open_pool)).run()
    assert all(actor.dead for actor in ray.actors)


def test_central_inference_is_refused_before_anything_is_started(
    spec_body: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By key path; no cluster is looked for."""
    body = spec_body(meta={"sampler": SAMPLER | {"inference": "central", "worker_num_splits": 2}})
    del body["env"]["num_envs"]
    (tmp_path / "spec.json").write_text(json.dumps({"small": body}))
    words = [str(tmp_path / "spec.json"), "small", "train", "--cluster", "127.0.0.1:1", "--data-dir", str(tmp_path / "data")]
    assert main(words) == 2
    assert "meta.sampler.inference: 'central'" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_inference_that_is_left_open_is_local(sampler_spec: MakeSpec) -> None:
    """Also with a GPU, where it is central on one machine."""
    sampler = pool.with_local_inference(sampler_spec(worker_num_splits=2)).meta.sampler
    assert sampler is not None
    assert sampler.inference == "local"
    assert resolve_inference(pool.with_local_inference(sampler_spec()), "cuda").meta.sampler == sampler_spec(inference="local").meta.sampler
    serial = sampler_spec(serial_mode=True)
    assert pool.with_local_inference(serial) is serial


def test_serial_mode_stays_in_one_process(ray: FakeRay, sampler_spec: MakeSpec) -> None:
    assert len(without_times(Session(sampler_spec(500, serial_mode=True), context=SessionContext(open_pool=pool.open_pool)))) == 1
    assert ray.actors == []
