"""Central inference: a server process computes the action distributions for the envs of all rollout workers.

The server computes all waiting requests in one batch. Observations and action distributions are in shared memory. A request, like an
answer, is one byte that is sent over a socket and contains the index of an env group. Each worker samples actions itself, so that the
worker's random stream does not depend on the requests of other workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client, Connection, Listener, wait
from time import perf_counter

import numpy as np

from slm_lab.agent.policy.policy import Policy
from slm_lab.experiment.collect.workers.shared import InferenceBuffer, WorkerArrays, WorkerConfig
from slm_lab.experiment.collect.workers.worker import EnvGroup, WeightSubscriber, build_policies, merge_outputs
from slm_lab.experiment.execute.heartbeat import TRAINING, WAITING
from slm_lab.experiment.training.experience import Beat, no_beat
from slm_lab.lib.records import ActOut
from slm_lab.lib.store import SharedArrays

_CONNECT_SECONDS = 120.0
"""Maximum time in seconds for connecting to the inference server. A new server process takes seconds to start."""


class InferenceServer:
    """Server that computes the action distributions that workers request, on the device config.device. The server uses the newest
    weights."""

    def __init__(self, config: WorkerConfig, store: SharedArrays, beat: Beat = no_beat) -> None:
        assert config.info is not None
        self.policies = build_policies(config, config.info, config.device)
        self.arrays = WorkerArrays(config.spec, config.info, self.policies, config.acting_state_size)
        store.attach({"workers": self.arrays})
        self.subscriber = WeightSubscriber(self.arrays.weights, self.policies, [])
        self.beat = beat
        self.clients: dict[Connection, int] = {}
        """Connection → number of the connected worker."""

    def compute_requests(self, requests: Sequence[tuple[int, int]]) -> None:
        """Compute the action distributions for env groups (vector envs), and write the distributions to the inference buffers.

        Args: requests: (index of the worker, index of the env group) for each request.
        """
        begin = perf_counter()
        self.subscriber.pull()
        buffers = [self.arrays.buffers[worker][group] for worker, group in requests]
        for p, policy in enumerate(self.policies):
            rows = [np.flatnonzero(buffer.policy_N == p) for buffer in buffers]
            if any(len(row_K) for row_K in rows):
                self._compute_policy_requests(policy, buffers, rows)
        self.arrays.spans.add(begin, perf_counter())

    @staticmethod
    def _compute_policy_requests(policy: Policy, buffers: Sequence[InferenceBuffer], rows: Sequence[np.ndarray]) -> None:
        """Compute the action distributions of one policy in one batch, for the rows with the indices rows[i] of each buffer buffers[i]."""
        obs_B = np.concatenate([buffer.obs_N[row_K] for buffer, row_K in zip(buffers, rows, strict=True)])
        state_BS = np.concatenate([buffer.state_NS[row_K] for buffer, row_K in zip(buffers, rows, strict=True)])
        params_BP, after_BS = policy.forward(obs_B, state_BS if policy.state_size else None)
        begin = 0
        for buffer, row_K in zip(buffers, rows, strict=True):
            end = begin + len(row_K)
            buffer.params_NP[row_K] = params_BP[begin:end]
            if after_BS is not None:
                buffer.state_NS[row_K] = after_BS[begin:end]
            buffer.version_N[row_K] = policy.version
            begin = end

    def start_accept_thread(self, listener: Listener) -> None:
        """Start a thread that accepts connections of workers."""
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def answer_waiting_requests(self) -> None:
        """Answer all waiting requests. If no request is waiting, wait briefly for requests."""
        self.beat(WAITING)
        requests: list[tuple[Connection, int, int]] = []
        for client in wait(list(self.clients), timeout=0.05 if self.clients else 0.005):
            assert isinstance(client, Connection)
            try:
                while client.poll():
                    requests.append((client, self.clients[client], client.recv_bytes()[0]))
            except (EOFError, OSError):  # the worker has died
                del self.clients[client]
        if requests:
            self.beat(TRAINING)  # a hang from here on is a hang of the server, not of a worker
            self.compute_requests([(worker, group) for _, worker, group in requests])
        for client, _, group in requests:
            with suppress(OSError):
                client.send_bytes(bytes([group]))

    def _accept(self, listener: Listener) -> None:
        while True:
            with suppress(OSError, EOFError, AuthenticationError):
                client = listener.accept()
                self.clients = {**self.clients, client: client.recv()}  # a new dict: the other thread iterates over the old one


class CentralInference:
    """Client of the inference server in a rollout worker. The client reconnects if the server was restarted."""

    def __init__(self, address: str, worker: int, buffers: Sequence[InferenceBuffer], subscriber: WeightSubscriber) -> None:
        self.address, self.worker, self.buffers, self.subscriber = address, worker, buffers, subscriber
        self.open: dict[int, EnvGroup] = {}
        """Index of an env group → env group, for the groups that wait for an answer of the server."""
        self.connection = self._connect()

    def request_actions(self, group: EnvGroup) -> None:
        self.open[group.index] = group
        try:
            self._send(group)
        except OSError:
            self._request_again()

    def _send(self, group: EnvGroup) -> None:
        buffer = self.buffers[group.index]
        buffer.obs_N[:], buffer.policy_N[:] = group.policy_inputs_N, group.acting_policy_N
        if group.state_NS is not None:
            buffer.state_NS[:] = group.state_NS
        self.connection.send_bytes(bytes([group.index]))

    def wait_for_actions(self, group: EnvGroup) -> ActOut:
        while group.index in self.open:
            try:
                del self.open[self.connection.recv_bytes()[0]]
            except (EOFError, OSError):
                self._request_again()
        self.subscriber.pull()
        buffer, acting_N = self.buffers[group.index], group.acting_policy_N
        parts = []
        for p, policy in enumerate(group.policies):
            row_K = np.flatnonzero(acting_N == p)
            if len(row_K):
                state = buffer.state_NS[row_K] if policy.state_size else None
                parts.append((row_K, policy.act_from_params(buffer.params_NP[row_K], state)._replace(version=buffer.version_N[row_K])))
        return merge_outputs(group, parts)

    def _request_again(self) -> None:
        """Reconnect to the server, and send every unanswered request again.

        The requests are also written to the buffers again, since the server may have died while it was overwriting a request with its
        answer.
        """
        self.connection.close()
        self.connection = self._connect()
        for group in self.open.values():
            with suppress(OSError):
                self._send(group)

    def _connect(self) -> Connection:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                connection = Client(self.address, "AF_UNIX", authkey=current_process().authkey)
                connection.send(self.worker)
            except (EOFError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return connection
