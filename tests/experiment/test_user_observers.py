"""Tests of user observers, named in the spec or passed in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slm_lab
from slm_lab.cli import main
from slm_lab.experiment.events import Row
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.training.observers.base import ObserverContext
from slm_lab.lib.records import Episode, Metrics
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError

MakeSpec = Callable[..., Spec]


class Counter(slm_lab.Observer):
    """Observer that counts its calls and the episodes that it receives."""

    made: list[Counter] = []

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self.seen = {"steps": 0, "episodes": 0, "updates": 0, "rows": 0, "ends": 0}
        self.made.append(self)

    def on_step(self, episodes: list[Episode]) -> None:
        self.seen["steps"] += 1
        self.seen["episodes"] += len(episodes)
        assert self.context.clock.t == self.seen["steps"]

    def on_update(self, metrics: Metrics) -> None:
        self.seen["updates"] += 1

    def on_row(self, row: Row) -> None:
        self.seen["rows"] += 1

    def on_end(self) -> None:
        self.seen["ends"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.seen


class Broken(slm_lab.Observer):
    def on_row(self, row: Row) -> None:
        raise ArithmeticError("no more rows")


def no_observer(context: ObserverContext) -> Any:
    return None


NAME = f"{__name__}:Counter"


def test_observers_of_the_spec_and_of_python(make_spec: MakeSpec, tmp_path: Path) -> None:
    Counter.made.clear()
    session = slm_lab.Session(make_spec(meta={"observers": [NAME]}), observers=[Counter])
    rows = session.run().rows
    one, other = Counter.made
    assert one.seen == other.seen == {"steps": 250, "episodes": session.clock.epi, "updates": 7, "rows": len(rows), "ends": 1}
    assert (one.context.table, one.context.agent is session.agent, one.context.spec.name) == (0, True, "small")
    Counter.made.clear()
    result = slm_lab.Trial(make_spec(), tmp_path, observers=[Counter]).run()
    assert [one.seen["steps"] for one in Counter.made] == [250]
    saved = state.load(result.paths.checkpoint(0, "last"))["policies"][0]["observers"]
    assert [content["steps"] for name, content in saved.items() if name.startswith("user")] == [250]


def test_observers_in_the_processes_of_sessions(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(meta={"max_session": 2}, env={"max_frame": 200})
    slm_lab.Trial(spec, tmp_path, observers=[Counter]).run()
    with pytest.raises(UserError, match="cannot be sent"):
        slm_lab.Trial(spec, tmp_path, observers=[lambda context: Counter(context)])
    with pytest.raises(UserError, match=r"not a subclass of slm_lab\.Observer"):
        slm_lab.Trial(spec, tmp_path, observers=[dict])  # type: ignore[list-item]


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_factory_that_returns_no_observer_is_an_error_before_the_start(sessions: int, make_spec: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        slm_lab.Trial(make_spec(meta={"max_session": sessions}), tmp_path, observers=[no_observer]).run()
    assert not list(tmp_path.iterdir())


def test_an_error_of_an_observer_fails_the_session(make_spec: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(slm_lab.experiment.plan.TrialFailed) as failed:
        slm_lab.Trial(make_spec(), tmp_path, observers=[Broken]).run()
    assert "no more rows" in failed.value.metrics["failures"]["0"]


def test_a_path_that_does_not_import_names_its_key(
    spec_body: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All such problems are reported at once, and nothing is written."""
    import json

    file = tmp_path / "spec.json"
    names = [NAME, "no_such_package:Class", f"{__name__}:Counters", f"{__name__}:Path"]
    for observers in (names, [NAME, "no colon"]):
        file.write_text(json.dumps({"small": spec_body(meta={"observers": observers})}))
        assert main([str(file), "small", "--data-dir", str(tmp_path / "data")]) == 2
        shown = capsys.readouterr().err
        assert [f"meta.observers[{index}]" in shown for index in range(len(observers))] == [False, *[True] * (len(observers) - 1)]
    assert not (tmp_path / "data").exists()
    body = spec_body(meta={"observers": names[1:2]})
    with pytest.raises(SpecError) as error:
        slm_lab.Session(Spec.model_validate({"name": "small", **body})).build()
    assert [problem.path for problem in error.value.problems] == ["meta.observers[0]"]
