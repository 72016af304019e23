"""Tests of the command compare on hand-made tables."""

from __future__ import annotations

import copy
import csv
import errno
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab import cli
from slm_lab.experiment.files.lock import RunLock
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.compare import differing_keys, group_runs, read_settings
from slm_lab.experiment.report.compare_report import (
    AXES,
    METRICS,
    compare,
    comparison_graphs,
    estimate_text,
    explanations,
    settings_table,
    write_comparison,
)
from slm_lab.experiment.report.metrics import Estimate, Median, estimate_mean
from slm_lab.experiment.report.pairwise import Comparison
from slm_lab.experiment.report.render_png import PNGRenderer
from slm_lab.experiment.report.run import load_run
from slm_lab.experiment.report.seed_result import SeedResult
from slm_lab.experiment.report.setting import Setting, comparable_metric, summarize
from slm_lab.experiment.training.observers.base import COLUMNS
from slm_lab.lib.text import format_table
from slm_lab.spec.load.loader import dump_spec, load_spec

Rows = Sequence[float | str]


def make_run(
    folder: Path,
    sessions: Sequence[Rows],
    name: str = "a2c",
    shared: bool = False,
    failed: int = 0,
    spec: dict[str, Any] | None = None,
    norms: Sequence[float] = (),
    new: Sequence[Rows] = (),
) -> Path:
    """Write the files of a run to `folder` and return `folder`. Without `new`, the rows are those of SLM Lab, without return_new.

    Row i of a Session has frame 100 i, wall_t 2 i and opt_step 10 i. If Sessions share a net, row i of Session s is at global frame 200 i +
    50 s. With `new`, the rows are those of this package, and each row has 5 new episodes with the mean return in `new`.
    """
    folder.mkdir(parents=True)
    paths = RunPaths(folder, name)
    paths.make_dirs()
    meta = {"random_seed": sum(str(folder).encode())}
    body = {"env": {"name": "CartPole-v1"}, "agent": {"net": {"lr": 0.1}}, "meta": meta} | (spec or {})
    paths.spec.write_text(json.dumps({name: body}))
    paths.trial_spec().write_text(json.dumps({name: body}))
    short = [s for s, returns in enumerate(sessions) if 100 * len(returns) < body["env"].get("max_frame", 0)]
    paths.trial_metrics().write_text(json.dumps({"failed": failed} if failed else {"status": "stopped"} if short else {}))
    for s in short:
        paths.session_metrics(s).write_text('{"status": "stopped"}')
    for s, returns in enumerate(sessions):
        columns = [
            *(name for name in COLUMNS if new or name not in ("epi_new", "return_new")),
            *(["global_frame", *(["worker_reward"] if new else [])] if shared else []),
        ]
        lines = [",".join(columns)]
        for i, value in enumerate(returns, 1):
            cells: dict[str, Any] = {"frame": 100 * i, "wall_t": 2 * i, "opt_step": 10 * i, "total_reward": value, "current_return": value}
            cells |= {"epi_new": 5, "return_new": new[s][i - 1]} if new else {}
            cells |= {"global_frame": 200 * i + 50 * s, "grad_norm": norms[s] if norms else 1.0}
            lines.append(",".join(str(cells.get(column, "")) for column in columns))
        paths.session_df(s).write_text("\n".join(lines) + "\n")
    return folder


def only(*words: object) -> Setting:
    (setting,) = read_settings([str(word) for word in words])
    return setting


def test_policies_of_a_session_are_one_seed(tmp_path: Path) -> None:
    body = {"meta": {"sampler": {"num_policies": 2}}}
    setting = only(make_run(tmp_path / "a", [[10, 50], [20, 30], [30, 90], [50, 50]], spec=body))
    summary = summarize(setting, 90)
    assert (summary.seeds, summary.sessions, summary.solved, setting.count_text()) == (2, 2, 1, "2 seeds with 2 policies each")
    assert summary.final_return is not None
    assert summary.final_return.value == (40 + 70) / 2
    assert summary.opt_steps_per_second == 10  # 5 of each policy
    assert only(make_run(tmp_path / "b", [[1, 2], [1, 2]], name="b", spec={"meta": {"sampler": None}})).count_text() == "2 seeds"


def test_sessions_of_a_plain_run_are_seeds(tmp_path: Path) -> None:
    """In a run whose Sessions have separate nets, each Session is a seed, and its global frames are its own frames."""
    setting = only(make_run(tmp_path / "a", [[10, 50, 90], [20, 100, 100], [30, 40, 30]], norms=[1.0, 2.0, 6.0]))
    summary = summarize(setting, 50)
    assert (summary.seeds, summary.sessions, summary.solved) == (3, 3, 2)
    assert summary.steps_to_threshold == (200, None, None, False)  # seeds 0 and 1 reach 50 at frame 200, the third never
    assert summary.seconds_to_threshold == (4, None, None, False)
    assert summary.final_return is not None
    assert summary.final_return.value == pytest.approx((90 + 100 + 30) / 3)
    assert summary.final_return_median == 90
    assert summary.opt_steps_per_second == pytest.approx(5)  # 30 steps in 6 s
    assert summary.grad_norm == pytest.approx(3)
    for column, places in (("global_frame", [100, 200, 300]), ("opt_step", [10, 20, 30]), ("wall_t", [2, 4, 6])):
        assert setting.aligned_curves("total_reward", column).frame.tolist() == places


def test_a_distributed_run_is_one_sample(tmp_path: Path) -> None:
    """Sessions that share a net are one seed: the first one to reach the threshold counts, in global frames, as in all rows."""
    setting = only(make_run(tmp_path / "a", [[10, 20, 60, 70], [0, 55, 40, 90]], shared=True, norms=[1.0, 3.0]))
    summary = summarize(setting, 50)
    assert (summary.seeds, summary.sessions, summary.solved) == (1, 2, 1)
    assert summary.steps_to_threshold == Median(450, None, None)  # row 2 of Session 1 is at global frame 200 · 2 + 50
    assert summary.seconds_to_threshold == Median(4, None, None)
    assert summary.final_return == Estimate(90, None, None)
    assert summary.opt_steps_per_second == pytest.approx(10)  # 5 from each Session
    assert summary.grad_norm == 2
    (seed,) = setting.seeds
    frame, value = seed.curve("total_reward", "global_frame")
    assert frame.tolist() == [200, 250, 400, 450, 600, 650, 800, 850]
    assert value.tolist() == [10, 0, 20, 55, 60, 40, 70, 90]
    assert seed.curve("total_reward", "wall_t").frame.tolist() == [2, 4, 6, 8]
    assert seed.curve("total_reward", "frame").frame.tolist() == frame.tolist()
    assert seed.curve("opt_step", "frame").value.tolist()[-1] == 80


def test_new_episodes_are_compared_and_solve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The threshold is judged on ten new episodes; the mean of the last 100 reaches it later. Evaluation rows take precedence."""
    run = make_run(tmp_path / "a", [[10, 20, 30, 60], [10, 20, 30, 60]], shared=True, new=[[10, 60, 60, 70], [10, 60, 70, 80]])
    (graph,) = (one for name, one in comparison_graphs([only(run)], "frame", metric="return_new").items() if name == "mean_returns")
    assert (graph.first_panel.lines[0].curve.value.tolist(), graph.first_panel.y_label) == (
        [10, 10, 60, 60, 60, 70, 70, 80],
        "mean return (episodes since the last row)",
    )
    summary = summarize(only(run), 60, "return_new")
    assert summary.steps_to_threshold == Median(600, None, None)  # row 3 of Session 0: 60 and 60
    assert summary.final_return == Estimate(80, None, None)
    assert cli.main(["compare", str(run), "--metric", "return_new", "--solve", "60", "--out", str(tmp_path / "out")]) == 0
    assert "A seed counts as solved if the mean return of the most recent episodes (" in capsys.readouterr().out.replace("\n", " ")
    assert json.loads((tmp_path / "out/compare_table.json").read_text())["settings"][0]["solved_by"] == "return_new"
    RunPaths(run, "a2c").session_df(0, "eval").write_text("frame,global_frame,total_reward\n100,250,59\n200,450,61\n")
    assert summarize(only(run), 60).steps_to_threshold == Median(600, None, None), "few evaluations are no curve"
    paths = RunPaths(run, "a2c")
    saved = json.loads(paths.spec.read_text())
    saved["a2c"]["meta"]["rigorous_eval"] = 2
    paths.spec.write_text(json.dumps(saved))
    assert summarize(only(run), 60).steps_to_threshold == Median(350, None, None), "halfway between two evaluations"
    assert summarize(only(run), 58).steps_to_threshold == Median(250, None, None, at_most=True)
    old = make_run(tmp_path / "old", [[10]])
    assert cli.main(["compare", str(run), str(old), "--metric", "return_new"]) == 2
    assert f"{old}: SLM Lab wrote this run, whose tables have no column return_new; compare total_reward instead" in capsys.readouterr().err


def test_of_rows_at_one_place_the_last_counts(tmp_path: Path) -> None:
    """Before the first update, all rows have optimizer step 0."""
    table = {
        name: np.array(values) for name, values in {"frame": [1.0, 2, 3, 4], "opt_step": [0.0, 0, 10, 10], "loss": [1.0, 2, 3, 4]}.items()
    }
    assert [values.tolist() for values in SeedResult([table]).curve("loss", "opt_step")] == [[0, 10], [2, 4]]


def test_runs_of_one_spec_are_seeds_of_one_curve(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"r{i}", [[i, 10 + i], [i, 30 + i]], name="a3c", shared=True) for i in (0, 10)]
    other = make_run(tmp_path / "o", [[1, 2], [3, 4], [5, 6]])
    settings = read_settings([*map(str, runs), str(other)])
    assert [(one.name, len(one.seeds), one.sessions, one.count_text()) for one in settings] == [
        ("a3c", 2, 4, "2 seeds with 2 sessions each"),
        ("a2c", 3, 3, "3 seeds"),
    ]
    aligned = settings[0].aligned_curves("total_reward", "frame")
    assert aligned.frame.tolist() == [200, 250, 400, 450]
    assert aligned.value_SF.tolist() == [[0, 0, 10, 30], [10, 10, 20, 40]]
    assert summarize(settings[0], None).final_return == pytest.approx((35, 0, 35 + 63.53102))
    assert summarize(settings[0], None).solved is None


def test_labels_group_and_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i, lr in enumerate((0.1, 0.1, 0.5)):
        make_run(tmp_path / f"r{i}", [[i, i]], spec={"agent": {"net": {"lr": lr}}})
    words = [str(tmp_path / f"r{i}") for i in range(3)]
    assert [(one.name, len(one.seeds)) for one in read_settings(words, ["low", "low", "high"])] == [("low", 2), ("high", 1)]
    assert caplog.messages == []
    assert [len(one.seeds) for one in read_settings(words, ["all"] * 3)] == [3]
    assert caplog.messages == ["the runs of 'all' differ in agent.net.lr"]


def test_specs_of_one_name_that_differ_are_settings_named_by_the_keys_that_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that do not affect the results are ignored: seeds, number of seeds, saving, provenance, an absent default."""
    for i, (lr, meta) in enumerate(
        [(0.1, {"max_session": 4, "random_seed": 1}), (0.5, {}), (0.1, {"save_interval": 1, "log_frequency": 10000})]
    ):
        make_run(tmp_path / f"r{i}", [[i, i]], spec={"agent": {"net": {"lr": lr, "name": "MLPNet"}}, "meta": meta})
    settings = read_settings([str(tmp_path / "r*")])
    assert [(one.name, len(one.runs)) for one in settings] == [("a2c lr=0.1", 2), ("a2c lr=0.5", 1)]
    assert caplog.messages == []
    for i, name in enumerate(("RecurrentNet", "ConvNet")):
        make_run(
            tmp_path / f"s{i}",
            [[i, i]],
            name="b",
            spec={"agent": {"net": {"name": name, "lr": 0.1, "fc_hid_layers": [], "batch_norm": False}, "algorithm": {"lr": i}}},
        )
    names = [one.name for one in read_settings([str(tmp_path / "s*")])]
    assert names == ["b lr=0 net.name=RecurrentNet", "b lr=1 net.name=ConvNet"]


def test_dev_and_failed_runs_are_compared_only_if_named_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path / "good", [[0, 10], [2, 12]])
    dev = make_run(tmp_path / "dev", [[90]], spec={"meta": {"run": {"mode": "dev"}}})
    failed = make_run(tmp_path / "wrong", [[0, 10], [5]], failed=1)
    (setting,) = read_settings([str(tmp_path / "*")])
    assert len(setting.seeds) == 2
    assert caplog.messages == [f"left out: {dev} (mode dev), {failed} (failed); name a run by its folder to compare it"]
    names = [one.name for one in read_settings([str(tmp_path / "good"), str(dev)])]
    assert names == ["a2c mode=train", "a2c mode=dev"], "never seeds of one setting"
    with pytest.raises(UserError, match="matches only failed runs"):
        read_settings([str(tmp_path / "[dw]*")])


def test_a_run_is_named_with_or_without_the_data_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "r0", [[1, 1]])
    (setting,) = read_settings(["r0"], data_dir=tmp_path)
    assert [run.paths.root for run in setting.runs] == [tmp_path / "r0"]
    with pytest.raises(UserError, match="'r1' is not a folder"):
        read_settings(["r1"], data_dir=tmp_path)


def test_a_pattern_names_several_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(3):
        make_run(tmp_path / f"r{i}", [[i, i]])
    (tmp_path / "r_file").touch()
    (tmp_path / "r_compare").mkdir()
    pattern = str(tmp_path / "r*")
    assert [(one.name, len(one.runs)) for one in read_settings([pattern], ["all"])] == [("all", 3)]
    assert len(only(pattern, tmp_path / "r1").runs) == 3
    assert caplog.messages == [f"{tmp_path}/r1 is given more than once; duplicates are ignored"]
    with pytest.raises(UserError):
        read_settings([str(tmp_path / "r_compare")])


def test_keys_newer_than_a_run_do_not_set_it_apart(tmp_path: Path) -> None:
    (body,) = dump_spec(load_spec("demo.json", "ppo_cartpole")).values()
    old = copy.deepcopy(body)
    del old["env"]["wrappers"], old["meta"]["stall_notice"], old["agent"]["algorithm"]["symlog"], old["agent"]["net"]["layer_norm"]
    old["agent"]["net"]["optim_spec"] |= {"betas": [0.9, 0.999]}
    settings = [load_run(make_run(tmp_path / name, [[0, 10]], spec=spec)).settings() for name, spec in (("new", body), ("old", old))]
    assert differing_keys(settings) == ["agent.net.optim_spec.betas"]


def test_seeds_that_did_not_solve_and_a_threshold_below_zero(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [["", -900, -150], ["", -300, -250], ["", "", ""]])
    setting = only(run)
    none, one, all_of_them = (summarize(setting, threshold) for threshold in (0, -200, -400))
    never = Median(math.inf, None, None)
    assert (none.solved, none.steps_to_threshold, none.seconds_to_threshold) == (0, never, never)
    assert (one.solved, one.steps_to_threshold) == (1, never)  # only one of three seeds: not a median of all
    assert (all_of_them.solved, all_of_them.steps_to_threshold) == (2, (300, None, None, False))  # 200, 300, never
    assert "1 of 3  ∞" in format_table(settings_table([one]))[1]
    compare([str(run)], solve=-200.0, out=tmp_path / "out")
    assert json.loads((tmp_path / "out/compare_table.json").read_text())["settings"][0]["steps_to_threshold"] is None
    assert all_of_them.final_return is not None
    assert all_of_them.final_return.value == -200  # mean of the two that ended an episode


def test_estimate_by_hand() -> None:
    assert estimate_mean([]) is estimate_mean([None]) is None
    assert estimate_mean([None, 3.0]) == (3, None, None)
    assert estimate_mean([0.0, 10.0]) == pytest.approx((5, 5 - 63.53102, 5 + 63.53102))  # 12.706205 · 7.0711 / √2
    values = np.random.default_rng(1).normal(7.0, 2.0, 400).tolist()
    mean = estimate_mean(values)
    assert mean is not None
    assert mean.low is not None
    assert mean.high is not None
    assert mean.high - mean.low == pytest.approx(2 * 1.96 * np.std(values) / 20, rel=0.05)
    assert estimate_mean(values) == mean


def test_lines_of_the_graphs(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "a", [[0, 10], [4, 20]], norms=[1.0, 3.0])
    shared = make_run(tmp_path / "b", [[1, 1], [3, 3]], name="a3c", shared=True)
    graphs = comparison_graphs(read_settings([str(plain), str(shared)]), "frame", solve=9)
    threshold, one, other = graphs["mean_returns"].first_panel.lines
    assert (threshold.name, threshold.curve.value[0], threshold.curve.frame[-1]) == ("solved: 9", 9, 450)
    assert (one.name, one.curve.value.tolist()) == ("a2c (2 seeds)", [2, 15])
    assert one.band is not None
    assert [edge.tolist() for edge in one.band] == [[0, 10], [4, 20]]
    assert (other.name, other.curve.value.tolist(), other.band) == ("a3c (1 seed with 2 sessions)", [1, 3, 1, 3], None)
    assert one.colour != other.colour
    assert graphs["grad_norm"].first_panel.lines[0].curve.value.tolist() == [2, 2]
    (variance,) = graphs["return_variance"].first_panel.lines  # one seed has no interval
    assert variance.curve.value.tolist() == [8, 50]
    assert {graph.first_panel.x_label for graph in graphs.values()} == {"global frames (of all workers together)"}
    assert "return_variance" not in comparison_graphs(read_settings([str(shared)]), "wall_t")


@pytest.mark.parametrize("by", list(AXES))
def test_files_and_text(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / "a", [[0, 10], [4, 20]]), make_run(tmp_path / "b", [[1, 15], [3, 3]], name="a3c", shared=True)]
    assert cli.main(["compare", *map(str, runs), "--by", by, "--solve", "-5", "--data-dir", str(tmp_path / "data")]) == 0
    (folder,) = (tmp_path / "data").iterdir()
    axis = AXES[by].name
    names = [
        f"compare_graph_{what}_vs_{axis}.{ext}" for what in ("mean_returns", "grad_norm", "return_variance") for ext in ("html", "png")
    ]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*names, "compare.html", "compare_table.csv", "compare_table.json", "plotly.min.js"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["name", "a2c", "a3c"]
    assert "2 of 2" in lines[1]
    assert all(len(line) <= 80 for line in lines if "/" not in line)
    assert "A seed counts as solved if total_reward, the mean return of the last 100 episodes" in " ".join(lines)
    written = ["compare_table.csv", "compare_table.json", f"compare_graph_mean_returns_vs_{axis}.png", "compare.html"]
    assert [Path(line).name for line in lines[-4:]] == written
    content = json.loads((folder / "compare_table.json").read_text())
    assert (content["by"], content["solve"]) == (by, -5)
    assert content["settings"][1]["runs"] == [str(runs[1])]
    assert content["settings"][1]["steps_to_threshold"] == 200
    with (folder / "compare_table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["seeds"], row["solved"], row["final_return"]) for row in rows] == [
        ("a2c", "2", "2", "15.0"),
        ("a3c", "1", "1", "3.0"),
    ]


def test_the_rule_by_which_seeds_count_as_solved_is_named_for_each_setting_if_it_differs(tmp_path: Path) -> None:
    one = summarize(only(make_run(tmp_path / "a", [[0, 10]])), 5)
    same, other = (
        " ".join(explanations([one, one._replace(name="b", solved_by=rule)], Comparison([], [], [], {})))
        for rule in (one.solved_by, "evaluation")
    )
    assert "A seed counts as solved if total_reward" in same
    assert "A seed of a2c counts as solved if total_reward" in other
    assert "A seed of b counts as solved if the mean return of at least one evaluation reaches the value of --solve." in other
    assert "reaches the value of --solve in at least one table row." in same
    assert ("first table row at or above" in same, "interpolated" in same) == (True, False)
    assert ("first table row at or above" in other, "interpolated" in other) == (True, True)


def test_only_the_bootstrap_intervals_in_the_tables_are_named(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path / name, [[0, 10], [0, number]])) for number, name in enumerate("ab")]
    text = " ".join(compare(runs[:1], out=tmp_path / "out").split())
    assert "The interval of the interquartile mean is the percentile interval" in text
    text = " ".join(compare(runs, labels=["a", "b"], out=tmp_path / "out").split())
    assert "The intervals of the interquartile mean and P(B > A) are percentile intervals" in text
    assert "The interval is not adjusted for the number of comparisons." in text


def test_without_a_threshold_nothing_is_said_of_solving(tmp_path: Path) -> None:
    text = compare([str(make_run(tmp_path / "a", [[0, 10]]))], out=tmp_path / "out" / "here")
    assert "solve" not in text
    assert (tmp_path / "out/here/compare_table.csv").is_file()
    assert compare([str(tmp_path / "a")], out=tmp_path / "out" / "here") == text  # again


@pytest.mark.parametrize(
    ("meta", "seeds"), [({}, 3), ({"sampler": {"async_rl": True}}, 4), ({"distributed": "shared", "max_session": 2}, 3)]
)
def test_a_repetition_with_the_same_seeds_is_not_another_seed(meta: dict[str, Any], seeds: int, tmp_path: Path) -> None:
    """Runs with asynchronous workers or a shared net differ from their repetitions, and all of them count."""
    shared = "distributed" in meta
    runs = [
        make_run(tmp_path / folder, returns, shared=shared, spec={"meta": {"random_seed": seed, **meta}})
        for folder, returns, seed in (("a", [[0, 10]], 0), ("b", [[0, 10], [0, 20]], 0), ("c", [[0, 60]], 1))
    ]
    (setting,) = read_settings(list(map(str, runs)))
    assert len(setting.seeds) == seeds
    if not meta:
        assert [run.paths.root for run in setting.runs] == runs[1:]
    assert [len(one.seeds) for one in group_runs(map(load_run, runs))] == [seeds], "as in the viewer"


def test_seeds_that_are_not_done_are_marked_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = {"env": {"name": "CartPole-v1", "max_frame": 200}, "meta": {}}
    done = make_run(tmp_path / "a", [[0, 10], [0, 20]], spec=spec)
    stopped = make_run(tmp_path / "b", [[90]], spec=spec)
    running = make_run(tmp_path / "c", [[80, 80]], spec=spec)
    RunPaths(running, "a2c").trial_metrics().unlink()
    lock = RunLock(RunPaths(running, "a2c").lock)
    alone = make_run(tmp_path / "d", [[70], [60]], name="alone", spec=spec)
    failed = make_run(tmp_path / "e", [[0, 10], [5, 5]], failed=1, name="e", spec=spec)
    RunPaths(failed, "e").session_metrics(0).write_text("{}")
    text = compare(list(map(str, (done, stopped, running, alone, failed))), out=tmp_path / "out")
    lock.release()
    head, a2c, other = text.splitlines()[:3]
    assert "status" in head
    assert "1 stopped, 1 running (left out)" in a2c
    assert "15 [0, 78.53]" in text, "not below 0, the lowest return of CartPole"
    assert "2 stopped  " in other
    assert "65 [1.469, 128.5]" in text
    assert caplog.messages == [
        f"{stopped}: 1 session stopped; left out",
        f"{running}: the run has not ended; left out",
        f"{alone}: 2 sessions stopped; compared, since no seed of 'alone' is done",
        f"{failed}: 1 session failed; left out",
    ]
    content = json.loads((tmp_path / "out/compare_table.json").read_text())
    assert [row["status"] for row in content["settings"]] == ["1 stopped, 1 running (left out)", "2 stopped", "1 failed (left out)"]
    assert [row["seeds"] for row in content["settings"]] == [2, 2, 1]
    assert "Student's t" in content["interval"]
    assert f"the mean over the seeds with its {content['interval']}." in text.replace("\n", " ")


def test_different_envs_never_share_an_axis(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path / "a", [[0, 10]])
    RunPaths(run, "a2c").trial_metrics().unlink()
    other = make_run(tmp_path / "b", [[0, 10]], name="b", spec={"env": {"name": "Pendulum-v1"}})
    graphs = comparison_graphs(read_settings([str(run), str(other)]), "frame")
    assert caplog.messages == [
        f"{run}: 1 session stopped; compared, since no seed of 'a2c' is done",
    ]
    assert {name: graph.title.partition(":")[0] for name, graph in graphs.items() if "returns" in name} == {
        "mean_returns_CartPole-v1": "CartPole-v1",
        "mean_returns_Pendulum-v1": "Pendulum-v1",
    }
    assert all(len(graph.first_panel.lines) == 1 for graph in graphs.values())
    labelled = read_settings([str(run), str(other)], ["mine", "mine"])
    assert [one.name for one in labelled] == ["mine (CartPole-v1)", "mine (Pendulum-v1)"]
    assert compare([str(run), str(other)], out=tmp_path / "out").splitlines()[0].split()[:2] == ["name", "env"]
    assert (tmp_path / "out/compare_graph_mean_returns_Pendulum-v1_vs_frames.png").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "RUN is missing; expected run folders, such as data/"),
        (["RUNS/god"], "'RUNS/god' is not a folder; did you mean 'good'?; expected a run folder"),
        (["RUNS/e"], "'RUNS/e' is not a folder; did you mean 'empty'?"),
        (["RUNS/z*"], "no run folder matches 'RUNS/z*'"),
        ([""], "'' is not a folder"),
        (["RUNS"], "'RUNS' is not a run folder: it has no *_spec.json; did you mean RUNS/broken?"),
        (["RUNS/good", "RUNS/nothing"], "'RUNS/nothing' is not a run folder: it has no *_spec.json\n"),
        (["RUNS/good", "RUNS/empty"], "'RUNS/empty' has no rows yet: no session table in RUNS/empty/info"),
        (["RUNS/broken"], "broken_spec.json cannot be read as a saved spec"),
        (["RUNS/two"], "'RUNS/two' contains 2 trials; expected one"),
        (["RUNS/good", "--by", "frames"], "invalid column 'frames'; expected one of frame, global_frame"),
        (
            ["RUNS/good", "--metric", "return"],
            "expected one of current_return, total_reward, return_new, training_return; did you mean 'return_new'?",
        ),
        (["RUNS/good", "--solve", "high"], "invalid return 'high'; expected a number, such as 195 or -200"),
        (["RUNS/good", "--solve=nan"], "invalid return 'nan'"),
        (["RUNS/good", "--label", "a", "--label", "b"], "--label is given 2 times for 1 RUN; expected one for each RUN, or none"),
        (["RUNS/good", "--label", ""], "--label is empty"),
        (["RUNS/good", "--out", "RUNS/file"], "cannot write to RUNS/file: "),
        (["RUNS/good", "--data-dir", "RUNS/file"], "cannot write to RUNS/file: "),
        (["RUNS/good", "--jobs", "2"], "--jobs is an option of run only\n"),
        (["RUNS/good", "--set", "a=1"], "--set is an option of run, check only\n"),
        (["RUNS/good", "--solv", "2"], "did you mean '--solve'?"),
    ],
)
def test_an_error_of_the_user(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user error gives exit code 2 and one clear message, without a traceback and without writing anything."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    make_run(runs / "good", [[0, 10]])
    make_run(runs / "empty", [])
    two = RunPaths(make_run(runs / "two", [[0, 10]]), "a2c")
    two.session_df(0, t=1).write_bytes(two.session_df(0).read_bytes())
    (runs / "nothing").mkdir()
    (runs / "file").touch()
    (runs / "broken").mkdir()
    (runs / "broken/broken_spec.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    try:
        code = cli.main(["compare", *[word.replace("RUNS", "runs") for word in words]])
    except SystemExit as stop:
        code = int(stop.code or 0)
    text = capsys.readouterr().err
    assert (code, "Traceback" in text) == (2, False)
    assert says.replace("RUNS", "runs") in text
    assert sorted(tmp_path.rglob("*")) == before


def test_the_columns_that_the_command_line_takes() -> None:
    assert list(AXES) == list(cli.parser.AXES)
    assert list(METRICS) == list(cli.parser.METRICS)
    with pytest.raises(UserError, match="invalid column 'epi'; expected one of frame, global_frame"):
        compare(["x"], by="epi")


@pytest.mark.usefixtures("pictures")
def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If a graph fails, a notice is shown; a file that cannot be written is an error that leaves no empty folder."""

    def fail(*_: object) -> None:
        raise ValueError("no ink")

    def refuse(error: int) -> Callable[..., None]:
        def refused(*_: Any, **__: Any) -> None:
            raise OSError(error, os.strerror(error))

        return refused

    run = str(make_run(tmp_path / "a", [[0, 10]]))
    monkeypatch.setattr(PNGRenderer, "__init__", fail)
    text = compare([run], out=tmp_path / "out")
    assert caplog.messages == ["cannot draw graphs: ValueError: no ink"]
    assert text.splitlines()[-2].endswith("compare_table.json")
    for error, reason in ((errno.ENOSPC, "disk full"), (errno.EFBIG, "File too large"), (errno.EROFS, "Read-only file system")):
        monkeypatch.setattr("slm_lab.experiment.report.writer.replace_file", refuse(error))
        with pytest.raises(UserError, match=reason):
            compare([run], data_dir=tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (None, "-"),
        (Estimate(12.0, 11.0, 13.0), "+12 [11, 13]"),
        (Estimate(-12.0, -13.0, 1.0), "-12 [-13, 1]"),
        (Estimate(0.0, None, None), "0"),
    ],
)
def test_differences_have_a_sign(one: Estimate | None, text: str) -> None:
    assert estimate_text(one, "+") == text


def test_runs_without_the_column_are_compared_by_the_mean_that_all_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = make_run(tmp_path / "old", [[1, 2]]), make_run(tmp_path / "new", [[3, 4]])
    table = RunPaths(old, "a2c").session_df(0)
    table.write_text(table.read_text().replace("current_return", "earlier"))
    settings = read_settings([str(new), str(old)], ["new", "old"])
    metric, reason = comparable_metric("current_return", settings)
    assert metric == "total_reward"
    assert reason.startswith("old has no column current_return, so the comparison uses total_reward")
    assert comparable_metric("training_return", settings) == (metric, reason)
    assert comparable_metric("training_return", settings[:1]) == ("training_return", "")
    assert comparable_metric("return_new", settings) == ("return_new", "")
    assert comparable_metric("current_return", settings[:1]) == ("current_return", "")
    found = write_comparison([str(new), str(old)], labels=["new", "old"], out=tmp_path / "out")
    assert found.content["metric"] == "total_reward"
    assert found.content["metric_reason"] == reason
    assert [row["final_return"] for row in found.content["settings"]] == [4, 2]
    assert caplog.messages == []


def test_the_current_return_is_that_of_evaluations_if_there_are_any(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a", [[1, 2, 3]])
    paths = RunPaths(root, "a2c")
    paths.session_df(0, "eval").write_text("frame,total_reward\n100,50\n300,70\n")
    (seed,) = read_settings([str(root)])[0].seeds
    assert (seed.final_return(), seed.final_return("total_reward")) == (70, 3)
    paths.session_df(0, "eval").write_text("frame,total_reward\n100,50\n239,70\n")
    (seed,) = read_settings([str(root)])[0].seeds
    assert seed.final_return() == 3, "older than the last fifth of the frames"


def test_evaluations_are_not_compared_with_training_episodes(tmp_path: Path) -> None:
    """If only some runs have evaluations, all are compared by training episodes, and text, page and JSON say so."""
    evaluated, other = make_run(tmp_path / "a", [[1, 2, 3]]), make_run(tmp_path / "b", [[1, 2, 5]])
    RunPaths(evaluated, "a2c").session_df(0, "eval").write_text("frame,total_reward\n300,70\n")
    words, labels = [str(evaluated), str(other)], ["A", "B"]
    settings = read_settings(words, labels)
    assert comparable_metric("current_return", settings[:1]) == ("current_return", "")
    found = write_comparison(words, labels=labels, out=tmp_path / "out")
    assert [row["final_return"] for row in found.content["settings"]] == [3, 5]
    assert [pair["difference"] for pair in found.content["pairs"]] == [2]
    reason = "The current returns at the end differ in kind (A: evaluation with deterministic actions; B: training episodes)"
    assert found.content["metric"] == "training_return"
    assert found.content["metric_reason"].startswith(reason)
    assert reason in " ".join(found.text.split())
    assert reason in (tmp_path / "out/compare.html").read_text().partition("<h2>")[0]
    assert write_comparison(words, metric="total_reward", out=tmp_path / "out").content["metric_reason"] is None


def test_evaluations_with_and_without_sampled_actions_are_not_compared(tmp_path: Path) -> None:
    table = {"frame": np.array([100.0]), "total_reward": np.array([9.0]), "current_return": np.array([2.0])}
    few, rigorous = SeedResult([table], few_evaluations=[table]), SeedResult([table], evaluation=[table], deterministic=False)
    runs = [Setting(name, []) for name in ("A", "B")]
    for setting, seed in zip(runs, (few, rigorous), strict=True):
        setting.__dict__["all_seeds"] = [seed]
    assert comparable_metric("current_return", runs).metric == "training_return"
    other_env = [Setting(name, []) for name in ("A", "B")]
    for setting in other_env:
        setting.__dict__["all_seeds"] = [few]
    used = comparable_metric("current_return", [*runs, *other_env])
    assert used.metric == "training_return"
    assert "B: evaluation with deterministic actions and evaluation with sampled actions" in used.reason
    runs[1].__dict__["all_seeds"] = [replace(rigorous, deterministic=True)]
    assert comparable_metric("current_return", runs).metric == "current_return"
    assert [seed.final_return(metric) for seed in (few, rigorous) for metric in ("evaluation", "training_return")][1::2] == [2, 2]
