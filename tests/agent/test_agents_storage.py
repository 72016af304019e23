"""Tests of the rollout storage for several agents: each column equals the rollout of its agent alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slm_lab.agent.ops.returns import gae
from slm_lab.agent.rollout.rollout import MultiAgentBatchReplay, Rollout
from slm_lab.lib.records import ActionSpace, ActOut, EnvInfo, ObservationSpace, VecStep

N, STATE = 3, 2
INFO = EnvInfo(N, ObservationSpace((1,)), ActionSpace("discrete", (4,)), agents=("a", "b", "c"))


def value_of(obs: np.ndarray) -> np.ndarray:
    """Return a value that differs between observations."""
    return np.asarray(np.sin(obs[..., 0]), np.float32)


def collected(steps: int, share: float, seed: int, length: int = 12) -> tuple[MultiAgentBatchReplay, list[list[dict[str, float]]]]:
    """Store random steps, in which each row has a transition with probability `share`.

    Return the storage and the transitions of each row.
    """
    rng, memory = np.random.default_rng(seed), MultiAgentBatchReplay(INFO, length, STATE)
    obs_N, first_N = rng.standard_normal((N, 1)).astype(np.float32), np.ones(N, np.bool_)
    state_N = np.zeros((N, STATE), np.float32)
    rows: list[list[dict[str, float]]] = [[] for _ in range(N)]
    for _ in range(steps):
        valid_N = rng.random(N) < share
        end_N = rng.random(N)
        terminated_N, truncated_N = valid_N & (end_N < 0.15), valid_N & (end_N > 0.85)
        over_N = terminated_N | truncated_N
        last_N = rng.standard_normal((N, 1)).astype(np.float32)
        next_N = np.where(over_N[:, None], rng.standard_normal((N, 1)), last_N).astype(np.float32)
        next_N = np.where(valid_N[:, None], next_N, obs_N)
        out = ActOut(rng.integers(4, size=N), rng.standard_normal(N).astype(np.float32), state_N + 1, 5)
        reward_N = rng.standard_normal(N).astype(np.float32)
        memory.add(obs_N, first_N, state_N, out, VecStep(reward_N, terminated_N, truncated_N, last_N, next_N, over_N, valid_N, []))
        for n in np.flatnonzero(valid_N):
            row = {"obs": obs_N[n, 0], "reward": reward_N[n], "terminated": terminated_N[n], "truncated": truncated_N[n]}
            rows[n].append(row | {"last": last_N[n, 0], "action": out.action_N[n], "first": first_N[n], "state": state_N[n, 0]})
        state_N = np.where(over_N[:, None], 0, np.where(valid_N[:, None], state_N + 1, state_N)).astype(np.float32)
        first_N = np.where(valid_N, over_N, first_N)
        obs_N = next_N
    return memory, rows


def advantages(rollout: Rollout) -> np.ndarray:
    """Return the advantages of a rollout, as algorithms compute them."""
    value_TN = torch.from_numpy(value_of(rollout.obs_TN.numpy()))
    next_TN, cut = value_TN[1:].clone(), rollout.truncations
    next_TN[cut.t_K, cut.n_K] = torch.from_numpy(value_of(cut.obs_K.numpy()))
    rows = (rollout.reward_TN, value_TN[:-1], next_TN, rollout.terminated_TN, rollout.done_TN)
    return np.asarray(gae(*rows, 0.9, 0.8))


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_each_column_is_the_rollout_of_its_agent_alone(share: float) -> None:
    for seed in range(5):
        memory, rows = collected(12, share, seed)
        assert memory.ready
        rollout = memory.rollout()
        found = advantages(rollout)
        assert rollout.valid_TN.sum(0).tolist() == [len(own) for own in rows]
        for n, own in enumerate(rows):
            expected = 0.0
            for t in reversed(range(len(own))):
                step = own[t]
                assert (rollout.obs_TN[t, n, 0], rollout.action_TN[t, n]) == (step["obs"], step["action"])
                assert bool(rollout.first_TN[t, n]) == bool(step["first"])
                following = 0.0 if step["terminated"] else value_of(np.array([step["last"]]))
                done = bool(step["terminated"]) or bool(step["truncated"])
                expected = step["reward"] + 0.9 * following - value_of(np.array([step["obs"]])) + (0.0 if done else 0.9 * 0.8 * expected)
                assert found[t, n] == pytest.approx(expected, abs=1e-5)
            assert rollout.state_NS[n, 0] == own[0]["state"]


def test_a_second_rollout_has_no_rows_of_the_first() -> None:
    memory, _ = collected(12, 1.0, 0)
    first = memory.rollout().valid_TN.sum()
    obs_N, state_N, one = np.zeros((N, 1), np.float32), np.zeros((N, STATE), np.float32), np.array([True, False, False])
    none_N = np.zeros(N, np.bool_)
    for _ in range(12):
        out = ActOut(np.zeros(N, np.int64), np.zeros(N, np.float32), state_N, 6)
        memory.add(obs_N, none_N, state_N, out, VecStep(np.ones(N, np.float32), none_N, none_N, obs_N, obs_N, none_N, one, []))
    second = memory.rollout()
    assert (first, second.valid_TN.sum(0).tolist()) == (36, [12, 0, 0])
    for name in ("obs", "first", "reward", "logp", "terminated", "truncated", "version"):
        assert not getattr(second, f"{name}_TN")[name in ("obs", "first") :, 1:].any(), name


def test_the_middle_of_a_rollout_is_saved() -> None:
    one, _ = collected(7, 0.6, 3)
    other = MultiAgentBatchReplay(INFO, 12, STATE)
    other.load_state_dict(one.state_dict())
    rng = np.random.default_rng(1)
    for _ in range(5):
        obs_N, valid_N, none_N = rng.standard_normal((N, 1)).astype(np.float32), rng.random(N) < 0.7, np.zeros(N, np.bool_)
        out = ActOut(np.zeros(N, np.int64), np.zeros(N, np.float32), np.ones((N, STATE), np.float32), 6)
        step = VecStep(np.ones(N, np.float32), none_N, none_N, obs_N, obs_N, none_N, valid_N, [])
        for memory in (one, other):
            memory.add(obs_N, none_N, np.zeros((N, STATE), np.float32), out, step)
    a, b = one.rollout(), other.rollout()
    valid = a.valid_TN
    assert torch.equal(valid, b.valid_TN)
    for name in ("obs_TN", "reward_TN", "action_TN", "truncated_TN"):
        x, y = getattr(a, name)[: len(valid)], getattr(b, name)[: len(valid)]
        assert torch.equal(x[valid], y[valid])
    assert torch.equal(a.truncations.obs_K, b.truncations.obs_K)


def test_copied_columns_have_no_data_of_earlier_rollouts() -> None:
    """The storage of a worker is reused, so data in its invalid rows must not be copied to the dataset."""
    used, _ = collected(12, 0.5, 4)
    after_TN = np.arange(used.t + 1)[:, None] > used.count_N
    used.slabs["first"][: used.t + 1][after_TN] = True
    used.slabs["terminated"][: used.t][after_TN[1:]] = True
    dataset = MultiAgentBatchReplay(INFO, 12, STATE)
    dataset.copy_columns(0, used, slice(None))
    assert len(set(used.count_N.tolist())) > 1
    rollout = dataset.rollout()
    assert not rollout.first_TN[after_TN].any()
    assert not rollout.terminated_TN[after_TN[1:]].any()
