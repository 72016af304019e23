"""Let a person play a board game against a trained agent in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from slm_lab.env.boards import BOARD_GAMES, BoardGame
from slm_lab.env.vec import Env
from slm_lab.experiment.deploy.enjoy import EnjoyOptions, check_spaces, env_with_set_arguments, make_play_env
from slm_lab.experiment.deploy.players import PolicyPlayer, load_players, make_policy_act
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files.find import Training
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.training.evaluate import Act, joint_act
from slm_lab.experiment.training.resolve import select_device
from slm_lab.lib.records import VecStep
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.report import nearest_hint

SEATS = ("first", "second", "random")
"""Seat of the person in each game: "first" or "second" to move, or "random" (drawn for each game)."""
_QUIT = ("q", "quit", "exit")
_STONES = "XO"
"""Letters that show the stones of the player who moves first and of the player who moves second."""
Read = Callable[[], str]
"""Function that returns the next line of input including its newline, or "" at the end of the input."""
Write = Callable[[str], None]


class _PlayerQuit(Exception):
    """Exception that is raised if the person at the terminal ends the game."""


def play_human(training: Training, options: EnjoyOptions, plan: Plan, seat: str, read: Read, write: Write) -> None:
    """Play games between a person and a trained agent until all games are played or the person quits.

    Args:
        seat: one of SEATS.
        read: function that reads a line of the person's input.
        write: function that writes text to the terminal.

    Raises SpecError if the env section is invalid, and UserError if the agent was not trained in a supported board game.
    """
    spec = load_spec(training.spec_file, training.spec_name, for_search=False, builds_env=False)
    env_spec = env_with_set_arguments(spec, training.spec_file, options.sets)
    name = env_spec.name.rpartition(":")[2]
    if (game := BOARD_GAMES.get(name)) is None:
        raise UserError(f"--human plays {', '.join(BOARD_GAMES)} only; {training.paths.root} was trained in {env_spec.name}")
    players = load_players(training, spec, options.which, options.session, select_device(spec, plan, 0))
    seed = session_seeds(spec.meta.random_seed, 0, 0).eval_env
    env = make_play_env(spec, env_spec, seed, 1)
    try:
        if not game.matches_env(env.info):
            reason = "a key of the env section, such as action_mask, changes them"
            raise UserError(f"--human needs the original observations of {name} and its action mask; {reason}")
        check_spaces([player.agent for player in players], env, spec, env_spec.name)
        write("\n".join([*(player.agent.description for player in players), f"{_STONES[0]} moves first. q ends the game.", ""]))
        deterministic = options.deterministic or spec.meta.eval_deterministic
        games = _HumanGames(env, game, make_joint_act(players, env, deterministic), read, write)
        games.play(options.episodes or 1, seat, np.random.default_rng())
    finally:
        close_env(env.close)


def make_joint_act(players: list[PolicyPlayer], env: Env, deterministic: bool) -> Act:
    """Return a function that computes the actions of all agents of an env. Each agent acts with its own policy, or all agents act with the
    only policy."""
    rng = np.random.default_rng()
    if len(players) == 1:  # the policy also acts for the person's agent, but these actions are replaced
        return make_policy_act(players[0].agent, rng, deterministic)
    return joint_act([(env.info.agent_rows(player.agents or ()), make_policy_act(player.agent, rng, deterministic)) for player in players])


class _HumanGames:
    """Games of a person against policies in one env.

    Args: act: function that computes the actions of both players. The action for the person's player is replaced by the person's move.
    """

    def __init__(self, env: Env, game: BoardGame, act: Act, read: Read, write: Write) -> None:
        self.env, self.game, self.act, self.read, self.write = env, game, act, read, write
        self.results = {"won": 0, "drawn": 0, "lost": 0}

    def play(self, games: int, seat: str, rng: np.random.Generator) -> None:
        """Play games until the person quits. If `games` is above 1, print the numbers of games won, drawn and lost."""
        try:
            for _ in range(games):
                is_first = bool(rng.integers(2)) if seat == "random" else seat == "first"
                self.results[self._play_game(is_first)] += 1
        except _PlayerQuit:
            self.write("\n")
        if games > 1:
            self.write(f"you have {', '.join(f'{result} {count}' for result, count in self.results.items())}\n")

    def _play_game(self, is_first: bool) -> Literal["won", "drawn", "lost"]:
        """Play one game against the agent, and return whether the person at the terminal has won, drawn or lost."""
        obs_N, first_N = self.env.reset(), np.ones(2, np.bool_)
        observation = self.env.info.observation
        turn = self._player_to_move()
        human = turn if is_first else 1 - turn
        stones = _STONES if is_first else _STONES[::-1]
        self.write(f"\nYou play {stones[0]}.\n")
        while True:
            action_N = self.act(obs_N, first_N, self.env.acts_N)
            if self._player_to_move() == human:
                self.write(f"\n{self.game.board_text(observation, obs_N[human], *stones)}\n")
                action_N[human] = self._ask_move(self.game.valid_moves(observation, obs_N[human]))
            else:
                self.write(f"{stones[1]} plays {self.game.moves[int(action_N[1 - human])]}\n")
            step = self.env.step(action_N)
            if step.episodes:
                self.write(f"\n{self.game.board_text(observation, step.last_obs_N[human], *stones)}\n")
                return self._announce_result(step, human)
            obs_N, first_N = step.obs_N, step.first_N

    def _player_to_move(self) -> int:
        """Return the index of the player whose turn it is."""
        assert self.env.acts_N is not None
        return int(self.env.acts_N.argmax())

    def _ask_move(self, valid: list[str]) -> int:
        """Ask the person for a move until the move is valid, and return the action. Raises _PlayerQuit if the person quits."""
        if valid == ["pass"]:
            self.write("you have no other move than: pass\n")
        while True:
            self.write(f"your move ({' '.join(valid)}): ")
            line = self.read()
            word = line.strip().lower()
            if not line or word in _QUIT:
                raise _PlayerQuit
            if word in valid:
                return self.game.moves.index(word)
            if word:
                why = "is not a valid move now" if word in self.game.moves else f"is not a move{nearest_hint(word, valid)}"
                self.write(f"'{word}' {why}\n")

    def _announce_result(self, step: VecStep, human: int) -> Literal["won", "drawn", "lost"]:
        """Print who has won the game, and return whether the person at the terminal has won, drawn or lost."""
        returns = {episode.env: episode.total_reward for episode in step.episodes}
        difference = returns[human] - returns[1 - human]
        self.write("you win\n" if difference > 0 else "the agent wins\n" if difference < 0 else "a draw\n")
        return "won" if difference > 0 else "lost" if difference < 0 else "drawn"
