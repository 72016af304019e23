"""Tests of tools/baselines.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest

from slm_lab.experiment.report.baseline import Baseline
from slm_lab.spec.compat.env_ids import KNOWN
from tools import baselines


def test_measures_what_the_file_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "baselines.json"
    file.write_text('{"Blackjack-v1": 9.0}')
    baselines.main(["--only", "FrozenLake-v1", "Blackjack-*", "--file", str(file)])
    known = json.loads(file.read_text())
    assert known == {"Blackjack-v1": 9.0, "FrozenLake-v1": known["FrozenLake-v1"]}
    assert 0 <= known["FrozenLake-v1"] < 0.1
    assert [path.name for path in tmp_path.iterdir()] == ["baselines.json"]
    capsys.readouterr()
    baselines.main(["--only", "FrozenLake-v1", "--file", str(file)])
    assert capsys.readouterr().out == ""


def test_long_ones_have_fewer_episodes_and_failures_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(spec: object, ended: Callable[[], bool], fewest: int) -> Baseline:
        name = spec.name  # type: ignore[attr-defined]
        if name == "CartPole-v0":
            raise OSError("broken")
        assert not ended()
        clock.now += 0.9 * baselines.LIMIT
        assert not ended()
        clock.now += 0.2 * baselines.LIMIT
        assert ended()
        return Baseline(2.0, fewest) if name == "Acrobot-v1" else Baseline(None, 0)

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(baselines, "measure_mean_return", measure)
    monkeypatch.setattr(baselines, "time", SimpleNamespace(process_time=lambda: clock.now))
    file = tmp_path / "baselines.json"
    baselines.main(["--only", "Acrobot-v1", "CartPole-*", "--file", str(file)])
    assert json.loads(file.read_text()) == {"Acrobot-v1": 2.0}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Acrobot-v1: 2.0 ({baselines.FEWEST} episodes, {1.1 * baselines.LIMIT:.1f} s)"
    assert lines[1:] == ["CartPole-v0: skipped: OSError: broken", "CartPole-v1: skipped: only 0 episodes ended"]


def test_every_id_that_the_extras_install() -> None:
    names = [env["name"] for env in baselines.all_envs()]
    own = [id_ for id_, kind in KNOWN.items() if kind != "jax"]
    assert set(own) <= set(names)
    assert {"Hopper-v4", "CarRacing-v3", "CliffWalking-v1", "ALE/Pong-v5", "slm_lab.env.masked:MaskedCartPole-v1"} <= set(names)
    assert all(id_ in gym.registry for id_ in own)
    assert names.index("ALE/Pong-v5") > names.index("Hopper-v4")
