"""The studies whose results are kept in the repository: their files, and the runs that have a result."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.spec.load.study_file import load_study
from slm_lab.spec.models.study import Study, StudyRun

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


class Kept(NamedTuple):
    """The file of a study and the folder of its results."""

    file: str
    """File name of the study in slm_lab/spec/study/."""
    results: Path
    """Folder of the result files."""


TABLES = (
    "mujoco_1m", "mujoco", "async_sac_humanoid", "dm_control_5m", "dm_control_10m", "minatar", "off_policy_100k", "playground", "pong",
)  # fmt: skip
"""The studies of tables.json, in the order in which `make benchmarks` trains them."""
LEARNING_CURVES = (
    "pqn_cartpole", "pqn_acrobot", "pqn_lunar", "rainbow_lunar", "continuous_control", "recurrent_sac", "hindsight", "fetch_reach",
    "simple_spread", "behaviour_cloning", "demonstrations", "metaworld", "jumanji",
)  # fmt: skip
"""The studies of learning_curves.json."""
STUDIES = {
    "benchmarks": Kept("benchmarks.json", DOCS / "benchmarks"),
    "a3c_vs_a2c": Kept("a3c_vs_a2c.json", DOCS / "hogwild" / "results"),
    "sync_async": Kept("sync_async.json", DOCS / "sync_async" / "results"),
    **{name: Kept("learning_curves.json", DOCS / "learning_curves" / name) for name in LEARNING_CURVES},
    **{name: Kept("tables.json", DOCS / "benchmarks" / name) for name in TABLES},
}
"""Name of a study → its files."""


@cache
def study_of(name: str) -> Study:
    """Return a study from its file."""
    return load_study(STUDIES[name].file, name)


def results_of(study: Study, folder: Path) -> list[ResultRun]:
    """Return the results of a study's runs in a folder."""
    wanted = {_key(run) for run in study.runs}
    results = [ResultRun(file) for file in sorted(folder.glob("*_seed*.json"))]
    return [result for result in results if (result.content["entry"], result.content["env"], result.content["random_seed"]) in wanted]


def missing_runs(study: Study, folder: Path) -> Sequence[StudyRun]:
    """Return the runs of a study that have no result in a folder."""
    done = {(result.content["entry"], result.content["env"], result.content["random_seed"]) for result in results_of(study, folder)}
    return [run for run in study.runs if _key(run) not in done]


def _key(run: StudyRun) -> tuple[str, str, int]:
    return run.entry, run.env, run.random_seed
