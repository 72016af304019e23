"""Construction of single envs, for backends that step envs individually."""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

import gymnasium as gym

from slm_lab.env.atari import AtariFrames, AtariSettings, frame_limit
from slm_lab.env.backend import EnvRequest
from slm_lab.env.curriculum import Curriculum, set_attributes
from slm_lab.env.layout import mark_stack
from slm_lab.env.mask_from_info import with_mask
from slm_lab.env.wrappers import ConfiguredWrapper
from slm_lab.lib.log import notice
from slm_lab.spec.compat.env_ids import PACKAGES, registering_module


def quiet_mujoco() -> None:
    """Suppress MuJoCo's warning about Gymnasium's model files, both on screen and in MUJOCO_LOG.TXT. All other warnings of MuJoCo are
    logged."""
    import mujoco

    def on_warning(text: str) -> None:
        if "settotalmass" not in text:
            notice(f"mujoco: {text}")

    if hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(on_warning)


@contextmanager
def quiet_gymnasium() -> Iterator[None]:
    """Context manager that suppresses Gymnasium's warnings that the bounds of a space were rounded or that an env has a newer version."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        warnings.filterwarnings("ignore", message=".*is out of date")
        yield


def register_atari() -> None:
    """Register the ids ALE/… with Gymnasium. Raises ImportError if ale-py is not installed."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    gym.register_envs(ale_py)


def register_envs(id_: str) -> None:
    """Import the package that registers the env id `id_` with Gymnasium. For an id ALE/…, the package is ale-py. For other ids, the module
    prefix of the id names the package, or `registering_module` returns the package.

    Raises ImportError if the package is not installed.
    """
    module, _, name = id_.rpartition(":")
    if name.startswith("ALE/"):
        register_atari()
        return
    package = module if module in PACKAGES else registering_module(name) if not module else None
    if package is None:
        return
    if package == "minatar":
        _register_minatar()
    else:
        with redirect_stderr(io.StringIO()):  # gymnasium_robotics prints news about its envs
            importlib.import_module(package)


def _register_minatar() -> None:
    """Register the ids MinAtar/… with Gymnasium. Raises ImportError if minatar is not installed.

    During the import of minatar, an empty module takes the place of seaborn, because the import of seaborn takes 2 s, two thirds of the
    total time. MinAtar uses seaborn only for rendering, and `render.MinAtarScreen` renders MinAtar without seaborn.
    """
    if "MinAtar/Breakout-v1" in gym.registry:
        return
    seaborn = ModuleType("seaborn")
    present = sys.modules.setdefault("seaborn", seaborn)
    try:
        importlib.import_module("minatar.gym").register_envs()
    finally:
        if present is seaborn:
            del sys.modules["seaborn"]


@dataclass(frozen=True)
class SingleEnvConstructor:
    """Picklable function object that builds one env with its wrappers. Another process can unpickle the object and build the env."""

    id: str
    kwargs: dict[str, Any]
    atari: AtariSettings | None
    max_t: int | None
    time_limit: int | None
    mujoco: bool
    wraps: tuple[ConfiguredWrapper, ...]
    action_mask: str | Literal[False] | None
    """Key of the action mask in observations or infos, see `EnvRequest.action_mask`."""
    folder: str | None
    """Working directory at the time when the vector env was built. Each env is constructed in this directory, even if another env has
    called os.chdir."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Scheduled attributes (env.schedule) to set on the env after the env has been built."""
    arguments: tuple[str, ...] = ()
    """Names of all arguments of the env's constructor, for the error message about an attribute that does not exist."""

    @classmethod
    def from_target(cls, target: EnvRequest) -> SingleEnvConstructor:
        """Return a constructor of the envs that `target` describes."""
        try:
            folder: str | None = os.getcwd()
        except OSError:  # the working directory was deleted
            folder = None
        mujoco = "mujoco" in target.entry_point
        make = cls(
            target.id, target.kwargs, target.atari, target.max_t, target.time_limit, mujoco, target.wraps, target.action_mask, folder
        )
        return make if target.curriculum is None else make.with_values(target.curriculum, target.curriculum.current_values())

    def with_values(self, curriculum: Curriculum, values: Mapping[str, Any]) -> SingleEnvConstructor:
        """Return a constructor of an env with the scheduled values `values` (env.schedule)."""
        scheduled = {key: values[key] for key in curriculum.arguments}
        atari = None if self.atari is None else replace(self.atari, **scheduled)
        kwargs = self.kwargs if atari is not None else {**self.kwargs, **scheduled}
        attributes, arguments = curriculum.attributes(values), curriculum.constructor_arguments
        return replace(self, kwargs=kwargs, atari=atari, attributes=attributes, arguments=arguments)

    def __call__(self) -> gym.Env[Any, Any]:
        self.restore_folder()
        if self.mujoco:
            quiet_mujoco()
        register_envs(self.id)
        with quiet_gymnasium():
            env = self._make_plain_env() if self.atari is None else self._make_atari_env(self.atari)
        for wrap in self.wraps:
            env = wrap(env)
        mark_stack(env)
        set_attributes(env, self.attributes, self.arguments)
        return with_mask(env, self.action_mask)

    def _make_plain_env(self) -> gym.Env[Any, Any]:
        try:
            return gym.make(self.id, max_episode_steps=self.time_limit, disable_env_checker=True, **self.kwargs)
        except gym.error.UnregisteredEnv as error:  # the id is registered only in the main process
            plain = self.id.rpartition(":")[2]
            raise RuntimeError(
                f"{plain} is not registered in this process: a registration in a script (__main__) exists only in that script's process; "
                f'move it to a module and name the env "package.module:{plain}"'
            ) from error

    def restore_folder(self) -> None:
        """Change the working directory of this process back to `folder`."""
        if self.folder is not None:
            os.chdir(self.folder)

    def _make_atari_env(self, settings: AtariSettings) -> gym.Env[Any, Any]:
        env = gym.make(
            self.id,
            disable_env_checker=True,
            frameskip=1,
            obs_type="grayscale" if settings.grayscale else "rgb",
            max_num_frames_per_episode=0,  # no limit: AtariFrames counts frames, like ALE's vector env
            repeat_action_probability=settings.repeat_action_probability,
            full_action_space=settings.full_action_space,
            continuous=settings.continuous,
            continuous_action_threshold=settings.continuous_action_threshold,
            mode=settings.mode,
            difficulty=settings.difficulty,
        )
        return AtariFrames(env, settings, frame_limit(settings, self.max_t))
