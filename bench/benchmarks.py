"""Scores of the shipped specs beside published ones: `make benchmarks`, or `python -m bench.benchmarks [-s KEY=VALUE …] [--jobs N]`.

Runs what is missing of the study `benchmarks` (slm_lab/spec/study/benchmarks.json), and writes docs/BENCHMARKS.md. A finished run leaves
one result file in docs/benchmarks/, which is kept with the repository: delete one, and that run is made again. The runs themselves are in
data/benchmarks/. `--page` writes the page alone.
"""

import argparse
from pathlib import Path

from slm_lab.experiment.analysis.study import Row, explanation, study_rows, study_settings
from slm_lab.experiment.plan import Plan, TrialFailed
from slm_lab.experiment.progress import number
from slm_lab.experiment.study.paths import StudyPaths
from slm_lab.experiment.study.result import ResultRun
from slm_lab.experiment.study.study import StudyExperiment
from slm_lab.spec.loader import find_spec_file
from slm_lab.spec.study import Study, entry_label, load_study

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "benchmarks", ROOT / "docs" / "BENCHMARKS.md"
FOLDER = StudyPaths(ROOT / "data" / "benchmarks", "benchmarks", kept=RESULTS)
INTRO = """# Scores of the shipped specs

Written by `make benchmarks` from the results of the study [`benchmarks`](../slm_lab/spec/study/benchmarks.json), which it runs where one is
missing. Each `random_seed` is a run of four Sessions; every Session counts as a seed. Published: SLM Lab v5, 4 seeds, the same frames, envs
and row spacing.

"""


def page(study: Study) -> str:
    """Return the page: a row for each entry that has results."""
    results = [ResultRun(file) for file in sorted(RESULTS.glob("*_seed*.json"))]
    wanted = {(run.entry, run.env, run.random_seed) for run in study.runs}
    results = [one for one in results if (one.content["entry"], one.content["env"], one.content["random_seed"]) in wanted]
    rows = study_rows(study, study_settings(study, results))
    head = ["env", "algorithm", "frames", "spec", "seeds", "score", "95 % interval", "median", "published"]
    lines = [head, ["---"] * len(head), *(_cells(study, row) for row in rows)]
    return INTRO + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{explanation(study, rows)}\n"


def _cells(study: Study, row: Row) -> list[str]:
    run = next(one for one in study.runs if (one.entry, one.env) == (row.entry, row.env))
    entry = next(one for one in study.spec.entries if (entry_label(one), one.env) == (row.entry, row.env))
    file, _, name = entry.spec.rpartition(":")
    link = f"[{name}](../{find_spec_file(file).relative_to(ROOT)})"
    interval = "" if row.score_low is None or row.score_high is None else f"{number(row.score_low)} to {number(row.score_high)}"
    published = "" if row.published is None else f"{number(row.published)} {row.verdict}"
    cells = [row.env, row.entry, f"{run.spec.env.max_frame:,}", link, str(row.seeds), f"**{number(row.score)}**", interval]
    return [*cells, number(row.median), published]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.benchmarks", description="Scores of the shipped specs beside published ones.")
    parser.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="of the study, such as random_seed=[0]")
    parser.add_argument("--jobs", type=int, help="Sessions at a time")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    arguments = parser.parse_args()
    study = load_study("benchmarks.json", "benchmarks", arguments.set)
    if not arguments.page:
        FOLDER.root.mkdir(parents=True, exist_ok=True)
        try:
            StudyExperiment(study, Plan(data_dir=FOLDER.root.parent, jobs=arguments.jobs), paths=FOLDER).run()
        finally:
            PAGE.write_text(page(study), encoding="utf-8")
    else:
        PAGE.write_text(page(study), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (TrialFailed, KeyboardInterrupt) as error:
        raise SystemExit(str(error)) from None
