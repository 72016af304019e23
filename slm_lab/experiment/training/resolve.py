"""Determine values that a spec leaves open: the device, where inference runs, the net of a short spec, and the number of frames between
rows.

The modules torch and gymnasium are imported only inside functions, since a trial whose Sessions run in separate processes does not need
these modules.
"""

from __future__ import annotations

from collections.abc import Callable

from slm_lab.experiment.execute.heartbeat import BUILDING, CLOSING
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files.trackers import check_trackers_installed
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError
from slm_lab.spec.rules.resolve import complete_short_spec

_ROWS = 50
"""Minimum number of training rows of a Session if the spec does not contain meta.log_frequency."""


def complete_spec(spec: Spec, beat: Callable[[int], None] = lambda phase: None) -> Spec:
    """Return the spec with which a run is trained and saved: a copy of `spec` in which all missing values are set.

    A complete spec is returned unchanged. The section `search` is removed, and each searched key keeps its value outside this section. A
    short spec (without agent.net) is completed with the recommended net and keys for the spaces of its env. To determine the spaces, the
    env is built once and closed. If meta.log_frequency is absent, it is set such that a Session writes at least 50 rows.

    Raises SpecError if the env cannot be built, or if a tracker of meta.track is not installed.

    Args: beat: heartbeat function, which is called with each phase that begins (see execute.heartbeat).
    """
    check_trackers_installed(spec.name, spec.meta)
    return _with_net(_with_log_frequency(_without_search(spec)), beat)


def _without_search(spec: Spec) -> Spec:
    if spec.search is None:
        return spec
    body = dump_spec(spec)
    del body[spec.name]["search"]
    return load_spec(body, spec.name)


def _with_net(spec: Spec, beat: Callable[[int], None]) -> Spec:
    if not spec.lacks_net:
        return spec
    from slm_lab.env.make import make_env

    beat(BUILDING)
    env = make_env(spec.env, 0, num_envs=1, training=False)
    observation, action = env.info.observation, env.info.action
    beat(CLOSING)
    close_env(env.close)
    beat(BUILDING)
    check_unambiguous_observation(spec.name, observation)
    full = complete_short_spec(spec, observation.has_images, action.kind)
    return load_spec(dump_spec(full), spec.name)  # check the recommended values together with the given values


def check_unambiguous_observation(source: str, observation: ObservationSpace) -> None:
    """Raise SpecError if the observation space of an env is ambiguous, so that no net can be chosen for the env.

    Args: source: name of the spec, for the error message.
    """
    if observation.ambiguities:
        raise SpecError(source, [Problem(ambiguity.key, ambiguity.message) for ambiguity in observation.ambiguities])


def _with_log_frequency(spec: Spec) -> Spec:
    if "log_frequency" in spec.meta.model_fields_set:
        return spec
    frames = min(spec.meta.log_frequency, max(1, spec.session_frames // _ROWS))
    return spec.with_meta(log_frequency=frames)


def select_device(spec: Spec, plan: Plan, index: int) -> str:
    """Return the torch device of Session `index`: plan.device or, if plan.device is None, the device that the spec selects.

    Raises SpecError or UserError if this machine does not have the device.
    """
    import torch

    from slm_lab.agent.build import resolve_device

    if plan.device is None:
        return resolve_device(spec, plan.first_gpu + index)
    device, count = torch.device(plan.device), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        allowed = ", ".join(["cpu", *(f"cuda:{number}" for number in range(count))])
        raise UserError(f"--device {plan.device}: this machine has {count or 'no'} cuda device{'s' * (count != 1)}; allowed: {allowed}")
    return plan.device


def number_of_gpus(plan: Plan) -> int:
    """Import torch, and return the number of CUDA devices of this machine, or 0 if plan.device is "cpu"."""
    import torch

    return torch.cuda.device_count() if plan.device != "cpu" and torch.cuda.is_available() else 0


def single_session_spec(spec: Spec) -> Spec:
    """Return a copy of `spec` for a single Session without rollout workers and without a shared net.

    In a Session with the returned spec, only the envs may start processes.
    """
    return spec.with_meta(sampler=None, distributed=False, max_session=1)


def resolve_inference(spec: Spec, device: str) -> Spec:
    """Return `spec` with meta.sampler.inference="auto" replaced by "central" if `device` is a GPU, and by "local" if `device` is the CPU.

    With meta.sampler.serial_mode, the value "auto" always becomes "local". If "auto" is replaced and worker_num_splits does not divide
    num_envs_per_worker, worker_num_splits is set to 1.
    """
    sampler = spec.meta.sampler
    assert sampler is not None
    if sampler.inference != "auto":
        return spec
    central = device.startswith("cuda") and not sampler.serial_mode
    divisible = sampler.num_envs_per_worker % sampler.worker_num_splits == 0
    change = {"inference": "central" if central else "local"} | ({} if divisible else {"worker_num_splits": 1})
    return spec.with_meta(sampler=sampler.model_copy(update=change))
