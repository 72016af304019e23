"""The last observation of an episode that diverged is NaN; on backends that reset in the next step it stands in a row of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.lib.records import VecStep
from tests.agent.helpers import MLP, RNN, ToyEnv, agent_of, drive, info, spec

PPO = {"name": "PPO", "time_horizon": 16, "minibatch_size": 16, "training_epoch": 2}
A2C = {"name": "ActorCritic", "training_frequency": 16}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo": (PPO, MLP),
    "ppo, v-trace": (PPO | {"with_vtrace": True}, MLP),
    "ppo, recurrent": (PPO, RNN),
    "ppo, scaled values": (PPO | {"normalize_v_targets": True, "normalize_advantages": "percentile"}, MLP),
    "a2c, gae": (A2C | {"lam": 0.9}, MLP),
    "a2c, n-step": (A2C | {"num_step_returns": 16}, {**MLP, "shared": True}),
    "a2c, v-trace": (A2C | {"with_vtrace": True}, MLP),
    "a2c, recurrent": (A2C | {"lam": 0.9}, RNN),
    "sarsa": ({"name": "SARSA", "training_frequency": 16}, MLP),
}


class Diverging(ToyEnv):
    """An env whose episodes end with an observation of `value` if they are terminated."""

    value = np.nan

    def step(self, action_N: np.ndarray) -> VecStep:
        out = super().step(action_N)
        for obs in (out.obs_N, out.last_obs_N):
            obs[out.terminated_N] = self.value
        return out


class Ordinary(Diverging):
    value = 0.5


def trained(name: str, kind: type[Diverging]) -> Agent:
    algorithm, net = CASES[name]
    agent = agent_of(spec(algorithm, net), info())
    with np.errstate(all="ignore"):
        assert len(drive(agent, kind(info(), next_step=True), 100)) >= 5
    return agent


@pytest.mark.parametrize("name", CASES)
def test_what_stands_in_a_dummy_row_changes_nothing(name: str) -> None:
    agent, ordinary = trained(name, Diverging), trained(name, Ordinary)
    assert agent.algorithm.skipped_steps == 0
    expected = ordinary.weights()
    for key, value in agent.weights().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
