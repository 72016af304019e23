"""`run [FILE [NAME [MODE]]]`: train, or play a checkpoint."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.commands import MODES
from slm_lab.cli.files import resolve_file_and_name
from slm_lab.cli.output import OK, print_result
from slm_lab.cli.parser import UsageError, did_you_mean


def run(words: list[str], arguments: Namespace) -> int:
    """Run the spec in its MODE."""
    if len(words) > 3:
        raise UsageError(f"too many arguments after FILE NAME MODE: {' '.join(words[3:])}")
    file, name = resolve_file_and_name(words)
    mode, where = _mode(words[2] if len(words) > 2 else "train")
    if mode == "enjoy":
        return _enjoy(file, name, where, arguments)
    from slm_lab.experiment.plan import Plan
    from slm_lab.lib.log import notice
    from slm_lab.spec.base import SpecError
    from slm_lab.spec.loader import find_spec_file, load_spec
    from slm_lab.spec.report import show_path
    from slm_lab.spec.search import is_for_search, search_keys
    from slm_lab.spec.variables import mark_sets, parse_sets

    for path in parse_sets(arguments.set).overrides:
        if is_for_search(path):
            raise UsageError(f"--set {show_path(path)} has no effect: only a search uses it, not {mode}; remove it")
    spec = load_spec(file, name, arguments.set)
    plan = Plan(mode="dev" if mode == "dev" else "train", data_dir=arguments.data_dir, device=arguments.device, jobs=arguments.jobs)
    if arguments.jobs is not None and spec.meta.distributed and mode == "train":
        notice(f"--jobs has no effect with meta.distributed: its {spec.meta.max_session} sessions all run at once")
    if unused := search_keys(spec):
        notice(f"{spec.name}: {', '.join(unused)}: only for a search; not used by {mode}")
    from slm_lab.experiment.trial import Trial

    try:
        Trial(spec, plan=plan).run()
    except SpecError as error:  # found when building env and agent
        raise mark_sets(error, f"{find_spec_file(file)} {name}", arguments.set) from None
    return OK


def _enjoy(file: str, name: str, where: str, arguments: Namespace) -> int:
    """Play a run as its saved spec says; the file is only looked up for NAME, which may be a name in it with values of variables."""
    for option, given in (*(("--set", text) for text in arguments.set), ("--jobs", arguments.jobs)):
        if given is not None:
            raise UsageError(f"{option} {given} has no effect: enjoy plays a run as its saved spec says; remove it")
    from slm_lab.experiment.enjoy import enjoy, summary
    from slm_lab.experiment.plan import Plan
    from slm_lab.spec.loader import load_spec, spec_names

    if not any(name == known or name.startswith(f"{known}_") for known in spec_names(file)):
        load_spec(file, name)  # the error with the known names
    checkpoint, returns = enjoy(where, name, Plan(data_dir=arguments.data_dir, device=arguments.device))
    return print_result(f"{checkpoint}\n{summary(returns)}")


def _mode(word: str) -> tuple[str, str]:
    """Return a MODE, and the text after its "@"."""
    mode, at, where = word.partition("@")
    if (mode == "enjoy" and where) or (mode in ("train", "dev") and not at):
        return mode, where
    hint = did_you_mean(word, ("train", "dev", "enjoy@latest")) or did_you_mean(mode, ("train", "dev", "enjoy@latest"))
    raise UsageError(f"unknown mode '{word}'" + (hint or f"; expected one of {', '.join(MODES.values())}"))
