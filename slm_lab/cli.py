"""The command line: arguments → spec file, spec name, Plan. Loads what a command needs only when it runs."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import slm_lab
from slm_lab.experiment.screen import Screen

if TYPE_CHECKING:
    from slm_lab.experiment.plan import Plan
    from slm_lab.spec.spec import Spec

OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

_USAGE = """%(prog)s [run] [FILE [NAME [MODE]]] [options]
       %(prog)s check FILE [NAME] [--build] [options]
       %(prog)s compare RUN RUN ... [--by COLUMN] [--solve RETURN] [--label NAME ...] [--out DIR]"""
_DESCRIPTION = """\
Train agents from JSON specs. Without arguments: demo.json ppo_cartpole train.

  FILE   a spec file, as given or under slm_lab/spec/
  NAME   a spec in it; may be left out where it holds just one
  MODE   train                         run every Session, then measure and draw (default)
         dev                           one Session with extra checks: weights move, gradients are finite
         enjoy@{run folder | latest}   the best checkpoint of a run plays some episodes

  check    validate one or all specs of a file; with --build also make their env and agent
  compare  draw runs in one graph and print a table: RUN is a run folder, or a quoted pattern of such, 'data/ppo_*';
           runs of one spec, or with one --label, are seeds of one curve"""
_EPILOG = "exit codes: 0 done, 1 a Session failed, 2 an error of yours (nothing is written), 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP"
_DEMO = ("demo.json", "ppo_cartpole")
_MODES = ("train", "dev", "enjoy@latest")
_DATA_DIR = Path("data")
_AXES = ("frame", "global_frame", "wall_t", "opt_step")
_BELONGS = {
    "set": ("run", "check"),
    "device": ("run", "check"),
    "jobs": ("run",),
    "data_dir": ("run", "compare"),
    "build": ("check",),
    "by": ("compare",),
    "solve": ("compare",),
    "label": ("compare",),
    "out": ("compare",),
}
"""Option → the commands that know it."""


class _Wrong(Exception):
    """A wrong argument."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _open_streams()
    # numpy acts on matrices so small that a second thread costs more than it brings (4 × 256 by 256 × 256: 93 µs against 15)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        arguments = _parser().parse_intermixed_args(argv)
        words = arguments.words
        name = words.pop(0) if words and words[0] in COMMANDS else "run"
        _refuse_strangers(name, arguments)
        return COMMANDS[name](words, arguments)
    except KeyboardInterrupt as stop:
        _complain(str(stop) if stop.args else "stopped; nothing was written")
        return getattr(stop, "code", INTERRUPTED)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        _complain(str(error), "31" if code == FAILED else "")
        return code
    finally:
        for stream in (sys.stdout, sys.stderr):
            Screen(stream).flush()  # here, where an error is not told at exit


def _open_streams() -> None:
    """Put the null device where a stream was closed from outside (`>&-`), before another file takes its place."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _answer(text: str) -> int:
    """Write what a command was asked for on stdout; FAILED where that cannot be done. A reader that leaves early has read enough."""
    screen = Screen(sys.stdout)
    screen.write(f"{text}\n")
    screen.flush()
    if screen.error is None or isinstance(screen.error, BrokenPipeError):
        return OK
    _complain(f"cannot write to stdout: {screen.error.strerror}")
    return FAILED


def _complain(text: str, colour: str = "") -> None:
    """Write on stderr, in colour where that is a terminal."""
    screen = Screen(sys.stderr)
    if text:
        coloured = colour and screen.isatty() and not os.environ.get("NO_COLOR")
        screen.write(f"\033[{colour}m{text}\033[0m\n" if coloured else f"{text}\n")
        screen.flush()


def _exit_code(error: Exception) -> int | None:
    """The code of an error that is shown in one message; None for one that is a defect and deserves its traceback."""
    from slm_lab.experiment.plan import TrialFailed, UserError
    from slm_lab.spec.base import SpecError

    match error:
        case SpecError() | UserError() | _Wrong():
            return USER_ERROR
        case TrialFailed():
            return FAILED
    return None


class _Parser(argparse.ArgumentParser):
    """Says what was meant where an option is misspelt."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"unrecognized arguments: (-[^\s=]+)", message):
            message += _did_you_mean(unknown[1], self._option_string_actions)
        self.exit(USER_ERROR, f"{message}\n{self.prog} --help says more\n")


def _parser() -> _Parser:
    parser = _Parser(
        usage=_USAGE, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "-s",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="fill ${KEY}, or override a key by path; repeatable",
    )
    parser.add_argument("--jobs", type=_jobs, metavar="N", help="Sessions at a time (default: as many as there are cores for)")
    parser.add_argument("--data-dir", type=Path, default=_DATA_DIR, metavar="DIR", help="where runs are written (default: data)")
    parser.add_argument("--device", type=_device, metavar="DEVICE", help="cpu, cuda or cuda:N (default: as the spec's net.gpu says)")
    parser.add_argument("--build", action="store_true", help="check: also make env and agent")
    parser.add_argument("--by", type=_by, metavar="COLUMN", help=f"compare: over {', '.join(_AXES)} (default: frame)")
    parser.add_argument("--solve", type=_return, metavar="RETURN", help="compare: the mean return that counts as solved")
    parser.add_argument("--label", action="append", metavar="NAME", help="compare: name of each RUN, in order; repeatable")
    parser.add_argument("--out", type=Path, metavar="DIR", help="compare: where to write (default: DATA-DIR/compare_{time})")
    parser.add_argument("--version", action="version", version=f"slm-lab {slm_lab.__version__}")
    return parser


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of Sessions; allowed: 1 or more")
    return int(text)


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is none of cpu, cuda, cuda:N")
    return text


def _by(text: str) -> str:
    if text not in _AXES:
        raise argparse.ArgumentTypeError(f"'{text}' is no column to compare over{_did_you_mean(text, _AXES)} (allowed: {', '.join(_AXES)})")
    return text


def _return(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is no return; allowed: a number, such as 195 or -200")


def _refuse_strangers(command: str, arguments: argparse.Namespace) -> None:
    """Raise _Wrong for an option that `command` does not know."""
    for option, commands in _BELONGS.items():
        given = getattr(arguments, option) not in (None, False, [], _DATA_DIR)
        if given and command not in commands:
            s = "s" if len(commands) > 1 else ""
            raise _Wrong(f"--{option.replace('_', '-')} belongs to the command{s} {' and '.join(commands)}")


def _run(words: list[str], arguments: argparse.Namespace) -> int:
    if len(words) > 3:
        raise _Wrong(f"too many arguments: {' '.join(words[3:])!r} after FILE NAME MODE")
    file, name = _spec_of(words)
    mode, where = _mode(words[2] if len(words) > 2 else "train")
    from slm_lab.experiment.plan import Plan
    from slm_lab.spec.base import SpecError
    from slm_lab.spec.loader import find_spec_file, load_spec
    from slm_lab.spec.variables import mark_sets

    spec = load_spec(file, name, arguments.set)
    plan = Plan(mode="dev" if mode == "dev" else "train", data_dir=arguments.data_dir, device=arguments.device, jobs=arguments.jobs)
    if mode == "enjoy":
        return _enjoy(where, spec, plan)
    from slm_lab.experiment.trial import Trial

    try:
        Trial(spec, plan=plan).run()
    except SpecError as error:  # that only building shows
        raise mark_sets(error, f"{find_spec_file(file)} {name}", arguments.set) from None
    return OK


def _enjoy(where: str, spec: Spec, plan: Plan) -> int:
    from slm_lab.experiment.enjoy import enjoy, summary

    checkpoint, returns = enjoy(where, spec.name, plan)
    return _answer(f"{checkpoint}\n{summary(returns)}")


def _check(words: list[str], arguments: argparse.Namespace) -> int:
    if not words:
        raise _Wrong("check takes a spec file and, to check just one of its specs, a name")
    if len(words) > 2:
        raise _Wrong(f"too many arguments: {' '.join(words[2:])!r} after check FILE NAME")
    from slm_lab.spec.loader import find_spec_file, load_specs

    file = _known_file(words[0])
    specs = load_specs(file, words[1] if len(words) > 1 else None, arguments.set)
    if arguments.build:
        from slm_lab.experiment.plan import Plan
        from slm_lab.experiment.sessions import check_builds
        from slm_lab.spec.base import SpecError
        from slm_lab.spec.variables import mark_sets

        try:
            check_builds(specs, Plan(device=arguments.device), " ".join([str(find_spec_file(file)), *words[1:]]))
        except SpecError as error:
            raise mark_sets(error, error.source, arguments.set) from None
    return _answer("\n".join(f"{spec.name}: {'builds' if arguments.build else 'valid'}" for spec in specs))


def _compare(words: list[str], arguments: argparse.Namespace) -> int:
    from slm_lab.experiment.analysis.compare_report import compare

    by, labels = arguments.by or "frame", arguments.label or ()
    return _answer(compare(words, by=by, solve=arguments.solve, labels=labels, data_dir=arguments.data_dir, out=arguments.out))


COMMANDS: dict[str, Callable[[list[str], argparse.Namespace], int]] = {"run": _run, "check": _check, "compare": _compare}


def _spec_of(words: list[str]) -> tuple[str, str]:
    """FILE and NAME, where they are left out too."""
    if not words:
        return _DEMO
    file = _known_file(words[0])
    a_mode = len(words) > 1 and words[1].partition("@")[0] in ("train", "dev", "enjoy")
    if len(words) > 1 and not a_mode:
        return file, words[1]
    from slm_lab.spec.loader import spec_names

    names = spec_names(file)
    if a_mode and words[1] not in names:
        raise _Wrong(f"'{words[1]}' is a MODE; the spec's NAME comes before it: {file} NAME {words[1]} (names: {', '.join(names)})")
    if a_mode:
        return file, words[1]
    if len(names) != 1:
        raise _Wrong(f"{file}: which spec? {', '.join(names) or 'it has none'}")
    return file, names[0]


def _known_file(word: str) -> str:
    """`word`, unless it looks like a command or a spec's name rather than a file."""
    if not word:
        raise _Wrong("FILE is empty; name a spec file, such as demo.json")
    if "/" in word or "." in word or Path(word).exists():
        return word
    message = f"'{word}' is no command and no spec file"
    if files := _files_with(word):
        raise _Wrong(f"{message}, but a spec: {' or '.join(f'{file} {word}' for file in files)}")
    raise _Wrong(f"{message}{_did_you_mean(word, [*COMMANDS, *_DEMO[:1]])} (commands: {', '.join(COMMANDS)})")


def _files_with(name: str) -> list[Path]:
    """The spec files that ship and hold the spec `name`, as they can be given on the command line."""
    from slm_lab.spec.base import SpecError
    from slm_lab.spec.loader import SPEC_FOLDER, spec_names

    found = []
    for file in sorted(SPEC_FOLDER.rglob("*.json"), key=lambda file: (len(file.parts), file)):
        with suppress(SpecError):  # the schema is none
            if name in spec_names(file):
                found.append(file.relative_to(SPEC_FOLDER))
    return found


def _mode(word: str) -> tuple[str, str]:
    """A MODE, and what stands behind its "@"."""
    mode, at, where = word.partition("@")
    if mode == "enjoy" and where:
        return mode, where
    if mode in ("train", "dev") and not at:
        return mode, ""
    known = "train, dev, enjoy@{run folder | latest}"
    raise _Wrong(f"'{word}' is no mode{_did_you_mean(word, _MODES) or _did_you_mean(mode, _MODES)} (modes: {known})")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
