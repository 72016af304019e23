"""Experience from envs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from slm_lab.env.vec import Env
from slm_lab.experiment.experience import Beat, Experience, no_beat
from slm_lab.experiment.learner import PolicyLearner
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.process.heartbeat import CLOSING, RESETTING, STEPPING, TRAINING


class LocalSource:
    """Steps a vector env with the policy of one learner."""

    def __init__(self, env: Env, learner: PolicyLearner, stop: Stop, beat: Beat = no_beat) -> None:
        self.env, self.learner, self.stop, self.beat = env, learner, stop, beat
        self.backend = env.backend

    def begin(self) -> None: ...

    def __iter__(self) -> Iterator[Experience]:
        env, agent, learner, stop, beat = self.env, self.learner.agent, self.learner, self.stop, self.beat
        num_envs = env.info.num_envs
        beat(RESETTING)
        obs_N = env.reset()
        first_N: np.ndarray = np.ones(num_envs, np.bool_)
        state_N = agent.policy.initial_state(num_envs)
        while not (learner.finished or stop.requested):
            out = agent.act(obs_N, state_N)
            beat(STEPPING)
            step = env.step(out.action_N)
            beat(TRAINING)
            yield Experience(0, num_envs, step.episodes, (obs_N, first_N, state_N, out, step))
            obs_N, first_N = step.obs_N, step.first_N
            if out.state_N is not None:
                state_N = np.where(first_N[:, None], np.float32(0.0), out.state_N)

    def close(self) -> None:
        self.beat(CLOSING)
        self.env.close()

    def state_dict(self) -> dict[str, Any]:
        return {"env": self.env.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state["env"])
