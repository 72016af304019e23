"""Cost of `slm-lab view`: `python -m bench.view [--runs 1000] [--seconds 60] [--polls 2000]`, on Linux.

One run is trained, and its files are linked as further runs. The command prints for the server process:

- the wall-clock time and the processor time of the answers for the list of all runs (the first time, and again), for the page of a run, and
  for a comparison of ten runs;
- the share of a core that the server uses while a run trains and while the list and the page of this run are open (both pages request new
  data at the intervals that the server gives);
- the growth of the memory over many answers about a run that grows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parent.parent
_TICK, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_NAME = "ppo_cartpole"


class Server:
    """A running `slm-lab view`."""

    def __init__(self, pid: int, address: str) -> None:
        self.pid, self.address = pid, address

    def ask(self, name: str, *parameters: tuple[str, Any]) -> dict[str, Any]:
        """Return the answer to a request of the API."""
        with urllib.request.urlopen(f"{self.address}api/{name}?{urlencode(parameters)}", timeout=120) as answer:
            return dict(json.load(answer))

    def seconds(self) -> float:
        """Return the processor time of the server so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def memory(self) -> float:
        """Return the resident memory in MB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE / 1e6


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def command(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "run_lab.py"), *words]


@contextmanager
def serving(data: Path) -> Iterator[Server]:
    """Context manager that runs `slm-lab view`."""
    with subprocess.Popen(command("view", str(data), "--no-browser"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match is not None
        try:
            yield Server(process.pid, match[0])
        finally:
            process.terminate()


def make_runs(data: Path, count: int) -> None:
    """Train a run of two Sessions with 200 rows, and link the files that the view reads as `count` − 1 further runs."""
    sets = ["-s", "env.max_frame=40000", "-s", "meta.log_frequency=200"]
    subprocess.run(command("demo.json", _NAME, "train", "--data-dir", str(data), *sets), check=True, stdout=subprocess.DEVNULL)
    (trained,) = data.glob(f"{_NAME}_*")
    for index in range(count - 1):
        copy = data / f"{_NAME}_{datetime(2026, 1, 1) + timedelta(minutes=index):%Y_%m_%d_%H%M%S}"
        ignored = shutil.ignore_patterns("graph", "model", "*.html", "*.png", "*.js", "*tensorboard")
        shutil.copytree(trained, copy, ignore=ignored, copy_function=os.link)


def show(server: Server, what: str, name: str, *parameters: tuple[str, Any]) -> dict[str, Any]:
    """Request an answer, print its times, and return it."""
    used, begin = server.seconds(), time.perf_counter()
    answer = server.ask(name, *parameters)
    say(f"{what:<44} {time.perf_counter() - begin:7.3f} s, processor {server.seconds() - used:7.3f} s")
    return answer


def show_share(server: Server, data: Path, seconds: float) -> None:
    """Print the share of a core that the server uses while a run trains and two pages are open."""
    earlier = {run["path"] for run in server.ask("runs")["runs"]}
    sets = ["-s", "env.max_frame=1e9", "-s", "meta.max_session=1", "-s", "meta.log_frequency=5000"]
    with subprocess.Popen(command("demo.json", _NAME, "train", "--data-dir", str(data), *sets), stdout=subprocess.DEVNULL) as training:
        try:
            while not (path := next((run["path"] for run in server.ask("runs")["runs"] if run["path"] not in earlier), None)):
                time.sleep(0.5)
            time.sleep(10.0)
            due, version, since = {"runs": 0.0, "run": 0.0}, "", 0
            used, begin, asked = server.seconds(), time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                now = time.perf_counter()
                if now >= due["runs"]:
                    answer = server.ask("runs", ("since", since))
                    since, due["runs"], asked = answer["version"], now + answer["again"], asked + 1
                if now >= due["run"]:
                    answer = server.ask("run", ("path", path), ("version", version))
                    version, due["run"], asked = answer["version"], now + answer["again"], asked + 1
                time.sleep(0.05)
            share = (server.seconds() - used) / (time.perf_counter() - begin)
            say(f"{'share of a core while a run trains':<44} {share:7.2%} ({asked} answers in {seconds:.0f} s)")
        finally:
            training.terminate()


def show_growth(server: Server, data: Path, polls: int) -> None:
    """Print the growth of the memory over `polls` answers for the list and for the page of a run, which grows by a row every ten polls."""
    folder = sorted(data.glob(f"{_NAME}_2026_01_01_*"))[0]
    table = next((folder / "info").glob("*_s0_session_df_train.csv"))
    content = table.read_bytes()
    table.unlink()  # the file is a link, and must not be changed
    table.write_bytes(content)
    last = table.read_text().splitlines()[-1].partition(",")[2]
    since = before = 0.0
    version = ""
    for poll in range(polls + polls // 5):
        if poll == polls // 5:  # after the first answers, which load modules
            before = server.memory()
        if poll % 10 == 0:
            with table.open("a") as file:
                file.write(f"{40_000 + 200 * poll},{last}\n")
        since = server.ask("runs", ("since", int(since)))["version"]
        version = server.ask("run", ("path", folder.name), ("version", version))["version"]
    say(f"{f'memory after {polls} polls of both':<44} {server.memory():7.1f} MB, grown by {server.memory() - before:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.view", description="Measure the cost of `slm-lab view`.")
    parser.add_argument("--runs", type=int, default=1000, help="number of runs in the list (1000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for which the share of a core is measured (60)")
    parser.add_argument("--polls", type=int, default=2000, help="number of answers over which the growth of the memory is measured (2000)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        make_runs(data, arguments.runs)
        with serving(data) as server:
            runs = show(server, f"list of {arguments.runs} runs, first", "runs")["runs"]
            show(server, f"list of {arguments.runs} runs, again", "runs")
            show(server, "sparklines of 100 runs", "sparklines", *(("path", run["path"]) for run in runs[:100]))
            show(server, "page of a run, first", "run", ("path", runs[0]["path"]))
            show(server, "page of another run", "run", ("path", runs[1]["path"]))
            show(server, "comparison of 10 runs", "compare", *(("run", f":{run['path']}") for run in runs[:10]))
            show_share(server, data, arguments.seconds)
            show_growth(server, data, arguments.polls)


if __name__ == "__main__":
    main()
