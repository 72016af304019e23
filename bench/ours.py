"""Run one speed case in slm_lab, with rows, CSV files and checkpoints: `python -m bench.ours CASE [FRAMES [THREADS [CORES]]]`.

CORES: if given, the case runs on a Ray cluster with one node on this machine, which has this number of cores.

The last line of the output is {"fps": ..., "frames": ..., "version": ...}. If the env is one of EnvPool, the output also has "env_us", the
time of a frame in EnvPool (µs).
"""

import csv
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import slm_lab
from bench.envpool_clock import EnvPoolClock
from slm_lab.experiment.plan import Plan


def frames_and_seconds(run_csv: Path) -> tuple[int, float]:
    """Return the number of transitions and the seconds between the first row and the last; the time before the first row is start-up time.

    A backend may use a frame, which is not a transition, for each reset. Therefore one frame per episode is not counted, for all backends.
    """
    with run_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, last = rows[0], rows[-1]
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


def main(case: str, frames: str = "", threads: str = "", cores: str = "") -> None:
    sets = [f"{key}={value}" for key, value in (("env.max_frame", frames), ("meta.threads", threads)) if value]
    spec = slm_lab.load_spec(str(Path(__file__).parent / "specs.json"), case, sets)
    clock = EnvPoolClock()
    with suppress(ImportError):
        clock.start()
    with TemporaryDirectory() as folder, cluster_of(int(cores or 0)) as cluster:
        slm_lab.Trial(spec, plan=Plan(data_dir=Path(folder), cluster=cluster)).run()
        sessions = [frames_and_seconds(table) for table in Path(folder).glob("*/info/*_session_df_train.csv")]
    fps, counted = sum(frames / seconds for frames, seconds in sessions), sum(frames for frames, _ in sessions)
    env_time = {"env_us": clock.microseconds} if clock.transitions else {}
    sys.stdout.write(json.dumps({"fps": fps, "frames": counted, "version": slm_lab.__version__, **env_time}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
