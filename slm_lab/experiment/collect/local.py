"""Sources of experience that step envs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from slm_lab.env.vec import Env
from slm_lab.experiment.execute.heartbeat import CLOSING, RESETTING, STEPPING, TRAINING
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat, Experience, no_beat
from slm_lab.experiment.training.learner import PolicyLearner


class EnvSource:
    """Base class of the sources of experience that own an env in this process.

    Args: learner: learner that trains on the experience. The collection ends when the learner has counted all its frames.
    """

    between_rounds = True

    def __init__(self, env: Env, learner: PolicyLearner, stop: Stop, beat: Beat = no_beat) -> None:
        self.env, self.learner, self.stop, self.beat = env, learner, stop, beat
        self.backend = env.backend

    @property
    def unsaved_episodes_reason(self) -> str:
        """Reason why unfinished episodes cannot be saved. The text is used only if unfinished episodes cannot be saved."""
        return f"backend {self.backend} cannot save those of this env"

    def recent_busy_spans(self) -> None:
        return None

    def close(self) -> None:
        self.beat(CLOSING)
        self.env.close()


class LocalSource(EnvSource):
    """Source of experience that steps a vector env with the policy of one learner."""

    def __init__(self, env: Env, learner: PolicyLearner, stop: Stop, beat: Beat = no_beat) -> None:
        super().__init__(env, learner, stop, beat)
        self._obs_N: np.ndarray | None = None
        """Observations of the next step as the env returned them, or None before the first reset."""
        self._first_N: np.ndarray = np.ones(env.info.num_envs, np.bool_)
        self._state_N = learner.agent.policy.initial_state(env.info.num_envs)

    def begin(self) -> None:
        if self._obs_N is None:
            self.beat(RESETTING)
            self.env.set_frame(self.learner.clock.global_frame)
            self._obs_N = self.env.reset()

    def __iter__(self) -> Iterator[Experience]:
        env, agent, learner, stop, beat = self.env, self.learner.agent, self.learner, self.stop, self.beat
        num_envs, env_action = env.info.num_envs, agent.policy.env_action
        while not (learner.has_finished or stop.requested):
            obs_N, first_N, state_N = self._obs_N, self._first_N, self._state_N
            assert obs_N is not None
            out = agent.act(env.policy_inputs(obs_N), state_N)
            beat(STEPPING)
            if env.curriculum is not None:
                env.set_frame(learner.clock.global_frame + num_envs)
            step = env.step(env_action(out.action_N))
            beat(TRAINING)
            # assign before the learner trains on the step, so that the state can be saved after the update
            self._obs_N, self._first_N = step.obs_N, step.first_N
            if out.state_N is not None:
                self._state_N = np.where(step.first_N[:, None], np.float32(0.0), out.state_N)
            yield Experience(0, num_envs, step.episodes, (obs_N, first_N, state_N, out, step))

    def state_dict(self) -> dict[str, Any]:
        env = self.env.state_dict()
        if self._obs_N is None or env["episodes"]["backend"] is None:
            return {"env": env, "open": None}
        state_N = self._state_N
        return {
            "env": env,
            "open": {
                "obs": torch.from_numpy(np.array(self._obs_N)),
                "first": torch.from_numpy(self._first_N.copy()),
                "state": None if state_N is None else torch.from_numpy(state_N.copy()),
                "rollout": self.learner.agent.rollout_state(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self.env.load_state_dict(state["env"])
        saved = state["open"]
        if saved is None or not self.env.resume():
            return False
        self._obs_N, self._first_N = saved["obs"].numpy(), saved["first"].numpy()
        self._state_N = None if saved["state"] is None else saved["state"].numpy()
        self.learner.agent.load_rollout_state(saved["rollout"])
        return True
