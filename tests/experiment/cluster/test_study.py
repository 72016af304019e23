"""Tests of a study and a search on three nodes, one of which is killed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.experiment.run.search.search import Search
from slm_lab.experiment.run.study.study import StudyExperiment
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.study_file import load_study
from tests.experiment.cluster.conftest import Nodes
from tests.experiment.commands import until
from tests.experiment.study.toys import A2C, STUDY, blank_run


@pytest.mark.slow
def test_a_study_of_12_runs_ends_with_12_while_a_node_is_killed(nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"a2c": A2C | {"env": A2C["env"] | {"max_frame": 16_000}}, "pair": {"study": STUDY | {"random_seed": [*range(6)]}}}
    file = tmp_path / "study.json"
    file.write_text(json.dumps(body))
    study = StudyExperiment(load_study(file, "pair"), Plan(data_dir=tmp_path, cluster=nodes.address), target=blank_run)

    def kill() -> None:
        until(lambda: study.paths is not None)
        runs = study.paths.runs
        until(lambda: len(list(runs.glob("*/*/model/*ckpt-last.pt"))) >= 3)  # all nodes are busy
        nodes.kill(nodes.others[0])

    thread = threading.Thread(target=kill)
    thread.start()
    paths = study.run()
    thread.join()
    files = sorted(paths.results.glob("*.json"))
    assert len(files) == 12
    known = {(content["entry"], content["random_seed"]) for content in (ResultRun(file).content for file in files)}
    assert len(known) == 12
    assert [state.status for state in study.states] == ["done"] * 12
    starts = [len([path for path in folder.iterdir() if path.is_dir()]) for folder in paths.runs.iterdir()]
    assert starts == [1] * 12  # no run was restarted: the run on the lost node was continued
    assert "its node is gone or does not answer; the run continues on another node" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_runs_its_trials_on_all_nodes(nodes: Nodes, spec_body: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    body = spec_body(meta={"max_trial": 4, "search_algorithm": "random"}) | {
        "search": {"agent": {"algorithm": {"gamma__uniform": [0.9, 0.99]}}}
    }
    result = Search(load_spec({"small": body}, "small"), Plan(data_dir=tmp_path, cluster=nodes.address)).run()
    assert [record.status for record in result.records] == ["finished"] * 4
    assert isinstance(result.paths, RunPaths)
    assert len({*re.findall(r"small_t(\d)_s0\.log", " ".join(path.name for path in result.paths.log_dir.iterdir()))}) == 4
