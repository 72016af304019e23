"""Measure the time that a training run spends inside EnvPool, and count the transitions.

The module imports neither slm_lab nor a peer: `python -m bench.ours` and the modules of the peers use it.
"""

from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np


class EnvPoolClock:
    """Adds up the seconds in EnvPool's C++ code, and counts the frames and transitions of its envs.

    `start` changes the function with which every library creates the envs of EnvPool, so that the calls of the created envs are timed:
    `_send` (actions), `_recv` (observations) and `_reset`. With at least as many EnvPool threads as cores, the envs are stepped within
    these calls.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.frames, self.transitions = [0], [0]
        """Number of frames and of transitions after each step of the pool. A frame in which EnvPool only resets an env, which is the frame
        after the last of an episode, is no transition."""
        self.seconds_at = [0.0]
        """Seconds in EnvPool after each step of the pool."""

    def start(self) -> None:
        from envpool.registration import registry

        make = registry.make

        def timed_make(*args: Any, **kwargs: Any) -> Any:
            pool = make(*args, **kwargs)
            send, receive, envs = self._timed(pool._send), self._timed(pool._recv), pool.config["num_envs"]
            elapsed_step, sent = pool._state_keys.index("elapsed_step"), False

            def counted_send(command: Any) -> None:
                nonlocal sent
                send(command)
                sent = True

            def counted_receive() -> Any:
                nonlocal sent
                state = receive()
                if sent:  # otherwise the state is the result of a reset
                    self.frames.append(self.frames[-1] + envs)
                    self.transitions.append(self.transitions[-1] + int(np.count_nonzero(state[elapsed_step])))
                    self.seconds_at.append(self.seconds)
                sent = False
                return state

            pool._send, pool._recv, pool._reset = counted_send, counted_receive, self._timed(pool._reset)
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

    def between(self, first: int, last: int) -> tuple[int, float]:
        """Return the number of transitions from frame `first` to frame `last`, and the mean time of a transition in EnvPool (µs)."""
        begin, end = bisect_left(self.frames, first), bisect_left(self.frames, last)
        transitions = self.transitions[end] - self.transitions[begin]
        return transitions, 1e6 * (self.seconds_at[end] - self.seconds_at[begin]) / transitions
