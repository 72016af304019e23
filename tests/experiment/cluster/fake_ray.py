"""What RayPool uses of ray, in this process: calls are carried out when they are waited for, each with its arguments sent as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.experiment.cluster.direct import _sent


class Future:
    """What a call will return."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call: Callable[[], Any] | None = call
        self.value: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        if self.call is not None:
            call, self.call = self.call, None
            try:
                self.value = _sent(call())
            except Exception as error:
                self.error = error


class RayError(Exception):
    """As ray.exceptions.RayError."""


class RayTaskError(RayError):
    """As ray.exceptions.RayTaskError."""

    cause: Any = None


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name

    def options(self, **options: Any) -> Method:
        return self

    def remote(self, *args: Any) -> Future:
        args = tuple(_sent(arg.value if isinstance(arg, Future) else arg) for arg in args)

        def call() -> Any:
            if self.actor.dead:
                raise RayError("The actor died because its node has died")
            try:
                return getattr(self.actor.target, self.name)(*args)
            except Exception as error:
                failed = RayTaskError(str(error))
                failed.cause = error
                raise failed from error

        return Future(call)


class Actor:
    def __init__(self, target: Any) -> None:
        self.target, self.dead = target, False

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class FakeRay:
    """Keeps its actors in `actors`."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.actors: list[Actor] = []

    def remote(self, **options: Any) -> Callable[[type], Any]:
        def decorate(kind: type) -> Any:
            def make(*args: Any) -> Actor:
                self.actors.append(Actor(kind(*args)))
                return self.actors[-1]

            return SimpleNamespace(remote=make)

        return decorate

    def put(self, value: Any) -> Future:
        future = Future(lambda: value)
        future.run()
        return future

    def wait(self, futures: Sequence[Future], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Future], list[Future]]:
        done = list(futures[:num_returns])
        for future in done:
            future.run()
        return done, list(futures[num_returns:])

    def get(self, futures: Any, timeout: float | None = None) -> Any:
        if isinstance(futures, list):
            return [self.get(future) for future in futures]
        futures.run()
        if futures.error is not None:
            raise futures.error
        return futures.value

    def kill(self, actor: Actor) -> None:
        actor.dead = True
