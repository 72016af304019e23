"""Lines of code per algorithm, compared with Stable-Baselines3, its contrib package and CleanRL: `python -m bench.code_size CLEANRL`.

Only lines with code are counted: no blank lines, comments or docstrings. "file" is the file with the algorithm's class; "with bases" also
includes the files of its base classes. A file of CleanRL also contains the nets, the command line and the training loop. CLEANRL is a
checkout of https://github.com/vwxyzjn/cleanrl. Stable-Baselines3 is read from the virtual environment of bench.speed, which is created if
it does not exist. The command prints a table and, with --figure, draws it too.
"""

import argparse
import ast
import inspect
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

from bench.speed import CONTRIB, peer_python
from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.spec.models.algorithm import ALGORITHMS


class Peers(NamedTuple):
    """Files of the same algorithm in other libraries; "": the library does not have the algorithm."""

    sb3: str = ""
    """Path in site-packages."""
    cleanrl: str = ""
    """Path in the folder cleanrl of the checkout."""


PEERS = {
    "Reinforce": Peers(),
    "ActorCritic": Peers("stable_baselines3/a2c/a2c.py"),
    "PPO": Peers("stable_baselines3/ppo/ppo.py", "ppo_continuous_action.py"),
    "DQN": Peers("stable_baselines3/dqn/dqn.py", "dqn.py"),
    "QRDQN": Peers("sb3_contrib/qrdqn/qrdqn.py"),
    "C51": Peers("", "c51.py"),
    "PQN": Peers("", "pqn.py"),
    "SoftActorCritic": Peers("stable_baselines3/sac/sac.py", "sac_continuous_action.py"),
    "CrossQ": Peers("sb3_contrib/crossq/crossq.py"),
    "TQC": Peers("sb3_contrib/tqc/tqc.py"),
    "TD3": Peers("stable_baselines3/td3/td3.py", "td3_continuous_action.py"),
    "DDPG": Peers("stable_baselines3/ddpg/ddpg.py", "ddpg_continuous_action.py"),
    "BC": Peers(),
    "IQL": Peers(),
}
SB3_BASES = {
    "on": ["on_policy_algorithm.py", "base_class.py"],
    "off": ["off_policy_algorithm.py", "base_class.py"],
}


def code_lines(file: Path) -> int:
    """Return the number of lines that contain code."""
    text = file.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kinds = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in kinds:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def ours(name: str) -> tuple[int, int]:
    """Return (code lines of the file of an algorithm, code lines of this file and the files of the algorithm's base classes)."""
    implementation = ALGORITHMS[name].implementation()
    file = Path(inspect.getfile(implementation))
    bases = {Path(inspect.getfile(base)) for base in implementation.__mro__ if issubclass(base, Algorithm)}
    return code_lines(file), sum(map(code_lines, bases))


def of_sb3(name: str, packages: Path) -> tuple[int, int] | None:
    """Return the numbers that `ours` returns, for Stable-Baselines3 or its contrib package; None if neither has the algorithm."""
    file = PEERS[name].sb3
    if not file:
        return None
    own = code_lines(packages / file)
    above = code_lines(packages / "stable_baselines3/td3/td3.py") if name == "DDPG" else 0
    bases = SB3_BASES["on" if ALGORITHMS[name].on_policy else "off"]
    return own, own + above + sum(code_lines(packages / "stable_baselines3/common" / base) for base in bases)


def table(cleanrl: Path, packages: Path) -> list[tuple[str, tuple[int, int], tuple[int, int] | None, int | None]]:
    """Return for each algorithm: its name, and the code lines in slm_lab, in Stable-Baselines3 and in CleanRL."""
    files = {name: peers.cleanrl for name, peers in PEERS.items()}
    return [
        (name, ours(name), of_sb3(name, packages), code_lines(cleanrl / "cleanrl" / files[name]) if files[name] else None) for name in PEERS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.code_size", description="Count the lines of code of each algorithm.")
    parser.add_argument("cleanrl", type=Path, metavar="CLEANRL", help="checkout of CleanRL")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw the table as a PNG file")
    options = parser.parse_args()
    if not (options.cleanrl / "cleanrl" / "ppo.py").exists():
        parser.error(f"'{options.cleanrl}' is not a checkout of CleanRL: it has no cleanrl/ppo.py")
    packages = next((peer_python(CONTRIB).parent.parent / "lib").glob("python3*/site-packages"))
    rows = table(options.cleanrl, packages)
    lines = [
        "| algorithm | slm_lab: file | with bases | Stable-Baselines3: file | with bases | CleanRL: file |",
        "|---|---|---|---|---|---|",
    ]
    for name, own, sb3, clean in rows:
        shown = ["–" if value is None else f"{value:,}" for value in (*own, *(sb3 or (None, None)), clean)]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    sys.stdout.write("\n".join(lines) + "\n")
    if options.figure:
        draw(rows, options.figure)


def draw(rows: list[tuple[str, tuple[int, int], tuple[int, int] | None, int | None]], file: Path) -> None:
    """Draw a bar for each algorithm and library: the code lines of the algorithm's file."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    sides = (
        ("slm_lab", [own[0] for _, own, _, _ in rows], "#0072b2"),
        ("Stable-Baselines3 and contrib", [sb3[0] if sb3 else 0 for _, _, sb3, _ in rows], "#e69f00"),
        ("CleanRL (with nets, arguments and loop)", [clean or 0 for *_, clean in rows], "#999999"),
    )
    for index, (label, values, colour) in enumerate(sides):
        axes.barh([row + (index - 1) * 0.27 for row in range(len(rows))], values, height=0.25, label=label, color=colour)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("lines of code in the file of the algorithm")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
