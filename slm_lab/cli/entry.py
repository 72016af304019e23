"""Entry point of the command line, which parses the arguments, runs the command, and returns the exit code."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from slm_lab.cli.output import FAILED, flush, prepare_streams, print_error
from slm_lab.cli.parser import COMMANDS, MODES, USER_ERROR, UsageError, check_options_apply, make_parser
from slm_lab.lib.process import delay_garbage_collection
from slm_lab.lib.system import invalid_variable_message

INTERRUPTED = 130
_END_SECONDS = 5.0
"""Time in seconds after the end of a command at which the process is ended by force, if Python is still waiting for threads."""
_HOOK_SECONDS = 120.0
"""Additional time in seconds before the forced end of the process, for exit hooks such as the upload of an experiment tracker."""


def console() -> NoReturn:
    """Run the command line and end the process with the exit code, even if an env has left threads running."""
    prepare_streams()
    with suppress(RuntimeError, OSError, ValueError):  # there is no stderr
        faulthandler.enable()  # print a traceback if a simulator crashes this process
    code = FAILED
    try:
        code = main()
    finally:
        threading.Thread(target=_end_after, args=(_END_SECONDS, code), daemon=True, name="end of the process").start()
    sys.exit(code)


def _end_after(seconds: float, code: int) -> None:
    """End the process after `seconds` seconds if the process is still running, because Python waits for non-daemon threads or runs exit
    hooks."""
    time.sleep(seconds)
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if not left:
        time.sleep(_HOOK_SECONDS)
    what = f"threads still running ({', '.join(left)})" if left else "exit hooks still running"
    print_error(f"ended with {what}, started by the env or a library")
    os._exit(code)


def _parse(line: list[str]) -> tuple[str, Namespace]:
    """Return the name of the command that a command line calls, and the parsed arguments without the command's name. Raises UsageError."""
    first = line[0] if line and line[0] in COMMANDS else line[0].partition("@")[0] if line else ""
    about = first if first in (*COMMANDS, *MODES) and {"-h", "--help"}.intersection(line) else None
    arguments = make_parser(about).parse_intermixed_args(line)
    words = arguments.words
    name = words.pop(0) if words and words[0] in COMMANDS else "run"
    if name == "run" and (later := next((word for word in words[2:] if word in COMMANDS), None)):
        given = " ".join(word for word in words if word != later)
        raise UsageError(f"'{later}' is a command; write it before FILE and NAME: {later} {given} [options]")
    check_options_apply(name, arguments)
    return name, arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    prepare_streams()
    delay_garbage_collection()
    # the products of matrices with which numpy computes actions are small and slower with two threads (4 × 256 by 256 × 256: 93 µs instead
    # of 15)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # by default, torch's threads wait actively for the next operation; two concurrent runs on two cores then took three times as long
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with suppress(OSError):  # the current folder may have been removed
        if (here := os.getcwd()) not in sys.path and "" not in sys.path:
            sys.path.append(here)  # for "package.module:Name" in a spec
    try:
        if (wrong := invalid_variable_message()) is not None:
            raise UsageError(wrong)
        name, arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        module, _, function = COMMANDS[name].run.partition(":")
        command: Callable[..., int] = getattr(import_module(module), function)
        try:
            return command(arguments.words, arguments)
        except SystemExit as stop:
            print_error(f"an env or a module that a spec names called sys.exit({'' if stop.code is None else stop.code!r})", "31")
            return FAILED
    except KeyboardInterrupt as stop:
        print_error(str(stop) if stop.args else "interrupted; nothing was written")
        return getattr(stop, "code", INTERRUPTED)
    except Exception as error:
        from slm_lab.experiment.plan import TrialFailed, UserError
        from slm_lab.spec.report import SpecError

        if not isinstance(error, SpecError | UserError | UsageError | TrialFailed):
            raise  # a bug: show the traceback
        failed = isinstance(error, TrialFailed)
        print_error(str(error), "31" if failed else "")
        return FAILED if failed else USER_ERROR
    finally:
        flush()
