"""However the driver ends, nothing of it is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from slm_lab.experiment import state
from tests.experiment.commands import Command, until

SECONDS = 60.0
"""Bound for the end of all processes of a killed driver; some 5 s on an idle machine."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_driver(number: signal.Signals, command: Callable[..., Command], spec_body: Callable[..., dict[str, Any]]) -> None:
    made = command(spec_body(env={"max_frame": 10_000_000}, meta={"save_interval": 0.2}))
    process = made.start("--cluster", "local")
    until(made.has_rows(1), process)
    until(made.paths.checkpoint(0, "last").exists, process)
    os.kill(process.pid, number)
    output = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), output
    made.leaves_nothing(SECONDS)
    bundle = state.load(made.paths.checkpoint(0, "last"))
    assert bundle["policies"][0]["clock"]["frame"] > 0
    if number == signal.SIGINT:
        assert "saving checkpoints" in output
        assert made.paths.trial_metrics().exists()
