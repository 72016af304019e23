"""What is left of a trial when its Sessions are over: metrics and graphs, made from the tables alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slm_lab.experiment.analysis import figures
from slm_lab.experiment.analysis.album import Album
from slm_lab.experiment.analysis.baseline import random_baseline
from slm_lab.experiment.analysis.files import Writer
from slm_lab.experiment.analysis.metrics import Scalars, Strengths, consistency, final_return_ma, mean_scalars, session_metrics
from slm_lab.experiment.analysis.sampler import draw_sampler, sampler_metrics
from slm_lab.experiment.analysis.table import Table, curve, no_rows, read_table
from slm_lab.experiment.paths import DataMode, RunPaths
from slm_lab.lib.log import notice
from slm_lab.spec.spec import Spec


@dataclass(frozen=True)
class _Data:
    """All tables of a trial, by index of the Session, or of its policy (see RunPaths.session_df)."""

    train: dict[int, Table]
    eval: dict[int, Table]
    mode: DataMode
    """Which of the two the metrics are made of."""

    @property
    def judged(self) -> dict[int, Table]:
        return self.eval if self.mode == "eval" else self.train


def analyze_trial(spec: Spec, paths: RunPaths, t: int = 0, *, sessions: Sequence[int] | None = None, failed: int = 0) -> dict[str, Any]:
    """Write the metrics and graphs of trial `t` from the tables there are, and return its metrics.

    `sessions` are the indices of the tables to go by, as in RunPaths.session_df, all by default; those without a table are left out.
    `failed` is the number of Sessions that failed: the metrics and the legends tell it, so that nobody takes a part for the whole.

    Works on what an unfinished run has left, too; {} where no Session has a table. With meta.rigorous_eval metrics and the trial's
    returns are those of evaluation. A table, file or graph that fails is a notice. May measure the env's random baseline, which can take
    minutes.

    The metrics: total_reward_ma (the last one), strength, max_strength, final_strength, sample_efficiency, training_efficiency and
    stability as means over Sessions, consistency, random_baseline, frame (mean of the Sessions' last), sessions (their number),
    failed (where there are any); None where a metric is not defined. Where rollout workers and a learner told how busy they were:
    bottleneck and busy; where a Session trains several policies: policies and best_policy (see sampler_metrics), and the others are means
    over all policies of all Sessions.
    """
    data = _read(spec, paths, t, sessions)
    if not data.train:
        return {}
    baseline = random_baseline(spec.env)
    strengths = {index: Strengths.of(table, baseline) for index, table in data.judged.items()}
    rows = {index: _session_scalars(data, index, strengths[index]) for index in data.train}
    metrics: dict[str, Any] = {
        **mean_scalars(list(rows.values())),
        "consistency": consistency(figures.common_strengths(strengths)),
        "random_baseline": baseline,
        "sessions": len({index // spec.policies for index in rows}),
        **({"failed": failed} if failed else {}),
        **sampler_metrics(data.train, data.judged, spec.policies),
    }
    of_sessions = {paths.session_metrics(index, t): {**scalars, "random_baseline": baseline} for index, scalars in rows.items()}
    writer = Writer()
    for path, content in {paths.trial_metrics(t): metrics, **of_sessions}.items():
        writer.write("metrics file not written", (path, partial(_json, content)))
    try:
        _draw(spec, paths, t, data, strengths, failed, writer)
    except Exception as error:
        notice(f"graphs failed: {type(error).__name__}: {error}")
    writer.close()
    return metrics


def _read(spec: Spec, paths: RunPaths, t: int, sessions: Sequence[int] | None) -> _Data:
    mode: DataMode = "eval" if spec.meta.rigorous_eval else "train"
    indices = [index for index in paths.sessions("train", t) if sessions is None or index in sessions]
    modes: tuple[DataMode, ...] = ("train", "eval")
    train, evaluation = ({index: _table(paths.session_df(index, of, t)) for index in indices} for of in modes)
    return _Data(train, evaluation, mode)


def _table(path: Path) -> Table:
    try:
        return read_table(path)
    except Exception as error:
        notice(f"{path.name} cannot be read: {error}")
        return no_rows()


def _session_scalars(data: _Data, index: int, strengths: Strengths) -> Scalars:
    frame = curve(data.train[index], "frame").value
    return {
        "total_reward_ma": final_return_ma(data.judged[index]),
        **session_metrics(strengths),
        "frame": int(frame[-1]) if len(frame) else None,
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def _labels(spec: Spec, t: int, data: _Data, failed: int) -> figures.Labels:
    env = spec.env.name.rpartition(":")[2]
    episodes: dict[DataMode, str] = {"train": "last 100 episodes", "eval": f"{spec.meta.rigorous_eval} evaluation episodes"}
    shared, policies = figures.distributed(data.train.values()), spec.policies
    frames = figures.SESSION_FRAMES if shared else figures.POLICY_FRAMES if policies > 1 else figures.FRAMES
    return figures.Labels(f"{spec.name} ({env}), trial {t}", episodes, failed, policies, spec.meta.max_session, frames)


def _draw(spec: Spec, paths: RunPaths, t: int, data: _Data, strengths: Mapping[int, Strengths], failed: int, writer: Writer) -> None:
    labels = _labels(spec, t, data, failed)
    learning = figures.learning_curves(data.train)
    judged = {index: figures.judged_curves(table, strengths[index]) for index, table in data.judged.items()}
    album = Album(paths.root, writer)
    of_trial = (
        *(figures.trial_graphs(judged, labels, data.mode), figures.trial_graphs(learning, labels, "train")),
        figures.consistency_graphs(figures.common_strengths(strengths), labels, data.mode),
        figures.policy_graphs(judged, labels, data.mode),
    )
    for graphs in of_trial:
        album.draw(graphs, partial(paths.trial_graph, t=t))
    for axis in figures.SHARED_AXES if figures.distributed(data.train.values()) else ():
        returns = {index: figures.return_curves(table, axis.column) for index, table in data.judged.items()}
        album.draw(figures.trial_graphs(returns, labels, data.mode, axis), partial(paths.trial_graph, t=t, axis=axis.name))
    for index in data.train:
        shown: list[tuple[DataMode, figures.Curves]] = [(data.mode, judged[index]), ("train", learning[index])]
        if data.mode == "eval":
            shown.append(("train", figures.return_curves(data.train[index])))
        for mode, curves in shown:
            album.draw(figures.session_graphs(index, curves, labels, mode), partial(paths.session_graph, index, mode=mode, t=t))
    draw_sampler(album, paths, t, data.train, labels, spec.meta.sampler)
