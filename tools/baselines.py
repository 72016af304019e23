"""Measure the shipped random baselines: python tools/baselines.py [--only PATTERN …] [--processes N] [--file FILE]

The script measures every env id of Gymnasium, MiniGrid, MinAtar and Atari, and the env ids of EnvPool in POOL, except ids that are in FILE
(slm_lab/experiment/report/baselines.json) already. To measure an env again, delete its line. FILE is written after each env. A baseline is
the mean return of 100 episodes. If 100 episodes take more than a minute of processor time, the baseline is the mean return of the episodes
that end within the minute, but of at least 10 episodes. Envs of Gymnasium, MiniGrid and MinAtar use the backend sync, and Atari uses ALE's
vector env.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slm_lab.experiment.report.baseline import SHIPPED, Baseline, baseline_key, measure_mean_return
from slm_lab.lib.files import replace_file
from slm_lab.spec.compat.env_ids import ATARI, KNOWN, MINATAR, unavailable_reason
from slm_lab.spec.models.env import EnvSpec

LIMIT = 60.0
"""Processor time, in seconds, after which FEWEST episodes are sufficient."""
FEWEST = 10
"""Minimum number of episodes."""
KINDS = ("classic_control", "toy_text", "box2d", "mujoco")
"""Kinds of Gymnasium's envs, in the order in which they are measured."""
OTHERS: list[dict[str, Any]] = [
    {"name": "slm_lab.env.masked:MaskedCartPole-v1", "backend": "sync"},
    {"name": "LunarLander-v3", "backend": "sync", "continuous": True},
]
POOL = (
    "AcrobotSwingup", "AcrobotSwingupSparse", "BallInCupCatch", "CartpoleBalance", "CartpoleBalanceSparse", "CartpoleSwingup",
    "CartpoleSwingupSparse", "CheetahRun", "FingerSpin", "FingerTurnEasy", "FingerTurnHard", "FishSwim", "HopperHop", "HopperStand",
    "HumanoidRun", "HumanoidStand", "HumanoidWalk", "PendulumSwingup", "PointMassEasy", "ReacherEasy", "ReacherHard", "SwimmerSwimmer6",
    "WalkerRun", "WalkerStand", "WalkerWalk", "MuJoCoPlayground/Go1Getup", "MuJoCoPlayground/Go1JoystickFlatTerrain",
    "MuJoCoPlayground/PandaPickCube", "MuJoCoPlayground/SpotGetup",
)  # fmt: skip
"""Ids, without version, of the envs of EnvPool in docs/BENCHMARKS.md."""
Result = tuple[str, Baseline | str, float]
"""(key of the baseline; the baseline, or the reason why it could not be measured; processor time in seconds)."""


def all_envs() -> list[dict[str, Any]]:
    """Return the section `env` of a spec for each id, with Atari last."""
    ids = [name for kind in KINDS for name, its_kind in KNOWN.items() if its_kind == kind]
    atari = [f"ALE/{game}-v5" for game in sorted(ATARI)]
    return [
        *({"name": name, "backend": "sync"} for name in ids),
        *OTHERS,
        *({"name": f"{name}-v1", "backend": "envpool"} for name in POOL),
        *({"name": f"minigrid:{name}", "backend": "sync", "obs_keys": ["image"]} for name in _minigrid_ids()),
        *({"name": name, "backend": "sync"} for name in MINATAR),
        *({"name": name, "backend": "ale"} for name in atari),
    ]


def _minigrid_ids() -> list[str]:
    if importlib.util.find_spec("minigrid") is None:
        return []
    import gymnasium
    import minigrid  # noqa: F401  # registers its ids

    return [name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-"))]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the shipped random baselines.")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="only these ids, such as CartPole-v1 or 'ALE/*'")
    parser.add_argument("--processes", type=int, metavar="N", default=1, help="number of processes (1)")
    parser.add_argument("--file", type=Path, default=SHIPPED, help="file of the baselines")
    args = parser.parse_args(arguments)
    wanted = [env for env in all_envs() if any(fnmatchcase(env["name"], pattern) for pattern in args.only)]
    wanted = [env for env in wanted if _key(env) not in _read(args.file)]
    with _pool(args.processes) as pool:
        for key, baseline, seconds in map(_measure, wanted) if pool is None else pool.map(_measure, wanted):
            if isinstance(baseline, str):
                _say(f"{key}: skipped: {baseline}")
            else:
                content = {**_read(args.file), key: float(f"{baseline.mean_return:.6g}")}
                replace_file(args.file, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
                _say(f"{key}: {content[key]} ({baseline.episodes} episodes, {seconds:.1f} s)")


def _measure(env: dict[str, Any]) -> Result:
    begin = time.process_time()
    baseline: Baseline | str
    try:
        spec = EnvSpec(**env, max_frame=1)
        baseline = unavailable_reason(spec.name) or measure_mean_return(spec, lambda: time.process_time() > begin + LIMIT, FEWEST)
    except Exception as error:  # an env may raise any error; the other envs are still measured
        baseline = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(baseline, Baseline) and (baseline.episodes < FEWEST or baseline.mean_return is None):
        baseline = f"only {baseline.episodes} episodes ended"
    return _key(env), baseline, time.process_time() - begin


def _key(env: dict[str, Any]) -> str:
    return baseline_key(EnvSpec(**env, max_frame=1))


def _read(file: Path) -> dict[str, float]:
    baselines: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return baselines


def _pool(processes: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    return nullcontext() if processes == 1 else ProcessPoolExecutor(processes, get_context("spawn"))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
