"""`train@{run folder | latest}`: continue a run."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.output import OK


def resume(file: str | None, name: str | None, where: str, arguments: Namespace) -> int:
    """Continue a run as its saved spec says; FILE is only compared with it."""
    from slm_lab.experiment.files.find import find_run
    from slm_lab.experiment.plan import Plan
    from slm_lab.experiment.run.trial import Trial
    from slm_lab.spec.load.loader import mark_sets
    from slm_lab.spec.report import SpecError

    paths = find_run(where, name, arguments.data_dir)
    if file is not None and name is not None:
        show_differences(file, name, str(paths.spec), paths.spec_name)
    plan = Plan(data_dir=arguments.data_dir, device=arguments.device, jobs=arguments.jobs, cluster=arguments.cluster)
    try:
        Trial.resume(paths.root, arguments.set, plan).run()
    except SpecError as error:  # found when building env and agent
        raise mark_sets(error, f"{paths.spec} {paths.spec_name}", arguments.set) from None
    return OK


def show_differences(file: str, name: str, saved: str, saved_name: str) -> None:
    """Print the keys in which a spec differs from the saved one, which is used."""
    from slm_lab.experiment.session.resume import differences
    from slm_lab.lib.log import notice
    from slm_lab.spec.load.loader import load_spec
    from slm_lab.spec.report import SpecError

    try:
        given = load_spec(file, name, for_search=False)
    except SpecError as error:  # it has variables, which the saved spec has values for, or was changed since
        notice(f"{file} {name} is not compared with the saved spec: {str(error).splitlines()[-1].strip()}")
        return
    for path, (one, other) in differences(given, load_spec(saved, saved_name, for_search=False)).items():
        if path != "meta.random_seed" or one is not None:
            notice(f"{path}: {one} in {file}, {other} in the saved spec, which is used")
