"""From the env section of a spec to a vector env."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as Registration

from slm_lab.env.arguments import accepted, env_creator, rejected, unknown_key
from slm_lab.env.atari import ATARI_KEYS, AtariSettings
from slm_lab.env.backend import Backend, Target
from slm_lab.env.gym_backends import Async, Native, Sync
from slm_lab.env.native_backends import Ale, EnvPool
from slm_lab.env.normalize import ObsTreatment, RewardTreatment
from slm_lab.env.single import quiet_spaces, register_atari
from slm_lab.env.spaces import UnsupportedSpace, action_codec, observation_codec
from slm_lab.env.vec import Env
from slm_lab.lib.heap import PRIVATE, Heap
from slm_lab.lib.log import notice
from slm_lab.lib.machine import memory_bytes
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.env import EnvSpec

BACKENDS: dict[str, type[Backend]] = {"ale": Ale, "native": Native, "envpool": EnvPool, "sync": Sync, "async": Async}
"""In the order in which auto tries them."""

_LEAST_BYTES = 1024
"""Of memory that any env takes: its Python object, its random generator, its row of each array."""
_SHOWN = 10
"""Ids that a message names."""

EXTRAS = {"ale_py": "atari", "cv2": "atari", "mujoco": "mujoco", "Box2D": "box2d", "box2d": "box2d", "envpool": "envpool"}
"""Package that an env needs → extra that installs it."""


def make_env(
    spec: EnvSpec,
    seed: int,
    *,
    num_envs: int | None = None,
    gamma: float = 0.99,
    training: bool = True,
    threads: int = 1,
    heap: Heap = PRIVATE,
) -> Env:
    """Build the vector env that a spec describes.

    Args:
        seed: of the envs, their action spaces and `Env.sample`; the same seed gives the same stream.
        num_envs: instead of the spec's.
        gamma: discount of the returns that normalize_reward measures.
        training: False for evaluation: statistics are frozen (see `Env.copy_statistics`), rewards raw.
        threads: that a backend in C++ may use.
        heap: where the statistics of normalising lie.

    Raises: SpecError with paths env.<key>: unknown id or constructor argument, missing package, a space that is not supported.
    """
    _check_memory(spec, num_envs)
    target = find_target(spec, num_envs or spec.num_envs, threads)
    name = choose_backend(spec, target)
    backend = _build(spec, BACKENDS[name], target)
    try:
        observation, encode = observation_codec(backend.observation_space, backend.fresh)
        action, decode = action_codec(backend.action_space)
    except UnsupportedSpace as error:
        backend.close()
        raise _problem(spec, "name", f"{spec.name}: {error}") from None
    if target.atari is not None:
        observation = replace(observation, stack=target.atari.stack_num)
    info = EnvInfo(target.num_envs, observation, action, name, spec.max_frame)
    treats_obs = (spec.normalize_obs or spec.clip_obs is not None) and observation.dtype != "uint8"
    if (spec.normalize_obs or spec.clip_obs is not None) and not treats_obs:
        notice(f"env: normalize_obs and clip_obs have no effect on the images of {spec.name}; a ConvNet's normalize scales them")
    reward_treatment = RewardTreatment(spec, target.num_envs, gamma, target.atari is not None, heap)
    return Env(
        backend,
        info,
        encode,
        decode,
        seed,
        obs_treatment=ObsTreatment(spec, observation.shape, training, heap) if treats_obs else None,
        reward_treatment=reward_treatment if training and reward_treatment.changes else None,
        life_loss=target.atari is not None and target.atari.life_loss,
    )


def _check_memory(spec: EnvSpec, num_envs: int | None) -> None:
    """Raise SpecError where the machine cannot hold so many envs, however small they are."""
    count = num_envs or spec.num_envs
    if count * _LEAST_BYTES > memory_bytes():
        sizes = f"{count:,} envs of at least {_LEAST_BYTES:,} bytes each are {count * _LEAST_BYTES / 2**30:,.1f} GiB"
        message = f"{sizes}; this machine has {memory_bytes() / 2**30:,.1f} GiB"
        raise SpecError(spec.name, [Problem("env.num_envs" if num_envs in (None, spec.num_envs) else "meta.rigorous_eval", message)])


def find_target(spec: EnvSpec, num_envs: int, threads: int = 1) -> Target:
    """Look the id up and check the constructor's arguments. Raises SpecError."""
    registration = _registration(spec)
    kwargs, atari = spec.kwargs, None
    if "ALE/" in spec.name and "obs_type" not in kwargs:  # with obs_type the user wants the plain env
        atari, kwargs = _atari(spec), {}
    elif registration is not None and registration.entry_point is not None:
        _check_arguments(spec, registration)
    return Target(spec.name, registration, kwargs, num_envs, atari, spec.max_t, threads)


def choose_backend(spec: EnvSpec, target: Target) -> str:
    """The spec's backend, or for "auto" the first of BACKENDS that can build the target and pays. Raises SpecError."""
    if spec.backend != "auto":
        reason = BACKENDS[spec.backend].refuses(target)
        if reason:
            raise _problem(spec, "backend", f"{spec.backend!r} does not apply: {reason}")
        return spec.backend
    for name, backend in BACKENDS.items():
        if backend.pays(target) and backend.refuses(target) is None:
            return name
    raise _problem(spec, "name", f"no backend takes {spec.name}: {Sync.refuses(target)}")


def _problem(spec: EnvSpec, key: str, message: str) -> SpecError:
    return SpecError(spec.name, [Problem(f"env.{key}", message)])


def _registration(spec: EnvSpec) -> Registration | None:
    """Gymnasium's record of the id; None for an id that only the named backend envpool may know."""
    module, _, name = spec.name.rpartition(":")
    before = set(gym.registry)
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise _problem(spec, "name", f"{module} cannot be imported: {error}") from error
    if name.startswith("ALE/"):
        try:
            register_atari()
        except ImportError as error:
            raise _problem(spec, "name", _missing(error)) from None
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        if spec.backend == "envpool":
            return None
        reason = f"{module} registers no env {name!r}{_registered_by(module, name, before)}" if module else f"unknown env {name!r}: {error}"
        raise _problem(spec, "name", reason) from None


def _registered_by(module: str, name: str, before: set[str]) -> str:
    """The ids that importing a module has registered, now or (as far as their classes tell) before; the nearest ones first."""

    def is_its(id_: str, registration: Registration) -> bool:
        entry = registration.entry_point
        place = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
        return id_ not in before or place.split(":")[0].partition(".")[0] == module.partition(".")[0]

    ids = [id_ for id_, registration in gym.registry.items() if is_its(id_, registration)]
    ids.sort(key=lambda known: -difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio())
    if not ids:
        return "; importing it registers none at all"
    return f"; it registers {', '.join(ids[:_SHOWN])}" + (f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else "")


def _atari(spec: EnvSpec) -> AtariSettings:
    kwargs = dict(spec.kwargs)
    if kwargs.pop("reward_clipping", False):
        raise _problem(
            spec, "reward_clipping", "rewards are clipped by the key clip_reward (true by default in Atari), so that returns stay raw"
        )
    unknown = [Problem(f"env.{key}", unknown_key(key, [*ATARI_KEYS, "obs_type"], spec.name)) for key in kwargs if key not in ATARI_KEYS]
    if unknown:
        raise SpecError(spec.name, unknown)
    return AtariSettings(**kwargs)


def _check_arguments(spec: EnvSpec, registration: Registration) -> None:
    if not spec.kwargs:
        return
    try:
        known, open_ended = accepted(env_creator(registration))
    except ImportError as error:
        raise _problem(spec, "name", _missing(error)) from None
    unknown = [Problem(f"env.{key}", unknown_key(key, known, spec.name)) for key in spec.kwargs if key not in known]
    if unknown and not open_ended:  # else the constructor itself has the last word, see _build
        raise SpecError(spec.name, unknown)


def _build(spec: EnvSpec, backend: type[Backend], target: Target) -> Backend:
    try:
        with quiet_spaces():
            return backend(target)
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise _problem(spec, "name", _missing(error)) from error
    except Exception as error:
        key = rejected(error)
        if key in target.kwargs and target.registration is not None:
            known, _ = accepted(env_creator(target.registration))
            raise _problem(spec, str(key), unknown_key(str(key), known, spec.name)) from error
        kind = type(error).__name__
        raise _problem(spec, "name", f"{spec.name} cannot be built by the backend {backend.name}: {kind}: {error}") from error


def _missing(error: BaseException) -> str:
    """Which package is missing, and what installs it."""
    cause: Any = error
    while cause is not None:
        package = (getattr(cause, "name", None) or "").partition(".")[0]
        if package in EXTRAS:
            return f"needs the package {package}, which is not installed: pip install 'slm-lab[{EXTRAS[package]}]'"
        cause = cause.__cause__ or cause.__context__
    return f"a package is missing: {error}"
