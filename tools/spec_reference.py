"""Generate the text of docs/spec.md and docs/nets.md from the models, their docstrings and the shipped specs.

tools/generate.py writes the files. tools/component_pages.py generates the pages with the keys of each algorithm, memory and net.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from slm_lab.spec.compat.migrate import OTHER_NAMES
from slm_lab.spec.load.files import SPEC_FOLDER, raw_specs, shipped_spec_files
from slm_lab.spec.load.validate import describe_schema
from slm_lab.spec.models.algorithm import ALGORITHMS, ALL_ACTIONS
from slm_lab.spec.models.base import Schedule, SpecModel
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.memory import MEMORIES
from slm_lab.spec.models.meta import MetaSpec, PBTSpec, SamplerSpec, SearchResources, SearchScheduler, SelfPlaySpec
from slm_lab.spec.models.net import NETS, LossSpec, LRSchedulerSpec, OptimSpec
from slm_lab.spec.models.spec import AgentSpec, Spec
from slm_lab.spec.rules.torch_check import ACTIVATIONS, INIT_FUNCTIONS, LOSSES, OPTIMIZERS, SCHEDULERS
from tools.schema import key_descriptions

Models = dict[str, type[BaseModel]]

SCHEDULES: Models = {get_args(model.model_fields["name"].annotation)[0]: model for model in get_args(get_args(Schedule)[0])}

INTRODUCTION = """\
# Spec reference

This page lists the keys of a spec file. Each algorithm, memory and net has its own page of keys, linked below. With
[`spec.schema.json`](../slm_lab/spec/spec.schema.json), editors show the same descriptions. `python -m tools.generate` writes this page from
the models in `slm_lab/spec`.

A spec file maps names to specs. Entries whose names begin with `_` or `$` are ignored. JSON files may have comments and trailing commas.
YAML files work too. The shortest spec gives an algorithm, an env and the number of frames to train:

```json
{
  "cartpole": {
    "agent": {"algorithm": {"name": "PPO"}},
    "env": {"name": "CartPole-v1", "max_frame": 100000}
  }
}
```

- If the section `agent.net` is absent, the net and all absent keys of the algorithm get values that are recommended for the algorithm and
  the spaces of the env. The spec that a run saves contains these values.
- If `agent.net` is present, absent keys have their defaults. Without a `name`, it is a ConvNet if it has keys of a ConvNet (such as
  `conv_hid_layers`), or if the env is an Atari env or CarRacing. It is an MLPNet if it has the key `hid_layers`, or if the env is another
  env of Gymnasium. In all other cases, `name` is required.
- If `agent.memory` is absent or has no `name`, it is the first memory of the algorithm in [the table](#section-agentalgorithm).
- `null` has the same meaning as an absent key.
- `--set name=value` replaces `"${name}"`, and `--set agent.algorithm.gamma=0.98` overrides a key.
- An unknown key is an error, and the message names the most similar key. A key of another algorithm, memory or net that has no effect in
  this spec causes a notice, or an error if it is given with `--set`.
- Whole numbers may be written as `1e6`. *Frames* are steps of the env, summed over parallel envs; a *vector step* is one step of all
  parallel envs.
- To use your own class, set `name` to `"package.module:Class"`: see [extend.md](extend.md).
"""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


LEADS = {
    "agent.algorithm": "If `agent.memory` is absent, the first memory of the algorithm in this table is used.",
    "agent.net": "`type` is another name of the key `name`. `agent.critic_net` has the same keys; its absent keys have their defaults, "
    "not the values of `agent.net`.",
    "agent.net.optim_spec": f"Names: {_listed(sorted(OPTIMIZERS))}, and `Lookahead`, whose argument `optimizer` is the inner one.",
    "agent.net.lr_scheduler_spec": f"Names: {_listed(sorted(SCHEDULERS))}. Unless `unit` is given, LinearToZero and LinearToMin count "
    "frames, and the others count training calls.",
    "agent.net.loss_spec": f"Names: {_listed(sorted(LOSSES))}.",
    "env": "Keys that are not listed here are arguments of the env's constructor (`continuous`, `repeat_action_probability`, …). An "
    "argument that the constructor does not accept is an error before training.",
}
"""Section → text below its heading."""

_ARC = {
    "modules": {"body": {"Sequential": [{"LazyLinear": {"out_features": 64}}, {"Tanh": {}}]}},
    "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"},
}
EXAMPLES: dict[str, Any] = {
    "agent": {"algorithm": {"name": "PPO"}},
    "env": {"name": "CartPole-v1", "max_frame": 100_000},
    "name": "A2C",
    "algorithm": {"name": "PPO", "gamma": 0.98},
    "memory": {"name": "Replay", "batch_size": 64},
    "net": {"name": "MLPNet", "hid_layers": [64, 64]},
    "critic_net": {"name": "MLPNet", "hid_layers": [512, 512]},
    "burn_in": 8,
    "eta": 0.7,
    "use_same_optim": False,
    "actor_optim_spec": {"name": "Adam", "lr": 3e-4},
    "critic_optim_spec": {"name": "Adam", "lr": 1e-3},
    "actor_lr_scheduler_spec": {"name": "LinearToZero", "frame": 100_000},
    "critic_lr_scheduler_spec": {"name": "LinearToZero", "frame": 100_000},
    "use_cer": True,
    "sil_replay_name": "Replay",
    "arc_file": "net.yaml",
    "actor_arc": _ARC,
    "critic_arc": _ARC,
    "with_vtrace": True,
    "rho_bar": 2.0,
    "c_bar": 1.0,
    "center_return": True,
    "policy_loss_coef": 0.5,
    "normalize_v_targets": True,
    "clip_vloss": True,
    "critic_init_std": 0.5,
    "dropout": 0.01,
    "reset_frequency": 200_000,
    "width": 512,
    "blocks": 2,
    "dual_clip": 3.0,
    "bounds_loss_coef": 0.0001,
    "target_kl": 0.02,
    "adaptive_lr": {"kl_target": 0.01},
    "recompute_advantages": True,
    "normalize_values": True,
    "kl_target": 0.008,
    "factor": 2.0,
    "min_lr": 1e-6,
    "max_lr": 1e-3,
    "symlog": True,
    "normalize_advantages": "percentile",
    "entropy_penalty_coef": 0.5,
    "entropy_anneal": True,
    "target_entropy": 0.3,
    "fixed_alpha": 0.2,
    "alpha_anneal_frames": 100_000,
    "log_alpha_min": -5.0,
    "log_alpha_max": 1.0,
    "spectral_norm": True,
    "policy_delay": 2,
    "cross_entropy": 0.8,
    "initial_error": "greatest",
    "epsilon": 1e-4,
    "goal_threshold": 0.05,
    "beta": {"name": "linear_decay", "start_val": 0.4, "end_val": 1.0, "end_step": 100_000},
    "layer_norm": True,
    "batch_norm": True,
    "out_layer_activation": "tanh",
    "conv_hid_layers": [[32, 8, 4], [64, 4, 2], [64, 3, 1]],
    "normalize": True,
    "dtype": "bfloat16",
    "cuda_id": 0,
    "unit": "frames",
    "rnn_num_layers": 2,
    "bidirectional": False,
    "arc": _ARC,
    "max_t": 500,
    "channels": "last",
    "input": "vector",
    "clip_obs": 5.0,
    "reward_scale": 0.1,
    "backend": "sync",
    "wrappers": ["FlattenObservation", {"name": "RescaleAction", "min_action": -1.0, "max_action": 1.0}],
    "obs_keys": ["image"],
    "action_mask": "action_mask",
    "critic_keys": ["privileged_state"],
    "schedule": {"gravity": [[0, 5.0], [50000, 9.8]]},
    "random_seed": 7,
    "save_interval": 60.0,
    "checkpoint_frequency": 100_000,
    "demonstrations": "cartpole.npz",
    "policies": {"first": ["player_0"], "second": ["player_1"]},
    "snapshot_frequency": 100_000,
    "init_from": "data/ppo_cartpole_2026_01_31_120000",
    "stall_notice": 60.0,
    "stall_limit": 600.0,
    "max_seconds": 600.0,
    "observers": ["my_package.observers:Printer"],
    "track_info": ["is_success"],
    "matmul": "onednn",
    "run": [{"began": "2026-01-31T12:00:00+00:00"}],
    "max_trial": 16,
    "search_scheduler": {"grace_period": 10_000, "reduction_factor": 3.0},
    "search_metric": "final_strength",
    "search": {
        "agent": {
            "algorithm": {"gamma__uniform": [0.9, 0.999]},
            "net": {
                "optim_spec__choice": [
                    {"name": "Adam", "lr__loguniform": [1e-4, 1e-2]},
                    {"name": "SGD", "lr__loguniform": [1e-3, 1e-1], "momentum__choice": [0, 0.9]},
                ]
            },
        }
    },
    "serial_mode": True,
    "reward_gap_absolute": 1.0,
    "perturb_min": 1.05,
    "perturb_max": 2.0,
    "start_step": 10_000,
}
"""Key → example, for keys whose values in the shipped specs are not informative."""


_NAMES = {"init_fn": INIT_FUNCTIONS, "hid_layers_activation": ACTIVATIONS, "out_layer_activation": ACTIVATIONS}
"""Key → allowed values that the models do not list."""


@dataclass(frozen=True)
class Section:
    """A section of the reference."""

    path: str
    """Path in a spec, such as "agent.net"; "schedule" for all keys that contain a schedule."""
    title: str
    models: Models
    """Component → model; one model under "" if the section has no components."""

    @property
    def heading(self) -> str:
        """Heading that differs from the headings of keys."""
        return self.title if self.title.istitle() else f"Section {self.title}"

    @property
    def page(self) -> str:
        """File in docs/ that contains the section."""
        return "nets.md" if self.path.startswith("agent.net") else "spec.md"

    @property
    def link(self) -> str:
        """Address of the section, relative to docs/."""
        return f"{self.page}#{_anchor(self.heading)}"


SECTIONS = (
    Section("", "Spec", {"": Spec}),
    Section("agent", "agent", {"": AgentSpec}),
    Section("agent.algorithm", "agent.algorithm", dict(ALGORITHMS)),
    Section("schedule", "Schedules", SCHEDULES),
    Section("agent.memory", "agent.memory", dict(MEMORIES)),
    Section("agent.net", "agent.net, agent.critic_net", dict(NETS)),
    Section("agent.net.optim_spec", "optim_spec", {"": OptimSpec}),
    Section("agent.net.lr_scheduler_spec", "lr_scheduler_spec", {"": LRSchedulerSpec}),
    Section("agent.net.loss_spec", "loss_spec", {"": LossSpec}),
    Section("env", "env", {"": EnvSpec}),
    Section("meta", "meta", {"": MetaSpec}),
    Section("meta.self_play", "meta.self_play", {"": SelfPlaySpec}),
    Section("meta.sampler", "meta.sampler", {"": SamplerSpec}),
    Section("meta.sampler.pbt", "meta.sampler.pbt", {"": PBTSpec}),
    Section("meta.search_resources", "meta.search_resources", {"": SearchResources}),
    Section("meta.search_scheduler", "meta.search_scheduler", {"": SearchScheduler}),
)
FOLDERS = {"agent.algorithm": "algorithms", "agent.memory": "memories", "agent.net": "nets"}
"""Section → folder in docs/ with a page for each of its components."""


def text() -> str:
    """Return the text of docs/spec.md."""
    contents = "Sections: " + ", ".join(f"[{section.title}]({section.link})" for section in SECTIONS)
    others = [
        "## Names in other libraries",
        "",
        "A key with one of these names (Stable-Baselines3, CleanRL, RLlib, …) is an error. The message names the corresponding key.",
        "",
    ]
    others += [
        "| name | key of slm_lab |",
        "|---|---|",
        *(f"| `{name}` | `{path.replace(' (', '` (')}{'' if ' (' in path else '`'} |" for name, path in OTHER_NAMES.items()),
    ]
    parts = [INTRODUCTION, contents + "\n", *sections_of("spec.md"), "\n".join(others) + "\n"]
    return relative("\n".join(parts), "spec.md")


def sections_of(page: str) -> list[str]:
    """Return the sections of a page, with links relative to docs/."""
    return [_section(section) for section in SECTIONS if section.page == page]


def relative(text: str, page: str) -> str:
    """Add links to papers to the text of a page, and make links that are relative to docs/ relative to the page."""
    text = with_papers(text)
    up = "../" * page.count("/")
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", lambda link: f"]({up}{link[1]})".replace(f"]({page}#", "](#"), text)


def with_papers(words: str) -> str:
    """Return the text with each arXiv number replaced by a link to the paper."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", words)


def _section(section: Section) -> str:
    lines = [f"## {section.heading}", ""]
    only = section.models.get("")
    if only is not None and (doc := inspect.getdoc(only)):
        lines += [doc, ""]
    if lead := LEADS.get(section.path):
        lines += [lead, ""]
    if only is None:
        lines += [*_components(section), ""]
    here = keys(section) if section.path not in FOLDERS else common_keys(section)
    lines += [line for key in here for line in key_lines(section, key)]
    if section.path in FOLDERS:
        lines += [*_key_index(section, here), ""]
    return "\n".join(lines)


def _components(section: Section) -> list[str]:
    """Return the lines of the table of components of a section."""
    models = section.models
    links = {name: f"[`{name}`]({page_of(section, name)})" if section.path in FOLDERS else f"`{name}`" for name in models}
    if section.path != "agent.algorithm":
        return ["| name | |", "|---|---|", *(f"| {links[name]} | {_line(inspect.getdoc(model))} |" for name, model in models.items())]
    lines = ["| name | | actions | memories |", "|---|---|---|---|"]
    for name, model in ALGORITHMS.items():
        actions = "all" if len(model.action_kinds) == len(ALL_ACTIONS) else ", ".join(kind.replace("_", "-") for kind in model.action_kinds)
        memories = "any" if len(model.memories) > 3 else ", ".join(model.memories)
        lines.append(f"| {links[name]} | {_line(inspect.getdoc(model))} | {actions} | {memories} |")
    return lines


def page_of(section: Section, name: str) -> str:
    """Return the address of the page of a component, relative to docs/."""
    return f"{FOLDERS[section.path]}/{name}.md"


def common_keys(section: Section) -> list[str]:
    """Return the keys with the same description for every net; [] for algorithms and memories, whose keys are on separate pages."""
    if section.path != "agent.net":
        return []
    models = list(section.models.values())
    return [key for key in keys(section) if len({_descriptions(model).get(key) for model in models}) == 1]


def _key_index(section: Section, listed: Sequence[str]) -> list[str]:
    """Return a table of the keys that are on the pages of components."""
    lines = ["| key | on the pages of |", "|---|---|"]
    for key in keys(section):
        owners = [name for name, model in section.models.items() if key in keys_with_effect(model)]
        if key not in listed:
            links = (
                "all"
                if len(owners) == len(section.models)
                else ", ".join(f"[{owner}]({page_of(section, owner)}#{key})" for owner in owners)
            )
            lines.append(f"| `{key}` | {links} |")
    return lines


def keys(section: Section) -> list[str]:
    """Return the keys of a section, with the most common keys first, without the `name` of components."""
    everywhere = dict.fromkeys(key for model in section.models.values() for key in keys_with_effect(model))
    components = "" not in section.models
    hidden = {"name"} if components or section.path == "" else set()
    return sorted(
        (key for key in everywhere if key not in hidden),
        key=lambda key: -sum(key in keys_with_effect(model) for model in section.models.values()),
    )


def keys_with_effect(model: type[BaseModel]) -> list[str]:
    """Return the keys of a model, except inherited keys that have no effect (AlgorithmSpec.unused_keys)."""
    unused: Iterable[str] = getattr(model, "unused_keys", ())
    return [key for key in model.model_fields if key not in unused]


def key_lines(section: Section, key: str, level: str = "####") -> Iterator[str]:
    """Yield the lines about a key, with a heading of the given level."""
    owners = {name: model for name, model in section.models.items() if key in keys_with_effect(model)}
    facts = [(_line(_descriptions(model).get(key)), _type(model, key), default_of(model, key)) for model in owners.values()]
    texts, types, defaults = zip(*facts, strict=True)
    meanings = list(dict.fromkeys(texts))
    yield from (f"{level} {key}", "")
    if len(meanings) == 1 and texts[0]:
        yield from (texts[0], "")
    for meaning in meanings if len(meanings) > 1 else ():
        yield f"- *{', '.join(name for name, text in zip(owners, texts, strict=True) if text == meaning)}*: {meaning}"
    yield f"- {_by(list(owners), types)}; {_by(list(owners), defaults)}"
    yield f'- Example: `"{key}": {json.dumps(example(section, key), ensure_ascii=False)}`'
    if "" not in section.models and section.path not in FOLDERS:
        yield f"- Used by {_users(list(owners), list(section.models))}"
    if others := _elsewhere(section, key):
        yield f"- In other libraries: {', '.join(f'`{name}`' for name in others)}"
    yield ""


def _by(names: list[str], facts: Sequence[str]) -> str:
    """Return a fact about a key: once if the fact is the same for all components, otherwise for each group of components."""
    groups = {
        fact: [name for name, of_component in zip(names, facts, strict=True) if of_component == fact] for fact in dict.fromkeys(facts)
    }
    if len(groups) == 1:
        return facts[0]
    words = ", ".join(f"{fact[0].lower()}{fact[1:]} ({', '.join(group)})" for fact, group in groups.items())
    return words if facts[0][0] == words[0] else words[0].upper() + words[1:]


def _elsewhere(section: Section, key: str) -> list[str]:
    """Return the names of a key in other libraries; if there are none, the names of the keys inside this key."""
    path = f"{section.path}.{key}"
    here = {name: place.split(" ")[0] for name, place in OTHER_NAMES.items()}
    exact = [name for name, place in here.items() if place == path and name != key]
    return exact or [name for name, place in here.items() if place.startswith(f"{path}.") and path.count(".") > 1]


def _users(names: list[str], everyone: list[str]) -> str:
    """Return a text that lists the components that use a key."""
    rest = [name for name in everyone if name not in names]
    if not rest:
        return "all"
    return ", ".join(names) if len(names) <= len(rest) + 2 else f"all but {', '.join(rest)}"


@cache
def _descriptions(model: type[BaseModel]) -> dict[str, str]:
    return key_descriptions(model)


@cache
def _properties(model: type[BaseModel]) -> dict[str, Any]:
    return dict(model.model_json_schema()["properties"])


def _type(model: type[BaseModel], key: str) -> str:
    """Return a description of the allowed values."""
    schema = _properties(model)[key]
    if names := _NAMES.get(key):
        return "One of " + ", ".join(f'`"{name}"`' for name in sorted(names))
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
    words = " or ".join(dict.fromkeys(_reference(kind) or _code(describe_schema(kind)) for kind in kinds))
    return words if words.startswith("[") else words[0].upper() + words[1:]


def _reference(schema: dict[str, Any]) -> str:
    """Return a link to the section of the model that a schema refers to; "" if there is no such section."""
    ref = schema.get("$ref") or next((inner["$ref"] for inner in schema.get("oneOf", ()) if "$ref" in inner), "")
    name = ref.rpartition("/")[2]
    for section in SECTIONS:
        if any(model.__name__ == name for model in section.models.values()):
            title = {"Schedules": "a schedule", "agent.net, agent.critic_net": "a net"}.get(section.title, f"section {section.title}")
            return f"[{title}]({section.link})"
    return ""


def _code(words: str) -> str:
    """Return the text with quoted values formatted as code."""
    parts = words.split("'")
    return "".join(f'`"{part}"`' if index % 2 else part for index, part in enumerate(parts)) if len(parts) % 2 else words


def default_of(model: type[BaseModel], key: str) -> str:
    """Return a description of the default of a key."""
    field = model.model_fields[key]
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined or field.default is None:
        return "absent by default"
    if isinstance(field.default, MetaSpec | SearchResources):
        return "optional"
    return f"default `{json.dumps(_short(field.default), ensure_ascii=False)}`"


def _short(value: Any) -> Any:
    """Return a default as JSON, without keys that have their own default values."""
    if isinstance(value, SpecModel):
        return to_jsonable_python(value.model_dump(exclude_defaults=True, exclude_none=True)) or to_jsonable_python(
            value.model_dump(exclude_none=True)
        )
    return to_jsonable_python(value)


def example(section: Section, key: str) -> Any:
    """Return an example of a value for a key.

    The first of these values that exists is returned: the example in the key's model, if the section has only this model; the value in
    EXAMPLES; the most frequent non-default value in the shipped specs; the default.
    """
    if len(section.models) == 1 and (examples := next(iter(section.models.values())).model_fields[key].examples):
        return examples[0]
    if key in EXAMPLES and _is_allowed(section, key, EXAMPLES[key]) and not (key == "name" and section.path != "agent"):
        return EXAMPLES[key]
    defaults = [model.model_fields[key].default for model in section.models.values() if key in model.model_fields]
    given = [value for path, values in _shipped().items() if _matches(section, path, key) for value in values]
    allowed = [value for value in given if _is_allowed(section, key, value)]
    values = sorted(json.dumps(value) for value in allowed if value not in defaults and "${" not in json.dumps(value))
    if values:
        return json.loads(max((list(equal) for _, equal in groupby(values)), key=len)[0])
    return _short(defaults[0])


def _is_allowed(section: Section, key: str, value: Any) -> bool:
    """Return whether a model of the section accepts a value, which may come from a spec with another model."""
    for model in section.models.values():
        if key in model.model_fields:
            with suppress(ValidationError):
                field = model.model_fields[key]
                with_constraints: Any = Annotated[field.annotation, "", *field.metadata]  # Annotated needs at least one annotation
                TypeAdapter(with_constraints).validate_python(value)
                return True
    return False


def _matches(section: Section, path: tuple[str, ...], key: str) -> bool:
    """Return whether a path in a spec is the path of a key of the section."""
    where = tuple(section.path.split(".")) if section.path else ()
    if section.path == "schedule":
        return len(path) > 1 and path[-1] == key and path[-2].endswith("_spec") and path[-3] == "algorithm"
    return path == (*where, key)


@cache
def shipped_specs() -> tuple[tuple[str, str, dict[str, Any]], ...]:
    """Return file, name and content of every shipped spec."""
    files = {file.as_posix(): raw_specs(SPEC_FOLDER / file) for file in shipped_spec_files()}
    return tuple(
        (file, name, spec)
        for file, specs in files.items()
        for name, spec in specs.items()
        if isinstance(spec, dict) and isinstance(spec.get("agent"), dict)
    )


@cache
def _shipped() -> dict[tuple[str, ...], list[Any]]:
    """Return {path of a key: values of the key in the shipped specs}."""
    values: dict[tuple[str, ...], list[Any]] = {}

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                values.setdefault((*path, key), []).append(inner)
                walk(inner, (*path, key))

    for _, _, spec in shipped_specs():
        walk(spec, ())
    return values


def _line(words: str | None) -> str:
    """Return a docstring as one line, with "|" escaped for tables."""
    return " ".join((words or "").split()).replace("|", "\\|")


def _anchor(title: str) -> str:
    """Return the anchor that GitHub and mkdocs generate for a heading."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
