"""Random baselines: what an agent that acts at random earns in an env, the zero of every strength.

Those of the envs of our specs are shipped in baselines.json (tools/baselines.py writes it). Another env's is measured once, after
training, with a fixed seed, and kept in the user's cache folder: one file per env, written atomically under a lock, so that of two
runs that end together one measures and the other waits for the number.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slm_lab.experiment.analysis.files import replace_file
from slm_lab.experiment.paths import file_stem
from slm_lab.lib.log import notice
from slm_lab.spec.env import EnvSpec

SHIPPED = Path(__file__).with_name("baselines.json")
"""baseline_key → mean return."""
EPISODES = 100
_SEED = 0
_ENVS = 10
"""Envs that step together. Each plays the same number of episodes, or short ones would count more."""
_MAX_STEPS = 300_000
"""Vector steps after which an env whose episodes do not end is given up: above ten of Atari's longest games (27,000 steps each)."""
_ONLY_SEEN = ("grayscale", "img_height", "img_width", "stack_num", "maxpool", "episodic_life", "life_loss_info")
"""Atari's arguments that change what an agent sees, not what a random one earns."""


def random_baseline(spec: EnvSpec) -> float | None:
    """Mean raw return of 100 random episodes: shipped, cached, or measured now.

    None, with a notice, where it cannot be measured or the user stops it (Ctrl-C): then nobody knows the env's strengths.
    """
    key = baseline_key(spec)
    try:
        shipped: dict[str, float] = json.loads(SHIPPED.read_text(encoding="utf-8"))
        return shipped[key] if key in shipped else _cached(spec, key)
    except KeyboardInterrupt:
        notice(f"random baseline of {spec.name}: stopped; no strengths this time")
    except Exception as error:
        notice(f"random baseline of {spec.name} cannot be measured, so there are no strengths: {type(error).__name__}: {error}")
    return None


def baseline_key(spec: EnvSpec) -> str:
    """The env and those arguments on which a random return depends: `LunarLander-v3 {"continuous": true}`."""
    kwargs = spec.kwargs
    if kwargs and spec.name.startswith("ALE/") and "obs_type" not in kwargs:
        from slm_lab.env.atari import AtariSettings

        defaults = vars(AtariSettings())
        kwargs = {name: value for name, value in kwargs.items() if name not in _ONLY_SEEN and value != defaults.get(name, ...)}
    if spec.max_t is not None:
        kwargs["max_t"] = spec.max_t
    return f"{spec.name} {json.dumps(kwargs, sort_keys=True)}" if kwargs else spec.name


def measure(spec: EnvSpec) -> float | None:
    """Mean raw return of 100 random episodes (in Atari, games) with a fixed seed; None where no episode ends.

    Raises: SpecError where the env cannot be built, or what the env raises.
    """
    from slm_lab.env.make import make_env

    plain = spec.model_copy(update={"normalize_obs": False, "clip_obs": None})
    env = make_env(plain, _SEED, num_envs=_ENVS, training=False)
    returns: list[list[float]] = [[] for _ in range(_ENVS)]
    wanted = EPISODES // _ENVS
    try:
        env.reset()
        for _ in range(_MAX_STEPS):
            episodes = env.step(env.sample()).episodes
            for episode in episodes:
                returns[episode.env].append(episode.total_reward)
            if episodes and all(len(of_env) >= wanted for of_env in returns):
                break
    finally:
        env.close()
    counted = [value for of_env in returns for value in of_env[:wanted]]
    return math.fsum(counted) / len(counted) if counted else None


def cache_folder() -> Path:
    """Where measured baselines are kept: $XDG_CACHE_HOME/slm_lab/baselines, by default in ~/.cache. Raises RuntimeError without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slm_lab" / "baselines"


def _cached(spec: EnvSpec, key: str) -> float | None:
    """The number from the cache, or measured and put there; a cache that cannot be written costs only the next run's time."""
    name = f"{file_stem(spec.name)}_{hashlib.sha256(key.encode() + _source(spec)).hexdigest()[:16]}"
    with _locked(name) as folder:
        file = folder / f"{name}.json" if folder else None
        if file:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return _number(json.loads(file.read_text(encoding="utf-8"))["mean_return"])
        notice(f"measuring the random baseline of {spec.name} once: {EPISODES} episodes (Ctrl-C skips it)")
        mean_return = measure(spec)
        if mean_return is None:
            notice(f"random baseline of {spec.name}: no episode ended in {_MAX_STEPS * _ENVS:,} frames, so there are no strengths")
        if file:
            with suppress(OSError):
                replace_file(file, json.dumps({"env": key, "episodes": EPISODES, "mean_return": mean_return}).encode())
        return mean_return


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _source(spec: EnvSpec) -> bytes:
    """The file that defines the env: part of the cache's key, since users edit the envs they write."""
    from slm_lab.env.arguments import env_creator
    from slm_lab.env.make import find_target

    registration = find_target(spec, 1).registration
    if registration is None:
        return b""
    with suppress(TypeError, OSError):  # made by a partial, or in a C extension
        return Path(inspect.getsourcefile(env_creator(registration)) or os.devnull).read_bytes()
    return b""


@contextmanager
def _locked(name: str) -> Iterator[Path | None]:
    """Hold the lock `name`, yielding the cache folder, or None where there can be none. A process that dies loses the lock."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{name}.lock").open("w")
    except (OSError, RuntimeError) as error:
        notice(f"no cache for random baselines: {error}")
        yield None
        return
    with file:
        with suppress(ImportError, OSError):  # without locks two runs measure the same number twice
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield folder
