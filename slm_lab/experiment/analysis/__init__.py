"""From the tables of a trial to its metrics and graphs."""

from slm_lab.experiment.analysis.analyze import analyze_trial
from slm_lab.experiment.analysis.baseline import random_baseline

__all__ = ["analyze_trial", "random_baseline"]
