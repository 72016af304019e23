"""Training frames per second against Stable-Baselines3, SBX, rl_games, Sample Factory and RLlib: `python -m bench.speed` (or `make bench`).

The libraries are measured in turn. Each run of a case is a new process, with `Case.threads` torch threads per process (default 1). A case
with one process is pinned to as many cores as it has threads. The time is measured from the first row (after log_frequency frames) to the
last, so that it does not include start-up and compilation. Cases with rl_games need a checkout of rl_games in PYTHONPATH (see
peer_rl_games.py); they also show the time that a frame takes outside of EnvPool. The medians over the rounds, their spread and the ratios
are printed and saved in bench/results/.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from slm_lab.lib.limits import processor_name

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Peer:
    """Another library, which has its own virtual environment."""

    name: str
    folder: str
    module: str
    packages: tuple[str, ...]
    constrained: bool = True
    """Whether the library is installed with the constraints.txt of slm_lab."""


GYMNASIUM = "gymnasium[mujoco]==1.4.0"
ATARI = ("gymnasium[atari]==1.4.0", "opencv-python")
SB3 = Peer("Stable-Baselines3", "sb3", "peer_sb3", ("stable-baselines3==2.9.2", "torch==2.13.0", GYMNASIUM, *ATARI))
CONTRIB = Peer("MaskablePPO", "contrib", "peer_sb3", ("sb3-contrib==2.9.2", "stable-baselines3==2.9.2", "torch==2.13.0", GYMNASIUM, *ATARI))
QRDQN = Peer("QRDQN of sb3-contrib", CONTRIB.folder, CONTRIB.module, CONTRIB.packages)
OURS = Peer("slm_lab's DQN", "", "ours", ())
SBX = Peer("SBX", "sbx", "peer_sb3", ("sbx-rl==0.28.0", "torch==2.13.0", GYMNASIUM), constrained=False)
RLLIB = Peer("RLlib", "rllib", "peer_rllib", ("ray[rllib]==2.60.0", "torch==2.13.0"), constrained=False)
RL_GAMES = Peer(
    "rl_games",
    "rl_games",
    "peer_rl_games",
    ("torch==2.13.0", "envpool==1.2.5", "gymnasium==1.4.0", "tensorboard", "tensorboardX", "PyYAML", "psutil", "setproctitle"),
)
SF = Peer("Sample Factory", "sf", "peer_sf", ("sample-factory==2.1.1", "torch==2.13.0"), constrained=False)


@dataclass(frozen=True)
class Case:
    """A spec of specs.json, and the libraries that run the same training."""

    title: str
    """Title of the case in the table for readers."""
    peers: tuple[Peer, ...]
    pinned: bool = True
    """Whether the process of each library is pinned to as many cores as it has threads."""
    threads: int = 1
    """Number of torch threads in each process."""
    cluster_cores: str = ""
    """Number of cores of the Ray cluster on this machine on which slm_lab runs; "": without Ray."""
    peer_case: str | None = None
    """Case that the peer runs if the peer lacks the mode of this case, with the same numbers of envs, steps and weights in one process.
    None: the same case."""
    spec: str | None = None
    """Key in specs.json; None: the name of the case."""


def _beside_rl_games(env: str, spec: str) -> dict[str, Case]:
    """Return the cases of an env on one core and on two."""
    title = f"PPO {env}, 64 envs × 256 steps, 128-64-32 ELU, minibatch 2,048, 5 epochs"
    return {
        spec: Case(title, (RL_GAMES,)),
        f"{spec}_two_cores": Case(f"{title}, two cores", (RL_GAMES,), threads=2, spec=spec),
    }


CASES = {
    "ppo_cartpole": Case("PPO CartPole-v1, 8 envs × 128 steps, minibatch 256, 4 epochs", (SB3,)),
    "ppo_masked": Case("PPO with action masks, two of 40 actions valid, 8 envs × 128 steps, minibatch 256, 4 epochs", (CONTRIB,)),
    "a2c_cartpole": Case("A2C CartPole-v1, 8 envs × 32 steps", (SB3,)),
    "a2c_one_env": Case("A2C CartPole-v1, 1 env × 32 steps", (SB3,)),
    "ppo_halfcheetah": Case("PPO HalfCheetah-v5, 8 envs × 256 steps, minibatch 256, 10 epochs", (SB3, SBX)),
    "ppo_hopper_arc": Case("PPO Hopper-v5 as SLM Lab publishes it: 256 × 256 tanh, 16 envs × 256 steps, minibatch 64, 10 epochs", (SB3,)),
    "ppo_pong": Case("PPO ALE/Pong-v5, 8 envs × 128 steps, minibatch 256, 4 epochs, two threads", (SB3,), threads=2),
    "dqn_cartpole": Case("DQN CartPole-v1, 1 env, batch 64, one update per step", (SB3, SBX)),
    "qrdqn_cartpole": Case("QR-DQN CartPole-v1, 200 quantiles, 1 env, batch 64, one update per step", (QRDQN,)),
    "pqn_cartpole": Case("PQN CartPole-v1, 32 envs × 32 steps", (OURS,), peer_case="dqn_cartpole"),
    "sac_halfcheetah": Case("SAC HalfCheetah-v5, 1 env, batch 256, 256 × 256, one update per step", (SB3, SBX)),
    "td3_halfcheetah": Case("TD3 HalfCheetah-v5, 1 env, batch 256, 256 × 256, one update per step, policy delay 2", (SB3, SBX)),
    "sac_halfcheetah_bfloat16": Case(
        "the same in bfloat16, the other side in float32: SAC HalfCheetah-v5, 1 env, batch 256, 256 × 256, one update per step",
        (SBX,),
        peer_case="sac_halfcheetah",
    ),
    "crossq_halfcheetah": Case("CrossQ HalfCheetah-v5, 1 env, batch 256, critics 1024 × 1024, one update per step", (SBX,)),
    "a3c_cartpole": Case("A3C CartPole-v1, 2 workers × 4 envs × 32 steps, beside A2C", (SB3,), pinned=False, peer_case="a2c_cartpole"),
    "a3c_one_env": Case("A3C CartPole-v1, 4 workers × 1 env × 32 steps, beside A2C", (SB3,), pinned=False, peer_case="a2c_one_env"),
    "appo_cartpole": Case(
        "asynchronous PPO CartPole-v1, 2 workers × 8 envs × 128 steps, 4 minibatches of 256, 4 epochs", (SF,), pinned=False
    ),
    "cluster_ppo": Case("PPO CartPole-v1 on a Ray cluster, 2 workers × 8 envs × 128 steps", (RLLIB,), pinned=False, cluster_cores="4"),
    "cluster_impala": Case("IMPALA CartPole-v1 on a Ray cluster, 2 workers × 8 envs × 64 steps", (RLLIB,), pinned=False, cluster_cores="4"),
    **_beside_rl_games("HalfCheetah-v5", "ppo_halfcheetah_envpool"),
    **_beside_rl_games("CheetahRun-v1", "ppo_cheetahrun"),
    **_beside_rl_games("Go1JoystickFlatTerrain-v1", "ppo_go1"),
}


def peer_python(peer: Peer) -> Path:
    """Return the Python of the peer's virtual environment, which is created first if it does not exist."""
    home = ROOT / ".peers" / peer.folder
    python, ready = home / "bin" / "python", home / ".ready"
    if not ready.exists() or ready.read_text() != "\n".join(peer.packages):
        sys.stderr.write(f"setting up {home.relative_to(ROOT)} (once)\n")
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        constraints = ["-c", str(ROOT / "constraints.txt")] if peer.constrained else []
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *constraints, *peer.packages], check=True)
        ready.write_text("\n".join(peer.packages))
    return python


def measure(command: list[str], case: Case) -> dict[str, Any]:
    """Run a case once with one of the compared libraries. Return the result that it prints as its last line."""
    # the libraries that torch uses have the same number of threads per process
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(case.threads))
    cores = sorted(os.sched_getaffinity(0))[: case.threads]
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if case.pinned else []
    done = subprocess.run([*pinned, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_case(name: str, rounds: int) -> dict[str, Any]:
    """Measure slm_lab and the peers of a case in each round.

    Returns the frames per second of every round, the times of a transition in EnvPool if the libraries report them, and the number of
    frames and the version of each library.
    """
    case, threads = CASES[name], str(CASES[name].threads)
    spec = case.spec or name
    sides = {"slm_lab": [sys.executable, "-m", "bench.ours", spec, "", threads if case.threads > 1 else "", case.cluster_cores]}
    if RL_GAMES in case.peers:
        sides["slm_lab"].append("env_time")
    for peer in case.peers:
        if peer is OURS:
            sides[peer.name] = [sys.executable, "-m", "bench.ours", case.peer_case or spec]
        else:
            sides[peer.name] = [str(peer_python(peer)), "-m", f"bench.{peer.module}", case.peer_case or spec, threads]
    fps: dict[str, list[float]] = {side: [] for side in sides}
    env_us: dict[str, list[float]] = {}
    result: dict[str, Any] = {"case": name, "fps": fps, "env_us": env_us, "frames": {}, "versions": {}}
    for number in range(rounds):
        # the order is reversed in every second round, so that a machine that becomes faster or slower favours no library
        for side in sorted(sides, reverse=bool(number % 2)):
            measured = measure(sides[side], case)
            fps[side].append(round(measured["fps"], 1))
            if "env_us" in measured:
                env_us.setdefault(side, []).append(round(measured["env_us"], 2))
            result["versions"][side], result["frames"][side] = measured["version"], measured["frames"]
            sys.stderr.write(f"{name} round {number + 1}/{rounds} {side}: {measured['fps']:,.0f} frames/s\n")
    return result


def rows(result: dict[str, Any]) -> list[str]:
    """Return a line of the table for each peer: both medians with their spread, the ratio of the medians, and the spread of the ratios."""
    fps, lines = result["fps"], []
    for peer in peers_of(result):
        ratios = [a / b for a, b in zip(fps["slm_lab"], fps[peer], strict=True)]
        ours, theirs = (f"{median(rates):9,.0f} ({min(rates):,.0f} to {max(rates):,.0f})" for rates in (fps["slm_lab"], fps[peer]))
        ratio = f"{median(fps['slm_lab']) / median(fps[peer]):5.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"{result['case']:18} {ours:30} {peer:18} {theirs:30} {ratio}")
        if {"slm_lab", peer} <= set(result.get("env_us", ())):
            lines.append(outside(result, peer))
    return lines


def peers_of(result: dict[str, Any]) -> list[str]:
    """Return the names of the peers in the result of a case. (In old reports, "env alone" is EnvPool without an agent.)"""
    return [side for side in result["fps"] if side not in ("slm_lab", "env alone")]


def outside(result: dict[str, Any], peer: str) -> str:
    """Return a line with the times per transition in EnvPool and outside of it (µs), of slm_lab and a peer, and the ratio of the times
    outside of EnvPool with its spread.

    The time outside of EnvPool is computed for each round: the time of a transition minus the time that EnvPool takes for it.
    """
    fps, env_us = result["fps"], result["env_us"]
    times = {side: [1e6 / rate - env for rate, env in zip(fps[side], env_us[side], strict=True)] for side in ("slm_lab", peer)}
    ours, theirs = (median(times[side]) for side in ("slm_lab", peer))
    ratios = [a / b for a, b in zip(times["slm_lab"], times[peer], strict=True)]
    return (
        f"    in EnvPool {median(env_us['slm_lab']):.1f} µs per frame, {peer} {median(env_us[peer]):.1f} µs; outside of it {ours:.1f} µs, "
        f"{peer} {theirs:.1f} µs: {ours / theirs:.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def shown(rate: float) -> str:
    """Return frames per second as text with at least three significant digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def markdown(report: dict[str, Any]) -> str:
    """Return a report as a Markdown table for readers."""
    lines = ["| case | slm_lab (frames/s) | compared with | its frames/s | ratio |", "|---|---|---|---|---|"]
    for result in report["results"]:
        fps = result["fps"]
        for peer in peers_of(result):
            ours, theirs = median(fps["slm_lab"]), median(fps[peer])
            ratios = [a / b for a, b in zip(fps["slm_lab"], fps[peer], strict=True)]
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            beside = f"{peer} {result['versions'][peer]}"
            lines.append(f"| {CASES[result['case']].title} | {shown(ours)} | {beside} | {shown(theirs)} | {ours / theirs:.2f}{spread} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description="Compare the training speed with other libraries.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each library per case (3)")
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="FILE", help="print saved reports as a Markdown table, without measurements"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.cases) - set(CASES)):
        parser.error(f"unknown case {unknown[0]!r}; expected one of {', '.join(CASES)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> None:
    options = arguments()
    if options.table:
        reports = [json.loads(file.read_text()) for file in options.table]
        sys.stdout.write(markdown({"results": [result for report in reports for result in report["results"]]}) + "\n")
        return
    results = [run_case(case, options.rounds) for case in options.cases or CASES]
    capability, processor = torch.backends.cpu.get_cpu_capability(), processor_name() or platform.machine()
    header = f"{'case':18} {'slm_lab frames/s (spread)':30} {'peer':18} {'frames/s (spread)':30} ratio"
    lines = [line for result in results for line in rows(result)]
    sys.stdout.write("\n".join([f"{datetime.now():%Y-%m-%d}, {processor}, {capability}", header, *lines]) + "\n")
    report = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "cpu": processor,
        "capability": capability,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "results": results,
    }
    path = ROOT / "bench" / "results" / f"speed_{datetime.now():%Y_%m_%d_%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
