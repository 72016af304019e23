"""Tests of states saved in the middle of a rollout: training continues bit for bit if the envs continue too."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.lib.records import EnvInfo, ObservationSpace
from tests.agent.helpers import DISCRETE, Acting, ToyEnv, agent_of
from tests.contract.combinations import Case

CASES = [
    Case("Reinforce", "OnPolicyReplay", "MLPNet"),
    Case("ActorCritic", "OnPolicyCrossEntropy", "MLPNet"),
    Case("PPO", "OnPolicyBatchReplay", "RecurrentNet"),
    Case("SIL", "OnPolicyBatchReplay", "MLPNet"),
    Case("SIL", "OnPolicyReplay", "ConvNet"),
    Case("DQN", "Replay", "ConvNet"),
    Case("SoftActorCritic", "PrioritizedReplay", "MLPNet"),
]


def advance(agent: Agent, acting: Acting, env: ToyEnv, obs_N: np.ndarray, steps: int) -> tuple[np.ndarray, list[Any]]:
    trace: list[Any] = []
    for _ in range(steps):
        out = acting.act(obs_N)
        step = env.step(out.action_N)
        agent.clock.tick(2)
        acting.observe(obs_N, out, step)
        obs_N = step.obs_N
        trace.append(out.action_N.tolist())
        if agent.ready():
            trace.append(agent.update().loss)
    return obs_N, trace


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_middle_of_a_rollout(case: Case) -> None:
    env_info = case.info()
    if "Conv" in case.net:
        env_info = EnvInfo(2, ObservationSpace((2, 7, 7), "uint8", 2), DISCRETE, max_frame=10_000)
    one, other = agent_of(case.spec(), env_info), agent_of(case.spec(), env_info, seed=1)
    acting, env = Acting(one, 2), ToyEnv(env_info, 3)
    obs_N, _ = advance(one, acting, env, env.reset(), 33)
    other.load_state_dict(deepcopy(one.state_dict()))
    other.load_rollout_state(one.rollout_state())
    other.clock.load_state_dict(one.clock.state_dict())
    if one.replay is not None and other.replay is not None:
        other.replay.load_contents(deepcopy(one.replay.contents()))
    acting_other, env_other = Acting(other, 2), deepcopy(env)
    acting_other.state_N, acting_other.first_N = acting.state_N, acting.first_N
    traces = [advance(agent, a, e, obs_N, 30)[1] for agent, a, e in ((one, acting, env), (other, acting_other, env_other))]
    assert traces[0] == traces[1]
    assert all(torch.equal(value, other.weights()[name]) for name, value in one.weights().items())
