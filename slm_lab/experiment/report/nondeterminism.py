"""Which trainings cannot be repeated exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nondeterminism_reason(keys: Mapping[str, Any], *, of_search: bool = False, device: str | None = None) -> str | None:
    """Return why repeated training with the same spec and seed does not give the same bytes, or None if training is deterministic.

    Args:
        keys: path of the spec key → value, as returned by Run.settings or Run.flat_spec. If meta.max_session is missing, it counts as 1.
        of_search: whether the training is a trial of a search.
        device: the option --device. If it is None, a GPU is assumed where agent.net.gpu is true.
    """
    if keys.get("meta.distributed") and (sessions := keys.get("meta.max_session", 1)) > 1:
        return f"its {sessions} sessions train one net in the order in which they happen to run (meta.distributed)"
    if not keys.get("meta.sampler.serial_mode"):  # without meta.sampler, all its keys are missing
        if keys.get("meta.sampler.async_rl"):
            return "its rollout workers collect while the learner trains (meta.sampler.async_rl)"
        inference = keys.get("meta.sampler.inference")
        on_gpu = device.startswith("cuda") if device is not None else keys.get("agent.net.gpu") is True
        if inference == "central" or (inference == "auto" and on_gpu):
            return "central inference groups observations by the time at which they arrive (meta.sampler.inference)"
    if of_search and keys.get("meta.search_algorithm") == "pbt":
        return "trials of population-based training take over weights of other trials (meta.search_algorithm)"
    return None
