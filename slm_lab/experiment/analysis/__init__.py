"""Analysis of run folders: metrics, figures and comparisons from the tables of a run."""

from slm_lab.experiment.analysis.analyze import analyze_trial
from slm_lab.experiment.analysis.run import Run, load_run

__all__ = ["Run", "analyze_trial", "load_run"]
