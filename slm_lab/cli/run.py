"""`run [FILE [NAME [MODE]]]`: train, or play a checkpoint."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.files import resolve_request
from slm_lab.cli.output import OK, print_result
from slm_lab.cli.parser import UsageError

ENJOY_OPTIONS = ("episodes", "deterministic", "render", "video", "checkpoint", "session")
SEARCH_OPTIONS = ("confirm", "common_seeds")
STUDY_OPTIONS = ("adopt",)
_NODES_WRITE = "its nodes write tables, for which they need a common folder (--data-dir); "
_WHY_NO_STORAGE = {"train": "checkpoints of a run stay where they are; ", "search": _NODES_WRITE, "study": _NODES_WRITE}
CLUSTER_MODES = ("train", "search", "study")


def run(words: list[str], arguments: Namespace) -> int:
    """Run the spec in its MODE."""
    file, name, mode, where = resolve_request(words)
    _check_options(mode, arguments)
    if arguments.cluster is not None and mode not in CLUSTER_MODES:
        raise UsageError(f"--cluster has no effect with {mode}: it is an option of {', '.join(CLUSTER_MODES)}; remove it")
    if arguments.storage is not None and (mode != "train" or where):
        raise UsageError(
            f"--storage {arguments.storage} has no effect with {mode}{'@' * bool(where)}: {_WHY_NO_STORAGE.get(mode, '')}remove it"
        )
    if mode == "enjoy":
        return _enjoy(file, name, where, arguments)
    if mode == "search":
        from slm_lab.cli.search import search

        return search(file, name, where, arguments)
    if mode == "study":
        from slm_lab.cli.study import study

        return study(file, name, where, arguments)
    if where:
        from slm_lab.cli.resume import resume

        return resume(file, name, where, arguments)
    assert file is not None
    assert name is not None
    return _train(file, name, mode, arguments)


def _train(file: str, name: str, mode: str, arguments: Namespace) -> int:
    """Run a new trial of a spec in mode train or dev."""
    from slm_lab.experiment.plan import Plan
    from slm_lab.lib.log import notice
    from slm_lab.spec.load.files import find_spec_file
    from slm_lab.spec.load.loader import load_spec, mark_sets, parse_sets
    from slm_lab.spec.models.search import is_for_search, search_keys
    from slm_lab.spec.report import SpecError, show_path

    for path in parse_sets(arguments.set).overrides:
        if is_for_search(path):
            raise UsageError(f"--set {show_path(path)} has no effect: only a search uses it, not {mode}; remove it")
    spec = load_spec(file, name, arguments.set, for_search=False)
    plan = Plan(
        mode="dev" if mode == "dev" else "train",
        data_dir=arguments.data_dir,
        device=arguments.device,
        jobs=arguments.jobs,
        cluster=arguments.cluster,
        storage=arguments.storage,
    )
    if arguments.jobs is not None and spec.meta.distributed and mode == "train":
        notice(f"--jobs has no effect with meta.distributed: its {spec.meta.max_session} sessions all run at once")
    if unused := search_keys(spec):
        notice(f"{spec.name}: {', '.join(unused)}: only for a search; not used by {mode}")
    from slm_lab.experiment.run.trial import Trial

    try:
        Trial(spec, plan=plan).run()
    except SpecError as error:  # found when building env and agent
        raise mark_sets(error, f"{find_spec_file(file)} {name}", arguments.set) from None
    return OK


def _check_options(mode: str, arguments: Namespace) -> None:
    """Raise UsageError for an option that has no effect with this mode."""
    for options, owner, shown in (
        (ENJOY_OPTIONS, "enjoy", "enjoy@"),
        (SEARCH_OPTIONS, "search", "search"),
        (STUDY_OPTIONS, "study", "study"),
    ):
        for option in options if mode != owner else ():
            value = getattr(arguments, option)
            if value is not None and value is not False:  # 0 is a value
                raise UsageError(f"--{option.replace('_', '-')} has no effect with {mode}: it is an option of {shown}; remove it")


def _enjoy(file: str | None, name: str | None, where: str, arguments: Namespace) -> int:
    """Play a run as its saved spec says; the file is only looked up for NAME, which may be a name in it with values of variables."""
    if arguments.jobs is not None:
        raise UsageError(f"--jobs {arguments.jobs} has no effect with enjoy: it plays in one process; remove it")
    if arguments.render and arguments.video:
        raise UsageError("--render and --video exclude each other: an env is drawn either in a window or for a file")
    from slm_lab.experiment.deploy.enjoy import EnjoyOptions, enjoy, summary
    from slm_lab.experiment.files.find import find_run, tell_unfinished
    from slm_lab.experiment.plan import Plan
    from slm_lab.spec.load.files import spec_names
    from slm_lab.spec.load.loader import load_spec

    if file is not None and name is not None and not any(name == known or name.startswith(f"{known}_") for known in spec_names(file)):
        load_spec(file, name)  # the error with the known names
    options = EnjoyOptions(
        episodes=arguments.episodes,
        deterministic=arguments.deterministic,
        show="screen" if arguments.render else "video" if arguments.video else None,
        which=arguments.checkpoint or "best",
        session=arguments.session,
        sets=arguments.set,
    )
    paths = find_run(where, name, arguments.data_dir)
    tell_unfinished(paths)
    return print_result(summary(enjoy(paths, options, Plan(data_dir=arguments.data_dir, device=arguments.device))))
