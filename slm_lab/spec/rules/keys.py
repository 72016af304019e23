"""Paths of sections of a spec, and a rule that applies to keys of any section."""

from __future__ import annotations

from collections.abc import Iterable

from slm_lab.spec.models.base import SpecModel
from slm_lab.spec.report import KeyPath, Report

ALGORITHM: KeyPath = ("agent", "algorithm")
MEMORY: KeyPath = ("agent", "memory")
SAMPLER: KeyPath = ("meta", "sampler")


def reject_non_defaults(section: SpecModel, keys: Iterable[str], location: KeyPath, why: str, report: Report) -> None:
    """Add a problem to `report` for each of `keys` whose value is not the default value, because these keys have no effect.

    Args: why: reason why the keys have no effect.
    """
    for key in keys:
        if getattr(section, key) != type(section).model_fields[key].default:
            report.add_problem((*location, key), f"has no effect: {why}")
