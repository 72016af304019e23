"""One env, for the backends that step envs one by one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from slm_lab.env.atari import AtariFrames, AtariSettings, frame_limit
from slm_lab.env.backend import Target


def quiet_mujoco() -> None:
    """Keep MuJoCo's remark about Gymnasium's own model files from the screen and from MUJOCO_LOG.TXT; log the others."""
    import mujoco

    from slm_lab.lib.log import notice

    def on_warning(text: str) -> None:
        if "settotalmass" not in text:
            notice(f"mujoco: {text}")

    if hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(on_warning)


@contextmanager
def quiet_spaces() -> Iterator[None]:
    """Drop Gymnasium's remarks that bounds of a space were rounded: nothing a user can act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield


def register_atari() -> None:
    """Make the ids ALE/… known. Raises ImportError without ale-py."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    gym.register_envs(ale_py)


@dataclass(frozen=True)
class SingleEnv:
    """Builds one env, in this process or, pickled, in another."""

    id: str
    kwargs: dict[str, Any]
    atari: AtariSettings | None
    max_t: int | None
    time_limit: int | None
    mujoco: bool

    @classmethod
    def of(cls, target: Target) -> SingleEnv:
        return cls(target.id, target.kwargs, target.atari, target.max_t, target.time_limit, "mujoco" in target.entry_point)

    def __call__(self) -> gym.Env[Any, Any]:
        if self.mujoco:
            quiet_mujoco()
        if "ALE/" in self.id:
            register_atari()
        if self.atari is not None:
            return self._atari(self.atari)
        return gym.make(self.id, max_episode_steps=self.time_limit, disable_env_checker=True, **self.kwargs)

    def _atari(self, settings: AtariSettings) -> gym.Env[Any, Any]:
        env = gym.make(
            self.id,
            disable_env_checker=True,
            frameskip=1,
            obs_type="grayscale" if settings.grayscale else "rgb",
            max_num_frames_per_episode=0,  # no limit: AtariFrames counts, as ALE's vector env does
            repeat_action_probability=settings.repeat_action_probability,
            full_action_space=settings.full_action_space,
            continuous=settings.continuous,
            continuous_action_threshold=settings.continuous_action_threshold,
            mode=settings.mode,
            difficulty=settings.difficulty,
        )
        return AtariFrames(env, settings, frame_limit(settings, self.max_t))
