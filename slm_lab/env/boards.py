"""EnvPool's board games as text: the board that an observation shows, and the names of moves."""

from __future__ import annotations

import string
from dataclasses import dataclass

import numpy as np

from slm_lab.lib.records import EnvInfo, ObservationSpace

PASS = "pass"
"""Name of the move that places no stone. This move is the last action, after the moves for all cells."""


def has_board(observation: ObservationSpace, rows: int, columns: int, moves: int) -> bool:
    """Return whether observations consist of two planes of stones (first the plane of the player's own stones) and an action mask for
    `moves` moves."""
    if observation.mask is None or observation.mask[1] - observation.mask[0] != moves:
        return False
    if observation.parts:
        return len(observation.parts) == 2 and observation.parts[0].shape == (2, rows, columns) and observation.parts[0].dtype == "uint8"
    return observation.shape == (2 * rows * columns + moves,)


def stone_planes(observation: ObservationSpace, obs_N: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the two planes of stones, [N, 2, rows, columns], of a batch of observations for which `has_board` is true."""
    if observation.parts:
        return obs_N[:, observation.parts[0].begin : observation.parts[0].end].reshape(-1, 2, rows, columns)
    return np.moveaxis(obs_N[:, : 2 * rows * columns].reshape(-1, rows, columns, 2), -1, 1)


@dataclass(frozen=True)
class BoardGame:
    """Two-player board game with stones. Observations consist of two planes of stones (first the plane of the player's own stones) and an
    action mask."""

    rows: int
    columns: int
    drops: bool = False
    """Whether a move names a column into which a stone is dropped. If `drops` is false, a move names a cell."""
    passes: bool = False
    """Whether the last action of the game is a move that places no stone ("pass")."""

    @property
    def moves(self) -> tuple[str, ...]:
        """Names of all actions: columns "1", "2", …, or cells "a1", "b1", … in row-major order, where a1 is the upper left cell."""
        if self.drops:
            return tuple(str(column + 1) for column in range(self.columns))
        cells = tuple(f"{letter}{row + 1}" for row in range(self.rows) for letter in string.ascii_lowercase[: self.columns])
        return (*cells, PASS) if self.passes else cells

    def matches_env(self, info: EnvInfo) -> bool:
        """Return whether an env has the observations (with an action mask), the actions and the two agents of this game."""
        moves = len(self.moves)
        is_of_game = info.action.kind == "discrete" and info.action.nvec[0] == moves and len(info.agents) == 2
        return is_of_game and has_board(info.observation, self.rows, self.columns, moves)

    def valid_moves(self, observation: ObservationSpace, obs: np.ndarray) -> list[str]:
        """Return the names of the valid moves for the observation [D] of the player whose turn it is."""
        assert observation.mask is not None
        return [move for move, allowed in zip(self.moves, obs[slice(*observation.mask)], strict=True) if allowed]

    def board_text(self, observation: ObservationSpace, obs: np.ndarray, own: str, other: str) -> str:
        """Return the board of an observation [D] as lines of text.

        Args: own, other: letters for the player's and the opponent's stones.
        """
        own_RC, other_RC = stone_planes(observation, obs[None], self.rows, self.columns)[0]
        cells_RC = np.where(own_RC > 0, own, np.where(other_RC > 0, other, "."))
        names = [str(column + 1) if self.drops else string.ascii_lowercase[column] for column in range(self.columns)]
        heads = [""] * (self.rows + 1) if self.drops else [" ", *map(str, range(1, self.rows + 1))]
        return "\n".join(f"  {head} {' '.join(line)}" for head, line in zip(heads, [names, *cells_RC.tolist()], strict=True))


BOARD_GAMES = {
    "TicTacToe-v1": BoardGame(3, 3),
    "ConnectFour-v1": BoardGame(6, 7, drops=True),
    "Othello-v1": BoardGame(8, 8, passes=True),
}
"""Maps ids of EnvPool to board games."""
