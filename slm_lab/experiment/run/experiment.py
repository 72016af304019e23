"""Code that trials, searches and studies share: it manages the folder, the lock of the folder and signals, and runs tasks in a loop."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from slm_lab.experiment.execute.executor import Executor, Message, Resources, Target, Task, TaskDied
from slm_lab.experiment.execute.local.fork_server import server_in_use, use_start_method
from slm_lab.experiment.execute.local.interrupt import stop_on_signal
from slm_lab.experiment.files.lock import RunLock
from slm_lab.experiment.plan import Interrupted, Plan, Stop, TrialFailed, UserError
from slm_lab.experiment.report.progress import Display
from slm_lab.lib.files import unwritable_reason
from slm_lab.spec.models.meta import StartMethod
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

ATTEMPTS = 2
"""Number of failed starts after which a trial of a search or a run of a study is not started again.

A start that ended because the experiment was stopped does not count as failed.
"""
STOP_SECONDS = 120.0
"""Maximum time in seconds that a task has to save and analyse its results after a stop request."""
_POLL = 0.25
_NEEDED_BYTES = 16 * 2**20
"""Minimum free disk space in bytes that is required to start a run."""
Item = TypeVar("Item")
Paths = TypeVar("Paths")


class Experiment(Generic[Paths]):
    """Base class of trials, searches and studies.

    Attributes:
        paths: paths of the experiment's files, or None until the folder of the experiment exists.
        lock: the lock of the experiment's folder, which is held while the experiment runs, or None until the folder exists.
        display: object that prints and logs messages while the experiment runs, or None before the experiment runs.
    """

    paths: Paths | None = None
    lock: RunLock | None = None
    display: Display | None = None

    @property
    def _existing_paths(self) -> Paths:
        """The paths of the experiment's files. The folder of the experiment must exist."""
        assert self.paths is not None
        return self.paths

    @contextmanager
    def _run_context(self, stop: Stop, folder: Path, method: StartMethod, interrupt_message: Callable[[], str]) -> Iterator[None]:
        """Convert signals to stop requests while the with-block runs, and release the lock of the experiment at the end.

        Args:
            folder: folder to which the experiment writes.
            method: start method of the processes that are started in the with-block.
            interrupt_message: function that returns the error message if the with-block raises a KeyboardInterrupt without a message.

        Raises UserError before the with-block runs if the folder cannot be written, and Interrupted if the with-block is interrupted.
        """
        try:
            check_writable(folder)
            use_start_method(method)
            with stop_on_signal(stop), server_in_use():
                yield
        except KeyboardInterrupt as error:
            self._log(message := str(error) or interrupt_message())
            raise Interrupted(message, stop.number) from None
        except TrialFailed as error:
            self._log(str(error))
            raise
        finally:
            if self.lock is not None:
                self.lock.release()

    def _log(self, text: str) -> None:
        """Write a message to the log file. The caller prints the message."""
        if self.display is not None:
            self.display.log(text)


def acquire_lock(path: Path, what: str = "run") -> RunLock:
    """Acquire the lock of a folder by the lock file `path`, and return the lock.

    Raises UserError if the folder is in use or cannot be written.
    """
    try:
        return RunLock(path, what)
    except OSError as error:
        raise UserError(f"cannot write to the folder of the {what}, {path.parent}: {error.strerror or error}") from None


@contextmanager
def cleanup_on_error(data_dir: Path, new_folder: Callable[[], Path | None]) -> Iterator[None]:
    """Context manager for writing the first files of an experiment. If the with-block fails, the folder `new_folder()` is removed.

    If `new_folder` returns None, no folder is removed. An OSError is replaced by a UserError.
    """
    try:
        yield
    except BaseException as error:
        if (folder := new_folder()) is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write to the data folder {data_dir}: {error.strerror or error}") from None
        raise


def check_writable(folder: Path) -> None:
    """Raise UserError if the data folder cannot be created, if no file can be created in the folder, or if the disk is almost full.

    This function creates neither a file nor a folder.
    """
    try:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        is_folder = existing.is_dir()
    except OSError as error:  # for example, an unreadable parent folder, or a name that is too long
        raise UserError(f"cannot write to the data folder {folder}: {error.strerror or error}") from None
    if not is_folder:
        raise UserError(f"cannot write to the data folder {folder}: {existing} is not a folder")
    if (reason := unwritable_reason(existing)) is not None:
        raise UserError(f"cannot write to the data folder {folder}: {reason} in {existing}")
    usage = shutil.disk_usage(existing)
    if usage.total and usage.free < _NEEDED_BYTES:
        needed, free = (f"{size / 2**20:.3g} MiB" for size in (_NEEDED_BYTES, usage.free))
        raise UserError(f"cannot write to the data folder {folder}: a run needs {needed} of disk space, and {free} are free")


@dataclass(frozen=True)
class TaskStart(Generic[Item]):
    """A task that a Planner returns to be started. `item` is the planner's object for this task, such as the state of a trial."""

    item: Item
    name: str
    target: Target
    args: tuple[Any, ...]


class Planner(Protocol[Item]):
    """Protocol of objects that decide which tasks `run_plan` runs, and that handle the results of the tasks."""

    @property
    def concurrent(self) -> int:
        """Maximum number of tasks that run concurrently."""

    def next_task(self, slot: int) -> TaskStart[Item] | None:
        """Return the task to start next, or None if no task should be started now.

        Args: slot: index of the task among the running tasks. `slot` is below `concurrent`, and no other running task has the same `slot`.
        """

    def on_message(self, item: Item, task: Task, message: Message) -> None:
        """Handle a message that the task of `item` has sent."""

    def on_task_end(self, item: Item, died: TaskDied) -> None:
        """Handle the end of the task of `item`. `next_task` may later return another task for `item`."""

    def update(self) -> None:
        """Save and display the state of the planner. `run_plan` calls this method about four times per second while tasks run."""

    def on_stop_request(self) -> None:
        """Handle a stop request. `on_stop_request` is called once.

        After a stop request, running tasks save their state, and no new task is started.
        """


def run_plan(planner: Planner[Item], executor: Executor, resources: Resources, stop: Stop) -> None:
    """Run the tasks that a planner returns, as many concurrently as the planner allows.

    This function returns when all started tasks have ended, and either the planner returns no more tasks or a stop was requested.
    """
    running: dict[Any, tuple[Item, int]] = {}
    stopped = False
    while True:
        if stop.requested and not stopped:
            stopped = True
            planner.on_stop_request()
            executor.stop(STOP_SECONDS)
        while not stop.requested and len(running) < planner.concurrent:
            slots = {slot for _, slot in running.values()}
            slot = next(slot for slot in range(planner.concurrent) if slot not in slots)
            if (start := planner.next_task(slot)) is None:
                break
            running[executor.start(start.name, start.target, *start.args, resources=resources)] = start.item, slot
        if not running:
            return
        for event in executor.events(_POLL):
            match event:
                case Message(task):
                    planner.on_message(running[task][0], task, event)
                case TaskDied(task):
                    planner.on_task_end(running.pop(task)[0], event)
        planner.update()


def find_build_problems(spec: Spec, plan: Plan, place: str, prefix: str = "") -> list[Problem]:
    """Build the env and the agent of a spec, close the env, and return the problems that occurred. This function imports torch.

    Args:
        place: key path to which the problems are attributed, such as "search.agent.net.lr".
        prefix: text before the message of each problem.
    """
    from slm_lab.experiment.session.session import Session
    from slm_lab.experiment.training.resolve import complete_spec

    try:
        Session(complete_spec(spec), plan=plan).build().close()
    except SpecError as error:
        return [Problem(place, f"{prefix}{problem}", problem.code) for problem in error.problems]
    except UserError as error:
        return [Problem(place, f"{prefix}{error}")]
    return []
