"""Scripts that start children without a main guard, or are interrupted or killed, leave no process or file behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slm_lab.experiment.execute.local import fork_server as server
from slm_lab.lib.system import has_feature
from tests.experiment.commands import processes_with, until

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at /proc")

HEAD = """
import os, sys
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.execute.local import fork_server as server
from slm_lab.experiment.execute.local.interrupt import stop_on_signal
from slm_lab.experiment.execute.executor import Message, TaskDied
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from tests.experiment.process import light, targets
"""
LIGHT = "light.use_light_server()\n"
SAY = """
with LocalExecutor() as parent:
    parent.start("child", targets.state)
    for _ in range(60):
        for event in parent.events(1.0):
            if isinstance(event, Message):
                print(event.content[0]["main"], event.content[0]["torch"])
            elif isinstance(event, TaskDied):
                print(event.reason, event.output)
        if not parent.tasks:
            break
"""
STOPPED = """
stop = Stop()
with stop_on_signal(stop):
    print("begin", flush=True)
    with LocalExecutor() as parent:
        for name in "ab":
            parent.start(name, targets.spin)
        while not stop.requested:
            list(parent.events(0.2))
        parent.stop(20)
        while parent.tasks:
            for event in parent.events(0.2):
                print(event.reason, event.output, flush=True)
server.stop_server()
print("end")
"""
NOTEBOOK = """
import importlib, multiprocessing
from pathlib import Path

def trial():
    with LocalExecutor() as parent:
        parent.start("child", targets.imports, "mine")
        contents = []
        while parent.tasks:
            contents += [event.content for event in parent.events(1.0) if isinstance(event, Message)]
    return contents

def pool(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(abs, [-1])

with server.server_in_use():
    Path("mine.py").write_text("VALUE = 'first'")
    Path("elsewhere").mkdir()
    folder = os.getcwd()
    print(trial() == [("first", False, folder)])
    print(pool("fork"), pool("forkserver"))
    Path("mine.py").write_text("VALUE = 'edited'")
    os.chdir("elsewhere")
    print(trial() == [("edited", False, folder + "/elsewhere")])
    with multiprocessing.get_context("fork").Pool(1) as open_pool:
        print(len(trial()), open_pool.map(abs, [-2]))
print(trial() == [("edited", False, folder + "/elsewhere")])
"""
ITS_OWN_PATH = """
import os, sys
sys.path = [entry for entry in sys.path if entry != ROOT]
sys.path.insert(0, ROOT)
"""
PLACE = """
with LocalExecutor() as parent:
    parent.start("child", targets.nothing)
    while parent.tasks:
        list(parent.events(1.0))
    os.nice(3)
    parent.start("child", targets.state)
    while parent.tasks:
        for event in parent.events(1.0):
            if isinstance(event, Message):
                print(event.content[0]["package"], event.content[0]["from_server"], event.content[0]["priority"])
"""
KILLED_EARLY = """
server.ensure_server()
os.kill(os.getpid(), 9)
"""
KILLED = """
parent = LocalExecutor()
for then in ("wait", "block"):
    parent.start(then, targets.orphan, then, 0.3)
started = 0
while started < 2:
    for event in parent.events(1.0):
        started += 1
        print(event.task.pid, *event.content, flush=True)
print(os.listdir(os.environ["TMPDIR"]), flush=True)
while True:
    list(parent.events(1.0))
"""


class Script:
    """A script in a separate process group; its processes are found by a variable in their environment."""

    def __init__(self, folder: Path, temp: Path, text: str, how: str = "file", **environ: str) -> None:
        self.mark, self.temp = f"SLM_LAB_TEST={folder}", temp
        self.errors = (folder / "stderr").open("w+")
        environ = {**os.environ, "SLM_LAB_TEST": str(folder), "TMPDIR": str(self.temp), "PYTHONPATH": str(ROOT), **environ}
        file = folder / "script.py"
        file.write_text(text)
        command = {"file": ["script.py"], "-c": ["-c", text], "stdin": ["-"]}[how]
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environ,
            stdin=file.open() if how == "stdin" else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            process_group=0,
        )

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def end(self, seconds: float = 60.0) -> str:
        return self.process.communicate(timeout=seconds)[0]

    def said(self) -> str:
        """Return the text that the script wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read()

    def processes(self) -> list[int]:
        """Return the ids of the script's running processes."""
        return processes_with(self.mark)

    def leaves_nothing(self, seconds: float = 20.0) -> None:
        until(lambda: not self.processes() and not list(self.temp.iterdir()), seconds=seconds)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(text: str, how: str = "file", head: str = HEAD, **environ: str) -> Script:
        folder = tmp_path / str(len(made)) if made else tmp_path
        folder.mkdir(exist_ok=True)
        made.append(Script(folder, Path(temp), head + text, how, **environ))
        return made[-1]

    with tempfile.TemporaryDirectory(prefix="slm_", dir="/tmp") as temp:  # a socket's path is short enough, unlike in tmp_path
        yield make
        end(made)


def skip_without(method: str) -> None:
    if method == "forkserver" and not has_feature("forkserver"):
        pytest.skip("no fork server on this system")


def end(made: list[Script]) -> None:
    for one in made:
        for pid in one.processes():
            os.kill(pid, signal.SIGKILL)
        one.end()
        one.errors.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_a_script_without_a_main_guard(method: str, how: str, script: Callable[..., Script], tmp_path: Path) -> None:
    """A child does not run the script again, and files of the working directory do not hide modules that the fork server loads."""
    skip_without(method)
    if method == "forkserver" and how == "file":
        pytest.skip("its folder is on its module path")
    if method == "forkserver":
        for name in ("numpy", "selectors", "torch"):
            (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    safe = "1" if method == "forkserver" else ""  # the script itself must import the real libraries
    light = how == "stdin"
    one = script(
        f"server.THIS_PROCESS.forkserver_unavailable = {method == 'spawn'}\n{LIGHT if light else ''}{SAY}", how, PYTHONSAFEPATH=safe
    )
    assert one.end().splitlines() == [f"None {method == 'forkserver' and not light}", "ended with exit code 0 "], one.said()
    assert one.said() == ""
    one.leaves_nothing()


@pytest.mark.slow
def test_a_temporary_folder_that_no_socket_fits_in(script: Callable[..., Script], tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    one = script(SAY, TMPDIR=str(long))
    assert one.end().splitlines() == ["None False", "ended with exit code 0 "], one.said()
    if server.start_method() == "forkserver":
        assert one.said().count("child processes use the spawn start method") == 1
        assert "Traceback" not in one.said()
    one.leaves_nothing()
    assert list(long.iterdir()) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("earliest", "server"), [(0.0, LIGHT), (0.1, LIGHT), (0.5, "")])
def test_ctrl_c_at_any_moment(earliest: float, server: str, script: Callable[..., Script]) -> None:
    """Ctrl-C reaches the whole process group, as from a terminal, while the server and the children start."""
    one = script(server + STOPPED)
    assert one.line() == "begin"
    seconds = random.uniform(earliest, 3 * earliest)
    time.sleep(seconds)
    os.killpg(one.process.pid, signal.SIGINT)
    output = one.end(30.0)
    assert output.splitlines()[-1:] == ["end"], f"after {seconds} s: {output} {one.said()}"
    assert set(output.splitlines()[:-1]) <= {"ended with exit code 0 "}, f"after {seconds} s: {output}"
    assert one.said() == "", f"after {seconds} s"
    one.leaves_nothing()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_parent_is_killed(method: str, script: Callable[..., Script]) -> None:
    """Children that listen save their work and end, blocked ones are killed; their processes, the server and its folder are removed."""
    skip_without(method)
    one = script(f"server.THIS_PROCESS.forkserver_unavailable = {method == 'spawn'}\n{LIGHT}{KILLED}")
    pids = {int(pid) for _ in range(2) for pid in one.line().split()}
    assert ("pymp" in one.line()) == (method == "forkserver")
    until(lambda: pids < set(one.processes()), seconds=10.0)  # a program that is starting briefly has no environment
    os.kill(one.process.pid, signal.SIGKILL)
    one.leaves_nothing()


@pytest.mark.slow
def test_the_parent_is_killed_while_the_server_loads(script: Callable[..., Script]) -> None:
    one = script(f"{LIGHT}{KILLED_EARLY}")
    one.end()
    one.leaves_nothing()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_notebook(method: str, script: Callable[..., Script]) -> None:
    """In a long-lived process, a later trial sees an edited user module and the current folder, and the user's own pools work."""
    one = script(f"server.THIS_PROCESS.forkserver_unavailable = {method == 'spawn'}\n{LIGHT}{NOTEBOOK}", "-c")
    assert one.end().splitlines() == ["True", "[1] [1]", "True", "1 [2]", "True"], one.said()
    assert one.said() == ""
    one.leaves_nothing()


def test_a_module_path_of_its_own(script: Callable[..., Script]) -> None:
    """The server imports the package from the script's own module path, which is not in PYTHONPATH; a child has the script's priority."""
    text = ITS_OWN_PATH.replace("ROOT", repr(str(ROOT))) + HEAD + LIGHT + PLACE
    one = script(text, PYTHONPATH="", head="")
    from_server = server.start_method() == "forkserver"
    assert one.end().splitlines() == [f"{ROOT / 'slm_lab' / '__init__.py'} {from_server} {os.getpriority(os.PRIO_PROCESS, 0) + 3}"], (
        one.said()
    )
    assert one.said() == ""
    one.leaves_nothing()


def test_two_runs_at_once(script: Callable[..., Script]) -> None:
    """Each run has its own server and children: the end of one run, orderly or not, does not affect another one."""
    runs = [script(LIGHT + STOPPED) for _ in range(3)]
    assert [one.line() for one in runs] == ["begin"] * 3
    interrupted, killed, last = runs
    end = time.monotonic() + 30.0
    expected = 5 if has_feature("forkserver") else 4  # the script, a tracker, the server and two children
    while len(children := last.processes()) < expected:
        assert time.monotonic() < end, children
        time.sleep(0.05)
    os.killpg(interrupted.process.pid, signal.SIGINT)
    os.kill(killed.process.pid, signal.SIGKILL)
    assert interrupted.end(30.0).splitlines()[-1] == "end"
    while killed.processes() or interrupted.processes():
        assert time.monotonic() < end + 30.0
        time.sleep(0.05)
    assert set(last.processes()) >= set(children)
    os.killpg(last.process.pid, signal.SIGINT)
    assert last.end(30.0).splitlines() == ["ended with exit code 0 "] * 2 + ["end"], last.said()
    last.leaves_nothing()
