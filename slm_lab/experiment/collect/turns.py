"""Transitions of agents that do not act in every step of their env, such as the players of a board game."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slm_lab.experiment.training.experience import Transition
from slm_lab.lib.records import ActOut, VecStep


class TurnTransitionBuilder:
    """Builder of transitions that joins all env steps between two actions of an agent into one transition.

    A transition begins when an agent acts, and ends at the agent's next action or at the end of the agent's episode. The reward of the
    transition is the sum of the rewards that the agent receives from the beginning to the end of the transition. The next observation of
    the transition is the agent's observation at its next action. If a move of another player ends the game, the agent's final reward
    belongs to the agent's own last move. Rewards that an agent receives before its first action of an episode do not belong to any
    transition. The discount factor is applied once per transition, and not once per env step. The observation of the agent's first action
    counts as the first observation of the episode, even if the agent had to wait for its turn.

    Args:
        num_rows: N, number of rows of the vector env (one row per agent of each env copy).
        state_size: S, size of the hidden state of the policy.
    """

    def __init__(self, num_rows: int, state_size: int) -> None:
        self.open_N = np.zeros(num_rows, np.bool_)
        """Whether each row has an unfinished transition, bool [N]."""
        self.fresh_N = np.zeros(num_rows, np.bool_)
        """Whether the agent of each row has not acted yet in its current episode, bool [N]."""
        self._begun: dict[str, np.ndarray] = {
            "first": np.zeros(num_rows, np.bool_),
            "reward": np.zeros(num_rows, np.float32),
            "logp": np.zeros(num_rows, np.float32),
            "version": np.zeros(num_rows, np.int64),
            "state": np.zeros((num_rows, state_size), np.float32),
            "next_state": np.zeros((num_rows, state_size), np.float32),
        }
        """The unfinished transition of each row: observation, action, log probability, hidden states, and sum of the rewards so far."""

    def finish_transitions(
        self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep, acted_N: np.ndarray | None
    ) -> Transition:
        """Return the transitions that end with an env step. In the returned step, `valid_N` is True for the rows in which a transition
        ends.

        In rows where `valid_N` is False, the values of all other returned arrays must be ignored.

        Args:
            obs_N, first_N, state_N, out: inputs and outputs of the policies before the step. Their values are undefined in rows whose
                agents did not act.
            step: result of the env step.
            acted_N: whether the agent of each row acted in the step, bool [N], or None if all agents acted.
        """
        if acted_N is None and step.acts_N is None and not (self.open_N | self.fresh_N).any():
            return obs_N, first_N, state_N, out, step
        self.fresh_N |= first_N
        self._begin_transitions(step.valid_N if acted_N is None else acted_N & step.valid_N, obs_N, state_N, out)
        begun, open_N = self._begun, self.open_N
        begun["reward"][open_N] += step.reward_N[open_N]
        ends_N = step.terminated_N | step.truncated_N | (True if step.acts_N is None else step.acts_N)
        ended_N = open_N & ends_N
        self.open_N = open_N & ~ended_N
        joined_step = step._replace(
            reward_N=begun["reward"].copy(),
            terminated_N=step.terminated_N & ended_N,
            truncated_N=step.truncated_N & ended_N,
            valid_N=ended_N,
        )
        recurrent = out.state_N is not None
        chosen = ActOut(begun["action"], begun["logp"], begun["next_state"] if recurrent else None, begun["version"])
        return begun["obs"], begun["first"], begun["state"] if recurrent else None, chosen, joined_step

    def _begin_transitions(self, new_N: np.ndarray, obs_N: np.ndarray, state_N: np.ndarray | None, out: ActOut) -> None:
        """Begin a transition in each row for which new_N, bool [N], is True."""
        begun = self._begun
        if "obs" not in begun:
            begun |= {"obs": np.zeros_like(obs_N), "action": np.zeros_like(out.action_N)}
        self.open_N |= new_N
        begun["reward"][new_N] = 0.0
        values = {"obs": obs_N, "first": self.fresh_N, "action": out.action_N, "logp": out.logp_N}
        values |= {"version": np.broadcast_to(out.version, len(new_N))}
        if state_N is not None and out.state_N is not None:
            values |= {"state": state_N, "next_state": out.state_N}
        for name, value in values.items():
            begun[name][new_N] = value[new_N]
        self.fresh_N &= ~new_N

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished transitions. The state is valid only if the envs continue from the step at which `state_dict` was
        called."""
        return {
            "open": torch.from_numpy(self.open_N.copy()),
            "fresh": torch.from_numpy(self.fresh_N.copy()),
            "begun": {name: torch.from_numpy(x.copy()) for name, x in self._begun.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.open_N, self.fresh_N = state["open"].numpy().copy(), state["fresh"].numpy().copy()
        self._begun = {name: x.numpy().copy() for name, x in state["begun"].items()}
