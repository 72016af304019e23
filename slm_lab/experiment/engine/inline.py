"""One Session in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slm_lab.experiment.engine import OpenRun, Outcome, cause
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.experiment.progress import Progress
from slm_lab.lib.log import logger
from slm_lab.spec.spec import Spec


def run_inline(spec: Spec, plan: Plan, trial: int, open_run: OpenRun, progress: Progress, stop: Stop) -> list[Outcome]:
    """Build, open the run, learn. Raises SpecError or UserError where the spec cannot be built or the run not be opened."""
    from slm_lab.experiment.sessions import make_session

    session = make_session(spec, 0, plan, trial=trial, stop=stop, report=progress.update).build()
    try:
        if stop.requested:
            return [Outcome(0, "stopped")]
        paths = open_run(session.env.backend)
        with _logged_to(paths.session_log(0, trial)):
            try:
                result = session.run(paths)
            except Exception as error:
                logger.info("failed", exc_info=True)
                outcome = Outcome(0, "failed", cause(error))
            else:
                outcome = Outcome(0, "stopped" if result.interrupted else "done")
    finally:
        session.close()
    progress.ended(outcome.index, outcome.status, outcome.detail)
    return [outcome]


class _Log(logging.FileHandler):
    """A log that cannot be written (the disk is full) is no error of its own."""

    def handleError(self, record: logging.LogRecord) -> None: ...


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Keep what is logged in the Session's log too."""
    handler = _Log(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()
