"""Links from each transition of a replay buffer to the next transition of the same episode, for n-step returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slm_lab.lib.records import VecStep


class StepLinks:
    """Array that contains, for each transition of a replay buffer, the row of the next transition of the same episode.

    The link of a transition is −1 if the next transition is not stored yet, or if the episode has ended. If a transition can be sampled,
    all later transitions of its episode are in the ring buffer too, because a ring buffer overwrites its oldest rows first.
    """

    def __init__(self, capacity: int, num_envs: int) -> None:
        self.next_row = np.full(capacity, -1, np.int64)
        self.last_row_N = np.full(num_envs, -1, np.int64)
        """Row of the last transition of each env, or −1 if the env's next transition begins an episode."""

    def add(self, row_K: np.ndarray, env_K: np.ndarray, first_N: np.ndarray, step: VecStep) -> None:
        """For each of the envs env_K [K], link the previous transition to the new transition, which is in row row_K [K].

        Args: first_N: whether the observation of the new transition begins an episode.
        """
        before_K = np.where(first_N[env_K], -1, self.last_row_N[env_K])
        linked_K = before_K >= 0
        self.next_row[before_K[linked_K]] = row_K[linked_K]
        self.next_row[row_K] = -1
        self.last_row_N[env_K] = np.where((step.terminated_N | step.truncated_N)[env_K], -1, row_K)

    def successive_rows(self, row_B: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of successive transitions, int [steps, B], and whether each transition exists, bool [steps, B].

        Column b begins with the row `row_B[b]`. Where a transition does not exist, the row of the last existing transition is repeated.
        """
        rows, exists = [row_B], [np.ones(len(row_B), np.bool_)]
        for _ in range(steps - 1):
            next_B = self.next_row.take(rows[-1])
            exists.append(next_B >= 0)
            rows.append(np.where(exists[-1], next_B, rows[-1]))
        return np.stack(rows), np.stack(exists)

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Return the links of the transitions in the first `rows` rows."""
        return {"next_row": torch.from_numpy(self.next_row[:rows].copy()), "last_row_N": torch.from_numpy(self.last_row_N.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load links that `state_dict` returned. If the state has another number of envs, unfinished episodes get no further links."""
        saved = state["next_row"].numpy()
        self.next_row[: len(saved)] = saved
        last_row_N = state["last_row_N"].numpy()
        self.last_row_N[:] = last_row_N if len(last_row_N) == len(self.last_row_N) else -1
