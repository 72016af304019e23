"""Random baseline of an env: the mean return of an agent that samples random actions.

The strength of an agent is its return minus the random baseline.

The baselines of the envs in the shipped specs are in baselines.json, which tools/baselines.py writes. For an env that is not in
baselines.json, the baseline is measured once, with a fixed seed and a time limit, after the graphs of a run are written. Measured baselines
are cached in the user's cache folder, in one file per env. The cache file is written atomically and without a lock. Therefore, two runs
that end at the same time do not wait for each other, and both measure the baseline.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files.paths import file_stem
from slm_lab.experiment.plan import Stop
from slm_lab.lib.files import replace_file
from slm_lab.lib.log import explain_exit, notice
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.env_schedule import parse_rule

SHIPPED = Path(__file__).with_name("baselines.json")
"""JSON file with the shipped baselines: result of baseline_key → mean return of a random agent."""
EPISODES = 100
TIME_LIMIT = 30.0
"""Maximum time of the measurement of a baseline, s."""
_EPISODE_TIME_FRACTION = 0.9
"""Fraction of the time limit in which episodes are run. The remaining time is for the last step and env.close(). If the env takes longer
than the time limit, the thread that measures the baseline is abandoned."""
_SEED = 0
_ENVS = 10
"""Number of parallel envs. Each env contributes the same number of episodes, since short episodes end first and would otherwise prevail."""
_MAX_STEPS = 300_000
"""Maximum number of vector steps in the measurement of a baseline: more than ten times the length of the longest Atari games (27,000
steps)."""
_OBSERVATION_KEYS = ("grayscale", "img_height", "img_width", "stack_num", "maxpool", "episodic_life", "life_loss_info")
"""Arguments of Atari envs that change the observations, but not the return of a random agent."""


class Baseline(NamedTuple):
    """Mean return of a random agent (None if no episode ended), and the number of episodes over which the mean is computed."""

    mean_return: float | None
    episodes: int = EPISODES


def known_baseline(spec: EnvSpec) -> Baseline | None:
    """Return the shipped or cached baseline of an env, or None if the baseline must be measured. The function never raises an error."""
    try:
        key = baseline_key(spec)
        shipped: dict[str, float] = json.loads(SHIPPED.read_text(encoding="utf-8"))
        return Baseline(shipped[key]) if key in shipped else _read_cache(_cache_file(spec, key))
    except Exception:  # measure_baseline reports errors, for example an env that cannot be found, or a missing home folder
        return None


def measure_baseline(spec: EnvSpec, stop: Stop | None = None, limit: float = TIME_LIMIT) -> float | None:
    """Measure the random baseline of an env, write the baseline to the cache, and return the mean return.

    The measurement takes at most `limit` seconds, even if the env blocks, and ends early if stop.requested becomes true. When the time
    limit is reached, the mean over the episodes that have ended is used. Prints a notice and returns None if the measurement fails or is
    interrupted, or if no episode ended.
    """
    begin = time.monotonic()
    notice(f"measuring the random baseline of {spec.name}: {EPISODES} episodes, at most {limit:g} s (Ctrl-C skips it)")
    interrupted = False
    try:
        baseline = _measure_in_thread(spec, stop, begin, limit)
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:
        notice(f"cannot measure the random baseline of {spec.name}; strength metrics are omitted: {type(error).__name__}: {error}")
        return None
    if interrupted or (stop is not None and stop.requested):
        notice(f"random baseline of {spec.name}: interrupted; strength metrics are omitted")
        return None
    if baseline is None:
        notice(f"random baseline of {spec.name}: the env did not respond within {limit:g} s; strength metrics are omitted")
        return None
    file = _write_cache(spec, baseline)
    if baseline.mean_return is None:
        again = f"; to measure again, delete {file}" if file else ""
        notice(
            f"random baseline of {spec.name}: no episode ended within {time.monotonic() - begin:.0f} s; strength metrics are omitted{again}"
        )
    elif baseline.episodes < EPISODES:
        notice(f"random baseline of {spec.name}: time limit of {limit:g} s reached; using the mean of {baseline.episodes} episodes")
    return baseline.mean_return


def baseline_key(spec: EnvSpec) -> str:
    """Return the env's name and the arguments that affect the return of a random agent, such as `LunarLander-v3 {"continuous": true}`."""
    kwargs = spec.kwargs
    if kwargs and spec.name.startswith("ALE/") and "obs_type" not in kwargs:
        from slm_lab.env.atari import AtariSettings

        defaults = vars(AtariSettings())
        kwargs = {name: value for name, value in kwargs.items() if name not in _OBSERVATION_KEYS and value != defaults.get(name, ...)}
    if spec.max_t is not None:
        kwargs["max_t"] = spec.max_t
    if spec.wrappers:
        kwargs["wrappers"] = [wrapper.model_dump() for wrapper in spec.wrappers]
    if spec.schedule:
        kwargs["schedule"] = {key: parse_rule(value).values[-1] for key, value in spec.schedule.items()}
    return f"{spec.name} {json.dumps(kwargs, sort_keys=True)}" if kwargs else spec.name


def measure_mean_return(spec: EnvSpec, ended: Callable[[], bool] = lambda: False, fewest: int = 0) -> Baseline:
    """Return the mean raw return of 100 random episodes (in Atari, games) with a fixed seed.

    The mean is over the same number of episodes of each parallel env. After `ended()` has returned true, the measurement stops as soon as
    at least `fewest` such episodes have ended. Raises SpecError if the env cannot be built, ValueError if a return is not finite, or the
    error that the env raises.
    """
    from slm_lab.env.make import make_env

    plain = spec.model_copy(update={"normalize_obs": False, "clip_obs": None, "channels": None})
    env = make_env(plain, _SEED, num_envs=_ENVS, training=False)
    rows = env.info.num_envs
    returns: list[list[float]] = [[] for _ in range(rows)]
    wanted = -(-EPISODES // rows)
    try:
        env.reset()
        for _ in range(_MAX_STEPS):
            if ended() and (complete := min(map(len, returns))) * rows >= fewest:
                wanted = complete  # so that all envs have equal weight
                break
            episodes = env.step(env.sample()).episodes
            for episode in episodes:
                returns[episode.env].append(episode.total_reward)
            if episodes and all(len(of_env) >= wanted for of_env in returns):
                break
    finally:
        close_env(env.close)
    counted = [value for of_env in returns for value in of_env[:wanted]]
    if not all(map(math.isfinite, counted)):
        raise ValueError("an episode's return is not finite")
    return Baseline(math.fsum(counted) / len(counted) if counted else None, len(counted))


def cache_folder() -> Path:
    """Return the folder of the cached baselines, in $XDG_CACHE_HOME or ~/.cache. Raises RuntimeError if the user has no home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slm_lab" / "baselines"


def _measure_in_thread(spec: EnvSpec, stop: Stop | None, begin: float, limit: float) -> Baseline | None:
    """Measure the baseline in a daemon thread, so that an env that blocks can be abandoned.

    Return None if the time limit is reached or a stop is requested before the thread has ended.

    Raises the same errors as `measure_mean_return`.
    """
    result: Future[Baseline] = Future()

    def ended() -> bool:
        return time.monotonic() > begin + _EPISODE_TIME_FRACTION * limit or (stop is not None and stop.requested)

    def work() -> None:
        try:
            result.set_result(measure_mean_return(spec, ended))
        except BaseException as error:
            result.set_exception(RuntimeError(text) if (text := explain_exit(error)) is not None else error)

    threading.Thread(target=work, name="random baseline", daemon=True).start()
    while not wait([result], 0.05).done and time.monotonic() < begin + limit and not (stop is not None and stop.requested):
        pass
    return result.result() if result.done() else None


def _cache_file(spec: EnvSpec, key: str) -> Path:
    name = f"{file_stem(spec.name)}_{hashlib.sha256(key.encode() + _env_source_code(spec)).hexdigest()[:16]}"
    return cache_folder() / f"{name}.json"


def _read_cache(file: Path) -> Baseline | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(file.read_text(encoding="utf-8"))
        mean_return = content["mean_return"]
        if mean_return is None or math.isfinite(mean_return):
            return Baseline(None if mean_return is None else float(mean_return), int(content["episodes"]))
    return None


def _write_cache(spec: EnvSpec, baseline: Baseline) -> Path | None:
    """Write the baseline to a cache file, and return the path of this file, or None if the file cannot be written."""
    try:
        key = baseline_key(spec)
        file = _cache_file(spec, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps({"env": key, "episodes": baseline.episodes, "mean_return": baseline.mean_return}).encode())
    except (OSError, RuntimeError) as error:
        notice(f"cannot cache the random baseline: {error}")
        return None
    return file


def _env_source_code(spec: EnvSpec) -> bytes:
    """Return the source code of the env and its wrappers. The source code is part of the cache key, since users edit their own envs."""
    from slm_lab.env.arguments import env_creator
    from slm_lab.env.make import make_env_request

    target, content = make_env_request(spec, 1), b""
    makers: list[Any] = [wrap.wrapper for wrap in target.wraps]
    if target.registration is not None:
        makers.insert(0, env_creator(target.registration))
    for maker in makers:
        with suppress(TypeError, OSError):  # raised for a functools.partial or a class of a C extension
            content += Path(inspect.getsourcefile(maker) or os.devnull).read_bytes()
    return content
