"""Scores of the shipped specs beside published ones: `python -m bench.learning`.

    python -m bench.learning run [NAME …]      train the cells of cells.json that have no result yet (all, or those named)
    python -m bench.learning record FOLDER …   take the result of existing runs
    python -m bench.learning report            write docs/BENCHMARKS.md from the results

A result is one JSON file under docs/benchmarks/, so that a study can be interrupted and continued cell by cell. Each session is one
seed; all of them count.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CELLS: list[dict[str, Any]] = json.loads((ROOT / "bench" / "cells.json").read_text(encoding="utf-8"))
RESULTS = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "BENCHMARKS.md"
INTRO = """# Scores of the shipped specs

Written by `python -m bench.learning report` from the files in `docs/benchmarks/`; `python -m bench.learning run` trains the
missing ones.

The score is `total_reward_ma` at the end, the mean of the last 100 rows of `total_reward`, itself the mean raw return of the last 100
episodes: an average over the last part of training, not only its end. Each seed is one session of a trial with `random_seed` 0; all seeds
count. The interval is the 95 % bootstrap interval of their mean (10,000 resamples), which is too narrow for 4 seeds:
it covers the true mean in about 82 % of cases. Published: SLM Lab v5, 4 seeds, the same
frames, envs and row spacing.

| env | algorithm | frames | spec | seeds | score | 95 % interval | published |
|---|---|---|---|---|---|---|---|
"""


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    draws = np.random.default_rng(0).choice(np.asarray(scores), size=(10_000, len(scores))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def record(folder: Path) -> Path:
    """Write the result file of a run. Raises ValueError where the run has not finished."""
    spec_file = next(folder.glob("*_t0_spec.json"))
    ((name, spec),) = json.loads(spec_file.read_text(encoding="utf-8")).items()
    scores = []
    for path in sorted(folder.glob("info/*_session_df_train.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            last = list(csv.DictReader(file))[-1]
        if int(last["frame"]) < spec["env"]["max_frame"]:
            raise ValueError(f"{path}: ends at frame {last['frame']} of {spec['env']['max_frame']}")
        scores.append(float(last["total_reward_ma"]))
    if len(scores) != spec["meta"]["max_session"]:
        raise ValueError(f"{folder}: {len(scores)} of {spec['meta']['max_session']} sessions")
    result = {"name": name, "frames": spec["env"]["max_frame"], "random_seed": spec["meta"]["random_seed"], "scores": scores}
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = RESULTS / f"{name}.json"
    out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return out


def run(names: Sequence[str]) -> None:
    """Train the cells without a result."""
    import slm_lab

    for cell in CELLS:
        if (names and cell["name"] not in names) or (RESULTS / f"{cell['name']}.json").exists():
            continue
        sets = ["meta.random_seed=0", *([f"meta.max_session={cell['seeds']}"] if "seeds" in cell else [])]
        trial = slm_lab.Trial(slm_lab.load_spec(f"benchmark/{cell['file']}", cell["name"], sets), data_dir=ROOT / "data")
        trial.run()
        assert trial.paths is not None
        record(trial.paths.root)
        report()


def row(cell: dict[str, Any], result: dict[str, Any]) -> str:
    """One line of the table."""
    scores = result["scores"]
    low, high = interval(scores)
    target = "" if cell["target"] is None else f"{cell['target']:.1f}"
    spec = f"[{cell['name']}](../slm_lab/spec/benchmark/{cell['file']})"
    score = f"**{np.mean(scores):.1f}**"
    seeds = f"{len(scores)}{' (fewer)' if 'seeds' in cell else ''}"
    parts = [cell["env"], cell["algorithm"], f"{result['frames']:,}", spec, seeds, score, f"{low:.1f} to {high:.1f}", target]
    return f"| {' | '.join(parts)} |\n"


def report() -> None:
    """Write the page."""
    lines = []
    for cell in CELLS:
        path = RESULTS / f"{cell['name']}.json"
        if path.exists():
            lines.append(row(cell, json.loads(path.read_text(encoding="utf-8"))))
    PAGE.write_text(INTRO + "".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description="Scores of the shipped specs beside published ones.")
    parser.add_argument("command", choices=["run", "record", "report"])
    parser.add_argument("what", nargs="*", help="run: names of cells, none: all; record: run folders")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.what)
    elif arguments.command == "record":
        for folder in arguments.what:
            sys.stdout.write(f"{record(Path(folder))}\n")
        report()
    else:
        report()


if __name__ == "__main__":
    main()
