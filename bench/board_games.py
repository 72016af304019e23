"""How strong is the agent of a board game? `python -m bench.board_games RUN PLAYER [--games 200] [--sample] [--seed 0]`.

RUN: a folder, spec@latest or the name of a model. PLAYER: random, a class of slm_lab.env.board_players (PerfectTicTacToe,
OnePlyConnectFour), another "package.module:Class", or another run. The agent takes its most probable actions, or with --sample draws them,
and is each player in half of the games. Printed are wins, draws and losses.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.env.make import make_env
from slm_lab.experiment.deploy.load import load_trained
from slm_lab.experiment.files.find import find_training
from slm_lab.experiment.training.self_play import build_player, match
from slm_lab.spec.load.loader import load_spec

PLAYERS = ("PerfectTicTacToe", "OnePlyConnectFour")


def main() -> None:
    parser = argparse.ArgumentParser(description="Games of a trained agent against another player.")
    parser.add_argument("run")
    parser.add_argument("player")
    parser.add_argument("--games", type=int, default=200)
    parser.add_argument("--sample", action="store_true", help="draw the agent's actions from its distribution")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    training = find_training(arguments.run, None, Path("data"))
    agent, spec = load_trained(training), load_spec(training.spec_file, training.spec_name, for_search=False)
    env = make_env(spec.env, arguments.seed, num_envs=20, training=False, input=spec.agent.input)
    env.normalizers.copy_obs_statistics(agent.normalizers.state_dict())
    agent.policy.rng = np.random.default_rng(arguments.seed)
    opponent: Any = None
    name = f"slm_lab.env.board_players:{arguments.player}" if arguments.player in PLAYERS else arguments.player
    if ":" in name:
        opponent = build_player(name, env, np.random.default_rng([arguments.seed, 1]))
    elif name != "random":
        opponent = load_trained(find_training(name, None, Path("data"))).policy
    scores = Counter(match(env, agent.policy, opponent, arguments.games, deterministic=not arguments.sample))
    counts = ", ".join(f"{word} {scores[value]}" for word, value in (("won", 1.0), ("drawn", 0.5), ("lost", 0.0)))
    sys.stdout.write(f"{agent.description}\n{sum(scores.values())} games against {arguments.player}: {counts}\n")
    env.close()


if __name__ == "__main__":
    main()
