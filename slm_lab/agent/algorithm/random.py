"""Random actions: the baseline."""

from __future__ import annotations

from slm_lab.agent.algorithm.base import Algorithm


class Random(Algorithm):
    """Uniformly random actions; does not learn."""
