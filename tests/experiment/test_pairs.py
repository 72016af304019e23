"""Tests of each algorithm, and each kind of net, with each engine: it trains, or `check` names the paths of the keys that conflict."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from slm_lab.experiment.files.sink import complete_rows
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.trial import Trial
from slm_lab.spec.report import SpecError
from tests.experiment.small_runs import PAIRS, REFUSED, spec_of

TRAINS = [pair for pair in PAIRS if pair not in REFUSED]


def check_run(name: str, engine: str, folder: Path, cluster: str | None = None) -> None:
    """Train a spec; each Session must reach its last frame, take gradient steps and have finite losses."""
    spec = spec_of(name, engine, folder)
    trial = Trial(spec, plan=Plan(data_dir=folder, cluster=cluster))
    trial.run()
    for index in range(spec.meta.max_session):
        last = complete_rows(trial.paths.session_df(index))[-1]
        assert int(last["frame"]) >= spec.session_frames
        assert int(last["opt_step"]) > 5
        assert math.isfinite(float(last["loss"]))


@pytest.mark.parametrize(("name", "engine"), list(REFUSED))
def test_a_pair_that_cannot_be_combined_is_refused_by_path(name: str, engine: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(name, engine)
    assert REFUSED[name, engine] in [problem.path for problem in caught.value.problems]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), TRAINS)
def test_a_pair_trains(name: str, engine: str, tmp_path: Path) -> None:
    check_run(name, engine, tmp_path)
