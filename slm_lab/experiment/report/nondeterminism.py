"""Which trainings and continuations cannot be repeated exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def inexact_continuations(starts: Sequence[Mapping[str, Any]], session: int | None = None) -> list[tuple[int, str]]:
    """Return (frame, reason) for each start of a run that continued a Session inexactly. The later rows of the Session may differ from
    those of an uninterrupted run.

    If a start continued several Sessions inexactly, the result contains the one with the lowest frame.

    Args: starts: the entries of meta.run in the saved spec, one for each start of the run. session: index of the only Session to consider,
    or None for all Sessions.
    """
    found = []
    for start in starts:
        continued = start.get("continues") or {}
        of_sessions = continued.values() if session is None else [continued.get(str(session), {})]
        inexact = [one for one in of_sessions if one.get("exact") is False]
        if inexact:
            first = min(inexact, key=lambda one: int(one["frame"]))
            found.append((int(first["frame"]), "; ".join(first.get("lost", ())) or "its spec was changed"))
    return found
