"""`check FILE [NAME] [--build]`: validate specs without running them."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.files import check_file_argument
from slm_lab.cli.output import print_result
from slm_lab.cli.parser import UsageError


def check(words: list[str], arguments: Namespace) -> int:
    """Validate one or all specs of a file; with --build also build their env and agent, and measure their speed."""
    if not words:
        raise UsageError("check: FILE is missing; expected check FILE [NAME]")
    if len(words) > 2:
        raise UsageError(f"too many arguments after check FILE NAME: {' '.join(words[2:])}")
    from slm_lab.spec.base import SpecError
    from slm_lab.spec.loader import find_spec_file, load, notify, spec_names

    file = check_file_argument(words[0])
    try:
        loaded = load(file, words[1] if len(words) > 1 else None, arguments.set)
    except SpecError as error:
        paths = [problem.path for problem in error.problems]
        if len(words) == 1 and all(paths):  # a problem without a path is one of the file or of --set
            valid = [name for name in spec_names(file) if not any(path == name or path.startswith(f"{name}.") for path in paths)]
            if valid:
                print_result("\n".join(f"{name}: valid" for name in valid))
        raise
    notify(loaded.notes)
    specs = loaded.specs
    summary = [] if loaded.differences is None else [_summary(loaded.differences)]
    if arguments.build:
        from slm_lab.experiment.engine import check_builds
        from slm_lab.experiment.plan import Plan
        from slm_lab.spec.variables import mark_sets

        try:
            reports = check_builds(specs, Plan(device=arguments.device), " ".join([str(find_spec_file(file)), *words[1:]]))
        except SpecError as error:
            raise mark_sets(error, error.source, arguments.set) from None
        lines = [f"{spec.name}: builds; {report}" for spec, report in zip(specs, reports, strict=True)]
        return print_result("\n".join(lines + summary))
    return print_result("\n".join([*(f"{spec.name}: valid" for spec in specs), *summary]))


def _summary(differences: list[str]) -> str:
    """Return one line on what differs from SLM Lab, for which the file was written."""
    if not differences:
        return "written for SLM Lab; means the same here"
    return f"written for SLM Lab; differs here: {', '.join(differences)} (docs/from_slm_lab.md)"
