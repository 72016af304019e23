"""Sessions whose shared arrays are in a parameter server compute the same as Sessions of one machine, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.build import build_agent
from slm_lab.env.normalize import Normalizers, make_normalizers
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.session.build import SessionContext, shared_components
from slm_lab.experiment.session.cluster.remote import RemoteArrays
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.session.session_process import make_shared_arrays
from slm_lab.lib import store as store_module
from slm_lab.lib.clock import Clock
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import session_seeds
from slm_lab.lib.store import Store, create_shared_file
from slm_lab.spec.models.spec import Spec
from tests.agent.test_hogwild import Worker
from tests.contract.combinations import Case
from tests.contract.test_algorithms import SENT, Beat, assert_equal, drive, every_second_case, updates
from tests.experiment.cluster.direct import Served
from tests.experiment.commands import rows

SEEDS = session_seeds(0, 0, 0)


def distributed(spec: Spec, workers: int, mode: str = "synced") -> Spec:
    return spec.with_meta(distributed=mode, max_session=workers)


@pytest.fixture
def servers() -> Iterator[list[Served]]:
    """Return the list of the parameter servers that `served` starts; close them after the test."""
    made: list[Served] = []
    yield made
    for server in made:
        server.close()


@pytest.fixture
def served(servers: list[Served]) -> Callable[..., list[RemoteArrays]]:
    """Return a function that starts a parameter server and returns the stores of all Sessions of a spec."""

    def make(spec: Spec, info: EnvInfo) -> list[RemoteArrays]:
        servers.append(Served(spec, SEEDS))
        return [RemoteArrays(servers[-1].first, spec, index, lambda: info) for index in range(spec.meta.max_session)]

    return make


@pytest.fixture(params=[False, True], ids=["one process", "several processes"])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the vectors are split between several server processes, although these nets are small."""
    if request.param:
        monkeypatch.setattr(store_module, "_RANGE", 20)
        monkeypatch.setattr(store_module, "_VECTOR", 16)  # the width of the widest vector instructions
    return bool(request.param)


def processes(servers: list[Served]) -> list[int]:
    """Return the number of processes of each server."""
    return [len(server.driver.servers) for server in servers]


class Part:
    """The shared components of a Session, without its envs."""

    def __init__(self, spec: Spec, info: EnvInfo, store: Store | None) -> None:
        self.clock, self.window = Clock(), EpisodeWindow()
        self.normalizers: Normalizers = make_normalizers(spec.env, info, 0.99)
        self.agent = build_agent(spec, info, SEEDS, self.clock)
        if store is not None:
            store.attach(shared_components(self.clock, self.window, self.normalizers, self.agent))


@pytest.mark.sampled(2)
@every_second_case
def test_one_synced_worker_equals_plain_training(
    case: Case, several: bool, served: Callable[..., list[RemoteArrays]], servers: list[Served]
) -> None:
    """One synced worker learns, reports and saves the same as plain training, for every algorithm with its memories and nets."""

    def state_and_trace(optimizer: str, remote: bool) -> tuple[dict[str, Any], list[Any]]:
        spec = case.spec(2, {"optim_spec": {"name": optimizer, "lr": 0.01}})
        store = served(distributed(spec, 1), case.info(2))[0] if remote else None
        torch.manual_seed(100)
        part = Part(spec, case.info(2), store)
        trace = drive(part.agent, Beat(case.info(2)), 60)
        return part.agent.state_dict(), trace

    state, trace = state_and_trace("GlobalAdam", True)
    plain_state, plain_trace = state_and_trace("Adam", False)
    without = [item if len(item) != 4 else (*item[:3], [x for x in item[3] if x[0] not in SENT]) for item in trace]
    assert len(updates(trace)) > 2
    assert all(dict(extra)["staleness"] == 0.0 for _, _, _, extra in updates(trace))
    assert_equal(without, plain_trace)
    assert_equal(state, plain_state)
    assert (processes(servers)[0] > 1) == (several and case.net != "SimbaV2Net")  # its rows must not be split
    sent = [dict(extra) for _, _, _, extra in updates(trace)]
    assert all(one["bytes_pushed"] > 0.0 and one["bytes_pulled"] > 0.0 for one in sent)


CASES = [
    ("ActorCritic", "OnPolicyBatchReplay", "MLPNet", "GlobalAdam"),
    ("ActorCritic", "OnPolicyBatchReplay", "MLPNet", "RMSprop"),  # each Session has its own statistics
    ("DoubleDQN", "Replay", "MLPNet", "GlobalAdam"),
    ("SoftActorCritic", "Replay", "MLPNet", "GlobalAdam"),
    ("CrossQ", "Replay", "MLPNet", "GlobalAdam"),  # batch statistics
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("algorithm", "memory", "net", "optimizer"), CASES)
def test_two_workers_in_a_fixed_order_equal_shared_memory(
    algorithm: str, memory: str, net: str, optimizer: str, several: bool, served: Callable[..., list[RemoteArrays]], servers: list[Served]
) -> None:
    case = Case(algorithm, memory, net, continuous=algorithm in ("SoftActorCritic", "CrossQ"))
    spec = distributed(case.spec(2, {"optim_spec": {"name": optimizer, "lr": 0.01}}), 2)
    fd = create_shared_file()
    results = []
    for stores in (served(spec, case.info()), [make_shared_arrays(spec, fd, index, fresh=index == 0) for index in range(2)]):
        torch.manual_seed(3)
        parts = [Part(spec, case.info(), store) for store in stores]
        workers = [Worker(part.agent, seed, case.info()) for seed, part in enumerate(parts)]
        metrics = []
        for turn in (0, 1, 1, 0, 1, 0, 0, 1):
            stores[turn].exchange()  # otherwise it receives the other's frames with its first message
            torch.manual_seed(turn)
            made = workers[turn].update()
            metrics.append((made.loss, made.grad_norm, made.extra["staleness"]))
        states = [part.agent.state_dict() for part in parts]
        weights = [part.agent.weights() for part in parts]
        results.append((metrics, states, weights, {name: array.copy() for name, array in stores[0].snapshot().items()}))
    os.close(fd)
    (metrics, states, weights, arrays), (shared_metrics, shared_states, shared_weights, shared) = results
    assert (processes(servers)[0] > 1) == (several and optimizer == "GlobalAdam")
    assert_equal(metrics, shared_metrics)
    assert max(staleness for *_, staleness in metrics) > 0
    assert_equal(states, shared_states)
    assert_equal(weights, shared_weights)
    assert arrays.keys() == shared.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, shared[name], err_msg=name)


def test_statistics_counts_and_episodes_are_those_of_all(served: Callable[..., list[RemoteArrays]]) -> None:
    case = Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet")
    spec = case.spec(2, {"optim_spec": {"name": "GlobalAdam", "lr": 0.01}})
    spec = distributed(spec.model_copy(update={"env": spec.env.model_copy(update={"normalize_obs": True})}), 2)
    one, other = (Part(spec, case.info(2), store) for store in served(spec, case.info(2)))
    rng = np.random.default_rng(0)
    alone = make_normalizers(spec.env, case.info(2), 0.99)
    for turn, part in enumerate([one, other, other, one]):
        batch = rng.normal(size=(2, *case.info().observation.shape)).astype(np.float32)
        part.normalizers.obs.stats.update(batch)
        alone.obs.stats.update(batch)
        np.testing.assert_array_equal(part.normalizers.obs.stats.inv_std, alone.obs.stats.inv_std)
        part.clock.tick(10 * (turn + 1))
        part.window.record([float(turn)], part.clock.global_frame)
        part.window.returns  # noqa: B018  # exchanges
    assert one.window.returns == other.window.returns == [0.0, 1.0, 2.0, 3.0]
    assert other.window.take_new_episodes() == (4, 1.5)
    one.window.take_new_episodes()
    assert one.clock.global_frame == 100
    assert one.normalizers.state_dict()["obs_stats"] == alone.state_dict()["obs_stats"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_process_that_was_restarted_sets_all_back_to_the_checkpoint(
    killed: int, served: Callable[..., list[RemoteArrays]], servers: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_RANGE", 400)
    case = Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet")
    spec = distributed(case.spec(2, {"optim_spec": {"name": "GlobalAdam", "lr": 0.01}, "hid_layers": [32, 32]}), 2)
    stores = served(spec, case.info(2))
    workers = [Worker(Part(spec, case.info(2), store).agent, seed) for seed, store in enumerate(stores)]
    for worker in workers:
        worker.update()
    with stores[1].saving(10.0) as due, stores[0].saving(10.0) as again:
        assert (due, again) == (True, False)
        saved = stores[1].snapshot()
        arrays = {name: torch.from_numpy(array) for name, array in saved.items()}
        state.save(tmp_path / "shared.pt", {"version": state.VERSION, "arrays": arrays})
    with stores[0].saving(10.0) as due:
        assert not due
    workers[0].update()
    frames = workers[0].agent.clock.frame
    (server,) = servers
    assert len(server.driver.servers) >= 3
    server.saved = tmp_path / "shared.pt"
    server.kill(killed)
    restored = stores[1].snapshot()
    assert server.restarted == [killed]
    for name, array in saved.items():
        if not name.startswith(("clock/", "episodes/")):  # values of the Sessions, which have continued
            np.testing.assert_array_equal(restored[name], array, err_msg=name)
    metrics = workers[1].update()
    assert metrics.extra["staleness"] == 0.0
    for number in range(len(server.driver.servers)):
        (updates,) = (array for name, array in server.server(number)._views[1].arrays.items() if name.endswith("/trainer/updates"))
        assert (updates - saved["agent/trainer/updates"]).tolist() == [[0], [1]], number
    workers[0].update()
    assert workers[0].agent.clock.global_frame == sum(worker.agent.clock.frame for worker in workers)
    assert workers[0].agent.clock.frame > frames


def a3c_body(plain: Spec, optimizer: str) -> dict[str, Any]:
    agent = plain.agent.model_dump(exclude_unset=True)
    agent["algorithm"] = {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16}
    agent["net"] |= {"optim_spec": {"name": optimizer, "lr": 0.002}}
    env = {"name": "CartPole-v1", "num_envs": 4, "max_frame": 2000, "normalize_obs": True}
    return {"name": "small", "agent": agent, "env": env, "meta": {"random_seed": 5, "log_frequency": 250, "distributed": "synced"}}


def test_a_run_continues_with_a_new_server(make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    """A run continued with a new server has the rows of an uninterrupted run, also when it moves from or to one machine."""
    body = a3c_body(make_spec(), "Adam")

    def part(folder: str, frames: int, resumed: bool, remote: bool) -> list[dict[str, str]]:
        paths = RunPaths(tmp_path / folder, "small")
        paths.root.mkdir(exist_ok=True)
        paths.make_dirs()
        spec = Spec.model_validate(body | {"env": body["env"] | {"max_frame": frames}})
        fd = create_shared_file()
        with closing(Served(spec, session_seeds(5, 0, 0))) as server:
            store = RemoteArrays(server.first, spec, 0, lambda: session.parts.env_info) if remote else make_shared_arrays(spec, fd)
            session = Session(spec, context=SessionContext(store=store, resumed=paths if resumed else None))
            sink = LocalSink(paths)
            session.run(sink)
            sink.close()
        os.close(fd)
        return rows(paths.session_df(0))

    straight = part("straight", 2000, False, True)
    for folder, remotes in (("server", (True, True)), ("from one machine", (False, True)), ("to one machine", (True, False))):
        part(folder, 1000, False, remotes[0])
        continued = part(folder, 2000, True, remotes[1])
        different = {key for one, other in zip(continued, straight, strict=True) for key in one if one[key] != other[key]}
        assert different <= {"lock_wait", *SENT[2:]}, folder


def test_a_session_alone_trains_as_without_a_server(make_spec: Callable[..., Spec], fd: int) -> None:
    """A single Session with a server has the same rows as without one, apart from times and traffic."""
    spec = Spec.model_validate(a3c_body(make_spec(), "GlobalAdam"))
    with closing(Served(spec, session_seeds(5, 0, 0))) as server:
        store = RemoteArrays(server.first, spec, 0, lambda: session.parts.env_info)
        session = Session(spec, context=SessionContext(store=store))
        ours = session.run()
        theirs = Session(spec, context=SessionContext(store=make_shared_arrays(spec, fd))).run()
    changing = ("wall_t", "fps", *SENT[1:])
    assert len(ours.rows) == 8
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        assert {key: value for key, value in one.items() if key not in changing} == {
            key: value for key, value in other.items() if key not in changing
        }
