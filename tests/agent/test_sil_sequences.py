"""Tests of self-imitation with a recurrent net: sequences, returns and loss against the net run step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.replay.sequences import SequenceBatch, SequenceReplay
from slm_lab.lib.records import VecStep
from tests.agent.helpers import Acting, ToyEnv, agent_of, drive, info
from tests.agent.test_sil import A2C, PPO, sil_spec

GAMMA = 0.99
LSTM = {"name": "RecurrentNet", "cell_type": "LSTM", "rnn_hidden_size": 5, "seq_len": 4, "optim_spec": {"name": "Adam", "lr": 0.01}}
Row = tuple[np.ndarray, np.ndarray, bool, int, float]
"""(observation, hidden state before it, whether it begins an episode, action, return)."""


def filled(algorithm: dict[str, Any], shared: bool = False, **keys: Any) -> tuple[Agent, list[Row]]:
    """Return an agent that has acted without learning, and the rows its replay should hold: whole episodes in the order of their ends."""
    agent = agent_of(sil_spec(algorithm, net={**LSTM, "shared": shared}, max_size=120, burn_in=3, **keys), info(3))
    sil: Any = agent.algorithm
    env, acting, rows = ToyEnv(info(3), 4), Acting(agent, 3), []
    under_way: list[list[tuple[np.ndarray, np.ndarray, int, float]]] = [[], [], []]
    obs_N = env.reset()
    for _ in range(60):
        before_N, out = acting.state_N, acting.act(obs_N)
        step: VecStep = env.step(out.action_N)
        acting.observe(obs_N, out, step)
        for n in range(3):
            under_way[n].append((obs_N[n], before_N[n], int(out.action_N[n]), float(step.reward_N[n])))
            if step.terminated_N[n] or step.truncated_N[n]:
                ret = 0.0 if step.terminated_N[n] else one_value(sil.net, step.last_obs_N[n], out.state_N[n])
                episode: list[Row] = []
                for obs, state, action, reward in reversed(under_way[n]):
                    ret = reward + GAMMA * ret
                    episode.append((obs, state, len(episode) + 1 == len(under_way[n]), action, ret))
                rows += episode[::-1]
                under_way[n] = []
        obs_N = step.obs_N
        sil.replay.add_finished_episodes()
    return agent, rows


def one_value(net: Any, obs: np.ndarray, state: np.ndarray) -> float:
    with torch.no_grad():
        unrolled = net.unroll(torch.from_numpy(obs)[None, None], torch.zeros(1, 1, dtype=torch.bool), torch.from_numpy(state)[None])
    return float(unrolled[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("algorithm", [A2C, PPO], ids=["A2C", "PPO"])
def test_sequences_and_loss_by_hand(algorithm: dict[str, Any], shared: bool) -> None:
    agent, rows = filled({**algorithm, "sil_policy_loss_coef": 0.7, "sil_val_loss_coef": 0.3}, shared)
    sil: Any = agent.algorithm
    ring = sil.replay.ring
    assert isinstance(ring, SequenceReplay)
    assert ring.seen == len(rows) > 120
    batch = sil.replay.sample()
    assert isinstance(batch, SequenceBatch)
    newest = range(len(rows) - ring.steps, len(rows))
    starts = {
        ring._sequence_indices(np.array([k]), np.array([0]))[0]: k for k in newest if k % ring.stride == 0 and k + ring.window <= len(rows)
    }
    assert ring.size == len(starts)
    policy, value, better = torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4, 8)
    weight = torch.ones(4, 8) if batch.weight_B is None else batch.weight_B.view(4, 8)
    for m, at in enumerate(batch.sampled_rows):
        mine = rows[starts[at] : starts[at] + ring.window]
        state = torch.from_numpy(mine[0][1])[None]
        for t, (obs, _, first, action, ret) in enumerate(mine):
            state = torch.zeros_like(state) if first else state
            with torch.no_grad():
                none = torch.zeros(1, 1, dtype=torch.bool)
                params, v, state = sil.net.unroll(torch.from_numpy(obs)[None, None], none, state)
            if t >= 3:
                assert float(batch.reward_B.view(4, 8)[t - 3, m]) == pytest.approx(ret, abs=1e-4)
                better[t - 3, m] = max(ret - float(v), 0.0)
                policy[t - 3, m] = -torch.log_softmax(params[0, 0], 0)[action] * better[t - 3, m]
                value[t - 3, m] = 0.5 * better[t - 3, m] ** 2
    sil.meter.begin()
    got = sil._imitation_step(batch)
    assert got.numpy() == pytest.approx(better.flatten().numpy(), abs=1e-4)
    assert sil.meter.end().loss == pytest.approx(float((weight * (0.7 * policy + 0.3 * value)).mean()), rel=1e-3)
    sil.replay.update_priorities(batch.sampled_rows, got)
    last = {int(place): m for m, place in enumerate(batch.sampled_rows)}
    error = 0.9 * better.amax(0) + 0.1 * better.mean(0)
    expected = [(float(error[m]) + ring.epsilon) ** ring.alpha for m in last.values()]
    assert ring.tree.get(np.array(list(last))) == pytest.approx(np.array(expected), rel=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", ["OnPolicyBatchReplay", "OnPolicyReplay"])
def test_resumed_is_straight(memory: str) -> None:
    """Resuming restores unfinished episodes with their states, the sequences, and the states before truncated ends."""

    def agent() -> Agent:
        return agent_of(sil_spec(A2C, memory, net=LSTM), info(3))

    one, other, env = agent(), agent(), ToyEnv(info(3), 1)
    drive(one, env, 47)
    other.load_state_dict(one.state_dict())
    other.load_rollout_state(one.rollout_state())
    other.clock.load_state_dict(one.clock.state_dict())
    contents = one.replay.contents()
    assert len(contents["last_state"]) == len(contents["last_obs"]) > 0
    other.replay.load_contents(contents)
    found = []
    for each in (one, other):
        torch.manual_seed(0)
        found.append([metrics.extra["sil_loss"] for metrics in drive(each, ToyEnv(info(3), 2), 40) if "sil_loss" in metrics.extra])
    assert len(found[0]) > 2
    assert found[0] == found[1]
    for a, b in zip(one.weights().values(), other.weights().values(), strict=True):
        assert torch.equal(a, b)
