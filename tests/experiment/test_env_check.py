"""Tests of the trial step of the env before a run.

If the env returns an invalid value, nothing is written. The trial step must not affect the run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.cli import main
from slm_lab.experiment.execute.heartbeat import RESETTING, STEPPING
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.engine import check_builds, expected_times
from slm_lab.experiment.run.search.prepare import check_search_values
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session import build as session_build
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.env_check import check_env
from slm_lab.experiment.training.experience import no_beat
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError

MakeSpec = Callable[..., Spec]
SpecBody = Callable[..., dict[str, Any]]
STRANGE: dict[str, Any] = {"name": "tests.env.strange:Strange-v0", "backend": "sync", "at": 1}
WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "processes": {"max_session": 2},
    "serial workers": {"sampler": {"num_workers": 2, "num_envs_per_worker": 2, "async_rl": False, "serial_mode": True}},
    "workers": {"sampler": {"num_workers": 2, "num_envs_per_worker": 2, "async_rl": False}},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_written(way: str, make_spec: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"env\.name: tests\.env\.strange:Strange-v0, env 0, step 1: .*reward"):
        Trial(make_spec(env={**STRANGE, "step": "text reward"}, meta=WAYS[way]), tmp_path).run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fault", [{"obs": "another shape", "at": 0}, {"reset": "nothing", "at": 0}, {"step": "four values"}, {"fault": "step"}], ids=str
)
def test_build_check_and_search(fault: dict[str, Any], make_spec: MakeSpec, spec_body: SpecBody) -> None:
    """Each check reports one problem; if the env raises an error, the problem names the line in the user's file."""
    with pytest.raises(SpecError) as raised:
        check_builds([make_spec(env=STRANGE | fault)], Plan(), "x.json")
    (problem,) = raised.value.problems
    assert problem.path == "env.name"
    assert ("strange.py, line" in problem.message) == ("fault" in fault)
    body = spec_body(env=STRANGE | fault) | {"search": {"agent.algorithm.gamma__uniform": [0.9, 0.99]}}
    with pytest.raises(SpecError, match=r"env\.name"):
        check_search_values(SearchSpace(load_spec({"small": body}, "small")), Plan())


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_the_message_names_the_error_and_the_line_of_the_env(backend: str, make_spec: MakeSpec) -> None:
    """Also if the env runs in a worker process, whose traceback the message does not contain."""
    env = {"name": "tests.env.toys:Faulty-v0", "fault": "step", "backend": backend, "num_envs": 2}
    with pytest.raises(SpecError) as raised:
        check_env(make_spec(env=env), 0, no_beat)
    (problem,) = raised.value.problems
    assert re.fullmatch(r".*Faulty-v0: step raised ValueError: the robot fell over \(file .*toys\.py, line \d+\)", problem.message)


@pytest.mark.parametrize(
    ("wrappers", "key"),
    [
        (["TimeAwareObservation", "tests.env.test_wrappers:FailsInStep"], "env.wrappers[1]"),
        ([{"name": "ClipReward", "min_reward": "a"}], "env.wrappers[0]"),
        ([{"name": "ClipReward", "min_reward": 0}, {"name": "ClipReward", "min_reward": "a"}], "env.wrappers"),
    ],
    ids=["raises", "misuses", "one of two"],
)
def test_the_key_of_a_wrapper_that_fails(wrappers: list[Any], key: str, make_spec: MakeSpec) -> None:
    with pytest.raises(SpecError) as raised:
        check_env(make_spec(env={"name": "CartPole-v1", "backend": "sync", "wrappers": wrappers}), 0, no_beat)
    assert [problem.path for problem in raised.value.problems] == [key]


def test_the_run_is_the_same_without_it(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results must not depend on the trial step, even if the env draws from the global random generators."""
    spec = make_spec(env={"name": "tests.env.toys:GlobalDraws-v0", "backend": "sync"})
    rows = Session(spec).run().rows
    monkeypatch.setattr(session_build, "check_env", lambda *arguments, **keys: None)
    without = Session(spec).run().rows
    assert [row["total_reward"] for row in rows] == [row["total_reward"] for row in without]
    assert len(rows) == 4


def test_it_leaves_the_generators_alone_and_tells_its_phases(make_spec: MakeSpec) -> None:
    phases: list[int] = []
    drawn = []
    for check in (False, True):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        if check:
            check_env(make_spec(env={"name": "tests.env.toys:GlobalDraws-v0", "backend": "sync"}), 3, phases.append)
        drawn.append((random.random(), np.random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
    assert {RESETTING, STEPPING} <= set(phases)


def test_an_error_of_close_is_no_traceback(spec_body: SpecBody, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec(env=STRANGE | {"fault": "close", "max_frame": 200})
    check_env(spec, 0, no_beat)
    assert len(check_builds([spec], Plan(), "x.json")) == 1
    assert Session(spec).run().frame >= 200
    assert "it cannot be closed" in caplog.text


@pytest.mark.parametrize(
    ("env", "near"), [(STRANGE | {"faul": 1}, "'fault'"), ({"sutton_barto_rewar": True}, "'sutton_barto_reward'")], ids=["own", "gymnasium"]
)
def test_check_looks_at_the_arguments_of_the_constructor(
    env: dict[str, Any], near: str, spec_body: SpecBody, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check needs no --build and covers specs and studies; a module that cannot be imported is an error too."""
    import json

    (file := tmp_path / "spec.json").write_text(json.dumps({"small": spec_body(env=env), "good": spec_body()}))
    key = "faul" if "faul" in env else "sutton_barto_rewar"
    for words, path in ((["check", str(file)], f"small.env.{key}:"), (["check", str(file), "small"], f"env.{key}:")):
        assert main(words) == 2
        shown = capsys.readouterr().err
        assert path in shown
        assert near in shown
    assert main(["check", str(file), "good"]) == 0
    file.write_text(json.dumps({"small": spec_body(env={"name": "nowhere.at_all:X-v0", "strid": 1})}))
    assert main(["check", str(file)]) == 2
    assert "env.name" in capsys.readouterr().err


def test_a_study_whose_set_has_an_unknown_argument(spec_body: SpecBody, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that the study sets for all runs is one problem of the study; the value of an entry is a problem of the entry."""
    import json

    entries: list[dict[str, Any]] = [
        {"spec": "small", "label": "a"},
        {"spec": "small", "label": "b", "set": {"agent.algorithm.gamma": 0.9}},
    ]
    study = {"entries": entries, "random_seed": [1], "set": {"env.sutton_barto_rewar": True}}
    (file := tmp_path / "file.json").write_text(json.dumps({"small": spec_body(), "it": {"study": study}}))
    assert main(["check", str(file), "it"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("study.set.env.sutton_barto_rewar:") == 1
    assert "1 problem" in shown
    del study["set"]
    entries[1]["set"] = {"env.sutton_barto_rewar": True}
    file.write_text(json.dumps({"small": spec_body(), "it": {"study": study}}))
    assert main(["check", str(file), "it"]) == 2
    assert "study.entries[1].set.env.sutton_barto_rewar:" in capsys.readouterr().err
    study["set"] = {"env": {"sutton_barto_rewar": False}}  # the value of the entry replaces it in one of the runs
    file.write_text(json.dumps({"small": spec_body(), "it": {"study": study}}))
    assert main(["check", str(file), "it"]) == 2
    shown = capsys.readouterr().err
    assert "study.set.env.sutton_barto_rewar:" in shown
    assert "study.entries[1].set.env.sutton_barto_rewar:" in shown


def test_a_spec_whose_training_fails(make_spec: MakeSpec) -> None:
    """The env fails after the trial steps, in the measurement of the speed."""
    failing = make_spec(env=STRANGE | {"fault": "step", "at": 40})
    for check in (check_builds, expected_times):
        with pytest.raises(SpecError, match="builds, but training fails"):
            check([failing], Plan(), "x.json")
    with pytest.raises(SpecError) as raised:
        check_builds([failing, failing], Plan(), "x.json")
    assert [problem.path for problem in raised.value.problems] == [failing.name] * 2
