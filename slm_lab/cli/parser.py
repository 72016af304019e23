"""Command-line options: what each accepts, and which command takes which."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import slm_lab
from slm_lab.cli.commands import COMMANDS

USER_ERROR = 2
DATA_DIR = Path("data")
AXES = ("frame", "global_frame", "wall_t", "opt_step")
METRICS = ("total_reward", "return_new")

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
         enjoy@{run folder | latest}   play episodes with a checkpoint of a run; FILE and NAME may be left out

  check    validate one or all specs of a file; with --build also build their env and agent
  export   write the policy of a run as an ONNX or torch.export file
  compare  draw runs in one graph and print a table: RUN is a run folder or a quoted glob pattern, 'data/ppo_*';
           runs of one spec, or with the same --label, are seeds of one curve
  retro_analyze
           rebuild metrics and graphs from the files of runs (or of the latest one): killed and failed ones too, and those of SLM Lab
  list     list what there is: specs, algorithms, nets, memories, envs
  new      write a commented spec for an env"""
_EPILOG = "exit codes: 0 done, 1 a session failed, 2 user error (nothing is written), 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP"


class UsageError(Exception):
    """A wrong argument: exit code 2."""


class _Parser(argparse.ArgumentParser):
    """Suggest the nearest option for an unknown one."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"unrecognized arguments: (-[^\s=]+)", message):
            message += did_you_mean(unknown[1], self._option_string_actions)
        self.exit(USER_ERROR, f"{message}\nsee {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; positional arguments arrive as `words`."""
    usage = "\n       ".join(f"%(prog)s {command.usage}" for command in COMMANDS.values())
    parser = _Parser(
        usage=usage, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("words", nargs="*", help=argparse.SUPPRESS)
    add("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="fill ${KEY}, or override a key by path; repeatable")
    add(
        "--jobs",
        type=_jobs,
        metavar="N",
        help="number of concurrent sessions, in a search or study those of all runs (default: as many as the cores allow)",
    )
    add("--data-dir", type=Path, default=DATA_DIR, metavar="DIR", help="where runs are written (default: data)")
    add(
        "--cluster",
        type=_cluster,
        metavar="ADDRESS",
        help="train, search, study: run on the nodes of a Ray cluster: HOST:PORT, auto (this machine is a node) or local (start one)",
    )
    add(
        "--storage",
        type=_storage,
        metavar="URL",
        help="train, with --cluster: write checkpoints below a URL (s3://…, gs://…), not in the data folder, which nodes need not see then",
    )
    add("--device", type=_device, metavar="DEVICE", help="cpu, cuda or cuda:N (default: net.gpu of the spec)")
    add("--build", action="store_true", help="check: also build env and agent")
    add("--confirm", type=_confirm, metavar="K", help="search: train the best K trials again, with new seeds, and rank by that")
    add("--common-seeds", action="store_true", help="search: the same seeds for all trials")
    add("--adopt", action="append", metavar="GLOB", help="study: finished run folders that count as its runs; repeatable")
    add("--episodes", type=_episodes, metavar="N", help="enjoy: number of episodes (default: 10)")
    add("--deterministic", action="store_true", help="enjoy: take the mode of the action distribution instead of a sample")
    add("--render", action="store_true", help="enjoy: draw one env in a window")
    add("--video", action="store_true", help="enjoy: record one env as an MP4 file in the run folder")
    add(
        "--checkpoint",
        type=_checkpoint,
        metavar="WHICH",
        help="enjoy, export: best, last, or the frame of a numbered checkpoint (default: best)",
    )
    add("--session", type=_session, metavar="N", help="enjoy, export: session of the checkpoint (default: the best one)")
    add("--format", type=_format, metavar="FORMAT", help="export: onnx or torch (default: onnx)")
    add("--by", type=_axis, metavar="COLUMN", help=f"compare: x axis, one of {', '.join(AXES)} (default: frame)")
    add("--metric", type=_metric, metavar="COLUMN", help=f"compare: return to draw, one of {', '.join(METRICS)} (default: total_reward)")
    add("--solve", type=_return, metavar="RETURN", help="compare: mean return that counts as solved")
    add("--label", action="append", metavar="NAME", help="compare: name of each RUN, in order; repeatable")
    add(
        "--out",
        type=Path,
        metavar="PATH",
        help="compare: output folder (default: DATA-DIR/compare_{time}); export: file (default: in the run folder)",
    )
    add("--search", nargs="+", metavar="WORD", help="list: only lines that contain all these words")
    add("--env", metavar="ENV", help="new: a Gymnasium id, or package.module:EnvId")
    add("--like", metavar="SPEC", help="new: an algorithm, a spec that ships, or FILE:NAME (default: PPO)")
    add("--version", action="version", version=f"slm-lab {slm_lab.__version__}")
    return parser


def check_options_apply(command: str, arguments: argparse.Namespace) -> None:
    """Raise UsageError for a given option that `command` does not accept."""
    for option, value in vars(arguments).items():
        accepted = [name for name, row in COMMANDS.items() if option in row.options]
        given = option != "words" and value is not None and value is not False and value not in ([], DATA_DIR)
        if given and command not in accepted:
            raise UsageError(f"--{option.replace('_', '-')} is an option of {' and '.join(accepted)} only")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number of sessions '{text}'; expected 1 or more")
    return int(text)


def _confirm(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number of trials '{text}'; expected 1 or more")
    return int(text)


def _episodes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number of episodes '{text}'; expected 1 or more")
    return int(text)


def _checkpoint(text: str) -> str:
    if text not in ("best", "last") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid checkpoint '{text}'; expected best, last or a frame, such as 200000")
    return str(int(text)) if text.isdecimal() else text


def _session(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid session '{text}'; expected 0 or more")
    return int(text)


def _format(text: str) -> str:
    if text not in ("onnx", "torch"):
        raise argparse.ArgumentTypeError(f"invalid format '{text}'; expected onnx or torch")
    return text


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"invalid device '{text}'; expected cpu, cuda or cuda:N")
    return text


def _cluster(text: str) -> str:
    if text in ("auto", "local") or re.fullmatch(r"[^\s:/]+:\d+|\[[0-9a-fA-F:]+\]:\d+", text):
        return text
    hint = "; Ray Client (ray://) is not supported: run this on a node of the cluster" if text.startswith("ray://") else ""
    raise argparse.ArgumentTypeError(f"invalid address '{text}'; expected HOST:PORT, auto or local{hint}")


def _storage(text: str) -> str:
    if re.fullmatch(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://\S+", text):
        return text
    hint = f"; did you mean 'file://{text}'?" if text.startswith("/") else ""
    raise argparse.ArgumentTypeError(
        f"invalid URL '{text}'; expected one such as s3://bucket/folder, gs://bucket/folder or file:///folder{hint}"
    )


def _axis(text: str) -> str:
    if text not in AXES:
        raise argparse.ArgumentTypeError(f"invalid column '{text}'; expected one of {', '.join(AXES)}{did_you_mean(text, AXES)}")
    return text


def _metric(text: str) -> str:
    if text not in METRICS:
        raise argparse.ArgumentTypeError(f"invalid metric '{text}'; expected one of {', '.join(METRICS)}{did_you_mean(text, METRICS)}")
    return text


def _return(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"invalid return '{text}'; expected a number, such as 195 or -200")
