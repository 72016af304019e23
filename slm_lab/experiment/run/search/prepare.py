"""Preparation of a search: check that env and agent can be built with each value, and divide the machine or cluster among trials."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slm_lab.experiment.execute.executor import Context, Resources
from slm_lab.experiment.plan import Plan, count_session_processes
from slm_lab.experiment.run.experiment import find_build_problems
from slm_lab.experiment.training.resolve import number_of_gpus, single_session_spec
from slm_lab.lib.limits import cores
from slm_lab.lib.log import notice
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.search import SearchKey, active_values, walk_search_keys
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import KeyPath, Problem, SpecError, format_json, show_path


@dataclass(frozen=True)
class TrialShare:
    """The resources that each trial of a search uses, and the number of concurrent trials."""

    concurrent: int
    """Maximum number of trials that run concurrently."""
    cores: float
    """Number of CPU cores that each trial reserves."""
    gpus: float
    sessions: int
    """Maximum number of concurrent Sessions per trial."""
    nodes: tuple[float, ...] = ()
    """Number of cores of each node of the cluster, or () if the search runs on this machine."""

    @property
    def resources(self) -> Resources:
        """Resources that each trial reserves."""
        return Resources(self.cores, self.gpus)


def available_cores(spec: Spec, plan: Plan) -> int:
    """Return the number of cores that a search uses: with `--jobs N`, the cores of N Sessions, and otherwise all cores of this machine."""
    return cores() if plan.jobs is None else plan.jobs * count_session_processes(spec.meta)


def trial_resources(spec: Spec, plan: Plan, target: int, gpus: float, nodes: Sequence[float] = ()) -> TrialShare:
    """Return the TrialShare with which `target` trials share the cores and the `gpus` of this machine or of the nodes of a cluster.

    A trial reserves one core for each process of its concurrent Sessions, and at least meta.search_resources.cpu cores. With a scheduler,
    all Sessions of a trial run concurrently even if there are fewer cores, since the scheduler compares means over Sessions at equal
    frames. Sessions that train one net also run concurrently. In population-based training all trials run concurrently, since trials are
    compared at equal frames.
    """
    meta, processes = spec.meta, count_session_processes(spec.meta)
    available = int(max(nodes)) if nodes else available_cores(spec, plan)
    together = bool(meta.distributed) or meta.search_scheduler is not None or meta.search_algorithm == "pbt"
    sessions = meta.max_session if together else max(1, min(meta.max_session, available // processes))
    share = min(max(meta.search_resources.cpu, sessions * processes), available)
    room = sum(int(node // share) for node in nodes or [available])
    if nodes and plan.jobs is not None:
        room = min(room, max(1, plan.jobs // sessions))
    concurrent, gpu = max(1, room), meta.search_resources.gpu
    if gpu and not gpus:
        notice(f"meta.search_resources.gpu is {gpu:g}, and this machine has no GPU for the search; its trials share the cores")
    if gpu and gpus:
        concurrent = max(1, min(concurrent, int(gpus / gpu)))
    concurrent = min(target, concurrent)
    if meta.search_algorithm == "pbt":
        concurrent, share = target, _equal_share(nodes or [available], target)
        gpu = min(gpu, gpus / target)
    return TrialShare(concurrent, share, min(gpu, gpus) if gpus else 0.0, sessions, tuple(nodes))


def _equal_share(nodes: Sequence[float], target: int) -> float:
    """Return the maximum number of cores per trial with which `target` concurrent trials fit on the nodes."""
    shares = {node / part for node in nodes if node for part in range(1, target + 1)}
    return max(share for share in shares if sum(int(node / share + 1e-9) for node in nodes) >= target)


_MOST_VALUES = 20
"""Maximum number of values per searched key for which the build is checked."""


def check_search_values(space: SearchSpace, plan: Plan) -> None:
    """Build env and agent with each value of each searched key, while other searched keys have their first value.

    For a key with a range, both ends of the range are used as values. Raises SpecError with a problem for each value with which the spec
    can be loaded but not built. A value is skipped if it is valid only together with other values of other keys. Rollout workers and shared
    nets are disabled, so that no processes are started.
    """
    problems: list[Problem] = []
    built: set[str] = set()
    for key, value, spec in _variants(space):
        lone = single_session_spec(spec)
        text = json.dumps({part: body for part, body in dump_spec(lone)[lone.name].items() if part != "meta"}, sort_keys=True, default=str)
        if text in built:
            continue
        built.add(text)
        shown = format_json(key.args[value] if key.has_options else value)
        problems += find_build_problems(lone, plan, f"search.{show_path(key.where)}", f"invalid value {shown}: ")
    if problems:
        raise SpecError(space.spec.name, problems)


def _variants(space: SearchSpace) -> Iterator[tuple[SearchKey, Any, Spec]]:
    for key, above in walk_search_keys(space.search_keys):
        for value in key.values_to_check()[:_MOST_VALUES]:
            pins = {**above, key.where: value}
            roots = [root for root in space.search_keys if root.where in pins]
            choose = partial(_pinned_or_first, pins)
            try:
                yield key, value, space.trial_spec({searched.text: chosen for searched, chosen in active_values(roots, choose)})
            except SpecError:  # the value is valid only with other values of other keys, see search_check
                continue


def _pinned_or_first(pins: Mapping[KeyPath, Any], key: SearchKey) -> Any:
    return pins.get(key.where, key.values_to_check()[0])


def check_values_task(context: Context, spec: Spec, plan: Plan, already_checked: bool) -> None:
    """Run check_search_values in a task, since the process of the search does not import torch.

    The task sends the message ("valid", number of GPUs) or ("user_error", SpecError).

    Args: already_checked: whether an earlier start of the search has checked the values.
    """
    if not already_checked:
        try:
            check_search_values(SearchSpace(spec), plan)
        except SpecError as error:
            context.send("user_error", error)
            return
    context.send("valid", number_of_gpus(plan))
