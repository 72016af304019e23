"""Write the tables and figures of the documentation from studies: `make benchmarks`, or `python -m bench.benchmarks [NAME …]`.

The studies are listed in bench/studies.py; their files are in slm_lab/spec/study/. The command first trains the runs that have no result
yet, including the runs of other libraries that belong to the studies (bench/peers.py). Then it writes docs/BENCHMARKS.md with its figures
(bench/score_page.py), the short tables of scores in README.md and docs/algorithms.md, and the tables and figures of docs/hogwild.md,
docs/sync_async.md and docs/learning_curves.md.

A finished run writes one result file, which is kept in the repository (docs/benchmarks/, docs/hogwild/results/, docs/sync_async/results/,
docs/learning_curves/NAME/). If this file is deleted, the run is repeated. The folders of the runs are in data/NAME/; an interrupted run is
continued. With `--pages`, the command writes the pages from the existing results without training.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.lower_scores import lower_scores_text
from bench.peers import PEERS, run_peers
from bench.score_page import markdown, tables_text, training_facts, write_figures
from bench.studies import DOCS, ROOT, STUDIES, TABLES, results_of, study_of
from slm_lab.experiment.files.paths import StudyPaths
from slm_lab.experiment.plan import Plan, TrialFailed, UserError
from slm_lab.experiment.report.progress import format_number
from slm_lab.experiment.report.render_png import PNGRenderer
from slm_lab.experiment.report.study_report import (
    EntryResult,
    bullets,
    explanations,
    general_explanations,
    markdown_table,
    study_figures,
    study_rows,
    study_settings,
    with_usable_metric,
)
from slm_lab.experiment.run.study.study import StudyExperiment
from slm_lab.spec.load.files import find_spec_file
from slm_lab.spec.load.study_file import load_study
from slm_lab.spec.models.study import Study
from slm_lab.spec.report import SpecError

INTRO = """# Scores of the shipped specs

`make benchmarks` trains the runs that have no result yet, and writes this page from the results of all runs. A seed is one independent
training run.

"""
CLASSIC = """## Classic control and Box2D

The scores in this table are from the study [`benchmarks`](../slm_lab/spec/study/benchmarks.json). Each `random_seed` is a run with four
Sessions, and each Session counts as one seed. The published scores are from SLM Lab v5, with 4 seeds and the same frames, envs and spacing
of table rows. For many specs, the package contains a [pretrained agent](commands.md#pretrained-agents) from one of the best of these seeds;
for example, `slm-lab enjoy ppo_cartpole` plays the agent of `ppo_cartpole`.

Settings are chosen with seeds 100 to 999. The settings of `reinforce_cartpole` and `sac_acrobot` were changed because some
seeds of this table had low scores: some runs of REINFORCE reached a return of 500 in CartPole but did not keep it, and one of 16 seeds of
SAC without prioritised replay never reached the goal of Acrobot. The settings of `ppo_acrobot` were changed because its score in this table
was -81.95, lower than the published score.

"""
TABLES_INTRO = """The following tables are from the studies in [`tables.json`](../slm_lab/spec/study/tables.json). Settings are chosen
with seeds 100 to 999; the text of a table names the settings that were changed because of reported seeds.

"""
FIGURES = {
    "a3c_vs_a2c": {
        "returns": "returns_vs_global_frames",
        "training": "new_returns_vs_global_frames",
        "returns_seconds": "returns_vs_wall_t",
        "grad_norm": "grad_norm_vs_global_frames",
        "variance": "variance_vs_global_frames",
    },
    "sync_async": {
        "returns": "returns_vs_frames_LunarLander-v3",
        "lag": "lag_mean_vs_frames_LunarLander-v3",
    },
    "pqn_cartpole": {"pqn_cartpole": "returns_vs_wall_t"},
    "pqn_acrobot": {"pqn_acrobot": "returns_vs_wall_t"},
    "pqn_lunar": {"pqn_lunar": "returns_vs_wall_t"},
    "rainbow_lunar": {"rainbow_lunar": "returns_vs_frames"},
    "continuous_control": {"pendulum": "returns_vs_frames_Pendulum-v1", "halfcheetah": "returns_vs_frames_HalfCheetah-v5"},
    "recurrent_sac": {"recurrent_sac": "returns_vs_frames"},
    "hindsight": {"hindsight": "returns_vs_frames"},
    "fetch_reach": {"fetch_reach": "returns_vs_frames"},
    "simple_spread": {"simple_spread": "returns_vs_frames"},
    "behaviour_cloning": {},
    "demonstrations": {"demonstrations": "returns_vs_frames"},
    "metaworld": {"metaworld": "returns_vs_frames"},
    "jumanji": {"snake": "returns_vs_frames_Jumanji_Snake-v1", "game2048": "returns_vs_frames_Jumanji_Game2048-v1"},
}
"""Study → name of the image file in the folder of its page → name of the figure."""
SHORT_TABLES = {
    ROOT / "README.md": ("PPO", "DDQN + PER", "SAC", "CrossQ"),
    DOCS / "algorithms.md": ("REINFORCE", "SARSA", "A2C (GAE)", "A2C (n-step)", "PPO", "DQN", "DDQN + PER", "SAC", "CrossQ"),
}
"""Page with a short table of scores → the algorithms in its rows."""


def scores(study: Study, rows: Sequence[EntryResult]) -> str:
    """Return the text of docs/BENCHMARKS.md. The first table has a row for each entry that has results."""
    head = ["env", "algorithm", "frames", "spec", "seeds", "score", "95 % interval", "median", "published"]
    classic = f"{CLASSIC}{markdown([head, *(_cells(study, row) for row in rows)])}\n\n{bullets(explanations(study, head))}\n"
    facts = training_facts(results_of(study, STUDIES["benchmarks"].results))
    return f"{INTRO}{classic}\n{facts}\n\n{TABLES_INTRO}{tables_text()}\n{lower_scores_text()}"


def write_scores(study: Study, folder: Path) -> None:
    """Write docs/BENCHMARKS.md and the short tables of other pages."""
    rows = rows_of(study, folder)
    (DOCS / "BENCHMARKS.md").write_text(scores(study, rows), encoding="utf-8")
    for page in SHORT_TABLES:
        page.write_text(with_short_table(page, rows), encoding="utf-8")


def rows_of(study: Study, folder: Path) -> list[EntryResult]:
    """Return the rows of a study's table."""
    return study_rows(study, study_settings(study, results_of(study, folder)))


def with_short_table(page: Path, rows: Sequence[EntryResult]) -> str:
    """Return the content of a page with an updated short table.

    The table has the score of each algorithm in each env, with the published score in brackets.
    """
    row_of = {(row.entry, row.env): row for row in rows}
    envs = list(dict.fromkeys(row.env for row in rows if row.published is not None))
    shown = [(algorithm, [row_of.get((algorithm, env)) for env in envs]) for algorithm in SHORT_TABLES[page]]
    table = markdown([["", *envs], *([algorithm, *map(_short_cell, cells)] for algorithm, cells in shown)])
    seeds = sorted({row.seeds for _, cells in shown for row in cells if row is not None})
    over = " to ".join(map(str, dict.fromkeys(seeds[:1] + seeds[-1:])))
    note = (
        f"Each score is the mean over {over or 0} seeds. The score that SLM Lab v5 published for the same number of frames is in brackets."
    )
    return _between("scores", f"{table}\n\n{note}\n", page)


def _short_cell(row: EntryResult | None) -> str:
    """Return the score of a row with the published score in brackets; "" without a row."""
    if row is None:
        return ""
    score = format_number(row.score and row.score.value)
    return score if row.published is None else f"{score} ({format_number(row.published)})"


def _cells(study: Study, row: EntryResult) -> list[str]:
    """Return the cells of a row of docs/BENCHMARKS.md."""
    run = next(one for one in study.runs if (one.entry, one.env) == (row.entry, row.env))
    entry = next(one for one in study.spec.entries if (one.title, one.env) == (row.entry, row.env))
    file, _, name = entry.spec.rpartition(":")
    link = f"[{name}](../{find_spec_file(file).relative_to(ROOT)})"
    score, low, high = row.score or (None, None, None)
    interval = "" if low is None or high is None else f"{format_number(low)} to {format_number(high)}"
    published = "" if row.published is None else f"{format_number(row.published)} {row.verdict}"
    cells = [row.env, row.entry, f"{run.spec.env.max_frame:,}", link, str(row.seeds), f"**{format_number(score)}**", interval]
    return [*cells, format_number(row.median), published]


def with_table(study: Study, folder: Path) -> str:
    """Return the text of the page that belongs to a folder of results, with an updated table and facts about the training of the runs.

    If the page has a list that explains the columns of all tables, only the explanations that belong to the study follow the table.
    """
    page, results = _page(folder), results_of(study, folder)
    settings = study_settings(study, results)
    shown, reason = with_usable_metric(study, settings)
    table = markdown_table(shown, study_rows(shown, settings), reason, general=not _has_column_texts(page))
    return _between(f"study {study.name}", f"{table.rstrip()}\n\n{training_facts(results)}\n", page)


def _has_column_texts(page: Path) -> bool:
    return "<!-- columns -->" in page.read_text(encoding="utf-8")


def with_column_texts(page: Path) -> str:
    """Return the text of a page with an updated list that explains the columns of all tables of the page."""
    studies = [study_of(name) for name, kept in STUDIES.items() if _page(kept.results) == page and any(kept.results.glob("*_seed*.json"))]
    columns = ["score", "interquartile mean", "gradient norm variance"]
    columns += ["difference"] if any(study.spec.baseline is not None for study in studies) else []
    columns += ["solved"] if any(study.solve_score(env) is not None for study in studies for env in study.envs) else []
    columns += (
        ["published"] if any(study.published_score(run.entry, run.env) is not None for study in studies for run in study.runs) else []
    )
    return _between("columns", f"{bullets(general_explanations(studies, columns).values())}\n", page)


def _between(name: str, text: str, page: Path) -> str:
    """Return the content of a page with `text` inserted between the markers `<!-- name -->` and `<!-- end of … -->`."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name.partition(' ')[0]} -->"
    content, count = re.subn(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page}: expected one place between {begin.strip()} and {end}; found {count}")
    return content


def _page(folder: Path) -> Path:
    """Return docs/NAME.md for docs/NAME/results."""
    return folder.parent.with_suffix(".md")


def write_page(study: Study, folder: Path) -> None:
    """Write the table and figures of the page that belongs to a folder of results, if there are results and the page has a section."""
    if not results_of(study, folder):
        return
    if f"<!-- study {study.name} -->" not in _page(folder).read_text(encoding="utf-8"):
        sys.stderr.write(f"{_page(folder)} has no section for the study: add <!-- study {study.name} --> and <!-- end of study -->\n")
        return
    _page(folder).write_text(with_table(study, folder), encoding="utf-8")
    if _has_column_texts(_page(folder)):
        _page(folder).write_text(with_column_texts(_page(folder)), encoding="utf-8")
    figures, renderer = study_figures(study, study_settings(study, results_of(study, folder))), PNGRenderer()
    for name, figure in FIGURES[study.name].items():
        if figure in figures:  # missing if no run has the data of the figure
            (folder.parent / f"{name}.png").write_bytes(renderer.render(figures[figure]))


def write_tables(study: Study, folder: Path) -> None:
    """Write docs/BENCHMARKS.md, and the figures of a study."""
    write_figures(study.name)
    write_scores(study_of("benchmarks"), STUDIES["benchmarks"].results)


def writer(name: str) -> Callable[[Study, Path], None]:
    """Return the function that writes the pages of a study from its results."""
    if name == "benchmarks":
        return write_scores
    return write_tables if name in TABLES else write_page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.benchmarks", description="Write the tables and figures of studies.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"studies: {', '.join(STUDIES)} (default: all)")
    parser.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="key of the study, such as random_seed=[0]")
    parser.add_argument("--jobs", type=int, help="maximum number of concurrent Sessions")
    parser.add_argument("--pages", action="store_true", help="write the pages without training")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in STUDIES:
            parser.error(f"unknown study '{name}'; expected one of {', '.join(STUDIES)}")
    for name in arguments.names or STUDIES:
        kept = STUDIES[name]
        study = load_study(kept.file, name, arguments.set)
        folder = StudyPaths(ROOT / "data" / name, name, results_folder=kept.results)
        try:
            if not arguments.pages:
                for needed in (folder.root, kept.results):
                    needed.mkdir(parents=True, exist_ok=True)
                StudyExperiment(study, Plan(data_dir=folder.root.parent, jobs=arguments.jobs), paths=folder).run()
                if name in PEERS:
                    run_peers(name, arguments.set)
        finally:
            writer(name)(study, kept.results)


if __name__ == "__main__":
    try:
        main()
    except (TrialFailed, UserError, SpecError, KeyboardInterrupt) as error:
        raise SystemExit(str(error)) from None
