"""The command `check FILE [NAME] [--build]`, which validates specs without training."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slm_lab.cli.files import check_file_argument, mark_set_keys
from slm_lab.cli.output import OK, print_json, print_result
from slm_lab.cli.parser import UsageError

if TYPE_CHECKING:
    from slm_lab.spec.models.spec import Spec
    from slm_lab.spec.report import Problem, SpecError


def check(words: list[str], arguments: Namespace) -> int:
    """Validate one spec or all specs of a file, and return the exit code. With --build, also build the env and the agent of each spec, and
    measure the training speed."""
    if not words:
        raise UsageError("check: FILE is missing; expected check FILE [NAME]")
    if len(words) > 2:
        raise UsageError(f"too many arguments after check FILE NAME: {' '.join(words[2:])}")
    file, name = check_file_argument(words[0]), words[1] if len(words) > 1 else None
    from slm_lab.spec.load.files import find_spec_file, is_study, raw_entries, raw_specs
    from slm_lab.spec.load.loader import parse_set_arguments
    from slm_lab.spec.report import SpecError

    parse_set_arguments(arguments.set)  # raises an error in --set once, and not for each spec and study

    studies = [key for key, raw in raw_entries(file)[1].items() if is_study(raw) and name in (None, key)]
    content: dict[str, Any] = {"file": str(find_spec_file(file)), "specs": [], "slm_lab": None, "studies": []}
    if not studies:
        code, found = _check_specs(file, name, arguments)
        return print_json(content | found) if arguments.json else code
    failed: SpecError | None = None
    specs = [] if name is not None else raw_specs(file)
    if specs:
        try:
            content |= _check_specs(file, name, arguments)[1]
        except SpecError as error:
            failed = error
    code, content["studies"], problems = _check_studies(file, studies, arguments)
    if failed is not None or problems:
        if not specs and len(studies) == 1:
            raise SpecError(f"{content['file']} {studies[0]}", problems[studies[0]])
        listed = [replace(one, path=f"{key}.{one.path}".rstrip(".")) for key, found in problems.items() for one in found]
        raise SpecError(content["file"], [*([] if failed is None else failed.problems), *listed])
    return print_json(content) if arguments.json else code


def _print_unless_json(lines: Sequence[str], arguments: Namespace) -> int:
    """Print lines of text, unless the option --json is given, and return the exit code."""
    return OK if arguments.json else print_result("\n".join(lines))


def _check_specs(file: str, name: str | None, arguments: Namespace) -> tuple[int, dict[str, Any]]:
    """Validate the specs of a file and print one line for each spec. Return the exit code and, for the option --json, the content of the
    JSON document."""
    from slm_lab.lib.text import wrap_paragraph
    from slm_lab.spec.load.files import find_spec_file
    from slm_lab.spec.load.loader import load_with_notices, log_notices
    from slm_lab.spec.report import SpecError

    source = " ".join([str(find_spec_file(file)), *([name] if name else [])])
    try:
        loaded = load_with_notices(file, name, arguments.set)
    except SpecError as error:
        if name is not None:
            raise
        raise SpecError(error.source, [*error.problems, *_check_envs_of_other_specs(file, error, arguments)]) from None
    log_notices(loaded.notes)
    specs = loaded.specs
    with mark_set_keys(file, name, arguments.set):
        if problems := _env_problems(specs):
            raise SpecError(source, problems)
        reports = ["valid"] * len(specs)
        if arguments.build:
            from slm_lab.experiment.plan import Plan
            from slm_lab.experiment.run.engine import check_builds

            reports = check_builds(specs, Plan(device=arguments.device), source)
    lines = [wrap_paragraph(f"{spec.name}: {'builds; ' * arguments.build}{report}") for spec, report in zip(specs, reports, strict=True)]
    if loaded.differences is not None:
        lines.append(_summary(loaded.differences))
    code = _print_unless_json(lines, arguments)
    built = [report if arguments.build else None for report in reports]
    named = [{"name": spec.name, "builds": report} for spec, report in zip(specs, built, strict=True)]
    return code, {"specs": named, "slm_lab": None if loaded.differences is None else {"differences": list(loaded.differences)}}


def _check_envs_of_other_specs(file: str, error: SpecError, arguments: Namespace) -> list[Problem]:
    """Check the envs of those specs in a file for which `error` contains no problem. Print the names of the specs whose envs are valid, and
    return the problems of all other checked specs."""
    from slm_lab.spec.load.files import raw_specs
    from slm_lab.spec.load.loader import load_with_notices, mark_set_arguments
    from slm_lab.spec.report import SpecError

    paths = [problem.path for problem in error.problems]
    if not all(paths):  # a problem without a path concerns the file or the option --set
        return []
    others = [name for name in raw_specs(file) if not any(path == name or path.startswith(f"{name}.") for path in paths)]
    found = {name: _env_problems(load_with_notices(file, name, arguments.set).specs) for name in others}
    if valid := [name for name in others if not found[name]]:
        _print_unless_json([f"{name}: valid" for name in valid], arguments)
    problems = [replace(one, path=f"{name}.{one.path}") for name in found for one in found[name]]
    return mark_set_arguments(SpecError(error.source, problems), error.source, arguments.set).problems


def _env_problems(specs: Sequence[Spec]) -> list[Problem]:
    """Return the problems with the env of each spec: with its id, wrappers and constructor arguments. This function imports the modules
    that define the envs."""
    given = [spec for spec in specs if spec.env.kwargs or spec.env.wrappers or ":" in spec.env.name]
    if not given:
        return []
    from slm_lab.env.make import env_argument_problems

    prefixes = {spec.name: f"{spec.name}." if len(specs) > 1 else "" for spec in given}
    return [replace(one, path=f"{prefixes[spec.name]}{one.path}") for spec in given for one in env_argument_problems(spec.env)]


def _check_studies(file: str, names: list[str], arguments: Namespace) -> tuple[int, list[dict[str, Any]], dict[str, list[Problem]]]:
    """Validate studies and print the runs of each study. With the option --build, also estimate the training time of each study.

    Returns: (exit code, for the option --json one dict per valid study, the problems of each invalid study).
    """
    from slm_lab.spec.load.study_file import load_study, locate_problem
    from slm_lab.spec.report import SpecError

    problems: dict[str, list[Problem]] = {}
    lines, valid = list[str](), list[dict[str, Any]]()
    for name in names:
        try:
            study = load_study(file, name, arguments.set)
        except SpecError as error:
            problems[name] = error.problems
            continue
        first = {(run.entry, run.env): run for run in study.runs}
        located = [locate_problem(study.spec, run, one) for run in first.values() for one in _env_problems([run.spec])]
        if located:
            problems[name] = [replace(one, path=f"study.{one.path}") for one in dict.fromkeys(located)]
            continue
        lines.append(f"{name}: valid; {len(study.runs)} runs")
        seeds: dict[tuple[str, str], list[int]] = {}
        for run in study.runs:
            seeds.setdefault((run.entry, run.env), []).append(run.random_seed)
        lines += [f"  {entry}, {env}: random_seed {', '.join(map(str, found))}" for (entry, env), found in seeds.items()]
        entries = [{"entry": entry, "env": env, "random_seed": found} for (entry, env), found in seeds.items()]
        valid.append({"name": name, "runs": len(study.runs), "entries": entries, "random_seed": list(study.spec.random_seed)})
        if arguments.build:
            runs = [len(seeds[key]) for key in first]
            seconds, unknown = _study_time(file, name, [run.spec for run in first.values()], runs, arguments)
            valid[-1] |= {"seconds": seconds, "unmeasured": unknown}
            lines.append(_time_text(seconds, unknown))
    code = _print_unless_json(lines, arguments) if lines else OK
    return code, valid, problems


def _study_time(file: str, name: str, specs: list[Spec], runs: list[int], arguments: Namespace) -> tuple[float, int]:
    """Build the env and the agent of each spec of a study. Return the estimated training time of all runs of the study in seconds, and the
    number of specs whose training time cannot be measured.

    Args: runs: number of runs of each spec.
    """
    from slm_lab.experiment.plan import Plan
    from slm_lab.experiment.run.engine import expected_times

    times = expected_times(specs, Plan(device=arguments.device), f"{file} {name}")
    known = [seconds * count for seconds, count in zip(times, runs, strict=True) if not math.isnan(seconds)]
    return sum(known), len(times) - len(known)


def _time_text(seconds: float, unknown: int) -> str:
    from slm_lab.experiment.report.progress import format_duration

    without = f", without {unknown} that cannot be measured" if unknown else ""
    return f"  builds; about {format_duration(seconds)} of training, one run after another{without}"


def _summary(differences: list[str]) -> str:
    """Return a line of text that lists how a spec file that was written for SLM Lab behaves differently in this package."""
    if not differences:
        return "written for SLM Lab; means the same here"
    return f"written for SLM Lab; differs here: {', '.join(differences)} (docs/from_slm_lab.md)"
