"""Tests of sequence replays and recurrent Q-learning against lists of all transitions and nets that run step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.dqn import QLearning
from slm_lab.agent.net.q_nets import QNet
from slm_lab.agent.ops.targets import action_value, action_value_gradient
from slm_lab.agent.replay.sequences import PrioritizedSequenceReplay, SequenceBatch, SequenceReplay
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, EnvInfo, ObservationSpace, VecStep
from slm_lab.spec.models.memory import PrioritizedReplaySpec, ReplaySpec
from slm_lab.spec.models.meta import SamplerSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Report, SpecError
from slm_lab.spec.rules.check import check_rules, check_updates
from tests.agent.helpers import DISCRETE, MLP, RNN, ToyEnv, agent_of, info, spec
from tests.agent.test_replay import StackEnv

EXPLORE = {"action_policy": "epsilon_greedy", "explore_var_spec": {"name": "no_decay", "start_val": 0.2}}
S = 3


class Step(NamedTuple):
    """One transition of one env."""

    obs: np.ndarray
    first: bool
    state: np.ndarray
    action: int
    reward: float
    next_obs: np.ndarray
    terminated: bool


History = list[list[Step]]
"""Transitions of each env."""


def build(env_info: EnvInfo, prioritized: bool = False, seq_len: int = 4, **keys: Any) -> SequenceReplay:
    keys = {"batch_size": 6, "max_size": 60} | keys
    arguments = (env_info, Clock(), np.random.default_rng(0))
    if prioritized:  # as the loader sets them for a recurrent net
        keys = {"beta": 0.4, "initial_error": "greatest"} | keys
        return PrioritizedSequenceReplay(PrioritizedReplaySpec(name="PrioritizedReplay", **keys), *arguments, state_size=S, seq_len=seq_len)
    return SequenceReplay(ReplaySpec(name="Replay", **keys), *arguments, state_size=S, seq_len=seq_len)


def feed(memory: SequenceReplay, env: Any, steps: int, check: Callable[[History], None] = lambda history: None) -> History:
    """Step the env and feed the memory; return the history. After each step, `check` is called with the history."""
    n, rng = env.info.num_envs, np.random.default_rng(7)
    history: History = [[] for _ in range(n)]
    obs_N, first_N = env.reset(), np.ones(n, bool)
    for _ in range(steps):
        action_N = rng.integers(0, 3, n)
        state_N = np.where(first_N[:, None], 0.0, rng.normal(size=(n, memory.state_size))).astype(np.float32)
        step = env.step(action_N)
        memory.add(obs_N, first_N, state_N, ActOut(action_N, np.zeros(n, np.float32)), step)
        for i in np.flatnonzero(step.valid_N):
            row = (obs_N[i].copy(), bool(first_N[i]), state_N[i], int(action_N[i]), float(step.reward_N[i]), step.last_obs_N[i].copy())
            history[i].append(Step(*row, bool(step.terminated_N[i])))
        check(history)
        obs_N, first_N = step.obs_N, step.first_N
    return history


def there(memory: SequenceReplay, history: History) -> list[tuple[int, int]]:
    """Return (env, start) of the sequences that can be drawn, by brute force: complete ones without an overwritten transition."""
    steps = memory.capacity // memory.num_envs
    starts = [(n, k) for n, rows in enumerate(history) for k in range(0, len(rows), memory.stride)]
    return [(n, k) for n, k in starts if k >= len(history[n]) - steps and k + memory.window <= len(history[n])]


def place(memory: SequenceReplay, n: int, start: int) -> int:
    return int(memory._sequence_indices(np.array([start]), np.array([n]))[0])


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize(("seq_len", "burn_in"), [(4, None), (5, 0), (1, 3), (3, 5)])
def test_sequences_are_what_happened(next_step: bool, seq_len: int, burn_in: int | None) -> None:
    """Each sequence equals the history, with both kinds of episode ends, dummy rows, and an overwritten ring."""
    memory = build(info(3), seq_len=seq_len, burn_in=burn_in)
    assert memory.burn_in == (seq_len // 2 if burn_in is None else burn_in)
    assert memory.stride == max(1, seq_len // 2)
    history = feed(memory, ToyEnv(info(3), 1, next_step), 90)
    found = there(memory, history)
    assert len(found) > 8
    assert memory.size == len(found)
    batch = memory.batch(np.array([place(memory, n, k) for n, k in found]))
    L, M, C = seq_len, len(found), len(batch.sequence_C)
    obs = batch.obs_PC.flatten(0, 1)
    for m, (n, k) in enumerate(found):
        early, rows = history[n][k : k + memory.burn_in], history[n][k + memory.burn_in : k + memory.window]
        assert np.array_equal(batch.state_MS[m], history[n][k].state)
        assert [bool(x) for x in batch.burn_in_first_TM[:, m]] == [step.first for step in early]
        assert all(np.array_equal(batch.burn_in_obs_TM[t, m], step.obs) for t, step in enumerate(early))
        for t, step in enumerate(rows):
            b = t * M + m
            at = int(batch.flat_index_B[b])
            assert np.array_equal(obs[at], step.obs)
            assert np.array_equal(obs[at + C], step.next_obs)
            assert (int(batch.action_B[b]), bool(batch.terminated_B[b])) == (step.action, step.terminated)
            assert float(batch.reward_B[b]) == pytest.approx(step.reward)
            assert int(batch.sequence_C[at % C]) == m
            begin = next(j for j in range(t, -1, -1) if j == 0 or rows[j].first)
            assert at // C == t - begin
            assert bool(batch.starts_episode_C[at % C]) == rows[begin].first
    assert len(batch.action_B) == L * M


def by_hand(net: QNet, memory: SequenceReplay, history: History, n: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q [L, A] of the observations of a sequence and of their true next ones, one step at a time from the stored state."""

    def one(obs: np.ndarray, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, _, after = net.unroll(torch.from_numpy(obs)[None, None], torch.zeros(1, 1, dtype=torch.bool), state)
        return q[0, 0], after

    rows = history[n][start : start + memory.window]
    state, now, after = torch.from_numpy(rows[0].state)[None], [], []
    for step in rows:
        if step.first:
            state = torch.zeros(1, memory.state_size)
        q, state = one(step.obs, state)
        now.append(q)
        after.append(one(step.next_obs, state)[0])
    return torch.stack(now[memory.burn_in :]), torch.stack(after[memory.burn_in :])


def q_spec(name: str, memory: str = "Replay", net: dict[str, Any] | None = None, num_envs: int = 3, **keys: Any) -> Spec:
    toy = spec({"name": name, **EXPLORE, "gamma": 0.9}, net or RNN, memory, num_envs).model_dump(exclude_none=True)
    toy["agent"]["memory"] = {"name": memory, "batch_size": 6, "max_size": 90} | keys
    return Spec.model_validate(toy)


def q_agent(name: str, env_info: EnvInfo | None = None, **options: Any) -> tuple[Agent, QLearning, Any]:
    env_info = env_info or info()
    agent = agent_of(q_spec(name, num_envs=env_info.num_envs, **options), env_info)
    assert isinstance(agent.algorithm, QLearning)
    assert isinstance(agent.algorithm.memory, SequenceReplay)
    return agent, agent.algorithm, agent.algorithm.memory


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["VanillaDQN", "DQN", "DoubleDQN"])
@pytest.mark.parametrize("cell", ["RNN", "LSTM", "GRU"])
def test_values_and_targets_by_hand(name: str, cell: str) -> None:
    """Values and targets of each rule equal those computed by hand at terminations, truncations and ends of sequences.

    The target net differs from the net.
    """
    _, algorithm, memory = q_agent(name, net={**RNN, "cell_type": cell, "rnn_num_layers": 2}, burn_in=3)
    history = feed(memory, ToyEnv(info(), 5), 40)
    other = algorithm.net
    if algorithm.target is not None:
        algorithm.target.flat.param.add_(torch.randn(len(algorithm.target.flat.param), generator=torch.Generator().manual_seed(0)))
        other = algorithm.target.net
    found = there(memory, history)
    batch = memory.batch(np.array([place(memory, n, k) for n, k in found]))
    values, target_B = algorithm._sequence_pass_and_targets(batch)
    q_B = action_value(values.values[0], batch.action_B)
    cut = 0
    for m, (n, k) in enumerate(found):
        rows = history[n][k + 3 : k + memory.window]
        with torch.no_grad():
            now, after = by_hand(algorithm.net, memory, history, n, k)
            _, target_after = by_hand(other, memory, history, n, k)
        for t, step in enumerate(rows):
            value = {"VanillaDQN": after[t].max(), "DQN": target_after[t].max(), "DoubleDQN": target_after[t][after[t].argmax()]}[name]
            expected = step.reward + (0.0 if step.terminated else 0.9 * float(value))
            b = t * len(found) + m
            assert q_B[b].item() == pytest.approx(float(now[t][step.action]), abs=1e-5)
            assert target_B[b].item() == pytest.approx(expected, abs=1e-5)
            cut += not step.terminated and t + 1 < len(rows) and rows[t + 1].first
    assert cut > 3, "truncations inside sequences"
    assert not target_B.requires_grad
    values.backward(action_value_gradient(values.values[0], batch.action_B, torch.ones_like(q_B)))
    assert algorithm.trainer.flat.grad.any()


def test_an_episode_end_separates() -> None:
    """A sequence across the end of an episode equals two unrolls: nothing before the end affects anything after it."""
    results = []
    for scale in (1.0, 5.0):
        _, algorithm, memory = q_agent("DQN", info(1), burn_in=0)
        rng = np.random.default_rng(0)
        for t in range(4):
            obs, after = (rng.normal(size=(1, 4)).astype(np.float32) * (scale if t < 2 else 1.0) for _ in range(2))
            no, cut = np.zeros(1, bool), np.array([t == 1])
            step = VecStep(np.ones(1, np.float32), no, cut, after, after, cut, ~no, [])
            out = ActOut(np.zeros(1, np.int64), np.zeros(1, np.float32))
            memory.add(obs, np.array([t == 2]), np.full((1, 5), 0.3, np.float32), out, step)
        batch = memory.batch(np.array([0]))
        values, target_B = algorithm._sequence_pass_and_targets(batch)
        results.append((action_value(values.values[0], batch.action_B), target_B))
    (q, target), (other_q, other_target) = results
    assert not torch.allclose(q[:2], other_q[:2])
    assert not torch.allclose(target[:2], other_target[:2])
    assert torch.equal(q[2:], other_q[2:])
    assert torch.equal(target[2:], other_target[2:])


def test_burn_in_reaches_the_loss_through_the_state_only() -> None:
    """Burn-in transitions have no loss and no gradient: a sequence that starts from the state after the burn-in gives the same results."""
    _, algorithm, memory = q_agent("DoubleDQN", burn_in=4)
    history = feed(memory, ToyEnv(info(), 2), 30)
    found = there(memory, history)
    places = np.array([place(memory, n, k) for n, k in found])
    batch = memory.batch(places)

    def gradient(batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        algorithm.net.zero_grad()
        values, _ = algorithm._sequence_pass_and_targets(batch)
        q_B = action_value(values.values[0], batch.action_B)
        values.backward(action_value_gradient(values.values[0], batch.action_B, 2.0 * q_B))
        return q_B, torch.cat([p.grad.flatten() for p in algorithm.net.parameters() if p.grad is not None])

    with torch.no_grad():
        *_, state_MS = algorithm.net.unroll(batch.burn_in_obs_TM, batch.burn_in_first_TM, batch.state_MS)
    without = batch._replace(state_MS=state_MS, burn_in_obs_TM=batch.burn_in_obs_TM[:0], burn_in_first_TM=batch.burn_in_first_TM[:0])
    for one, other in zip(gradient(batch), gradient(without), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    noise = batch._replace(burn_in_obs_TM=batch.burn_in_obs_TM + 1.0)
    changed = (gradient(noise)[0] - gradient(batch)[0]).abs().view(4, -1) > 1e-7
    for m, (n, k) in enumerate(found):
        rows = history[n][k + 4 : k + memory.window]
        fresh = next((t for t, step in enumerate(rows) if step.first), 4)
        assert changed[:fresh, m].all()
        assert not changed[fresh:, m].any()


# ---- what is drawn


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("next_step", [False, True])
def test_what_can_be_drawn(prioritized: bool, next_step: bool) -> None:
    """After each step, exactly the complete sequences without overwritten transitions can be drawn.

    Training starts when there is a batch of them.
    """
    memory = build(info(3), prioritized, max_size=40, batch_size=5)
    ever = set()

    def check(history: History) -> None:
        found = there(memory, history)
        ever.update(found)
        assert memory.size == len(found)
        assert memory.ready == (len(ever) >= 5)
        if not found:
            return
        places = {place(memory, n, k) for n, k in found}
        drawn = np.concatenate([memory._draw_rows() for _ in range(40)])
        assert set(drawn.tolist()) <= places
        if prioritized:
            assert isinstance(memory, PrioritizedSequenceReplay)
            assert set(np.flatnonzero(memory.tree.get(np.arange(memory.max_items))).tolist()) == places

    feed(memory, ToyEnv(info(3), 1, next_step), 60, check)
    assert memory.seen > 2 * memory.capacity


def test_uniform_draws() -> None:
    memory = build(info(2), batch_size=6_000)
    history = feed(memory, ToyEnv(info(2), 1, next_step=True), 70)
    places = [place(memory, n, k) for n, k in there(memory, history)]
    share = np.bincount(memory._draw_rows(), minlength=memory.max_items) / 6_000
    assert share[places] == pytest.approx(1.0 / len(places), abs=0.015)
    assert share.sum() == pytest.approx(share[places].sum())


def test_priorities_by_hand() -> None:
    """The priority of a sequence uses η max + (1 − η) mean of its errors. Draws and importance weights are as in prioritised replay."""
    memory = build(info(1), True, seq_len=2, burn_in=1, batch_size=4_000, alpha=0.5, epsilon=0.25, eta=0.75, beta=0.5, max_size=20)
    assert isinstance(memory, PrioritizedSequenceReplay)
    feed(memory, ToyEnv(info(1), 1), 5)
    assert memory.tree.get(np.arange(4)).tolist() == [1.0, 1.0, 1.0, 0.0]
    error_LM = torch.tensor([[1.0, -4.0, float("nan")], [3.0, 0.0, 2.0]])
    memory.update_priorities(np.array([0, 1, 2]), error_LM.flatten())
    sizes = [0.75 * 3.0 + 0.25 * 2.0, 0.75 * 4.0 + 0.25 * 2.0, 0.75 * 2.0 + 0.25 * 1.0]
    expected = np.sqrt(np.array(sizes) + 0.25)
    assert memory.tree.get(np.arange(3)) == pytest.approx(expected)
    batch = memory.sample()
    assert np.bincount(batch.sampled_rows, minlength=3) / 4_000 == pytest.approx(expected / expected.sum(), abs=0.01)
    weight = (expected**-0.5 / (expected**-0.5).max())[batch.sampled_rows]
    assert batch.weight_B.numpy() == pytest.approx(np.concatenate([weight, weight]), rel=1e-5)
    feed(memory, ToyEnv(info(1), 1), 1)
    assert memory.tree.get(np.array([3]))[0] == pytest.approx(expected.max()), "a new one has the greatest so far"


def test_the_step_weighs_sequences_and_tells_errors() -> None:
    _, algorithm, memory = q_agent("DoubleDQN", memory="PrioritizedReplay")
    feed(memory, ToyEnv(info(), 2), 30)
    batch = memory.batch(np.array([0, 3, 4]), np.array([1.0, 0.5, 0.25], np.float32))
    with torch.no_grad():
        values, target_B = algorithm._sequence_pass_and_targets(batch)
    error_LM = (target_B - action_value(values.values[0], batch.action_B)).view(4, 3)
    algorithm.meter.begin()
    algorithm._step(batch)
    expected = (error_LM.square().mean(0) * torch.tensor([1.0, 0.5, 0.25])).mean()
    assert algorithm.meter.end().loss == pytest.approx(float(expected), rel=1e-5)
    size = (0.9 * error_LM.abs().amax(0) + 0.1 * error_LM.abs().mean(0)).numpy()
    assert memory.tree.get(np.array([0, 3, 4])) == pytest.approx((size + memory.epsilon) ** memory.alpha, rel=1e-4)


def test_what_begins_episodes_stays_on_the_host() -> None:
    memory = build(info(2))
    feed(memory, ToyEnv(info(2)), 30)
    batch = memory.sample().to("meta")
    assert (batch.burn_in_first_TM.device.type, batch.obs_PC.device.type) == ("cpu", "meta")


def test_combined_replay_takes_the_newest() -> None:
    memory = build(info(2), use_cer=True)
    history = feed(memory, ToyEnv(info(2), 1), 21)
    start = max(k for n, k in there(memory, history) if n == 0)
    assert {int(memory.sample().sampled_rows[-1]) for _ in range(20)} == {place(memory, 0, start)}


@pytest.mark.slow
def test_images_whose_frames_are_lost_are_not_drawn() -> None:
    """If episodes have more first frames than the store has room for, old sequences are dropped and the others are unchanged."""
    env_info = EnvInfo(2, ObservationSpace((4, 3, 4), "uint8", 4), DISCRETE)
    memory = build(env_info, True, max_size=300)
    env = StackEnv(env_info, 2, ends=0.15)
    lost = 0

    def check(history: History) -> None:
        nonlocal lost
        if len(history[0]) % 10:
            return
        found = there(memory, history)
        assert isinstance(memory, PrioritizedSequenceReplay)
        drawn = set(np.flatnonzero(memory.tree.get(np.arange(memory.max_items))).tolist())
        kept = [(n, k) for n, k in found if place(memory, n, k) in drawn]
        assert memory.size == len(kept) == len(drawn)
        lost += len(found) - len(kept)
        for n, k in kept:
            batch, rows = memory.batch(np.array([place(memory, n, k)])), history[n][k : k + memory.window]
            got = batch.obs_PC.flatten(0, 1)
            for b, step in enumerate(rows[memory.burn_in :]):
                assert np.array_equal(got[batch.flat_index_B[b]], step.obs)
                assert np.array_equal(got[batch.flat_index_B[b] + len(batch.sequence_C)], step.next_obs)

    feed(memory, env, 400, check)
    assert lost > 10


@pytest.mark.parametrize("prioritized", [False, True])
def test_contents_go_on(prioritized: bool) -> None:
    """Contents of a buffer that was never full can be loaded into a larger one, but not into one with other sequences."""
    memory = build(info(3), prioritized)
    history = feed(memory, ToyEnv(info(3), 1, next_step=True), 14)
    assert 0 < memory.seen < memory.capacity
    larger, other = build(info(3), prioritized, max_size=120), build(info(3), prioritized, seq_len=6)
    larger.load_contents(memory.contents())
    larger.load_state_dict(memory.state_dict())
    assert (larger.seen, larger.size, larger.ready) == (memory.seen, memory.size, memory.ready)
    one, two = memory.batch(memory._draw_rows()), larger.batch(larger._draw_rows())
    for name in SequenceBatch._fields:
        assert np.array_equal(getattr(one, name), getattr(two, name)) or getattr(one, name) is None, name
    assert len(there(memory, history)) == memory.size
    with pytest.raises(ValueError, match="incompatible replay buffer: expected sequences with stride 3"):
        other.load_contents(memory.contents())
    feed(memory, ToyEnv(info(3), 1), 40)
    with pytest.raises(ValueError, match="60 transitions; expected 120"):
        larger.load_contents(memory.contents())


# ---- specs


def problems(toy: Spec) -> dict[str, str]:
    report = Report()
    toy = toy.model_copy(update={"env": toy.env.model_copy(update={"name": "CartPole-v1"})})
    check_rules(toy, report)
    check_updates(toy, report)
    return {problem.path: problem.message for problem in report.problems}


def test_rules_name_the_key() -> None:
    assert not problems(q_spec("DQN"))
    assert "not recurrent" in problems(q_spec("DQN", net=MLP, burn_in=0))["agent.memory.burn_in"]
    sampling = q_spec("DQN").with_meta(sampler=SamplerSpec())
    assert "no hidden states" in problems(sampling)["agent.net.name"]
    short = q_spec("DQN", burn_in=330)
    assert "a batch of 6 sequences of burn_in + seq_len = 334 transitions" in problems(short)["agent.memory.batch_size"]
    soft = spec({"name": "CrossQ"}, RNN, "Replay")
    assert "learns from single transitions" in problems(soft)["agent.net.name"]


def test_a_buffer_that_holds_no_sequence() -> None:
    with pytest.raises(SpecError, match=r"max_size: 20 transitions are too few .* 2 \+ 5 transitions for each of 3 envs; at least 24"):
        build(info(3), seq_len=5, max_size=20)


@pytest.mark.slow
def test_it_learns_what_only_memory_tells() -> None:
    """The first of three observations shows which action of the last step is rewarded, so the GRU must remember it."""
    toy = q_spec("DoubleDQN", net={"name": "RecurrentNet", "rnn_hidden_size": 8, "seq_len": 6, "optim_spec": {"name": "Adam", "lr": 0.01}})
    algorithm = agent_of(toy, info(1, DISCRETE, (2,))).algorithm
    assert isinstance(algorithm, QLearning)
    rng, no = np.random.default_rng(0), np.zeros(1, bool)
    state = np.zeros((1, 8), np.float32)
    for _ in range(28):
        sign = float(rng.choice([-1, 1]))
        for t in range(3):
            obs = np.array([[sign if t == 0 else 0.0, float(t)]], np.float32)
            action = int(rng.integers(0, 2))
            reward = np.array([float(t == 2 and action == (sign > 0))], np.float32)
            following = np.array([[0.0, t + 1.0]], np.float32)
            step = VecStep(reward, ~no if t == 2 else no, no, following, following, ~no if t == 2 else no, ~no, [])
            algorithm.observe(obs, np.array([t == 0]), state, ActOut(np.array([action]), np.zeros(1, np.float32)), step)
    for _ in range(150):
        algorithm.update()
    for sign in (-1.0, 1.0):
        seen = torch.tensor([[[sign, 0.0]], [[0.0, 1.0]], [[0.0, 2.0]]])
        with torch.no_grad():
            q = algorithm.net.unroll(seen, torch.zeros(3, 1, dtype=torch.bool), torch.zeros(1, 8))[0][-1, 0]
        assert q[int(sign > 0)] == pytest.approx(1.0, abs=0.2)
        assert q[int(sign < 0)] == pytest.approx(0.0, abs=0.2)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_sequences_are_normalised_when_they_are_drawn(burn_in: int) -> None:
    """The burn-in and the last observation of a segment are normalised too; padding stays 0."""
    plain, normalising = (build(info(3), burn_in=burn_in) for _ in range(2))
    for memory in (plain, normalising):
        feed(memory, ToyEnv(info(3), 1), 60)
    normalising.set_normalizers(lambda obs: obs * np.float32(2.0) + np.float32(1.0), lambda reward: reward * np.float32(2.0))
    expected, found = plain.sample(), normalising.sample()
    assert torch.equal(found.burn_in_obs_TM, expected.burn_in_obs_TM * 2.0 + 1.0)
    assert torch.equal(found.obs_B, expected.obs_B * 2.0 + 1.0)
    assert torch.equal(found.next_obs_B, expected.next_obs_B * 2.0 + 1.0)
    assert torch.equal(found.reward_B, expected.reward_B * 2.0)
    assert torch.equal(found.state_MS, expected.state_MS)
