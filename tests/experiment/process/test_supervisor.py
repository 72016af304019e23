"""Tests of the supervisor's children: their state, their messages, and that no process of theirs remains."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, process
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab.experiment.execute.executor import Event, Message, TaskDied, TaskStalled
from slm_lab.experiment.execute.heartbeat import PHASES
from slm_lab.experiment.execute.local import fork_server as server
from slm_lab.experiment.execute.local import local_executor as supervisor
from slm_lab.experiment.execute.local.child import SharedFd
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.plan import UserError
from slm_lab.lib.process import THREAD_LIMITS
from slm_lab.lib.system import VARIABLE
from slm_lab.spec.report import SpecError
from tests.experiment.commands import alive, gone
from tests.experiment.process import light, targets

PATIENCE = 30.0
ROOT = Path(__file__).parents[3]
linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at /proc")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_TICK", 0.05)
    if server._server._forkserver_pid is None:
        light.use_light_server()


@pytest.fixture(scope="module", autouse=True)
def _real_server_at_the_end() -> Iterator[None]:
    yield
    light.use_real_server()


@pytest.fixture
def real_server() -> None:
    """Use the real fork server, for tests that check which modules it has loaded. It stays for later tests."""
    light.use_real_server()


@pytest.fixture(params=["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "forkserver" and server.start_method() == "spawn":
        pytest.skip("no fork server on this system")
    monkeypatch.setattr(server.THIS_PROCESS, "forkserver_unavailable", request.param == "spawn")
    return str(request.param)


@pytest.fixture
def parent() -> Iterator[LocalExecutor]:
    with LocalExecutor() as one:
        yield one


def until(parent: LocalExecutor, done: Callable[[Event], bool], seconds: float = PATIENCE) -> list[Event]:
    """Return the events up to and including the first for which `done` is true."""
    seen: list[Event] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for event in parent.events(1.0):
            seen.append(event)
            if done(event):
                return seen
    raise AssertionError(f"waited in vain; {seen}, {[child.tail() for child in parent.tasks]}")


def died(event: Event) -> bool:
    return isinstance(event, TaskDied)


def says(kind: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Message) and event.kind == kind


def run(parent: LocalExecutor, target: Any, *args: Any) -> tuple[list[Message], TaskDied]:
    """Run a child to its end; return its messages and the event of its end."""
    parent.start("child", target, *args)
    *messages, end = until(parent, died)
    assert isinstance(end, TaskDied)
    return [message for message in messages if isinstance(message, Message)], end


# ---- the state of a child


@linux
@pytest.mark.usefixtures("real_server")
def test_a_child_is_as_its_parent_at_the_start(method: str, parent: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has its parent's present working directory, environment, umask and cores; signals are neither blocked nor ignored.

    This holds although the fork server started earlier. The environment is set before the arguments, and the libraries that they import,
    are loaded.
    """
    parent.start("first", targets.state)
    until(parent, died)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.delenv("HOME", raising=False)
    before = os.sched_getaffinity(0)
    umask = os.umask(0o027)
    try:
        os.sched_setaffinity(0, {min(before)})
        ((message,), end) = run(parent, targets.state, 7, targets.Variable("MUJOCO_GL"))
    finally:
        os.umask(umask)
        os.sched_setaffinity(0, before)
    assert end.code == 0
    state = message.content[0]
    assert state["args"] == (7, "egl")
    assert state["leads_group"]
    own = {"SIGQUIT"} if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN else set()  # a shell ignores it in background jobs
    assert (state["blocked"], state["ignored"]) == (set(), own)
    assert state["cwd"] == str(tmp_path)
    assert state["umask"] == 0o027
    assert state["cores"] == {min(before)}
    assert state["environ"]["MUJOCO_GL"] == "egl"
    assert "HOME" not in state["environ"]
    limits = dict.fromkeys(THREAD_LIMITS, "1")
    assert {name: value for name, value in state["environ"].items() if value != os.environ.get(name) or name in limits} == limits
    assert state["torch"] == (method == "forkserver")


def test_children_have_random_numbers_of_their_own(method: str, parent: LocalExecutor) -> None:
    (one, _), (two, _) = run(parent, targets.state), run(parent, targets.state)
    assert one[0].content[0]["random"] != two[0].content[0]["random"]


@pytest.mark.usefixtures("real_server")
def test_a_child_has_one_thread(parent: LocalExecutor) -> None:
    assert run(parent, targets.threads)[0][0].content == (1, "1")


def test_an_env_ends_its_simulator(method: str, parent: LocalExecutor) -> None:
    messages, end = run(parent, targets.simulator)
    assert [message.kind for message in messages] == ["ended"] * 3
    assert end.code == 0


def test_a_descriptor_among_the_arguments(method: str, parent: LocalExecutor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    (message,), _ = run(parent, targets.read_fd, SharedFd(fd))
    os.close(fd)
    assert message.content == (b"content", False)


@linux
@pytest.mark.usefixtures("real_server")
def test_the_processes_of_a_child(parent: LocalExecutor) -> None:
    """Processes that a child starts as AsyncVectorEnv does come from the same server, are in the child's group and print to its output."""
    ((message,), end) = run(parent, targets.starts_processes)
    server_pid, child_pid, answers, start_method = message.content
    assert start_method == server.start_method()
    if start_method == "forkserver":
        assert [answer[0] for answer in answers] == [server_pid] * 2
        assert [answer[3] for answer in answers] == [True] * 2
    assert [answer[1] for answer in answers] == [child_pid] * 2
    assert answers[0][2] != answers[1][2]
    assert answers[0][2] != np.random.RandomState(0).random_sample()
    assert end.output.splitlines() == ["from the plain process"] * 2


@linux
@pytest.mark.usefixtures("real_server")
def test_the_server(parent: LocalExecutor) -> None:
    """The fork server has one thread, its own process group and no blocked signals."""
    if server.start_method() == "spawn":
        pytest.skip("no fork server on this system")
    run(parent, targets.nothing)
    pid = server_pid()
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    assert int(status["Threads"]) == 1
    assert int(status["SigBlk"], 16) == 0
    assert os.getpgid(pid) == pid


# ---- messages and output


def test_what_was_sent_before_a_death_comes_first(method: str, parent: LocalExecutor) -> None:
    messages, end = run(parent, targets.many, 3000)
    assert [message.content for message in messages] == [(number, b"x" * (number % 1000)) for number in range(3000)]
    assert end.reason == "killed by SIGKILL (often: out of memory)"
    assert end.code == -signal.SIGKILL


def test_a_torn_message_and_torn_output(method: str, parent: LocalExecutor) -> None:
    """The supervisor does not wait for the rest of a torn message, although another process keeps the pipe open."""
    begin = time.monotonic()
    messages, end = run(parent, targets.torn)
    assert [message.kind for message in messages] == ["whole"]
    assert end.output == "café \ufffd torn at \ufffd"
    assert time.monotonic() < begin + 10


@pytest.mark.parametrize("lines", [10, 120_000])
def test_the_last_output_is_kept(lines: int, parent: LocalExecutor) -> None:
    child, end = parent.start("child", targets.talk, lines), None
    while end is None:
        end = next((event for event in parent.events(1.0) if isinstance(event, TaskDied)), None)
        assert end is not None or os.fstat(child._printed).st_size <= supervisor._PRINTED_BYTES
    assert end.output.splitlines() == [f"line {number:07d}" for number in range(lines)[-20:]]
    assert end.reason == "ended with exit code 3"


def test_output_moves_to_a_log(method: str, parent: LocalExecutor, tmp_path: Path) -> None:
    _, end = run(parent, targets.talk, 2, tmp_path / "log")
    assert (tmp_path / "log").read_text() == "line 0000000\nline 0000001\nin the log\n2026-01-01 00:00:00,000 logged\nlast"
    assert end.output == "line 0000000\nline 0000001\nin the log\nlast"


# ---- processes that remain


@linux
@pytest.mark.parametrize("then", ["return", "crash", "block", "wait"])
def test_what_a_child_started_ends_with_it(method: str, then: str, parent: LocalExecutor) -> None:
    child = parent.start("child", targets.leave, then)
    started = until(parent, says("started"))[-1]
    assert isinstance(started, Message)
    if then == "block":
        parent.kill(child)
    elif then == "wait":
        child.stop(10)
    if then != "block":
        until(parent, died)
    assert gone(started.content[0])
    assert gone(child.pid)
    assert parent.tasks == []


def test_a_child_that_does_not_stop(method: str, parent: LocalExecutor) -> None:
    parent.start("child", targets.deaf)
    until(parent, says("ready"))
    parent.stop(0.6)
    end = until(parent, died)[-1]
    assert isinstance(end, TaskDied)
    assert end.reason == "did not end within 1 seconds"


def test_a_child_that_hangs_at_its_exit(parent: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_END_SECONDS", 0.5)
    messages, end = run(parent, targets.hang_at_exit)
    assert [message.kind for message in messages] == ["done"]
    assert end.code == -signal.SIGKILL


def test_exit_hooks_and_buffers(method: str, parent: LocalExecutor, tmp_path: Path) -> None:
    _, end = run(parent, targets.exit_hook, tmp_path / "hook")
    assert (tmp_path / "hook").read_text() == "was here"
    assert end.output == "buffered"


@linux
def test_nothing_is_left(method: str) -> None:
    run_one(targets.nothing)  # starts the server and completes the imports
    before = sorted(os.listdir("/proc/self/fd"))
    parent = LocalExecutor()
    for target in (targets.echo, targets.deaf, targets.spin):
        child = parent.start("child", target)
        parent.restart(child)
    until(parent, says("ready"))
    run(parent, targets.fail)
    pids = [child.pid for child in parent.tasks]
    assert len(pids) == 3
    parent.close()
    del parent, child
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not any(map(alive, pids))
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)


def run_one(target: Any) -> TaskDied:
    with LocalExecutor() as parent:
        return run(parent, target)[1]


# ---- restarts, stalls


def test_a_restart(method: str, parent: LocalExecutor) -> None:
    """A restarted child has a new process and a new pipe."""
    child = parent.start("child", targets.leave, "crash")
    until(parent, died)
    child.target = targets.state
    parent.restart(child, "new")
    *_, message, end = until(parent, died)
    assert isinstance(message, Message)
    assert isinstance(end, TaskDied)
    state = message.content[0]
    assert (state["restart"], state["args"]) == (1, ("new",))
    assert (child.restart, end.code) == (1, 0)


@pytest.mark.parametrize("how", ["sleep", "gil"])
def test_a_child_that_blocks(method: str, how: str) -> None:
    """A blocked child is noticed whether or not it releases the GIL, and can be restarted when it reaches the limit."""
    with LocalExecutor(stall_notice=None) as parent:
        child = parent.start("child", targets.block, how)
        until(parent, says("pid"))
        parent.stall_notice, parent.stall_limit = 0.5, 1.0
        stalls = [
            event
            for event in until(parent, lambda event: isinstance(event, TaskStalled) and event.level == "limit")
            if isinstance(event, TaskStalled)
        ]
        assert [(event.phase, event.level) for event in stalls] == [("stepping", "notice"), ("stepping", "limit")]
        assert 0.5 <= stalls[0].seconds < 1.0 <= stalls[1].seconds < 3
        assert child.heartbeat.beat_counter // len(PHASES) == 100
        pid = child.pid
        parent.stall_notice = parent.stall_limit = None
        parent.restart(child)
        assert gone(pid)
        end = until(parent, died)[-1]
        assert isinstance(end, TaskDied)
        assert end.code == 0


def test_waiting_is_no_stall() -> None:
    with LocalExecutor(stall_notice=0.2, stall_limit=0.4) as parent:
        parent.start("child", targets.echo)
        until(parent, says("ready"))
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            assert not [event for event in parent.events(0.2) if isinstance(event, TaskStalled)]


def test_the_limit_counts_from_the_first_beat() -> None:
    """The stall limit counts from the first heartbeat, because loading torch on a busy machine may take longer than a short limit."""
    with LocalExecutor(stall_notice=0.2, stall_limit=0.4) as parent:
        parent.start("child", targets.silent)
        until(parent, says("loading"))
        end, levels = time.monotonic() + 1.0, []
        while time.monotonic() < end:
            levels += [event.level for event in parent.events(0.2) if isinstance(event, TaskStalled)]
        assert levels in (["notice"], [])  # the notice comes here, or before the message


def test_a_blocked_child_saves_its_work(method: str, parent: LocalExecutor) -> None:
    child = parent.start("child", targets.interrupted)
    until(parent, says("begun"))
    begin = time.monotonic()
    child.stop(10)
    saved = until(parent, says("saved"))[-1]
    assert isinstance(saved, Message)
    assert saved.content == ("the env has been evaluating for 0 seconds, after a stop was requested",)
    assert 0.2 < time.monotonic() - begin < 3
    until(parent, died)


# ---- the server


CALLS = """
import torch
from importlib import import_module
from slm_lab.experiment.execute.local.fork_server import PRELOAD
calls = []
functions = {
    torch.cuda: ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties", "mem_get_info"),
    torch._C: ("_cuda_init", "_cuda_getDeviceCount", "_accelerator_getAccelerator"),
}
for module, names in functions.items():
    for name in names:
        setattr(module, name, lambda *args, name=name: calls.append(name) or 0)
for name in PRELOAD:
    import_module(name)
torch.cuda.is_available()
print(calls)
"""


@pytest.mark.slow
def test_the_server_asks_nothing_of_cuda() -> None:
    """The server makes no CUDA calls, because a CUDA context does not work after a fork. The last call shows that calls are recorded."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CALLS], env=environ, capture_output=True, text=True, timeout=100)
    assert done.stdout == "['is_available']\n", done.stderr


def test_a_module_of_the_user_is_loaded_in_the_child_alone(
    method: str, parent: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash while a user's module is imported ends only that child, and the same server starts the next one."""
    (tmp_path / "env_that_crashes.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "env_that_works.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    run(parent, targets.nothing)
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert run(parent, targets.imports, "env_that_crashes")[1].code == -signal.SIGSEGV
    for _ in range(2):
        (message,), end = run(parent, targets.imports, "env_that_works")
        assert (message.content[:2], end.code) == ((1, False), 0)
    assert forkserver._forkserver._forkserver_pid == pid  # type: ignore[attr-defined]


def test_a_temporary_folder_that_is_read_only(
    parent: LocalExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if server.start_method() == "spawn":
        pytest.skip("no fork server on this system")

    def read_only(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    server.stop_server()
    monkeypatch.setattr(server.THIS_PROCESS, "forkserver_unavailable", False)
    monkeypatch.setitem(process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    (message,), end = run(parent, targets.state)
    assert (message.content[0]["from_server"], end.code) == (False, 0)
    (record,) = caplog.records
    assert "the fork server cannot run (Read-only file system); child processes use the spawn start method" in record.getMessage()


def server_pid() -> int:
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


@linux
def test_the_server_is_killed(parent: LocalExecutor) -> None:
    """If the server is killed, its children continue, the next child comes from a new server, and unread exit codes are unknown."""
    if server.start_method() == "spawn":
        pytest.skip("no fork server on this system")
    first = parent.start("first", targets.echo)
    until(parent, says("ready"))
    killed = server_pid()
    light.use_light_server()
    os.kill(killed, signal.SIGKILL)
    first.send("still there?")
    assert until(parent, says("echo"))[-1].content[0] == "still there?"  # type: ignore[union-attr]
    second = parent.start("second", targets.echo)
    until(parent, says("ready"))
    assert server_pid() != killed
    assert server.start_method() == "forkserver"
    first.stop(10)
    end = until(parent, died)[-1]
    assert isinstance(end, TaskDied)
    assert end.task == first
    assert end.reason == "ended with exit code 255 (or an unknown one, if the fork server was killed)"
    second.stop(10)
    end = until(parent, died)[-1]
    assert isinstance(end, TaskDied)
    assert end.code == 0


def test_a_server_that_cannot_load(parent: LocalExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A server that cannot load ends; children then start by spawn, and one notice says so."""
    if server.start_method() == "spawn":
        pytest.skip("no fork server on this system")
    server.stop_server()
    monkeypatch.setattr(server.THIS_PROCESS, "forkserver_unavailable", False)
    monkeypatch.setattr(server, "_server_environment", lambda: {"PYTHONPATH": "/none", "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "no seed"})
    for _ in range(2):
        (message,), end = run(parent, targets.state)
        assert (message.content[0]["torch"], end.code) == (False, 0)
    (record,) = caplog.records
    assert "child processes use the spawn start method" in record.getMessage()
    assert forkserver._forkserver._forkserver_pid is None  # type: ignore[attr-defined]


@linux
def test_the_server_ends_with_its_last_use(parent: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    if server.start_method() == "spawn":
        pytest.skip("no fork server on this system")
    server.stop_server()
    light.use_light_server()
    monkeypatch.setattr(server.THIS_PROCESS, "server_users", 0)
    with server.server_in_use():
        with server.server_in_use():
            run(parent, targets.nothing)
        pid = server_pid()
        os.kill(pid, 0)
    assert forkserver._forkserver._forkserver_pid is None  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("requested", "supported", "forkserver_unavailable", "method"),
    [
        ("auto", True, False, "forkserver"),
        ("auto", False, False, "spawn"),
        ("auto", True, True, "spawn"),
        ("spawn", True, False, "spawn"),
        ("forkserver", True, False, "forkserver"),
    ],
)
def test_start_method(requested: Any, supported: bool, forkserver_unavailable: bool, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "has_feature", lambda name: supported)
    monkeypatch.setattr(server.THIS_PROCESS, "forkserver_unavailable", forkserver_unavailable)
    monkeypatch.setattr(server.THIS_PROCESS, "requested_method", "auto")
    server.use_start_method(requested)
    assert server.start_method() == method


def test_a_fork_server_that_is_wanted_and_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user requests the fork server and it cannot run, an error is raised; no other start method is used."""
    monkeypatch.setattr(server.THIS_PROCESS, "requested_method", "auto")
    monkeypatch.setattr(server, "has_feature", lambda name: False)
    with pytest.raises(SpecError, match=r"meta\.start_method"):
        server.use_start_method("forkserver")
    monkeypatch.setattr(server, "has_feature", lambda name: True)
    server.use_start_method("forkserver")
    with pytest.raises(UserError, match=r"meta\.start_method"):
        server.use_spawn("no temporary folder")


def test_a_child_that_cannot_start(parent: LocalExecutor) -> None:
    run(parent, targets.nothing)  # starts the server and completes the imports
    before = sorted(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else []
    with pytest.raises(Exception, match="lambda"):
        parent.start("child", lambda _: None)
    assert parent.tasks == []
    if before:
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_fault_in_native_code(parent: LocalExecutor) -> None:
    """The reason names the signal and its meaning; the output shows the location, without the list of extension modules."""
    _, end = run(parent, targets.crash)
    assert re.fullmatch(r"killed by SIGSEGV \(.+\)", end.reason)
    assert "in crash" in end.output
    assert "Extension modules" not in end.output


def test_a_child_that_closes_its_connection(parent: LocalExecutor) -> None:
    """A child that closes its connection ends with an explanation instead of waiting forever."""
    messages, end = run(parent, targets.close_all)
    assert (messages, end.code) == ([], 1)
    assert "closed file descriptors" in end.output


def test_a_child_that_closes_its_connection_and_goes_on(parent: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the pipe shows a death, such a child is killed, and the reason does not suggest a lack of memory."""
    monkeypatch.setenv(VARIABLE, "pidfd")
    monkeypatch.setattr(supervisor, "_EXIT_SECONDS", 0.2)
    messages, end = run(parent, targets.close_all_and_wait)
    assert (messages, end.code) == ([], -signal.SIGKILL)
    assert end.reason == "closed file descriptors that it did not open"


def test_a_child_that_calls_exit(parent: LocalExecutor) -> None:
    """A child that calls sys.exit(0) without sending a result has failed."""
    (message,), end = run(parent, targets.exit_0)
    assert (message.kind, end.code) == ("failed", 1)
    assert "sys.exit(0) was called" in message.content[0]
