"""env.name: map old ids to current ones, and check that an id names an env that can be created here."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import re
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr
from ctypes.util import find_library
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from slm_lab.spec.report import nearest

_GENERATED = json.loads((Path(__file__).parent / "known_envs.json").read_text(encoding="utf-8"))
"""Envs of Gymnasium and ALE, to find typos without importing either (tools/generate.py)."""
KNOWN: dict[str, str] = _GENERATED["_known"]
"""Id → kind of env (box2d, mujoco and jax need packages)."""
ATARI = frozenset[str](_GENERATED["_atari"])
"""Games X of ALE/X-v5."""
LEGACY_ATARI = frozenset[str](_GENERATED["_atari_legacy"])
"""Games X that ale-py also registers as X-v0, X-v4, XNoFrameskip-v0 and XNoFrameskip-v4; XDeterministic-v… is older still."""
_VERSIONED = re.compile(r"(?P<base>[\w.]+?)-v(?P<version>\d{1,9})")
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<id>\S+)")
_NOT_SUPPORTED = frozenset({"Pusher-v4"})
"""Gymnasium ids that need older packages than the newest version of the same env: mujoco < 3."""
_MODULES = {
    "MiniGrid-": "minigrid", "BabyAI-": "minigrid", "MinAtar/": "minatar",
    "AntMaze_": "gymnasium_robotics", "PointMaze_": "gymnasium_robotics",
}  # fmt: skip
"""Beginning of an id → the module that registers it."""
PACKAGES = {"minigrid": "minigrid", "minatar": "minatar", "gymnasium_robotics": "robotics"}
"""Module in _MODULES → the extra that installs its package."""
MINATAR = tuple(
    f"MinAtar/{game}-v{version}" for game in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders") for version in (0, 1)
)
"""Ids of MinAtar: v0 has all six actions, v1 those that the game uses."""
_PACKAGES = {
    "atari": ("ale_py", "slm-lab[atari]"),
    "box2d": ("Box2D", "slm-lab[box2d]"),
    "mujoco": ("mujoco", "slm-lab[mujoco]"),
    "jax": ("jax", "gymnasium[jax]"),
    "envpool": ("envpool", "slm-lab[envpool]"),
}
"""Kind of env → the package it needs, and what to install for it."""
POOL = "envpool:"
"""Prefix of an id that names EnvPool's env where Gymnasium has the same id."""
_ELSEWHERE = {"playground": ("dm_control", "mujoco_playground"), "dm_control": ("dm_control",)}
"""Namespace of another library → EnvPool's suites that have its envs."""
_SHORTENED = {"ballincup": "ballincupcatch", "pointmass": "pointmasseasy"}
"""Names of MuJoCo Playground that differ from those of DeepMind Control."""


PETTINGZOO = "pettingzoo:"
"""Prefix of an id that names an env of PettingZoo or mpe2, or a user's class with PettingZoo's interface (module:Class)."""
_MPE = (
    "simple_v3", "simple_adversary_v3", "simple_crypto_v3", "simple_formation_v1", "simple_line_v1", "simple_push_v3",
    "simple_reference_v3", "simple_speaker_listener_v4", "simple_spread_v3", "simple_tag_v3", "simple_world_comm_v3", "collect_treasure_v1",
)  # fmt: skip
"""Envs of mpe2."""
_OF_ZOO = {
    "atari/": "multi_agent_ale_py", "butterfly/pistonball": "pymunk", "classic/chess": "chess", "classic/hanabi": "shimmy",
    "classic/leduc_holdem": "rlcard", "classic/texas_holdem": "rlcard", "sisl/multiwalker": "Box2D",
}  # fmt: skip
"""Beginning of an id in PettingZoo's registry → the package that these envs need."""


class ZooEnv(NamedTuple):
    """An env that PettingZoo or mpe2 provides."""

    kind: str
    """"parallel" or "aec": registry of PettingZoo; "mpe2": that package."""
    id: str
    """Id in the registry, or module of mpe2."""
    package: str = "pettingzoo"
    """Package that it needs."""


def pettingzoo_envs() -> dict[str, ZooEnv]:
    """Return a dict from each name, such as "tictactoe_v3", to its env. Imports PettingZoo; without it there are only those of mpe2."""
    found = {name: ZooEnv("mpe2", name, "mpe2") for name in _MPE}
    if not _installed("pettingzoo"):
        return found
    from pettingzoo.env_registry.registration import aec_registry, parallel_registry

    for kind, registry in (("aec", aec_registry), ("parallel", parallel_registry)):  # parallel where an env is both
        for id_ in registry:
            package = next((package for begin, package in _OF_ZOO.items() if id_.startswith(begin)), "pettingzoo")
            found[_zoo_name(id_)] = ZooEnv(kind, id_, package)
    return found


def _zoo_name(id_: str) -> str:
    """Return the name of an id of PettingZoo: classic/tictactoe-v3 → tictactoe_v3."""
    return re.sub(r"-v(?=\d+$)", "_v", id_.rpartition("/")[2])


def pettingzoo_id(name: str) -> str | None:
    """Return the id after "pettingzoo:", by its short name if it is not a user's; None for other envs."""
    if not name.startswith(PETTINGZOO):
        return None
    id_ = name.removeprefix(PETTINGZOO)
    return id_ if ":" in id_ else _zoo_name(id_)


def _pettingzoo_reason(name: str, id_: str) -> str | None:
    """Return why an env of PettingZoo cannot be created here; None if it can."""
    if not _installed("pettingzoo"):
        return f"{name} needs the package pettingzoo: pip install 'slm-lab[pettingzoo]'"
    if ":" in id_:
        return (
            missing_package(id_)
            if _MODULE.fullmatch(id_)
            else f"must be {PETTINGZOO}NAME or {PETTINGZOO}package.module:Class, not '{name}'"
        )
    known = pettingzoo_envs()
    if id_ not in known:
        return f"PettingZoo has no env '{id_}'{nearest(id_, known)}"
    package = known[id_].package
    if _installed(package):
        return None
    extra = "slm-lab[pettingzoo]" if package == "mpe2" else f"pettingzoo[{known[id_].id.partition('/')[0]}]"
    return f"{name} needs the package {package}: pip install '{extra}'"


class PoolEnv(NamedTuple):
    """An env of EnvPool."""

    suite: str
    ids: tuple[str, ...]
    """Its id and the other ids of the same env."""
    observation: str
    """Sizes of the parts of its observation; "" if unknown."""
    action: str
    players: int
    success: str
    """Entry of meta.track_info with the success of an episode; "" if the env reports none."""

    @property
    def refusal(self) -> str | None:
        """Why the env is not supported; None if it is."""
        if self.ids[0] in ("Cig-v1", "MultiDuel-v1"):
            return "is a game for several players, which EnvPool 1.2.5 ends with a crash"
        if self.ids[-1].startswith("Sudoku-"):
            return "needs a file of puzzles that the packages of EnvPool 1.2.5 do not contain"
        if self.suite == "myosuite" and not _mends_myosuite():
            return "is a MyoSuite env, whose resets are the same each time in EnvPool before 1.2.6 (which needs Python 3.12)"
        return None


def _mends_myosuite() -> bool:
    """Return whether the installed EnvPool seeds the resets of MyoSuite."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", metadata.version("envpool")) if _installed("envpool") else None
    return found is not None and tuple(map(int, found.groups())) >= (1, 2, 6)


@cache
def pool_envs() -> dict[str, PoolEnv]:
    """Return a dict from each id and alias of EnvPool to its env. They are read from envpool_envs.json (see tools/generate.py)."""
    suites = json.loads((Path(__file__).parent / "envpool_envs.json").read_text(encoding="utf-8"))["_suites"]
    envs = [PoolEnv(suite, tuple(ids), *rest) for suite, rows in suites.items() for ids, *rest in rows]
    return {name: env for env in envs for name in env.ids}


def pool_id(name: str) -> str | None:
    """Return EnvPool's id of an env that EnvPool makes: `envpool:ID`, or an id that only EnvPool has; None for other envs."""
    if name.startswith(POOL):
        return name.removeprefix(POOL)
    if ":" in name or name in KNOWN or name.startswith("ALE/") or name not in pool_envs() or _is_registered(name):
        return None
    return name


_ALSO_IN_ENVPOOL = ("minigrid", "gymnasium_robotics", "highway_env", "metaworld", "myosuite")
"""Packages whose envs EnvPool has by the same ids; "minigrid:ID" names the package's."""


def success_of(name: str) -> str:
    """Return the entry of meta.track_info with the success of an episode; "" for envs that are not EnvPool's or report none."""
    env = pool_envs().get(pool_id(name) or "")
    return "" if env is None else env.success


def _is_registered(name: str) -> bool:
    """Return whether Gymnasium can create an id, by other packages than those in _ALSO_IN_ENVPOOL."""
    registered = _registered()
    if name not in registered:
        return False
    location = str(registered[name]).partition(":")[0].partition(".")[0]
    return location not in _ALSO_IN_ENVPOOL


def current_id(name: str) -> str:
    """Return the current id for an old id; `name` itself if no rule applies.

    Rules: an Atari id without ALE/ becomes ALE/X-v5; an id that the installed packages can create is kept; a Roboschool or PyBullet id
    becomes the MuJoCo id; an older version of one of Gymnasium's own envs, or an unsupported version, becomes the newest version;
    playground/X and dm_control/x-y become EnvPool's ids of the same envs.
    """
    match = _VERSIONED.fullmatch(name)
    if not match:
        return _of_other_library(name)
    base = match["base"]
    game = re.sub(r"(NoFrameskip|Deterministic)$", "", base)
    if (game in LEGACY_ATARI and match["version"] in ("0", "4")) or (game in ATARI and match["version"] == "5"):
        return f"ALE/{game}-v5"
    if name not in _NOT_SUPPORTED and (name in KNOWN or name in _registered()):
        return name
    if base.startswith("Roboschool") or base.endswith("BulletEnv"):
        return _newest(base.removeprefix("Roboschool").removesuffix("BulletEnv")) or name
    newest = _newest(base, exact=True)
    return newest if newest and _version(newest) > int(match["version"]) else name


def _of_other_library(name: str) -> str:
    """Return EnvPool's id for playground/CheetahRun or dm_control/cheetah-run; `name` itself if there is none."""
    namespace, _, task = name.partition("/")
    suites, letters = _ELSEWHERE.get(namespace, ()), _letters(task)
    if namespace == "playground":
        letters = _SHORTENED.get(letters, letters)
    envs = pool_envs().values() if suites else ()
    return next((env.ids[0] for env in envs if env.suite in suites and _letters(env.ids[-1]) == letters), name)


def _letters(name: str) -> str:
    """Return the letters and digits of an id without its version, in lower case."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"-v\d+$", "", name).lower())


def _version(name: str) -> int:
    version = name.rpartition("-v")[2]
    return int(version) if version.isdecimal() else 0


def _newest(base: str, exact: bool = False) -> str | None:
    """Return Gymnasium's newest id of an env; ignore case (PyBullet writes Walker2D) unless `exact`."""
    same = [name for name in KNOWN if "/" not in name and name.rpartition("-v")[0].lower() == base.lower()]
    same = [name for name in same if not exact or name.rpartition("-v")[0] == base]
    return max(same, key=_version, default=None)


def short_name(name: str) -> str:
    """Return an id as part of a spec's name: ALE/Pong-v5 → pong."""
    last = re.split(r"[/:]", current_id(name))[-1]
    return re.sub(r"\W+", "_", re.sub(r"-v\d+$", "", last).lower()).strip("_")


def unavailable_reason(name: str) -> str | None:
    """Return why an env with this id cannot be created here, without heavy imports; None if it can.

    For `package.module:EnvId`, only the form and the package are checked: the module is imported when the env is created.
    """
    if not name.strip():
        return "must be a Gymnasium id (such as CartPole-v1) or package.module:EnvId, not empty"
    if (pool := pool_id(name)) is not None:
        return _pool_reason(name, pool)
    if (zoo := pettingzoo_id(name)) is not None:
        return _pettingzoo_reason(name, zoo)
    if several := _other_library(name):
        return several
    if ":" in name:
        return missing_package(name) if _MODULE.fullmatch(name) else f"must be a Gymnasium id or package.module:EnvId, not '{name}'"
    kind = "atari" if name.startswith("ALE/") and name[4:].removesuffix("-v5") in ATARI else KNOWN.get(name)
    if kind is None:
        ids = [*KNOWN, *(f"ALE/{game}-v5" for game in ATARI), *MINATAR, *_registered()]
        if (module := registering_module(name)) is not None and (name in MINATAR or module != "minatar"):
            reason = missing_package(f"{module}:{name}")
            return reason and reason + nearest(name, _own_ids(), cutoff=0.9)
        return None if name in ids else _gone(name) or f"unknown env '{name}'{_hint(name, ids)}"
    return _package_reason(name, kind)


_WITH_PETTINGZOO_S_INTERFACE = frozenset({"pettingzoo", "mpe2", "magent2"})
_JAX = frozenset({"brax", "gymnax", "jumanji", "pgx", "craftax", "navix", "xminigrid", "kinetix", "mujoco_playground"})
_PETTINGZOO_ID = re.compile(r"[a-z][a-z0-9_]*_v\d+")


def _other_library(name: str) -> str | None:
    """Return how to name an env of PettingZoo, or why an env in JAX is not supported; None for other envs."""
    module, _, id_ = name.rpartition(":")
    top = re.split(r"[.:/]", name)[0]
    if top in _WITH_PETTINGZOO_S_INTERFACE or (_PETTINGZOO_ID.fullmatch(name) and name not in _registered()):
        return f"{name} is an env of PettingZoo's kind, with several agents; write '{PETTINGZOO}{name.removeprefix('pettingzoo.')}'"
    if top == "jaxmarl":
        return f"{name} is an env in JAX with several agents, which is not supported; envs of PettingZoo are"
    if top not in _JAX or not module:
        return None
    found = next((f"; EnvPool has '{known}'" for known in (id_, f"Jumanji/{id_}") if known in pool_envs()), "")
    wrap = "to train in it, write a gymnasium.vector.VectorEnv around it (docs/environments.md, JAX) and name that class in env.backend"
    return f"{name} is an env in JAX, not one of Gymnasium{found}; {wrap}"


def _package_reason(name: str, kind: str) -> str | None:
    """Return that the package of an env is missing; None if it is installed."""
    if kind not in _PACKAGES or _installed(_PACKAGES[kind][0]):
        return None
    package, extra = _PACKAGES[kind]
    return f"{name} needs the package {package}: pip install '{extra}'"


def _pool_reason(name: str, pool: str) -> str | None:
    """Return why an env of EnvPool cannot be created here; None if it can. `pool`: EnvPool's id of it."""
    env = pool_envs().get(pool)
    if env is None:
        return f"EnvPool has no env '{pool}'{nearest(pool, pool_envs())}"
    if env.refusal is not None:
        return f"{pool} {env.refusal}"
    if reason := _package_reason(name, "envpool"):
        return reason + package_hint(pool)
    if env.suite == "procgen" and sys.platform == "linux" and find_library("Qt5Gui") is None:
        return f"{pool} needs Qt 5: apt-get install qtbase5-dev (or dnf install qt5-qtbase)"
    return None


def package_hint(name: str) -> str:
    """Return a hint at the installed package that also has an env of EnvPool, by the same id; "" if there is none."""
    module = registering_module(name)
    return f'; the package {module} has it too: "{module}:{name}"' if module is not None and _installed(module) else ""


_OF_GYMNASIUM = ("atari", "box2d", "classic_control", "mujoco", "toy_text")
"""EnvPool's suites whose ids Gymnasium and ALE have too, a few aside (Catch-v0, NChain-v0)."""


def _own_ids() -> list[str]:
    """Return the ids that only EnvPool has and that are supported, without those of Gymnasium's suites."""
    left_out = _OF_GYMNASIUM if _mends_myosuite() else (*_OF_GYMNASIUM, "myosuite")
    return [name for name, env in pool_envs().items() if env.suite not in left_out and not env.refusal]


def kinds_here() -> dict[str, str | None]:
    """Return each kind of env, "envpool" and each module in _MODULES → what to install for it; None if it is installed."""
    kinds = {kind: _PACKAGES.get(kind) for kind in (*KNOWN.values(), "atari", "envpool")}
    here = {kind: None if package is None or _installed(package[0]) else package[1] for kind, package in kinds.items()}
    return here | {module: None if _installed(module) else f"slm-lab[{extra}]" for module, extra in PACKAGES.items()}


def other_ids() -> dict[str, list[str]]:
    """Return the ids of envs of other packages, in the form for a spec.

    Keys are the modules in _MODULES, with empty lists if they are not installed (MinAtar's ids are known). For envs that installed packages
    register by themselves, the key is the part of the id before the slash, or "other packages". Imports Gymnasium and these packages.
    """
    found: dict[str, list[str]] = {}
    registered = _registered()
    for name in sorted(registered.keys() - KNOWN.keys()):
        namespace, slash, _ = name.rpartition("/")
        if str(registered[name]).startswith(tuple(f"{module}." for module in PACKAGES)):
            continue  # listed below, or for an older version of MuJoCo
        if not name.startswith(("ALE/", "GymV21Environment", "GymV26Environment", *_MODULES)):
            found.setdefault(namespace if slash else "other packages", []).append(name)
    for module in PACKAGES:
        begins = tuple(begin for begin, of in _MODULES.items() if of == module)
        found[module] = [f"{module}:{name}" for name in _registered_by(module) if name.startswith(begins)]
    return found | {"minatar": list(MINATAR)}


def registering_module(name: str) -> str | None:
    """Return the module that registers an id of another package which needs no `module:` before it; None for other ids."""
    return next((module for begin, module in _MODULES.items() if name.startswith(begin)), None)


def _registered_by(module: str) -> list[str]:
    """Import a module and return all ids that are registered afterwards; [] if it cannot be imported."""
    if not _installed(module):
        return []
    import gymnasium

    try:
        with redirect_stderr(io.StringIO()):  # gymnasium_robotics prints news about its envs
            importlib.import_module(module)
    except Exception:
        return []
    return sorted(gymnasium.registry)


_GONE = {"gridworld": "Unity", "tennis": "Unity", "2dball": "Unity", "3dball": "Unity"}
"""Lower-case names of envs that SLM Lab had → their origin."""


def _gone(name: str) -> str:
    """Return why an env that SLM Lab had cannot be created; "" for other envs."""
    found = re.match(r"Unity|Roboschool|playground/", name)
    origin = found.group().rstrip("/") if found else "PyBullet" if re.search(r"BulletEnv-v\d+$", name) else _GONE.get(name.lower())
    if origin is None:
        return ""
    if origin == "playground":
        names = {env.ids[-1].rpartition("-v")[0] for env in pool_envs().values() if env.suite in _ELSEWHERE["playground"]}
        near = nearest(name.removeprefix("playground/"), names).replace("'", "'playground/", 1)
        return f"'{name}' is not an env of DeepMind Control or MuJoCo Playground in EnvPool{near}"
    return f"'{name}' is a {origin} env, which no package provides any more; Gymnasium has no equivalent"


def _hint(name: str, ids: Iterable[str]) -> str:
    """Return a hint: the nearest current id, preferably of the same env, or how to name an env of another package."""
    current = [*(known for known in ids if current_id(known) == known), *_own_ids()]
    same = [known for known in current if _base(known) == _base(name)]
    if same:
        namespace = name.lower().rpartition("/")[0]
        same = [known for known in same if namespace and known.lower().rpartition("/")[0] == namespace] or same
        return f"; did you mean '{max(same, key=_version)}'?"
    foreign = f" (for an env of another package write 'package.module:{name}')"
    return nearest(name, current, cutoff=0.85) or nearest(name, current) + foreign


def _base(name: str) -> str:
    """Return an id without namespace, version and kind of Atari observation: ALE/Pong-v5, Pong-ram-v4 → Pong."""
    return re.sub(r"(NoFrameskip|Deterministic|-ram)?(-v\d+)?$", "", name.rpartition("/")[2])


def missing_package(name: str) -> str | None:
    """Return why the package of "package.module:Name" cannot be found; None if it can."""
    top = re.split(r"[.:]", name)[0]
    if _installed(top) or Path(top).is_dir() or Path(f"{top}.py").is_file():
        return None
    if top in PACKAGES:
        return f"{name.partition(':')[2]} needs the package {top}: pip install 'slm-lab[{PACKAGES[top]}]'"
    return f"cannot import '{name}': no package '{top}' is installed or in the current folder"


def _installed(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _registered() -> dict[str, object]:
    """Return the ids that the installed Gymnasium can create with their entry points; {} without importing it (0.3 s) if they are KNOWN."""
    if "gymnasium" not in sys.modules and metadata.version("gymnasium") == _GENERATED["_gymnasium_version"]:
        return {}
    import gymnasium

    # Hopper-v2 and similar ids need mujoco_py, which no longer exists; their entry point in Gymnasium raises an error
    entries = {name: env.entry_point for name, env in gymnasium.registry.items()}
    return {name: entry for name, entry in entries.items() if getattr(entry, "__module__", "") != gymnasium.envs.__name__}
