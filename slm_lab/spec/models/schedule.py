"""Schedules: values as functions of the frame."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, Strict

from slm_lab.spec.models.base import NonNegative, PositiveReal, Real, SpecModel


class NoDecay(SpecModel):
    """Constant start_val."""

    name: Literal["no_decay"]
    start_val: Real
    """The value."""
    end_val: Real | None = None
    """Not used."""
    start_step: NonNegative = 0
    """Not used."""
    end_step: Real | None = None
    """Not used."""

    def value(self, frame: int) -> float:
        return self.start_val

    @property
    def last(self) -> float:
        """Return the value that it ends with."""
        return self.start_val


class _Decay(SpecModel):
    start_val: Real
    """Value up to start_step."""
    end_val: Real
    """Value from end_step on; may be above start_val, or 0."""
    start_step: NonNegative = 0
    """Frame at which the change starts."""
    end_step: NonNegative
    """Frame at which end_val is reached."""

    def value(self, frame: int) -> float:
        if frame <= self.start_step:
            return self.start_val
        if frame >= self.end_step:
            return self.end_val
        return self._between((frame - self.start_step) / (self.end_step - self.start_step), frame)

    @property
    def last(self) -> float:
        """Return the value that it ends with."""
        return self.end_val

    def _between(self, fraction: float, frame: int) -> float:
        raise NotImplementedError


class LinearDecay(_Decay):
    """Linear change from start_val at start_step to end_val at end_step."""

    name: Literal["linear_decay"]

    def _between(self, fraction: float, frame: int) -> float:
        return self.start_val + fraction * (self.end_val - self.start_val)


class RateDecay(_Decay):
    """Exponential decay by decay_rate every (end_step − start_step) / frequency frames, shifted and scaled so that it ends at end_val:

    end_val + (start_val − end_val) (rᵏ − rᶠ) / (1 − rᶠ) after k of f = frequency decays by r = decay_rate.
    """

    name: Literal["rate_decay"]
    decay_rate: Annotated[float, Strict(), Field(gt=0, lt=1)] = 0.9
    """Factor per decay."""
    frequency: PositiveReal = 20.0
    """Number of decays between start_step and end_step."""

    def _between(self, fraction: float, frame: int) -> float:
        exponent = math.log(self.decay_rate) * self.frequency
        # expm1 keeps the quotient exact for few or weak decays, which are nearly linear
        return self.end_val + (self.start_val - self.end_val) * (1.0 - math.expm1(exponent * fraction) / math.expm1(exponent))


class PeriodicDecay(_Decay):
    """Cosine wave between start_val and end_val whose amplitude decreases linearly to 0, at end_val."""

    name: Literal["periodic_decay"]
    frequency: PositiveReal = 60.0
    """Number of periods between start_step and end_step."""

    def _between(self, fraction: float, frame: int) -> float:
        amplitude = (self.start_val - self.end_val) * (1.0 - fraction)
        return self.end_val + amplitude * 0.5 * (1.0 + math.cos(2.0 * math.pi * self.frequency * fraction))


Schedule = Annotated[NoDecay | LinearDecay | RateDecay | PeriodicDecay, Field(discriminator="name")]


def constant(value: float) -> NoDecay:
    """Return a constant schedule."""
    return NoDecay(name="no_decay", start_val=value)
