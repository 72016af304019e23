"""The command `new`, which writes a spec for an env, based on an algorithm or on another spec."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
from pydantic import BaseModel

from slm_lab.agent.policy.policy import supports_action_space
from slm_lab.env.make import make_env, supported_keys
from slm_lab.env.single import quiet_gymnasium
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.training.agent_groups import fitting_policies
from slm_lab.experiment.training.resolve import check_unambiguous_observation
from slm_lab.lib.files import replace_file
from slm_lab.lib.log import notice
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.compat.env_ids import KNOWN, current_id, short_name, unavailable_reason
from slm_lab.spec.compat.migrate import OTHER_ALGORITHMS
from slm_lab.spec.load.files import SPEC_FOLDER, parse_json, raw_specs, spec_summaries
from slm_lab.spec.load.loader import load_spec, load_with_notices, log_notices
from slm_lab.spec.models.algorithm import ALGORITHMS, AlgorithmSpec
from slm_lab.spec.models.base import ExtensionError, import_model, is_extension
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError, closest_word, nearest_hint
from slm_lab.spec.rules.resolve import complete_short_spec

_MAX_COMMENT_LENGTH = 110
"""Maximum number of characters in a comment of a spec file."""


def strict_json_text(spec: Spec, file: Path) -> str:
    """Return the text of a spec file in strict JSON, with the path of the JSON Schema and the given and recommended keys.

    Args: file: path of the spec file, to which the path of the schema is relative.
    """
    lines = [line for line in commented_text(spec, "").splitlines() if not line.lstrip().startswith("//")]
    return "\n".join([lines[0], f'  "$schema": {_json(_schema_path(file))},', *lines[1:]]) + "\n"


def _schema_path(file: Path) -> str:
    """Return the path of the JSON Schema relative to the folder of a spec file, so that editors find the schema.

    If the spec file and the schema are on different drives, a URL is returned.
    """
    schema = SPEC_FOLDER.absolute() / "spec.schema.json"
    try:
        return Path(os.path.relpath(schema, file.absolute().parent)).as_posix()
    except ValueError:
        return schema.as_uri()


def commented_text(spec: Spec, command: str) -> str:
    """Return the text of a spec file with the given and recommended keys, and a comment for each key.

    Args: command: command that runs the spec, which is added as the last comment.
    """
    agent = spec.agent
    first = {key: value for key in ("gamma", "lam") if (value := getattr(agent.algorithm, key, None)) is not None}
    sections: dict[str, tuple[BaseModel, dict[str, Any]]] = {"algorithm": (agent.algorithm, _explicit_keys(agent.algorithm, first))}
    if agent.algorithm.learns:
        sections["memory"] = (agent.memory, _explicit_keys(agent.memory))
    sections |= {key: (net, _explicit_keys(net)) for key in ("net", "critic_net") if (net := getattr(agent, key)) is not None}
    lines = [
        f"// {spec.name}: {agent.algorithm.name} on {spec.env.name}. Keys that are absent have their defaults.",
        "{",
        f"  {_json(spec.name)}: {{",
        '    "agent": {',
        *_entry_lines(agent, "name", agent.name, 6),
        *([] if agent.policies is None else _entry_lines(agent, "policies", agent.policies, 6)),
    ]
    for key, (model, values) in sections.items():
        lines += [f"      // {_key_comment(type(agent), key)}", f'      "{key}": {{', *_section_lines(model, values, 8), "      },"]
    lines += [
        "    },",
        f"    // {_key_comment(Spec, 'env')}",
        '    "env": {',
        *_section_lines(spec.env, _explicit_keys(spec.env), 6),
        "    },",
    ]
    lines += [
        f"    // {_key_comment(Spec, 'meta')}",
        '    "meta": {',
        *_section_lines(spec.meta, _explicit_keys(spec.meta), 6),
        "    }",
        "  }",
        "}",
    ]
    return "\n".join([*_without_last_commas(lines), f"// Run it: {command}"]) + "\n"


def _explicit_keys(model: BaseModel, first: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the explicitly set keys of a model and their values. The order is "name", the keys of `first`, other keys.

    Args: first: key → value for a key that is included even if it is not set explicitly.
    """
    given = model.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    head = {key: given[key] for key in ("name",) if key in given}
    return {**head, **{key: given.get(key, value) for key, value in (first or {}).items()}, **given}


def _section_lines(model: BaseModel, values: Mapping[str, Any], indent: int) -> Iterator[str]:
    for key, value in values.items():
        yield from _entry_lines(model, key, value, indent)


def _entry_lines(model: BaseModel, key: str, value: Any, indent: int) -> Iterator[str]:
    """Yield the comment and the line of a key in a spec file."""
    space = " " * indent
    if text := _key_comment(type(model), key):
        yield f"{space}// {text}"
    yield f"{space}{_json(key)}: {_json(value)},"


def _without_last_commas(lines: list[str]) -> list[str]:
    """Remove the comma after the last entry of each object, so that the lines without comments are strict JSON."""
    closing = [*(line.strip() for line in lines[1:]), ""]
    return [line.removesuffix(",") if after.startswith("}") else line for line, after in zip(lines, closing, strict=True)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _key_comment(model: type[BaseModel], key: str) -> str:
    """Return the first sentence of the description of a spec key. If the key is the name of a component, the docstring of the component is
    used."""
    if key == "name" and "algorithm" not in model.model_fields and model is not EnvSpec:
        text = inspect.getdoc(model) or ""
    else:
        properties = _schema().get(model.__name__, {}).get("properties", {})
        field = model.model_fields.get(key)
        text = properties.get(key, {}).get("description") or (field.description if field else None) or ""
    text = " ".join(str(text).split())
    sentence = re.split(r"(?<![A-Z])\. |; ", text)[0].rstrip(".")
    if sentence.count("(") > sentence.count(")"):
        sentence = sentence[: sentence.rindex("(")].rstrip()
    return textwrap.shorten(sentence, _MAX_COMMENT_LENGTH, placeholder=" …")


@cache
def _schema() -> dict[str, Any]:
    """Return the JSON Schema of each model as a dict: name of the model → JSON Schema. The descriptions of spec keys in the JSON Schema are
    those of the spec reference."""
    schema: dict[str, Any] = json.loads((SPEC_FOLDER / "spec.schema.json").read_text(encoding="utf-8"))["$defs"]
    return schema


_FRAMES = {"classic_control": 200_000, "toy_text": 200_000, "jax": 200_000, "box2d": 500_000, "mujoco": 2_000_000, "atari": 10_000_000}
"""Kind of env → recommended number of training frames for on-policy algorithms. For off-policy algorithms, the number of frames is halved,
except in Atari."""
_OTHER_FRAMES = {False: 500_000, True: 1_000_000}
"""Recommended number of training frames for kinds of envs that are not in _FRAMES. The key is whether observations contain images."""
_ON_POLICY_ENVS = {"classic_control": 4, "toy_text": 4, "atari": 16}
"""Kind of env → recommended number of parallel envs for on-policy algorithms. For other kinds of envs, 8 parallel envs are recommended."""
_MAX_T = 200
"""Maximum number of steps per episode in those toy_text envs of Gymnasium that have no time limit."""
_SESSIONS = 2
_IN_FRAMES = frozenset(
    {"frame", "start_step", "end_step", "alpha_anneal_frames", "T_max", "T_0", "step_size", "total_iters", "total_steps"}
)
"""Keys, at any depth of a spec, whose values are numbers of frames. These values are scaled in proportion to env.max_frame."""
_CONV = frozenset({"ConvNet", "DuelingConvNet"})
_LABELS = {"SoftActorCritic": "SAC", "ActorCritic": "A2C", "Reinforce": "REINFORCE", "DoubleDQN": "DDQN"}
"""Name of an algorithm → value of agent.name, for algorithms that are usually called by another name."""
_DISCRETE_PDTYPES = frozenset({"Categorical", "Argmax", "GumbelSoftmax"})
_VARIABLE = re.compile(r".*\$\{[^}]*\}.*")


@dataclass(frozen=True)
class NewSpec:
    """A spec file that `write_new_spec` has written."""

    name: str
    spec: Spec

    @property
    def summary(self) -> str:
        """A line that describes what the new spec trains."""
        agent, net = self.spec.agent, self.spec.agent.net
        with_net = f", {net.name}" if net is not None else ""
        return f"{self.name}: {agent.algorithm.name} on {self.spec.env.name} for {self.spec.env.max_frame:,} frames{with_net}"


def write_new_spec(file: Path, name: str | None, env: str, like: str | None = None, *, comments: bool = False) -> NewSpec:
    """Write a spec for an env to a new file, in strict JSON or with a comment for each key.

    Args:
        name: name of the spec, or None for a name that consists of the algorithm and the env.
        env: a Gymnasium id, or package.module:EnvId.
        like: an algorithm, the name of a shipped spec, FILE:NAME, or None for PPO. The entries of the agent section of `like` that fit
            the env are copied to the new spec.
        comments: whether to write a comment for each key.

    If UserError or SpecError is raised, nothing is written. Existing files are never changed.
    """
    _check_new(file)
    if (current := current_id(env)) != env:
        notice(f"--env {env}: '{env}' is now '{current}'")
    if (reason := unavailable_reason(current)) is not None:
        raise UserError(f"--env {env}: {reason}")
    template = _load_template(like)
    env_section, info = _probe_env(current)
    _check_fits(template, env, info)
    body = _spec_dict(template, env_section, info)
    label = body["agent"]["name"]
    name = name or f"{label.lower()}_{short_name(env)}"
    loaded = load_with_notices({name: body}, name)
    log_notices([note for note in loaded.notes if not note.endswith("; ignored")])  # keys without effect are not written
    (short,) = loaded.specs
    spec = complete_short_spec(short, info.observation.has_images, info.action.kind)
    command = f"slm-lab {shlex.quote(str(file))} {shlex.quote(name)} train"
    text = commented_text(spec, command) if comments else strict_json_text(spec, file)
    written = load_spec(parse_json(text), name)  # check the recommended values together with the given values
    _write_new(file, text)
    return NewSpec(name, written)


def _check_new(file: Path) -> None:
    """Raise UserError if a new spec cannot be written to `file`."""
    if file.suffix.lower() in (".yaml", ".yml"):
        raise UserError(f"{file}: a new spec is JSON; choose a FILE that ends in .json")
    if file.exists():
        raise UserError(f"{file} exists already and is not changed; choose another FILE")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}")


def _write_new(file: Path, text: str) -> None:
    """Write the text of a new spec file. Raises UserError if the file exists already or cannot be written."""
    try:
        with file.open("x"):  # reserve the name, so that a file of another process is not overwritten
            pass
    except FileExistsError:
        raise UserError(f"{file} exists already and is not changed; choose another FILE") from None
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}") from None
    try:
        replace_file(file, text.encode())
    except OSError as error:
        file.unlink(missing_ok=True)
        raise UserError(f"cannot write {file}: {error.strerror or error}") from None


@dataclass(frozen=True)
class _Template:
    """The algorithm or spec on which a new spec is based."""

    source: str
    """The value of the option --like, as given on the command line."""
    model: type[AlgorithmSpec]
    agent: dict[str, Any]
    env: dict[str, Any]
    meta: dict[str, Any]


def _load_template(like: str | None) -> _Template:
    """Return the template that `like` (the value of --like) names, which is an algorithm or a spec, or PPO if `like` is None.

    Raises UserError or SpecError if `like` names no usable template.
    """
    like = like or "PPO"
    if (name := _algorithm_name(like)) is not None:
        return _Template(like, ALGORITHMS[name], {"algorithm": {"name": name}}, {}, {})
    if is_extension(like) and not Path(like.rpartition(":")[0]).suffix:
        return _Template(like, _find_user_algorithm(like, f"--like {like}"), {"algorithm": {"name": like}}, {}, {})
    raw = _without_variables(_raw_spec(like))
    sections = [raw.get(key) if isinstance(raw.get(key), dict) else {} for key in ("agent", "env", "meta")]
    agent, env, meta = (dict(section or {}) for section in sections)
    algorithm = agent.get("algorithm")
    name = str(algorithm.get("name")) if isinstance(algorithm, dict) else ""
    model = _find_user_algorithm(name, f"--like {like}") if is_extension(name) else ALGORITHMS.get(name)
    if model is None:
        raise UserError(f"--like {like}: the algorithm '{name}' of this spec is unknown; expected one of {', '.join(ALGORITHMS)}")
    return _Template(like, model, agent, env, meta)


def _algorithm_name(like: str) -> str | None:
    """Return the name of the algorithm that is called `like` in this package or in another library, or None if there is none.

    Raises UserError if the algorithm needs further keys, which a new spec does not contain.
    """
    by_name = {name.lower(): name for name in ALGORITHMS}
    if (name := by_name.get(like.lower())) is not None:
        return name
    other = OTHER_ALGORITHMS.get(like.upper().replace("-", ""))
    if other is not None and "," in other:
        search = f"slm-lab list specs --search {like.lower()}"
        raise UserError(f"--like {like}: in slm_lab this is {other}; expected the name of a spec with these settings: {search}")
    return other


def _find_user_algorithm(name: str, where: str) -> type[AlgorithmSpec]:
    try:
        imported: Any = import_model(name, AlgorithmSpec)
    except ExtensionError as error:
        raise UserError(f"{where}: {error}") from None
    model: type[AlgorithmSpec] = imported
    return model


def _raw_spec(like: str) -> dict[str, Any]:
    """Return the spec with the name `like`, as a dict without defaults. Raises UserError or SpecError if there is no such spec.

    Args: like: name of a shipped spec, FILE:NAME, or the path of a file with one spec.
    """
    file, _, name = like.rpartition(":")
    if file or Path(like).suffix:
        file, name = (file, name) if file else (like, "")
        specs = raw_specs(file)
        if not name and len(specs) == 1:
            (name,) = specs
        if name not in specs:
            which = f"has no spec '{name}'" if name else "holds several specs"
            expected = f"; expected FILE:NAME, where NAME is one of {_some_names(specs)}"
            raise UserError(f"--like {like}: {file} {which}{nearest_hint(name, specs) or expected}")
        return _as_dict(specs[name], like)
    shipped = {name: file for file, name, *_ in spec_summaries()}
    if like not in shipped:
        near = closest_word(like, [*ALGORITHMS, *OTHER_ALGORITHMS, *shipped], 0.5)
        hint = (
            f"; did you mean '{near}'?"
            if near
            else f"; expected an algorithm ({', '.join(ALGORITHMS)}), the name of a shipped spec, or FILE:NAME"
        )
        raise UserError(f"--like {like}: unknown algorithm or spec{hint}")
    return _as_dict(raw_specs(SPEC_FOLDER / shipped[like])[like], like)


def _some_names(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:10])


def _as_dict(raw: Any, like: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UserError(f"--like {like}: the spec must be an object")
    return deepcopy(raw)


def _without_variables(value: Any) -> Any:
    """Return nested dicts without the entries whose values are variables (`${…}`), which `--set` would replace."""
    if isinstance(value, dict):
        return {key: _without_variables(item) for key, item in value.items() if not _is_variable(item)}
    return value


def _is_variable(value: Any) -> bool:
    return isinstance(value, str) and _VARIABLE.fullmatch(value) is not None


def _probe_env(name: str) -> tuple[dict[str, Any], EnvInfo]:
    """Build the env once, and return (entries of the env section that depend on the env, EnvInfo).

    Raises SpecError if the env cannot be built.
    """
    section: dict[str, Any] = {"name": name}
    try:
        env = make_env(EnvSpec(name=name, max_frame=1), 0, num_envs=1, training=False)
    except SpecError:
        if not (keys := _supported_keys(name)):
            raise
        section["obs_keys"] = keys
        env = make_env(EnvSpec(name=name, max_frame=1, obs_keys=keys), 0, num_envs=1, training=False)
    info = env.info
    close_env(env.close)
    check_unambiguous_observation(name, info.observation)
    if KNOWN.get(name) == "toy_text" and gym.spec(name).max_episode_steps is None:
        section["max_t"] = _MAX_T
    return section, info


def _supported_keys(name: str) -> list[str] | None:
    """Return the keys of the supported entries of a Dict or Tuple observation, or None if all entries or no entries are supported. If the
    env cannot be built, None is returned."""
    try:
        with quiet_gymnasium():
            env = gym.make(name, disable_env_checker=True)
            env.close()
    except Exception:  # make_env has already reported the reason
        return None
    return supported_keys(env.observation_space)


def _check_fits(template: _Template, env: str, info: EnvInfo) -> None:
    """Raise UserError if the algorithm cannot act in the env, or if the algorithm requires keys that a new spec does not contain."""
    memory = template.agent.get("memory") or {}
    if template.model.offline or "demonstration_fraction" in memory:
        reason = "the agent learns from recorded episodes, which a new spec does not name; see docs/demonstrations.md"
        raise UserError(f"--like {template.source}: {reason}")
    if memory.get("name") == "HindsightReplay" and info.observation.goals is None:
        needs = "observations with achieved_goal and desired_goal"
        raise UserError(f"--like {template.source}: HindsightReplay needs {needs}, which {env} does not have")
    actions = [group.action for group in info.groups or (info,)]
    action = next((action for action in actions if not supports_action_space(template.model, action)), None)
    if action is None:
        return
    fitting = [
        name
        for name, model in ALGORITHMS.items()
        if model.learns and not model.offline and all(supports_action_space(model, action) for action in actions)
    ]
    kind, which = action.kind.replace("_", "-"), template.agent["algorithm"]["name"]
    bounds = "" if action.bounded or action.kind != "continuous" else " without bounds"
    raise UserError(
        f"--like {template.source}: {which} does not support the {kind} actions{bounds} of {env}; use one of {', '.join(fitting)}"
    )


def _env_kind(name: str) -> str:
    """Return the kind of an env, such as "classic_control" or "atari", or "" for an env of another package."""
    return "atari" if name.startswith("ALE/") else KNOWN.get(name, "")


def _spec_dict(template: _Template, env_section: dict[str, Any], info: EnvInfo) -> dict[str, Any]:
    """Return the new spec as a dict, as in a spec file. Nets of the template are included only if they fit the env."""
    images, kind = info.observation.has_images, _env_kind(env_section["name"])
    agent, meta, old = deepcopy(template.agent), deepcopy(template.meta), template.env
    old_name = str(old.get("name", ""))
    alike = bool(old) and _env_kind(old_name) == kind != "" and _has_images(template) == images
    recommended = _recommended_env(template.model, kind, images, info)
    frames = old.get("max_frame") if alike or old_name == env_section["name"] else None
    if not isinstance(frames, int | float):
        frames = recommended["max_frame"]
    if isinstance(before := old.get("max_frame"), int | float) and before != frames:
        agent = _rescale_frames(agent, frames / before)
        meta.pop("log_frequency", None)
    env = {**env_section, "num_envs": recommended["num_envs"], "max_frame": int(frames)}
    taken = ("num_envs", "reward_scale", *(("normalize_obs", "normalize_reward", "clip_obs", "clip_reward") if alike else ()))
    env |= {key: old[key] for key in taken if key in old} if old else {key: recommended[key] for key in recommended if key not in env}
    if "sampler" in meta:
        del env["num_envs"]  # num_envs is determined by the workers of the sampler
    agent["name"] = agent.get("name") or _default_agent_name(template.model, agent["algorithm"]["name"])
    nets = [key for key in ("net", "critic_net") if agent.get(key) is not None]
    fit = all(_net_fits(agent[key], images, alike) for key in nets)
    for key in nets:
        if not fit:
            del agent[key]  # removed even if this net fits, since the recommended nets of actor and critics belong together
        elif info.action.kind not in ("continuous", "hybrid"):
            agent[key].pop("log_std_init", None)
    pdtype = agent["algorithm"].get("action_pdtype")
    if pdtype is not None and (pdtype in _DISCRETE_PDTYPES) != (info.action.kind == "discrete"):
        del agent["algorithm"]["action_pdtype"]
    for key in ("run", "random_seed", *(() if meta.get("rigorous_eval") else ("eval_frequency",))):
        meta.pop(key, None)
    if info.agents[:1] == ("player_0",) and not {"sampler", "distributed"} & meta.keys():  # a game of EnvPool
        meta.setdefault("self_play", {})
    if info.groups:
        agent["policies"] = fitting_policies(info)
    meta = {"max_session": _SESSIONS, "log_frequency": max(500, min(10_000, int(frames) // 100)), **meta}
    return {"agent": {"name": agent.pop("name"), **agent}, "env": env, "meta": meta}


def _recommended_env(model: type[AlgorithmSpec], kind: str, images: bool, info: EnvInfo) -> dict[str, Any]:
    """Return the recommended entries of the env section: num_envs, max_frame and, for some algorithms in MuJoCo, keys for normalisation.

    Normalisation is recommended for on-policy actor-critic algorithms.
    """
    frames = _OTHER_FRAMES[True] if images and kind != "atari" else _FRAMES.get(kind, _OTHER_FRAMES[images])
    if not model.on_policy:
        return {"num_envs": 1, "max_frame": frames if kind == "atari" else frames // 2}
    env: dict[str, Any] = {"num_envs": _ON_POLICY_ENVS.get(kind, 8), "max_frame": frames}
    if kind == "mujoco" and model.has_critic:
        env |= {"normalize_obs": True} if model.self_imitation else {"normalize_obs": True, "normalize_reward": True}
    return env


def _has_images(template: _Template) -> bool:
    return _is_conv(template.agent.get("net"))


def _is_conv(net: Any) -> bool:
    """Return whether the net section of a spec file describes a net for images."""
    return isinstance(net, dict) and (net.get("name") in _CONV or (net.get("name") == "TorchArcNet" and "Conv" in json.dumps(net)))


def _net_fits(net: Any, images: bool, alike: bool) -> bool:
    """Return whether a net section of the template fits the observations of the new env.

    A net class of the user, or a net with fixed input sizes, fits only if the envs of the template and of the new spec are similar.

    Args: alike: whether the envs of the template and of the new spec are similar.
    """
    if not isinstance(net, dict) or _is_conv(net) != images:
        return False
    any_size = "Lazy" in json.dumps(net) if net.get("name") == "TorchArcNet" else not is_extension(net.get("name"))
    return any_size or alike


def _rescale_frames(value: Any, ratio: float) -> Any:
    """Return a section of a spec in which all numbers of frames (keys in _IN_FRAMES) are multiplied by `ratio`."""
    if not isinstance(value, dict):
        return value
    scaled = {key: _rescale_frames(item, ratio) for key, item in value.items()}
    return {
        key: max(int(item * ratio), int(key != "start_step")) if key in _IN_FRAMES and isinstance(item, int | float) else item
        for key, item in scaled.items()
    }


def _default_agent_name(model: type[AlgorithmSpec], name: str) -> str:
    return _LABELS.get(name, name.rpartition(":")[2])
