"""Tests of the clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slm_lab.lib.clock import Clock


@given(num_envs=st.integers(1, 50), every=st.integers(1, 300), steps=st.integers(1, 200))
def test_due_once_per_crossing(num_envs: int, every: int, steps: int) -> None:
    """Each multiple of `every` is reported in one step, whether or not the frame counter is ever equal to it."""
    clock, times = Clock(), 0
    for _ in range(steps):
        clock.tick(num_envs)
        times += clock.is_multiple_crossed(every)
    crossed = (steps * num_envs) // every
    assert times == (crossed if every >= num_envs else steps)


def test_state_round_trip() -> None:
    clock = Clock()
    for _ in range(3):
        clock.tick(4)
    clock.epi, clock.opt_step = 5, 7
    state = clock.state_dict()
    other = Clock()
    other.load_state_dict(state)
    assert {**other.state_dict(), "wall_t": 0} == {**state, "wall_t": 0}
    assert other.frame == 12
    assert other.wall_t == pytest.approx(state["wall_t"], abs=0.5)
    assert other.wall_t >= state["wall_t"]
