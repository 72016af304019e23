"""Source of experience that steps envs with several agents in this process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slm_lab.env.vec import Env
from slm_lab.experiment.collect.local import EnvSource
from slm_lab.experiment.collect.turns import TurnTransitionBuilder
from slm_lab.experiment.execute.heartbeat import RESETTING, STEPPING, TRAINING
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat, Experience, no_beat
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.experiment.training.self_play import SelfPlay
from slm_lab.lib.padding import pad_rows, remove_padding
from slm_lab.lib.records import ActOut, EnvInfo, VecStep


class PolicyRows:
    """The rows of a vector env for which one policy acts, with the hidden states and unfinished transitions of these rows.

    Each row of the vector env belongs to one agent of one env copy. A transition is unfinished from an action of the agent until the
    agent's next action or the end of the agent's episode.

    Args:
        info: EnvInfo of the vector env.
        names: names of the agents for which the policy acts.
    """

    def __init__(self, learner: PolicyLearner, info: EnvInfo, names: Collection[str]) -> None:
        self.learner = learner
        self.rows = rows = info.agent_rows(names)
        """Indices of the policy's rows in the vector env, int64 [K], ascending."""
        self.all = len(rows) == info.num_envs
        """Whether the policy acts for all rows of the vector env."""
        self._own_space = info.for_agents(names).observation if info.groups else None
        """The space of the policy's observations if the env pads observations (see EnvInfo.groups), else None."""
        self._positions = {int(row): k for k, row in enumerate(rows)}
        policy = learner.agent.policy
        self.state_K = policy.initial_state(len(rows))
        self.turns = TurnTransitionBuilder(len(rows), policy.state_size)

    def select_rows(self, values_N: np.ndarray) -> np.ndarray:
        """Select the values of the policy's K rows, [K, …], from the values of all N rows of the vector env, [N, …]."""
        return values_N if self.all else values_N[self.rows]

    def select_observations(self, obs_N: np.ndarray) -> np.ndarray:
        """Return the observations of the policy's K rows without padding, [K, …]."""
        obs_K = self.select_rows(obs_N)
        return obs_K if self._own_space is None else remove_padding(obs_K, self._own_space)

    def act(self, obs_K: np.ndarray, acts_K: np.ndarray | None) -> ActOut:
        """Choose actions for the rows whose agents act in the next step. In all other rows, the returned output is undefined.

        Args: acts_K: whether the agent of each row acts, bool [K], or None if all agents act.
        """
        agent = self.learner.agent
        if acts_K is None:
            return agent.act(obs_K, self.state_K)
        rows = np.flatnonzero(acts_K)
        if not len(rows):
            action = agent.policy.action
            action_K = np.zeros((len(acts_K), *action.shape), action.dtype)
            return ActOut(action_K, np.zeros(len(acts_K), np.float32), self.state_K, agent.policy.version)
        return spread_to_all_rows(
            agent.act(obs_K[rows], None if self.state_K is None else self.state_K[rows]), rows, len(acts_K), self.state_K
        )

    def finish_step(
        self,
        obs_K: np.ndarray,
        first_K: np.ndarray,
        out: ActOut,
        acts_K: np.ndarray | None,
        step: VecStep,
        played_K: np.ndarray | None = None,
    ) -> Experience:
        """Return the experience of the policy in one step of the vector env, and update the hidden states.

        Args:
            obs_K, first_K, acts_K: observations, first-step flags and acting flags of the policy's rows before the step.
            out: output of `act` for `obs_K` and `acts_K`.
            step: result of the step for all rows of the vector env.
            played_K: whether the policy (and not an opponent) acts for each row in the running episode, bool [K], or None if the policy
                acts for all its rows.
        """
        step = step if self.all else self._select_step(step)
        if played_K is not None:
            step = step._replace(episodes=[episode for episode in step.episodes if played_K[episode.env]])
        transition = self.turns.finish_transitions(obs_K, first_K, self.state_K, out, step, acts_K)
        if out.state_N is not None:
            self.state_K = np.where(step.first_N[:, None], np.float32(0.0), out.state_N)
        return Experience(0, 0, step.episodes, transition)

    def _select_step(self, step: VecStep) -> VecStep:
        """Return a VecStep that contains only the policy's rows of `step`."""
        rows, position = self.rows, self._positions
        episodes = [episode._replace(env=position[episode.env]) for episode in step.episodes if episode.env in position]
        obs_K = self.select_observations(step.obs_N)
        last_obs_K = obs_K if step.last_obs_N is step.obs_N else self.select_observations(step.last_obs_N)
        return VecStep(
            step.reward_N[rows], step.terminated_N[rows], step.truncated_N[rows], last_obs_K, obs_K, step.first_N[rows],
            step.valid_N[rows], episodes, None if step.acts_N is None else step.acts_N[rows],
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the hidden states and the unfinished transitions. The state is valid only if the envs continue from the step at which
        `state_dict` was called."""
        state_K = None if self.state_K is None else torch.from_numpy(self.state_K.copy())
        return {"state": state_K, "turns": self.turns.state_dict(), "rollout": self.learner.agent.rollout_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_K = None if state["state"] is None else state["state"].numpy()
        self.turns.load_state_dict(state["turns"])
        self.learner.agent.load_rollout_state(state["rollout"])


def spread_to_all_rows(out: ActOut, rows: np.ndarray, num_rows: int, state_N: np.ndarray | None) -> ActOut:
    """Extend a policy output that was computed only for the rows with the indices `rows` to all num_rows rows.

    Rows that are not in `rows` get zero actions and the hidden states of state_N.
    """
    action_N = np.zeros((num_rows, *out.action_N.shape[1:]), out.action_N.dtype)
    logp_N = np.zeros(num_rows, np.float32)
    action_N[rows], logp_N[rows] = out.action_N, out.logp_N
    if state_N is not None and out.state_N is not None:
        state_N = state_N.copy()
        state_N[rows] = out.state_N
    return ActOut(action_N, logp_N, state_N, out.version)


class AgentsSource(EnvSource):
    """Source of experience that steps a vector env with several agents. Each policy acts for the rows of its agents.

    Args:
        policies: name of a policy → names of the agents for which the policy acts, in the order of `learners`, or None if one policy acts
            for all agents.
        self_play: SelfPlay object that chooses the opponents of the only policy and computes the opponents' actions, or None if there are
            no opponents.
    """

    def __init__(
        self,
        env: Env,
        learners: Sequence[PolicyLearner],
        stop: Stop,
        beat: Beat = no_beat,
        policies: Mapping[str, Sequence[str]] | None = None,
        self_play: SelfPlay | None = None,
    ) -> None:
        super().__init__(env, learners[0], stop, beat)
        self.self_play = self_play
        names = [env.info.agents] if policies is None else list(policies.values())
        self.parts = [PolicyRows(learner, env.info, agents) for learner, agents in zip(learners, names, strict=True)]
        self._obs_N: np.ndarray | None = None
        """Observations of the next step as the env returned them, or None before the first reset."""
        self._first_N: np.ndarray = np.ones(env.info.num_envs, np.bool_)

    def begin(self) -> None:
        if self._obs_N is None:
            self.beat(RESETTING)
            self._obs_N = self.env.reset()
            if self.self_play is not None:
                self.self_play.take_snapshot_if_due()
                self.self_play.choose_opponents(self._first_N)

    def __iter__(self) -> Iterator[Experience]:
        env, stop, beat, self_play = self.env, self.stop, self.beat, self.self_play
        while not (self.learner.has_finished or stop.requested):
            if self_play is not None:
                self_play.take_snapshot_if_due()
            obs_N, first_N, acts_N = self._obs_N, self._first_N, self._acting_mask()
            assert obs_N is not None
            inputs = [
                (part.select_observations(obs_N), part.select_rows(first_N), None if acts_N is None else part.select_rows(acts_N))
                for part in self.parts
            ]
            policy_inputs_N = env.policy_inputs(obs_N)
            outs = [
                part.act(obs_K if policy_inputs_N is obs_N else part.select_observations(policy_inputs_N), acts_K)
                for part, (obs_K, _, acts_K) in zip(self.parts, inputs, strict=True)
            ]
            action_N = self._env_actions(outs)
            if self_play is not None:
                self_play.write_opponent_actions(policy_inputs_N, env.acts_N, action_N)
            beat(STEPPING)
            step = env.step(action_N)
            beat(TRAINING)
            # assign before the learner trains on the step, so that the state can be saved after the update
            self._obs_N, self._first_N = step.obs_N, step.first_N
            played_N = None if self_play is None else self_play.learner_mask_N
            experiences = [
                part.finish_step(obs_K, first_K, out, acts_K, step, played_N)
                for part, (obs_K, first_K, acts_K), out in zip(self.parts, inputs, outs, strict=True)
            ]
            if self_play is not None:
                self_play.finish_step(step)
            for policy, experience in enumerate(experiences):
                self.between_rounds = policy == len(experiences) - 1
                report = None if self_play is None else self_play.newest_rating
                yield experience._replace(policy=policy, frames=env.info.frames, report=report)
        if self_play is not None and self.learner.has_finished:
            self_play.take_snapshot_if_due()

    def _acting_mask(self) -> np.ndarray | None:
        """Return whether a learning policy acts for each row in the next step, bool [N], or None if learning policies act for all rows."""
        acts_N = self.env.acts_N
        if self.self_play is None:
            return acts_N
        played_N = self.self_play.learner_mask_N
        return played_N if acts_N is None else acts_N & played_N

    def _env_actions(self, outs: Sequence[ActOut]) -> np.ndarray:
        """Combine the outputs of the policies into the actions of all rows, in the format of `env.step`."""
        actions = [part.learner.agent.policy.env_action(out.action_N) for part, out in zip(self.parts, outs, strict=True)]
        if self.parts[0].all:
            return actions[0]
        if self.env.info.groups:
            actions = [pad_rows(action_K, self.env.info.action) for action_K in actions]
        action_N = np.zeros((self.env.info.num_envs, *actions[0].shape[1:]), actions[0].dtype)
        for part, action_K in zip(self.parts, actions, strict=True):
            action_N[part.rows] = action_K
        return action_N

    def close(self) -> None:
        super().close()
        if self.self_play is not None:
            self.self_play.close()

    def state_dict(self) -> dict[str, Any]:
        env = self.env.state_dict()
        open_episodes = self._obs_N is not None and env["episodes"]["backend"] is not None
        state = {"env": env, "self_play": None if self.self_play is None else self.self_play.state_dict(open_episodes)}
        if not open_episodes:
            return state | {"open": None}
        return state | {
            "open": {
                "obs": torch.from_numpy(np.array(self._obs_N)),
                "first": torch.from_numpy(self._first_N.copy()),
                "policies": [part.state_dict() for part in self.parts],
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self.env.load_state_dict(state["env"])
        if self.self_play is not None and state["self_play"] is not None:
            self.self_play.load_state_dict(state["self_play"])
        saved = state["open"]
        if saved is None or not self.env.resume():
            return False
        self._obs_N, self._first_N = saved["obs"].numpy(), saved["first"].numpy()
        for part, part_state in zip(self.parts, saved["policies"], strict=True):
            part.load_state_dict(part_state)
        if self.self_play is not None and state["self_play"] is not None:
            self.self_play.load_games(state["self_play"])
        return True
