"""Storage of the observations in a replay buffer: complete observations, or the frames of stacked images, each frame stored once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.device import upload
from slm_lab.lib.records import EnvInfo, ObservationSpace, VecStep

_BLOCK = 10_000
"""Number of frames that are copied at once. 10,000 frames of 84 × 84 pixels take 70 MB."""


class DeviceArray:
    """Array of rows in the memory of a CUDA device, with those parts of numpy's array interface that replay buffers use."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: str) -> None:
        self.tensor = torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype, device=device)
        self.shape = shape

    def __len__(self) -> int:
        return len(self.tensor)

    def __setitem__(self, rows: np.ndarray | slice, values: np.ndarray) -> None:
        values_K = upload(torch.from_numpy(np.asarray(values)).to(self.tensor.dtype), self.tensor.device)
        self.tensor[rows if isinstance(rows, slice) else self._device_index(rows)] = values_K

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return a copy of the rows `rows` of the array, in host memory."""
        return self.tensor[rows].to("cpu", copy=True).numpy()

    def take(self, rows: np.ndarray, axis: int = 0) -> Tensor:
        """Return the rows `rows` of the array, [B, …], as a new tensor on the device."""
        return self.tensor.index_select(axis, self._device_index(rows))

    def _device_index(self, rows: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(rows.astype(np.int64, copy=False)), self.tensor.device)


Rows = np.ndarray | DeviceArray


def allocate_rows(shape: tuple[int, ...], dtype: Any, device: str | None) -> Rows:
    """Return an array of zeros with shape `shape` in the memory of a CUDA device, or in host memory if `device` is None."""
    return np.zeros(shape, dtype) if device is None else DeviceArray(shape, dtype, device)


class ObservationStore(ABC):
    """Base class of storages for the observations of a replay buffer's transitions.

    An observation is indexed by the row of its transition in the ring buffer.
    """

    arrays: dict[str, Rows]
    """All stored arrays, by name."""

    @abstractmethod
    def put(self, row_K: np.ndarray, env_K: np.ndarray, obs_N: np.ndarray, first_N: np.ndarray, step: VecStep) -> None:
        """Store the observations and true next observations of the envs env_K [K] in the rows row_K [K]."""

    @abstractmethod
    def observations(self, row_B: np.ndarray) -> np.ndarray | Tensor:
        """Return the observations [B, *shape] of the transitions in rows row_B."""

    @abstractmethod
    def next_observations(self, row_B: np.ndarray) -> np.ndarray | Tensor:
        """Return the true next observations [B, *shape] of the transitions in rows row_B."""

    def has_lost_frames(self, row: int) -> bool:
        """Return whether frames of the transition in row `row` were overwritten by newer frames."""
        return False

    def used_entries(self, rows: int) -> dict[str, int]:
        """Return, by array name, the number of entries that the transitions in the first `rows` rows use."""
        return dict.fromkeys(self.arrays, rows)

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the contents of the first `rows` rows, as arrays and numbers."""
        used = self.used_entries(rows)
        return {name: array[: used[name]] for name, array in self.arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if the state does not fit into the store."""
        for name, array in self.arrays.items():
            load_rows(name, array, np.asarray(state[name]))


def load_rows(name: str, array: Rows, saved: np.ndarray) -> None:
    """Copy saved rows to the first rows of an array. Raises ValueError if the saved rows are too many or have another shape."""
    if len(saved) > len(array) or saved.shape[1:] != array.shape[1:]:
        raise ValueError(f"incompatible replay buffer: {name} has shape {saved.shape}; expected {array.shape}")
    array[: len(saved)] = saved


class VectorStore(ObservationStore):
    """Storage of complete observations, namely the observation and the next observation of each transition."""

    def __init__(self, capacity: int, info: EnvInfo, device: str | None = None) -> None:
        shape, dtype = (capacity, *info.observation.shape), info.observation.dtype
        self.obs, self.next_obs = allocate_rows(shape, dtype, device), allocate_rows(shape, dtype, device)
        self.arrays = {"obs": self.obs, "next_obs": self.next_obs}

    @staticmethod
    def nbytes(capacity: int, info: EnvInfo) -> int:
        """Return the size in bytes of a store for `capacity` transitions."""
        return 2 * capacity * math.prod(info.observation.shape) * np.dtype(info.observation.dtype).itemsize

    def put(self, row_K: np.ndarray, env_K: np.ndarray, obs_N: np.ndarray, first_N: np.ndarray, step: VecStep) -> None:
        self.obs[row_K] = obs_N[env_K]
        self.next_obs[row_K] = step.last_obs_N[env_K]

    def observations(self, row_B: np.ndarray) -> np.ndarray | Tensor:
        return self.obs.take(row_B, axis=0)

    def next_observations(self, row_B: np.ndarray) -> np.ndarray | Tensor:
        return self.next_obs.take(row_B, axis=0)


class FrameStore(ObservationStore):
    """Storage of the frames of stacked images: a ring buffer in which each frame is stored once.

    For each transition, the store contains the slots of the frames of the observation and of the next observation. The first observation of
    an episode adds all its frames (a repeated frame only once), and each step adds one frame. After a lost life, the first observation of
    the new episode equals the env's last observation, which is already stored. Frames are numbered consecutively, and frame number f is in
    slot f modulo `slots`. When a frame is overwritten, the transitions that contain this frame are lost. The replay buffer drops lost
    transitions, beginning with the oldest transition.
    """

    def __init__(self, capacity: int, info: EnvInfo, device: str | None = None) -> None:
        self.space, self.slots, self.count = info.observation, self._number_of_slots(capacity, info), 0
        stack = self.space.stack
        self.frames = allocate_rows((self.slots, *self._frame_shape(self.space)), np.uint8, device)
        self.slot = np.zeros((capacity, 2, stack), np.int32)
        """Slots of the frames of each transition's observation and next observation."""
        self.oldest = np.zeros(capacity, np.int64)
        """Lower bound of the frame numbers of each transition and of all later transitions. The bound never decreases, so that transitions
        are lost in the order in which they were added. (A transition's smallest frame number may decrease from one env to the next.)"""
        self.current = np.zeros((info.num_envs, stack), np.int64)
        """Frame numbers of each env's next observation."""
        self.has_frames_N = np.zeros(info.num_envs, np.bool_)
        """Whether `current` contains the frame numbers of each env."""
        self.max_lag = max(self._number_of_slots(0, info), capacity // 16)
        """Number of newer frames after which the frames of an env are forgotten. The observation of this env is then stored again with its
        next transition."""
        self.arrays = {"frames": self.frames, "slot": self.slot, "oldest": self.oldest, "current": self.current, "known": self.has_frames_N}

    @staticmethod
    def _frame_shape(space: ObservationSpace) -> tuple[int, ...]:
        return (space.shape[0] // space.stack, *space.shape[1:])

    @staticmethod
    def _number_of_slots(capacity: int, info: EnvInfo) -> int:
        # space for the first frames of episodes, one in every 64 steps, and for unfinished episodes
        return capacity + capacity // 64 + 2 * (info.observation.stack + 1) * info.num_envs

    @staticmethod
    def nbytes(capacity: int, info: EnvInfo) -> int:
        """Return the size in bytes of a store for `capacity` transitions."""
        frame = math.prod(FrameStore._frame_shape(info.observation))
        return FrameStore._number_of_slots(capacity, info) * frame + capacity * (8 * info.observation.stack + 8)

    def put(self, row_K: np.ndarray, env_K: np.ndarray, obs_N: np.ndarray, first_N: np.ndarray, step: VecStep) -> None:
        # forget the frames of envs (agents) without recent transitions: otherwise, all transitions count as lost when these frames are
        # overwritten
        self.has_frames_N &= self.current.min(axis=1) >= self.count - self.max_lag
        for n in env_K[first_N[env_K] | ~self.has_frames_N[env_K]]:
            self._store_first_observation(int(n), obs_N[n])
        if not len(env_K):
            return
        self.oldest[row_K] = self.current[self.has_frames_N].min()
        before_KS = self.current[env_K]
        new_K = self._write_frames(self._split_into_frames(step.last_obs_N[env_K])[:, -1])
        after_KS = np.concatenate([before_KS[:, 1:], new_K[:, None]], axis=1)
        self.current[env_K] = after_KS
        self.slot[row_K, 0], self.slot[row_K, 1] = before_KS % self.slots, after_KS % self.slots

    def _split_into_frames(self, obs_K: np.ndarray) -> np.ndarray:
        """Reshape observations [K, C, H, W] to frames [K, stack, C / stack, H, W]."""
        return obs_K.reshape(len(obs_K), self.space.stack, *self.frames.shape[1:])

    def _store_first_observation(self, n: int, obs: np.ndarray) -> None:
        """Store the frames of an episode's first observation, unless these frames are already stored as the env's current frames.

        After a lost life, the first observation of an episode equals the last observation of the previous episode.
        """
        frames = self._split_into_frames(obs[None])[0]
        if self.has_frames_N[n] and np.array_equal(frames, self._frames_on_host(self.current[n] % self.slots)):
            return
        for index, frame in enumerate(frames):
            if index and np.array_equal(frame, frames[index - 1]):
                self.current[n, index] = self.current[n, index - 1]
            else:
                self.current[n, index] = self._write_frames(frame[None])[0]
        self.has_frames_N[n] = True

    def _frames_on_host(self, slot_K: np.ndarray) -> np.ndarray:
        """Return the frames [K, …] in the slots slot_K [K], in host memory."""
        frames_K = self.frames.take(slot_K, axis=0)
        return frames_K if isinstance(frames_K, np.ndarray) else frames_K.cpu().numpy()

    def _write_frames(self, frames_K: np.ndarray) -> np.ndarray:
        number_K = np.arange(self.count, self.count + len(frames_K))
        self.frames[number_K % self.slots] = frames_K
        self.count += len(frames_K)
        return number_K

    def observations(self, row_B: np.ndarray) -> np.ndarray | Tensor:
        return self._stack_frames(self.slot[row_B, 0])

    def next_observations(self, row_B: np.ndarray) -> np.ndarray | Tensor:
        return self._stack_frames(self.slot[row_B, 1])

    def _stack_frames(self, slot_BS: np.ndarray) -> np.ndarray | Tensor:
        """Return observations [B, *shape]. Each observation consists of the S frames at the indices in a row of slot_BS [B, S]."""
        return self.frames.take(slot_BS.reshape(-1), axis=0).reshape(len(slot_BS), *self.space.shape)

    def has_lost_frames(self, row: int) -> bool:
        return bool(self.oldest[row] < self.count - self.slots)

    def used_entries(self, rows: int) -> dict[str, int]:
        each = {"current": len(self.current), "known": len(self.has_frames_N)}
        return {"frames": min(self.count, self.slots), "slot": rows, "oldest": rows, **each}

    def state_dict(self, rows: int) -> dict[str, Any]:
        return {**super().state_dict(rows), "count": self.count, "slots": self.slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        count, slots = int(state["count"]), int(state["slots"])
        if slots == self.slots or count <= min(slots, self.slots):
            super().load_state_dict(state)
        else:
            self._load_resized_ring(state, count, slots)
        self.count = count

    def _load_resized_ring(self, state: dict[str, Any], count: int, slots: int) -> None:
        """Load the contents of a ring buffer with another number of slots. Raises ValueError if the frames have another shape."""
        frames, slot = np.asarray(state["frames"]), np.asarray(state["slot"])
        if frames.shape[1:] != self.frames.shape[1:]:
            raise ValueError(f"incompatible replay buffer: frames have shape {frames.shape[1:]}; expected {self.frames.shape[1:]}")
        number_K = np.arange(count - min(count, slots, self.slots), count)
        for number_B in np.array_split(number_K, len(number_K) // _BLOCK + 1):  # in blocks, since indexing makes a copy
            self.frames[number_B % self.slots] = frames[number_B % slots]
        # slot s contained the frame with the greatest number below count that equals s modulo slots
        moved = (count - 1 - (count - 1 - slot) % slots) % self.slots
        for name, saved in (
            ("slot", moved.astype(np.int32)),
            *((name, np.asarray(state[name])) for name in ("oldest", "current", "known")),
        ):
            load_rows(name, self.arrays[name], saved)
