"""Calls of an actor in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Remote(Protocol):
    """An object in another process, whose methods are called by name."""

    def send(self, method: str, *args: Any) -> None:
        """Call a method and do not wait for it. Calls of one process are carried out in their order."""

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and return its result. Raises what it raises, or an error if the process has died."""


@dataclass(frozen=True)
class RemoteActor:
    """A Remote that is a Ray actor."""

    actor: Any

    def send(self, method: str, *args: Any) -> None:
        getattr(self.actor, method).remote(*args)

    def call(self, method: str, *args: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self.actor, method).remote(*args))
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None


def died(error: BaseException) -> str:
    """Return in one line why an actor has died, by Ray's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [line for line in lines if "cause" in line.lower() or "node" in line.lower()]
    return ((known or lines or [type(error).__name__])[0]).removeprefix("The actor died because of an error raised in its creation task, ")[
        :300
    ]
