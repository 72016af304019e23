"""Older forms of a spec → today's, one note for each change."""

from __future__ import annotations

from typing import Any

from slm_lab.spec import env_ids
from slm_lab.spec.report import Path, Report, show

_OLD_ENV = {
    "frame_op": "Atari frames are stacked by the env; other observations are one frame",
    "frame_op_len": "Atari frames are stacked by fours",
    "image_downsize": "Atari frames are 84 × 84",
    "scale_obs": "nets divide uint8 observations by 255",
}
_OLD_TOP = {
    "body": "agent and env belong together now",
    "git_sha": "is written under meta.run now",
    "name": "the name of a spec is its key",
}


def migrate(raw: dict[str, Any], report: Report) -> None:
    """Bring `raw` to today's form, in place. Doing so twice changes nothing more."""
    for root in ((), ("search",)):
        for key in ("agent", "env"):
            _unlist(raw, (*root, key), report)
    for key, reason in _OLD_TOP.items():
        _drop(raw, (key,), f"no longer used ({reason}); dropped", report)
    _algorithm(_section(raw, "agent", "algorithm"), report)
    _env(_section(raw, "env"), report)
    _meta(_section(raw, "meta"), report)
    for key in ("net", "critic_net"):
        _net(_section(raw, "agent", key), ("agent", key), report)


def _section(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The object at a path, or an empty one."""
    node: Any = raw
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _unlist(raw: dict[str, Any], path: Path, report: Report) -> None:
    section = _section(raw, *(str(key) for key in path[:-1]))
    items = section.get(str(path[-1]))
    if not isinstance(items, list):
        return
    if len(items) != 1:
        report.fail(path, f"must be an object, or a list with one; {len(items)} are given")
        section[str(path[-1])] = None
        return
    report.note(path, "a list, as in the v4 form; its one item is used")
    section[str(path[-1])] = items[0]
    report.moved(path, (*path, 0))


def _drop(section: dict[str, Any], path: Path, message: str, report: Report) -> None:
    if section.pop(str(path[-1]), None) is not None:
        report.note(path, message)


def _rename(section: dict[str, Any], place: Path, old: str, new: str, report: Report) -> None:
    """A key under a new name; where both are given, the new one counts."""
    if old not in section:
        return
    value = section.pop(old)
    if value is None:
        return
    if section.get(new) is not None:
        report.note((*place, old), f"an old name of '{new}', which is given too; dropped")
        return
    report.note((*place, old), f"an old name; read as '{new}'")
    section[new] = value
    report.moved((*place, new), (*place, old))


def _algorithm(algorithm: dict[str, Any], report: Report) -> None:
    place = ("agent", "algorithm")
    _rename(algorithm, place, "clip_val_loss", "clip_vloss", report)
    policy = algorithm.get("action_policy")
    if isinstance(policy, str) and policy.startswith("multi_"):
        algorithm["action_policy"] = policy.removeprefix("multi_")
        report.note((*place, "action_policy"), f"'{policy}' is read as '{algorithm['action_policy']}'")


def _env(env: dict[str, Any], report: Report) -> None:
    for key, reason in _OLD_ENV.items():
        _drop(env, ("env", key), f"no longer used ({reason}); dropped", report)
    _rename(env, ("env",), "normalize_state", "normalize_obs", report)
    name = env.get("name")
    if isinstance(name, str) and (now := env_ids.today(name)) != name:
        env["name"] = now
        report.note(("env", "name"), f"'{name}' is today's '{now}'")


def _meta(meta: dict[str, Any], report: Report) -> None:
    old = meta.get("resources") if isinstance(meta.get("resources"), dict) else None
    if old is not None:
        report.note(("meta", "resources"), "an old name; read as 'search_resources'")
        del meta["resources"]
        for key in ("num_cpus", "num_gpus"):
            if key in old:
                meta.setdefault(key, old[key])
                report.moved(("meta", key), ("meta", "resources", key))
    for key, new in (("num_cpus", "cpu"), ("num_gpus", "gpu")):
        value = meta.pop(key, None)
        resources = meta.setdefault("search_resources", {}) if value is not None else None
        if value is None or not isinstance(resources, dict):
            continue
        report.note(("meta", key), f"an old name; read as 'search_resources.{new}' ({show(value)})")
        if new not in resources:
            resources[new] = value
            report.moved(("meta", "search_resources", new), ("meta", key))
    _drop(meta, ("meta", "train_mode"), "no longer used (the mode is an argument of the command); dropped", report)


def _net(net: dict[str, Any], place: Path, report: Report) -> None:
    """Published files name a net by `type`; the models by `name`, as everything else. Both are fine, so no note."""
    if "type" not in net:
        return
    kind = net.pop("type")
    if net.get("name") is not None and net["name"] != kind:
        report.fail((*place, "type"), f"{show(kind)} and name {show(net['name'])} are two nets; give one")
    net["name"] = kind
    report.moved((*place, "name"), (*place, "type"))
