"""Scripted players of EnvPool's board games, as fixed opponents of self-play (meta.self_play.fixed_opponents)."""

from __future__ import annotations

from functools import cache

import numpy as np

from slm_lab.env.boards import has_board, stone_planes
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.models.base import ExtensionError, import_class

Board = tuple[int, ...]
"""Cells of a board in row-major order: 1 for a stone of the player, −1 for a stone of the opponent, 0 for an empty cell."""


class Player:
    """Base class of scripted players, which act without a policy.

    Args: info: description of the env that the player acts in. rng: random generator of the player.
    """

    def __init__(self, info: EnvInfo, rng: np.random.Generator) -> None:
        self.info, self.rng = info, rng

    def act(self, obs_N: np.ndarray) -> np.ndarray:
        """Return the actions for observations [N, *shape]. The observations have the form that `Env` returns, and the actions have the form
        that `Env.step` accepts."""
        raise NotImplementedError


def build_player(path: str, info: EnvInfo, rng: np.random.Generator) -> Player:
    """Build a scripted player from its path "package.module:Class". Raises ValueError with the reason if the player cannot be built."""
    try:
        player: Player = import_class(path, Player)(info, rng)
    except ExtensionError as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    return player


class BoardPlayer(Player):
    """Base class of scripted players of two-player board games. Subclasses define `best_moves`, which returns equally good moves, and `act`
    draws one of these moves at random."""

    shape: tuple[int, int]
    """Rows and columns of the board."""

    def __init__(self, info: EnvInfo, rng: np.random.Generator) -> None:
        super().__init__(info, rng)
        rows, columns = self.shape
        if not has_board(info.observation, rows, columns, info.action.nvec[0]):
            raise ValueError(f"{type(self).__name__} plays only on a board of {rows} × {columns} with an action mask")

    def act(self, obs_N: np.ndarray) -> np.ndarray:
        """Return the actions, int64 [N], for observations [N, D]. An observation contains the plane of the player's stones, the plane of
        the opponent's stones, and the action mask."""
        observation = self.info.observation
        assert observation.mask is not None
        valid_NA = obs_N[:, slice(*observation.mask)] != 0
        planes_N = stone_planes(observation, obs_N, *self.shape).reshape(len(obs_N), 2, -1) > 0
        boards_N = planes_N[:, 0].astype(int) - planes_N[:, 1].astype(int)
        return np.array(
            [self._random_best_move(tuple(board), valid_A) for board, valid_A in zip(boards_N.tolist(), valid_NA, strict=True)], np.int64
        )

    def _random_best_move(self, board: Board, valid_A: np.ndarray) -> int:
        return int(self.rng.choice(self.best_moves(board, np.flatnonzero(valid_A).tolist())))

    def best_moves(self, board: Board, valid: list[int]) -> list[int]:
        """Return one or more equally good actions, from which `act` draws one action at random.

        Args: valid: the valid actions.
        """
        raise NotImplementedError


class PerfectTicTacToe(BoardPlayer):
    """TicTacToe player that draws at random among the moves with the best result under perfect play of both players (minimax)."""

    shape = (3, 3)

    def best_moves(self, board: Board, valid: list[int]) -> list[int]:
        values = {move: -_minimax_value(_board_after_move(board, move)) for move in valid}
        best = max(values.values())
        return [move for move, value in values.items() if value == best]


class OnePlyConnectFour(BoardPlayer):
    """Connect Four player that looks one move ahead. The player makes a winning move if there is one, else blocks a winning move of the
    opponent if there is one, else makes a random valid move."""

    shape = (6, 7)

    def best_moves(self, board: Board, valid: list[int]) -> list[int]:
        for own in (board, tuple(-cell for cell in board)):
            winning = [column for column in valid if _completes_four(own, _landing_cell(board, column))]
            if winning:
                return winning
        return valid


def _board_after_move(board: Board, move: int) -> Board:
    """Return the board after a move of the player, from the view of the opponent: stones of the opponent are 1, stones of the player are
    −1."""
    return tuple(-1 if i == move else -cell for i, cell in enumerate(board))


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@cache
def _minimax_value(board: Board) -> int:
    """Return the result (1, 0 or −1) of a TicTacToe board for the player whose turn it is, if both players play perfectly."""
    if any(all(board[i] == -1 for i in line) for line in _LINES):
        return -1
    empty = [i for i, cell in enumerate(board) if not cell]
    return max((-_minimax_value(_board_after_move(board, move)) for move in empty), default=0)


def _landing_cell(board: Board, column: int) -> tuple[int, int]:
    """Return the row and column of the cell in which a stone stops after the stone is dropped into a column of Connect Four. Row 5 is the
    lowest row of the board."""
    return max(row for row in range(6) if not board[7 * row + column]), column


def _completes_four(board: Board, cell: tuple[int, int]) -> bool:
    """Return whether a stone of the player in the cell `cell` (row, column) of Connect Four completes four in a row."""
    for step in ((0, 1), (1, 0), (1, 1), (1, -1)):
        count = 1
        for sign in (1, -1):
            row, column = cell[0] + sign * step[0], cell[1] + sign * step[1]
            while 0 <= row < 6 and 0 <= column < 7 and board[7 * row + column] == 1:
                count, row, column = count + 1, row + sign * step[0], column + sign * step[1]
        if count >= 4:
            return True
    return False
