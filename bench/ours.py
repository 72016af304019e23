"""Run one speed case in slm_lab, with rows, CSV files and checkpoints: `python -m bench.ours CASE [FRAMES [THREADS [CORES [ENV_TIME]]]]`.

CORES: if given, the case runs on a Ray cluster with one node on this machine, which has this number of cores.
ENV_TIME: if given, the time in EnvPool is measured, and only the transitions that EnvPool made are counted.

The last line of the output is {"fps": ..., "frames": ..., "version": ...}. With ENV_TIME, the output also has "env_us", the time of a
transition in EnvPool (µs).
"""

import csv
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import slm_lab
from slm_lab.experiment.plan import Plan


def first_and_last_row(run_csv: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the first and the last row of a table. The time before the first row is start-up time."""
    with run_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows[0], rows[-1]


def frames_and_seconds(run_csv: Path) -> tuple[int, float]:
    """Return the number of transitions and the seconds between the first row and the last.

    A backend may use a frame, which is not a transition, for each reset. Therefore one frame per episode is not counted, for all backends.
    """
    first, last = first_and_last_row(run_csv)
    frames, resets = (int(last[key]) - int(first[key]) for key in ("frame", "epi"))
    return frames - resets, float(last["wall_t"]) - float(first["wall_t"])


@contextmanager
def cluster_of(cores: int) -> Iterator[str | None]:
    """Start a Ray cluster of one node with `cores` cores and yield its address; yield None if `cores` is 0."""
    if not cores:
        yield None
        return
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.getcwd()}
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=False)
    try:
        cluster.add_node(num_cpus=cores, include_dashboard=False)
        yield cluster.address
    finally:
        cluster.shutdown()


def main(case: str, frames: str = "", threads: str = "", cores: str = "", env_time: str = "") -> None:
    sets = [f"{key}={value}" for key, value in (("env.max_frame", frames), ("meta.threads", threads)) if value]
    spec = slm_lab.load_spec(str(Path(__file__).parent / "specs.json"), case, sets)
    result: dict[str, float | str] = {"version": slm_lab.__version__}
    if env_time:  # imported only here, because bench.paired runs this file with checkouts that lack the module
        from bench.envpool_clock import EnvPoolClock

        clock = EnvPoolClock()
        clock.start()
    with TemporaryDirectory() as folder, cluster_of(int(cores or 0)) as cluster:
        slm_lab.Trial(spec, plan=Plan(data_dir=Path(folder), cluster=cluster)).run()
        tables = list(Path(folder).glob("*/info/*_session_df_train.csv"))
        sessions = [frames_and_seconds(table) for table in tables]
        if env_time:
            first, last = first_and_last_row(tables[0])
            transitions, result["env_us"] = clock.between(int(first["frame"]), int(last["frame"]))
            sessions = [(transitions, sessions[0][1])]
    result |= {"fps": sum(count / seconds for count, seconds in sessions), "frames": sum(count for count, _ in sessions)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
