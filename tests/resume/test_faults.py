"""Tests of resume after faults: a full disk, a read-only folder, concurrent and blocked processes, damaged files, user errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths, runs_of_spec
from slm_lab.experiment.session.resume import ContinuedRun, continuation_messages, read_run
from slm_lab.spec.load.loader import dump_spec, load_spec
from tests.experiment.commands import frame_of, session_processes
from tests.resume.conftest import Project
from tests.resume.kills import Case, check_complete, check_equal
from tests.resume.launcher import Running
from tests.resume.runs import NET, bundle, rows

PPO = {"algorithm": {"time_horizon": 16, "minibatch_size": 32}, "net": NET, "env": {"num_envs": 4}}
ENV = "tests.experiment.faulty_env:Flawed-v0"


def ppo(frames: int = 1200, **meta: Any) -> Case:
    return Case("PPO", "CartPole-v1", frames, {**PPO, "meta": {"save_interval": 0.0, **meta}})


def endless(**meta: Any) -> Case:
    """Return a case that trains until the test stops it; `--set env.max_frame` sets an end."""
    return ppo(10**9, eval_episodes=0, **meta)  # the frames of evaluations would depend on env.max_frame


def until(condition: Callable[[], Any], *running: Running, seconds: float = 120.0) -> None:
    """Wait for a condition while commands run."""
    end = time.monotonic() + seconds
    while not condition():
        for one in running:
            assert one.poll() is None, one.text
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def has_rows(project: Project, sessions: int = 1, beyond: int = 0) -> Callable[[], bool]:
    """Return a condition: each Session of the latest run has a checkpoint and a row after the frame `beyond`."""

    def begun() -> bool:
        if not runs_of_spec(project.data, "small"):
            return False
        paths = project.paths
        return all(frame_of(paths, index) > beyond and paths.checkpoint(index, "last").exists() for index in range(sessions))

    return begun


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a run, except lock files and TensorBoard's files."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "tensorboard" not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if not path.name.startswith(".lock")}


def killed(project: Project, case: Case, sessions: int = 1) -> RunPaths:
    """Train a run and kill all its processes when each Session has a checkpoint beyond its second row; return its paths."""
    project.write(case.body())
    running = project.start("spec.json", "small", "train")
    until(has_rows(project, sessions, 400), running)
    paths = project.paths
    until(lambda: all(bundle(paths, index)["policies"][0]["clock"]["frame"] > 200 for index in range(sessions)), running)
    running.kill(group=True)
    return project.paths


def finish(project: Project, case: Case, *words: object) -> str:
    """Resume the latest run, end it a few hundred frames later, and check its tables; return the output."""
    saved = [state.load(path) for path in project.paths.model_dir.glob("*_ckpt-last.pt")]
    end = max(bundle["policies"][0]["clock"]["frame"] for bundle in saved) // 100 * 100 + 500
    text = project.run("train@latest", "--set", f"env.max_frame={end}", *words)
    check_complete(project.paths, case)
    return text


def history(paths: RunPaths) -> list[dict[str, Any]]:
    return list(json.loads(paths.spec.read_text())["small"]["meta"]["run"])


# ---- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 20 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill a file system with one file; return the path of the file."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return path


def test_a_disk_that_fills_while_it_trains(project: Project, small_disk: Path) -> None:
    """Training ends with exit code 1 and the cause, and keeps the last complete checkpoint; a resume continues once there is space."""
    case = endless()
    project.data = small_disk / "data"
    project.write(case.body())
    running = project.start("spec.json", "small", "train")
    until(has_rows(project, beyond=400), running)
    filler = fill(small_disk)
    assert running.wait() == 1, running.text
    assert "No space left on device" in running.text
    assert "Traceback" not in running.text
    saved = state.load(project.paths.checkpoint(0, "last"))
    before = content(project.paths.root)
    filler = fill(small_disk)  # fills the space that the run has freed
    text = project.run("train@latest", code=2)
    assert "a run needs 16 MiB of disk space" in text
    assert content(project.paths.root) == before
    filler.unlink()
    text = finish(project, case)
    assert f"session 0: continues at frame {saved['policies'][0]['clock']['frame']:,}; exact" in text


def locked(*folders: Path, on: bool = True) -> None:
    """Make folders immutable, for root too (chattr +i); with `on` False, make them mutable again."""
    for folder in folders:
        done = subprocess.run(["chattr", "+i" if on else "-i", folder], capture_output=True)
        if done.returncode and on:
            pytest.skip("folders cannot be made immutable here")


def test_a_folder_that_turns_read_only_while_it_trains(project: Project) -> None:
    case = endless()
    project.write(case.body())
    running = project.start("spec.json", "small", "train")
    until(has_rows(project, beyond=400), running)
    paths = project.paths
    folders = [paths.root, paths.model_dir, paths.info_dir, paths.graph_dir]
    try:
        locked(*folders)
        code = running.wait()
        saved = state.load(paths.checkpoint(0, "last"))
    finally:
        locked(*folders, on=False)
    assert code == 1, running.text
    assert "Operation not permitted" in running.text
    assert "Traceback" not in running.text
    text = finish(project, case)
    assert f"session 0: continues at frame {saved['policies'][0]['clock']['frame']:,}; exact" in text


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Return a function that makes a folder read-only, for root too, by a bind mount on itself."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        if os.geteuid() != 0 or subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
            pytest.skip("a file system can be mounted by root alone")
        mounted.append(folder)
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("sessions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_folder_that_is_read_only_before_a_resume(sessions: int, project: Project, read_only: Callable[[Path], None]) -> None:
    paths = killed(project, endless(max_session=sessions), sessions)
    before = content(paths.root)
    read_only(paths.root)
    text = project.run("train@latest", code=2)
    assert str(paths.root) in text
    assert "ead-only file system" in text
    assert content(paths.root) == before


# ---- processes


def test_two_resumes_at_once(project: Project) -> None:
    """The second resume names the process that uses the run, and changes nothing; the first one continues."""
    case = endless()
    paths = killed(project, case)
    first = project.start("train@latest")
    until(lambda: b'"pid"' in paths.lock.read_bytes() and len(history(paths)) == 2, first)
    spec = paths.spec.read_bytes()
    text = project.run("train@latest", "--set", "env.max_frame=5000", code=2)
    assert f"the run in {paths.root} is in use by process {first.pid} on {os.uname().nodename}, since " in text
    assert paths.spec.read_bytes() == spec
    assert first.poll() is None
    os.kill(first.pid, signal.SIGINT)
    assert first.wait() == 130
    finish(project, case)
    assert [len(one.get("continues", {})) for one in history(paths)] == [0, 1, 1]


def test_a_resume_of_a_run_that_is_in_progress(project: Project) -> None:
    project.write(endless().body())
    running = project.start("spec.json", "small", "train")
    until(has_rows(project), running)
    text = project.run("train@latest", code=2)
    assert f"in use by process {running.pid}" in text
    assert running.poll() is None


def test_fewer_frames_than_a_session_has_trained(project: Project) -> None:
    paths = killed(project, endless())
    spec = paths.spec.read_bytes()
    text = project.run("train@latest", "--set", "env.max_frame=100", code=2)
    assert "env.max_frame: 100: session 0 " in text
    assert paths.spec.read_bytes() == spec


def test_schedules_that_end_with_a_run_are_extended_with_it(tmp_path: Path) -> None:
    body = ppo(1200).body()
    body["agent"]["net"]["lr_scheduler_spec"] = {"name": "LinearToMin", "frame": 1200}
    body["agent"]["algorithm"]["entropy_coef_spec"] = {
        "name": "linear_decay", "start_val": 0.1, "end_val": 0.0, "start_step": 0, "end_step": 600
    }  # fmt: skip
    paths = RunPaths(tmp_path, "small")
    paths.make_dirs()
    paths.spec.write_text(json.dumps(dump_spec(load_spec({"small": body}, "small"))))

    def ends(*sets: str) -> tuple[int | None, float]:
        spec = read_run(paths, sets).spec
        agent = dump_spec(spec)[spec.name]["agent"]
        return agent["net"].get("lr_scheduler_spec", {}).get("frame"), agent["algorithm"]["entropy_coef_spec"]["end_step"]

    frame = "agent.net.lr_scheduler_spec.frame"
    assert ends() == (1200, 600)
    assert ends("env.max_frame=2400") == (2400, 600), "the entropy bonus did not end with the run"
    assert ends("env.max_frame=2400", f"{frame}=1200") == (1200, 600), "as asked for"
    assert ends("env.max_frame=600") == (1200, 600)
    assert ends("env.max_frame=2400", "agent[0].net.lr_scheduler_spec.frame=1200") == (1200, 600)
    given = '{"name": "LinearToZero", "frame": 1200}'
    assert ends("env.max_frame=2400", f"agent.net.lr_scheduler_spec={given}") == (1200, 600), "the section is given as a whole"
    assert ends("env.max_frame=2400", "agent.net.lr_scheduler_spec=null")[0] is None


def test_keys_that_keep_the_previous_number_of_frames_are_listed(tmp_path: Path) -> None:
    body = ppo(1200).body()
    body["agent"]["net"]["lr_scheduler_spec"] = {"name": "LinearToMin", "frame": 1200}
    spec = load_spec({"small": body}, "small", ["env.max_frame=2400"])
    lines = continuation_messages(ContinuedRun(RunPaths(tmp_path, "small"), spec, [], {"env.max_frame": (1200, 2400)}), None)
    assert "unchanged: agent.net.lr_scheduler_spec.frame: 1200, the previous env.max_frame" in lines
    assert sum("unchanged" in line for line in lines) == 1


def test_a_stale_lock(project: Project) -> None:
    """If the process in the lock was killed, the next start says so and continues; another program may have its id by then."""
    case = endless()
    paths = killed(project, case)
    holder = json.loads(paths.lock.read_text())
    paths.lock.write_text(json.dumps({**holder, "pid": os.getpid()}))
    text = finish(project, case)
    assert f"the last start, process {os.getpid()} on {os.uname().nodename}, since {holder['began']}, was killed" in text
    assert paths.lock.read_bytes() == b""


@pytest.mark.slow
def test_sessions_of_a_killed_trial_that_still_save(project: Project) -> None:
    """A resume waits until these Sessions have ended, and continues from the states that they have saved."""
    case = endless(max_session=2, save_interval=3600.0)
    project.write(case.body())
    running = project.start("spec.json", "small", "train")
    until(lambda: runs_of_spec(project.data, "small") and min(frame_of(project.paths, index) for index in (0, 1)) > 400, running)
    paths = project.paths
    processes = session_processes(paths)
    assert sorted(processes) == [0, 1]
    for process in processes.values():
        os.kill(process, signal.SIGSTOP)
    running.kill()
    resumed = project.start("train@latest", "--set", "env.max_frame=20000")
    time.sleep(1.0)
    assert resumed.poll() is None, resumed.text
    assert not any(paths.checkpoint(index, "last").exists() for index in (0, 1))
    for process in processes.values():
        os.kill(process, signal.SIGCONT)
    assert resumed.wait() == 0, resumed.text
    assert "waiting for a session of process" in resumed.text
    assert resumed.text.count("; exact") == 2 or resumed.text.count("finished at frame") == 2
    assert len(history(paths)[-1].get("continues", {})) in (0, 2)


@pytest.mark.slow
def test_ctrl_c_during_a_resumed_run(project: Project) -> None:
    """A run with four starts equals an uninterrupted one."""
    case = ppo(6000)
    straight = project.train(case.body())
    one = RunPaths(straight.root.rename(project.folder / "straight"), "small")
    project.write(case.body())
    words: tuple[object, ...] = ("spec.json", "small", "train")
    for stop in (1000, 2000, 3000):
        running = project.start(*words)
        until(has_rows(project, beyond=stop), running)
        os.kill(running.pid, signal.SIGINT)
        assert running.wait() == 130, running.text
        words = ("train@latest",)
    text = project.run("train@latest")
    assert "was killed" not in text
    check_complete(project.paths, case)
    check_equal(one, project.paths, case)
    assert len(history(project.paths)) == 4


@pytest.mark.parametrize("sessions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_env_that_blocks(sessions: int, project: Project) -> None:
    """The Session fails and is saved without its env; a resume retries it, and reports that open episodes are dropped."""
    env = {"num_envs": 1, "backend": "sync", "folder": str(project.folder), "blocks": "step", "after": 350}
    meta = {"stall_notice": 0.5, "stall_limit": 3.0, "max_session": sessions, "save_interval": 3600.0}
    case = Case("PPO", ENV, 1000, {**PPO, "env": env, "meta": meta}, exact=False)
    paths = project.train(case.body(), code=1)
    saved = [state.load(path) for path in sorted(paths.model_dir.glob("*ckpt-last.pt"))]
    assert len(saved) in (1, sessions)
    finished = content(paths.root) if sessions == 2 else {}
    text = project.run("train@latest")
    check_complete(paths, case)
    if sessions == 1:
        assert re.search(r"session 0: continues at frame 3\d\d; not exact: open episodes are dropped \(the envs did not respond", text)
        assert history(paths)[-1]["continues"]["0"]["exact"] is False
    else:
        blocked = 0 if "session 1: finished at frame 1,000" in text else 1
        done = {name: data for name, data in finished.items() if f"_s{1 - blocked}_" in name and "graph" not in name}
        assert done
        assert {name: data for name, data in content(paths.root).items() if name in done} == done


# ---- files


def test_a_torn_last_line(project: Project) -> None:
    """An incomplete row of a killed process is cut off, and so are the rows after the checkpoint."""
    case = endless()
    paths = killed(project, case)
    with paths.session_df(0).open("ab") as file:
        file.write(b"999999999,12,13\n9999999")
    finish(project, case)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("left", ["nothing", "a part", "an empty file"])
def test_a_table_that_lost_rows(left: str, project: Project) -> None:
    """Lost rows cannot be recreated: the run continues and reports what is missing."""
    paths = killed(project, endless())
    table = paths.session_df(0)
    text = table.read_bytes()
    end = state.load(paths.checkpoint(0, "last"))["policies"][0]["clock"]["frame"]
    match left:
        case "nothing":
            table.unlink()
        case "a part":
            header, *lines = text.splitlines(keepends=True)
            saved = [line for line in lines if int(line.split(b",", 1)[0]) <= end]  # rows after the checkpoint are cut off anyway
            table.write_bytes(header + b"".join(saved[: len(saved) // 2]))
        case "an empty file":
            table.write_bytes(b"")
    output = project.run("train@latest", "--set", f"env.max_frame={end // 100 * 100 + 500}")
    assert table.name in output, "the loss is named"
    frames = [int(row["frame"]) for row in rows(table)]
    assert frames == sorted(set(frames))
    assert frames[-5:] == [end // 100 * 100 + step for step in (100, 200, 300, 400, 500)]
    assert table.read_text().count("frame,") == 1


@pytest.mark.slow
def test_what_killed_processes_leave_is_removed(project: Project) -> None:
    """These are the temporary files of incomplete writes."""
    case = endless()
    paths = killed(project, case)
    for name in (".0123.tmp", "model/.small_t0_s0_ckpt-best.pt.tmp", "graph/.4567.tmp"):
        (paths.root / name).write_bytes(b"half")
    finish(project, case)  # checks that no temporary file is left


# ---- changes


@pytest.mark.slow
def test_a_finished_run_is_extended(project: Project) -> None:
    """The extended run equals a run that had this length from the beginning."""
    case, longer = ppo(1200), ppo(2400)
    long = project.train(longer.body())
    one = RunPaths(long.root.rename(project.folder / "straight"), "small")
    paths = project.train(case.body())
    before = content(paths.root)
    text = project.run("train@latest")
    assert "session 0: finished at frame 1,200" in text
    assert "--set env.max_frame=… extends the run" in text
    assert {name: data for name, data in content(paths.root).items() if "model/" in name or "info/" in name} == {
        name: data for name, data in before.items() if "model/" in name or "info/" in name
    }
    text = project.run("train@latest", "--set", "env.max_frame=2400")
    assert "changed: env.max_frame: 1200 → 2400" in text
    assert "session 0: continues at frame 1,200; exact" in text
    check_complete(paths, longer)
    check_equal(one, paths, longer)
    start = history(paths)[-1]
    assert start["changed"] == {"env.max_frame": {"from": 1200, "to": 2400}}
    assert start["continues"] == {"0": {"frame": 1200, "exact": True}}
    assert "env.max_frame: 2400 → 1200" in project.run("train@latest", "--set", "env.max_frame=1200", code=2)


def test_keys_that_a_spec_leaves_to_the_run_are_no_differences(project: Project) -> None:
    """A spec without a net and without log_frequency is compared with its saved spec, which contains both."""
    body = {
        "agent": {"algorithm": {"name": "Reinforce"}},
        "env": {"name": "CartPole-v1", "max_frame": 200},
        "meta": {"random_seed": 3},
    }
    project.train(body)
    text = project.run("spec.json", "small", "train@latest", "--set", "env.max_frame=300")
    assert "the saved spec is used" not in text
    project.write(body | {"meta": {"random_seed": 4}})
    text = project.run("spec.json", "small", "train@latest", "--set", "env.max_frame=400")
    assert [line.split(":")[0] for line in text.splitlines() if "the saved spec is used" in line] == ["env.max_frame", "meta.random_seed"]


@pytest.mark.slow
def test_seeds_are_added(project: Project) -> None:
    """The files of finished Sessions do not change; a new Session is the same as in a run that had it from the beginning."""
    both = ppo(max_session=2)
    project.train(both.body())
    one = RunPaths(project.paths.root.rename(project.folder / "straight"), "small")
    paths = project.train(ppo().body())
    done = {name: data for name, data in content(paths.root).items() if "_s0_" in name and "graph" not in name}
    assert done
    text = project.run("train@latest", "--set", "meta.max_session=2")
    assert "session 0: finished at frame 1,200" in text
    assert "session 1: starts at frame 0" in text
    after = content(paths.root)
    assert {name: after[name] for name in done} == done
    check_complete(paths, both)
    assert rows(one.session_df(1)) == rows(paths.session_df(1))


@pytest.mark.slow
def test_a_failed_session_is_retried(project: Project) -> None:
    """If one of two Sessions is killed, the trial ends with exit code 1, and the next start continues only this Session."""
    case = ppo(8000, max_session=2)
    project.write(case.body())
    running = project.start("spec.json", "small", "train")
    until(has_rows(project, 2), running)
    paths = project.paths
    os.kill(session_processes(paths)[1], signal.SIGKILL)
    assert running.wait() == 1, running.text
    assert "1 of 2 sessions failed" in running.text
    done = {name: data for name, data in content(paths.root).items() if "_s0_" in name and "graph" not in name}
    text = project.run("train@latest")
    assert "session 0: finished at frame 8,000" in text
    assert "session 1: continues at frame" in text
    after = content(paths.root)
    assert {name: after[name] for name in done} == done
    check_complete(paths, case)
    assert history(paths)[-1]["continues"]["0"] == {"frame": 8000, "status": "finished"}


# ---- errors of the user


def refused(project: Project, *words: object, says: str, root: Path | None = None) -> None:
    """Check that a command ends with exit code 2 and one message without a traceback, and changes no file of the run."""
    root = root or project.folder
    before = content(root)
    text = project.run(*words, code=2)
    assert says in text, text
    assert len(text.strip().splitlines()) <= 6, text
    assert content(root) == before


@pytest.fixture(scope="module")
def finished(launcher: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a project with a finished run, from which tests make copies."""
    project = Project(launcher, tmp_path_factory.mktemp("finished"))
    project.train(ppo(400).body())
    return project.folder


@pytest.fixture
def done(finished: Path, project: Project) -> Project:
    """Project with a copy of the finished run, which the test may change."""
    shutil.copytree(finished, project.folder, dirs_exist_ok=True)
    return project


def test_latest_in_an_empty_data_folder(project: Project) -> None:
    refused(project, "train@latest", says=f"no run of mode train in {project.data}; train it first")
    project.write(ppo().body())
    refused(project, "spec.json", "small", "train@latest", says=f"no run of mode train of 'small' in {project.data}; train it first")


def test_a_folder_that_is_no_run(done: Project) -> None:
    (done.folder / "other").mkdir()
    for where in ("other", "nowhere", "spec.json"):
        refused(done, f"train@{where}", says=f"'{where}' is not a run folder: it ")


def test_a_run_without_its_spec(done: Project) -> None:
    root = done.paths.root
    for path in root.glob("*_spec.json"):
        path.unlink()
    refused(done, f"train@{root}", says=f"'{root}' is not a run folder: it has no *_spec.json")
    refused(done, "train@latest", says="no run of mode train in")


def test_a_run_whose_spec_was_not_completely_written(done: Project) -> None:
    """Two cases: the spec is missing and only the trial's copy exists; the spec is truncated."""
    paths = done.paths
    spec = paths.spec.read_bytes()
    paths.spec.unlink()
    refused(done, f"train@{paths.root}", says="small_spec.json")
    paths.spec.write_bytes(spec[:100])
    refused(done, f"train@{paths.root}", says="small_spec.json")


@pytest.mark.parametrize(
    ("version", "says"), [(3, "has version 3 of the checkpoint format"), (99, "has version 99 of the checkpoint format")]
)
def test_a_checkpoint_of_another_version(version: int, says: str, done: Project) -> None:
    path = done.paths.checkpoint(0, "last")
    state.save(path, {**state.load(path), "version": version})
    refused(done, "train@latest", "--set", "env.max_frame=800", says=says)
    refused(done, "train@latest", says=str(path))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "other program", "one bit"])
def test_a_damaged_checkpoint(damage: str, done: Project) -> None:
    import torch

    path = done.paths.checkpoint(0, "last")
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "noise":
            path.write_bytes(os.urandom(10_000))
        case "other program":
            torch.save([1, 2, 3], path)
        case "one bit":
            weight = next(iter(state.load(path)["policies"][0]["weights"].values())).numpy().tobytes()
            path.write_bytes(data.replace(weight, bytes([weight[0] ^ 1]) + weight[1:]))
    refused(done, "train@latest", "--set", "env.max_frame=800", says=str(path))
    refused(done, "train@latest", says=f"--set meta.init_from={done.paths.checkpoint(0, 'best')}")


def test_a_damaged_table(done: Project) -> None:
    """A table whose frames do not fit is refused, because new rows would be appended to it; without the table, the run continues."""
    path = done.paths.session_df(0)
    path.write_bytes(path.read_bytes().replace(b"\n400,", b"\n500,"))
    refused(done, "train@latest", "--set", "env.max_frame=800", says=f"{path} is damaged")
    path.unlink()
    done.run("train@latest", "--set", "env.max_frame=800")
    assert [row["frame"] for row in rows(path)] == ["500", "600", "700", "800"]


def test_a_run_of_slm_lab_is_not_continued(done: Project) -> None:
    paths = done.paths
    body = json.loads(paths.spec.read_text())["small"]
    paths.spec.write_text(json.dumps({"name": "small", **body}))
    refused(done, f"train@{paths.root}", says="is a run of SLM Lab, which cannot be continued")


def test_notices_about_the_saved_spec_appear_once(done: Project) -> None:
    """FILE and NAME only serve for the comparison with the saved spec."""
    body = json.loads(done.paths.spec.read_text())
    body["small"]["search"] = {"agent.algorithm.gamma__choice": [0.9, 0.99]}
    for file in (done.paths.spec, done.folder / "spec.json"):
        file.write_text(json.dumps(body))
    text = done.run("spec.json", "small", "train@latest")
    assert text.count("search: ") == 1, text


def test_a_changed_net(done: Project) -> None:
    """A change of the net is refused, by --set and by an edit of the saved spec."""
    paths = done.paths
    says = "cannot be continued with another value of"
    change = "agent.net.hid_layers=[32]"
    refused(done, "train@latest", "--set", change, says=says)
    refused(done, "train@latest", "--set", change, "--set", "env.max_frame=800", says=says)
    body = json.loads(paths.spec.read_text())
    body["small"]["agent"]["net"]["hid_layers"] = [32]
    paths.spec.write_text(json.dumps(body))
    refused(done, "train@latest", says="agent.net.hid_layers")
    refused(done, "train@latest", "--set", "env.max_frame=800", says="agent.net.hid_layers")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("env.name=Acrobot-v1", "env.name"),
        ("env.num_envs=8", "env.num_envs"),
        ("agent.algorithm.name=A2C", "agent.algorithm"),
        ("meta.random_seed=4", "meta.random_seed"),
        ("meta.distributed=shared", "meta.distributed"),
        ("env.max_frame=-1", "env.max_frame"),
        ("env.max_fram=800", "did you mean"),
    ],
)
def test_another_change(change: str, says: str, done: Project) -> None:
    refused(done, "train@latest", "--set", change, says=says)


@pytest.mark.slow
def test_sessions_cannot_be_taken_away(project: Project) -> None:
    project.train(ppo(400, max_session=2).body())
    refused(project, "train@latest", "--set", "meta.max_session=1", says="sessions can be added but not removed")


def test_a_dev_run(project: Project) -> None:
    project.write(ppo(400).body())
    project.run("spec.json", "small", "dev")
    refused(project, "train@latest", says="no run of mode train in")
    (root,) = (project.folder / "data").iterdir()
    refused(project, f"train@{root}", says="is a run of mode dev, which cannot be continued")


@pytest.mark.parametrize("option", ["--episodes=3", "--deterministic", "--render", "--video", "--checkpoint=last", "--session=0"])
def test_an_option_of_enjoy(option: str, done: Project) -> None:
    refused(done, "train@latest", option, says=f"{option.partition('=')[0]} has no effect with train: it is an option of enjoy@; remove it")
