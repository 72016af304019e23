"""Tests of on-policy memories: rollouts contain exactly the recorded transitions."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from slm_lab.agent.rollout.rollout import OnPolicyBatchReplay, OnPolicyCrossEntropy, OnPolicyReplay, build_rollout_storage
from slm_lab.lib.records import ActOut, VecStep
from slm_lab.spec.models.memory import OnPolicyCrossEntropySpec, OnPolicyReplaySpec
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import CONTINUOUS, DISCRETE, ToyEnv, agent_of, drive, info, spec


def gather(memory: OnPolicyBatchReplay | OnPolicyReplay, env: ToyEnv, state_size: int = 0) -> list[tuple[np.ndarray, ActOut, VecStep]]:
    """Step the env until the memory is ready; return (observations, action output, env step) of all steps."""
    rng = np.random.default_rng(5)
    obs, first, happened = env.reset(), np.ones(env.info.num_envs, bool), []
    state = np.zeros((env.info.num_envs, state_size), np.float32) if state_size else None
    while not happened or not memory.ready:
        kind = env.info.action.kind
        shape = (env.info.num_envs,) if kind == "discrete" else (env.info.num_envs, env.info.action.dim)
        action = rng.integers(0, 3, shape) if kind == "discrete" else rng.normal(size=shape).astype(np.float32)
        after = None if state is None else state + 1.0
        out = ActOut(action, rng.normal(size=env.info.num_envs).astype(np.float32), after)
        step = env.step(action)
        memory.add(obs, first, state, out, step)
        happened.append((obs, out, step))
        obs, first = step.obs_N, step.first_N
        state = None if after is None else np.where(step.first_N[:, None], np.float32(0), after)
    return happened


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS])
def test_batch_replay(next_step: bool, action: object) -> None:
    env_info = info(3, action)  # type: ignore[arg-type]
    memory, env = OnPolicyBatchReplay(env_info, 20, 0), ToyEnv(env_info, 1, next_step)
    for _ in range(2):  # the second rollout overwrites the first
        happened = gather(memory, env)
        rollout = memory.rollout()
        assert len(happened) == 20
        cuts = set()
        for t, (obs, out, step) in enumerate(happened):
            assert np.array_equal(rollout.obs_TN[t], obs)
            assert np.array_equal(rollout.obs_TN[t + 1], step.obs_N)
            assert np.array_equal(rollout.action_TN[t], out.action_N)
            assert np.array_equal(rollout.logp_TN[t], out.logp_N)
            assert np.array_equal(rollout.reward_TN[t], step.reward_N)
            assert np.array_equal(rollout.done_TN[t], step.terminated_N | step.truncated_N)
            assert np.array_equal(rollout.valid_TN[t], step.valid_N)
            assert np.array_equal(rollout.first_TN[t + 1], step.first_N)
            cuts |= {(t, int(n)) for n in np.flatnonzero(step.truncated_N)}
        cut = rollout.truncations
        assert {(int(t), int(n)) for t, n in zip(cut.t_K, cut.n_K, strict=True)} == cuts
        for t, n, obs_K in zip(cut.t_K, cut.n_K, cut.obs_K, strict=True):
            assert np.array_equal(obs_K, happened[int(t)][2].last_obs_N[int(n)])


def test_hidden_state_at_the_start_and_at_truncations() -> None:
    env_info = info(2)
    memory, env = OnPolicyBatchReplay(env_info, 30, 4), ToyEnv(env_info, 3)
    happened = gather(memory, env, state_size=4)
    rollout = memory.rollout()
    assert float(rollout.state_NS.abs().max()) == 0.0
    cut = rollout.truncations
    assert len(cut.t_K) > 0
    for t, n, state_S in zip(cut.t_K, cut.n_K, cut.state_KS, strict=True):
        expected = happened[int(t)][1].state_N
        assert np.array_equal(state_S, expected[int(n)])


@pytest.mark.parametrize("next_step", [False, True])
def test_episode_replay_holds_each_episode_once(next_step: bool) -> None:
    env_info = info(3)
    memory, env = OnPolicyReplay(env_info, 5, 0), ToyEnv(env_info, 7, next_step)
    memory.slabs = memory._allocate(4)  # so that the storage must grow
    rng = np.random.default_rng(0)
    streams: list[list[tuple[float, ...]]] = [[] for _ in range(3)]  # the unfinished episode of each env
    expected: list[list[tuple[float, ...]]] = []
    seen: list[list[tuple[float, ...]]] = []
    obs, first = env.reset(), np.ones(3, bool)
    for _ in range(300):
        out = ActOut(rng.integers(0, 3, 3), rng.normal(size=3).astype(np.float32))
        step = env.step(out.action_N)
        memory.add(obs, first, None, out, step)
        for n in np.flatnonzero(step.valid_N):
            streams[n].append((*map(float, obs[n]), float(out.action_N[n]), float(step.reward_N[n]), float(step.truncated_N[n])))
            if step.terminated_N[n] or step.truncated_N[n]:
                expected.append(streams[n])
                streams[n] = []
        obs, first = step.obs_N, step.first_N
        if memory.ready:
            rollout = memory.rollout()
            assert rollout.action_TN.shape[1] >= 5
            ends = dict(
                zip(
                    zip(rollout.truncations.t_K.tolist(), rollout.truncations.n_K.tolist(), strict=True),
                    rollout.truncations.obs_K,
                    strict=True,
                )
            )
            for e in range(rollout.action_TN.shape[1]):
                rows = int(rollout.valid_TN[:, e].sum())
                assert bool(rollout.valid_TN[:rows, e].all())
                assert bool(rollout.done_TN[rows - 1, e])
                assert int(rollout.done_TN[:, e].sum()) == 1
                assert ((rows - 1, e) in ends) == bool(rollout.truncated_TN[rows - 1, e])
                parts = (rollout.obs_TN, rollout.action_TN, rollout.reward_TN, rollout.truncated_TN)
                seen.append(
                    [(*map(float, o), float(a), float(r), float(c)) for o, a, r, c in zip(*(p[:rows, e] for p in parts), strict=True)]
                )
    assert sorted(seen) == sorted(expected[: len(seen)])
    assert len(seen) > 40


def at_or_above(total_E: list[float], q: float) -> list[int]:
    """Return the episodes that SLM Lab keeps: those at or above the q-quantile, interpolated between two returns. q = 1 keeps all."""
    if q == 1.0:
        return list(range(len(total_E)))
    order, place = sorted(total_E), q * (len(total_E) - 1)
    low = int(place)
    high = min(low + 1, len(order) - 1)
    bound = order[low] + (place - low) * (order[high] - order[low])
    return [e for e, total in enumerate(total_E) if total >= bound - 1e-9]


@pytest.mark.parametrize("q", [0.0, 0.2, 0.5, 0.85, 0.999, 1.0])
@pytest.mark.parametrize("next_step", [False, True])
def test_cross_entropy_keeps_the_best_episodes(q: float, next_step: bool) -> None:
    """Episodes at or above the quantile are kept unchanged, in the order of their ends. A memory that keeps all is the reference."""
    env_info = info(3)
    best = build_rollout_storage(OnPolicyCrossEntropySpec(name="OnPolicyCrossEntropy", cross_entropy=q), env_info, 6, 0)
    every = build_rollout_storage(OnPolicyReplaySpec(name="OnPolicyReplay"), env_info, 6, 0)
    env = ToyEnv(env_info, 11, next_step)
    for _ in range(3):  # dropped episodes do not appear in later rollouts
        for obs, out, step in gather(best, env):
            every.add(obs, np.zeros(3, bool), None, out, step)
        kept, whole = best.rollout(), every.rollout()
        total_E = (whole.reward_TN * whole.valid_TN).double().sum(dim=0)
        columns = at_or_above(total_E.tolist(), q)
        count = len(columns)
        assert count == {0.0: len(total_E), 0.999: 1, 1.0: len(total_E)}.get(q, count)
        T = len(kept.reward_TN)
        assert kept.reward_TN.shape[1] == count
        for name in ("obs_TN", "action_TN", "reward_TN", "valid_TN", "truncated_TN"):
            theirs = getattr(whole, name)[: T + (name == "obs_TN"), columns]
            live = torch.cat([kept.valid_TN, torch.zeros(1, count, dtype=torch.bool)])[: len(theirs)]
            assert torch.equal(getattr(kept, name)[live], theirs[live]), name
        assert int(kept.valid_TN.sum()) == int(whole.valid_TN[:, columns].sum())
        cuts = set(zip(kept.truncations.t_K.tolist(), kept.truncations.n_K.tolist(), strict=True))
        assert cuts == {tuple(where) for where in kept.truncated_TN.nonzero().tolist()}


@pytest.mark.parametrize(
    ("rewards", "q", "kept"),
    [
        ([1.0, 2.0, 1.0, 1.0], 0.5, [0, 1, 2, 3]),  # the median is 1: all episodes equal to it are kept
        ([1.0, 2.0, 1.0, 1.0], 0.9, [1]),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 0.5, [0, 2, 4]),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 0.75, [0, 4]),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 0.76, [4]),
    ],
)
def test_cross_entropy_by_hand(rewards: list[float], q: float, kept: list[int]) -> None:
    memory = OnPolicyCrossEntropy(info(1), len(rewards), 0, quantile=q)
    no = np.zeros(1, bool)
    for t, reward in enumerate(rewards):
        obs = np.full((1, 4), t, np.float32)
        step = VecStep(np.array([reward], np.float32), ~no, no, obs, obs, ~no, ~no, [])
        memory.add(obs, ~no, None, ActOut(np.zeros(1, np.int64), np.zeros(1, np.float32)), step)
    for _ in range(2):  # a second call returns the same rollout
        assert memory.rollout().obs_TN[0, :, 0].tolist() == kept


def test_cross_entropy_of_agents_in_turn() -> None:
    """The rewards in rows without a transition of an agent are undefined, and do not count."""
    env_info = replace(info(1), agents=("a",))
    memory = OnPolicyCrossEntropy(env_info, 2, 0, quantile=0.9)
    no, yes = np.zeros(1, bool), np.ones(1, bool)
    for t, (reward, valid, ended) in enumerate([(9.0, no, no), (0.0, yes, yes), (-9.0, no, no), (1.0, yes, yes)]):
        obs = np.full((1, 4), t, np.float32)
        step = VecStep(np.array([reward], np.float32), ended, no, obs, obs, ended, valid, [])
        memory.add(obs, np.array([t in (0, 2)]), None, ActOut(np.zeros(1, np.int64), np.zeros(1, np.float32)), step)
    assert memory.rollout().obs_TN[0, :, 0].tolist() == [3]


@pytest.mark.parametrize("name", ["Reinforce", "ActorCritic"])
def test_agents_learn_from_the_best_episodes(name: str) -> None:
    """With a quantile of 1 an agent learns the same as from all episodes, with 0.7 it does not."""
    weights = {}
    for memory in ({"name": "OnPolicyReplay"}, {"name": "OnPolicyCrossEntropy"}, {"name": "OnPolicyCrossEntropy", "cross_entropy": 0.7}):
        toy = spec({"name": name, "training_frequency": 6}, memory="OnPolicyReplay").model_dump()
        toy["agent"]["memory"] = memory
        agent = agent_of(Spec.model_validate(toy), info(3))
        assert len(drive(agent, ToyEnv(info(3), 2), 40)) > 3
        weights[str(memory)] = torch.cat([w.flatten() for w in agent.weights().values()])
    every, same, best = weights.values()
    assert torch.equal(every, same)
    assert not torch.equal(every, best)


def test_rollout_moves_to_a_device() -> None:
    env_info = info(2)
    memory = OnPolicyBatchReplay(env_info, 8, 0)
    gather(memory, ToyEnv(env_info, 0))
    rollout = memory.rollout()
    assert rollout.to("cpu") is rollout
    moved = rollout.to("meta")
    assert {getattr(moved, f.name).device.type for f in fields(moved) if f.name not in ("first_TN", "truncations")} == {"meta"}


def test_dtype_is_kept() -> None:
    env_info = info(2, shape=(1, 3, 3), dtype="uint8")
    memory = OnPolicyBatchReplay(env_info, 4, 0)
    gather(memory, ToyEnv(env_info, 0))
    assert memory.rollout().obs_TN.dtype == torch.uint8
    assert memory.rollout().truncations.obs_K.dtype == torch.uint8
