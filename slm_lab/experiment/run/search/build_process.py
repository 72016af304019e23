"""The check that the values of a search can be built, in a child process: the process of the search does not load torch."""

from __future__ import annotations

from slm_lab.experiment.execute.local.child import ChildContext
from slm_lab.experiment.execute.local.supervisor import Died, Message, Supervisor
from slm_lab.experiment.plan import Plan
from slm_lab.spec.base import SpecError
from slm_lab.spec.search_space import SearchSpace
from slm_lab.spec.spec import Spec


def check_builds_in_process(spec: Spec, plan: Plan) -> None:
    """Raise SpecError for values of a search of which no env or agent can be made (build_check)."""
    with Supervisor() as supervisor:
        supervisor.start("build check", run_check, spec, plan)
        while True:
            for event in supervisor.events(0.5):
                match event:
                    case Message(_, "checked", (error,)):
                        if error is not None:
                            raise error
                        return
                    case Message(_, "failed", _) | Died():  # a defect, which the trials report
                        return


def run_check(context: ChildContext, spec: Spec, plan: Plan) -> None:
    """Message: ("checked", SpecError or None)."""
    from slm_lab.experiment.run.search.build_check import check_builds

    try:
        check_builds(SearchSpace(spec), plan)
    except SpecError as error:
        context.send("checked", error)
    else:
        context.send("checked", None)
