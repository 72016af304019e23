"""Implementation of the command `doctor`: find the faults of a run, rank them by severity, and name the evidence and a spec key to change.

The rules that detect the faults are in doctor_rules.py and doctor_learning.py.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from slm_lab.experiment.files.find import BEST, TrainingChoice, find_run, find_training
from slm_lab.experiment.files.named_model import check_no_model
from slm_lab.experiment.files.paths import study_in
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report import doctor_learning as learning
from slm_lab.experiment.report import doctor_rules as rules
from slm_lab.experiment.report.doctor_case import DiagnosedRun, NotApplicable, NotMeasured, Session
from slm_lab.experiment.report.doctor_finding import Finding, Severity
from slm_lab.experiment.report.run import Run

__all__ = ["Diagnosis", "Finding", "diagnose_run"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "remark")
_WIDTH = 80
Subject = TypeVar("Subject", Session, DiagnosedRun)


RULES: tuple[Callable[[Session], Finding | None], ...] = (
    *(rules.discount, rules.time_limit, rules.truncation, rules.reward_scale, rules.value_range, rules.observation_scale),
    *(rules.replay_ratio, rules.policy_lag, rules.staleness),
    *(learning.clipping, learning.entropy_high, learning.dead_units, learning.large_updates, learning.small_updates),
    *(learning.entropy_lost, learning.saturated_actions, learning.values, learning.gradients, learning.critic, learning.learning_rate),
    *(rules.baseline, rules.rating, rules.bottleneck, rules.lockstep, rules.episodes),
)
"""The rules that are applied to each session. Rules for causes precede rules for symptoms. Findings of equal severity are reported in the
order of these rules."""
TRIAL_RULES: tuple[Callable[[DiagnosedRun], Finding | None], ...] = (rules.seeds,)
"""The rules that are applied once to the whole trial instead of to each session."""


@dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose_run`: the findings in a run, and the names of the rules that could be applied."""

    findings: tuple[Finding, ...]
    """The findings, ordered by severity and then by the order of RULES."""
    checked: tuple[str, ...]
    """Names of the rules for which at least one session had the necessary data."""
    not_checked: dict[str, str]
    """Name of each rule that could not be applied because data is missing → description of the missing data."""


def diagnose_run(run: Run, *, checkpoints: bool = True) -> Diagnosis:
    """Apply all rules to a run, and return the findings, ordered by severity, and the names of the rules that could be applied.

    If a file is missing or damaged, the rules that need the file are not applied.

    Args: checkpoints: whether to read the last checkpoint of each session, which imports torch.

    Raises UserError if the spec of the run cannot be read.
    """
    case = DiagnosedRun(run, checkpoints=checkpoints)
    found, checked, missing = list[Finding](), list[str](), dict[str, str]()
    for rule in RULES:
        results = list(_apply_rule(rule, case.sessions, missing))
        checked += [rule.__name__] if results else []
        found += _merge_findings([(session, finding) for session, finding in results if finding is not None], len(results))
    for trial_rule in TRIAL_RULES:
        results_of_trial = list(_apply_rule(trial_rule, [case], missing)) if case.sessions else []
        checked += [trial_rule.__name__] if results_of_trial else []
        found += [finding for _, finding in results_of_trial if finding is not None]
    ranked = sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(tuple(ranked), tuple(checked), {name: why for name, why in missing.items() if name not in checked})


def _apply_rule(
    rule: Callable[[Subject], Finding | None], subjects: Sequence[Subject], missing: dict[str, str]
) -> Iterator[tuple[Subject, Finding | None]]:
    """Apply a rule to each subject (a session or the whole run), and yield (subject, finding or None).

    A session or run that lacks the data for the rule is omitted, and missing[name of the rule] becomes the description of the missing data.
    A session or run to which the rule does not apply is omitted too.
    """
    for subject in subjects:
        try:
            finding = rule(subject)
            yield subject, finding and replace(finding, rule=rule.__name__)
        except NotApplicable:
            pass
        except NotMeasured as error:
            missing[rule.__name__] = str(error)
    if not subjects:
        missing[rule.__name__] = "there are no rows yet"


def _merge_findings(found: Sequence[tuple[Session, Finding]], sessions: int) -> list[Finding]:
    """Merge the findings of one rule in several sessions into one finding.

    The evidence of the merged finding is the evidence of the first finding. If less than half of the sessions have the fault, the severity
    is lowered by one level.

    Args: sessions: number of sessions in which the rule was applied.
    """
    if not found:
        return []
    first = found[0][1]
    numbers = tuple(sorted({session.session_number for session, _ in found if session.session_number is not None}))
    severity = min((finding.severity for _, finding in found), key=SEVERITIES.index)
    if 2 * len(found) < sessions:
        severity = SEVERITIES[min(SEVERITIES.index(severity) + 1, len(SEVERITIES) - 1)]
    return [replace(first, severity=severity, sessions=numbers)]


def find_trial(where: str, data_dir: Path, choice: TrainingChoice = BEST) -> Run:
    """Return the run that `where` and `choice` name (see find_training).

    Unlike find_training, find_trial accepts a trial without a checkpoint.

    Raises UserError if no such run exists.
    """
    if choice == TrainingChoice(choice.trial) != BEST and study_in(Path(where)) is None and study_in(data_dir / where) is None:
        paths = find_run(where, None, data_dir)
        if choice.trial in paths.trials():
            return Run(paths, choice.trial)
    check_no_model(where, data_dir)
    training = find_training(where, None, data_dir, choice)
    return Run(training.paths, training.trial)


def check_rows(run: Run) -> None:
    """Raise UserError if no training table of a run has a row, since the diagnostic rules need at least one row."""
    if not any(len(table["frame"]) for table in run.tables("train").values()):
        where = f"{run.paths.root} has no rows to examine (status: {run.status})"
        raise UserError(f"{where}; expected at least one row in {run.paths.session_df(0, t=run.trial)}")


# ---- output


def change_option(finding: Finding) -> str | None:
    """Return the command-line option that makes the recommended change, such as `--set agent.net.optim_spec.lr=0.0003`.

    Returns None if the finding names no key.
    """
    if finding.key is None:
        return None
    value = finding.value
    text = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return f"--set {finding.key}={text}"


def diagnosis_dict(run: Run, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as a dict for a JSON file, with the keys run, spec, trial, status, findings, checked and not_checked.

    A finding in the dict has the fields of Finding and the key `set`, which is the command-line option that makes the recommended change.
    """
    findings = [{**asdict(finding), "set": change_option(finding)} for finding in diagnosis.findings]
    about: dict[str, Any] = {"run": str(run.paths.root), "spec": run.name, "trial": run.trial, "status": run.status}
    return about | {"findings": findings, "checked": diagnosis.checked, "not_checked": diagnosis.not_checked}


def diagnosis_text(run: Run, diagnosis: Diagnosis) -> str:
    """Return a diagnosis as text for the terminal, in lines of at most 80 characters."""
    lines = _wrap_text(f"{run.name} in {run.env}, {_session_count_text(run)}, {run.status}: {_summary(diagnosis)}")
    for number, finding in enumerate(diagnosis.findings, 1):
        lines += ["", *_wrap_text(f"{number}. {finding.severity}: {finding.title}{sessions_text(run, finding)}")]
        lines += _wrap_text(finding.evidence, "   ")
        lines += _wrap_text(f"{finding.advice}:" if finding.key else finding.advice, "   ")
        lines += [f"     {option}"] if (option := change_option(finding)) else []
    lines += ["", *_wrap_text(f"checked: {', '.join(diagnosis.checked) or 'nothing'}")]
    if diagnosis.not_checked:
        reasons: dict[str, list[str]] = {}
        for rule, why in diagnosis.not_checked.items():
            reasons.setdefault(why, []).append(rule)
        lines += _wrap_text("not checked: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()))
    return "\n".join(lines)


def _wrap_text(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent or "  ", break_on_hyphens=False)


def _session_count_text(run: Run) -> str:
    count = len(run.sessions)
    return f"{count} session{'' if count == 1 else 's'}"


def _summary(diagnosis: Diagnosis) -> str:
    if not diagnosis.checked:
        return "no rows to examine"
    severities = [finding.severity for finding in diagnosis.findings]
    counts = [(severities.count(one), one) for one in SEVERITIES]
    parts = [f"{count} {one}{'s' if count > 1 else ''}" for count, one in counts if count]
    return ", ".join(parts if severities and severities[0] != "remark" else ["no problem found", *parts])


def sessions_text(run: Run, finding: Finding) -> str:
    """Return a text with the numbers of the sessions that have a fault, such as " (session 1)", or "" if all sessions have the fault."""
    if not finding.sessions or set(finding.sessions) == set(run.sessions):
        return ""
    return f" (session{'s' if len(finding.sessions) > 1 else ''} {', '.join(map(str, finding.sessions))})"
