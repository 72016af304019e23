"""Tests of schedules over frames: an end of 0 is reached, rising schedules rise, and periodic ones oscillate."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from slm_lab.spec.models.base import Schedule

ADAPTER: TypeAdapter[Any] = TypeAdapter(Schedule)


def make(name: str, **keys: Any) -> Any:
    return ADAPTER.validate_python({"name": name, **keys})


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0), (0.2, 0.05)])
def test_linear(start: float, end: float) -> None:
    line = make("linear_decay", start_val=start, end_val=end, start_step=100, end_step=300)
    assert [line.value(f) for f in (0, 100, 150, 200, 300, 10**9)] == pytest.approx(
        [start, start, start + (end - start) / 4, (start + end) / 2, end, end]
    )


def test_rate() -> None:
    # two decays by 0.5 between 0 and 100 would end at 0.25; shifted and scaled they end at 0, half-way at (0.5 − 0.25) / 0.75
    rate = make("rate_decay", start_val=1.0, end_val=0.0, start_step=0, end_step=100, decay_rate=0.5, frequency=2)
    assert [rate.value(f) for f in (0, 50, 75, 100, 500)] == pytest.approx([1.0, 1 / 3, (0.5**1.5 - 0.25) / 0.75, 0.0, 0.0])
    rising = make("rate_decay", start_val=0.0, end_val=1.0, start_step=0, end_step=100, decay_rate=0.5, frequency=2)
    assert rising.value(50) == pytest.approx(2 / 3)
    assert rate.value(99.99) == pytest.approx(0.0, abs=1e-3)  # no jump at the end


def test_periodic() -> None:
    wave = make("periodic_decay", start_val=1.0, end_val=0.0, start_step=0, end_step=400, frequency=2)
    # two periods of 200 frames whose amplitude shrinks: crests at 0 and 200, troughs at 100 and 300
    assert [wave.value(f) for f in (0, 100, 200, 300, 400)] == pytest.approx([1.0, 0.0, 0.5, 0.0, 0.0], abs=1e-12)
    assert wave.value(50) == pytest.approx(0.875 * 0.5 * (1 + math.cos(math.pi / 2)))


def test_constant() -> None:
    flat = make("no_decay", start_val=0.3, end_val=0.0, start_step=0, end_step=10)
    assert [flat.value(f) for f in (0, 5, 100)] == [0.3, 0.3, 0.3]


@given(
    name=st.sampled_from(["linear_decay", "rate_decay", "periodic_decay"]),
    start=st.floats(-10, 10),
    end=st.floats(-10, 10),
    begin=st.integers(0, 1000),
    length=st.integers(0, 1000),
    frame=st.integers(0, 3000),
)
def test_stays_between_its_ends(name: str, start: float, end: float, begin: int, length: int, frame: int) -> None:
    value = make(name, start_val=start, end_val=end, start_step=begin, end_step=begin + length).value(frame)
    assert min(start, end) - 1e-9 <= value <= max(start, end) + 1e-9
    if frame < begin:
        assert value == start
    if frame > begin + length:
        assert value == end
