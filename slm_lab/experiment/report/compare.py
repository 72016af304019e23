"""Read the runs of a comparison, and group runs that differ only in their seeds into settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slm_lab.experiment.files.find import BEST, TrainingChoice, find_training
from slm_lab.experiment.files.lock import unfinished_notice
from slm_lab.experiment.files.paths import StudyPaths, run_paths_in, study_in
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.nondeterminism import nondeterminism_reason
from slm_lab.experiment.report.run import Run, load_run, run_folders, with_data_dir
from slm_lab.experiment.report.seed_result import seed_results
from slm_lab.experiment.report.setting import Setting
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.lib.log import notice
from slm_lab.spec.report import diff, nearest_hint

_SHOWN_KEYS, _SHOWN_LETTERS = 3, 30
"""Maximum number of spec keys in the name of a setting, and maximum number of letters of each value."""


def _check_labels(words: Sequence[str], labels: Sequence[str]) -> None:
    """Raise UserError if no run is given, if the number of labels differs from the number of runs, or if a label is empty."""
    if not words:
        raise UserError("RUN is missing; expected run folders, such as data/ppo_cartpole_2026_01_31_120000")
    if labels and len(labels) != len(words):
        runs = f"{len(words)} RUN{'s' if len(words) > 1 else ''}"
        raise UserError(f"--label is given {len(labels)} times for {runs}; expected one for each RUN, or none")
    if not all(label.strip() for label in labels):
        raise UserError("--label is empty; expected a name for each RUN")


def read_settings(
    words: Sequence[str], labels: Sequence[str] = (), choice: TrainingChoice = BEST, data_dir: Path = Path("data")
) -> list[Setting]:
    """Read the runs that `words` name, and group them into settings.

    Runs are grouped by label or, without labels, by the content of their specs except the seeds (see Run.settings). Each word names a run
    folder, the folder of a search or a study (with or without `data_dir`), a pattern of run folders, or anything else that `find_training`
    accepts. If a word names a search, the trial `choice.trial` is used or, by default, the best trial (the best confirmed trial if trials
    were confirmed). If a word names a study, all its runs are used, or only the runs with the entry, env and seed of `choice`. Failed runs
    and runs of mode dev that match a pattern are left out with a notice, but are compared if their folders are named. Runs in different
    envs belong to different settings, even if their labels are equal. If different specs have the same name, the spec keys that differ are
    appended to the name of each setting, for example "ppo_cartpole gamma=0.5". Of several runs with the same spec and the same seeds,
    one run is compared, and the others are left out with a notice, since repetitions are not independent seeds.

    Raises UserError if a word, a label or `choice` is invalid, or if a run has no rows. A notice is printed for runs with the same label
    but different specs, and for runs that failed or have not ended.
    """
    _check_labels(words, labels)
    groups, seen = dict[tuple[str, str, str], list[Run]](), set[tuple[Path, int]]()
    for index, word in enumerate(with_data_dir(word, data_dir) for word in words):
        for run in study_runs(word, choice) or _named_runs(word, choice, data_dir):
            if not seed_results(run):
                raise UserError(f"'{run.paths.root}' has no rows yet: no session table in {run.paths.info_dir}")
            folder = run.paths.root.resolve(), run.trial
            if folder in seen:
                notice(f"{run.paths.root} is given more than once; duplicates are ignored")
                continue
            seen.add(folder)
            content = "" if labels else json.dumps(run.settings(), sort_keys=True)
            groups.setdefault((labels[index] if labels else run.name, run.env, content), []).append(run)
    settings, notices = _settings_from_groups(groups)
    for text in notices:
        notice(text)
    for setting in settings:
        _report_status(setting)
        if differing := differing_keys([run.settings() for run in setting.runs]):
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            notice(f"the runs of '{setting.name}' differ in {', '.join(differing[:3])}{more}")
    return settings


def _separate_repetitions(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return (the runs of a setting without repetitions, a notice for each run that is left out).

    Of several runs with the same spec and the same seeds, only the run with the most finished seeds is kept. Runs that are not reproducible
    are all kept.
    """
    kept: dict[Any, Run] = {}
    notices = []
    for number, run in enumerate(runs):
        keys = run.settings()
        # absent in runs of SLM Lab, whose seeds depend on the time
        seed = run.random_seed if isinstance(run, ResultRun) else run.spec.get("meta", {}).get("random_seed")
        key = (json.dumps(keys, sort_keys=True), seed, run.trial) if seed is not None and nondeterminism_reason(keys) is None else number
        other = kept.setdefault(key, run)
        if other is not run:
            kept[key], out = (run, other) if _finished_seeds(run) > _finished_seeds(other) else (other, run)
            notices.append(
                f"{out.paths.root} is left out: it repeats {kept[key].paths.root}, with the same spec and meta.random_seed {seed}"
            )
    return list(kept.values()), notices


def _finished_seeds(run: Run) -> int:
    return sum(seed.status == "done" for seed in seed_results(run))


def group_runs(runs: Iterable[Run]) -> list[Setting]:
    """Group runs into settings, as `read_settings` does without labels: runs whose specs differ only in the seeds are one setting."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.name, run.env, json.dumps(run.settings(), sort_keys=True)), []).append(run)
    return _settings_from_groups(groups)[0]


def study_runs(word: str, choice: TrainingChoice = BEST) -> list[Run]:
    """Return the runs of the study in folder `word` that match `choice`, or [] if `word` is not the folder of a study.

    The runs are read from the result files of the study. Raises UserError if the study has no result file, or no result file that matches
    `choice`.
    """
    paths = study_in(Path(word))
    if paths is None:
        return []
    order = _entry_order(paths)
    found = sorted(
        (ResultRun(file) for file in paths.results.glob("*.json")),
        key=lambda one: (one.env, order.get(one.name, len(order)), one.name, one.random_seed),
    )
    if not found:
        raise UserError(f"no run of the study '{word}' has ended")
    for part, key in (("entry", "entry"), ("env", "env"), ("seed", "random_seed")):
        wanted = getattr(choice, part)
        known = {one.content[key] for one in found}
        if wanted is not None and wanted not in known:
            near = nearest_hint(str(wanted), map(str, sorted(known)))
            raise UserError(f"{part} {wanted}: the runs of {word} have {', '.join(map(str, sorted(known)))}{near}")
        found = [one for one in found if wanted in (None, one.content[key])]
    return list(found)


def _entry_order(paths: StudyPaths) -> dict[str, int]:
    """Return a dict: label of each study entry → position of the entry. The dict is empty if the study file is damaged.

    The baseline entry has the position 0, and all other entries of the study follow in the order of the study file.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        study = json.loads(paths.study.read_text(encoding="utf-8"))[paths.name]["study"]
        labels = [study.get("baseline"), *(one.get("label") or one["spec"].rpartition(":")[2] for one in study["entries"])]
        return {label: position for position, label in enumerate(dict.fromkeys(labels))}
    return {}


def _named_runs(word: str, choice: TrainingChoice, data_dir: Path) -> list[Run]:
    """Return the runs that `word` names. If `word` is a pattern with *, ? or [, failed runs and runs of mode dev are left out.

    Raises UserError if `word` is invalid.
    """
    if word == "latest" or _is_search(Path(word)):
        return [_chosen_run(word, choice, data_dir)]
    runs = [load_run(folder) for folder in run_folders(word)]
    if Path(word).is_dir():
        return runs
    out = [run for run in runs if run.mode == "dev" or run.status == "failed"]
    why = [f"{run.paths.root} ({'mode dev' if run.mode == 'dev' else 'failed'})" for run in out]
    if out and len(out) == len(runs):
        raise UserError(f"'{word}' matches only failed runs and runs of mode dev: {', '.join(why)}; name a run by its folder to compare it")
    if out:
        notice(f"left out: {', '.join(why)}; name a run by its folder to compare it")
    return [run for run in runs if run not in out]


def _is_search(folder: Path) -> bool:
    paths = run_paths_in(folder) if folder.is_dir() else None
    return paths is not None and paths.has_several_trials and (paths.search_state.exists() or folder.name == "confirm")


def _chosen_run(word: str, choice: TrainingChoice, data_dir: Path) -> Run:
    """Return a trial of the search `word` (`choice.trial` or else the best trial) or, for word="latest", the latest run in mode train."""
    training = find_training(word, None, data_dir, TrainingChoice(trial=choice.trial))
    if training.name:
        notice(f"{word}: comparing {training.name}")
    return Run(training.paths, training.trial)


def _settings_from_groups(groups: dict[tuple[str, str, str], list[Run]]) -> tuple[list[Setting], list[str]]:
    """Return (a Setting for each group of runs in `groups`, notices about repetitions that are left out).

    Args: groups: (name, env, content of the spec) → runs.

    If several groups have the same name, the env or the spec keys that differ are appended to the name of the setting.
    """
    settings, notices = list[Setting](), list[str]()
    names: Counter[str] = Counter()
    for (name, env, content), runs in groups.items():
        alike = {key: others[0].settings() for key, others in groups.items() if key[0] == name}
        label = f"{name} ({env})" if len({key[1] for key in alike}) > 1 else name
        same_env = [own for key, own in alike.items() if key[1] == env]
        differing = ""
        if content and len(same_env) > 1:
            differing = f" {_difference_text(runs[0].settings(), differing_keys(same_env))}"
        label += differing
        names[label] += 1
        number = "" if names[label] == 1 else f" ({names[label]})"
        kept, repetitions = _separate_repetitions(runs)
        settings.append(Setting(f"{label}{number}", kept, f"{name}{differing}{number}"))
        notices += repetitions
    return settings, notices


def differing_keys(specs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the sorted paths of the spec keys in which `specs` differ.

    If specs use different components, such as different algorithms, keys that only some components have are omitted.

    Args: specs: each spec is a flat dict: path of the key → value.
    """
    keys = sorted({key for spec in specs[1:] for key in diff(specs[0], spec)})
    sections = tuple(key.removesuffix("name") for key in keys if key.endswith(".name"))

    def implied(key: str) -> bool:
        values = [spec[key] for spec in specs if key in spec]
        return len(values) < len(specs) and all(value == values[0] for value in values)

    return [key for key in keys if key.endswith(".name") or not key.startswith(sections) or not implied(key)]


def _difference_text(spec: dict[str, Any], keys: Sequence[str]) -> str:
    """Return the values of the first few `keys` of a spec as text, such as "gamma=0.5 lr=0.1".

    A key is shown as the last part of its path or, if several keys have the same last part, as the full path.
    """
    short = {key: ".".join(key.split(".")[-2:]) if key.endswith((".name", ".type")) else key.rpartition(".")[2] for key in keys}
    counts = Counter(short.values())
    shown = [f"{short[key] if counts[short[key]] == 1 else key}={_value_text(spec.get(key))}" for key in keys[:_SHOWN_KEYS]]
    return " ".join([*shown, *(["…"] if len(keys) > _SHOWN_KEYS else [])])


def _value_text(value: Any) -> str:
    text = value if isinstance(value, str) else "default" if value is None else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _SHOWN_LETTERS else f"{text[: _SHOWN_LETTERS - 1]}…"


def _report_status(setting: Setting) -> None:
    any_done = any(seed.status == "done" for seed in setting.all_seeds)
    outcome = "left out" if any_done else f"compared, since no seed of '{setting.name}' is done"
    for run in setting.runs:
        if run.status == "running":
            notice(f"{run.paths.root}: the run has not ended; {outcome}")
            continue
        if (left := unfinished_notice(run.paths.root, run.paths.lock)) is not None:
            notice(left)
        sessions = Counter(status for status in run.sessions.values() if status != "done")
        for status, count in sessions.items():
            notice(f"{run.paths.root}: {count} session{'s' if count > 1 else ''} {status}; {outcome}")
