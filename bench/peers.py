"""Train other libraries for comparison with the runs of a study: `python -m bench.peers [NAME …]`, which `make benchmarks` calls too.

Each peer in PEERS is trained in the envs of its study, with the same seeds and numbers of frames, in its own virtual environment
(bench/speed.py creates it). The returns of its episodes are written to a result file in the same format as the result of a run of the
study, with rows at the same intervals, in the folder `peers` inside the folder of the study's results. A finished run is not repeated; a
run that was killed starts from the beginning. A peer that cannot run on this machine is skipped with a message.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.speed import GYMNASIUM, SB3, SBX, Peer, peer_python
from bench.studies import ROOT, STUDIES
from slm_lab.experiment.files.paths import file_stem
from slm_lab.experiment.report.study_result import VERSION, ResultRun
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.files import replace_file, with_checksum
from slm_lab.lib.limits import processor_name
from slm_lab.spec.load.study_file import load_study
from slm_lab.spec.models.spec import SPEC_VERSION
from slm_lab.spec.models.study import PlannedRun, Study, StudyPlan

SCRIPT = ROOT / "bench" / "peer_training.py"
CLEANRL = Peer("CleanRL", "cleanrl", SCRIPT.stem, ("torch==2.13.0", GYMNASIUM, "tyro", "tensorboard"))
Table = dict[str, list[float | None]]


class Beside(NamedTuple):
    """An agent of another library in the tables of a study."""

    label: str
    program: str
    """Key of PROGRAMS in peer_training.py."""
    peer: Peer
    of: str
    """Label of the study's entry with which the agent is compared."""


PEERS = {
    "mujoco_1m": (
        Beside("CleanRL's PPO", "cleanrl_ppo", CLEANRL, "PPO"),
        Beside("Stable-Baselines3's PPO", "sb3_ppo", SB3, "PPO"),
    ),
    "off_policy_100k": (
        Beside("Stable-Baselines3's SAC", "sb3_sac", SB3, "SAC"),
        Beside("Stable-Baselines3's TD3", "sb3_td3", SB3, "TD3"),
        Beside("SBX's CrossQ", "sbx_crossq", SBX, "CrossQ"),
    ),
}
"""Name of a study → the agents of other libraries in its tables."""


class PeerRun(NamedTuple):
    """A run of a peer."""

    beside: Beside
    env: str
    env_id: str
    frames: int
    log_frequency: int
    random_seed: int
    file: Path
    """The result file."""


def peer_runs(study: Study, folder: Path) -> Iterator[PeerRun]:
    """Yield the runs of a study's peers. A peer has one run for each run of the entry with which it is compared.

    Args: folder: folder of the study's results.
    """
    for beside in PEERS.get(study.name, ()):
        for run in study.runs:
            if run.entry == beside.of:
                file = folder / "peers" / f"{file_stem(beside.label)}_{file_stem(run.env)}_seed{run.random_seed}.json"
                env = run.spec.env
                yield PeerRun(beside, run.env, env.name, env.max_frame, run.spec.meta.log_frequency, run.random_seed, file)


def with_peers(study: Study, folder: Path) -> tuple[StudyPlan, list[ResultRun]]:
    """Return (the study, with additional runs for the runs of its peers that have results; these results)."""
    finished = [run for run in peer_runs(study, folder) if run.file.is_file()]
    planned = tuple(PlannedRun(run.beside.label, run.env, run.random_seed) for run in finished)
    plan = StudyPlan(study.name, study.source, study.spec, study.raw, (*study.runs, *planned), study.scores, study.sets)
    return plan, [ResultRun(run.file) for run in finished]


def rows(episodes: Sequence[Sequence[float]], frames: int, every: int) -> Table:
    """Return the training rows that slm_lab would have written for these episodes.

    There is a row at each multiple of `every` frames, and at the end. The time of a row is the time of the last episode before the row.

    Args: episodes: [frame, seconds, return] of each episode, in order.
    """
    window, rest, seconds = EpisodeWindow(), list(episodes), 0.0
    table: Table = {name: [] for name in ("frame", "wall_t", "epi_new", "return_new", "total_reward", "current_return")}
    for frame in [*range(every, frames, every), frames]:
        while rest and rest[0][0] <= frame:
            end, seconds, total = rest.pop(0)
            window.record([total], int(end))
        count, mean = window.take_new_episodes()
        returns = window.returns
        current = window.current_return(frame)
        last = sum(returns) / len(returns) if returns else None
        for name, value in zip(table, (frame, seconds, count, mean, last, current and current.mean), strict=True):
            table[name].append(value)
    return table


def evaluation_rows(evaluations: Iterable[tuple[float, float, Sequence[float]]]) -> Table:
    """Return the evaluation rows of evaluations given as (frame, seconds, returns)."""
    means = [(frame, seconds, sum(returns) / len(returns)) for frame, seconds, returns in evaluations]
    return {name: [row[index] for row in means] for index, name in enumerate(("frame", "wall_t", "total_reward"))}


def result(run: PeerRun, content: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the content of a result file.

    Args:
        content: the output of peer_training.py.
        model: name of the processor.
    """
    settings = {"env.name": run.env_id, "env.max_frame": run.frames, **content["settings"]}
    if content["evaluations"]:
        settings |= {"meta.rigorous_eval": len(content["evaluations"][0][2]), "meta.eval_deterministic": True}
    identity = {"entry": run.beside.label, "env": run.env, "random_seed": run.random_seed, "digest": "", "settings": settings}
    return {
        "version": VERSION,
        **identity,
        "spec_version": SPEC_VERSION,
        "status": "done",
        "spec_name": run.beside.program,
        "policies": 1,
        "seconds": content["seconds"],
        "versions": content["versions"],
        "git": None,
        "processor": model,
        "sessions": {"0": "done"},
        "failures": {},
        "train": {"0": rows(content["episodes"], content["frames"], run.log_frequency)},
        "eval": {"0": evaluation_rows(content["evaluations"])} if content["evaluations"] else {},
    }


def train(run: PeerRun) -> None:
    """Train a run and write its result. Raises SystemExit if the peer fails."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    threads["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        words = [run.beside.program, run.env_id, str(run.frames), str(run.random_seed), str(file)]
        done = subprocess.run(
            [str(peer_python(run.beside.peer)), str(SCRIPT), *words], env=os.environ | threads, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{run.beside.label} failed with exit code {done.returncode}: {_last_line(done.stderr)}")
        content = json.loads(file.read_text(encoding="utf-8"))
    run.file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(with_checksum(result(run, content, processor_name())), ensure_ascii=False, allow_nan=False)
    replace_file(run.file, f"{text}\n".encode(), sync=True)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no output"


def run_peers(name: str, sets: Sequence[str] = ()) -> None:
    """Train the runs of a study's peers that have no result. A peer that fails is skipped with a message."""
    study, failed = load_study(STUDIES[name].file, name, sets), set[str]()
    for run in peer_runs(study, STUDIES[name].results):
        label = run.beside.label
        if run.file.is_file() or label in failed:
            continue
        sys.stderr.write(f"{label}, {run.env}, random_seed {run.random_seed}\n")
        try:
            train(run)
        except (SystemExit, subprocess.CalledProcessError) as error:
            failed.add(label)
            sys.stderr.write(f"{error}\n{label} is left out\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Train the peers of studies.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"studies: {', '.join(PEERS)} (default: all)")
    parser.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="key of the study, such as random_seed=[0]")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in PEERS:
            parser.error(f"the study '{name}' has no peers; expected one of {', '.join(PEERS)}")
    for name in arguments.names or PEERS:
        run_peers(name, arguments.set)


if __name__ == "__main__":
    main()
