"""Generate slm_lab/spec/compat/envpool_envs.json: the suites and env ids of EnvPool, and the parts of the envs' spaces."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from gymnasium import spaces

FILE = Path(__file__).resolve().parent.parent / "slm_lab" / "spec" / "compat" / "envpool_envs.json"
SUITES = {
    "envpool.mujoco.dmc": "dm_control",
    "envpool.mujoco.playground": "mujoco_playground",
    "envpool.mujoco.metaworld": "metaworld",
    "envpool.mujoco.robotics": "robotics",
    "envpool.mujoco.myosuite": "myosuite",
    "envpool.jumanji": "jumanji",
    "envpool.minigrid": "minigrid",
    "envpool.highway": "highway",
    "envpool.vizdoom": "vizdoom",
    "envpool.gfootball": "gfootball",
    "envpool.procgen": "procgen",
    "envpool.pgx": "pgx",
    "envpool.toy_text": "toy_text",
    "envpool.classic_control": "classic_control",
    "envpool.box2d": "box2d",
    "envpool.mujoco.gym": "mujoco",
    "envpool.atari": "atari",
}
"""EnvPool's module → name of its suite."""
_NO_SPACES = ("myosuite", "procgen", "atari")
"""Suites whose spaces are not listed: slm_lab refuses the suite, the suite needs other packages, or it takes 20 s to read the spaces."""


def text() -> str:
    """Return the text of the file: for each suite, a list of envs as [ids, observation, action, players, success].

    If EnvPool is not installed (for example during `make check`), the text of the existing file is returned. A test compares the file with
    EnvPool.
    """
    if importlib.util.find_spec("envpool") is None:
        return FILE.read_text(encoding="utf-8")
    import envpool
    from envpool.registration import registry

    from slm_lab.env.single import quiet_gymnasium

    suites: dict[str, list[Any]] = {name: [] for name in SUITES.values()}
    with quiet_gymnasium():
        for (module, *_), group in groupby(registry.specs, lambda name: (registry.specs[name][0], _identity(registry.specs[name]))):
            suites[SUITES[module]].append(_env(SUITES[module], list(group)))
    rows = [f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(env)}" for env in envs) + "\n  ]" for name, envs in suites.items()]
    return f'{{\n "_version": "{envpool.__version__}",\n "_suites": {{\n' + ",\n".join(rows) + "\n }\n}\n"


def _identity(registered: tuple[str, str, dict[str, Any]]) -> str:
    """Return text that is the same for all aliases of an env, but different for different envs."""
    return repr((registered[1], sorted(registered[2].items(), key=lambda item: item[0])))


def _env(suite: str, ids: list[str]) -> list[Any]:
    """Return the description of one env. Its first id is the id in the documentation of the suite."""
    import envpool

    from slm_lab.env.envpool_suites import correct_action_space, correct_observation_space

    ids = sorted(ids, key=lambda name: ("/" not in name, name[0].isupper(), -int(name.rpartition("-v")[2])))
    if suite in _NO_SPACES or ids == ["VizdoomCustom-v1"]:
        return [ids, "", "", 1, "solved:max" if suite == "myosuite" else ""]
    spec = envpool.make_spec(ids[0])
    observation, action = correct_observation_space(spec.gymnasium_observation_space), correct_action_space(spec.gymnasium_action_space)
    return [ids, _parts(observation), _parts(action), spec.config.max_num_players, _success(spec._state_keys)]


def _success(keys: Sequence[str]) -> str:
    """Return the default of meta.track_info for this env: the success at the end of an episode (Fetch, Hand), or in any step."""
    entries = {"info:is_success": "is_success", "info:success": "success:max", "info:solved": "solved:max"}
    return next((entry for key, entry in entries.items() if key in keys), "")


def _parts(space: spaces.Space[Any], path: str = "") -> str:
    if isinstance(space, spaces.Dict):
        return ", ".join(_parts(part, f"{path}/{name}".lstrip("/")) for name, part in space.items())
    name = f"{path} " if path else ""
    match space:
        case spaces.Discrete():
            return f"{name}discrete {space.n}"
        case spaces.MultiDiscrete():
            return f"{name}discrete {' × '.join(map(str, space.nvec.tolist()))}"
        case spaces.MultiBinary():
            return f"{name}{_sizes(space.shape)} bits"
    return f"{name}{_sizes(space.shape or ())}{' image' if _is_image(space) else ''}"


def _is_image(space: spaces.Space[Any]) -> bool:
    from slm_lab.env.layout import box_layout

    return isinstance(space, spaces.Box) and box_layout(space).is_image


def _sizes(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if math.prod(shape) > 1 else "1"
