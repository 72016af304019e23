"""Generate slm_lab/spec/compat/known_envs.json: the envs of Gymnasium and ALE, and the package that each needs."""

from __future__ import annotations

import json


def _kind(entry_point: object, namespace: str | None) -> str | None:
    """Return the package that an env of Gymnasium needs; None for an env that only raises an error."""
    if namespace in ("phys2d", "tabular"):
        return "jax"
    module = entry_point if isinstance(entry_point, str) else ""
    return next((kind for kind in ("classic_control", "toy_text", "box2d", "mujoco") if f"envs.{kind}" in module), None)


def text() -> str:
    """Return the text of the file, without envs that only raise an error because they have moved.

    The keys begin with _, since they are not the names of specs.
    """
    import ale_py
    import gymnasium

    known = {name: _kind(spec.entry_point, spec.namespace) for name, spec in gymnasium.registry.items() if spec.namespace != "ALE"}
    gymnasium.register_envs(ale_py)
    atari = sorted(spec.name for spec in gymnasium.registry.values() if spec.namespace == "ALE")
    legacy = {spec.name for spec in gymnasium.registry.values() if spec.namespace is None and spec.entry_point == "ale_py.env:AtariEnv"}
    content = {
        "_gymnasium_version": gymnasium.__version__,
        "_known": {name: kind for name, kind in sorted(known.items()) if kind},
        "_atari": atari,
        "_atari_legacy": sorted(legacy & {*atari}),
    }
    return json.dumps(content, indent=1) + "\n"
