"""Method calls on an actor in another process."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, TypeVar

PACKED = 2**16
"""A message whose arrays have at most this many bytes in all is pickled to one bytes object, which takes Ray less processor time. Larger
arrays are sent unchanged, so that processes of the same node read them without a copy."""
Content = TypeVar("Content")


def pack(content: Content) -> Content | bytes:
    """Return `content` pickled to bytes if its arrays have at most PACKED bytes in all; otherwise `content` itself."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(content, 5, buffer_callback=arrays.append)
    if not arrays:
        return data
    return pickle.dumps(content, 5) if sum(array.raw().nbytes for array in arrays) <= PACKED else content


def unpack(content: Content | bytes) -> Content:
    """Return the content that was passed to `pack`."""
    if not isinstance(content, bytes):
        return content
    unpacked: Content = pickle.loads(content)
    return unpacked


@dataclass(frozen=True)
class Remote:
    """A Ray actor, whose methods are called by name."""

    actor: Any

    def send(self, method: str, *args: Any) -> None:
        """Call a method without waiting for it. Calls from one process are executed in order."""
        self.start(method, *args)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and return its result. Raises the exception of the method, or an error if the process has died."""
        return self.result(self.start(method, *args))

    def start(self, method: str, *args: Any) -> Any:
        """Start a call of a method; return an object to pass to `done` and `result`."""
        return getattr(self.actor, method).remote(*args)

    def done(self, started: Any) -> bool:
        """Return whether a call has ended."""
        import ray

        return bool(ray.wait([started], timeout=0)[0])

    def result(self, started: Any) -> Any:
        """Wait for a call and return its result; raises as `call` does."""
        import ray

        try:
            return ray.get(started)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None


def died(error: BaseException) -> str:
    """Return the reason why an actor has died in one line, taken from Ray's error."""
    text = str(error)
    if "unavailable" in text or "node has died" in text or "node was terminated" in text:
        return LOST_NODE
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "cause" in line.lower()), (lines or [type(error).__name__])[0])[:300]


LOST_NODE = "its node is gone or does not answer"
