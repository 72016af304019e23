"""Migrate older forms of a spec to the current one, with a note for each change."""

from __future__ import annotations

from typing import Any

from slm_lab.spec import env_ids
from slm_lab.spec.report import Path, Report, show

_OLD_ENV = {
    "frame_op": "the env stacks Atari frames; other observations are single frames",
    "frame_op_len": "4 Atari frames are stacked",
    "image_downsize": "Atari frames are 84 × 84",
    "scale_obs": "nets divide uint8 observations by 255",
}
_OLD_TOP = {
    "body": "there is one agent and one env",
    "git_sha": "now in meta.run",
    "name": "a spec is named by its key",
}


def migrate(raw: dict[str, Any], report: Report) -> None:
    """Migrate `raw` to the current form, in place. Idempotent."""
    for root in ((), ("search",)):
        for key in ("agent", "env"):
            _unlist(raw, (*root, key), report)
    for key, reason in _OLD_TOP.items():
        _drop(raw, (key,), f"no longer used ({reason}); ignored", report)
    _algorithm(_section(raw, "agent", "algorithm"), report)
    _env(_section(raw, "env"), report)
    _meta(_section(raw, "meta"), report)
    for key in ("net", "critic_net"):
        _net(_section(raw, "agent", key), ("agent", key), report)


def _section(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the object at a path, or an empty one."""
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
        report.fail(path, f"must be an object, or a list of one object, not of {len(items)}")
        section[str(path[-1])] = None
        return
    report.note(path, "a list (v4 form); its only item is used")
    section[str(path[-1])] = items[0]
    report.moved(path, (*path, 0))


def _drop(section: dict[str, Any], path: Path, message: str, report: Report) -> None:
    if section.pop(str(path[-1]), None) is not None:
        report.note(path, message)


def _rename(section: dict[str, Any], place: Path, old: str, new: str, report: Report) -> None:
    """Rename a key; if both are given, keep the new one."""
    if old not in section:
        return
    value = section.pop(old)
    if value is None:
        return
    if section.get(new) is not None:
        report.note((*place, old), f"old name of '{new}', which is given too; ignored")
        return
    report.note((*place, old), f"old name of '{new}'")
    section[new] = value
    report.moved((*place, new), (*place, old))


def _algorithm(algorithm: dict[str, Any], report: Report) -> None:
    place = ("agent", "algorithm")
    _rename(algorithm, place, "clip_val_loss", "clip_vloss", report)
    policy = algorithm.get("action_policy")
    if isinstance(policy, str) and policy.startswith("multi_"):
        algorithm["action_policy"] = policy.removeprefix("multi_")
        report.note((*place, "action_policy"), f"'{policy}' is now '{algorithm['action_policy']}'")


def _env(env: dict[str, Any], report: Report) -> None:
    for key, reason in _OLD_ENV.items():
        _drop(env, ("env", key), f"no longer used ({reason}); ignored", report)
    _rename(env, ("env",), "normalize_state", "normalize_obs", report)
    name = env.get("name")
    if isinstance(name, str) and (now := env_ids.today(name)) != name:
        env["name"] = now
        report.note(("env", "name"), f"'{name}' is now '{now}'")


def _meta(meta: dict[str, Any], report: Report) -> None:
    old = meta.get("resources") if isinstance(meta.get("resources"), dict) else None
    if old is not None:
        report.note(("meta", "resources"), "old name of 'search_resources'")
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
        report.note(("meta", key), f"old name of 'search_resources.{new}' ({show(value)})")
        if new not in resources:
            resources[new] = value
            report.moved(("meta", "search_resources", new), ("meta", key))
    _drop(meta, ("meta", "train_mode"), "no longer used (MODE is a command-line argument); ignored", report)


def _net(net: dict[str, Any], place: Path, report: Report) -> None:
    """Rename `type` to `name`, without a note: both are valid."""
    if "type" not in net:
        return
    kind = net.pop("type")
    if net.get("name") is not None and net["name"] != kind:
        report.fail((*place, "type"), f"{show(kind)} differs from name {show(net['name'])}; give one of them")
    net["name"] = kind
    report.moved((*place, "name"), (*place, "type"))
