"""Commands, modes and options of the command line: the values of each option, and the options of each command."""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import slm_lab

USER_ERROR = 2
DATA_DIR = Path("data")
AXES = ("frame", "global_frame", "wall_t", "opt_step")
METRICS = ("current_return", "total_reward", "return_new")


class Command(NamedTuple):
    """One command of the command line."""

    run: str
    """"module:function", imported when the command runs: function(words, arguments) → exit code."""
    usage: str
    options: tuple[str, ...]
    """Accepted options, by their names in argparse's namespace."""


MODE_OPTIONS = {
    "enjoy": ("episodes", "deterministic", "render", "video", "checkpoint", "session", "trial", "entry", "env"),
    "search": ("confirm", "common_seeds"),
    "study": ("adopt", "until_decided", "max_seeds"),
}
"""Mode of `run` → the options that only this mode accepts."""
COMMANDS = {
    "run": Command(
        "slm_lab.cli.run:run",
        "[run] [FILE [NAME [MODE]]] [options]",
        ("set", "seed", "device", "jobs", "cluster", "storage", "data_dir", *itertools.chain(*MODE_OPTIONS.values())),
    ),
    "check": Command("slm_lab.cli.check:check", "check FILE [NAME] [--build] [--json] [options]", ("set", "device", "build", "json")),
    "export": Command(
        "slm_lab.cli.results:export",
        "export {folder | model | latest} [--format onnx | torch] [--out FILE | --as NAME [--replace]] [options]",
        ("data_dir", "format", "out", "as", "replace", "checkpoint", "session", "trial", "entry", "env", "seed"),
    ),
    "models": Command("slm_lab.cli.models:models", "models [--json]", ("data_dir", "json")),
    "push": Command("slm_lab.cli.models:push", "push NAME USER/REPO [--private]", ("data_dir", "private")),
    "pull": Command(
        "slm_lab.cli.models:pull",
        "pull USER/REPO[@REVISION] [--as NAME] [--replace] [--trust-code]",
        ("data_dir", "as", "replace", "trust_code"),
    ),
    "compare": Command(
        "slm_lab.cli.results:compare",
        "compare RUN RUN ... [--by COLUMN] [--metric COLUMN] [--solve RETURN] [--label NAME ...] [--out DIR]",
        ("data_dir", "by", "metric", "solve", "label", "out", "trial", "entry", "env", "seed", "json"),
    ),
    "diff": Command("slm_lab.cli.diff:diff", "diff A B [--json]", ("data_dir", "json")),
    "doctor": Command(
        "slm_lab.cli.results:doctor", "doctor {RUN | latest} [--json] [options]", ("data_dir", "trial", "entry", "env", "seed", "json")
    ),
    "verify": Command(
        "slm_lab.cli.verify:verify",
        "verify {folder | latest} [--session N] [--from FRAME] [--to FRAME] [--frames N] [options]",
        ("data_dir", "device", "session", "from", "to", "frames", "trial", "entry", "env", "seed", "json"),
    ),
    "report": Command("slm_lab.cli.results:report", "report {folder | latest} [options]", ("data_dir", "trial", "entry", "env", "seed")),
    "retro_analyze": Command("slm_lab.cli.results:retro_analyze", "retro_analyze {RUN ... | latest}", ("data_dir",)),
    "list": Command(
        "slm_lab.cli.list_names:list_names",
        "list [specs | studies | algorithms | nets | memories | envs] [--search WORD ...] [--json]",
        ("search", "json"),
    ),
    "view": Command("slm_lab.cli.view:view", "view [DATA_DIR] [--port N] [--no-browser]", ("data_dir", "port", "no_browser")),
    "new": Command("slm_lab.cli.new:new", "new FILE [NAME] --env ENV [--like SPEC | ALGORITHM] [--comments]", ("env", "like", "comments")),
    "help": Command("slm_lab.cli.help:show_help", "help [COMMAND | MODE]", ()),
}
MODES = {
    "train": "train, train@{run folder | latest}",
    "dev": "dev",
    "search": "search, search@{run folder | latest}",
    "study": "study, study@{folder | latest}",
    "enjoy": "enjoy@{folder | model | latest}",
}
"""Mode → its forms on the command line."""
DEMO = ("demo.json", "ppo_cartpole")
"""FILE and NAME if neither is given."""

_DESCRIPTION = """\
Train agents from JSON specs. Without arguments: demo.json ppo_cartpole train.

  FILE   a spec file, as given or under slm_lab/spec/
  NAME   a spec in it; optional if the file has only one
  MODE   train                         run every session, then compute metrics and draw graphs (default)
         train@{run folder | latest}   continue a run; FILE and NAME may be left out
         search                        train trials with values of the keys in the spec's search block, and rank them
         search@{run folder | latest}  continue a search, or add trials to it
         study                         run what a study lists, and compare it
         study@{folder | latest}       run what is missing of a study, as FILE says now
         dev                           one session with extra checks: weights change, gradients are finite
         enjoy@{folder | model | latest}
                                       play episodes with a checkpoint of a run, or of the best of a search or study, or with a
                                       named model; FILE and NAME may be left out

  check    validate one or all specs of a file; with --build also build their env and agent
  export   write the policy of a run as an ONNX or torch.export file
  models   list the models that export --as NAME registered
  push     upload a model to a repository of the Hugging Face Hub
  pull     download a model from one, and register it
  compare  compare runs on one page, in graphs and tables: RUN is a run folder, a search (its best trial), a study or a quoted
           glob pattern, 'data/ppo_*'; runs of one spec, or with the same --label, are seeds of one curve
  diff     show what differs between two runs: keys, versions, the first rows, returns
  doctor   print what is wrong with a run, ranked, with the evidence and the key to change
  report   write report.html of a run, search or study again, also while it runs
  verify   train a part of a run again, and compare rows and weights byte by byte
  retro_analyze
           rebuild metrics and graphs from the files of runs (or of the latest one): killed and failed ones too, and those of SLM Lab
  view     show the runs of a data folder (default: data) in a browser, also while they train, and compare them
  list     list what there is: specs, algorithms, nets, memories, envs
  new      write a spec for an env
  help     show the options of one command or mode"""
_EPILOG = (
    "exit codes: 0 done, 1 a session failed (verify: not equal), 2 user error (nothing is written), 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP"
)


class UsageError(Exception):
    """A wrong argument: exit code 2."""


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest option for an unknown one."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"unrecognized arguments: (-[^\s=]+)", message):
            message += did_you_mean(unknown[1], self._option_string_actions)
        self.exit(USER_ERROR, f"{message}\nsee {self.prog} --help\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def _type(
    what: str,
    expected: str,
    is_valid: Callable[[str], object],
    convert: Callable[[str], Any] = str,
    hint: Callable[[str], str] = lambda text: "",
) -> Callable[[str], Any]:
    """Return the type of an option: a function that converts valid text, and raises an error with a hint for invalid text."""

    def parse(text: str) -> Any:
        if is_valid(text):
            return convert(text)
        raise argparse.ArgumentTypeError(f"invalid {what} '{text}'; expected {expected}{hint(text)}")

    return parse


def _one_of(what: str, known: tuple[str, ...]) -> Callable[[str], Any]:
    return _type(what, f"one of {', '.join(known)}", known.__contains__, hint=lambda text: did_you_mean(text, known))


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


_TYPES = {
    "--jobs": _type("number of sessions", "1 or more", _is_count, int),
    "--confirm": _type("number of trials", "1 or more", _is_count, int),
    "--max-seeds": _type("number of seeds", "1 or more", _is_count, int),
    "--episodes": _type("number of episodes", "1 or more", _is_count, int),
    "--session": _type("session", "0 or more", str.isdecimal, int),
    "--trial": _type("trial", "0 or more", str.isdecimal, int),
    "--seed": _type("seed", "0 or more", str.isdecimal, int),
    "--from": _type("frame", "0 or more", str.isdecimal, int),
    "--to": _type("frame", "1 or more", _is_count, int),
    "--frames": _type("number of frames", "1 or more", _is_count, int),
    "--checkpoint": _type(
        "checkpoint",
        "best, last or a frame, such as 200000",
        lambda text: text in ("best", "last") or text.isdecimal(),
        lambda text: str(int(text)) if text.isdecimal() else text,
    ),
    "--port": _type("port", "a number from 1 to 65535", lambda text: _is_count(text) and int(text) < 65536, int),
    "--device": _type("device", "cpu, cuda or cuda:N", re.compile(r"cpu|cuda(:\d+)?").fullmatch),
    "--cluster": _type(
        "address",
        "HOST:PORT, auto or local",
        re.compile(r"auto|local|[^\s:/]+:\d+|\[[0-9a-fA-F:]+\]:\d+").fullmatch,
        hint=lambda text: "; Ray Client (ray://) is not supported: run this on a node of the cluster" if text.startswith("ray://") else "",
    ),
    "--storage": _type(
        "URL",
        "one such as s3://bucket/folder, gs://bucket/folder or file:///folder",
        re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://\S+").fullmatch,
        hint=lambda text: f"; did you mean 'file://{text}'?" if text.startswith("/") else "",
    ),
    "--format": _type("format", "onnx or torch", ("onnx", "torch").__contains__),
    "--by": _one_of("column", AXES),
    "--metric": _one_of("metric", METRICS),
    "--solve": _type("return", "a number, such as 195 or -200", _is_finite, float),
    "--data-dir": Path,
    "--out": Path,
}
"""Option → function that parses its value; values of other options are strings."""


def make_parser(word: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands; it stores positional arguments in `words`. With a command or mode: a parser for its help."""
    usage = "\n       ".join(f"%(prog)s {form}" for form in _usages(word))
    text, options = _DESCRIPTION if word is None else _about(word), _options_of(word)
    parser = _Parser(
        usage=usage, description=text, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(*names: str, **how: Any) -> None:
        if word is None or names[-1].strip("-").replace("-", "_") in options:
            parser.add_argument(*names, **how)

    def value(name: str, metavar: str, text: str, default: Any = None) -> None:
        add(name, type=_TYPES.get(name, str), metavar=metavar, help=text, default=default)

    def repeatable(*names: str, metavar: str, text: str, default: Any = None) -> None:
        add(*names, action="append", metavar=metavar, help=f"{text}; repeatable", default=default)

    def flag(name: str, text: str) -> None:
        add(name, action="store_true", help=text)

    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    repeatable("-s", "--set", metavar="KEY=VALUE", text="fill ${KEY}, or override a key by path", default=[])
    value("--jobs", "N", "number of concurrent sessions, in a search or study those of all runs (default: as many as the cores allow)")
    value("--data-dir", "DIR", "where runs are written (default: data)", DATA_DIR)
    on_cluster = "run on the nodes of a Ray cluster: HOST:PORT, auto (this machine is a node) or local (start one)"
    value("--cluster", "ADDRESS", f"train, search, study: {on_cluster}")
    below_url = "write checkpoints below a URL (s3://…, gs://…), not in the data folder, which nodes need not see then"
    value("--storage", "URL", f"train, with --cluster: {below_url}")
    value("--device", "DEVICE", "cpu, cuda or cuda:N (default: net.gpu of the spec)")
    flag("--build", "check: also build env and agent")
    value("--confirm", "K", "search: train the best K trials again, with new seeds, and rank by that")
    flag("--common-seeds", "search: the same seeds for all trials")
    repeatable("--adopt", metavar="GLOB", text="study: finished run folders that count as its runs")
    flag("--until-decided", "study: add seeds until the interval of each difference excludes 0")
    value("--max-seeds", "N", "study, with --until-decided: largest number of seeds of each entry (default: 32)")
    value("--episodes", "N", "enjoy: number of episodes (default: 10)")
    flag("--deterministic", "enjoy: take the mode of the action distribution instead of a sample")
    flag("--render", "enjoy: draw one env in a window")
    flag("--video", "enjoy: record one env as an MP4 file in the run folder")
    value("--checkpoint", "WHICH", "enjoy, export: best, last, or the frame of a numbered checkpoint (default: best)")
    value("--session", "N", "enjoy, export: session of the checkpoint (default: the best one); verify: session to train again (default: 0)")
    value("--from", "FRAME", "verify: frame from which to train again: 0, or that of the state before the last checkpoint")
    value("--to", "FRAME", "verify: frame at which to end")
    value("--frames", "N", "verify: maximum number of frames (default: as many as took 10 minutes)")
    agents = "enjoy, export, compare, doctor, report, verify"
    value("--trial", "N", f"{agents}: trial of a search (default: the best one, of the confirmed ones if there are any)")
    value("--entry", "LABEL", f"{agents}: entry of a study (default: that of the best run; compare: all)")
    of_run = f"{agents}: that of the run of a study (default: the best run; compare: all)"
    value("--seed", "N", f"train, dev, search, study: meta.random_seed of new runs; {of_run}")
    value("--format", "FORMAT", "export: onnx or torch (default: onnx)")
    value("--as", "NAME", "export, pull: name of the model, which enjoy@, export, load_agent and meta.init_from accept like a folder")
    flag("--replace", "export, pull: replace the model of this name")
    flag("--private", "push: create a private repository")
    flag("--trust-code", "pull: accept a spec that names modules, which are imported when the model is used")
    value("--by", "COLUMN", f"compare: x axis, one of {', '.join(AXES)} (default: frame)")
    value("--metric", "COLUMN", f"compare: return to draw, one of {', '.join(METRICS)} (default: current_return)")
    value("--solve", "RETURN", "compare: mean return that counts as solved")
    repeatable("--label", metavar="NAME", text="compare: name of each RUN, in order")
    value("--out", "PATH", "compare: output folder (default: DATA-DIR/compare_{time}); export: file (default: in the run folder)")
    value("--port", "N", "view: port of the page on 127.0.0.1 (default: a free one)")
    flag("--no-browser", "view: print the address only")
    add("--search", nargs="+", metavar="WORD", help="list: only lines that contain all these words")
    value("--env", "ENV", f"new: a Gymnasium id, or package.module:EnvId; {agents}: env of the run of a study")
    flag("--json", "check, list, models, compare, diff, doctor, verify: print one JSON document to stdout, and notices to stderr")
    value("--like", "SPEC", "new: an algorithm, a spec that ships, or FILE:NAME (default: PPO)")
    flag("--comments", "new: write a comment for each key; the file is then no strict JSON")
    parser.add_argument("--version", action="version", version=f"slm-lab {slm_lab.__version__}")
    return parser


def _usages(word: str | None) -> list[str]:
    """Return the forms of all commands, or of one command or mode."""
    if word is None:
        return [command.usage for command in COMMANDS.values()]
    return [COMMANDS[word].usage] if word in COMMANDS else [f"[FILE [NAME]] {form} [options]" for form in MODES[word].split(", ")]


def _about(word: str) -> str:
    """Return the lines of the description about a command or mode; about `run` those of all modes."""
    if word == "run":
        return _DESCRIPTION.partition("\n\n")[2].partition("\n\n")[0]
    found = re.findall(rf"^ +(?:MODE +)?{word}\b.*(?:\n {{11,}}(?! *(?:{'|'.join(MODES)})\b).*)*", _DESCRIPTION, re.MULTILINE)
    return textwrap.dedent("\n".join(found).replace("MODE", " " * 4))


def _options_of(word: str | None) -> tuple[str, ...]:
    """Return the options of a command, or of a mode of `run`."""
    if word is None or word in COMMANDS:
        return () if word is None else COMMANDS[word].options
    others = {option for mode, options in MODE_OPTIONS.items() if mode != word for option in options}
    return tuple(option for option in COMMANDS["run"].options if option not in others)


def check_options_apply(command: str, arguments: argparse.Namespace) -> None:
    """Raise UsageError for a given option that `command` does not accept."""
    for option, value in vars(arguments).items():
        accepted = [name for name, row in COMMANDS.items() if option in row.options]
        given = option != "words" and value is not None and value is not False and value not in ([], DATA_DIR)
        if given and command not in accepted:
            raise UsageError(f"--{option.replace('_', '-')} is an option of {', '.join(accepted)} only")
