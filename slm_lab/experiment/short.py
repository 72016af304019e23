"""Values that a spec leaves to the run: the net of a short spec, and how often rows are written in a short run."""

from __future__ import annotations

from importlib import import_module

from slm_lab.lib.log import notice
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.spec import Spec

_ROWS = 10
"""Minimum number of rows of a Session if the spec does not say how often to write one."""


def completed(spec: Spec) -> Spec:
    """Return the spec with the values that it leaves to the run, as it is to be saved; a complete spec as it is.

    A short spec gets the recommended net and keys for the spaces of its env, of which one is made and closed. An absent
    meta.log_frequency is at most a tenth of a Session's frames, with a notice. Raises SpecError if the env cannot be built.
    """
    return _with_log_frequency(_with_net(spec))


def _with_net(spec: Spec) -> Spec:
    if not getattr(spec, "is_short", False):
        return spec
    from slm_lab.env.make import make_env

    env = make_env(spec.env, 0, num_envs=1, training=False)
    info = env.info
    env.close()
    kind, min_side = _observation_kind(info.observation)
    filled: Spec = import_module("slm_lab.spec.recommended").complete(spec, kind, info.action.kind, min_side)
    return filled


def _observation_kind(space: ObservationSpace) -> tuple[str, int | None]:
    """Return "vector", "image" or "dict" (with an image), and the shorter side of the smallest image."""
    parts = getattr(space, "parts", ())
    images = [part.shape for part in parts or (space,) if part.dtype == "uint8"]
    sides = [min(shape[-2:]) for shape in images if len(shape) > 1]
    return "dict" if parts else "image" if images else "vector", min(sides, default=None)


def _with_log_frequency(spec: Spec) -> Spec:
    most = max(1, spec.session_frames // _ROWS)
    if "log_frequency" in spec.meta.model_fields_set or spec.meta.log_frequency <= most:
        return spec
    notice(f"{spec.name}: no meta.log_frequency given; using {most:,}, a tenth of a session's frames")
    return spec.model_copy(update={"meta": spec.meta.model_copy(update={"log_frequency": most})})
