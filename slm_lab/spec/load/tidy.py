"""Remove nulls and keys of other components from a raw spec."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.compat.env_ids import KNOWN
from slm_lab.spec.models.algorithm import ALGORITHMS
from slm_lab.spec.models.sections import SECTION_KEYS, foreign_keys
from slm_lab.spec.report import Path, Report, value_at

_FREE = frozenset({"arc", "actor_arc", "critic_arc", "run", "search"})
"""Keys with free-form values, in which null is a value."""


def drop_nulls(node: dict[str, Any], path: Path = ()) -> dict[str, Any]:
    """Remove keys whose value is null. Of an env's constructor arguments only the first level is searched."""
    for key in [key for key, value in node.items() if value is None]:
        del node[key]
    for key, value in node.items():
        if isinstance(value, dict) and key not in _FREE and path != ("env",):
            drop_nulls(value, (*path, key))
    return node


def fill_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Add the names that agent.net and agent.memory lack, as algorithm, env and keys suggest; remove an empty agent.net."""
    agent, env = raw.get("agent"), raw.get("env")
    if not isinstance(agent, dict):
        return raw
    net, memory, algorithm = agent.get("net"), agent.get("memory"), agent.get("algorithm")
    model = ALGORITHMS.get(str(algorithm.get("name"))) if isinstance(algorithm, dict) else None
    if net == {} or (isinstance(net, dict) and "name" not in net and model is not None and not model.learns):
        del agent["net"]  # Random needs none
    elif isinstance(net, dict) and "name" not in net:
        env_name = str(env.get("name")) if isinstance(env, dict) else ""
        if net.keys() & {"conv_hid_layers", "fc_hid_layers", "normalize"} or env_name.startswith(("ALE/", "CarRacing-")):
            net["name"] = "ConvNet"
        elif "hid_layers" in net or env_name in KNOWN:  # the spaces of other envs are not known here
            net["name"] = "MLPNet"
    if isinstance(memory, dict) and "name" not in memory and model is not None:
        memory["name"] = model.memories[0]
    return raw


def drop_ineffective(raw: dict[str, Any], report: Report) -> dict[str, Any]:
    """Remove, with a note, each key that belongs to another component of its section; one given by --set is a problem."""
    for place in SECTION_KEYS:
        section = value_at(raw, place)
        if not isinstance(section, dict):
            continue
        foreign = foreign_keys(place, raw)
        for key in [key for key in section if key in foreign]:
            del section[key]
            where = f"in {section['name']}" if len(place) > 1 and isinstance(section.get("name"), str) else "in this version"
            report.ineffective((*place, key), f"has no effect {where}; ignored")
    return raw
