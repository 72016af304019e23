"""Tests of the command diff on hand-made runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab import cli
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.report.row_difference import compare_rows
from slm_lab.experiment.report.run import load_run
from slm_lab.experiment.report.run_difference import (
    RunDifference,
    difference_json,
    difference_sentence,
    difference_text,
    needed_seeds,
    run_difference,
)

COLUMNS = ("frame", "wall_t", "opt_step", "current_return", "loss")


def made(
    folder: Path,
    sessions: Sequence[Sequence[float]],
    algorithm: dict[str, Any] | None = None,
    start: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Path:
    """Return a run's folder with a row for each return; the loss is a tenth of the return."""
    folder.mkdir(parents=True)
    paths = RunPaths(folder, "a2c")
    paths.make_dirs()
    body = {
        "agent": {"algorithm": {"name": "ActorCritic", "gamma": 0.99, **(algorithm or {})}, "net": {"type": "MLPNet"}},
        "env": {"name": "CartPole-v1", "max_frame": 300, **sections.get("env", {})},
        "meta": {
            "random_seed": 3,
            "max_session": len(sessions),
            **sections.get("meta", {}),
            "run": [{"began": folder.name, **(start or {})}],
        },
    }
    paths.spec.write_text(json.dumps({"a2c": body}))
    paths.trial_metrics().write_text("{}")
    for index, returns in enumerate(sessions):
        rows = [f"{100 * i},{len(folder.name) * i},{10 * i},{value},{value / 10}" for i, value in enumerate(returns, 1)]
        paths.session_df(index).write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    return folder


def found(*folders: Path) -> RunDifference:
    return run_difference(*map(load_run, folders))


def test_keys_are_separate_from_versions_and_machine(tmp_path: Path) -> None:
    """The seed counts as a key; the time and the command of the start are not listed as differences."""
    versions = {"torch": "2.4.0", "numpy": "2.0.0"}
    a = made(tmp_path / "a", [[1, 2]], {"gamma": 0.9}, {"versions": versions, "git": "f" * 40, "host": {"name": "one"}})
    later = {"versions": {**versions, "torch": "2.5.0"}, "git": f"{'f' * 40}+", "host": {"name": "one"}, "command": ["x"]}
    b = made(tmp_path / "b", [[1, 2]], {"lam": 0.9}, later, meta={"random_seed": 4})
    content = difference_json(found(a, b))
    assert [(one["key"], one["a"], one["b"]) for one in content["keys"]] == [
        ("agent.algorithm.gamma", 0.9, 0.99),
        ("agent.algorithm.lam", None, 0.9),
        ("meta.random_seed", 3, 4),
    ]
    assert [(one["key"], one["a"], one["b"]) for one in content["records"]] == [
        ("git", "f" * 40, f"{'f' * 40}+"),
        ("versions.torch", "2.4.0", "2.5.0"),
    ]


def test_inexact_continuations_are_named(tmp_path: Path) -> None:
    exact, changed = {"frame": 100, "exact": True, "lost": []}, {"frame": 200, "exact": False, "lost": ["env.max_frame was changed"]}
    a = made(tmp_path / "a", [[1, 2, 3]] * 2, start={"continues": {"0": exact, "1": changed}})
    difference = found(a, made(tmp_path / "b", [[1, 2, 3]] * 2, start={"continues": {"0": exact}}))
    assert difference_json(difference)["inexact_continuations"] == {"a": [{"frame": 200, "reason": "env.max_frame was changed"}], "b": []}
    assert "A was continued at frame 200, but not exactly: env.max_frame was changed\n" in difference_text(difference)
    assert "B was continued" not in difference_text(difference)


def test_the_first_row_that_differs(tmp_path: Path) -> None:
    """wall_t, which differs in every row, is not a result; session 1 diverges before session 0."""
    one, other = made(tmp_path / "a", [[1, 2, 3], [4, 5, 6]]), made(tmp_path / "longer", [[1, 2, 9], [4, 7, 8]])
    result = found(one, other)
    first = result.first_table_difference
    assert first is not None
    assert first.session == 1
    assert first.rows.first is not None
    assert first.rows.first._asdict() == {"frame": 200, "row": 2, "column": "current_return", "a": "5", "b": "7"}
    assert [(table.rows.equal, table.rows.columns) for table in result.tables] == [
        (2, ("current_return", "loss")),
        (1, ("current_return", "loss")),
    ]
    assert not result.rows_equal


def test_equal_rows(tmp_path: Path) -> None:
    result = found(made(tmp_path / "a", [[1, 2], [3, 4]]), made(tmp_path / "other", [[1, 2], [3, 4]]))
    text = difference_text(result)
    assert (result.rows_equal, result.keys, result.records) == (True, [], [])
    assert "rows are equal: 4 rows in 2 tables" in text
    assert "The returns are equal in each of 2 seeds" in text


def test_rows_of_the_same_frame_are_compared() -> None:
    """Equal numbers written with other digits are equal; rows and columns that one table lacks are listed."""
    one = {"frame": ["100", "200", "300"], "loss": ["1.0", "", "nan"], "fps": ["1", "2", "3"], "old": ["1", "1", "1"]}
    other = {"frame": ["200", "300", "400"], "loss": ["", "nan", "5"], "fps": ["7", "7", "7"]}
    rows = compare_rows(one, other)
    assert (rows.rows, rows.first, rows.only, rows.only_columns, rows.rows_equal) == (2, None, ((100,), (400,)), (("old",), ()), False)
    rows = compare_rows({"frame": ["1", "2"], "loss": ["1", "2"]}, {"frame": ["1", "2"], "loss": ["1.0", "2.5"]})
    assert (rows.equal, rows.first and rows.first[-2:]) == (1, ("2", "2.5"))
    assert compare_rows(one, other, after=200, up_to=300).rows == 1


def test_a_difference_of_pairs(tmp_path: Path) -> None:
    """Paired by seed, the differences −2, −4, −3 are far from 0, although the returns of the seeds are far apart."""
    result = found(made(tmp_path / "a", [[10], [50], [90]]), made(tmp_path / "b", [[12], [54], [93]]))
    assert result.returns is not None
    one = result.returns.difference
    assert one is not None
    half = 4.30265273 * 1.0 / 3**0.5
    assert (result.returns.paired, one.value, one.low, one.high) == (True, -3.0, pytest.approx(-3 - half), pytest.approx(-3 + half))
    assert difference_sentence(result.returns).startswith("Difference shown with 3 seeds: A − B = −3 (95 %:")


def test_an_evaluation_is_not_compared_with_training_episodes(tmp_path: Path) -> None:
    a, b = (made(tmp_path / name, [[1, 2, 4], [1, 2, 6]]) for name in "ab")
    assert difference_json(found(a, b))["returns"]["metric_reason"] is None
    for session in range(2):
        RunPaths(a, "a2c").session_df(session, "eval").write_text("frame,total_reward\n300,70\n")
    returns = difference_json(result := found(a, b))["returns"]
    assert (returns["metric"], returns["difference"]["value"]) == ("training_return", 0)
    reason = "The current returns at the end differ in kind (A: evaluation with deterministic actions; B: training episodes)"
    assert returns["metric_reason"].startswith(reason)
    assert reason in " ".join(difference_text(result).split())


def test_other_seeds_are_no_pairs(tmp_path: Path) -> None:
    result = found(made(tmp_path / "a", [[10], [50], [90]]), made(tmp_path / "b", [[12], [54], [93]], meta={"random_seed": 9}))
    assert result.returns is not None
    assert (result.returns.paired, result.returns.difference_shown) == (False, False)
    text = difference_sentence(result.returns)
    assert text.startswith("No difference shown with 3 seeds: A − B = −3 (95 %:")
    assert text.endswith("more than 1,000 seeds would be needed to show a difference of this size")


def test_intervals_stay_within_the_range_of_returns(tmp_path: Path) -> None:
    """In CartPole the range is 0 to 500, so a difference is at most 500."""
    result = found(made(tmp_path / "a", [[10], [490]]), made(tmp_path / "b", [[20], [480]], meta={"random_seed": 9}))
    assert result.returns is not None
    assert result.returns.difference is not None
    assert (result.returns.difference.low, result.returns.difference.high) == (-500, 500)
    assert "A  250 [0, 500]" in difference_text(result)


@pytest.mark.parametrize("paired", [True, False])
def test_the_needed_seeds_show_the_difference_in_four_of_five_cases(paired: bool) -> None:
    """In simulation, the interval of `estimate_difference` excludes 0 in about 80 % of samples with that many seeds."""
    from slm_lab.experiment.report.metrics import estimate_difference

    rng = np.random.default_rng(0)
    gap, base = np.array([1.0, 3.0, 2.0, 2.0]), np.array([0.0, 5.0, 9.0, 2.0]) if paired else np.array([0.0, 2.0, 1.0, 1.0])
    count = needed_seeds(list(base + gap), list(base), paired=paired)
    assert count is not None
    spread = float(np.std(gap, ddof=1)) if paired else 1.0
    shown = 0
    for _ in range(600):
        pairs = rng.normal(2.0, spread, count) if paired else rng.normal(2.0, float(np.std(base + gap, ddof=1)), count)
        others = np.zeros(count) if paired else rng.normal(0.0, float(np.std(base, ddof=1)), count)
        one = estimate_difference(list(pairs), list(others), paired=paired)
        shown += one is not None and one.low is not None and one.low > 0
    assert 0.7 < shown / 600 < 0.95, (count, shown / 600)


def test_without_an_interval_or_a_difference(tmp_path: Path) -> None:
    assert (needed_seeds([1.0], [2.0, 3.0], paired=False), needed_seeds([1.0, 2.0], [2.0, 1.0], paired=True)) == (None, None)
    result = found(made(tmp_path / "a", [[10]]), made(tmp_path / "b", [[12]]))
    assert result.returns is not None
    assert result.returns.difference_shown is None
    assert "without an interval" in difference_sentence(result.returns)


def test_runs_of_several_envs_and_lengths(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", [[1, 2], [3, 4]]), made(tmp_path / "b", [[1, 2, 3]], env={"name": "Acrobot-v1"})
    result = found(a, b)
    assert (result.returns, result.only, result.tables[0].rows.only) == (None, ([1], []), ((), (300,)))
    text = difference_text(result)
    assert "1 more row in B" in text
    assert "only in A: session 1" in text
    assert "the envs are CartPole-v1 and Acrobot-v1" in text


def test_the_text_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    long = {"entropy_coef_spec": {"name": "linear_decay", "start_val": 0.1, "end_val": [0] * 50}, "an_even_longer_name_of_a_key_" * 3: 1}
    a, b = (
        made(Path("a"), [[1, 2]] * 9, long, {"host": {"system": "Linux" * 30}}),
        made(Path("b"), [[3, 2]] * 9, start={"host": {"system": "x"}}),
    )
    lines = difference_text(found(a, b)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("…") for line in lines)
    assert any("more key" in line for line in lines)


def test_a_damaged_table_is_named_and_has_no_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = made(tmp_path / "a", [[1, 2], [3, 4]]), made(tmp_path / "b", [[1, 2], [3, 4]])
    table = RunPaths(a, "a2c").session_df(1)
    table.write_bytes(b"frame,\rloss\n1,\r2\n")
    assert cli.main(["diff", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert table.name in caplog.text
    assert "session 0: 2 rows are equal" in printed
    assert "2 more rows in B" in printed


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made(tmp_path / "a_2026_01_01_000000", [[1, 2]]), made(tmp_path / "a_2026_01_02_000000", [[1, float("nan")]])
    assert cli.main(["diff", str(a), "latest", "--json", "--data-dir", str(tmp_path)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["b"], content["rows_equal"]) == (str(b), False)
    for words in (["diff"], ["diff", str(a)], ["diff", str(a), str(b), str(a)], ["diff", str(a), str(a)], ["diff", str(a), "nowhere"]):
        assert cli.main([*words, "--data-dir", str(tmp_path)]) == 2
        printed = capsys.readouterr()
        assert (printed.out, "Traceback" in printed.err) == ("", False)
