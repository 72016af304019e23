"""Rendering of envs during episodes, either in a window or as images for a video recorder."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np

from slm_lab.env.arguments import accepted_arguments, env_creator
from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.envpool_suites import missing_opengl
from slm_lab.env.make import make_env_request
from slm_lab.env.native_backends import EnvPool, EnvPoolAgents
from slm_lab.env.pettingzoo_backend import PettingZoo
from slm_lab.env.pettingzoo_games import Result
from slm_lab.spec.compat.env_ids import envpool_envs, envpool_id, pettingzoo_id
from slm_lab.spec.models.env import EnvSpec, WrapperSpec
from slm_lab.spec.report import Problem, SpecError

RenderMode = Literal["human", "rgb_array"]


class Recorder(Protocol):
    """Interface of an object that receives the rendered frames of episodes."""

    def begin_episode(self) -> bool:
        """Return whether the episode that begins now is to be recorded."""

    def add_frame(self, frame_HWC: np.ndarray, fps: float) -> None:
        """Add a frame, uint8 [height, width, 3], of the current episode to the recording."""


def with_rendering(spec: EnvSpec, mode: RenderMode, recorder: Recorder | None = None) -> EnvSpec:
    """Return a copy of an env spec whose env is rendered: in a window if `mode` is "human", or as one frame per step for a recorder if
    `mode` is "rgb_array".

    The returned spec uses EnvPool or PettingZoo for env ids of these packages, and the backend sync for all other ids, because other
    backends cannot render. Raises SpecError if the env cannot be rendered.
    """
    if ":" not in spec.backend and (pool := envpool_id(spec.name)) is not None:
        return _rendered_envpool_spec(spec, pool, mode, recorder)
    if ":" not in spec.backend and pettingzoo_id(spec.name) is not None:
        make_env_request(spec, 1)  # raises SpecError for an env that cannot be built
        return _with_drawing_backend(spec, "RenderedPettingZoo", recorder)
    if ":" in spec.backend:
        raise SpecError(spec.name, [Problem("env.backend", f"{spec.backend} cannot draw an env; use sync")])
    target = make_env_request(spec, 1)
    arguments: dict[str, Any] = {}
    wrappers: list[WrapperSpec] = []
    screen = "AtariScreen" if target.atari is not None else "MinAtarScreen" if target.entry_point.startswith("minatar.") else None
    if screen is not None:
        wrappers = [WrapperSpec(name=f"{__name__}:{screen}"), *([WrapperSpec(name="HumanRendering")] if mode == "human" else [])]
    else:
        arguments = _render_arguments(spec, target, mode)
    if recorder is not None:
        wrappers.append(WrapperSpec.model_validate({"name": f"{__name__}:Record", "recorder": recorder}))
    if mode == "rgb_array" and not has_display():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # without this setting, pygame needs a display
    body = spec.model_dump(exclude={"wrappers"}) | arguments | {"backend": "sync"}
    return EnvSpec(**body, wrappers=[*spec.wrappers, *wrappers])


def _render_arguments(spec: EnvSpec, target: EnvRequest, mode: RenderMode) -> dict[str, Any]:
    """Return the constructor arguments with which an env of Gymnasium renders itself. Raises SpecError if the env cannot be rendered."""
    assert target.registration is not None
    if target.vector_only:
        raise SpecError(spec.name, [Problem("env.name", f"{spec.name} has only a vector env, without a render method for one env")])
    creator = env_creator(target.registration)
    names, open_ended = accepted_arguments(creator)
    modes = list((getattr(creator, "metadata", None) or {}).get("render_modes", [mode]))
    if mode not in modes or ("render_mode" not in names and not open_ended):
        has = f"its render modes are {', '.join(map(str, modes))}" if modes else "it has no render modes"
        raise SpecError(spec.name, [Problem("env.name", f"{spec.name} cannot be drawn as {mode}: {has}")])
    arguments: dict[str, Any] = {"render_mode": mode}
    if "mujoco" in target.entry_point:
        if "camera_name" in names and not spec.kwargs.keys() & {"camera_name", "camera_id", "default_camera_config"}:
            # this camera follows the robot, which would leave the default view; the name is ignored if there is no such camera
            arguments["camera_name"] = "track"
        if mode == "rgb_array":
            _choose_offscreen_renderer()
    return arguments


def _rendered_envpool_spec(spec: EnvSpec, pool: str, mode: RenderMode, recorder: Recorder | None) -> EnvSpec:
    """Return a copy of an env spec whose env EnvPool builds and renders (see `with_rendering`). Raises SpecError if EnvPool cannot render
    the env."""
    make_env_request(spec, 1)  # raises SpecError for an env that cannot be built
    suite = envpool_envs()[pool].suite
    reason = f"EnvPool cannot draw the envs of {suite}" if suite in _NOT_DRAWN else missing_opengl()
    if mode == "human" and importlib.util.find_spec("cv2") is None:
        reason = "EnvPool needs opencv-python to open a window: pip install opencv-python"
    if reason:
        raise SpecError(spec.name, [Problem("env.name", f"{spec.name} cannot be drawn as {mode}: {reason}")])
    return _with_drawing_backend(spec, "RenderedEnvPool", recorder)


def _with_drawing_backend(spec: EnvSpec, backend: str, recorder: Recorder | None) -> EnvSpec:
    """Return a copy of an env spec whose backend is a class of this module. This backend renders the env for a recorder or in a window.

    Args: backend: name of the backend class.
    """
    record = [WrapperSpec.model_validate({"name": f"{__name__}:Record", "recorder": recorder})] if recorder is not None else []
    return EnvSpec(**spec.model_dump(exclude={"wrappers", "backend"}), backend=f"{__name__}:{backend}", wrappers=record)


_NOT_DRAWN = ("gfootball", "toy_text")
"""EnvPool's suites whose envs have no method `render`."""
_POOL_FPS = 30.0


class RenderedEnvPool(EnvPool):
    """EnvPool backend with a single env that is rendered after each step. If the spec has a `Record` wrapper, frames are passed to its
    recorder, else frames are shown in a window."""

    name = ""
    applies_wraps = True

    @classmethod
    def backend_class_for(cls, target: EnvRequest) -> type[Backend]:
        return RenderedEnvPoolAgents if super().backend_class_for(target) is EnvPoolAgents else cls

    def __init__(self, target: EnvRequest) -> None:
        recorders = [wrap.kwargs["recorder"] for wrap in target.wraps if wrap.wrapper is Record]
        super().__init__(replace(target, wraps=tuple(wrap for wrap in target.wraps if wrap.wrapper is not Record)))
        self._recorder: Recorder | None = recorders[0] if recorders else None
        self._config["render_mode"] = "rgb_array" if recorders else "human"
        self._records_episode, self._ended = False, False

    def reset(self, seeds: Sequence[int] | None) -> Any:
        self._begin()
        return super().reset(seeds)

    def step(self, action: np.ndarray) -> RawStep:
        """Step the env and render the result. A step that resets the env is not rendered, because the frame would show the next episode."""
        raw = super().step(action)
        if self._ended or raw.final:
            self._begin()
        elif self._recorder is None:
            self._pool.render()
        elif self._records_episode:
            self._recorder.add_frame(self._pool.render(env_ids=0)[0], _POOL_FPS)
        self._ended = bool(raw.terminated_N[0] or raw.truncated_N[0]) and not raw.final
        return raw

    def _receive(self, reset: bool = False) -> Sequence[np.ndarray]:
        """Return the arrays of EnvPool's pool. This method also passes the arrays to the pool's method `recv`, which stores data that some
        suites need for rendering."""
        arrays = super()._receive(reset)
        self._pool._recv = lambda: arrays
        self._pool.recv(reset)
        del self._pool._recv
        return arrays

    def _begin(self) -> None:
        self._records_episode = self._recorder is not None and self._recorder.begin_episode()


class RenderedEnvPoolAgents(RenderedEnvPool, EnvPoolAgents):
    """EnvPool backend with a single env that has several agents and is rendered after each step."""


class RenderedPettingZoo(PettingZoo):
    """PettingZoo backend with a single env that is rendered after each step. If the spec has a `Record` wrapper, frames are passed to its
    recorder, else frames are shown in a window."""

    name = ""
    applies_wraps = True

    def __init__(self, target: EnvRequest) -> None:
        recorders = [wrap.kwargs["recorder"] for wrap in target.wraps if wrap.wrapper is Record]
        wraps = tuple(wrap for wrap in target.wraps if wrap.wrapper is not Record)
        self._recorder: Recorder | None = recorders[0] if recorders else None
        self._records_episode, kwargs = False, {**target.kwargs, "render_mode": "rgb_array" if recorders else "human"}
        super().__init__(replace(target, wraps=wraps, kwargs=kwargs))

    def _reset(self, index: int) -> None:
        self._records_episode = self._recorder is not None and self._recorder.begin_episode()
        super()._reset(index)

    def _step(self, index: int, actions: Sequence[Any]) -> Result:
        result = super()._step(index, actions)
        env = self._games[index].env
        if self._recorder is None:
            env.render()
        elif self._records_episode:
            self._recorder.add_frame(np.asarray(env.render()), float(env.metadata.get("render_fps", _POOL_FPS)))
        return result


class AtariScreen(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that renders the colour screen of an ALE env that was built without a render mode."""

    render_mode = "rgb_array"

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        settings = env.get_wrapper_attr("settings")
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 60 / settings.frameskip}
        self._ale: Any = env.get_wrapper_attr("ale")

    def render(self) -> Any:
        """Return the screen of the emulator, uint8 [210, 160, 3]."""
        return self._ale.getScreenRGB()


class MinAtarScreen(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that renders a MinAtar env, with one colour per channel of the observation. Where channels overlap, the colour of the last
    channel is shown."""

    render_mode = "rgb_array"
    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}
    _SIZE = 24
    """Width and height of a cell of MinAtar's grid in pixels."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._game: Any = env.get_wrapper_attr("game")
        hues = np.linspace(0, 2 * np.pi, self._game.n_channels, endpoint=False)[:, None] + np.array([0, 2, 4]) * np.pi / 3
        self._colours = np.concatenate([np.zeros((1, 3), np.uint8), (155 + 100 * np.cos(hues)).astype(np.uint8)])

    def render(self) -> Any:
        """Return the image of MinAtar's grid, uint8 [240, 240, 3]."""
        state = self._game.state()
        colours = self._colours[(state * np.arange(1, state.shape[2] + 1)).max(axis=2)]
        return colours.repeat(self._SIZE, axis=0).repeat(self._SIZE, axis=1)


class Record(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that renders the env after each step and passes the frame to a recorder."""

    def __init__(self, env: gym.Env[Any, Any], recorder: Recorder) -> None:
        super().__init__(env)
        self._recorder, self._records_episode = recorder, False
        self._fps = float(env.metadata.get("render_fps") or 30)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._records_episode = self._recorder.begin_episode()
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        if self._records_episode:
            frame: Any = self.env.render()
            if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
                raise TypeError(f"render() must return an array [height, width, 3], not {type(frame).__name__}")
            self._recorder.add_frame(frame, self._fps)
        return result


def has_display() -> bool:
    """Return whether this process can open a window."""
    if sys.platform != "linux" or os.environ.get("WAYLAND_DISPLAY"):
        return True
    name = ctypes.util.find_library("X11")
    if not os.environ.get("DISPLAY") or name is None:
        return False
    x11 = ctypes.CDLL(name)
    x11.XOpenDisplay.restype = ctypes.c_void_p
    display = x11.XOpenDisplay(None)
    if display:
        x11.XCloseDisplay(ctypes.c_void_p(display))
    return bool(display)


def _choose_offscreen_renderer() -> None:
    """Set MUJOCO_GL to the OpenGL library with which MuJoCo can render without a display, unless MUJOCO_GL is already set or a display
    exists.

    Raises SpecError if no such library is installed.
    """
    if "MUJOCO_GL" in os.environ or sys.platform != "linux" or has_display():
        return
    for library, name in (("EGL", "egl"), ("OSMesa", "osmesa")):
        if ctypes.util.find_library(library):
            os.environ["MUJOCO_GL"] = name
            return
    why = (
        "MuJoCo needs OpenGL to draw without a display: install EGL or OSMesa (on Debian and Ubuntu: apt-get install libegl1 or libosmesa6)"
    )
    raise SpecError("env", [Problem("env.name", why)])
