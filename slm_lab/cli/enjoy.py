"""Mode `enjoy@{run folder | latest}` of the command run."""

from __future__ import annotations

from slm_lab.cli.output import answer
from slm_lab.experiment.enjoy import enjoy as play
from slm_lab.experiment.enjoy import summary
from slm_lab.experiment.plan import Plan
from slm_lab.spec.spec import Spec


def enjoy(where: str, spec: Spec, plan: Plan) -> int:
    """Play episodes with the best checkpoint of a run, and print their returns."""
    checkpoint, returns = play(where, spec.name, plan)
    return answer(f"{checkpoint}\n{summary(returns)}")
