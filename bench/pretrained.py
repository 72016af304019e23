"""Write the pretrained agents that the package contains: `python -m bench.pretrained [NAME …]`.

One agent is written for each entry and env with a published score in the studies WITH_AGENTS, except agents whose weights are larger than
150 kB or whose mean return is lower than the score of slm_lab in the table. An agent is named after the spec of its run and written to
slm_lab/pretrained/. It comes from the run with the best seed in the table, if the folder of this run is in data/STUDY; otherwise the run is
trained again. With the same versions and processor as in the table, the training gives the same weights. The best checkpoint and the last
weights of the best Session each play 100 episodes; the weights with the higher mean return are kept, together with this return. An existing
agent is replaced only if its name is given.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from bench.studies import ROOT, STUDIES, results_of, study_of
from slm_lab.experiment.deploy.card import model_card
from slm_lab.experiment.deploy.enjoy import EnjoyOptions, enjoy
from slm_lab.experiment.deploy.facts import policy_facts
from slm_lab.experiment.deploy.load import load_trained
from slm_lab.experiment.deploy.register import public_spec
from slm_lab.experiment.files import tensor_file
from slm_lab.experiment.files.find import CheckpointName, Training
from slm_lab.experiment.files.named_model import CARD, PRETRAINED, SPEC, WEIGHTS, model_in
from slm_lab.experiment.files.paths import RunPaths, StudyRunFolder
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.study_report import EntryResult, study_rows, study_settings
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.experiment.run.trial import Trial
from slm_lab.lib.files import replace_file
from slm_lab.spec.models.study import StudyRun

WITH_AGENTS = ("benchmarks", "mujoco")
"""The studies whose tables have agents."""
CHECKPOINTS: tuple[CheckpointName, ...] = ("best", "last")
MAX_BYTES = 150_000
"""Maximum size of an agent's weights."""
EPISODES = 100
LAST_ROWS = 20
"""Number of last rows of a result file whose mean return determines the best seed. (A result file has at most 100 rows.)"""


class Best(NamedTuple):
    """The best seed of an entry of a study in an env."""

    run: StudyRun
    session: int
    folder: Path
    """The folder of the run in its study. It is missing if it was deleted, or if the run was trained on another machine."""
    row: EntryResult
    """The row of the entry in the table."""

    @property
    def name(self) -> str:
        """Name of the agent."""
        return self.run.spec.name


def best_seeds() -> dict[str, Best]:
    """Return name of the agent → best seed, for each entry and env with a published score."""
    return {best.name: best for name in WITH_AGENTS for best in _best_seeds(name)}


def _best_seeds(name: str) -> Iterator[Best]:
    study = study_of(name)
    settings = study_settings(study, results_of(study, STUDIES[name].results))
    for row in study_rows(study, settings):
        candidates = [
            (fmean(table["total_reward"][-LAST_ROWS:]), int(session), result)
            for result in settings[row.env, row.entry].runs
            if isinstance(result, ResultRun)
            for session, table in result.content["train"].items()
        ]
        if row.published is not None and candidates:
            _, session, result = max(candidates, key=itemgetter(0))
            run = next(run for run in study.runs if (run.entry, run.env, run.random_seed) == (row.entry, row.env, result.random_seed))
            yield Best(run, session, ROOT / "data" / name / "runs" / result.paths.root.stem, row)


def write_agent(best: Best) -> str:
    """Write the agent of a seed; return a line that describes the agent, or why it is not written."""
    name = best.name
    with tempfile.TemporaryDirectory() as folder:
        run = finished_run(best.folder)
        if run is None:
            sys.stderr.write(f"{name}: {best.folder} has no finished run; the run is trained again\n")
            run = Trial(best.run.spec, data_dir=folder).run().paths
        training = Training(run)
        played = {which: _returns(training, which, best.session) for which in CHECKPOINTS}
        which = max(CHECKPOINTS, key=lambda each: fmean(played[each]))
        agent = load_trained(training, which, best.session)
        facts = policy_facts(training, {**agent.saved, "frame": agent.saved["global_frame"], **_mean(played[which])}, agent.path)
        about = {"source": facts.source, "registered": datetime.now().astimezone().isoformat(timespec="seconds")}
        weights = Path(folder) / WEIGHTS
        tensor_file.save(weights, {**facts.saved, **about})
        size, score = weights.stat().st_size, best.row.score
        described = f"{best.run.name}, session {best.session}, {which}: {fmean(played[which]):.4g}, {size:,} bytes"
        if size > MAX_BYTES or (score is not None and fmean(played[which]) < score.value):
            return f"{name}: not written: {described}"
        (PRETRAINED / name).mkdir(parents=True, exist_ok=True)
        replace_file(PRETRAINED / name / CARD, model_card(name, facts, agent, None, is_named=True).encode())
        replace_file(PRETRAINED / name / WEIGHTS, weights.read_bytes())
        replace_file(PRETRAINED / name / SPEC, public_spec(training.spec_file))  # last: an agent without its spec is trained again
    return f"{name}: {described}"


def finished_run(folder: Path) -> RunPaths | None:
    """Return the paths of the finished run in `folder`, or None if `folder` contains no finished run or does not exist.

    Args: folder: folder of one run of a study.
    """
    runs = StudyRunFolder(folder).run_folders() if folder.is_dir() else []
    return next((paths for paths in runs if Run(paths).status == "done"), None)


def _returns(training: Training, which: CheckpointName, session: int) -> list[float]:
    """Play EPISODES episodes with a checkpoint, and return their returns."""
    options = EnjoyOptions(which=which, session=session, episodes=EPISODES)
    return enjoy(training, options, Plan(data_dir=training.paths.root.parent)).returns


def _mean(returns: Sequence[float]) -> dict[str, Any]:
    """Return the entries of a checkpoint that contain its mean return."""
    error = stdev(returns) / math.sqrt(len(returns))
    return {"mode": "eval", "current_return": fmean(returns), "current_return_se": error, "current_epi": len(returns)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pretrained", description="Write the pretrained agents.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of agents (default: all agents that do not exist)")
    chosen = parser.parse_args().names
    best_of = best_seeds()
    if wrong := sorted(set(chosen) - best_of.keys()):
        parser.error(f"unknown agent {', '.join(wrong)}; expected some of {', '.join(best_of)}")
    for name, best in best_of.items():
        if name in chosen or (not chosen and model_in(PRETRAINED / name) is None):
            sys.stdout.write(f"{write_agent(best)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
