"""Tests of central inference: both ends of the socket, and the resulting actions."""

from __future__ import annotations

import multiprocessing
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.experiment.collect.workers.inference import CentralInference, InferenceServer
from slm_lab.experiment.collect.workers.shared import InferenceBuffer
from slm_lab.experiment.session.session import Session
from slm_lab.lib.records import ObservationSpace
from slm_lab.lib.system import has_feature
from slm_lab.spec.models.spec import Spec
from tests.experiment.workers.conftest import RECURRENT, pool_of, spans_of, weights_of, worker_spec
from tests.experiment.workers.puppets import INFO

Open = Callable[[Spec], Session]


def test_a_request_is_sent_again_after_the_server_has_died(tmp_path: Path, open_session: Open) -> None:
    """The whole request is sent again, because the server that died has overwritten the recurrent state."""
    net = {"name": "RecurrentNet", "rnn_hidden_size": 4, "seq_len": 8}
    session = open_session(worker_spec(net=net, sampler={"serial_mode": True})).build()
    worker = pool_of(session).workers[0]
    (group,) = worker.groups
    buffer = InferenceBuffer(replace(INFO, num_envs=2, observation=ObservationSpace((4,))), group.policies[0])
    address, key, asked = str(tmp_path / "s"), multiprocessing.current_process().authkey, SimpleQueue[Any]()

    def serve() -> None:
        for attempt in range(2):
            with Listener(address, "AF_UNIX", authkey=key) as listener, listener.accept() as client:
                asked.put((client.recv(), client.recv_bytes(), buffer.state_NS.copy(), buffer.obs_N.copy()))
                buffer.state_NS[:], buffer.obs_N[:] = 77.0, 77.0
                buffer.version_N[:] = 5
                if attempt:
                    client.send_bytes(b"\0")
                    asked.put(None)

    threading.Thread(target=serve, daemon=True).start()
    state = group.state_NS
    assert state is not None
    state[:] = np.arange(state.size).reshape(state.shape)
    central = CentralInference(address, 0, [buffer], worker.subscriber)
    central.request_actions(group)
    out = central.wait_for_actions(group)
    first, second = asked.get(timeout=5), asked.get(timeout=5)
    assert first[:2] == second[:2] == (0, b"\0")
    for request in (first, second):
        assert np.array_equal(request[2], state)
        assert np.array_equal(request[3], group.obs_N)
    assert out.version.tolist() == [5, 5]  # type: ignore[union-attr]
    assert np.array_equal(np.asarray(out.state_N), buffer.state_NS)


def test_a_client_without_the_key_is_refused(tmp_path: Path) -> None:
    server = InferenceServer.__new__(InferenceServer)
    server.clients = {}
    address, key = str(tmp_path / "s"), multiprocessing.current_process().authkey
    with Listener(address, "AF_UNIX", authkey=key) as listener:
        threading.Thread(target=server._accept, args=(listener,), daemon=True).start()
        with pytest.raises((AuthenticationError, OSError, EOFError)):
            Client(address, "AF_UNIX", authkey=b"guess")
        with Client(address, "AF_UNIX", authkey=key) as client:
            client.send(3)
            end = time.monotonic() + 5
            while not server.clients and time.monotonic() < end:
                time.sleep(0.01)
            assert list(server.clients.values()) == [3]


def test_central_inference_acts_as_local_does(tmp_path: Path, open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one group of envs per worker, both draw the same actions, up to the rounding of a larger matrix product.

    The socket is a file in a temporary folder that only this user can enter and that is removed afterwards. Workers end without delay.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    central = open_session(worker_spec(sampler={"inference": "central", "worker_num_splits": 1}, env={"max_frame": 128}))
    before = abstract_sockets()
    central.build()
    folder = Path(pool_of(central).folder)
    central.train()
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [entry.name for entry in folder.iterdir() if entry.is_socket()] == ["s"]
    assert abstract_sockets() <= before, "such a socket has no permissions, and exists on Linux alone"
    begin = time.monotonic()
    central.close()
    assert time.monotonic() < begin + (1.5 if has_feature("forkserver") else 8.0), "a process that was spawned takes longer to exit"
    assert not folder.exists()
    local = open_session(worker_spec(env={"max_frame": 128}))
    local.run()
    np.testing.assert_allclose(weights_of(central), weights_of(local), atol=1e-4)
    assert spans_of(central, "inference")


def abstract_sockets() -> set[str]:
    """Return the abstract sockets of this test's processes, which are named after their folder or their process."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7]
    return {name for name in names if name.startswith("@") and ("slm" in name or str(os.getpid()) in name)}


@pytest.mark.slow
@pytest.mark.parametrize(("sections", "sampler"), [({"net": RECURRENT}, {}), ({}, {"num_policies": 2})], ids=["recurrent", "policies"])
def test_central_inference_of_recurrent_nets_and_of_policies(sections: dict[str, Any], sampler: dict[str, Any], open_session: Open) -> None:
    sections = {**sections, "sampler": {"inference": "central", "async_rl": True} | sampler, "env": {"max_frame": 512}}
    rows = open_session(worker_spec(**sections)).run().rows
    assert rows[-1]["frame"] >= 512  # type: ignore[operator]
    assert rows[-1]["opt_step"]


def test_central_inference_samples_by_the_newest_deviation(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers sample with the current standard deviation, which is a parameter: the net returns only the means."""
    net = {"name": "MLPNet", "hid_layers": [8], "log_std_init": 0.0, "optim_spec": {"name": "Adam", "lr": 0.05}}
    sampler = {"num_workers": 1, "num_envs_per_worker": 4, "inference": "central", "worker_num_splits": 1}
    session = open_session(worker_spec(net=net, sampler=sampler, env={"name": "Pendulum-v1", "max_frame": 256})).build()
    policy, learn = session.agent.policy, session.agent.learn
    worst: list[float] = []

    def spy(rollout: Any) -> Any:
        with torch.no_grad():
            params_BP, _ = policy.net(rollout.obs_TN[:-1].flatten(0, 1))
            logp_B = policy.distribution.log_prob(params_BP, rollout.action_TN.flatten(0, 1))
        worst.append(float((logp_B - rollout.logp_TN.flatten()).abs().max()))
        return learn(rollout)

    monkeypatch.setattr(session.agent, "learn", spy)
    session.run()
    assert len(worst) == 4
    assert max(worst) < 1e-4
