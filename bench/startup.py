"""Start-up time of child processes, compared with another checkout: `python -m bench.startup OTHER_CHECKOUT [CASE …] [--rounds 5]`.

In every round, both checkouts are measured one after the other in alternating order, each in its own processes. A start-up time is measured
from the start of the command until every Session has written its first row. The first row follows one rollout, which has parts from all
rollout workers. The command prints the medians and their range, and the ratio of this checkout to the other one: its median over the
rounds and its range.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT = 120.0
_POLL = 0.002
_A3C_FRAMES = 512_000


def ppo(**meta: Any) -> dict[str, Any]:
    """Return a spec of PPO on CartPole that trains until it is killed and writes a row after each rollout."""
    algorithm = {
        "name": "PPO", "gamma": 0.99, "lam": 0.95, "clip_eps_spec": {"name": "no_decay", "start_val": 0.2},
        "entropy_coef_spec": {"name": "no_decay", "start_val": 0.01}, "val_loss_coef": 0.5, "time_horizon": 32, "minibatch_size": 64,
        "training_epoch": 2,
    }  # fmt: skip
    net = {"name": "MLPNet", "hid_layers": [64, 64], "hid_layers_activation": "tanh", "optim_spec": {"name": "Adam", "lr": 3e-4}}
    agent = {"name": "PPO", "algorithm": algorithm, "memory": {"name": "OnPolicyBatchReplay"}, "net": net}
    env = {"name": "CartPole-v1", "num_envs": 4, "max_frame": 10**8}
    return {"agent": agent, "env": env, "meta": {"log_frequency": 128, "random_seed": 0, **meta}}


def a3c(workers: int, max_frame: int) -> dict[str, Any]:
    """Return a spec of A3C on CartPole with one env per worker.

    With max_frame 10^8, for runs that are killed, a row is written after each rollout of 32 steps. Other runs write ten rows.
    """
    algorithm = {
        "name": "ActorCritic", "gamma": 0.99, "lam": 0.95, "entropy_coef_spec": {"name": "no_decay", "start_val": 0.01},
        "val_loss_coef": 0.5, "training_frequency": 32,
    }  # fmt: skip
    optimizer = {"name": "GlobalAdam", "lr": 1e-3}
    net = {"name": "MLPNet", "hid_layers": [64, 64], "hid_layers_activation": "tanh", "clip_grad_val": 0.5, "optim_spec": optimizer}
    agent = {"name": "A3C", "algorithm": algorithm, "memory": {"name": "OnPolicyBatchReplay"}, "net": net}
    env = {"name": "CartPole-v1", "num_envs": 1, "max_frame": max_frame}
    every = 32 if max_frame == 10**8 else max_frame // 10
    return {"agent": agent, "env": env, "meta": {"max_session": workers, "distributed": "synced", "log_frequency": every, "random_seed": 0}}


@contextmanager
def training(checkout: Path, spec: dict[str, Any], *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Context manager that trains a spec in a process, and kills the process and its descendants after the block.

    Yields the process and the folder with the run's data.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps({"case": spec}))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)])}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # if it is set, every process compiles the package again
        command = [sys.executable, str(checkout / "run_lab.py"), str(file), "case", "train", "--data-dir", folder, *options]
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            yield process, Path(folder)
        finally:
            for pid in (*descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, their child processes, and so on."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    pids, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        pids += level
    return pids


def wait_until(process: subprocess.Popen[bytes], done: Callable[[], bool]) -> None:
    """Wait until `done` returns true. Raises SystemExit if the process ends before that, or after a timeout."""
    begin = time.monotonic()
    while not done():
        if process.poll() is not None:
            assert process.stderr is not None
            raise SystemExit(process.stderr.read().decode()[-2000:])
        if time.monotonic() - begin > _TIMEOUT:
            raise SystemExit(f"not done within {_TIMEOUT:.0f} s")
        time.sleep(_POLL)


def tables_with_rows(folder: Path) -> int:
    """Return the number of training tables that have a row."""
    return sum(file.read_bytes().count(b"\n") >= 2 for file in folder.glob("*/info/*_session_df_train.csv"))


def seconds_to_rows(checkout: Path, spec: dict[str, Any], *options: str) -> float:
    """Return the seconds until every Session has written a row."""
    sessions, begin = spec["meta"].get("max_session", 1), time.perf_counter()
    with training(checkout, spec, *options) as (process, folder):
        wait_until(process, lambda: tables_with_rows(folder) == sessions)
        return time.perf_counter() - begin


def memory(checkout: Path) -> float:
    """Return the memory, in MB, of 8 Sessions and all processes that they need; shared pages are counted once (PSS)."""
    with training(checkout, ppo(max_session=8), "--jobs", "8") as (process, folder):
        wait_until(process, lambda: tables_with_rows(folder) == 8)
        total = 0
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1000


def replacement(checkout: Path) -> float:
    """Return the seconds from the death of a rollout worker until its replacement has made a step."""
    spec = ppo(sampler=_workers(2, 2), max_restart=5)
    with tempfile.TemporaryDirectory() as marks:
        spec["env"] |= {"name": "bench.startup_env:Marked-v0", "folder": marks}
        with training(checkout, spec) as (process, folder):
            wait_until(process, lambda: tables_with_rows(folder) == 1)
            before = {file.name for file in Path(marks).iterdir()}
            victim = next(pid for pid in map(int, before) if pid in descendants(process.pid))
            begin = time.time()
            os.kill(victim, signal.SIGKILL)

            def new() -> list[Path]:
                return [file for file in Path(marks).iterdir() if file.name not in before]

            wait_until(process, lambda: bool(new()))
            return new()[0].stat().st_mtime - begin


def a3c_speed(checkout: Path) -> float:
    """Return the frames per second of 4 workers with one env each, on all cores, from the first row of each worker to its last."""
    with training(checkout, a3c(4, _A3C_FRAMES // 4)) as (process, folder):
        process.wait()
        spans = []
        for file in folder.glob("*/info/*_session_df_train.csv"):
            header, *rows = [line.split(",") for line in file.read_text().splitlines()]
            frame, wall = ([float(row[header.index(name)]) for row in rows] for name in ("frame", "wall_t"))
            spans.append((frame[-1] - frame[0]) / (wall[-1] - wall[0]))
        return sum(spans)


def concurrent_sessions(count: int, checkout: Path) -> float:
    """Return the seconds until each of `count` Sessions, which train at the same time, has written a row."""
    return seconds_to_rows(checkout, ppo(max_session=count), "--jobs", str(count))


CASES: dict[str, tuple[Callable[[Path], float], str]] = {
    **{f"sessions_{count}": (partial(concurrent_sessions, count), "s") for count in (1, 2, 4, 8)},
    "sampler_8": (lambda checkout: seconds_to_rows(checkout, _sampler()), "s"),
    "a3c_8": (lambda checkout: seconds_to_rows(checkout, a3c(8, 10**8)), "s"),
    "memory_8": (memory, "MB"),
    "replacement": (replacement, "s"),
    "a3c_one_env": (a3c_speed, "frames/s"),
}
"""Name of a case → (function that measures a checkout, unit of the result)."""


def _sampler() -> dict[str, Any]:
    spec = ppo(sampler=_workers(8, 1))
    spec["env"]["num_envs"] = 8
    spec["meta"]["log_frequency"] = 256
    return spec


def _workers(count: int, envs: int) -> dict[str, Any]:
    """Return meta.sampler with `count` workers of `envs` envs each, and one rollout of each worker per update.

    Older versions know these keys too.
    """
    return {"async_rl": False, "num_workers": count, "num_envs_per_worker": envs, "num_batches_per_epoch": count * envs * 32 // 64}


def compared(case: str, checkouts: Sequence[Path], rounds: int) -> str:
    """Measure a case in both checkouts, and return its line of output."""
    measure, unit = CASES[case]
    values: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            values[which].append(measure(checkouts[which]))
    ratios = [here / there for here, there in zip(*values, strict=True)]
    here, there = (f"{median(results):,.4g} ({min(results):,.4g} to {max(results):,.4g})" for results in values)
    return f"{case}: {here} against {there} {unit}, ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description="Compare the start-up times of two checkouts.")
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT", help="the root folder of the other checkout")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each case (5)")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"unknown case {min(unknown)!r}; expected some of {', '.join(CASES)}")
    import torch

    sys.stdout.write(f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    for case in arguments.cases:
        sys.stdout.write(compared(case, (ROOT, arguments.other.resolve()), arguments.rounds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
