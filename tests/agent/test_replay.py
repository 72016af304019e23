"""Tests of replay memories against a list of all transitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from slm_lab.agent.replay import replay as replay_module
from slm_lab.agent.replay.frames import FrameStore, VectorStore
from slm_lab.agent.replay.replay import PrioritizedReplay, Replay, Transitions, check_replay_memory, replay_bytes
from slm_lab.env import make_env
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActionSpace, ActOut, EnvInfo, ObservationSpace, VecStep
from slm_lab.spec.models.base import LinearDecay
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.memory import PrioritizedReplaySpec, ReplaySpec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import CONTINUOUS, DISCRETE, ToyEnv, info

MULTI = ActionSpace("multi_discrete", (2, 3), 2)
KINDS = {"Replay": (Replay, ReplaySpec), "PrioritizedReplay": (PrioritizedReplay, PrioritizedReplaySpec)}


def build(env_info: EnvInfo, kind: str = "Replay", frequency: int = 1, start: int = 0, clock: Clock | None = None, **keys: Any) -> Any:
    memory, spec = KINDS[kind]
    keys = {"batch_size": 8, "max_size": 50} | keys
    return memory(spec(name=kind, **keys), env_info, clock or Clock(), np.random.default_rng(3), frequency, start)


class Happened(NamedTuple):
    """One transition of one env."""

    obs: np.ndarray
    action: np.ndarray
    logp: float
    reward: float
    next_obs: np.ndarray
    terminated: bool
    truncated: bool


class StackEnv:
    """Env of stacked images like Atari's: an episode begins with zeros and its first frame, but after a lost life the stack continues.

    Each frame contains its own number, so that no two frames are equal.
    """

    def __init__(self, env_info: EnvInfo, seed: int = 0, next_step: bool = False, ends: float = 0.1, repeat: bool = False) -> None:
        self.info, self.next_step, self.ends, self.repeat = env_info, next_step, ends, repeat
        self.rng, self.ticks = np.random.default_rng(seed), 0
        self.ended_N = np.zeros(env_info.num_envs, bool)
        self.obs_N = np.zeros((env_info.num_envs, *env_info.observation.shape), np.uint8)

    def _frame(self) -> np.ndarray:
        space = self.info.observation
        self.ticks += 1
        frame = self.rng.integers(0, 256, (space.shape[0] // space.stack, *space.shape[1:])).astype(np.uint8)
        frame.reshape(-1)[:3] = np.frombuffer(self.ticks.to_bytes(3, "big"), np.uint8)
        return frame

    def _pushed(self, obs: np.ndarray) -> np.ndarray:
        frame = self._frame()
        return np.concatenate([obs[len(frame) :], frame])

    def _begun(self) -> np.ndarray:
        space = self.info.observation
        if self.repeat:  # repeat the first frame, as other envs do
            return np.concatenate([self._frame()] * space.stack)
        return self._pushed(np.zeros(space.shape, np.uint8))

    def reset(self) -> np.ndarray:
        self.obs_N = np.stack([self._begun() for _ in range(self.info.num_envs)])
        return self.obs_N

    def step(self, action_N: np.ndarray) -> VecStep:
        n, rng = self.info.num_envs, self.rng
        valid_N = ~self.ended_N if self.next_step else np.ones(n, bool)
        terminated_N = (rng.random(n) < self.ends) & valid_N
        truncated_N = (rng.random(n) < self.ends) & valid_N & ~terminated_N
        life_N = (rng.random(n) < self.ends) & valid_N & ~terminated_N & ~truncated_N
        over_N = terminated_N | truncated_N
        last_obs_N = np.stack([self._pushed(obs) if going else self._begun() for obs, going in zip(self.obs_N, valid_N, strict=True)])
        obs_N, first_N = last_obs_N, life_N
        if self.next_step:
            first_N, self.ended_N = first_N | self.ended_N, over_N
        elif over_N.any():
            obs_N, first_N = last_obs_N.copy(), first_N | over_N
            for i in np.flatnonzero(over_N):
                obs_N[i] = self._begun()
        self.obs_N = obs_N
        reward_N = rng.normal(size=n).astype(np.float32)
        return VecStep(reward_N, terminated_N | life_N, truncated_N, last_obs_N, obs_N, first_N, valid_N, [])


def images(num_envs: int = 1, stack: int = 4, channels: int = 1, max_frame: int = 2**62) -> EnvInfo:
    return EnvInfo(num_envs, ObservationSpace((stack * channels, 3, 4), "uint8", stack), DISCRETE, max_frame=max_frame)


def feed(memory: Replay, env: Any, steps: int, seed: int = 5, first: bool = True) -> Iterator[list[Happened]]:
    """Step the env and feed the memory. After each step, yield all transitions so far, as the memory sees them."""
    rng, happened = np.random.default_rng(seed), list[Happened]()
    action_space, n = env.info.action, env.info.num_envs
    obs_N, first_N = env.reset(), np.full(n, first)
    for _ in range(steps):
        shape = (n,) if action_space.kind == "discrete" else (n, action_space.dim)
        action_N = rng.normal(size=shape).astype(np.float32) if action_space.kind == "continuous" else rng.integers(0, 2, shape)
        out = ActOut(action_N, rng.normal(size=n).astype(np.float32))
        step = env.step(action_N)
        memory.add(obs_N, first_N, None, out, step)
        for i in np.flatnonzero(step.valid_N):
            happened.append(
                Happened(
                    obs_N[i].copy(),
                    action_N[i].copy(),
                    float(out.logp_N[i]),
                    float(step.reward_N[i]),
                    step.last_obs_N[i].copy(),
                    bool(step.terminated_N[i]),
                    bool(step.truncated_N[i]),
                )
            )
        obs_N, first_N = step.obs_N, step.first_N
        yield happened


def everything(memory: Replay) -> Transitions:
    """Return all transitions that can be drawn, oldest first."""
    memory._draw_rows = lambda: (memory.seen - np.arange(memory.size, 0, -1)) % memory.capacity  # type: ignore[method-assign]
    cer, memory.use_cer = memory.use_cer, False
    batch = memory.sample()
    memory.use_cer = cer
    del memory._draw_rows
    return batch


def assert_holds(memory: Replay, happened: list[Happened]) -> None:
    """Assert that the memory holds the newest `size` transitions, bit for bit."""
    batch = everything(memory)
    newest = happened[len(happened) - memory.size :]
    assert len(batch.reward_B) == len(newest)
    for name, item in (("obs", batch.obs_B), ("action", batch.action_B), ("next_obs", batch.next_obs_B)):
        expected = np.stack([getattr(one, name) for one in newest])
        assert item.numpy().dtype == expected.dtype
        assert np.array_equal(item.numpy(), expected), name
    for name, item in (("logp", batch.logp_B), ("reward", batch.reward_B), ("terminated", batch.terminated_B)):
        assert item.dtype == torch.float32
        assert np.array_equal(item.numpy(), np.array([getattr(one, name) for one in newest], np.float32)), name


# ---- the ring


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize(("num_envs", "max_size"), [(1, 50), (4, 50), (4, 48), (3, 2), (4, 1)])
def test_it_holds_the_newest_of_what_happened(kind: str, next_step: bool, num_envs: int, max_size: int) -> None:
    """The memory holds the newest transitions after more than two wraps.

    max_size may be no multiple of num_envs, or smaller than num_envs.
    """
    env_info = info(num_envs)
    memory = build(env_info, kind, max_size=max_size, batch_size=1)
    happened: list[Happened] = []
    for number, happened in enumerate(feed(memory, ToyEnv(env_info, 2, next_step), 150 // num_envs)):
        assert (memory.seen, memory.size) == (len(happened), min(len(happened), max_size))
        if number % 5 == 0 and happened:
            assert_holds(memory, happened)
    assert_holds(memory, happened)
    assert len(happened) > 2 * max_size
    ends = [(one.terminated, one.truncated) for one in happened]
    assert {(True, False), (False, True), (False, False)} == set(ends), "all kinds of steps have come"


@pytest.mark.parametrize("action", [DISCRETE, CONTINUOUS, MULTI])
def test_dtypes_are_kept(action: ActionSpace) -> None:
    for env_info, env in (
        (info(2, action), ToyEnv(info(2, action))),
        (EnvInfo(2, ObservationSpace((2, 3, 3), "uint8"), action), ToyEnv(EnvInfo(2, ObservationSpace((2, 3, 3), "uint8"), action))),
    ):
        memory = build(env_info)
        list(feed(memory, env, 20))
        batch = memory.sample()
        kind = torch.uint8 if env_info.observation.dtype == "uint8" else torch.float32
        assert (batch.obs_B.dtype, batch.next_obs_B.dtype) == (kind, kind)
        assert batch.action_B.dtype == (torch.float32 if action.kind == "continuous" else torch.int64)
        assert batch.action_B.shape == ((8,) if action.kind == "discrete" else (8, 2))
        assert {batch.logp_B.dtype, batch.reward_B.dtype, batch.terminated_B.dtype} == {torch.float32}


def test_draws_are_uniform_over_the_newest() -> None:
    env_info = info(1)
    memory = build(env_info, max_size=20, batch_size=20)
    list(feed(memory, ToyEnv(env_info), 33))
    counts = np.zeros(20)
    for _ in range(1000):
        np.add.at(counts, memory.sample().row_B, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # exceeded with probability 0.1 % (χ² with 19 degrees of freedom)


def test_few_transitions_are_drawn_alone() -> None:
    """Rows that were never written are not drawn."""
    memory = build(info(1), max_size=1000, batch_size=64)
    list(feed(memory, ToyEnv(info(1)), 3))
    assert set(memory.sample().row_B.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_cer_includes_what_no_batch_has_held(kind: str) -> None:
    """As in SLM Lab, a batch ends with the oldest new transitions that are still stored, at most as many as the batch has rows."""
    env_info = info(2)
    memory = build(env_info, kind, use_cer=True, max_size=30)
    rng, given, sizes = np.random.default_rng(1), 0, set()
    for happened in feed(memory, ToyEnv(env_info, next_step=True), 120):
        if rng.random() < 0.8:
            continue
        for _ in range(rng.integers(1, 3)):
            given = max(given, len(happened) - 30)
            new = happened[given : given + 8]
            given += len(new)
            reward_B = memory.sample().reward_B
            assert reward_B[8 - len(new) :].tolist() == [np.float32(item.reward) for item in new]
            assert len(reward_B) == 8
            sizes.add(len(new))
    assert {0, 8} < sizes


# ---- when it is ready


@pytest.mark.parametrize(
    ("num_envs", "frequency", "start", "expected"),
    [
        (1, 1, 0, [1, 2, 3]),  # also before there are batch_size transitions
        (1, 1, 8, [8, 9, 10]),
        (1, 4, 0, [4, 8, 12]),
        (1, 4, 9, [12, 16, 20]),
        (4, 1, 0, [4, 8, 12]),  # four transitions per step: one training call
        (4, 6, 0, [8, 12, 20]),  # steps that cross a multiple of 6
        (4, 4, 33, [36, 40, 44]),
        (3, 2, 20, [21, 24, 27]),
    ],
)
def test_ready_counts_transitions(num_envs: int, frequency: int, start: int, expected: list[int]) -> None:
    memory = build(info(num_envs), frequency=frequency, start=start)
    found = [memory.seen for _ in feed(memory, ToyEnv(info(num_envs)), 40) if memory.ready]
    assert found[:3] == expected


def test_an_agent_that_has_learned_collects_a_batch_first() -> None:
    memory = build(info(1), start=1)
    memory.require_full_batch()
    assert [memory.seen for _ in feed(memory, ToyEnv(info(1)), 40) if memory.ready][:2] == [8, 9]


def test_dummy_rows_never_make_it_ready() -> None:
    env_info = info(1)
    memory, env = build(env_info, batch_size=1), ToyEnv(env_info, 1, next_step=True)
    trained = before = dummies = 0
    for _ in feed(memory, env, 200):
        assert memory.ready == (memory.seen > before)
        dummies += memory.seen == before
        trained, before = trained + memory.ready, memory.seen
    assert trained == memory.seen == 200 - dummies
    assert dummies > 20


# ---- how much it keeps


@pytest.mark.parametrize(("max_size", "max_frame", "capacity"), [(100, 1000, 100), (100, 60, 60), (100, 61, 64), (7, 1000, 7)])
def test_no_more_than_can_come_is_reserved(max_size: int, max_frame: int, capacity: int) -> None:
    memory = build(EnvInfo(4, ObservationSpace((3,)), DISCRETE, max_frame=max_frame), max_size=max_size)
    assert memory.capacity == capacity == len(memory.store.obs)


def array_bytes(memory: Replay) -> int:
    """Return the total number of bytes of all arrays of the memory."""
    arrays = [*memory.columns.values(), *(item for item in vars(memory.store).values() if isinstance(item, np.ndarray))]
    arrays += getattr(memory, "tree", None).levels if isinstance(memory, PrioritizedReplay) else []  # type: ignore[union-attr]
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_a_million_atari_frames_take_7_3_gb(kind: str) -> None:
    atari = EnvInfo(1, ObservationSpace((4, 84, 84), "uint8", 4), ActionSpace("discrete", (6,), 1))
    assert replay_bytes(1_000_000, atari) <= 7.3e9
    small, large = (array_bytes(build(atari, kind, max_size=size)) for size in (1000, 3000))
    scaled = small + (large - small) / 2000 * 999_000
    assert scaled <= 7.3e9
    assert scaled == pytest.approx(replay_bytes(1_000_000, atari), rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env_info", [info(2), info(2, CONTINUOUS, (17,)), info(2, MULTI), images(2), images(2, 1, 3)])
def test_bytes_are_those_of_the_arrays(kind: str, env_info: EnvInfo) -> None:
    memory = build(env_info, kind, max_size=64**2)
    assert memory.nbytes == pytest.approx(array_bytes(memory), rel=0.25 if len(env_info.observation.shape) == 3 else 0.2)


def test_a_memory_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    atari = EnvInfo(1, ObservationSpace((4, 84, 84), "uint8", 4), DISCRETE)
    monkeypatch.setattr(replay_module, "memory_bytes", lambda: 2 * 2**30)
    with pytest.raises(SpecError) as caught:
        build(atari, max_size=1_000_000)
    (problem,) = caught.value.problems
    assert problem.path == "agent.memory.max_size"
    fitting = int(problem.message.split("at most ")[1].split(" ")[0].replace(",", ""))
    assert problem.message == f"1,000,000 transitions take 6.7 GiB; this machine has 2.0 GiB; at most {fitting:,} would fit"
    assert 0.8 * 2**31 < replay_bytes(fitting, atari) < 2**31
    with pytest.raises(SpecError, match=r"2 at once of 6\.7 GiB each"):
        check_replay_memory(1_000_000, replay_bytes(1_000_000, atari), memories=2)
    build(atari, max_size=1_000)


# ---- priorities


def prioritised(size: int = 40, batch_size: int = 16, **keys: Any) -> PrioritizedReplay:
    memory: PrioritizedReplay = build(info(1), "PrioritizedReplay", max_size=size, batch_size=batch_size, **keys)
    list(feed(memory, ToyEnv(info(1)), size + 7))
    return memory


def test_draws_follow_the_priorities() -> None:
    memory = prioritised()
    rng = np.random.default_rng(0)
    memory.update_priorities(np.arange(40), torch.from_numpy(rng.normal(size=40) * 3.0))
    probability = memory.tree.get(np.arange(40)) / memory.tree.total
    counts, draws = np.zeros(40), 1000
    for _ in range(draws):
        np.add.at(counts, memory.sample().row_B, 1)
    expected = 16 * draws * probability
    # strata make the counts steadier than independent draws: χ² with 39 degrees of freedom bounds them from above
    assert ((counts - expected) ** 2 / expected).sum() < 72.1
    assert counts.max() > 4 * max(1.0, counts.min())


def test_each_stratum_is_drawn_once() -> None:
    """Section B.2.1: the total priority is divided into batch_size equal parts, with one draw from each."""
    memory = prioritised(batch_size=4)
    memory.tree.set(np.arange(40), np.repeat([1.0, 2.0, 5.0, 2.0], 10))  # the third quarter of rows has half of the mass
    for _ in range(50):
        rows = memory.sample().row_B
        end_B = np.cumsum(memory.tree.get(np.arange(40)))[rows]
        begin_B = end_B - memory.tree.get(rows)
        assert ((end_B > np.arange(4) * 25) & (begin_B < np.arange(1, 5) * 25)).all()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights_are_the_papers(beta: float) -> None:
    """Algorithm 1, line 10: weights are (N · P)^−β divided by the greatest weight of the batch."""
    memory = prioritised(beta=beta)
    memory.update_priorities(np.arange(40), torch.from_numpy(np.random.default_rng(1).normal(size=40)))
    batch = memory.sample()
    probability = memory.tree.get(batch.row_B) / memory.tree.get(np.arange(40)).sum()
    weight = (memory.size * probability) ** -beta
    assert batch.weight_B.dtype == torch.float32
    np.testing.assert_allclose(batch.weight_B, weight / weight.max(), rtol=1e-6)
    assert float(batch.weight_B.max()) == 1.0
    assert build(info(1))._importance_weights(batch.row_B) is None


def test_beta_follows_its_schedule_by_frame() -> None:
    clock = Clock()
    memory = build(
        info(1),
        "PrioritizedReplay",
        clock=clock,
        beta=LinearDecay(name="linear_decay", start_val=0.4, end_val=1.0, start_step=100, end_step=200),
    )
    list(feed(memory, ToyEnv(info(1)), 30))
    memory.update_priorities(np.arange(30), torch.arange(30.0))
    rows = np.array([3, 20])
    ratio = memory.tree.get(rows)[1] / memory.tree.get(rows)[0]
    for frame, beta in ((0, 0.4), (150, 0.7), (500, 1.0)):
        clock.frame = frame
        assert memory._importance_weights(rows)[1] == pytest.approx(ratio**-beta, rel=1e-5)


def test_new_transitions_get_the_greatest_priority_so_far() -> None:
    memory, env = build(info(2), "PrioritizedReplay", max_size=10, initial_error="greatest"), ToyEnv(info(2))
    stream = feed(memory, env, 20)
    next(stream)
    assert memory.tree.get(np.arange(3)).tolist() == [1.0, 1.0, 0.0]
    memory.update_priorities(np.array([0, 1]), torch.tensor([9.0, -1.0]))
    greatest = (9.0 + memory.epsilon) ** memory.alpha
    next(stream)
    assert memory.tree.get(np.array([2, 3])) == pytest.approx([greatest] * 2)
    memory.update_priorities(np.array([0, 1, 2, 3]), torch.full((4,), 0.1))
    for _ in range(6):  # past the end of the ring
        next(stream)
    rows = (memory.seen - 1 - np.arange(2)) % 10
    assert memory.tree.get(rows) == pytest.approx([greatest] * 2), "the greatest of all time, though it has been replaced"


@pytest.mark.parametrize("use_cer", [False, True])
@pytest.mark.parametrize(("given", "error"), [({}, 100_000.0), ({"initial_error": 7.0}, 7.0)])
def test_priorities_are_slm_labs(use_cer: bool, given: dict[str, Any], error: float) -> None:
    """Priorities equal a list that follows the rule of SLM Lab v5.3, which has no importance weights.

    A new transition has (error + ε)^α with an error of 100,000. A drawn transition gets (|δ| + ε)^α, unless use_cer included it.
    """
    alpha, epsilon, size = 0.5, 0.25, 20
    memory = build(info(2), "PrioritizedReplay", max_size=size, use_cer=use_cer, alpha=alpha, epsilon=epsilon, **given)
    rng, twin, head = np.random.default_rng(0), [0.0] * size, -1
    for number, happened in enumerate(feed(memory, ToyEnv(info(2), next_step=True), 40)):
        while head < len(happened) - 1:
            head += 1
            twin[head % size] = (error + epsilon) ** alpha
        assert memory.tree.get(np.arange(size)) == pytest.approx(twin)
        if number % 3:
            continue
        before = list(twin)
        batch, delta_B = memory.sample(), rng.normal(size=8)
        assert batch.weight_B is None
        memory.update_priorities(batch.row_B, torch.from_numpy(delta_B))
        for place, (row, delta) in enumerate(zip(batch.row_B, delta_B, strict=True)):
            if place < 8 - memory.fresh:
                twin[row] = (abs(delta) + epsilon) ** alpha
        assert memory.tree.get(np.arange(size)) == pytest.approx(twin)
        assert twin != before or memory.fresh == 8
    assert use_cer == (memory.replayed > 0)


def test_new_transitions_are_drawn_first() -> None:
    """With errors of about 1, nearly all of the total priority belongs to transitions that no batch has held."""
    memory = prioritised()
    memory.update_priorities(np.arange(40), torch.ones(40))
    stream = feed(memory, ToyEnv(info(1)), 2)
    next(stream)
    new = (memory.seen - 1) % 40
    probability = (100_000 + 1e-4) ** 0.6 / ((100_000 + 1e-4) ** 0.6 + 39 * (1 + 1e-4) ** 0.6)
    drawn = np.concatenate([memory.sample().row_B for _ in range(500)])
    assert np.mean(drawn == new) == pytest.approx(probability, abs=0.01)


def test_rows_that_cannot_be_drawn_weigh_nothing() -> None:
    env_info = images(2)
    memory, env = build(env_info, "PrioritizedReplay", max_size=60), StackEnv(env_info, ends=0.3)
    rng = np.random.default_rng(0)
    for _ in feed(memory, env, 150):
        weights = memory.tree.get(np.arange(60))
        held = (memory.seen - 1 - np.arange(memory.size)) % 60
        assert set(np.flatnonzero(weights).tolist()) == set(held.tolist())
        batch = memory.sample()
        memory.update_priorities(batch.row_B, torch.from_numpy(rng.normal(size=8)))
    assert memory.size < 60, "frames were lost"


def test_errors_that_are_not_finite_get_the_least_priority() -> None:
    """A transition with a NaN reward must not be drawn forever, nor make the priorities of other transitions NaN."""
    env_info = info(1)
    memory = build(env_info, "PrioritizedReplay", max_size=20, batch_size=20, alpha=0.5, epsilon=0.01)
    list(feed(memory, ToyEnv(env_info), 20))
    memory.update_priorities(np.arange(4), torch.tensor([torch.nan, torch.inf, -torch.inf, -0.35]))
    assert memory.tree.get(np.arange(4)) == pytest.approx([0.1, 0.1, 0.1, 0.6])
    assert memory.greatest == 1.0
    assert len(set(memory.sample().row_B.tolist())) > 10


# ---- images


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("stack", "channels"), [(4, 1), (2, 3), (1, 1), (1, 3)])
@pytest.mark.parametrize(("num_envs", "max_size"), [(1, 90), (3, 100), (4, 7)])
@pytest.mark.parametrize("next_step", [False, True])
def test_stacks_come_back_as_they_went_in(stack: int, channels: int, num_envs: int, max_size: int, next_step: bool) -> None:
    """After each step, all rows that can be drawn are unchanged, while frames are lost and both kinds of resets occur."""
    env_info = images(num_envs, stack, channels)
    memory = build(env_info, max_size=max_size, batch_size=1)
    assert isinstance(memory.store, FrameStore)
    sizes = []
    for number, happened in enumerate(feed(memory, StackEnv(env_info, num_envs, next_step, repeat=channels == 3), 400 // num_envs)):
        assert memory.seen == len(happened)
        sizes.append(memory.size)
        if memory.size and number % 3 == 0:
            assert_holds(memory, happened)
    assert len(happened) > 2 * max_size
    assert min(sizes[len(sizes) // 2 :]) > 0.4 * max_size


def test_an_absent_agent_does_not_empty_the_ring() -> None:
    """An agent acts in the first step and once more, after the frames of its first step were overwritten."""
    env_info = EnvInfo(2, ObservationSpace((2, 4, 4), "uint8", stack=2), ActionSpace("discrete", (3,)), agents=("a", "b"))
    memory = build(env_info, max_size=200)
    rng, sizes, happened = np.random.default_rng(0), [], []
    obs, first = rng.integers(0, 255, (2, 2, 4, 4), np.uint8), np.ones(2, np.bool_)
    for t in range(500):
        new = np.concatenate([obs[:, 1:], rng.integers(0, 255, (2, 1, 4, 4), np.uint8)], axis=1)
        ended, valid, reward = np.zeros(2, np.bool_), np.array([True, t in (0, 400)]), np.full(2, t, np.float32)
        step = VecStep(reward, ended, ended, new, new, ended, valid, [])
        memory.add(obs, first, None, ActOut(np.zeros(2, np.int64), np.zeros(2, np.float32)), step)
        happened += [Happened(obs[n], np.int64(0), 0.0, t, new[n], False, False) for n in np.flatnonzero(valid)]
        sizes.append(memory.size)
        if t in (150, 400, 499):
            assert_holds(memory, happened)
        obs, first = new, np.zeros(2, np.bool_)
    assert min(sizes[200:]) > 190


def test_an_agent_that_acts_rarely_needs_one_frame_per_transition() -> None:
    """If the agent's frames were forgotten between its transitions, each observation would be stored again as a whole stack."""
    env_info = EnvInfo(2, ObservationSpace((4, 4, 4), "uint8", stack=4), ActionSpace("discrete", (3,)), agents=("a", "b"))
    memory = build(env_info, max_size=2000)
    obs, first, ended = np.zeros((2, 4, 4, 4), np.uint8), np.ones(2, np.bool_), np.zeros(2, np.bool_)
    for t in range(4000):
        valid = np.array([True, t % 8 == 0])
        new = np.where(valid[:, None, None, None], np.concatenate([obs[:, 1:], np.full((2, 1, 4, 4), t % 251, np.uint8)], axis=1), obs)
        step = VecStep(np.zeros(2, np.float32), ended, ended, new, new, ended, valid, [])
        memory.add(obs, first, None, ActOut(np.zeros(2, np.int64), np.zeros(2, np.float32)), step)
        obs, first = new, ended
    assert memory.size == 2000


def test_long_episodes_fill_the_ring() -> None:
    """The store has room for the first frames of an episode every 64 steps. With longer episodes no frame is lost."""
    env_info = images(2)
    memory = build(env_info, max_size=1000)
    *_, happened = feed(memory, StackEnv(env_info, ends=1 / 512), 1200)
    assert memory.size == 1000
    assert_holds(memory, happened)


def test_lost_lives_take_no_room() -> None:
    """The observation after a lost life is the last observation, whose frames are already stored."""
    env_info = images(2)
    memory = build(env_info, max_size=200)

    class Lives(StackEnv):
        """Env in which each life has five steps."""

        def step(self, action_N: np.ndarray) -> VecStep:
            self.obs_N = np.stack([self._pushed(obs) for obs in self.obs_N])
            lost_N, none_N, all_N = np.full(2, self.ticks % 10 < 2), np.zeros(2, bool), np.ones(2, bool)
            return VecStep(np.zeros(2, np.float32), lost_N, none_N, self.obs_N, self.obs_N, lost_N, all_N, [])

    *_, happened = feed(memory, Lives(env_info), 90)
    assert sum(one.terminated for one in happened) == 36
    assert memory.store.count == len(happened) + 2 * 2, "of each env's first observation, the blank frame and the newest one"
    assert_holds(memory, happened)


def test_an_env_that_goes_on_among_others_that_begin_loses_no_frame_unseen() -> None:
    """A newer row may have an older stack. Rows are dropped from the oldest on, so a lost frame of a row also drops all rows before it."""
    env_info = images(4)
    memory = build(env_info, max_size=24)

    class Uneven(StackEnv):
        """Four envs, of which three often begin again with four new frames, and one rarely."""

        def step(self, action_N: np.ndarray) -> VecStep:
            pushed_N = np.stack([self._pushed(obs) for obs in self.obs_N])
            first_N = self.rng.random(4) < [0.9, 0.02, 0.9, 0.9]
            begun_N = np.stack([np.concatenate([self._frame() for _ in range(4)]) for _ in range(4)])
            self.obs_N = np.where(first_N[:, None, None, None], begun_N, pushed_N)
            none_N, all_N = np.zeros(4, bool), np.ones(4, bool)
            return VecStep(np.zeros(4, np.float32), first_N, none_N, pushed_N, self.obs_N, first_N, all_N, [])

    for happened in feed(memory, Uneven(env_info), 200):
        if memory.size:
            assert_holds(memory, happened)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("backend", "game", "steps", "keys"),
    [
        ("ale", "Pong", 300, {}),
        ("sync", "Pong", 150, {}),
        ("ale", "Breakout", 150, {"life_loss_info": True, "use_fire_reset": False}),
        ("sync", "Pong", 100, {"grayscale": False, "stack_num": 2}),
    ],
)
def test_atari_observations_are_the_envs_own(backend: str, game: str, steps: int, keys: dict[str, Any]) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    spec = EnvSpec(name=f"ALE/{game}-v5", max_frame=10**6, num_envs=2, max_t=75, backend=backend, noop_max=4, **keys)
    env = make_env(spec, 1)
    memory = build(env.info, max_size=10**4)
    assert isinstance(memory.store, FrameStore)
    *_, happened = feed(memory, env, steps)
    env.close()
    assert memory.size == len(happened)
    assert sum(one.terminated or one.truncated for one in happened) >= 2
    assert_holds(memory, happened)
    assert len(np.unique(np.stack([one.obs for one in happened[::7]]))) > 5


# ---- state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("image", [False, True])
def test_contents_go_on_in_another_memory(kind: str, image: bool, tmp_path: Any) -> None:
    env_info = images(2) if image else info(2)
    env_of = StackEnv if image else ToyEnv
    memory, twin = (build(env_info, kind, max_size=33) for _ in range(2))
    *_, happened = feed(memory, env_of(env_info, 1), 40)
    memory.update_priorities(np.arange(8), torch.arange(8.0))
    torch.save({"contents": memory.contents(), "state": memory.state_dict()}, tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    list(feed(twin, env_of(env_info, 9), 3))  # loading discards these contents
    twin.load_contents(saved["contents"])
    twin.load_state_dict(saved["state"])
    assert_holds(twin, happened)
    # from here on both have the same transitions and draws, past the end of the ring
    for one in (memory, twin):
        # a memory with loaded contents has seen no env yet, so every observation is a first one
        *_, more = feed(one, env_of(env_info, 7), 30, 11, first=one is memory)
        assert_holds(one, happened + more)
    for _ in range(3):
        ours, theirs = memory.sample(), twin.sample()
        for left, right in zip(ours, theirs, strict=True):
            assert left is right is None or np.array_equal(left, right)
        memory.update_priorities(ours.row_B, ours.reward_B)
        twin.update_priorities(theirs.row_B, theirs.reward_B)


@pytest.mark.parametrize("kind", KINDS)
def test_what_earlier_batches_have_left_goes_on_in_another_memory(kind: str) -> None:
    """A loaded memory knows which transitions were in a batch (use_cer), and the greatest priority so far, which new ones get."""
    keys: dict[str, Any] = {"use_cer": True} | ({"initial_error": "greatest"} if kind == "PrioritizedReplay" else {})
    memory, twin = (build(info(2), kind, max_size=50, **keys) for _ in range(2))
    list(feed(memory, ToyEnv(info(2), 1), 10))
    memory.update_priorities(memory.sample().row_B, torch.arange(8.0))
    twin.load_contents(memory.contents())
    twin.load_state_dict(memory.state_dict())
    assert memory.sample().row_B.tolist() == twin.sample().row_B.tolist()
    for one in (memory, twin):
        list(feed(one, ToyEnv(info(2), 7), 3, 11))
    assert memory.sample().row_B.tolist() == twin.sample().row_B.tolist()
    if isinstance(memory, PrioritizedReplay) and isinstance(twin, PrioritizedReplay):
        assert memory.tree.get(np.arange(26)).tolist() == twin.tree.get(np.arange(26)).tolist()


def test_frames_of_a_ring_that_wrapped_go_on_in_a_larger_memory() -> None:
    """A finished run with short episodes may be continued with more frames, and so with a larger memory."""
    env_info = images(2)
    memory, larger = build(env_info, max_size=80), build(env_info, max_size=300)
    *_, happened = feed(memory, StackEnv(env_info, 1, ends=0.2), 40)
    assert isinstance(memory.store, FrameStore)
    assert isinstance(larger.store, FrameStore)
    assert memory.store.count > memory.store.slots
    assert memory.size < len(happened) == 80
    larger.load_contents(memory.contents())
    assert larger.size == memory.size
    assert_holds(larger, happened)
    *_, more = feed(larger, StackEnv(env_info, 7, ends=0.2), 60, 11)
    assert larger.size > 80
    assert_holds(larger, happened + more)


@pytest.mark.parametrize("image", [False, True])
def test_contents_of_another_size_are_refused(image: bool) -> None:
    env_info = images(1) if image else info(1)
    memory = build(env_info, max_size=1)
    list(feed(memory, (StackEnv if image else ToyEnv)(env_info), 3))
    with pytest.raises(ValueError, match="incompatible replay buffer"):
        build(env_info, max_size=10).load_contents(memory.contents())


def test_vectors_are_kept_whole() -> None:
    assert isinstance(build(info(1)).store, VectorStore)
    assert isinstance(build(info(1, shape=(3, 3, 3))).store, VectorStore), "float images are no frames"


def test_priorities_of_zero_can_be_sampled() -> None:
    """With an epsilon of 0, as in SLM Lab's files, all priorities may be 0."""
    env = ToyEnv(info(2, DISCRETE))
    memory = build(env.info, "PrioritizedReplay", epsilon=0.0, beta=0.4)
    for _ in feed(memory, env, 20):
        pass
    memory.update_priorities(np.arange(40), torch.zeros(40))
    batch = memory.sample()
    assert len(set(batch.row_B.tolist())) > 1
    assert bool(torch.as_tensor(batch.weight_B).isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_batches_are_normalised_when_they_are_drawn(kind: str, num_steps: int) -> None:
    """Batches are normalised with the current state of the normaliser; the stored observations do not change."""
    memory, spec = KINDS[kind]
    plain, normalising = (
        memory(spec(name=kind, batch_size=8, max_size=50), info(2), Clock(), np.random.default_rng(3), num_steps=num_steps)
        for _ in range(2)
    )
    for each in (plain, normalising):
        assert list(feed(each, ToyEnv(info(2), 1), 40))
    for factor in (np.float32(2.0), np.float32(3.0)):
        normalising.set_normalizers(
            lambda obs, factor=factor: obs * factor + np.float32(1.0), lambda reward, factor=factor: reward * factor
        )
        expected, found = plain.sample(), normalising.sample()
        assert torch.equal(found.obs_B, expected.obs_B * float(factor) + 1.0)
        assert torch.equal(found.next_obs_B, expected.next_obs_B * float(factor) + 1.0)
        assert torch.equal(found.reward_B, expected.reward_B * float(factor))
        assert num_steps == 1 or torch.equal(found.reward_KB, expected.reward_KB * float(factor))
        assert torch.equal(found.action_B, expected.action_B)
    assert np.array_equal(normalising.store.observations(np.arange(50)), plain.store.observations(np.arange(50)))


def test_contents_that_were_stored_after_normalisation_are_refused() -> None:
    """Version 0.2.0 stored normalised contents. Its contents can be loaded if there are no normalisers."""
    memory = build(info(2))
    assert list(feed(memory, ToyEnv(info(2), 1), 20))
    old = {name: value for name, value in memory.contents().items() if name != "raw"}
    build(info(2)).load_contents(old)
    normalising = build(info(2))
    normalising.set_normalizers(lambda obs: obs, None)
    normalising.load_contents(memory.contents())
    with pytest.raises(ValueError, match=r"incompatible replay buffer: version 0\.2\.0"):
        normalising.load_contents(old)
