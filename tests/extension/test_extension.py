"""Tests of a user's algorithm, net and env backend, each in one file, trained by one spec, and of an engine added by a table entry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import slm_lab
from slm_lab.experiment.events import SessionEnded
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run import engine
from slm_lab.experiment.run.engine import SessionsJob, run_inline
from slm_lab.spec.report import SpecError

FILE = str(Path(__file__).with_name("spec.json"))
BEST = 1.0 - 0.1 * 5
"""Return of an episode that walks straight to the end."""


def test_trains_saves_and_loads(tmp_path: Path) -> None:
    slm_lab.Trial(slm_lab.load_spec(FILE, "corridor"), data_dir=tmp_path).run()
    (folder,) = tmp_path.iterdir()
    assert slm_lab.load_run(folder).train["total_reward"].iloc[-1] > BEST - 0.2
    agent = slm_lab.load_agent(folder)
    assert agent.act([1.0, 0, 0, 0, 0, 0, 0], deterministic=True)[0] == 1


def test_a_key_of_the_users_model_is_validated_by_path() -> None:
    with pytest.raises(SpecError) as raised:
        slm_lab.load_spec(FILE, "corridor", ["agent.algorithm.beta=-1", "agent.net.waves=0"])
    assert [problem.path for problem in raised.value.problems] == ["agent.algorithm.beta", "agent.net.waves"]


def test_a_misspelt_key_and_class_get_a_suggestion() -> None:
    with pytest.raises(SpecError) as raised:
        slm_lab.load_spec(FILE, "corridor", ['agent.net={"name": "tests.extension.wave_net:WaveNetSpec", "wave": 3}'])
    assert [(problem.path, problem.code) for problem in raised.value.problems] == [("agent.net.wave", "unknown")]
    assert "waves" in str(raised.value)
    with pytest.raises(SpecError, match="ExponentialPGSpec"):
        slm_lab.load_spec(FILE, "corridor", ["agent.algorithm.name=tests.extension.exponential_pg:ExponentialPg"])


def test_a_spec_is_checked_without_torch() -> None:
    code = f"import sys, slm_lab; slm_lab.load_spec({FILE!r}, 'corridor'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_an_engine_is_one_line_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def mine(job: SessionsJob) -> list[SessionEnded]:
        used.append(job.spec.name)
        return run_inline(job)

    monkeypatch.setitem(engine.ENGINES, "mine", mine)
    metrics = slm_lab.Trial(slm_lab.load_spec(FILE, "corridor", ["env.max_frame=400"]), plan=Plan(data_dir=tmp_path, engine="mine")).run()
    assert used == ["corridor"]
    assert metrics["frame"] == 400
