"""The command line: arguments → spec file, spec name, Plan. Loads what a command needs only when it runs."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import slm_lab

if TYPE_CHECKING:
    from slm_lab.experiment.plan import Plan
    from slm_lab.spec.spec import Spec

OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

_USAGE = """%(prog)s [run] [FILE [NAME [MODE]]] [options]
       %(prog)s check FILE [NAME] [--build] [options]"""
_DESCRIPTION = """\
Train agents from JSON specs. Without arguments: demo.json ppo_cartpole train.

  FILE   a spec file, as given or under slm_lab/spec/
  NAME   a spec in it; may be left out where it holds just one
  MODE   train                         run every Session, then measure and draw (default)
         dev                           one Session with extra checks: weights move, gradients are finite
         enjoy@{run folder | latest}   the best checkpoint of a run plays some episodes

  check  validate one or all specs of a file; with --build also make their env and agent"""
_EPILOG = "exit codes: 0 done, 1 a Session failed, 2 an error of yours (nothing is written), 130 Ctrl-C"
_DEMO = ("demo.json", "ppo_cartpole")
_MODES = ("train", "dev", "enjoy@latest")


class _Wrong(Exception):
    """A wrong argument."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        arguments = _parser().parse_intermixed_args(argv)
        words = arguments.words
        command = COMMANDS[words.pop(0)] if words and words[0] in COMMANDS else _run
        return command(words, arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: spare the flush at exit its error
        return FAILED
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        sys.stderr.write(f"{error}\n")
        return code


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
    parser.add_argument("--jobs", type=_jobs, metavar="N", help="Sessions at a time (default: one per core)")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where runs are written (default: data)")
    parser.add_argument("--device", type=_device, metavar="DEVICE", help="cpu, cuda or cuda:N (default: as the spec's net.gpu says)")
    parser.add_argument("--build", action="store_true", help="check: also make env and agent")
    parser.add_argument("--version", action="version", version=f"slm-lab {slm_lab.__version__}")
    return parser


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of Sessions")
    return int(text)


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is none of cpu, cuda, cuda:N")
    return text


def _run(words: list[str], arguments: argparse.Namespace) -> int:
    if arguments.build:
        raise _Wrong("--build belongs to the command check")
    if len(words) > 3:
        raise _Wrong(f"too many arguments: {' '.join(words[3:])!r} after FILE NAME MODE")
    file, name = _spec_of(words)
    mode, where = _mode(words[2] if len(words) > 2 else "train")
    from slm_lab.experiment.plan import Plan
    from slm_lab.spec.loader import load_spec

    spec = load_spec(file, name, arguments.set)
    plan = Plan(mode="dev" if mode == "dev" else "train", data_dir=arguments.data_dir, device=arguments.device, jobs=arguments.jobs)
    if mode == "enjoy":
        return _enjoy(where, spec, plan)
    from slm_lab.experiment.trial import Trial

    Trial(spec, plan=plan).run()
    return OK


def _enjoy(where: str, spec: Spec, plan: Plan) -> int:
    from slm_lab.experiment.enjoy import enjoy, summary

    checkpoint, returns = enjoy(where, spec.name, plan)
    sys.stdout.write(f"{checkpoint}\n{summary(returns)}\n")
    return OK


def _check(words: list[str], arguments: argparse.Namespace) -> int:
    if not 1 <= len(words) <= 2:
        raise _Wrong("check takes a spec file and, to check just one of its specs, a name")
    from slm_lab.spec.loader import load_specs

    specs = load_specs(_known_file(words[0]), words[1] if len(words) > 1 else None, arguments.set)
    if arguments.build:
        from slm_lab.experiment.plan import Plan
        from slm_lab.experiment.session import check_builds

        check_builds(specs, Plan(device=arguments.device))
    for spec in specs:
        sys.stdout.write(f"{spec.name}: {'builds' if arguments.build else 'valid'}\n")
    return OK


COMMANDS: dict[str, Callable[[list[str], argparse.Namespace], int]] = {"run": _run, "check": _check}


def _spec_of(words: list[str]) -> tuple[str, str]:
    """FILE and NAME, where they are left out too."""
    if not words:
        return _DEMO
    file = _known_file(words[0])
    if len(words) > 1:
        return file, words[1]
    from slm_lab.spec.loader import spec_names

    names = spec_names(file)
    if len(names) != 1:
        raise _Wrong(f"{file}: which spec? {', '.join(names) or 'it has none'}")
    return file, names[0]


def _known_file(word: str) -> str:
    """`word`, unless it looks like a command rather than a file."""
    if "/" not in word and "." not in word and not Path(word).exists():
        raise _Wrong(f"'{word}' is no command and no spec file{_did_you_mean(word, COMMANDS)} (commands: {', '.join(COMMANDS)})")
    return word


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
