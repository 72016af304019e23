"""What lies between rollout workers and learner: slots, datasets, the order in which they are filled, weights, memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.memory.on_policy import OnPolicyBatchReplay
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.experiment.engine import WorkerFailed
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.sampler import crew as crew_module
from slm_lab.experiment.sampler import shared
from slm_lab.experiment.sampler.batcher import Batcher, Dataset, Ended, Gathered
from slm_lab.experiment.sampler.crew import ProcessCrew
from slm_lab.experiment.sampler.inference import CentralInference, InferenceServer
from slm_lab.experiment.sampler.intake import Intake
from slm_lab.experiment.sampler.session import SampledSession
from slm_lab.experiment.sampler.shared import SLOTS, Slot, Weights, check_room
from slm_lab.experiment.sampler.worker import Collected, Setting
from slm_lab.lib.heap import CommonHeap, common_file
from slm_lab.lib.records import ActionSpace, EnvInfo, Episode, ObservationSpace
from slm_lab.spec.base import SpecError
from tests.experiment.sampler.conftest import sampled
from tests.experiment.test_hogwild import memfds

ROWS, STATE = 4, 2
INFO = EnvInfo(3, ObservationSpace((1,)), ActionSpace("discrete", (2,)))


def slot_of(number: int, count: int = 3, policies: list[int] | None = None) -> tuple[Slot, Gathered]:
    """A slot with numbers that tell slot, column and row: 100 · slot + 10 · column + row; each column is one policy's."""
    slot = Slot(OnPolicyBatchReplay(replace(INFO, num_envs=count), ROWS, STATE), np.zeros((ROWS, count), np.int64))
    fill(slot, number)
    slot.policy_TN[:] = policies or 0
    return slot, Gathered([], [])


def fill(slot: Slot, number: int) -> None:
    _, N = slot.policy_TN.shape
    for name, slab in slot.memory.slabs.items():
        told = 100.0 * number + 10.0 * np.arange(N) + np.arange(len(slab))[:, None]
        slab[:] = True if slab.dtype == np.bool_ else told.reshape(told.shape + (1,) * (slab.ndim - 2)).astype(slab.dtype)
        if name in ("terminated", "truncated"):
            slab[:] = False
    slot.memory.state_NS[:] = 100.0 * number + 10.0 * np.arange(N)[:, None]


def batcher(columns: int, spare: int = 1, policy: int = 0, alone: bool = True) -> Batcher:
    return Batcher(policy, INFO, columns, ROWS, STATE, spare, alone)


def columns_of(dataset: Dataset) -> list[int]:
    """Which slot and column each column of a dataset is, after a check that all of it is that one's."""
    rollout = dataset.rollout()
    first = rollout.reward_TN[0]
    for t in range(ROWS):
        assert torch.equal(rollout.reward_TN[t], first + t)
        assert torch.equal(rollout.obs_TN[t, :, 0], first + t)
        assert torch.equal(rollout.version_TN[t], first.long() + t)
    assert torch.equal(rollout.obs_TN[ROWS, :, 0], first + ROWS)
    assert torch.equal(rollout.state_NS[:, 1], first)
    return [int(number) // 10 for number in first]


# ---- Batcher


def test_a_slot_goes_into_two_datasets() -> None:
    batch = batcher(4)
    assert batch.add(*slot_of(1)) == ([], 3)
    (full,), begin = batch.add(*slot_of(2))
    assert begin == 3
    assert columns_of(full) == [10, 11, 12, 20]
    assert batch.current is not None
    assert columns_of(batch.current) == [21, 22]


def test_a_dataset_narrower_than_a_slot() -> None:
    batch = batcher(1, spare=2)
    full, begin = batch.add(*slot_of(1))
    assert [columns_of(dataset) for dataset in full] == [[10], [11], [12]]
    assert begin == 3


def test_where_there_is_no_room_the_first_column_left_is_told() -> None:
    batch = batcher(2, spare=0)
    (slot, gathered) = slot_of(1)
    (full,), begin = batch.add(slot, gathered)
    assert (columns_of(full), begin, batch.room) == ([10, 11], 2, False)
    assert batch.add(slot, gathered, begin) == ([], 2)
    batch.release(full)
    assert batch.room
    assert batch.add(slot, gathered, begin) == ([], 3)
    (other,), _ = batch.add(*slot_of(2))
    assert columns_of(other) == [12, 20]


def test_truncations_and_episodes_go_with_their_columns() -> None:
    batch = batcher(4)
    obs, state = np.array([7.0], np.float32), np.array([8.0, 9.0], np.float32)
    slot, _ = slot_of(1)
    batch.add(slot, Gathered([(1, 2, obs, state)], [Ended(2, 0, 0, Episode(0, 5.0, 3))]))
    slot, _ = slot_of(2)
    (full,), _ = batch.add(slot, Gathered([(0, 0, obs, state), (3, 1, obs, state)], [Ended(0, 0, 0, EP), Ended(3, 1, 0, EP)]))
    assert [(t, n) for t, n, _, _ in full.memory.truncations] == [(1, 2), (0, 3)]
    assert [t for t, _ in full.ended] == [2, 0]
    told = full.rollout().truncations
    assert [told.t_K.tolist(), told.n_K.tolist()] == [[1, 0], [2, 3]]
    assert [told.obs_K.tolist(), told.state_KS.tolist()] == [[[7.0]] * 2, [[8.0, 9.0]] * 2]
    assert batch.current is not None
    assert [(t, n) for t, n, _, _ in batch.current.memory.truncations] == [(3, 0)]
    assert [t for t, _ in batch.current.ended] == [3]


EP = Episode(0, 1.0, 1)


def test_each_policy_gets_its_columns_and_trains_on_its_rows() -> None:
    """A column in which two policies played goes to both, each with the other's rows masked; so do episodes."""
    slot, gathered = slot_of(1, policies=[0, 1, 0])
    slot.policy_TN[:2, 2], slot.policy_TN[2:, 2] = 1, 0
    slot.memory.slabs["valid"][3, 0] = False
    gathered.ended += [Ended(1, 2, 1, EP), Ended(3, 2, 0, Episode(2, 2.0, 2))]
    got: list[Dataset] = []
    for policy in (0, 1):
        batch = batcher(2, policy=policy, alone=False)
        (full,), begin = batch.add(slot, gathered)
        assert begin == 3
        got.append(full)
    zero, one = got
    assert columns_of(zero) == [10, 12]
    assert columns_of(one) == [11, 12]
    assert zero.rollout().valid_TN.tolist() == [[True, False], [True, False], [True, True], [False, True]]
    assert one.rollout().valid_TN.tolist() == [[True, True], [True, True], [True, False], [True, False]]
    assert zero.mine_TN.tolist() == [[True, False], [True, False], [True, True], [True, True]], "frames count dummy rows"
    assert ([t for t, _ in zero.ended], [t for t, _ in one.ended]) == ([3], [1])
    assert slot.memory.slabs["valid"][:2, 2].all(), "the slot itself stays as it is"


def test_a_released_dataset_begins_anew() -> None:
    batch = batcher(3, spare=0, alone=False)
    slot, _ = slot_of(1, policies=[0, 1, 0])
    batch.add(slot, Gathered([(0, 0, np.zeros(1, np.float32), np.zeros(2, np.float32))], [Ended(0, 0, 0, EP)]))
    dataset = batch.close()
    assert dataset is not None
    assert columns_of(dataset) == [10, 12], "closed before it was full: without the empty column"
    assert batch.close() is None
    batch.release(dataset)
    (full,), _ = batch.add(*slot_of(2))
    assert full is dataset
    assert columns_of(full) == [20, 21, 22]
    assert (full.memory.truncations, full.ended) == ([], [])
    assert full.rollout().valid_TN.all()
    assert full.mine_TN.all()


# ---- Intake


def report(end: float) -> Collected:
    return Collected([Gathered([], [])], [[]], end - 1, end, 0.5, 0.5)


def intake(rounds: int | None, columns: int, spare: int = 1, workers: int = 2) -> Intake:
    """Each worker's slot s holds 10 · worker + s + 1."""
    slots = [[[slot_of(10 * worker + s + 1)[0]] for s in range(SLOTS)] for worker in range(workers)]
    return Intake(slots, [batcher(columns, spare)], rounds)


def taken(one: Intake) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """(worker, slot) of those that are free again, and the columns of what is complete."""
    free, complete = [], []
    for filled, datasets in one.take():
        free += [] if filled is None else [(filled.worker, filled.slot)]
        complete += [columns_of(dataset) for _, dataset in datasets]
    return free, complete


def test_rounds_are_in_the_order_of_the_workers() -> None:
    one = intake(2, 12)
    one.put(1, 0, report(1.0))
    assert taken(one) == ([], [])
    one.put(0, 0, report(2.0))
    assert taken(one) == ([(0, 0), (1, 0)], [])
    one.put(0, 1, report(3.0))
    assert taken(one) == ([(0, 1)], [])
    assert not one.round_over
    one.put(1, 1, report(4.0))
    free, (complete,) = taken(one)
    assert free == [(1, 1)]
    assert [number // 10 for number in complete] == [1, 1, 1, 11, 11, 11, 2, 2, 2, 12, 12, 12]
    assert one.round_over


def test_a_round_gives_what_it_has_got() -> None:
    one = intake(1, 100)
    one.put(0, 0, report(1.0))
    one.put(1, 0, report(1.0))
    assert taken(one) == ([(0, 0), (1, 0)], [[10, 11, 12, 110, 111, 112]])


def test_as_it_comes_the_oldest_goes_first_and_waits_for_room() -> None:
    one = intake(None, 4, spare=0)
    one.put(0, 1, report(3.0))
    one.put(1, 0, report(1.0))
    one.put(1, 1, report(2.0))
    free, complete = taken(one)
    assert (free, complete) == ([(1, 0)], [[110, 111, 112, 120]])
    assert taken(one) == ([], []), "no room"
    batch = one.batchers[0]
    batch.release(batch_of(one))
    assert taken(one) == ([(1, 1)], [[121, 122, 20, 21]])


def batch_of(one: Intake) -> Dataset:
    """A dataset in place of the one that was given out."""
    batch = one.batchers[0]
    memory = OnPolicyBatchReplay(replace(INFO, num_envs=batch.capacity), ROWS, STATE)
    return Dataset(memory, mine_TN=np.zeros((ROWS, batch.capacity), np.bool_))


# ---- Weights


def weights_of(fd: int, size: int, fresh: bool) -> Weights:
    net = torch.nn.Linear(size, 1, bias=False)
    return Weights(CommonHeap(fd, 0, 1, synced=False, fresh=fresh), FlatParams(net), notes=1)


def test_the_newest_weights_and_what_goes_with_them() -> None:
    fd = common_file()
    writer, reader = weights_of(fd, 8, True), weights_of(fd, 8, False)
    assert writer.flat is not None
    assert reader.flat is not None
    assert not reader.pull()
    for number in (1, 2, 3):
        writer.flat.param.detach().fill_(number)
        writer.publish(10 * number, np.array([0.5 * number]))
    assert reader.pull()
    assert (reader.version, reader.notes[0], set(reader.flat.param.tolist())) == (30, 1.5, {3.0})
    assert not reader.pull(), "nothing newer"
    late = weights_of(fd, 8, False)
    assert late.pull(), "one that comes later finds them too"
    os.close(fd)


class Overtaken:
    """Weights that the writer writes over, twice, while they are being read: the first half is older than the second."""

    def __init__(self, halves: torch.Tensor, publish: Callable[[], None]) -> None:
        self.halves, self.publish, self.reads = halves, publish, 0

    def __getitem__(self, half: int) -> torch.Tensor:
        read = self.halves[half].clone()
        self.reads += 1
        if self.reads <= 2:
            self.publish()
            self.publish()
            read[4:] = self.halves[half][4:]
        return read


def test_a_reader_that_was_overtaken_reads_again() -> None:
    fd, numbers = common_file(), iter(range(1, 100))
    writer, reader = weights_of(fd, 8, True), weights_of(fd, 8, False)

    def publish() -> None:
        assert writer.flat is not None
        number = next(numbers)
        writer.flat.param.detach().fill_(number)
        writer.publish(number, np.array([float(number)]))

    publish()
    overtaken: Any = Overtaken(reader._param_HP, publish)
    reader._param_HP = overtaken
    assert reader.pull()
    assert reader.flat is not None
    assert reader.flat.param.tolist() == [5.0] * 8
    assert (reader.version, reader.notes[0], overtaken.reads) == (5, 5.0, 3)
    os.close(fd)


def hammer(fd: int, size: int, seconds: float, connection: Connection) -> None:
    """Publish vectors of equal numbers, as fast as it goes."""
    torch.set_num_threads(1)
    writer = weights_of(fd, size, False)
    assert writer.flat is not None
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
        writer.flat.param.detach().fill_(number)
        writer.publish(number, np.array([float(number)]))
    connection.send(number)


def test_no_reader_sees_a_torn_vector() -> None:
    """The writer is another process: the interpreter's lock keeps threads apart in places."""
    fd, size = common_file(), 200_000
    reader = weights_of(fd, size, True)
    assert reader.flat is not None
    ours, theirs = multiprocessing.Pipe()
    threads, seen = torch.get_num_threads(), 0
    torch.set_num_threads(1)  # a fork with threads running may hang
    writer = multiprocessing.get_context("fork").Process(target=hammer, args=(fd, size, 1.5, theirs))
    writer.start()
    while not ours.poll():
        if reader.pull():
            numbers = reader.flat.param
            assert float(numbers[0]) == float(numbers.min()) == float(numbers.max()) == reader.version == reader.notes[0]
            seen += 1
    writer.join()
    assert seen > 10
    assert ours.recv() >= seen
    torch.set_num_threads(threads)
    os.close(fd)


# ---- the crew, with threads in place of worker processes


class Puppet:
    """As WorkerProcess, but a thread: fills slots with `number` and the count of what it has filled."""

    slots: list[list[list[Slot]]]
    made: list[Puppet]
    mishaps: dict[int, int]
    """Which puppets, by the order in which they were made, die at which rollout."""

    def __init__(self, index: int, memory: Any = None) -> None:
        self.index, self.name, self.setting, self.process = index, f"rollout worker {index}", None, self
        self.connection, self.theirs = multiprocessing.Pipe()
        self.sentinel, self.end = os.pipe()
        self.filled, self.alive = 0, True
        self.mishap = self.mishaps.get(len(self.made))
        self.made.append(self)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def begin(self, setting: Any) -> None:
        self.setting = setting

    def _work(self) -> None:
        if self.mishap != 0:
            self.theirs.send(("ready",))
        while self.mishap != 0 and (slot := self.theirs.recv()) is not None:
            if self.filled + 1 == self.mishap:
                for one in self.slots[self.index][slot]:
                    fill(one, 99)  # in the middle of its work
                break
            self.filled += 1
            for one in self.slots[self.index][slot]:
                fill(one, 10 * self.index + self.filled)
            self.theirs.send(("rollout", slot, report(time.perf_counter())))
        self.alive = False
        os.close(self.end)

    def is_alive(self) -> bool:
        return self.alive

    @property
    def waitable(self) -> list[Any]:
        return [self.connection, self.sentinel]

    def messages(self) -> Iterator[tuple[Any, ...]]:
        while self.connection.poll():
            yield self.connection.recv()

    def send(self, order: Any) -> None:
        if self.alive:
            self.connection.send(order)

    def join(self, timeout: float) -> None:
        self.thread.join(timeout)

    def death(self) -> tuple[str, str]:
        return "killed by SIGKILL", "\nthe last that it said"

    def kill(self) -> None:
        self.send(None)
        self.thread.join(5)
        assert not self.alive


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProcessCrew]]:
    """crew(rounds, columns, spare, max_restart, mishaps): two puppets, started."""
    opened: list[ProcessCrew] = []

    def make(rounds: int | None, columns: int, spare: int = 1, max_restart: int = 1, mishaps: dict[int, int] | None = None) -> ProcessCrew:
        one = intake(rounds, columns, spare)
        monkeypatch.setattr(Puppet, "slots", one.slots, raising=False)
        monkeypatch.setattr(Puppet, "made", [], raising=False)
        monkeypatch.setattr(Puppet, "mishaps", mishaps or {}, raising=False)
        monkeypatch.setattr(crew_module, "WorkerProcess", Puppet)
        puppets: Any = [Puppet(index) for index in range(2)]
        for puppet in puppets:
            puppet.begin(Setting(None, INFO, None, index=puppet.index))  # type: ignore[arg-type]
        opened.append(ProcessCrew(puppets, None, None, one, max_restart, rounds is not None))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def wait_for(one: ProcessCrew) -> tuple[int, Dataset]:
    end = time.monotonic() + 10
    while (item := one.next()) is None:
        assert time.monotonic() < end, "waited in vain"
    return item


def train(one: ProcessCrew, rounds: int) -> None:
    for _ in range(rounds):
        one.release(*wait_for(one))


def test_back_pressure(crew: Callable[..., ProcessCrew]) -> None:
    """A learner that takes no dataset: workers stop when datasets and slots are full, and go on when it gives one back."""
    one = crew(None, 6, spare=2)
    one.start(Stop())
    most = 3 * 6 // 3  # three datasets of two slots each
    end = time.monotonic() + 10
    while sum(puppet.filled for puppet in Puppet.made) < most:
        assert time.monotonic() < end, [puppet.filled for puppet in Puppet.made]
        time.sleep(0.01)
    time.sleep(0.3)
    assert sum(puppet.filled for puppet in Puppet.made) == most
    policy, dataset = wait_for(one)
    time.sleep(0.2)
    assert sum(puppet.filled for puppet in Puppet.made) == most, "taken, but not given back yet"
    one.release(policy, dataset)
    end = time.monotonic() + 10
    while sum(puppet.filled for puppet in Puppet.made) < most + 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.2)
    assert sum(puppet.filled for puppet in Puppet.made) == most + 2


def test_in_turns_workers_wait_for_the_learner(crew: Callable[..., ProcessCrew]) -> None:
    one = crew(2, 12, spare=0)
    one.start(Stop())
    for round_ in range(3):
        policy, dataset = wait_for(one)
        time.sleep(0.1)
        assert [puppet.filled for puppet in Puppet.made] == [2 * (round_ + 1)] * 2
        numbers = [number // 10 for number in columns_of(dataset)]
        first, second = 2 * round_ + 1, 2 * round_ + 2
        assert numbers == [first] * 3 + [10 + first] * 3 + [second] * 3 + [10 + second] * 3
        one.release(policy, dataset)


@pytest.mark.parametrize("mishap", [0, 1, 2, 3, 4])
def test_the_rollouts_of_a_dead_worker_are_collected_again(mishap: int, crew: Callable[..., ProcessCrew], caplog: Any) -> None:
    """Whenever in a round it dies, before it was ready too: every round is whole, and nothing half written is in it."""
    one = crew(2, 12, spare=0, mishaps={1: mishap})
    one.start(Stop())
    for _ in range(3):
        policy, dataset = wait_for(one)
        numbers = [number // 10 for number in columns_of(dataset)]
        assert 99 not in numbers
        assert [number // 10 for number in numbers] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
        one.release(policy, dataset)
    assert len(Puppet.made) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "rollout worker 1 killed by SIGKILL; a new process takes its place (1 of 1)"
    ]


def test_a_worker_that_dies_too_often(crew: Callable[..., ProcessCrew]) -> None:
    one = crew(1, 6, spare=0, mishaps={1: 2, 2: 2})
    one.start(Stop())
    with pytest.raises(WorkerFailed) as failed:
        train(one, rounds=9)
    said = "rollout worker 1 killed by SIGKILL, after 1 new process (meta.max_restart)\nthe last that it said"
    assert str(failed.value) == said


def test_a_stop_while_workers_begin(crew: Callable[..., ProcessCrew], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for envs that take long to build."""
    one = crew(1, 6)
    monkeypatch.setattr(one, "_hear", lambda _: None)
    stop = Stop()
    threading.Timer(0.3, lambda: setattr(stop, "requested", True)).start()
    begin = time.monotonic()
    one.start(stop)
    assert time.monotonic() < begin + 2
    assert not one.thread.is_alive()


# ---- central inference


def test_a_question_is_asked_anew_where_the_server_has_died() -> None:
    """The whole of it: a recurrent state was written over by a server that could not say so any more."""
    session = SampledSession(sampled(net={"name": "RecurrentNet", "rnn_hidden_size": 4, "seq_len": 8}, sampler={"serial_mode": True}))
    session.build()
    worker = session.crew.workers[0]  # type: ignore[union-attr]
    (group,) = worker.groups
    info, fd = replace(INFO, num_envs=2, observation=ObservationSpace((4,))), common_file()
    mail = shared.Mail(CommonHeap(fd, 0, 1, synced=False), info, group.policies[0])
    address, key, asked = f"\0slm_lab_test_{os.getpid()}", multiprocessing.current_process().authkey, SimpleQueue[Any]()

    def serve() -> None:
        for attempt in range(2):
            with Listener(address, "AF_UNIX", authkey=key) as listener, listener.accept() as client:
                asked.put((client.recv(), client.recv_bytes(), mail.state_NS.copy(), mail.obs_N.copy()))
                mail.state_NS[:], mail.obs_N[:] = 77.0, 77.0
                mail.version_N[:] = 5
                if attempt:
                    client.send_bytes(b"\0")
                    asked.put(None)

    threading.Thread(target=serve, daemon=True).start()
    state = group.state_NS
    assert state is not None
    state[:] = np.arange(state.size).reshape(state.shape)
    central = CentralInference(address, 0, [mail], worker.newest)
    central.ask(group)
    out = central.answer(group)
    first, second = asked.get(timeout=5), asked.get(timeout=5)
    assert first[:2] == second[:2] == (0, b"\0")
    for told in (first, second):
        assert np.array_equal(told[2], state)
        assert np.array_equal(told[3], group.obs_N)
    assert out.version.tolist() == [5, 5]  # type: ignore[union-attr]
    assert np.array_equal(np.asarray(out.state_N), mail.state_NS)
    session.close()
    os.close(fd)


def test_a_stranger_is_not_let_in() -> None:
    """The address of central inference can be seen by every user of the machine."""
    server = InferenceServer.__new__(InferenceServer)
    server.clients = {}
    address, key = f"\0slm_lab_test_{os.getpid()}_2", multiprocessing.current_process().authkey
    with Listener(address, "AF_UNIX", authkey=key) as listener:
        threading.Thread(target=server._welcome, args=(listener,), daemon=True).start()
        with pytest.raises((AuthenticationError, OSError, EOFError)):
            Client(address, "AF_UNIX", authkey=b"guess")
        with Client(address, "AF_UNIX", authkey=key) as client:
            client.send(3)
            end = time.monotonic() + 5
            while not server.clients and time.monotonic() < end:
                time.sleep(0.01)
            assert list(server.clients.values()) == [3]


# ---- memory


def test_what_does_not_fit_memory_is_refused(monkeypatch: pytest.MonkeyPatch, open_session: Callable[..., SampledSession]) -> None:
    monkeypatch.setattr(shared, "memory_bytes", lambda: 50_000)
    sizes = {"sampler": {"serial_mode": True, "num_workers": 8, "num_envs_per_worker": 8}, "algorithm": {"minibatch_size": 1024}}
    session = open_session(sampled(**sizes))
    with pytest.raises(SpecError) as error:
        session.build()
    (problem,) = error.value.problems
    assert problem.path == "meta.sampler"
    assert "GiB for rollouts, this machine has 0.0; take fewer envs (num_workers, num_envs_per_worker)" in problem.message


def test_what_is_needed_is_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is between half and four times the arrays there are."""
    spec = sampled(sampler={"serial_mode": True, "num_envs_per_worker": 32}, algorithm={"minibatch_size": 1024})
    session = SampledSession(spec).build()
    slots = [slot for worker in session.common.slots for groups in worker for slot in groups]
    datasets = [dataset.memory for batch in session.crew.intake.batchers for dataset in batch.free]  # type: ignore[union-attr]
    taken = sum(slab.nbytes for memory in [*(slot.memory for slot in slots), *datasets] for slab in memory.slabs.values())
    info = session.students[0]._info()
    monkeypatch.setattr(shared, "memory_bytes", lambda: 4 * taken)
    check_room(spec, info)
    with pytest.raises(SpecError, match="--jobs"):
        check_room(spec, info, at_once=8)
    monkeypatch.setattr(shared, "memory_bytes", lambda: taken // 2)
    with pytest.raises(SpecError, match=r"smaller datasets$"):
        check_room(spec, info)
    session.close()


def test_many_workers_need_few_descriptors() -> None:
    """A process may have 1024 by default, and each mapping keeps one open."""
    spec = sampled(sampler={"serial_mode": True, "num_workers": 32, "num_envs_per_worker": 1}, algorithm={"minibatch_size": 512})
    fd = common_file()
    before = len(os.listdir("/proc/self/fd"))
    session = SampledSession(spec).build()
    algorithms = [student.agent.algorithm for student in session.students]
    now = len(os.listdir("/proc/self/fd"))
    common = shared.Common(CommonHeap(fd, 0, 1, synced=False), spec, session.students[0]._info(), algorithms, 1)
    assert len(os.listdir("/proc/self/fd")) - now < 10, "one process's view of all slots"
    assert len(common.slots) == 32
    assert now > before
    session.close()
    os.close(fd)


def test_a_session_that_ends_leaves_threads_and_descriptors_as_they_were() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    before = memfds()
    session = SampledSession(sampled(sampler={"serial_mode": True, "num_policies": 2, "async_rl": True}, env={"max_frame": 128}))
    session.run()
    assert torch.get_num_threads() == 2
    del session
    gc.collect()
    assert memfds() <= before
    torch.set_num_threads(threads)
