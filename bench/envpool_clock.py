"""Measure the time that a training run spends inside EnvPool, and count the transitions.

The module imports neither slm_lab nor a peer: `python -m bench.ours` and the modules of the peers use it.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np


class EnvPoolClock:
    """Adds up the seconds in EnvPool's C++ code and the transitions of its envs.

    `start` changes the function with which every library creates the envs of EnvPool, so that the calls of the created envs are timed:
    `_send` (actions), `_recv` (observations) and `_reset`. With as many EnvPool threads as cores, the envs are stepped within these calls.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.transitions = 0
        """Number of steps of all envs. The step after the end of an episode is not counted, because EnvPool only resets the env in it."""

    def start(self) -> None:
        from envpool.registration import registry

        make = registry.make

        def timed_make(*args: Any, **kwargs: Any) -> Any:
            pool = make(*args, **kwargs)
            receive, elapsed_step = pool._recv, pool._state_keys.index("elapsed_step")

            def counted_receive() -> Any:
                state = receive()
                self.transitions += int(np.count_nonzero(state[elapsed_step]))
                return state

            pool._send, pool._reset, pool._recv = map(self._timed, (pool._send, pool._reset, counted_receive))
            return pool

        setattr(registry, "make", timed_make)  # noqa: B010 (mypy rejects the assignment to a method)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time added to this clock."""

        def timed(*args: Any) -> Any:
            begin = perf_counter()
            result = call(*args)
            self.seconds += perf_counter() - begin
            return result

        return timed

    @property
    def microseconds(self) -> float:
        """The mean time of a transition in EnvPool (µs), including the steps that reset envs."""
        return 1e6 * self.seconds / self.transitions
