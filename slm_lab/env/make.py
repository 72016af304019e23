"""Construction of vector envs from the env section of a spec."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration

from slm_lab.env.agent_spaces import agent_spaces
from slm_lab.env.arguments import (
    WrapperError,
    accepted_arguments,
    boolean_arguments,
    env_creator,
    unexpected_argument,
    unknown_key_message,
)
from slm_lab.env.atari import ATARI_KEYS, AtariSettings, is_preprocessed
from slm_lab.env.backend import Backend, EnvRequest
from slm_lab.env.curriculum import Curriculum, check_spaces
from slm_lab.env.envpool_suites import REDUCTIONS, option_problems
from slm_lab.env.groups import GroupBackend, GroupedEnv, joint_info
from slm_lab.env.gym_backends import Async, Sync
from slm_lab.env.native_backends import Ale, EnvPool
from slm_lab.env.normalize import make_normalizers, normalizes_obs
from slm_lab.env.outcome import space_text
from slm_lab.env.pettingzoo_backend import PettingZoo
from slm_lab.env.single import SingleEnvConstructor, quiet_gymnasium, register_envs
from slm_lab.env.spaces import Codec, UnsupportedSpace, observation_codec, space_to_dict
from slm_lab.env.vec import Env, close_backend
from slm_lab.env.vector_backends import Native, UserVectorBackend, make_vector_backend_class
from slm_lab.env.wrappers import KeepParts, find_wraps, space_parts
from slm_lab.lib.limits import memory_bytes
from slm_lab.lib.records import EnvInfo, InputKind, ObservationSpace
from slm_lab.spec.compat.env_ids import envpool_id, package_hint, pettingzoo_id, registering_module, unavailable_reason
from slm_lab.spec.models.base import ExtensionError, import_class
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import Problem, SpecError, nearest_hint

BACKENDS: dict[str, type[Backend]] = {
    "ale": Ale, "native": Native, "pettingzoo": PettingZoo, "envpool": EnvPool, "sync": Sync, "async": Async,
}  # fmt: skip
"""Backend classes by name, in the order in which `env.backend="auto"` considers the backends."""

_LEAST_BYTES = 1024
"""Bytes of memory that the smallest env needs for its Python object, its random generator and its row in each array of the vector env."""
_SHOWN = 10
"""Maximum number of env ids that an error message lists."""

EXTRAS = {
    "ale_py": "atari", "cv2": "atari", "mujoco": "mujoco", "Box2D": "box2d", "box2d": "box2d", "envpool": "envpool", "minigrid": "minigrid",
    "minatar": "minatar", "gymnasium_robotics": "robotics", "pettingzoo": "pettingzoo", "mpe2": "pettingzoo",
}  # fmt: skip
"""Maps each package that an env may need to the extra of slm-lab that installs the package."""


def make_env(
    spec: EnvSpec,
    seed: int,
    *,
    num_envs: int | None = None,
    gamma: float = 0.99,
    training: bool = True,
    threads: int = 1,
    track_info: Sequence[str] = (),
    input: InputKind | None = None,
    minimal_num_envs: bool = False,
    defer_normalization: bool = False,
) -> Env:
    """Build the vector env that a spec describes.

    Args:
        seed: seed of the envs, their action spaces and `Env.sample`.
        num_envs: number of envs, or None for the spec's num_envs.
        gamma: discount factor of returns. With env.normalize_reward, rewards are divided by the standard deviation of these returns.
        training: whether the env is for training. In an env for evaluation, observation statistics are frozen (see
            `Normalizers.copy_obs_statistics`) and rewards are raw.
        threads: number of threads that a C++ backend may use.
        input: kind of observations that the spec's nets require (`AgentSpec.input`).
        track_info: keys, or dotted paths, of the entries of the env's `info` to report with each finished episode (`Episode.info`).
        minimal_num_envs: whether to build only as many envs as are needed to read the spaces: one with the backends sync, async and
            pettingzoo, two with ale and envpool, all envs with other backends. The backend is still chosen for `num_envs` envs.
        defer_normalization: whether the env returns observations before env.normalize_obs and env.clip_obs, and, with env.normalize_reward,
            rewards before normalisation and clipping, because a replay buffer stores them. `Env.policy_inputs` normalises observations.

    Raises: SpecError with the path env.<key> for an unknown id, backend, wrapper or constructor argument, a missing package, or an
    unsupported space.
    """
    _check_memory(spec, num_envs)
    target = replace(make_env_request(spec, num_envs or spec.num_envs, threads, training), track_info=tuple(track_info))
    chosen = choose_backend(spec, target)
    _check_track_info(spec, chosen, track_info)
    _check_stagger(spec, chosen, target)
    if minimal_num_envs and chosen in (Sync, Async, PettingZoo, Ale, EnvPool):  # other backends may need the spec's number
        target = replace(target, num_envs=min(1 if chosen in (Sync, Async, PettingZoo) else 2, target.num_envs))
    backend = _build_backend(spec, chosen, target)
    if target.staggers_episodes and backend.max_steps is None:
        close_backend(backend)
        raise _env_spec_error(spec, "stagger_episodes", f"true needs a time limit, which {spec.name} does not have; set max_t")
    if minimal_num_envs:
        _check_scheduled_values(spec, target, backend)
    name = spec.backend if spec.backend != "auto" else chosen.name
    try:
        return _wrap_backend(spec, target, backend, EnvSettings(name, seed, gamma, training, input, defer_normalization))
    except UnsupportedSpace as error:
        close_backend(backend)
        raise _env_spec_error(spec, "name", f"{spec.name}: {error}{_supported_parts_hint(backend.observation_space)}") from None
    except SpecError:
        close_backend(backend)
        raise


class EnvSettings(NamedTuple):
    """The name of the backend, and the arguments of `make_env` that the function `_wrap_backend` needs."""

    backend: str
    seed: int
    gamma: float
    training: bool
    input: InputKind | None
    defer_normalization: bool


def _wrap_backend(spec: EnvSpec, target: EnvRequest, backend: Backend, settings: EnvSettings) -> Env:
    """Return an Env that wraps a backend. If the backend's agents have different spaces, the Env is a GroupedEnv. Raises UnsupportedSpace,
    SpecError."""
    if not backend.groups:
        return _wrap_uniform_backend(spec, target, backend, settings)[0]
    built: list[tuple[Env, Codec]] = []
    for group in backend.groups:
        part = GroupBackend(backend, group, target.num_envs)
        try:
            built.append(_wrap_uniform_backend(spec, target, part, settings, takes_decoded_actions=True))
        except SpecError as error:
            prefix = f"agent{'s' * (len(group.agents) > 1)} {', '.join(group.agents)}: "
            raise SpecError(error.source, [replace(problem, message=prefix + problem.message) for problem in error.problems]) from None
    groups, decoders = zip(*built, strict=True)
    info = joint_info([group.info for group in groups], tuple(backend.agents))
    return GroupedEnv(backend, info, groups, decoders, settings.seed, name=spec.name)


def _wrap_uniform_backend(
    spec: EnvSpec, target: EnvRequest, backend: Backend, settings: EnvSettings, *, takes_decoded_actions: bool = False
) -> tuple[Env, Codec]:
    """Return an Env that wraps a backend whose agents have equal spaces, and the function that converts the agent's actions to actions of
    the env.

    Args: takes_decoded_actions: whether the caller of the Env, such as GroupedEnv, converts the actions, so that the Env passes actions on
    unchanged.
    """
    observation, encode, action, decode, space, *_ = agent_spaces(
        spec, backend.observation_space, backend.action_space, settings.input, backend.returns_new_arrays
    )
    _check_not_empty(backend)
    forms = {"observation": space_to_dict(space), "action": space_to_dict(backend.action_space)}
    if target.atari is not None and not target.wraps:
        observation = replace(observation, stack=target.atari.stack_num)
    if (problem := _ineffective_key_problem(spec, target, observation)) is not None:
        raise SpecError(spec.name, [problem])
    agents, limit = tuple(backend.agents), backend.max_steps or target.max_steps
    rows = target.num_envs * max(1, len(agents))
    info = EnvInfo(rows, observation, action, settings.backend, spec.max_frame, limit, agents, forms)
    life_loss = target.atari is not None and target.atari.life_loss
    normalizers = make_normalizers(spec, info, settings.gamma, settings.training)
    more: dict[str, Any] = {
        "life_loss": life_loss,
        "track_info": target.track_info,
        "curriculum": target.curriculum,
        "defer_normalization": settings.defer_normalization,
    }
    convert = np.asarray if takes_decoded_actions else decode
    return Env(backend, info, encode, convert, settings.seed, name=spec.name, normalizers=normalizers, **more), decode


def _check_track_info(spec: EnvSpec, backend: type[Backend], track_info: Sequence[str]) -> None:
    """Raise SpecError if meta.track_info contains an entry that the backend cannot report."""
    why = None
    if track_info and not backend.reports_info:
        why = f"the backend {backend.name} does not report the info of the last step of an episode; use another env.backend, such as sync"
    elif backend is not EnvPool and (over := [key for key in track_info if key.rpartition(":")[2] in REDUCTIONS]):
        why = f"only the backend envpool can combine the steps of an episode ('{over[0]}'); use '{over[0].rpartition(':')[0]}'"
    if why is not None:
        raise SpecError(spec.name, [Problem("meta.track_info", why)])


def _check_stagger(spec: EnvSpec, backend: type[Backend], target: EnvRequest) -> None:
    """Raise SpecError if env.stagger_episodes is true, but the backend does not support it, or there is only one env."""
    if not target.staggers_episodes:
        return
    kind = backend.backend_class_for(target)
    if not kind.staggers_episodes:
        what = (
            f"the backend {backend.name} for envs with several agents"
            if backend is EnvPool
            else f"the backend {backend.name or spec.backend}"
        )
        message = f"true is not supported by {what}; allowed with the backend envpool and envs with one agent"
        raise _env_spec_error(spec, "stagger_episodes", message)
    if target.num_envs == 1:
        raise _env_spec_error(spec, "stagger_episodes", "true has no effect on a single env (num_envs is 1); remove it")


def _ineffective_key_problem(spec: EnvSpec, target: EnvRequest, observation: ObservationSpace) -> Problem | None:
    """Return a problem if env.normalize_obs, env.clip_obs or env.channels is given, but has no effect on observations of the space
    `observation`. Return None otherwise."""
    if normalizes_obs(spec) and observation.dtype == "uint8" and not observation.packed_float_count:
        key = "normalize_obs" if spec.normalize_obs else "clip_obs"
        why = f"has no effect on the images of {spec.name}, which a ConvNet scales (agent.net.normalize); remove it"
        return Problem(f"env.{key}", why)
    if spec.channels is not None and target.atari is not None:
        return Problem("env.channels", f"has no effect: the images of {spec.name} are preprocessed to have their channels first; remove it")
    if spec.channels is not None and not observation.has_images:
        return Problem("env.channels", f"has no effect: the observation is a {observation.text}; remove it")
    return None


def _check_not_empty(backend: Backend) -> None:
    """Raise UnsupportedSpace if the observation space or the action space has size 0."""
    for kind, space in (("observation", backend.observation_space), ("action", backend.action_space)):
        if not gym.spaces.flatdim(space):
            raise UnsupportedSpace(f"{kind} space {space_text(space)} is empty; expected one with at least one number")


def _supported_parts_hint(space: gym.Space[Any]) -> str:
    """Return a hint on how to keep only the entries of a Dict or Tuple observation that agents support, or "" if agents support all entries
    or no entries."""
    supported = supported_keys(space)
    return f'; keep the other parts with "obs_keys": {json.dumps(supported)}' if supported else ""


def supported_keys(space: gym.Space[Any]) -> list[str] | None:
    """Return the keys (for env.obs_keys) of those entries of a Dict or Tuple observation that agents support, or None if agents support all
    entries or no entries."""
    parts, supported = space_parts(space) or {}, []
    for key, part in parts.items():
        with suppress(UnsupportedSpace):
            observation_codec(part)
            supported.append(key)
    return supported if 0 < len(supported) < len(parts) else None


def _check_memory(spec: EnvSpec, num_envs: int | None) -> None:
    """Raise SpecError if this machine's memory is too small for `num_envs` envs of the smallest possible size."""
    count = num_envs or spec.num_envs
    if count * _LEAST_BYTES > memory_bytes():
        sizes = f"{count:,} envs need at least {count * _LEAST_BYTES / 2**30:,.1f} GiB ({_LEAST_BYTES:,} bytes each)"
        message = f"{sizes}; this machine has {memory_bytes() / 2**30:,.1f} GiB"
        raise SpecError(spec.name, [Problem("env.num_envs" if num_envs in (None, spec.num_envs) else "meta.rigorous_eval", message)])


def _check_scheduled_values(spec: EnvSpec, target: EnvRequest, backend: Backend) -> None:
    """Raise SpecError if env.schedule contains a value of a constructor argument that prevents the env from being built or that changes the
    env's spaces."""
    curriculum = target.curriculum
    for key in () if curriculum is None else curriculum.arguments:
        assert curriculum is not None
        for value in curriculum.rules[key].values[:-1]:
            try:
                with quiet_gymnasium():
                    env = SingleEnvConstructor.from_target(target).with_values(curriculum, curriculum.current_values() | {key: value})()
                env.close()
                check_spaces(env, backend.observation_space, backend.action_space, {key: value})
            except Exception as error:
                close_backend(backend)
                if isinstance(error, WrapperError):
                    raise _env_spec_error(spec, *error.args) from error
                raise _env_spec_error(
                    spec, f"schedule.{key}", f"{spec.name} with {key} = {value!r}: {type(error).__name__}: {error}"
                ) from error


def _make_curriculum(spec: EnvSpec, num_envs: int, registration: Registration | None, atari: bool, training: bool) -> Curriculum | None:
    """Return the curriculum of a spec, or None if the spec has no env.schedule. Raises SpecError if a key of env.schedule is a key of the
    env section, or an argument that the spec also gives."""
    if spec.schedule is None:
        return None
    for key in spec.schedule:
        if key in EnvSpec.model_fields:
            message = "is a key of the env section, and these keys cannot change; expected an argument or an attribute of the env"
            raise _env_spec_error(spec, f"schedule.{key}", message)
        if key in spec.kwargs:
            raise _env_spec_error(spec, f"schedule.{key}", f"is also given as env.{key}; remove one of them")
    arguments: Collection[str] = ATARI_KEYS if atari else ()
    if not atari and registration is not None and registration.entry_point is not None:
        arguments = accepted_arguments(env_creator(registration))[0]
    return Curriculum(spec.schedule, arguments, num_envs, final=not training)


def make_env_request(spec: EnvSpec, num_envs: int, threads: int = 1, training: bool = True) -> EnvRequest:
    """Look up the env id of a spec, check the arguments of the env's constructor, and return the request for a backend. Raises
    SpecError."""
    is_user_backend, zoo = ":" in spec.backend, pettingzoo_id(spec.name)
    pool = None if is_user_backend else envpool_id(spec.name)
    registration = _find_registration(spec) if pool is None and zoo is None else None
    kwargs, atari = spec.kwargs, None
    if pool is not None:
        _check_envpool(spec, pool)
    elif zoo is not None:
        if not is_user_backend and (reason := unavailable_reason(spec.name)):
            raise _env_spec_error(spec, "name", reason)
    elif is_preprocessed(spec):
        atari, kwargs = _make_atari_settings(spec), {}
    elif registration is not None and not is_user_backend:  # a user's backend checks its own arguments
        _check_arguments(spec, registration)
    curriculum = _make_curriculum(spec, num_envs, registration, atari is not None, training)
    wraps, mask = find_wraps(spec), spec.action_mask
    more: dict[str, Any] = {"action_mask": mask, "curriculum": curriculum, "critic_keys": tuple(spec.critic_keys or ())}
    more["staggers_episodes"] = spec.stagger_episodes and training
    return EnvRequest(spec.name, registration, kwargs, num_envs, atari, spec.max_t, threads, wraps, **more)


def env_argument_problems(spec: EnvSpec) -> list[Problem]:
    """Return the problems of the spec's arguments for the env's constructor, without building the env. Problems of env.name, such as a
    missing package, are included only if the id has a module prefix."""
    try:
        make_env_request(spec, spec.num_envs)
    except SpecError as error:
        has_prefix = ":" in spec.name
        return [problem for problem in error.problems if has_prefix or problem.path != "env.name"]
    return []


def choose_backend(spec: EnvSpec, target: EnvRequest) -> type[Backend]:
    """Return the backend class that the spec names or, for `env.backend="auto"`, the first class in BACKENDS that supports the requested
    envs and prefers them (`Backend.is_preferred`). Raises SpecError."""
    if spec.backend != "auto":
        backend = BACKENDS.get(spec.backend) or _import_backend(spec)
        if issubclass(backend, UserVectorBackend):
            _check_constructor_arguments(spec, backend.creator)
        reason = _unsupported_reason(backend, target)
        if reason:
            raise _env_spec_error(spec, "backend", f"cannot use backend {spec.backend!r}: {reason}")
        return backend
    for backend in BACKENDS.values():
        if backend.is_preferred(target) and _unsupported_reason(backend, target) is None:
            return backend
    if pettingzoo_id(spec.name):
        key = "schedule" if target.curriculum is not None else target.wraps[0].key.partition("[")[0]
        raise _env_spec_error(
            spec, key, f"has no effect on {spec.name}, which runs in PettingZoo: {_unsupported_reason(PettingZoo, target)}"
        )
    if target.curriculum is not None and (envpool_id(spec.name) or target.vector_only):
        where = "in EnvPool" if envpool_id(spec.name) else "as a vector env only"
        raise _env_spec_error(spec, "schedule", f"has no effect on {spec.name}: it runs {where}, whose envs cannot change; remove it")
    if envpool_id(spec.name):
        raise _env_spec_error(
            spec, "wrappers", f"{spec.name} runs in EnvPool: {_unsupported_reason(EnvPool, target)}{package_hint(spec.name)}"
        )
    if target.vector_only and target.wraps:
        key = target.wraps[0].key.partition("[")[0]
        why = f"has no effect on {spec.name}: it is registered as a vector env only, whose envs cannot be wrapped; remove it"
        raise _env_spec_error(spec, key, why)
    last = Native if target.vector_only else Sync
    raise _env_spec_error(spec, "name", f"no backend supports {spec.name}: {last.unsupported_reason(target)}")


def _unsupported_reason(backend: type[Backend], target: EnvRequest) -> str | None:
    """Return the reason why a backend cannot build the requested envs with their wrappers, curriculum and mask, or None if it can."""
    has_one_backend = envpool_id(target.id) or pettingzoo_id(target.id)
    wraps = [wrap for wrap in target.wraps if not (backend.selects_parts and wrap.wrapper is KeepParts)]
    if wraps and not backend.applies_wraps:
        keys = " and ".join(dict.fromkeys(f"env.{wrap.key.partition('[')[0]}" for wrap in wraps))
        return f"its envs cannot be wrapped ({keys})" + ("; remove it" if has_one_backend else "; sync and async can")
    if target.curriculum is not None and not backend.follows_curriculum:
        return "its envs cannot change (env.schedule)" + ("; remove it" if has_one_backend else "; sync and async can")
    if target.action_mask and not backend.finds_masks and not target.vector_only:
        return "it does not read action masks from info" + ("" if envpool_id(target.id) else "; sync and async can")
    return backend.unsupported_reason(target)


def _check_envpool(spec: EnvSpec, pool: str) -> None:
    """Raise SpecError if EnvPool cannot create its env `pool` on this machine, or if EnvPool does not accept the options in the spec."""
    if reason := unavailable_reason(spec.name):
        raise _env_spec_error(spec, "name", reason)
    try:
        problems = option_problems(spec, pool)
    except ImportError as error:
        raise _env_spec_error(spec, "name", _missing_package_message(error)) from None
    except RuntimeError as error:  # EnvPool cannot read a file of the user
        raise _env_spec_error(spec, "name", f"EnvPool cannot build {pool}: {error}") from None
    if problems:
        raise SpecError(spec.name, problems)


def _import_backend(spec: EnvSpec) -> type[Backend]:
    """Import a user's backend or vector env class, named as "package.module:Class", and return a backend class. Raises SpecError."""
    try:
        imported: type[Any] = import_class(spec.backend, Backend, " or gymnasium.vector.VectorEnv", (gym.vector.VectorEnv,))
    except ExtensionError as error:
        raise _env_spec_error(spec, "backend", str(error)) from error
    if issubclass(imported, gym.vector.VectorEnv):
        return make_vector_backend_class(imported)
    if missing := sorted(getattr(imported, "__abstractmethods__", ())):
        raise _env_spec_error(spec, "backend", f"{spec.backend} does not implement {', '.join(missing)}")
    return imported


def _env_spec_error(spec: EnvSpec, key: str, message: str) -> SpecError:
    return SpecError(spec.name, [Problem(f"env.{key}", message)])


def _find_registration(spec: EnvSpec) -> Registration | None:
    """Return Gymnasium's registration of the spec's env id, or None if the id is not registered, but the spec's backend (envpool or a
    user's backend) may support the id. Raises SpecError."""
    module, _, name = spec.name.rpartition(":")
    before = set(gym.registry)
    try:
        register_envs(spec.name)
    except ImportError as error:
        raise _env_spec_error(spec, "name", _missing_package_message(error)) from None
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise _env_spec_error(spec, "name", f"{module} cannot be imported: {error}") from error
        except (Exception, SystemExit) as error:  # whatever the user's module raises
            raise _env_spec_error(spec, "name", f"importing {module} failed: {type(error).__name__}: {error}") from error
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        if spec.backend == "envpool" or ":" in spec.backend:
            return None
        if module := module or registering_module(name) or "":
            raise _env_spec_error(spec, "name", f"{module} registers no env {name!r}{_registered_ids_text(module, name, before)}") from None
        hint = f'envs registered in a script exist only in that process; register it in a module and use "package.module:{name}"'
        raise _env_spec_error(spec, "name", f"unknown env {name!r}: {error} ({hint})") from None


def _registered_ids_text(module: str, name: str, before: set[str]) -> str:
    """Return text that lists the env ids that a module registered, with the ids most similar to `name` first.

    A module has registered an env id if the id is not in `before`, or if the entry point of the env is in the module's package.
    """

    def is_from_module(id_: str, registration: Registration) -> bool:
        entry = registration.entry_point
        place = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
        return id_ not in before or place.split(":")[0].partition(".")[0] == module.partition(".")[0]

    ids = [id_ for id_, registration in gym.registry.items() if is_from_module(id_, registration)]
    ids.sort(key=lambda id_: -difflib.SequenceMatcher(None, name.lower(), id_.lower()).ratio())
    if not ids:
        return "; importing it registers no envs"
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"{nearest_hint(name, ids) or ';'} it registers {', '.join(ids[:_SHOWN])}{more}"


def _make_atari_settings(spec: EnvSpec) -> AtariSettings:
    kwargs = dict(spec.kwargs)
    if kwargs.pop("reward_clipping", False):
        raise _env_spec_error(spec, "reward_clipping", "use clip_reward (true by default in Atari) instead; it leaves episode returns raw")
    keys = [*ATARI_KEYS, "obs_type"]
    problems = [Problem(f"env.{key}", unknown_key_message(key, keys, spec.name)) for key in kwargs if key not in ATARI_KEYS]
    if problems := problems + _string_flag_problems(spec, boolean_arguments(AtariSettings)):
        raise SpecError(spec.name, problems)
    return AtariSettings(**kwargs)


def _check_arguments(spec: EnvSpec, registration: Registration) -> None:
    if not spec.kwargs:
        return
    try:
        creator = env_creator(registration, vector=registration.entry_point is None)
    except ImportError as error:
        raise _env_spec_error(spec, "name", _missing_package_message(error)) from None
    _check_constructor_arguments(spec, creator)


def _check_constructor_arguments(spec: EnvSpec, creator: Callable[..., Any]) -> None:
    """Raise SpecError for keys of the spec's env section that are not arguments of the env's constructor, and for arguments that must be
    bools but are strings."""
    arguments, open_ended = accepted_arguments(creator)
    problems = (
        [] if open_ended else _unknown_argument_problems(spec, arguments)
    )  # if open_ended is true, the constructor checks the arguments, see _build_backend
    if problems := problems + _string_flag_problems(spec, boolean_arguments(creator)):
        raise SpecError(spec.name, problems)


def _unknown_argument_problems(spec: EnvSpec, arguments: list[str]) -> list[Problem]:
    return [Problem(f"env.{key}", unknown_key_message(key, arguments, spec.name)) for key in spec.kwargs if key not in arguments]


def _string_flag_problems(spec: EnvSpec, flags: Collection[str]) -> list[Problem]:
    """Return a problem for each env argument that must be true or false but is a string, because Python treats every non-empty string as
    true."""
    texts = {key: value for key, value in spec.kwargs.items() if key in flags and isinstance(value, str)}
    return [
        Problem(f"env.{key}", f"invalid value {json.dumps(value, ensure_ascii=False)}: expected true or false")
        for key, value in texts.items()
    ]


def _build_backend(spec: EnvSpec, backend: type[Backend], target: EnvRequest) -> Backend:
    try:
        with quiet_gymnasium():
            return backend.backend_class_for(target)(target)
    except WrapperError as error:
        raise _env_spec_error(spec, *error.args) from error
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise _env_spec_error(spec, "name", f"{_missing_package_message(error)}{_pool_hint(target)}") from error
    except Exception as error:
        key = unexpected_argument(error)
        if key in target.kwargs and target.registration is not None:
            known, _ = accepted_arguments(env_creator(target.registration, vector=target.vector_only))
            raise _env_spec_error(spec, str(key), unknown_key_message(str(key), known, spec.name)) from error
        kind, given = type(error).__name__, sorted(spec.kwargs)
        arguments = f" with its arguments {', '.join(given)}" if given else ""
        reason = str(error).partition(" The following argument types are supported")[0]  # C++ errors list all signatures
        message = (
            f"the backend {backend.name or spec.backend} cannot build {spec.name}{arguments}: {': '.join(filter(None, (kind, reason)))}"
        )
        message += _pool_hint(target)
        raise _env_spec_error(spec, given[0] if len(given) == 1 else "name", message) from error


def _pool_hint(target: EnvRequest) -> str:
    """Return a hint to use EnvPool's env with the same id for an env of gymnasium-robotics except AntMaze, else "". Many envs of
    gymnasium-robotics fail with mujoco 4."""
    if not target.entry_point.startswith("gymnasium_robotics.") or target.plain_id.startswith("AntMaze_"):
        return ""
    return f'; EnvPool has the same env: "envpool:{target.plain_id}"'


def _missing_package_message(error: BaseException) -> str:
    """Return the message for an ImportError of a missing package, with the command that installs the package."""
    cause: Any = error
    while cause is not None:
        package = (getattr(cause, "name", None) or "").partition(".")[0]
        if package in EXTRAS:
            return f"needs the package {package}, which is not installed: pip install 'slm-lab[{EXTRAS[package]}]'"
        cause = cause.__cause__ or cause.__context__
    return f"a package is missing: {error}"
