"""Frames → MP4."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import numpy as np

from slm_lab.experiment.plan import UserError

SMALLEST = 360
"""Frames with fewer rows are enlarged by a whole factor to at least this number, since H.264 blurs single pixels of colour."""


def load_ffmpeg() -> ModuleType:
    """Return imageio_ffmpeg. Raises UserError if it, or ffmpeg itself, is missing."""
    install = "--video needs ffmpeg: pip install 'slm-lab[video]'"
    try:
        import imageio_ffmpeg
    except ImportError:
        raise UserError(install) from None
    try:
        imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise UserError(f"{install} (imageio-ffmpeg is installed: {str(error).splitlines()[0]})") from None
    ffmpeg: ModuleType = imageio_ffmpeg
    return ffmpeg


class VideoFile:
    """Writes the frames of episodes to an MP4 file, which appears when it is closed.

    Args: enough: no further episode is recorded once there are this many frames; None: all are.
    """

    def __init__(self, path: Path, enough: int | None = None) -> None:
        self.path, self.enough, self.frames, self.episodes = path, enough, 0, 0
        self._temporary = path.with_name(f".{path.name}")
        self._ffmpeg = load_ffmpeg()
        self._writer: Generator[None, np.ndarray | None, None] | None = None
        self._begins = False

    def begins(self) -> bool:
        """Return whether the episode that begins is to be recorded."""
        self._begins = self.enough is None or self.frames < self.enough
        return self._begins

    def add(self, frame_HWC: np.ndarray, fps: float) -> None:
        """Write a frame, uint8 [height, width, 3]. Raises UserError if it cannot be written."""
        factor = -(-SMALLEST // len(frame_HWC))
        frame_HWC = frame_HWC.repeat(factor, axis=0).repeat(factor, axis=1)
        height, width = frame_HWC.shape[:2]
        frame_HWC = np.pad(frame_HWC, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # H.264 needs even sizes
        try:
            if self._writer is None:
                self.path.parent.mkdir(exist_ok=True)
                size = (frame_HWC.shape[1], frame_HWC.shape[0])
                self._writer = self._ffmpeg.write_frames(
                    str(self._temporary), size, fps=fps, quality=7, macro_block_size=1, ffmpeg_log_level="error"
                )
                next(self._writer)
            self._writer.send(np.ascontiguousarray(frame_HWC))
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or str(error).strip().splitlines()[-1]}") from None
        self.frames += 1
        self.episodes += self._begins
        self._begins = False

    def close(self, keep: bool) -> None:
        """End the file; remove it unless `keep`. Raises UserError if ffmpeg failed."""
        if self._writer is None:
            return
        self._writer.close()
        try:
            if keep and self._temporary.stat().st_size > 0:
                os.replace(self._temporary, self.path)
            else:
                self._temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
