"""`search` and `search@{run folder | latest}`: run or continue a hyperparameter search."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.output import OK
from slm_lab.cli.parser import UsageError


def search(file: str | None, name: str | None, where: str, arguments: Namespace) -> int:
    """Search, or continue the search in a run folder as its saved spec says."""
    from slm_lab.experiment.plan import Plan
    from slm_lab.experiment.run.search.search import Search
    from slm_lab.spec.load.files import find_spec_file
    from slm_lab.spec.load.loader import load_spec, mark_sets
    from slm_lab.spec.report import SpecError

    plan = Plan(data_dir=arguments.data_dir, device=arguments.device, jobs=arguments.jobs, cluster=arguments.cluster)
    confirm = arguments.confirm or 0
    if where:
        return _resume(file, name, where, arguments)
    assert file is not None
    assert name is not None
    spec = load_spec(file, name, arguments.set)
    try:
        Search(spec, plan, confirm=confirm, common_seeds=arguments.common_seeds).run()
    except SpecError as error:  # no search block, or found when building env and agent
        raise mark_sets(error, f"{find_spec_file(file)} {name}", arguments.set) from None
    return OK


def _resume(file: str | None, name: str | None, where: str, arguments: Namespace) -> int:
    from slm_lab.cli.resume import show_differences
    from slm_lab.experiment.files.find import find_search
    from slm_lab.experiment.plan import Plan
    from slm_lab.experiment.run.search.search import Search

    if arguments.common_seeds:
        raise UsageError("--common-seeds has no effect with search@: the seeds are those of the saved search; remove it")
    paths = find_search(where, name, arguments.data_dir)
    if file is not None and name is not None:
        show_differences(file, name, str(paths.spec), paths.spec_name)
    plan = Plan(data_dir=arguments.data_dir, device=arguments.device, jobs=arguments.jobs, cluster=arguments.cluster)
    Search.resume(paths.root, arguments.set, plan, confirm=arguments.confirm or 0).run()
    return OK
