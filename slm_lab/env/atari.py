"""Atari settings for all backends, and Atari preprocessing for backends that have no preprocessing of their own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from slm_lab.spec.models.env import EnvSpec


@dataclass(frozen=True)
class AtariSettings:
    """Arguments of an ALE env (Machado et al., arXiv:1709.06009), which are the same for every backend.

    Backends return unclipped rewards, so that episode returns are the game's scores. The reward normalizer clips rewards afterwards.
    """

    repeat_action_probability: float = 0.25
    """Probability per frame that the emulator repeats the previous action (sticky actions)."""
    full_action_space: bool = False
    continuous: bool = False
    continuous_action_threshold: float = 0.5
    frameskip: int = 4
    maxpool: bool = True
    """Whether each pixel of an observation is the maximum over the last two frames, which removes flicker."""
    noop_max: int = 30
    """Upper bound (exclusive) of the random number of no-op actions at the start of an episode."""
    use_fire_reset: bool = True
    """Whether to press FIRE at the start of an episode in games that have the action FIRE."""
    stack_num: int = 4
    img_height: int = 84
    img_width: int = 84
    grayscale: bool = True
    max_num_frames_per_episode: int = 108_000
    episodic_life: bool = False
    """Whether to report a lost life as a termination although the game continues. Episode returns are still computed for complete games."""
    life_loss_info: bool = False
    """Whether to report a lost life as a termination. This setting has the same effect as `episodic_life`, because no backend resets an env
    when a life is lost."""
    mode: int | None = None
    """Game mode, or None for the game's default mode."""
    difficulty: int | None = None

    @property
    def life_loss(self) -> bool:
        """Whether a lost life is reported as a termination."""
        return self.episodic_life or self.life_loss_info

    @property
    def channels_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed observation, [frames, height, width] for gray images or [frames, height, width, 3] for RGB images."""
        return (self.stack_num, self.img_height, self.img_width) + (() if self.grayscale else (3,))


ATARI_KEYS = tuple(field.name for field in fields(AtariSettings))


def frame_limit(settings: AtariSettings, max_t: int | None) -> int:
    """Return the number of emulator frames after which an episode is truncated."""
    limit = settings.max_num_frames_per_episode
    return limit if max_t is None else min(limit, max_t * settings.frameskip)


def is_preprocessed(spec: EnvSpec) -> bool:
    """Return whether Atari preprocessing is applied to the env. It is applied to every ALE env, unless the spec gives the argument
    `obs_type`."""
    return "ALE/" in spec.name and "obs_type" not in spec.kwargs


class AtariFrames(gym.Wrapper[np.ndarray, Any, np.ndarray, Any]):
    """Wrapper that applies frame skipping, max-pooling, resizing and stacking to one plain ALE env with frameskip 1, exactly as ALE's
    vector env does.

    After a reset, the stack of frames contains frames of zeros, followed by the episode's first frame.
    """

    def __init__(self, env: gym.Env[np.ndarray, Any], settings: AtariSettings, max_frames: int) -> None:
        import cv2

        super().__init__(env)
        self._cv2 = cv2
        self.settings = settings
        self.max_frames = max_frames
        self.observation_space = gym.spaces.Box(0, 255, settings.channels_shape, np.uint8)
        self._ale: Any = getattr(env.unwrapped, "ale")  # noqa: B009 - gym.Env does not declare it
        meanings: list[str] = getattr(env.unwrapped, "get_action_meanings")()  # noqa: B009
        self._fires = settings.use_fire_reset and "FIRE" in meanings
        self._elapsed = 0
        self._raw = np.zeros((2, *self._read_screen().shape), np.uint8)
        self._stack = np.zeros(settings.channels_shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        from ale_py import Action

        _, info = self.env.reset(seed=seed, options=options)
        if self._fires:
            self._ale.act(Action.FIRE)
        noops = int(self.np_random.integers(max(self.settings.noop_max, 1))) - self._fires
        for _ in range(noops):
            self._ale.act(Action.NOOP)
            if self._ale.game_over():
                self._ale.reset_game()
        self._elapsed = 0
        self._stack = np.zeros_like(self._stack)
        self._raw[0], self._raw[1] = self._read_screen(), 0
        info["lives"] = self._ale.lives()
        return self._stack_current_frame(), info

    def step(self, action: Any) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        info: dict[str, Any] = {}
        total, terminated, truncated = 0.0, False, False
        for left in range(self.settings.frameskip, 0, -1):
            frame, reward, terminated, _, info = self.env.step(action)
            total += float(reward)
            self._elapsed += 1
            truncated = self._elapsed >= self.max_frames
            if terminated or truncated:
                break
            if left <= 2:
                self._raw[left - 1] = frame
        return self._stack_current_frame(), total, terminated, truncated, info

    def _read_screen(self) -> np.ndarray:
        return np.asarray(self._ale.getScreenGrayscale() if self.settings.grayscale else self._ale.getScreenRGB())

    def _stack_current_frame(self) -> np.ndarray:
        """Add the current frame to the stack of frames and return the stack, a new array [stack, height, width(, 3)]."""
        if self.settings.maxpool:
            np.maximum(self._raw[0], self._raw[1], out=self._raw[0])
        size = (self.settings.img_width, self.settings.img_height)
        frame = (
            self._raw[0] if self._raw[0].shape[1::-1] == size else self._cv2.resize(self._raw[0], size, interpolation=self._cv2.INTER_AREA)
        )
        self._stack = np.concatenate([self._stack[1:], frame[None]])
        return self._stack
