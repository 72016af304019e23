"""Which kind of Session a spec asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from slm_lab.experiment.plan import Plan, Report, Stop
from slm_lab.experiment.sampler.session import SampledSession
from slm_lab.experiment.session import Session, seeded
from slm_lab.lib.heap import PRIVATE, CommonHeap, Heap, common_file
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.spec import Spec


def make_session(
    spec: Spec,
    index: int = 0,
    plan: Plan | None = None,
    *,
    trial: int = 0,
    stop: Stop | None = None,
    report: Report | None = None,
    heap: Heap = PRIVATE,
    restart: int = 0,
) -> Session | SampledSession:
    """Session number `index` of a trial, with rollout workers where the spec has meta.sampler."""
    if spec.meta.sampler is not None:
        return SampledSession(spec, index, plan, trial=trial, stop=stop, report=report)
    return Session(spec, index, plan, trial=trial, stop=stop, report=report, heap=heap, restart=restart)


def common_heap(spec: Spec, fd: int, index: int = 0, *, fresh: bool = True) -> CommonHeap:
    """The memory in common, in file `fd`, as Session number `index` of a spec with meta.distributed sees it."""
    meta = spec.meta
    return CommonHeap(fd, index, meta.max_session, synced=meta.distributed == "synced", locked=meta.hogwild_lock, fresh=fresh)


@contextmanager
def _heap_to_check(spec: Spec) -> Iterator[Heap]:
    """Where one of the spec's Sessions can be built: memory in common, though with nobody, where they train one net."""
    if not spec.meta.distributed:
        yield PRIVATE
        return
    fd = common_file()
    try:
        yield common_heap(spec, fd)
    finally:
        os.close(fd)


def check_builds(specs: list[Spec], plan: Plan, source: str) -> None:
    """Make env and agent of each spec once. Raises SpecError with the problems of all of them; `source` names the specs."""
    problems = []
    for spec in specs:
        prefix = f"{spec.name}." if len(specs) > 1 else ""
        try:
            with _heap_to_check(spec) as heap:
                make_session(seeded(spec, 0), plan=plan, heap=heap).build().close()
        except SpecError as error:
            problems += [Problem(f"{prefix}{problem.path}", problem.message) for problem in error.problems]
    if problems:
        raise SpecError(source, problems)
