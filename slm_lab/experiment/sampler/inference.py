"""Central inference: one process computes the action distributions of all workers' envs, for as many at once as have asked.

Observations and answers lie in shared memory; a byte over a socket names the group of envs that asks or is answered. The worker draws
the actions itself, so that its random stream does not depend on who else has asked.
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

from slm_lab.agent.policy import Policy
from slm_lab.experiment.sampler.shared import Common, Mail
from slm_lab.experiment.sampler.worker import Group, Newest, Setting, build_algorithms, merged
from slm_lab.lib.heap import Heap
from slm_lab.lib.records import ActOut

_CONNECT_SECONDS = 120.0
"""So long may the server be away, for a new process takes seconds to come up."""


class InferenceServer:
    """Answers whoever asks, by the newest weights, on setting.device."""

    def __init__(self, setting: Setting, heap: Heap) -> None:
        sampler = setting.spec.meta.sampler
        assert sampler is not None
        algorithms = build_algorithms(setting, sampler.num_policies, setting.device)
        self.policies = [algorithm.policy for algorithm in algorithms]
        self.common = Common(heap, setting.spec, setting.info, algorithms, setting.notes)
        self.newest = Newest(self.common.weights, self.policies, [])
        self.clients: dict[Connection, int] = {}
        """The number of the worker at the other end."""

    def answer(self, asked: Sequence[tuple[int, int]]) -> None:
        """Compute the answers for groups of envs, (worker, group) each."""
        begin = perf_counter()
        self.newest.pull()
        mails = [self.common.mail[worker][group] for worker, group in asked]
        for p, policy in enumerate(self.policies):
            rows = [np.flatnonzero(mail.policy_N == p) for mail in mails]
            if any(len(row_K) for row_K in rows):
                self._answer(policy, mails, rows)
        self.common.spans.add(begin, perf_counter())

    @staticmethod
    def _answer(policy: Policy, mails: Sequence[Mail], rows: Sequence[np.ndarray]) -> None:
        obs_B = np.concatenate([mail.obs_N[row_K] for mail, row_K in zip(mails, rows, strict=True)])
        state_BS = np.concatenate([mail.state_NS[row_K] for mail, row_K in zip(mails, rows, strict=True)])
        params_BP, after_BS = policy.forward(obs_B, state_BS if policy.state_size else None)
        begin = 0
        for mail, row_K in zip(mails, rows, strict=True):
            end = begin + len(row_K)
            mail.params_NP[row_K] = params_BP[begin:end]
            if after_BS is not None:
                mail.state_NS[row_K] = after_BS[begin:end]
            mail.version_N[row_K] = policy.version
            begin = end

    def serve(self, listener: Listener) -> None:
        """Answer until the process is killed."""
        threading.Thread(target=self._welcome, args=(listener,), daemon=True).start()
        while True:
            asked: list[tuple[Connection, int, int]] = []
            for client in wait(list(self.clients), timeout=0.05 if self.clients else 0.005):
                assert isinstance(client, Connection)
                try:
                    while client.poll():
                        asked.append((client, self.clients[client], client.recv_bytes()[0]))
                except (EOFError, OSError):  # its worker is gone
                    del self.clients[client]
            if asked:
                self.answer([(worker, group) for _, worker, group in asked])
            for client, _, group in asked:
                with suppress(OSError):
                    client.send_bytes(bytes([group]))

    def _welcome(self, listener: Listener) -> None:
        while True:
            with suppress(OSError, EOFError, AuthenticationError):
                client = listener.accept()
                self.clients = {**self.clients, client: client.recv()}  # replaced, for the other thread iterates over it


class CentralInference:
    """A worker's side: asks the server, and connects anew where a new process has taken its place."""

    def __init__(self, address: str, worker: int, mail: Sequence[Mail], newest: Newest) -> None:
        self.address, self.worker, self.mail, self.newest = address, worker, mail, newest
        self.open: dict[int, Group] = {}
        """Groups that wait for an answer, by their index."""
        self.connection = self._connect()

    def ask(self, group: Group) -> None:
        self.open[group.index] = group
        try:
            self._send(group)
        except OSError:
            self._ask_again()

    def _send(self, group: Group) -> None:
        mail = self.mail[group.index]
        mail.obs_N[:], mail.policy_N[:] = group.obs_N, group.policy_N
        if group.state_NS is not None:
            mail.state_NS[:] = group.state_NS
        self.connection.send_bytes(bytes([group.index]))

    def answer(self, group: Group) -> ActOut:
        while group.index in self.open:
            try:
                del self.open[self.connection.recv_bytes()[0]]
            except (EOFError, OSError):
                self._ask_again()
        self.newest.pull()
        mail, policies = self.mail[group.index], group.policies
        parts = []
        for p, policy in enumerate(policies):
            row_K = np.flatnonzero(group.policy_N == p)
            if len(row_K):
                state = mail.state_NS[row_K] if policy.state_size else None
                parts.append((row_K, policy.take(mail.params_NP[row_K], state)._replace(version=mail.version_N[row_K])))
        return merged(parts)

    def _ask_again(self) -> None:
        """The whole question: the server may have died when it had written half of the answer over it."""
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
