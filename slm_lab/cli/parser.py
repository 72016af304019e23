"""Definition of the commands, modes and options of the command line, and of the parser."""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import slm_lab
from slm_lab.lib.text import WIDTH

USER_ERROR = 2
DATA_DIR = Path("data")
AXES = ("frame", "global_frame", "wall_t", "opt_step")
METRICS = ("current_return", "total_reward", "return_new", "training_return")


class Command(NamedTuple):
    """One command of the command line, such as `check`."""

    run: str
    """Path "module:function" of the function that runs the command. The function is imported when the command runs, called as
    function(words, arguments), and returns the exit code."""
    usage: str
    options: tuple[str, ...]
    """Names, in argparse's namespace, of the options that the command accepts."""


MODE_OPTIONS = {
    "enjoy": (
        "episodes",
        "deterministic",
        "render",
        "video",
        "record",
        "replace",
        "checkpoint",
        "session",
        "trial",
        "entry",
        "env",
        "policy",
        "against",
        "human",
    ),
    "search": ("confirm", "common_seeds"),
    "study": ("adopt", "until_decided", "max_seeds"),
}
"""Maps each mode of the command `run` to the options that only this mode accepts."""
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
        ("data_dir", "format", "out", "as", "replace", "checkpoint", "session", "trial", "entry", "env", "seed", "policy"),
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
        "list [specs | studies | algorithms | nets | memories | envs] [WORD ...] [--json]",
        ("search", "json"),
    ),
    "view": Command("slm_lab.cli.view:view", "view [DATA_DIR] [--port N] [--no-browser]", ("data_dir", "port", "no_browser")),
    "new": Command("slm_lab.cli.new:new", "new FILE [NAME] --env ENV [--like SPEC | ALGORITHM] [--comments]", ("env", "like", "comments")),
    "help": Command("slm_lab.cli.help:show_help", "help [COMMAND | MODE]", ()),
}
_FORMS = {
    "train": {
        "train": "run every session, then compute metrics and draw graphs (default)",
        "train@{run folder | latest}": "continue a run; FILE and NAME may be left out",
    },
    "search": {
        "search": "train trials with values of the keys in the spec's search block, and rank them",
        "search@{run folder | latest}": "continue a search, or add trials to it; FILE and NAME may be left out",
    },
    "study": {
        "study": "train the runs of a study, and compare their results",
        "study@{folder | latest}": "run the missing runs of a study; FILE is read again",
    },
    "dev": {"dev": "one session with extra checks: weights change, gradients are finite"},
    "enjoy": {
        "enjoy@{folder | model | latest}": "play episodes with a checkpoint of a run, or of the best run of a search or study, or with a "
        "named model or pretrained agent; FILE and NAME may be left out"
    },
}
"""Maps each mode to a dict from the mode's command-line forms to their descriptions."""
MODES = {mode: ", ".join(forms) for mode, forms in _FORMS.items()}
"""Maps each mode to text that lists the mode's command-line forms."""
DEMO = ("demo.json", "ppo_cartpole")
"""Values of FILE and NAME if the command line contains neither argument."""

_ABOUT = {
    "check": "validate one or all specs of a file; with --build also build their env and agent",
    "export": "write the policy of a run as an ONNX or torch.export file",
    "models": "list the models that export --as NAME registered, and the pretrained agents",
    "push": "upload a model to a repository of the Hugging Face Hub",
    "pull": "download a model from a repository of the Hugging Face Hub, and register it",
    "compare": "compare runs on one page, in graphs and tables: RUN is a run folder, a search (its best trial), a study or a quoted "
    "glob pattern, 'data/ppo_*'; runs of one spec, or with the same --label, are seeds of one curve",
    "diff": "show what differs between two runs: keys, versions, the first rows, returns",
    "doctor": "print what is wrong with a run, ranked, with the evidence and the key to change",
    "report": "write report.html of a run, search or study again, also while it runs",
    "verify": "repeat a part of a run and compare rows and weights byte by byte",
    "retro_analyze": "rebuild metrics and graphs from the files of runs (or of the latest run), also of killed and failed runs, and of "
    "runs of SLM Lab",
    "view": "show the runs of a data folder (default: data) in a browser, also while they train, and compare them",
    "list": "list specs, studies, algorithms, nets, memories and envs",
    "new": "write a spec for an env",
    "help": "show the options of one command or mode",
}
"""Maps each command to its description, in the order of the help text."""
_ARGUMENTS = {
    "FILE": "a spec file, as given or under slm_lab/spec/",
    "NAME": "a spec in it; optional if the file has only one",
    "MODE": "one of:",
}
_EXITS = (
    "exit codes: 0 done, 1 a session failed (verify: not equal), 2 user error (nothing is written), 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP"
)


class UsageError(Exception):
    """Raised for a wrong command-line argument. After this error, the process ends with the exit code 2."""


class _Parser(argparse.ArgumentParser):
    """Argument parser whose error message for an unknown option suggests the most similar known option."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"unrecognized arguments: (-[^\s=]+)", message):
            message += did_you_mean(unknown[1], self._option_string_actions, 0.65)
        self.exit(USER_ERROR, f"{message}\nsee {self.prog} --help\n")


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the text of a hint "did you mean …?" with the word in `words` that is most similar to `word`, or "" if no word in `words`
    reaches the similarity `cutoff` (0 to 1)."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else ""


def _argparse_type(
    what: str,
    expected: str,
    is_valid: Callable[[str], object],
    convert: Callable[[str], Any] = str,
    hint: Callable[[str], str] = lambda text: "",
) -> Callable[[str], Any]:
    """Return a converter for argparse's argument `type`. For invalid text, the converter raises an error that contains a hint.

    Args: what: name of the value in the error message. expected: description of valid text in the error message.
    """

    def parse(text: str) -> Any:
        if is_valid(text):
            return convert(text)
        raise argparse.ArgumentTypeError(f"invalid {what} '{text}'; expected {expected}{hint(text)}")

    return parse


def _choice_type(what: str, choices: tuple[str, ...]) -> Callable[[str], Any]:
    return _argparse_type(what, f"one of {', '.join(choices)}", choices.__contains__, hint=lambda text: did_you_mean(text, choices))


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


_TYPES = {
    "--jobs": _argparse_type("number of sessions", "1 or more", _is_count, int),
    "--confirm": _argparse_type("number of trials", "1 or more", _is_count, int),
    "--max-seeds": _argparse_type("number of seeds", "1 or more", _is_count, int),
    "--episodes": _argparse_type("number of episodes", "1 or more", _is_count, int),
    "--session": _argparse_type("session", "0 or more", str.isdecimal, int),
    "--trial": _argparse_type("trial", "0 or more", str.isdecimal, int),
    "--seed": _argparse_type("seed", "0 or more", str.isdecimal, int),
    "--from": _argparse_type("frame", "0 or more", str.isdecimal, int),
    "--to": _argparse_type("frame", "1 or more", _is_count, int),
    "--frames": _argparse_type("number of frames", "1 or more", _is_count, int),
    "--checkpoint": _argparse_type(
        "checkpoint",
        "best, last or a frame, such as 200000",
        lambda text: text in ("best", "last") or text.isdecimal(),
        lambda text: str(int(text)) if text.isdecimal() else text,
    ),
    "--port": _argparse_type("port", "a number from 1 to 65535", lambda text: _is_count(text) and int(text) < 65536, int),
    "--device": _argparse_type("device", "cpu, cuda or cuda:N", re.compile(r"cpu|cuda(:\d+)?").fullmatch),
    "--cluster": _argparse_type(
        "address",
        "HOST:PORT, auto or local",
        re.compile(r"auto|local|[^\s:/]+:\d+|\[[0-9a-fA-F:]+\]:\d+").fullmatch,
        hint=lambda text: "; Ray Client (ray://) is not supported: run this on a node of the cluster" if text.startswith("ray://") else "",
    ),
    "--storage": _argparse_type(
        "URL",
        "one such as s3://bucket/folder, gs://bucket/folder or file:///folder",
        re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://\S+").fullmatch,
        hint=lambda text: f"; did you mean 'file://{text}'?" if text.startswith("/") else "",
    ),
    "--format": _argparse_type("format", "onnx or torch", ("onnx", "torch").__contains__),
    "--by": _choice_type("column", AXES),
    "--metric": _choice_type("metric", METRICS),
    "--solve": _argparse_type("return", "a number, such as 195 or -200", _is_finite, float),
    "--data-dir": Path,
    "--out": Path,
}
"""Maps each option to the function that parses the option's value. The values of all other options are strings."""


class _Option(NamedTuple):
    """Definition of an option of the command line. An option without `metavar` is a flag."""

    flags: str
    """Names of the option on the command line, separated by ", "."""
    metavar: str
    texts: Mapping[str, str]
    """Maps commands and modes, separated by ", ", to the help text that applies to these commands and modes. The key "" stands for all
    commands and modes that accept the option."""
    how: Mapping[str, Any] = MappingProxyType({})
    """Additional keyword arguments for argparse's `add_argument`."""

    @property
    def dest(self) -> str:
        return self.flags.rpartition("--")[2].replace("-", "_")

    def help(self, word: str | None) -> str:
        """Return the help text of the option for one command or mode.

        If `word` is None (all commands) or "run" (all modes), the help text has several parts, each of which begins with the commands or
        modes to which the part applies.
        """
        shown = {of: text for of, text in self.texts.items() if word in (None, *of.split(", ")) or not of}
        if word == "run":
            of_modes = {", ".join(mode for mode in of.split(", ") if mode in MODES): text for of, text in self.texts.items()}
            shown = {of: text for of, text in of_modes.items() if of or "" in self.texts}
        several = word in (None, "run")
        text = "; ".join(f"{of}: {text}" if of and several else text for of, text in shown.items())
        return f"{text}; repeatable" if self.how.get("action") == "append" else text

    def add_to(self, parser: argparse.ArgumentParser, word: str | None) -> None:
        names = self.flags.split(", ")
        how = (
            {"metavar": self.metavar, **({} if "nargs" in self.how else {"type": _TYPES.get(names[-1], str)})}
            if self.metavar
            else {"action": "store_true"}
        )
        parser.add_argument(*names, help=self.help(word).replace("%", "%%"), **how, **self.how)


_OF_AGENTS = "enjoy, export, doctor, report, verify"
_REPEATED = MappingProxyType({"action": "append"})
_OPTIONS = (
    _Option("-s, --set", "KEY=VALUE", {"": "fill ${KEY}, or override a key by path"}, {"action": "append", "default": []}),
    _Option(
        "--jobs",
        "N",
        {
            "train, search, study": "number of concurrent sessions; in a search or study, of all runs together (default: as many as "
            "the cores allow)"
        },
    ),
    _Option("--data-dir", "DIR", {"": "where runs are written (default: data)"}, {"default": DATA_DIR}),
    _Option(
        "--cluster",
        "ADDRESS",
        {"train, search, study": "run on the nodes of a Ray cluster: HOST:PORT, auto (this machine is a node) or local (start one)"},
    ),
    _Option(
        "--storage",
        "URL",
        {"train": "with --cluster: write checkpoints below a URL (s3://…, gs://…), so that nodes need no access to the data folder"},
    ),
    _Option("--device", "DEVICE", {"": "cpu, cuda or cuda:N (default: net.gpu of the spec)"}),
    _Option("--build", "", {"check": "also build env and agent"}),
    _Option("--confirm", "K", {"search": "train the best K trials again, with new seeds, and rank them by the new results"}),
    _Option("--common-seeds", "", {"search": "the same seeds for all trials"}),
    _Option("--adopt", "GLOB", {"study": "finished run folders that count as runs of the study"}, _REPEATED),
    _Option("--until-decided", "", {"study": "add seeds until the interval of each difference excludes 0"}),
    _Option("--max-seeds", "N", {"study": "with --until-decided: largest number of seeds of each entry (default: 32)"}),
    _Option("--episodes", "N", {"enjoy": "number of episodes (default: 10; --against: 100; --human: 1)"}),
    _Option(
        "--against",
        "PLAYER",
        {
            "enjoy": "in an env with several agents, who plays for the other agents: random, a class of scripted players, or another run; "
            "prints games won, drawn and lost"
        },
    ),
    _Option(
        "--human",
        "SEAT",
        {"enjoy": "play a board game against the agent in the terminal, as first or second (default: drawn for each game)"},
        {"nargs": "?", "const": "random"},
    ),
    _Option(
        "--policy",
        "NAME",
        {
            "enjoy": "name of a policy in agent.policies (default: all policies play); with --against, the opponent plays for the agents "
            "of the other policies",
            "export": "name of a policy in agent.policies",
        },
    ),
    _Option("--deterministic", "", {"enjoy": "take the mode of the action distribution instead of a sample"}),
    _Option("--render", "", {"enjoy": "draw one env in a window"}),
    _Option("--video", "", {"enjoy": "record one env as an MP4 file in the run folder"}),
    _Option("--record", "PATH", {"enjoy": "write the episodes to a file, a data set for meta.demonstrations"}),
    _Option("--checkpoint", "WHICH", {"enjoy, export": "best, last, or the frame of a numbered checkpoint (default: best)"}),
    _Option(
        "--session",
        "N",
        {"enjoy, export": "session of the checkpoint (default: the best session)", "verify": "session to train again (default: 0)"},
    ),
    _Option("--from", "FRAME", {"verify": "frame at which to begin: 0, or the frame of the previous checkpoint"}),
    _Option("--to", "FRAME", {"verify": "frame at which to end"}),
    _Option(
        "--frames",
        "N",
        {"verify": "maximum number of frames to train again (without it, frames that took more than 10 minutes are an error)"},
    ),
    _Option(
        "--trial",
        "N",
        {f"compare, {_OF_AGENTS}": "trial of a search (default: the best trial, of the confirmed trials if there are any)"},
    ),
    _Option(
        "--entry",
        "LABEL",
        {_OF_AGENTS: "entry of a study (default: that of the best run)", "compare": "entry of a study (default: all)"},
    ),
    _Option(
        "--seed",
        "N",
        {
            "train, dev, search, study": "meta.random_seed of new runs",
            _OF_AGENTS: "seed of the run of a study (default: that of the best run)",
            "compare": "seed of the runs of a study (default: all)",
        },
    ),
    _Option("--format", "FORMAT", {"export": "onnx or torch (default: onnx)"}),
    _Option(
        "--as",
        "NAME",
        {"export, pull": "name of the model, which enjoy@, export, load_agent and meta.init_from accept like a folder"},
    ),
    _Option("--replace", "", {"export, pull": "replace the model of this name", "enjoy": "overwrite the file of --record"}),
    _Option("--private", "", {"push": "create a private repository"}),
    _Option("--trust-code", "", {"pull": "accept a spec that names modules, which are imported when the model is used"}),
    _Option("--by", "COLUMN", {"compare": f"x axis, one of {', '.join(AXES)} (default: frame)"}),
    _Option("--metric", "COLUMN", {"compare": f"return to draw, one of {', '.join(METRICS)} (default: current_return)"}),
    _Option("--solve", "RETURN", {"compare": "mean return that counts as solved"}),
    _Option("--label", "NAME", {"compare": "name of each RUN, in order"}, _REPEATED),
    _Option(
        "--out",
        "PATH",
        {"compare": "output folder (default: compare_{time} in the data folder)", "export": "file (default: in the run folder)"},
    ),
    _Option("--port", "N", {"view": "port of the page on 127.0.0.1 (default: a free one)"}),
    _Option("--no-browser", "", {"view": "print the address only"}),
    _Option("--search", "WORD", {"list": "only lines that contain all these words"}, {"nargs": "+"}),
    _Option("--env", "ENV", {"new": "a Gymnasium id, or package.module:EnvId", f"compare, {_OF_AGENTS}": "env of the run of a study"}),
    _Option(
        "--json",
        "",
        {"check, list, models, compare, diff, doctor, verify": "print one JSON document to stdout, and notices to stderr"},
    ),
    _Option("--like", "SPEC", {"new": "an algorithm, a shipped spec, or FILE:NAME (default: PPO)"}),
    _Option("--comments", "", {"new": "write a comment for each key; the file is then not strict JSON"}),
)


def make_parser(word: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line. The parser stores positional arguments in the attribute `words`. If `word` is a command or
    mode, the parser's help text describes only this command or mode."""
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(description=_description(word), epilog="\n".join(textwrap.wrap(_EXITS, WIDTH)), **how)
    parser.usage = "\n       ".join(_wrap_usage(f"{parser.prog} {form}") for form in _usages(word)).replace("%", "%%")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = _accepted_options(word)
    for option in _OPTIONS:
        if word is None or (option.dest in options and option.help(word)):
            option.add_to(parser, word)
    parser.add_argument("--version", action="version", version=f"slm-lab {slm_lab.__version__}")
    return parser


def _usages(word: str | None) -> list[str]:
    """Return the usage lines of the command or mode `word`, or of all commands if `word` is None."""
    if word is None:
        return [command.usage for command in COMMANDS.values()]
    if word in COMMANDS:
        return [COMMANDS[word].usage]
    # a run, search or model is continued or played with its saved spec, but a study is continued with FILE
    return [f"{'[FILE NAME]' if '@' in form and word != 'study' else 'FILE NAME'} {form} [options]" for form in _FORMS[word]]


def _wrap_usage(form: str) -> str:
    """Wrap a usage line to fit the terminal after the text "usage: ". Lines are not broken inside brackets or braces."""
    whole = re.sub(r"\[[^][]*(\[[^][]*\][^][]*)*\]|\{[^}]*\}", lambda match: match[0].replace(" ", "\0"), form)
    lines = textwrap.wrap(whole, WIDTH - 7, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n       ".join(lines).replace("\0", " ")


def _description(word: str | None) -> str:
    """Return the help description of the command or mode `word`, or of all commands if `word` is None. The description of the command `run`
    covers all modes."""
    if word is not None and word != "run":
        return _terms({word: _ABOUT[word]} if word in _ABOUT else _FORMS[word], 0)
    forms = {form: text for mode in _FORMS.values() for form, text in mode.items()}
    of_run = f"{_terms(_ARGUMENTS)}\n{_terms(forms, 4)}"
    about = "Train agents from JSON specs. Without arguments: demo.json ppo_cartpole train."
    return of_run if word else f"{about}\n\n{of_run}\n\n{_terms(_ABOUT)}"


def _terms(texts: Mapping[str, str], indent: int = 2) -> str:
    """Return text that shows terms and their descriptions in two columns. A term that is too long for its column is on a separate line."""
    column = indent + 11
    lines = []
    for term, text in texts.items():
        head = f"{' ' * indent}{term}"
        first = head.ljust(column) if len(head) < column - 1 else " " * column
        lines += [] if first.strip() else [head]
        lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * column)
    return "\n".join(lines)


def _accepted_options(word: str | None) -> tuple[str, ...]:
    """Return the names of the options that the command or mode `word` accepts, or () if `word` is None."""
    if word is None or word in COMMANDS:
        return () if word is None else COMMANDS[word].options
    others = {option for mode, options in MODE_OPTIONS.items() if mode != word for option in options}
    return tuple(option for option in COMMANDS["run"].options if option not in others)


def check_options_apply(command: str, arguments: argparse.Namespace) -> None:
    """Raise UsageError if the arguments contain an option that `command` does not accept."""
    for option, value in vars(arguments).items():
        accepted = [name for name, row in COMMANDS.items() if option in row.options]
        given = option != "words" and value is not None and value is not False and value not in ([], DATA_DIR)
        if given and command not in accepted:
            raise UsageError(f"--{option.replace('_', '-')} is an option of {', '.join(accepted)} only")
