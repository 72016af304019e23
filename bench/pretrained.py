"""Train the pretrained agents that the package contains: `python -m bench.pretrained [SPEC …]`.

Each entry of the study `benchmarks` with a published score has an agent, unless the agent has more than 150 kB or plays worse than the
score. The agent is named after its spec and written to slm_lab/pretrained/. The run with the best seed of the table is trained again; with
the same versions and processor as in the table, the training gives the same weights. The best checkpoint and the last weights of the best
Session each play 100 episodes; the weights with the higher mean return are kept, together with this return. Existing agents are only
replaced if their specs are given.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from bench.studies import STUDIES, results_of, study_of
from slm_lab.experiment.deploy.card import model_card
from slm_lab.experiment.deploy.enjoy import EnjoyOptions, enjoy
from slm_lab.experiment.deploy.facts import policy_facts
from slm_lab.experiment.deploy.load import load_trained
from slm_lab.experiment.deploy.register import public_spec
from slm_lab.experiment.files import tensor_file
from slm_lab.experiment.files.find import CheckpointName, Training
from slm_lab.experiment.files.named_model import CARD, PRETRAINED, SPEC, WEIGHTS, model_in
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.report.study_report import EntryResult, study_rows, study_settings
from slm_lab.experiment.run.trial import Trial
from slm_lab.lib.files import replace_file
from slm_lab.spec.models.study import StudyRun

CHECKPOINTS: tuple[CheckpointName, ...] = ("best", "last")
MAX_BYTES = 150_000
"""Maximum size of an agent's weights."""
EPISODES = 100
LAST_ROWS = 20
"""Number of last rows of a result file whose mean return determines the best seed. (A result file has at most 100 rows.)"""


class Best(NamedTuple):
    """The best seed of an entry of the study."""

    run: StudyRun
    session: int
    row: EntryResult
    """The row of the entry in the table."""


def best_seeds() -> Iterator[Best]:
    """Yield the best seed of each entry with a published score."""
    study = study_of("benchmarks")
    results = results_of(study, STUDIES["benchmarks"].results)
    for row in study_rows(study, study_settings(study, results)):
        contents = [result.content for result in results if (result.content["entry"], result.content["env"]) == (row.entry, row.env)]
        scores = {
            (content["random_seed"], int(session)): fmean(table["total_reward"][-LAST_ROWS:])
            for content in contents
            for session, table in content["train"].items()
        }
        if row.published is not None and scores:
            seed, session = max(scores, key=scores.__getitem__)
            run = next(run for run in study.runs if (run.entry, run.env, run.random_seed) == (row.entry, row.env, seed))
            yield Best(run, session, row)


def write_agent(best: Best) -> str:
    """Train the run of a seed and write its agent; return a line that describes the agent, or why it is not written."""
    name = best.run.spec.name
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Trial(best.run.spec, data_dir=folder).run().paths)
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


def _returns(training: Training, which: CheckpointName, session: int) -> list[float]:
    """Play EPISODES episodes with a checkpoint, and return their returns."""
    options = EnjoyOptions(which=which, session=session, episodes=EPISODES)
    return enjoy(training, options, Plan(data_dir=training.paths.root.parent)).returns


def _mean(returns: Sequence[float]) -> dict[str, Any]:
    """Return the entries of a checkpoint that contain its mean return."""
    error = stdev(returns) / math.sqrt(len(returns))
    return {"mode": "eval", "current_return": fmean(returns), "current_return_se": error, "current_epi": len(returns)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pretrained", description="Train the pretrained agents.")
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="names of specs (default: all specs without an agent)")
    chosen = parser.parse_args().specs
    best_of = {best.run.spec.name: best for best in best_seeds()}
    if wrong := sorted(set(chosen) - best_of.keys()):
        parser.error(f"unknown spec {', '.join(wrong)}; expected some of {', '.join(best_of)}")
    for name, best in best_of.items():
        if name in chosen or (not chosen and model_in(PRETRAINED / name) is None):
            sys.stdout.write(f"{write_agent(best)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
