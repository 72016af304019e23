"""Tests of n-step returns of the DQN family: rewards, discounts and last observations against the history of each env."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.ops.targets import n_step_return, one_step_target
from slm_lab.agent.replay.replay import PrioritizedReplay, Replay
from slm_lab.agent.replay.sequences import PrioritizedSequenceReplay, SequenceReplay
from slm_lab.agent.replay.step_links import StepLinks
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, VecStep
from slm_lab.spec.models.memory import PrioritizedReplaySpec, ReplaySpec
from tests.agent.helpers import DISCRETE, RNN, ToyEnv, agent_of, info, reloaded
from tests.agent.test_dqn import q_spec
from tests.agent.test_replay import StackEnv
from tests.agent.test_replay import images as frames

KINDS: dict[str, tuple[Any, Any, Any]] = {
    "uniform": (Replay, SequenceReplay, ReplaySpec(name="Replay", batch_size=64, max_size=60)),
    "prioritized": (
        PrioritizedReplay,
        PrioritizedSequenceReplay,
        PrioritizedReplaySpec(name="PrioritizedReplay", batch_size=64, max_size=60),
    ),
}


def feed(memory: Any, env: Any, steps: int) -> list[list[tuple[bytes, float, bytes, bool, bool]]]:
    """Step the env and feed the memory; return (obs, reward, next_obs, terminated, done) of each transition of each env."""
    n, rng = env.info.num_envs, np.random.default_rng(7)
    history: list[list[Any]] = [[] for _ in range(n)]
    obs_N, first_N = env.reset(), np.ones(n, bool)
    state_N = np.zeros((n, getattr(memory, "state_size", 0)), np.float32)
    for _ in range(steps):
        action_N = rng.integers(0, 3, n)
        step = env.step(action_N)
        memory.add(obs_N, first_N, state_N, ActOut(action_N, np.zeros(n, np.float32)), step)
        for i in np.flatnonzero(step.valid_N):
            ends = bool(step.terminated_N[i]), bool(step.terminated_N[i] or step.truncated_N[i])
            history[i].append((obs_N[i].tobytes(), float(step.reward_N[i]), step.last_obs_N[i].tobytes(), *ends))
        obs_N, first_N = step.obs_N, step.first_N
    return history


def test_both_ends_by_hand() -> None:
    """γ = ½, n = 3, an episode with rewards 1, 2, 4, 8: the last target is 8 after a termination and 8 + ½ V after a truncation."""
    for ends, last in ((1.0, 8.0), (0.0, 8.0 + 0.5 * 10.0)):
        reward_KB = torch.tensor([[1.0, 2.0, 4.0, 8.0], [2.0, 4.0, 8.0, 0.0], [4.0, 8.0, 0.0, 0.0]])
        steps_B, terminated_B = torch.tensor([3.0, 3.0, 2.0, 1.0]), torch.tensor([0.0, ends, ends, ends])
        return_B, discount_B = n_step_return(reward_KB, steps_B, 0.5)
        targets = one_step_target(return_B, torch.full((4,), 10.0), terminated_B, discount_B)
        bootstrap = (1.0 - ends) * 10.0
        expected = [1 + 1 + 1 + 0.125 * 10, 2 + 2 + 2 + 0.125 * bootstrap, 4 + 4 + 0.25 * bootstrap, last]
        assert targets.tolist() == pytest.approx(expected)
        arrays = n_step_return(reward_KB.numpy(), steps_B.numpy(), 0.5)
        assert one_step_target(arrays[0], np.full(4, 10.0), terminated_B.numpy(), arrays[1]).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_each_transition_has_the_rewards_that_followed(kind: str, next_step: bool, images: bool) -> None:
    """A sampled transition has the rewards of the next n steps of its env, or fewer if the episode ends earlier.

    The data have three envs, both kinds of episode ends, dummy rows, an overwritten ring, and frames that are stored once.
    """
    env: Any = StackEnv(frames(3), 2, next_step) if images else ToyEnv(info(3), 1, next_step)
    n, (plain, _, spec) = 3, KINDS[kind]
    memory = plain(spec, env.info, Clock(), np.random.default_rng(0), num_steps=n)
    history = feed(memory, env, 70)
    where = {row[0]: (rows, index) for rows in history for index, row in enumerate(rows)}
    lengths = set()
    for _ in range(3):
        batch = memory.sample()
        for b in range(64):
            rows, index = where[batch.obs_B[b].numpy().tobytes()]
            taken = [rows[index]]
            while len(taken) < n and not taken[-1][4] and index + len(taken) < len(rows):
                taken.append(rows[index + len(taken)])
            assert batch.reward_KB[:, b].tolist() == pytest.approx([row[1] for row in taken] + [0.0] * (n - len(taken)))
            assert int(batch.steps_B[b]) == len(taken)
            assert batch.next_obs_B[b].numpy().tobytes() == taken[-1][2]
            assert bool(batch.terminated_B[b]) == taken[-1][3]
            assert float(batch.reward_B[b]) == pytest.approx(rows[index][1])
            lengths.add((len(taken), taken[-1][3:]))
    assert {(3, (False, False)), (1, (True, True)), (1, (False, True)), (2, (True, True))} <= lengths


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_end_returns_at_their_segments(kind: str) -> None:
    _, sequences, spec = KINDS[kind]
    memory = sequences(spec.model_copy(update={"batch_size": 8, "burn_in": 1, "beta": 0.4, "initial_error": "greatest"})
                       if kind == "prioritized" else spec.model_copy(update={"batch_size": 8, "burn_in": 1}),
                       info(3), Clock(), np.random.default_rng(0), state_size=2, seq_len=6, num_steps=3)  # fmt: skip
    history = feed(memory, ToyEnv(info(3), 1), 60)
    where = {row[0]: (rows, index) for rows in history for index, row in enumerate(rows)}
    batch, M = memory.sample(), 8
    obs = batch.obs_PC.flatten(0, 1)
    after = batch.next_outputs(obs)
    for b in range(6 * M):
        rows, index = where[batch.current_outputs(obs)[b].numpy().tobytes()]
        taken = [rows[index]]
        while len(taken) < min(3, 6 - b // M) and not taken[-1][4]:
            taken.append(rows[index + len(taken)])
        assert batch.reward_KB[:, b].tolist() == pytest.approx([row[1] for row in taken] + [0.0] * (3 - len(taken)))
        assert int(batch.steps_B[b]) == len(taken)
        assert after[b].numpy().tobytes() == taken[-1][2]
        assert bool(batch.terminated_B[b]) == taken[-1][3]


def test_contents_hold_the_links() -> None:
    memories = [Replay(KINDS["uniform"][2], info(3), Clock(), np.random.default_rng(0), num_steps=4) for _ in range(2)]
    env = ToyEnv(info(3), 1)
    feed(memories[0], env, 35)
    memories[1].load_contents(reloaded(memories[0].contents()))
    after = ToyEnv(info(3), 5)
    for memory in memories:
        memory.rng = np.random.default_rng(3)
        after.__init__(info(3), 5)  # type: ignore[misc]  # the same steps again
        feed(memory, after, 9)
    ours, theirs = (memory.sample() for memory in memories)
    for name in ("obs_B", "reward_KB", "steps_B", "next_obs_B", "terminated_B"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert float(ours.steps_B.max()) == 4.0
    other = StepLinks(60, 2)
    other.load_state_dict(memories[0].contents()["links"])
    assert other.last_row_N.tolist() == [-1, -1]  # the saved links have another number of envs
    assert other.next_row.tolist() == memories[0].links.next_row.tolist()  # type: ignore[union-attr]


def chain_step(obs: np.ndarray, reward: float, after: np.ndarray, terminated: bool, truncated: bool) -> VecStep:
    ended = np.array([terminated or truncated])
    row = (np.array([reward], np.float32), np.array([terminated]), np.array([truncated]))
    return VecStep(*row, after[None], after[None], ended, np.array([True]), [])


@pytest.mark.parametrize("name", ["VanillaDQN", "DQN", "DoubleDQN"])
def test_values_of_a_chain(name: str) -> None:
    """a → b → c → end with rewards 1, 2, 3 and γ = ½: values equal the returns, because targets of 3 steps need no bootstrapping."""
    net = {"name": "MLPNet", "hid_layers": [], "optim_spec": {"name": "Adam", "lr": 0.05}, "update_frequency": 10_000}
    agent = agent_of(q_spec(name, net=net, gamma=0.5, num_step_returns=3), info(1, DISCRETE, (3,)))
    a, b, c = np.eye(3, dtype=np.float32)
    for _ in range(15):
        for index, (obs, reward, after) in enumerate([(a, 1.0, b), (b, 2.0, c), (c, 3.0, c)]):
            step = chain_step(obs, reward, after, index == 2, False)
            agent.observe(obs[None], np.array([index == 0]), None, ActOut(np.array([0]), np.zeros(1, np.float32)), step)
    for _ in range(300):
        agent.update()
    with torch.no_grad():
        q = agent.algorithm.net.critic(torch.eye(3))[:, 0]
    assert q.tolist() == pytest.approx([1 + 1 + 0.75, 2 + 1.5, 3.0], abs=0.02)


@pytest.mark.parametrize("net", [None, RNN])
def test_one_step_is_the_default_to_the_byte(net: dict[str, Any] | None) -> None:
    assert q_spec("DQN").agent.algorithm.num_step_returns == 1  # type: ignore[union-attr]
    agent = agent_of(q_spec("DQN", net=net), info())
    assert agent.algorithm.memory.links is None  # type: ignore[union-attr]
