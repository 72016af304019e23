"""Measure the random baselines that ship: python tools/baselines.py [--only PATTERN …] [--processes N] [--file FILE]

Of every env id that the extras install and that FILE (slm_lab/experiment/analysis/baselines.json) lacks; to measure one again, delete its
line. FILE is written after each env. A mean is over 100 episodes, or, where these take more than two minutes of processor time, over as
many as end in that time, at least 20. An env of which fewer end is measured again, from its first episode, with four times the limit.
Uses backend sync for Gymnasium's and MiniGrid's envs and ALE's vector env for Atari.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slm_lab.experiment.analysis.baseline import SHIPPED, Baseline, baseline_key, measure
from slm_lab.lib.files import replace_file
from slm_lab.spec.env import EnvSpec
from slm_lab.spec.env_ids import ATARI, KNOWN, unavailable_reason

FIRST_LIMIT = 120.0
"""Seconds of processor time for an env in the first pass."""
FEWEST = 20
"""Episodes that suffice when the limit is reached."""
KINDS = ("classic_control", "toy_text", "box2d", "mujoco")
"""Kinds of Gymnasium's envs, in this order."""
OTHERS: list[dict[str, Any]] = [
    {"name": "slm_lab.env.masked:MaskedCartPole-v1", "backend": "sync"},
    {"name": "LunarLander-v3", "backend": "sync", "continuous": True},
]
Result = tuple[str, Baseline | str, float]
"""baseline_key; the baseline, or why there is none; seconds of processor time."""


def all_envs() -> list[dict[str, Any]]:
    """Return the env sections of all ids, Atari last."""
    ids = [name for kind in KINDS for name, its_kind in KNOWN.items() if its_kind == kind]
    atari = [f"ALE/{game}-v5" for game in sorted(ATARI)]
    return [
        *({"name": name, "backend": "sync"} for name in ids),
        *OTHERS,
        *({"name": f"minigrid:{name}", "backend": "sync", "obs_keys": ["image"]} for name in _minigrid_ids()),
        *({"name": name, "backend": "ale"} for name in atari),
    ]


def _minigrid_ids() -> list[str]:
    if importlib.util.find_spec("minigrid") is None:
        return []
    import gymnasium
    import minigrid  # noqa: F401  # registers its ids

    return [name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-"))]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the random baselines that ship.")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="ids such as CartPole-v1 or 'ALE/*'")
    parser.add_argument("--processes", type=int, metavar="N", default=1)
    parser.add_argument("--file", type=Path, default=SHIPPED)
    args = parser.parse_args(arguments)
    wanted = [env for env in all_envs() if any(fnmatchcase(env["name"], pattern) for pattern in args.only)]
    wanted = [env for env in wanted if _key(env) not in _read(args.file)]
    limit = FIRST_LIMIT
    with _pool(args.processes) as pool:
        while wanted:
            tasks = [(env, limit) for env in wanted]
            results: Iterable[Result] = map(_measure, tasks) if pool is None else pool.map(_measure, tasks)
            wanted = list(_again(wanted, results, args.file))
            limit *= 4


def _again(envs: list[dict[str, Any]], results: Iterable[Result], file: Path) -> Iterator[dict[str, Any]]:
    """Write the results of a pass; yield the envs that need more time."""
    for env, (key, found, seconds) in zip(envs, results, strict=True):
        if isinstance(found, str):
            _say(f"{key}: skipped: {found}")
        elif found.episodes < FEWEST or found.mean_return is None:
            _say(f"{key}: needs more than {seconds:.0f} s")
            yield env
        else:
            content = {**_read(file), key: float(f"{found.mean_return:.6g}")}
            replace_file(file, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
            _say(f"{key}: {content[key]} ({found.episodes} episodes, {seconds:.1f} s)")


def _measure(task: tuple[dict[str, Any], float]) -> Result:
    env, limit = task
    begin = time.process_time()
    reason = unavailable_reason(env["name"])
    try:
        spec = EnvSpec(**env, max_frame=1)
        found = reason or measure(spec, lambda: time.process_time() > begin + limit)
    except Exception as error:  # whatever the env raises: the others are still measured
        found = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(found, Baseline) and found.episodes < FEWEST and time.process_time() < begin + limit:
        found = f"only {found.episodes} episodes ended"
    return _key(env), found, time.process_time() - begin


def _key(env: dict[str, Any]) -> str:
    return baseline_key(EnvSpec(**env, max_frame=1))


def _read(file: Path) -> dict[str, float]:
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return known


def _pool(processes: int) -> Any:
    return nullcontext() if processes == 1 else ProcessPoolExecutor(processes, get_context("spawn"))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
