"""Tests of self-imitation learning: returns, loss, memory, and learning from rare successes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.algorithm.sil_replay import SILReplay
from slm_lab.agent.ops.losses import self_imitation_policy_loss, self_imitation_value_loss
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActionSpace, ActOut, EnvInfo, Episode, ObservationSpace, VecStep
from slm_lab.spec.models.memory import PrioritizedReplaySpec, ReplaySpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, ToyEnv, agent_of, drive, info, spec

UNIFORM, PRIORITIZED = ReplaySpec(name="Replay", batch_size=16), PrioritizedReplaySpec(name="PrioritizedReplay", batch_size=16)
NO_COEFS = {"sil_policy_loss_coef": 0.0, "sil_val_loss_coef": 0.0}
A2C = {"name": "SIL", "lam": 0.9, "training_frequency": 10}
PPO = {"name": "PPOSIL", "time_horizon": 10, "minibatch_size": 15, "training_epoch": 2}
CASES = [(A2C, "OnPolicyBatchReplay"), (A2C, "OnPolicyReplay"), (A2C, "OnPolicyCrossEntropy"), (PPO, "OnPolicyBatchReplay")]


def sil_spec(algorithm: dict[str, Any], memory: str = "OnPolicyBatchReplay", net: dict[str, Any] | None = None, **keys: Any) -> Spec:
    """Return a toy spec whose replay memory draws batches of 8."""
    toy = spec(algorithm, net, memory)
    return Spec.model_validate(toy.model_dump() | {"agent": toy.agent.model_dump() | {"memory": {"name": memory, "batch_size": 8, **keys}}})


def first_value(obs_K: torch.Tensor, state_KS: torch.Tensor | None = None) -> torch.Tensor:
    """Critic for tests: return the first component of each observation."""
    return obs_K.flatten(1)[:, 0].float()


Row = tuple[np.ndarray, np.ndarray, float]
"""(observation, action, return)."""


class Twin:
    """Returns by brute force: lists the steps of each env and sums the rewards backwards at the end of each episode."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.under_way: list[list[tuple[np.ndarray, np.ndarray, float]]] = [[] for _ in range(num_envs)]
        self.rows: list[Row] = []

    def add(self, obs_N: np.ndarray, action_N: np.ndarray, step: VecStep) -> None:
        for n in np.flatnonzero(step.valid_N):
            self.under_way[n].append((obs_N[n], action_N[n], float(step.reward_N[n])))
            if step.terminated_N[n] or step.truncated_N[n]:
                ret = 0.0 if step.terminated_N[n] else float(step.last_obs_N[n].reshape(-1)[0])
                for obs, action, reward in reversed(self.under_way[n]):
                    ret = reward + self.gamma * ret
                    self.rows.append((obs, action, ret))
                self.under_way[n] = []


def key(row: Row) -> tuple[float, ...]:
    obs, action, ret = row
    return (*np.asarray(obs, np.float64).reshape(-1), *np.asarray(action, np.float64).reshape(-1), round(ret, 2))


def fill(memory: SILReplay, env: ToyEnv, steps: int, every: int = 7) -> list[Row]:
    """Step the env and add finished episodes to the memory every `every` steps; return the rows that the memory should hold."""
    twin, rng = Twin(env.info.num_envs, memory.gamma), np.random.default_rng(3)
    obs, first, space = env.reset(), np.ones(env.info.num_envs, bool), env.info.action
    for t in range(steps):
        shape = (env.info.num_envs, *(() if space.kind == "discrete" else (space.dim,)))
        action = rng.integers(0, 3, shape) if space.kind == "discrete" else rng.normal(size=shape).astype(np.float32)
        step = env.step(action)
        memory.add(obs, first, None, ActOut(action, np.zeros(env.info.num_envs, np.float32)), step)
        twin.add(obs, action, step)
        obs, first = step.obs_N, step.first_N
        if t % every == every - 1:
            memory.add_finished_episodes()
    memory.add_finished_episodes()
    return twin.rows


def held(memory: SILReplay) -> list[Row]:
    """Return all rows that can be drawn."""
    ring = memory.ring
    rows = (ring.seen - 1 - np.arange(ring.size)) % ring.capacity
    obs = ring.store.observations(rows)
    return list(zip(obs, ring.columns["action"][rows], map(float, memory.bootstrapped_returns(rows)), strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replay", [UNIFORM, PRIORITIZED])
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize(
    ("action", "shape", "dtype"), [(DISCRETE, (4,), "float32"), (CONTINUOUS, (2, 3), "float32"), (DISCRETE, (1, 3, 3), "uint8")]
)
def test_returns_of_finished_episodes(
    replay: ReplaySpec | PrioritizedReplaySpec, next_step: bool, action: ActionSpace, shape: tuple[int, ...], dtype: str
) -> None:
    """The rows that can be drawn are those of the brute force; there are none of unfinished episodes.

    The data have several envs, dummy rows and both kinds of episode ends.
    """
    env_info = EnvInfo(3, info(3, action, shape, dtype).observation, action, max_frame=2_000)
    memory = SILReplay(replay, env_info, Clock(), np.random.default_rng(0), 0.9, first_value)
    expected = fill(memory, ToyEnv(env_info, 1, next_step), 200)
    assert len(expected) > 300
    assert sorted(map(key, held(memory))) == sorted(map(key, expected))


def test_the_newest_stay() -> None:
    env_info = info(3)
    small = ReplaySpec(name="Replay", batch_size=16, max_size=25)
    memory = SILReplay(small, env_info, Clock(), np.random.default_rng(0), 0.9, first_value)
    expected = fill(memory, ToyEnv(env_info, 1), 200, every=1)
    assert len(held(memory)) == 25
    assert set(map(key, held(memory))) <= set(map(key, expected[-60:]))


def test_an_episode_longer_than_the_memory() -> None:
    memory = SILReplay(ReplaySpec(name="Replay", batch_size=4, max_size=8), info(1), Clock(), np.random.default_rng(0), 1.0, first_value)
    for t in range(30):
        end = np.array([t == 29])
        no, obs = np.array([False]), np.full((1, 4), float(t), np.float32)
        step = VecStep(np.ones(1, np.float32), end, no, obs + 1, obs + 1, end, ~no, [])
        memory.add(obs, np.array([t == 0]), None, ActOut(np.zeros(1, np.int64), np.zeros(1, np.float32)), step)
        memory.add_finished_episodes()
        assert memory.ready == (t == 29)
    assert sorted((float(obs[0]), ret) for obs, _, ret in held(memory)) == [(float(t), 30.0 - t) for t in range(22, 30)]


def test_truncated_returns_follow_v() -> None:
    """Returns of truncated episodes are bootstrapped with the current V when drawn, returns of terminated episodes never change.

    Last observations are deleted together with their episodes.
    """
    scale = 1.0
    small = PrioritizedReplaySpec(name="PrioritizedReplay", batch_size=32, max_size=40)
    memory = SILReplay(small, info(3), Clock(), np.random.default_rng(0), 0.9, lambda obs_K, state_KS: scale * first_value(obs_K))
    fill(memory, ToyEnv(info(3), 1), 200)
    rows = np.arange(40)
    once = memory.bootstrapped_returns(rows)
    scale = 2.0
    twice = memory.bootstrapped_returns(rows)
    truncated = memory.ring.columns["bootstrap"] > 0
    assert 5 < truncated.sum() < 35
    assert np.array_equal(once != twice, truncated)
    assert set(memory.last_obs) == set(memory.ring.columns["episode"][truncated].tolist())
    batch = memory.sample()
    assert np.array_equal(batch.reward_B.numpy(), twice[batch.row_B])


def test_images_keep_their_stack() -> None:
    """Each frame of stacked images is stored once, and drawn stacks are complete and unchanged."""
    space = ObservationSpace((4, 3, 3), "uint8", stack=4)
    env_info = EnvInfo(2, space, DISCRETE, max_frame=1_000)
    memory = SILReplay(UNIFORM, env_info, Clock(), np.random.default_rng(0), 0.9, lambda obs_K: torch.zeros(len(obs_K)))
    rng = np.random.default_rng(0)
    twin: list[bytes] = []
    under_way: list[list[bytes]] = [[], []]
    obs = np.repeat(rng.integers(0, 256, (2, 1, 3, 3)), 4, axis=1).astype(np.uint8)
    first = np.ones(2, bool)
    for _ in range(60):
        last = np.concatenate([obs[:, 1:], rng.integers(0, 256, (2, 1, 3, 3)).astype(np.uint8)], axis=1)
        end = rng.random(2) < 0.15
        fresh = np.repeat(rng.integers(0, 256, (2, 1, 3, 3)), 4, axis=1).astype(np.uint8)
        after = np.where(end[:, None, None, None], fresh, last)
        step = VecStep(np.zeros(2, np.float32), end, np.zeros(2, bool), last, after, end, np.ones(2, bool), [])
        memory.add(obs, first, None, ActOut(np.zeros(2, np.int64), np.zeros(2, np.float32)), step)
        for n in range(2):
            under_way[n].append(obs[n].tobytes())
            if end[n]:
                twin += under_way[n]
                under_way[n] = []
        obs, first = after, end
    memory.add_finished_episodes()
    assert len(twin) > 50
    assert sorted(obs.tobytes() for obs, _, _ in held(memory)) == sorted(twin)


def test_loss_by_hand() -> None:
    logp, value = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.0, 5.0, 0.0])
    returns, weight = torch.tensor([3.0, 4.0, 0.5]), torch.tensor([1.0, 1.0, 0.5])
    # (R − V)₊ = 2, 0, ½
    assert float(self_imitation_policy_loss(logp, returns, value, weight)) == pytest.approx((1.0 * 2.0 + 0.0 + 0.5 * 0.5 * 0.5) / 3)
    assert float(self_imitation_value_loss(value, returns, weight)) == pytest.approx((0.5 * 4.0 + 0.0 + 0.5 * 0.5 * 0.25) / 3)
    with pytest.raises(ValueError, match="the same shape"):
        self_imitation_policy_loss(logp, returns, value.unsqueeze(1), weight)


def test_gradients_of_the_loss() -> None:
    """Returns at or below V have no gradient, the policy loss has none for V, and V is raised towards returns above it."""
    logp, value = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True), torch.tensor([1.0, 5.0, 0.0], requires_grad=True)
    returns, weight = torch.tensor([3.0, 4.0, 0.0]), torch.ones(3)
    self_imitation_policy_loss(logp, returns, value, weight).backward()
    assert value.grad is None
    assert logp.grad.tolist() == pytest.approx([-2.0 / 3, 0.0, 0.0])
    self_imitation_value_loss(value, returns, weight).backward()
    assert value.grad.tolist() == pytest.approx([-2.0 / 3, 0.0, 0.0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keys", [{}, {"sil_replay_name": "Replay"}, {"sil_replay_name": "SILReplay", "use_cer": True}])
@pytest.mark.parametrize("scale", [{}, {"symlog": True}, {"normalize_v_targets": True}])
def test_one_step_by_hand(keys: dict[str, Any], scale: dict[str, bool]) -> None:
    """Loss, weights and priorities of a step equal those computed by hand. V is compared with R, whatever the value loss compares."""
    algorithm = {**PPO, **scale, "sil_policy_loss_coef": 0.7, "sil_val_loss_coef": 0.3}
    agent = agent_of(sil_spec(algorithm, **keys), info(3))
    drive(agent, ToyEnv(info(3), 1), 30)
    sil: Any = agent.algorithm
    sil.replay.ring.replayed = sil.replay.ring.seen - 3
    batch = sil.replay.sample()
    if keys.get("use_cer"):
        assert batch.row_B[-3:].tolist() == list(range(sil.replay.ring.seen - 3, sil.replay.ring.seen))
    with torch.no_grad():
        params, output = sil.net(batch.obs_B)
        logp = torch.log_softmax(params, 1)[torch.arange(8), batch.action_B]
        value, target = output, batch.reward_B
        better = (batch.reward_B - value) * (batch.reward_B > value)
        weight = torch.ones(8) if batch.weight_B is None else batch.weight_B
        short = (target - output) * (target > output)
        loss = 0.7 * -(weight * logp * better).mean() + 0.3 * 0.5 * (weight * short**2).mean()
    sil.meter.begin()
    assert torch.allclose(sil._imitation_step(batch), better, atol=1e-6)
    metrics = sil.meter.end()
    assert metrics.loss == pytest.approx(float(loss), rel=1e-4)
    assert metrics.extra["sil_share"] == pytest.approx(float((better > 0).float().mean()))
    sil.replay.update_priorities(batch.row_B, better)
    if not keys:
        assert np.allclose(sil.replay.ring.tree.get(batch.row_B), (better.double().numpy() + 1e-4) ** 0.6, rtol=1e-4)


def test_training_sets_priorities() -> None:
    agent = agent_of(sil_spec({**PPO, "training_iter": 3, "training_batch_iter": 2}), info(3))
    metrics = drive(agent, ToyEnv(info(3), 1), 40)
    sil: Any = agent.algorithm
    ring = sil.replay.ring
    assert len(set(ring.tree.get(np.arange(ring.size)).round(6))) > 5
    imitated = [m for m in metrics if "sil_loss" in m.extra]
    assert imitated
    # three batches with two steps each, in addition to PPO's four minibatches
    assert agent.clock.opt_step == 4 * len(metrics) + 6 * len(imitated)


@pytest.mark.parametrize(("algorithm", "memory"), CASES)
def test_without_coefficients_it_is_the_on_policy_algorithm(algorithm: dict[str, Any], memory: str) -> None:
    """Without coefficients the weights are equal in each step, so imitation draws nothing from the algorithm's random streams."""
    plain = {**algorithm, "name": {"SIL": "ActorCritic", "PPOSIL": "PPO"}[algorithm["name"]]}
    with_sil, without = agent_of(sil_spec({**algorithm, **NO_COEFS}, memory), info(3)), agent_of(spec(plain, memory=memory), info(3))
    ours, theirs = (drive(agent, ToyEnv(info(3), 4, next_step=True), 60) for agent in (with_sil, without))
    assert len(ours) == len(theirs) >= 3
    assert [m.loss for m in ours] == [m.loss for m in theirs]
    for a, b in zip(with_sil.weights().values(), without.weights().values(), strict=True):
        assert torch.equal(a, b)
    changed = agent_of(sil_spec(algorithm, memory), info(3))
    drive(changed, ToyEnv(info(3), 4, next_step=True), 60)
    assert any(not torch.equal(a, b) for a, b in zip(changed.weights().values(), without.weights().values(), strict=True))


HYDRA = {"name": "HydraMLPNet", "hid_layers": [[[4], [5]], [6], [[3], [3]]], "shared": True}
SEPARATE = {**MLP, "use_same_optim": False, "critic_optim_spec": {"name": "RMSprop", "lr": 0.1}}
ARC = {"name": "TorchArcNet", "arc": {"modules": {"body": {"Sequential": [{"LazyLinear": [8]}, "Tanh"]}}}}
NETS: list[dict[str, Any]] = [MLP, HYDRA, SEPARATE, ARC, {**MLP, "batch_norm": True}]
ACTIONS = [DISCRETE, CONTINUOUS, ActionSpace("multi_discrete", (2, 3), 2), ActionSpace("multi_binary", (), 2)]
PAIRS = [*product(NETS, ACTIONS[:2]), *((MLP, action) for action in ACTIONS[2:])]
TOGETHER = [(*case, *PAIRS[(i + j) % len(PAIRS)]) for j, case in enumerate(CASES) for i in range(0, len(PAIRS), 2)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("algorithm", "memory", "net", "action"), TOGETHER)
def test_everything_trains_together(algorithm: dict[str, Any], memory: str, net: dict[str, Any], action: ActionSpace) -> None:
    agent = agent_of(sil_spec(algorithm, memory, net), info(3, action))
    before = agent.weights()
    metrics = drive(agent, ToyEnv(info(3, action), 2, next_step=True), 45)
    assert all(np.isfinite([m.loss, m.grad_norm, m.entropy, *m.extra.values()]).all() for m in metrics)
    assert {"sil_loss", "sil_policy_loss", "sil_val_loss", "sil_share", *agent.diagnostics} == set(metrics[-1].extra)
    assert all(not torch.equal(before[name], value) for name, value in agent.weights().items() if "running" not in name)
    assert agent.lr is not None
    assert agent.entropy_coef == 0.0


def test_images() -> None:
    conv = {"name": "ConvNet", "conv_hid_layers": [[4, 3, 2]], "fc_hid_layers": [8], "shared": True}
    env_info = info(3, DISCRETE, (2, 8, 8), "uint8")
    toy = sil_spec(PPO, net=conv, max_size=200)
    assert all(np.isfinite(m.loss) for m in drive(agent_of(toy, env_info), ToyEnv(env_info, 1), 40))
    with pytest.raises(SpecError, match=r"agent.memory.max_size: .* transitions take"):
        agent_of(sil_spec(PPO, net=conv, max_size=10**12), env_info)


class Corridor:
    """Four envs with a walk over LENGTH positions: right moves on, left returns to the start.

    Only the last position has a reward, and random actions rarely reach it.
    """

    LENGTH, LIMIT, N = 7, 20, 4

    def __init__(self) -> None:
        self.info = EnvInfo(self.N, info(self.N, shape=(self.LENGTH,)).observation, ActionSpace("discrete", (2,), 1))
        self.place, self.t = np.zeros(self.N, int), np.zeros(self.N, int)
        self.wins = 0

    def reset(self) -> np.ndarray:
        return np.eye(self.LENGTH, dtype=np.float32)[self.place]

    def step(self, action_N: np.ndarray) -> VecStep:
        self.place = np.where(action_N == 1, self.place + 1, 0)
        self.t += 1
        won = self.place == self.LENGTH - 1
        late = (self.t >= self.LIMIT) & ~won
        self.wins += int(won.sum())
        last, over = self.reset(), won | late
        episodes = [Episode(int(n), float(won[n]), int(self.t[n])) for n in np.flatnonzero(over)]
        self.place[over], self.t[over] = 0, 0
        return VecStep(won.astype(np.float32), won, late, last, self.reset(), over, np.ones(self.N, bool), episodes)


def wins(coefs: dict[str, float], seed: int) -> int:
    """Return the number of successes while A2C learns for 1600 frames."""
    env = Corridor()
    drive(agent_of(sil_spec({**A2C, **coefs}), env.info, seed), env, 400)  # type: ignore[arg-type]  # it has what a ToyEnv has
    return env.wins


@pytest.mark.slow
def test_rare_success_is_imitated() -> None:
    """The paper's claim: with sparse rewards, imitation of the few good episodes keeps what fresh experience alone forgets."""
    imitating, alone = ([wins(coefs, seed) for seed in range(3)] for coefs in ({}, NO_COEFS))
    assert all(a > b for a, b in zip(imitating, alone, strict=True))
    assert sum(imitating) > 2 * sum(alone)
