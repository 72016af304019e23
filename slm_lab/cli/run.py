"""The command `run [FILE [NAME [MODE]]]`, which trains, searches, runs a study, or plays a checkpoint. The modes train@, search@ and study@
continue an existing run, search or study."""

from __future__ import annotations

import itertools
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slm_lab.cli.files import Request, agent_arguments, mark_set_keys, resolve_request
from slm_lab.cli.output import OK, print_result
from slm_lab.cli.parser import MODE_OPTIONS, UsageError

if TYPE_CHECKING:
    from slm_lab.experiment.deploy.enjoy import EnjoyOptions
    from slm_lab.experiment.files.find import Training
    from slm_lab.experiment.files.paths import RunPaths
    from slm_lab.experiment.plan import Plan

_NODES_WRITE = "the nodes of the cluster write tables to a common folder (--data-dir); "
_WHY_NO_STORAGE = {"train": "checkpoints of a run stay where they are; ", "search": _NODES_WRITE, "study": _NODES_WRITE}
CLUSTER_MODES = ("train", "search", "study")


def run(words: list[str], arguments: Namespace) -> int:
    """Run a spec in the mode that the command line gives (train, dev, search, study or enjoy), and return the exit code."""
    request = resolve_request(words)
    mode, where = request.mode, request.where
    _check_options(mode, where, arguments)
    _set_seed(mode, arguments)
    if mode == "enjoy":
        return _enjoy(request, arguments)
    if mode == "study":
        _study(request, arguments)
    elif mode == "search":
        _search(request, arguments)
    else:
        (_resume if where else _train)(request, arguments)
    return OK


def _check_options(mode: str, where: str, arguments: Namespace) -> None:
    """Raise UsageError for a command-line option that has no effect in the mode `mode`."""
    for owner, options in MODE_OPTIONS.items():
        for option in options if mode != owner else ():
            value = getattr(arguments, option)
            if value is not None and value is not False:  # 0 is a value
                shown = "enjoy@" if owner == "enjoy" else owner
                raise UsageError(f"--{option.replace('_', '-')} has no effect with {mode}: it is an option of {shown}; remove it")
    if arguments.cluster is not None and mode not in CLUSTER_MODES:
        raise UsageError(f"--cluster has no effect with {mode}: it is an option of {', '.join(CLUSTER_MODES)}; remove it")
    if arguments.storage is not None and (mode != "train" or where):
        shown = f"{mode}{'@' * bool(where)}"
        raise UsageError(f"--storage {arguments.storage} has no effect with {shown}: {_WHY_NO_STORAGE.get(mode, '')}remove it")


def _set_seed(mode: str, arguments: Namespace) -> None:
    """Replace the option --seed by the equivalent --set argument. In the mode enjoy, --seed is not replaced, because in this mode --seed
    selects one of several runs."""
    if arguments.seed is None or mode == "enjoy":
        return
    from slm_lab.spec.load.loader import parse_set_arguments
    from slm_lab.spec.report import show_path

    key, value = ("random_seed", f"[{arguments.seed}]") if mode == "study" else ("meta.random_seed", str(arguments.seed))
    given = parse_set_arguments(arguments.set)
    if key in (*given.variables, *map(show_path, given.overrides)):
        raise UsageError(f"--seed {arguments.seed} and --set {key} exclude each other: both set the seed")
    arguments.set = [*arguments.set, f"{key}={value}"]


def _plan(arguments: Namespace, mode: Literal["train", "dev"] = "train") -> Plan:
    from slm_lab.experiment.plan import Plan

    given = {key: getattr(arguments, key) for key in ("data_dir", "device", "jobs", "cluster", "storage")}
    return Plan(mode=mode, **given)


def _train(request: Request, arguments: Namespace) -> None:
    """Run a new trial of a spec in the mode train or dev."""
    from slm_lab.lib.log import notice
    from slm_lab.spec.load.loader import load_spec, parse_set_arguments
    from slm_lab.spec.models.search import changed_search_keys, is_search_only
    from slm_lab.spec.report import show_path

    file, name, mode, _ = request
    for path in parse_set_arguments(arguments.set).overrides:
        if is_search_only(path):
            raise UsageError(f"--set {show_path(path)} has no effect: only a search uses it, not {mode}; remove it")
    spec = load_spec(file, name, arguments.set, for_search=False)
    plan = _plan(arguments, "dev" if mode == "dev" else "train")
    if arguments.jobs is not None and spec.meta.distributed and mode == "train":
        notice(f"--jobs has no effect with meta.distributed: its {spec.meta.max_session} sessions all run at once")
    if unused := changed_search_keys(spec):
        notice(f"{spec.name}: {', '.join(unused)}: only for a search; not used by {mode}")
    from slm_lab.experiment.run.trial import Trial

    with mark_set_keys(file, name, arguments.set):
        trial = Trial(spec, plan=plan)
        trial.run()
    if mode == "dev" and trial.display is not None:
        words = [file, *([name] if name else []), "train", *itertools.chain(*(("--set", one) for one in arguments.set))]
        trial.display.print_line(f"train it:  slm-lab {shlex.join(words)}")


def _resume(request: Request, arguments: Namespace) -> None:
    """Continue a run with the spec that is saved in the run folder. If the command line contains FILE, FILE is only compared with the saved
    spec."""
    from slm_lab.experiment.files.find import find_run
    from slm_lab.experiment.run.trial import Trial

    paths = find_run(request.where, request.name, arguments.data_dir)
    _show_differences(request, paths)
    with mark_set_keys(str(paths.spec), paths.spec_name, arguments.set):
        Trial.resume(paths.root, arguments.set, _plan(arguments)).run()


def _show_differences(request: Request, paths: RunPaths) -> None:
    """Print the keys in which the spec NAME in FILE differs from the saved spec. A continued run uses the saved spec. If the command line
    contains no NAME, print nothing."""
    from slm_lab.experiment.session.resume import changed_keys
    from slm_lab.lib.log import notice
    from slm_lab.lib.text import last_line
    from slm_lab.spec.load.loader import load_with_notices
    from slm_lab.spec.report import SpecError

    file, name = request.file, request.name
    if name is None:
        return
    try:
        given = load_with_notices(file, name, for_search=False).specs
    except SpecError as error:  # the file was changed, or has variables (only the saved spec contains their values)
        notice(f"{file} {name} is not compared with the saved spec: {last_line(str(error))}")
        return
    if len(given) > 1:
        notice(f"{file} {name} is not compared with the saved spec: it expands to {len(given)} specs")
        return
    (saved,) = load_with_notices(paths.spec, paths.spec_name, for_search=False).specs  # the continued run logs the notices of this spec
    for path, (in_file, in_run) in changed_keys(given[0], saved).items():
        determined = path in ("meta.log_frequency", "meta.eval_episodes") or (given[0].lacks_net and path.startswith("agent."))
        if in_file is None and determined:
            continue  # the file leaves the value to the run, see dump_spec
        notice(f"{path}: {in_file} in {file}, {in_run} in the saved spec; the saved spec is used")


def _search(request: Request, arguments: Namespace) -> None:
    """Run a new search, or continue the search of a run folder with the spec that is saved in the folder."""
    from slm_lab.experiment.files.find import find_search
    from slm_lab.experiment.run.search.search import Search
    from slm_lab.spec.load.loader import load_spec

    plan, confirm = _plan(arguments), arguments.confirm or 0
    if not request.where:
        spec = load_spec(request.file, request.name, arguments.set)
        with mark_set_keys(request.file, request.name, arguments.set):
            Search(spec, plan, confirm=confirm, common_seeds=arguments.common_seeds).run()
        return
    if arguments.common_seeds:
        raise UsageError("--common-seeds has no effect with search@: the seeds are those of the saved search; remove it")
    paths = find_search(request.where, request.name, arguments.data_dir)
    _show_differences(request, paths)
    Search.resume(paths.root, arguments.set, plan, confirm=confirm).run()


def _study(request: Request, arguments: Namespace) -> None:
    """Run a new study, or run the missing runs of an existing study. For an existing study, FILE is read again.

    If the command line contains no --set argument, a continued study uses the --set arguments with which it was last started.
    """
    from slm_lab.experiment.files.paths import find_study, study_start_info
    from slm_lab.experiment.run.study.study import StudyExperiment
    from slm_lab.lib.log import notice
    from slm_lab.spec.load.study_file import load_study, study_entries

    file, name, _, where = request
    if name is None:
        raise UsageError(f"study@{where}: FILE and NAME are missing; a study is continued as its file says: FILE NAME study@{where}")
    study_entries(file, name)  # raises an error if there is no such study in the file
    paths = find_study(where, name, arguments.data_dir) if where else None
    sets = arguments.set or ([] if paths is None else study_start_info(paths).get("set", []))
    if sets and not arguments.set:
        shown = " ".join(f"--set {one}" for one in sets)
        notice(f"the arguments of the last start apply: {shown}; other --set arguments replace all of them")
    max_seeds = _max_seeds(arguments, None if paths is None else study_start_info(paths).get("max_seeds"))
    study = load_study(file, name, sets)
    if max_seeds is not None and len(study.entries) < 2:
        raise UsageError(
            f"--until-decided has no effect: {name} has only one entry, which is compared with nothing; remove --until-decided"
        )
    StudyExperiment(study, _plan(arguments), paths=paths, adopt=arguments.adopt or (), max_seeds=max_seeds).run()


def _max_seeds(arguments: Namespace, saved: int | None) -> int | None:
    """Return the maximum number of seeds for the option --until-decided. The default is the maximum number of seeds with which the study
    was last started. Return None if the study adds no seeds."""
    from slm_lab.experiment.report.decision import MAX_SEEDS
    from slm_lab.lib.log import notice

    if arguments.until_decided or (saved is not None and arguments.max_seeds is not None):
        return int(arguments.max_seeds or saved or MAX_SEEDS)
    if arguments.max_seeds is not None:
        raise UsageError(f"--max-seeds {arguments.max_seeds} has no effect without --until-decided; add that, or remove --max-seeds")
    if saved is not None:
        notice(f"the arguments of the last start apply: --until-decided --max-seeds {saved}")
    return saved


def _play_human(training: Training, options: EnjoyOptions, arguments: Namespace) -> int:
    """Let a person play against the agent of a run, reading the person's moves from stdin. Return the exit code."""
    from slm_lab.experiment.deploy.human import SEATS, play_human

    if arguments.human not in SEATS:
        seats = "first or second (without a seat, write --human after FILE, NAME and MODE)"
        raise UsageError(f"invalid seat '{arguments.human}' of --human; expected {seats}")
    others = {"--against": arguments.against, "--render": arguments.render, "--video": arguments.video, "--record": arguments.record}
    if excluded := [name for name, value in others.items() if value]:
        raise UsageError(f"--human and {excluded[0]} exclude each other: a person plays in the terminal")

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    play_human(training, options, _plan(arguments), arguments.human, sys.stdin.readline, write)
    return OK


def _enjoy(request: Request, arguments: Namespace) -> int:
    """Play episodes with the agent of a run, using the spec that is saved in the run folder. Return the exit code. FILE is used only to
    check NAME. NAME must be the name of a spec in FILE, to which values of variables may be appended."""
    if arguments.jobs is not None:
        raise UsageError(f"--jobs {arguments.jobs} has no effect with enjoy: it plays in one process; remove it")
    if arguments.render and arguments.video:
        raise UsageError("--render and --video exclude each other: an env is drawn either in a window or for a file")
    if arguments.replace and arguments.record is None:
        raise UsageError("--replace has no effect without --record PATH; remove it")
    from slm_lab.experiment.deploy.enjoy import EnjoyOptions, enjoy, format_summary
    from slm_lab.experiment.files.find import TrainingChoice, find_training, notify_if_unfinished
    from slm_lab.spec.load.files import spec_names
    from slm_lab.spec.load.loader import load_spec

    file, name = request.file, request.name
    if name is not None and not any(name == known or name.startswith(f"{known}_") for known in spec_names(file)):
        load_spec(file, name)  # raises the error that lists the known names
    options = EnjoyOptions(
        episodes=arguments.episodes,
        deterministic=arguments.deterministic,
        show="screen" if arguments.render else "video" if arguments.video else None,
        which=arguments.checkpoint or "best",
        session=arguments.session,
        record=None if arguments.record is None else Path(arguments.record),
        replace=arguments.replace,
        against=arguments.against,
        sets=arguments.set,
    )
    choice = TrainingChoice(arguments.trial, arguments.entry, arguments.env, arguments.seed, arguments.policy)
    training = find_training(request.where, request.name, arguments.data_dir, choice)
    notify_if_unfinished(training.paths)
    if arguments.human is not None:
        return _play_human(training, options, arguments)
    result = format_summary(enjoy(training, options, _plan(arguments)))
    agent_words = agent_arguments(request.where, training.paths.root, arguments)
    more = [] if options.show else [f"record it: slm-lab {shlex.join([f'enjoy@{agent_words[0]}', *agent_words[1:]])} --video"]
    agent_words += ["--policy", training.policies[0]] if arguments.policy is None and len(training.policies) > 1 else []
    return print_result("\n".join([result, *more, f"export it: slm-lab {shlex.join(['export', *agent_words])}"]))
