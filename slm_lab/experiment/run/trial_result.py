"""What a finished trial returns: its metrics by key, and its tables, files and agents."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.report.progress import number

if TYPE_CHECKING:
    import pandas as pd

    from slm_lab.experiment.deploy.load import LoadedAgent
    from slm_lab.experiment.files.sink import CheckpointKind
    from slm_lab.experiment.report.run import Run


class TrialResult(dict[str, Any]):
    """A dict of the metrics of a trial, as in its metrics file, with what the run wrote.

    >>> result = Trial(spec).run()
    >>> result["strength"], result.train.groupby("session").total_reward.last(), result.paths.root
    >>> action, state = result.agent().act(obs)

    Attributes: metrics: the metrics as a dict. paths: the files of the run. trial: index of the trial.
    """

    def __init__(self, metrics: dict[str, Any], paths: RunPaths, trial: int = 0) -> None:
        super().__init__(metrics)
        self.metrics, self.paths, self.trial = metrics, paths, trial

    def __repr__(self) -> str:
        """Return the folder and the metrics that are defined, one per line."""
        known = {name: value for name, value in self.metrics.items() if value is not None}
        width = max(map(len, known), default=0)
        shown = (number(value) if isinstance(value, int | float) else value for value in known.values())
        lines = (f"  {name:<{width}}  {value}" for name, value in zip(known, shown, strict=True))
        return "\n".join([f"TrialResult in {self.paths.root}", *lines])

    @cached_property
    def run(self) -> Run:
        """The run folder, as `load_run` reads it."""
        from slm_lab.experiment.report.run import Run

        return Run(self.paths, self.trial)

    @property
    def train(self) -> pd.DataFrame:
        """The rows of training of all Sessions: columns session and policy, then those of the CSV files."""
        return self.run.train

    @property
    def eval(self) -> pd.DataFrame:
        """The rows of evaluation in the same form; none without meta.rigorous_eval."""
        return self.run.eval

    def agent(self, session: int | None = None, which: CheckpointKind = "best") -> LoadedAgent:
        """Load the trained agent of a Session; by default the one with the best weights. Raises UserError (see load_agent)."""
        from slm_lab.experiment.deploy.load import load_agent

        return load_agent(self.paths.root, which, session)
