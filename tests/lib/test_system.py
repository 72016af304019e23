"""Tests of the replacements for features that an operating system lacks (SLM_LAB_PORTABLE)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from slm_lab.experiment.execute.executor import Context, Message, TaskDied
from slm_lab.experiment.execute.local import fork_server
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.files.lock import RunLock, in_use
from slm_lab.experiment.files.trackers import check_trackers_installed
from slm_lab.lib import limits, store, system
from slm_lab.lib.system import FEATURES, LINUX_ONLY, VARIABLE, Name, has_feature
from slm_lab.spec.models.meta import MetaSpec
from slm_lab.spec.report import SpecError

linux = pytest.mark.skipif(sys.platform != "linux", reason="denies what only Linux has")


@pytest.fixture(autouse=True)
def _as_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def deny(monkeypatch: pytest.MonkeyPatch, *names: Name) -> None:
    monkeypatch.setenv(VARIABLE, ",".join(names))


@linux
def test_the_variable_denies_features(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(has_feature(name) for name in FEATURES)
    monkeypatch.setenv(VARIABLE, "1")
    assert (
        {name for name in FEATURES if not has_feature(name)}
        == LINUX_ONLY
        == {"memfd", "fallocate", "pidfd", "proc", "affinity", "forkserver"}
    )
    deny(monkeypatch, "memfd")
    assert {name for name in FEATURES if not has_feature(name)} == {"memfd"}
    deny(monkeypatch, "pidfd")
    assert {name for name in FEATURES if not has_feature(name)} == {"pidfd", "forkserver"}, "the fork server needs it"


def test_a_value_that_is_no_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "1", "memfd,proc"):
        monkeypatch.setenv(VARIABLE, value)
        assert system.invalid_variable_message() is None
    monkeypatch.setenv(VARIABLE, "memfd,pidfds")
    assert (system.invalid_variable_message() or "").startswith(
        "SLM_LAB_PORTABLE: unknown feature 'pidfds'; allowed: 1, or some of memfd, "
    )


@linux
@pytest.mark.parametrize(("code", "permitted"), [(errno.EPERM, False), (errno.ENOSYS, False), (errno.EMFILE, True)])
def test_a_sandbox_refuses_a_function(code: int, permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert has_feature("pidfd") == has_feature("forkserver") == permitted
    assert has_feature("memfd")
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert has_feature("memfd") == permitted


SANDBOX = """
import ctypes, struct, sys
# Seccomp: load the number of the system call; is it pidfd_open (434)? then EPERM, else allow it
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, program) != 0:
    sys.exit(77)
from slm_lab.cli import main
sys.exit(main(["demo.json", "ppo_cartpole", "train", "--data-dir", sys.argv[1], "--set", "env.max_frame=2000"]))
"""


@linux
@pytest.mark.slow
def test_a_run_in_a_sandbox(tmp_path: Path) -> None:
    """The two sessions of the demo run as processes in a sandbox that does not allow watching processes by descriptor."""
    done = subprocess.run([sys.executable, "-c", SANDBOX, str(tmp_path)], capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip("this system has no seccomp")
    assert done.returncode == 0, done.stdout + done.stderr
    (saved,) = tmp_path.rglob("ppo_cartpole_spec.json")
    assert '"start_method": "spawn"' in saved.read_text(), "the fork server needs it"


@linux
def test_shared_memory_is_an_unlinked_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deny(monkeypatch, "memfd", "fallocate")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fd = store.create_shared_file()
    try:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path))
        assert list(tmp_path.iterdir()) == []
        named = {"a": store.SharedArray(np.arange(3.0), "merge")}
        one = store.SharedArrays(fd, 0, 2).allocate(named)["a"]
        other = store.SharedArrays(fd, 1, 2, fresh=False).allocate(named)["a"]
        one[1] = 7.0
        assert other.tolist() == [0.0, 7.0, 2.0]
    finally:
        os.close(fd)


@linux
def test_limits_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without /proc, the limits of control groups, the affinity and the model of the processor are unknown."""
    (tmp_path / "groups").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("4096\n")
    assert (limits.cores(tmp_path, tmp_path / "groups"), limits.memory_bytes(tmp_path, tmp_path / "groups")) == (1, 4096)
    deny(monkeypatch, "proc", "affinity")
    assert limits.cores(tmp_path, tmp_path / "groups") == os.cpu_count()
    assert limits.memory_bytes(tmp_path, tmp_path / "groups") > 2**30
    assert "\n" not in limits.processor_description()
    deny(monkeypatch, "proc", "sysconf")
    assert limits.memory_bytes() == 2**63


def test_a_start_method_that_the_system_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    deny(monkeypatch, "forkserver")
    monkeypatch.setattr(fork_server.THIS_PROCESS, "requested_method", "auto")
    assert fork_server.start_method() == "spawn"
    with pytest.raises(SpecError, match=r"'forkserver' is not supported on this system; allowed: auto, spawn"):
        fork_server.use_start_method("forkserver")


def report(context: Context) -> None:
    """Process target: send the features that this child has, its group, its id, and its parent's id."""
    context.send("here", {name for name in FEATURES if has_feature(name)}, os.getpgid(0), os.getpid(), os.getppid())


def die(context: Context) -> None:
    """Process target: kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


@linux
def test_a_task_is_spawned_and_its_death_seen_without_descriptors_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    for name in ("memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    with LocalExecutor() as executor:
        executor.start("reports", report)
        executor.start("dies", die)
        events = []
        deadline = time.monotonic() + 60
        while executor.tasks and time.monotonic() < deadline:
            events += list(executor.events(1.0))
    ((features, group, pid, parent),) = [event.content for event in events if isinstance(event, Message)]
    assert features == FEATURES.keys() - LINUX_ONLY
    assert (group, parent) == (pid, os.getpid()), "a child of this process, not of a fork server"
    assert {event.task.name: event.code for event in events if isinstance(event, TaskDied)} == {"reports": 0, "dies": -signal.SIGKILL}


FOLLOWS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, time
from slm_lab.lib import process
process._GRACE_SECONDS = 0.0
process.start_process_group(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
'''])
time.sleep(60)
"""


@linux
@pytest.mark.parametrize("denied", ["", "pidfd"])
def test_a_group_ends_with_its_owner(denied: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", FOLLOWS], stdout=subprocess.PIPE, env={**os.environ, VARIABLE: denied})
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    try:
        deadline = time.monotonic() + 10.0
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    except FileNotFoundError:
        pass
    finally:
        owner.stdout.close()


def test_a_run_folder_is_not_locked_without_fcntl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock")
    assert in_use(tmp_path / "lock")
    deny(monkeypatch, "fcntl")
    assert not in_use(tmp_path / "lock")
    RunLock(tmp_path / "lock").release()
    lock.release()


def test_trackers_without_fcntl(monkeypatch: pytest.MonkeyPatch) -> None:
    deny(monkeypatch, "fcntl")
    check_trackers_installed("a", MetaSpec())
    with pytest.raises(SpecError, match=r"meta\.track: requires Linux or macOS"):
        check_trackers_installed("a", MetaSpec(track=["wandb"]))


AS_ON_WINDOWS = """
import os, signal, sys
import gymnasium, matplotlib.figure, pandas, plotly, torch  # they may use what is removed below
from slm_lab.lib.system import FEATURES
for symbol in {symbol for feature in FEATURES.values() for symbol in feature.symbols}:
    module, _, name = symbol.rpartition(".")
    if module in ("os", "signal") and symbol not in ("os.name", "os.statvfs"):  # shutil uses the latter here
        delattr(sys.modules[module], name)
sys.modules["fcntl"] = None
from slm_lab.cli import main
run = ["demo.json", "ppo_cartpole", "train", "--data-dir", sys.argv[1], "--set", "meta.max_session=1", "--set"]
assert main([*run, "env.max_frame=4000"]) == 0
assert main(["train@latest", "--data-dir", sys.argv[1], "--set", "env.max_frame=6000"]) == 0
assert main(["doctor", "latest", "--data-dir", sys.argv[1]]) == 0
assert main(["enjoy@latest", "--data-dir", sys.argv[1], "--episodes", "1"]) == 0
sys.stdout.flush()
code = main(["demo.json", "ppo_cartpole", "train", "--data-dir", sys.argv[1]])
print(code)
"""


@pytest.mark.slow
def test_one_session_needs_nothing_that_windows_lacks(tmp_path: Path) -> None:
    """Names that Windows lacks are removed from modules, so that using one without checking raises an error."""
    environment = {**os.environ, VARIABLE: ",".join(FEATURES)}
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2"
    assert "several sessions and meta.distributed require Linux or macOS; on Windows set meta.max_session=1" in done.stderr
