"""Build a Spec from one raw spec (the parsed JSON of the spec), or report all problems of the raw spec.

`_to_current_form` converts the raw spec to the form that the pydantic models expect, and `validate` validates the result. If the raw spec
is invalid, all checks after the validation use only the valid keys of the raw spec, so that all problems are reported at once. After the
validation, `check_rules` checks the rules that concern several sections. If the spec is valid, `resolve` fills in default values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slm_lab.spec.compat.differences import adapt_slm_lab_spec, is_for_slm_lab, note_differences
from slm_lab.spec.compat.env_ids import KNOWN
from slm_lab.spec.compat.migrate import migrate_spec
from slm_lab.spec.load.files import read_arc_files
from slm_lab.spec.load.search_check import check_search, drop_unusable_values, note_search_differences
from slm_lab.spec.load.validate import invalid_paths, likely_names, validate
from slm_lab.spec.models.algorithm import ALGORITHMS
from slm_lab.spec.models.search import prune_search
from slm_lab.spec.models.spec import SECTION_KEYS, SPEC_VERSION, Spec, ineffective_keys, models_at
from slm_lab.spec.report import KeyPath, Problem, Report, format_json, nearest_hint, set_value_at, value_at
from slm_lab.spec.rules.check import check_rules, check_updates
from slm_lab.spec.rules.keys import ALGORITHM
from slm_lab.spec.rules.resolve import derive_dataset_sizes, resolve_spec


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a raw spec."""

    overrides: Mapping[KeyPath, Any] = field(default_factory=dict)
    """Maps the paths of keys to the values that --set arguments give."""
    folder: Path | None = None
    """Folder of the spec file, or None if the spec is not in a file."""
    for_search: bool = True
    """Whether the spec is used for a hyperparameter search (see `load_spec`)."""
    builds_env: bool = True
    """Whether the env of the spec will be created (see `load_spec`)."""


def build(name: str, raw: dict[str, Any], options: LoadOptions, report: Report) -> Spec | None:
    """Return the Spec that `raw` describes, or None if `raw` is invalid. Problems are added to `report`, and `raw` is not modified."""
    report.for_slm_lab = is_for_slm_lab(raw)
    body = _to_current_form(raw, options, report) | {"name": name}
    found = report.empty_copy()
    spec, guessed = validate(body, found), set[KeyPath]()
    report.merge(found)
    if is_valid := spec is not None:
        spec = derive_dataset_sizes(spec)
    else:
        spec, guessed = _build_valid_part(body, report)
    if spec is None:
        return None
    found = report.empty_copy()
    check_rules(spec, found, algorithm_known=("agent", "algorithm", "name") not in guessed, builds_env=options.builds_env)
    if is_valid and not found.problems:
        check_updates(spec, found)
        note_differences(spec, found)
    spec, searched = _check_search(spec, body, options, report, found, is_valid)
    if not options.for_search and spec.search is not None:
        by_sets = is_valid and bool(searched.problems) and _is_valid_without_sets(name, raw, options)
        found.note(("search",), _left_out_note(searched.problems if by_sets else []))
        searched = report.empty_copy() if by_sets else searched
        spec = spec.model_copy(update={"search": None})
    found.merge(searched)
    report.merge(found)
    resolved = resolve_spec(spec, report) if not report.problems else None
    return resolved if not report.problems else None


def _to_current_form(raw: dict[str, Any], options: LoadOptions, report: Report) -> dict[str, Any]:
    """Return a copy of a raw spec in the form that the pydantic models expect. The --set arguments are applied to the copy.

    Each function that `_to_current_form` calls modifies the copy in place, and returns the copy.
    """
    raw = migrate_spec(copy.deepcopy(raw), report)  # --set may use current or old names of keys
    _check_version(raw, report)
    raw = migrate_spec(_apply_set_arguments(raw, options.overrides, report), report)
    raw = adapt_slm_lab_spec(drop_nulls(read_arc_files(raw, options.folder, report)), report)
    return prune_search(drop_ineffective_keys(guess_missing_names(raw), report), report)


def _check_version(raw: dict[str, Any], report: Report) -> None:
    """Add a problem to `report` if a run of another version of slm_lab saved the spec, because keys may have another meaning in the other
    version."""
    starts = value_at(raw, ("meta", "run"))
    last = starts[-1] if isinstance(starts, list) and starts else None  # meta.run has one entry for each start of the run
    if isinstance(last, dict) and (version := last.get("spec_version")) != SPEC_VERSION:
        why = "another version of slm_lab saved this spec; remove meta.run to read the spec with the current meaning of its keys"
        report.add_problem(("meta", "run"), f"spec_version {format_json(version)}; expected {SPEC_VERSION}: {why}")


def _apply_set_arguments(raw: dict[str, Any], overrides: Mapping[KeyPath, Any], report: Report) -> dict[str, Any]:
    """Apply the values of --set arguments to a raw spec in place, and return the raw spec."""
    for path, value in overrides.items():
        if value is None and value_at(raw, path) is None:
            names = [name for model in models_at(path[:-1], raw) for name in model.model_fields]
            if names and path[-1] not in names:
                report.add_problem(path, f"unknown key{nearest_hint(str(path[-1]), names)}", "unknown")
        set_value_at(raw, path, copy.deepcopy(value), report)  # all specs of a file get the same value objects
        if path[:2] == ("meta", "run"):
            report.add_problem(path, "has no effect: slm_lab writes meta.run, and ignores it when a spec is loaded")
    return raw


def _check_search(
    spec: Spec, raw: dict[str, Any], options: LoadOptions, report: Report, found: Report, is_valid: bool
) -> tuple[Spec, Report]:
    """Check the search section of a spec, and return the spec and a report with the problems of the search section.

    Notes on the search section are added to the report `found`. If the spec was written for SLM Lab, keys and values that cannot be
    searched are removed from the search section, both in the returned spec and in `raw`.

    Args: is_valid: whether the user's spec is valid. If `is_valid` is False, `spec` contains only the valid keys of the user's spec.
    """
    searched, problems_of = report.empty_copy(), partial(_find_problems, spec.name, options=LoadOptions(builds_env=options.builds_env))
    check_search(raw, searched, problems_of if is_valid else None)
    if searched.problems and is_valid and report.for_slm_lab:
        drop_unusable_values(raw, searched.problems, found)
        searched = report.empty_copy()
        check_search(raw, searched, problems_of)
        spec = spec.model_copy(update={"search": raw["search"]})
    if is_valid and not searched.problems:
        note_search_differences(raw, found)
    return spec, searched


def _left_out_note(problems: list[Problem]) -> str:
    """Return the text of a note which says that the search section of a spec is ignored, because no search is run.

    Args: problems: problems of search values that are valid without the --set arguments.
    """
    why = "only for a search; left out"
    if not problems:
        return why
    count, first = len(problems), problems[0]
    return f"{why} (with --set, {count} of its values {'is' if count == 1 else 'are'} invalid; the first is {first.path}: {first.message})"


def _is_valid_without_sets(name: str, raw: dict[str, Any], options: LoadOptions) -> bool:
    """Return whether --set arguments change keys of the spec and the search section is valid without these changes.

    The check uses the values that --set arguments give to variables (`${var}`), because `raw` already contains these values.
    """
    problems = _find_problems(name, raw, replace(options, overrides={})) if options.overrides else []
    return bool(options.overrides) and not any(problem.path.split(".")[0] == "search" for problem in problems)


def _find_problems(name: str, raw: dict[str, Any], options: LoadOptions) -> list[Problem]:
    """Return the problems of a raw spec."""
    build(name, raw, replace(options, for_search=True), report := Report())
    return report.problems


def _build_valid_part(raw: dict[str, Any], report: Report) -> tuple[Spec | None, set[KeyPath]]:
    """Return a Spec that contains only the valid keys of an invalid raw spec, and the paths of the component names that were guessed.

    With the returned Spec, rules that concern several sections can be checked although the raw spec is invalid. An unknown name of a
    component (such as an algorithm or a net) is replaced by a likely name, and problems with the other keys of the component are added to
    `report`. Other invalid keys are removed or, if they are required, replaced by placeholder values (_STAND_IN).
    """
    given = value_at(raw, ALGORITHM)
    raw, guessed, cut = copy.deepcopy(raw), set[KeyPath](), False
    for _ in range(10):
        wrong = invalid_paths(raw)
        if not wrong:
            replaced = {(*ALGORITHM, "name")} if given != value_at(raw, ALGORITHM) == _STAND_IN[ALGORITHM] else set()
            return validate(raw, Report()), guessed | replaced
        likely = {} if cut else likely_names(raw, wrong)
        for path, name in likely.items():
            value_at(raw, path[:-1])["name"] = name
        if likely:
            guessed |= likely.keys()
            drop_ineffective_keys(raw, Report())
            found = report.empty_copy()
            validate(raw, found)
            report.merge(found)
            continue
        cut = True
        removed: list[KeyPath] = []
        for path in sorted(set(wrong), key=len, reverse=True):  # a key may have several problems
            if not any(path[: len(part)] == part for part in removed):
                removed.append(_remove_part(raw, path))
    return None, guessed


_STAND_IN: dict[KeyPath, Any] = {
    ("agent",): {"algorithm": {"name": "Random"}},
    ("agent", "algorithm"): {"name": "Random"},
    ("agent", "net", "conv_hid_layers"): [[1, 1]],
    ("agent", "critic_net", "conv_hid_layers"): [[1, 1]],
    ("agent", "net", "hid_layers"): [[[1]], [1], []],
    ("agent", "critic_net", "hid_layers"): [[[1]], [1], []],
    ("env",): {"name": "CartPole-v1", "max_frame": 1},
    ("env", "name"): "CartPole-v1",
    ("env", "max_frame"): 1,
}
"""Maps the path of each required key to a valid placeholder value."""


def _remove_part(rest: dict[str, Any], path: KeyPath) -> KeyPath:
    """Remove the key at `path` from a raw spec or, if the key is missing, the innermost existing section that would contain the key.

    A required key or section is not removed, but replaced by its placeholder value in _STAND_IN. Returns the path of the removed or
    replaced key.
    """
    for end in range(len(path), 0, -1):
        section, key = value_at(rest, path[: end - 1]), path[end - 1]
        if not isinstance(section, dict):
            continue
        # a placeholder that is invalid is removed (the placeholder of hid_layers is valid only in a HydraMLPNet)
        if path[:end] in _STAND_IN and section.get(key) != _STAND_IN[path[:end]]:
            section[key] = copy.deepcopy(_STAND_IN[path[:end]])
            return path[:end]
        if key in section:
            del section[key]
            return path[:end]
    return path


_FREE = frozenset({"arc", "actor_arc", "critic_arc", "run", "search"})
"""Keys whose values can have any form, in which null values have a meaning and are kept."""


def drop_nulls(node: dict[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """Remove keys whose value is None (null in JSON) from nested dicts, in place.

    Two kinds of dicts are not changed: dicts inside the section `env`, which are constructor arguments of the env, and dicts at the keys in
    _FREE.
    """
    for key in [key for key, value in node.items() if value is None]:
        del node[key]
    for key, value in node.items():
        if isinstance(value, dict) and key not in _FREE and path != ("env",):
            drop_nulls(value, (*path, key))
    return node


def guess_missing_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Add the key `name` to the sections agent.net and agent.memory of a raw spec if the key is missing, in place.

    The name of the net is guessed from the keys of the net and from the env. The name of the memory is the default memory of the algorithm.
    An empty section agent.net is removed.
    """
    agent, env = raw.get("agent"), raw.get("env")
    if not isinstance(agent, dict):
        return raw
    net, memory, algorithm = agent.get("net"), agent.get("memory"), agent.get("algorithm")
    model = ALGORITHMS.get(str(algorithm.get("name"))) if isinstance(algorithm, dict) else None
    if net == {} or (isinstance(net, dict) and "name" not in net and model is not None and not model.learns):
        del agent["net"]  # Random needs no net
    elif isinstance(net, dict) and "name" not in net:
        env_name = str(env.get("name")) if isinstance(env, dict) else ""
        if net.keys() & {"conv_hid_layers", "fc_hid_layers", "normalize"} or env_name.startswith(("ALE/", "CarRacing-")):
            net["name"] = "ConvNet"
        elif "hid_layers" in net or env_name in KNOWN:  # at this point, the observation spaces of other envs are not known
            net["name"] = "MLPNet"
    if isinstance(memory, dict) and "name" not in memory and model is not None:
        memory["name"] = model.memories[0]
    return raw


def drop_ineffective_keys(raw: dict[str, Any], report: Report) -> dict[str, Any]:
    """Remove each key that would have an effect only with another component in its section (such as another algorithm), and add a note to
    `report` for each removed key.

    If a --set argument gave the removed key, add a problem instead of the note.
    """
    for location in SECTION_KEYS:
        section = value_at(raw, location)
        if not isinstance(section, dict):
            continue
        foreign = ineffective_keys(location, raw)
        for key in [key for key in section if key in foreign]:
            del section[key]
            where = f"in {section['name']}" if len(location) > 1 and isinstance(section.get("name"), str) else "in this version"
            report.note_ineffective_key((*location, key), f"has no effect {where}; ignored")
    return raw
