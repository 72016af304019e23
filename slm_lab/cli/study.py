"""`study` and `study@{folder | latest}`: run or continue a study."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.output import OK
from slm_lab.cli.parser import UsageError


def study(file: str | None, name: str | None, where: str, arguments: Namespace) -> int:
    """Run a study, or what is missing of the one in a folder; FILE says what is to be run, also of a continued study.

    Without --set, the arguments of the last start apply to a continued study.
    """
    from slm_lab.experiment.files.study_paths import about_study, find_study
    from slm_lab.experiment.plan import Plan
    from slm_lab.experiment.run.study.study import StudyExperiment
    from slm_lab.lib.log import notice
    from slm_lab.spec.load.study_file import load_study

    if file is None or name is None:
        raise UsageError(f"study@{where}: FILE and NAME are missing; a study is continued as its file says: FILE NAME study@{where}")
    paths = find_study(where, name, arguments.data_dir) if where else None
    sets = arguments.set or ([] if paths is None else about_study(paths).get("set", []))
    if sets and not arguments.set:
        notice(
            f"the arguments of the last start apply: {' '.join(f'--set {one}' for one in sets)}; other --set arguments replace all of them"
        )
    loaded = load_study(file, name, sets)
    plan = Plan(data_dir=arguments.data_dir, device=arguments.device, jobs=arguments.jobs, cluster=arguments.cluster)
    StudyExperiment(loaded, plan, paths=paths, adopt=arguments.adopt or ()).run()
    return OK
