"""One net that several Sessions train: semantics, step by step, with the Sessions side by side in this process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic
from slm_lab.agent.algorithm.common.value_scale import PercentileScale, RunningScale
from slm_lab.agent.build import build_agent
from slm_lab.agent.optim.optimizers import FlatAdam, FlatOptimizer, FlatRMSprop
from slm_lab.env.normalize import RunningStats
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import PRIVATE, CommonHeap, Heap, common_file
from slm_lab.lib.records import EnvInfo, Metrics
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.spec import Spec
from tests.agent.helpers import ToyEnv, info
from tests.contract.combinations import Case

Heaps = Callable[..., list[CommonHeap]]


@pytest.fixture
def heaps() -> Iterator[Heaps]:
    """heaps(n, synced=…): n Sessions' views of one new memory."""
    files: list[int] = []

    def make(count: int = 2, synced: bool = True, **keys: Any) -> list[CommonHeap]:
        files.append(common_file())
        return [CommonHeap(files[-1], index, count, synced=synced, **keys) for index in range(count)]

    yield make
    for fd in files:
        os.close(fd)


def a3c(optimizer: str = "GlobalAdam", **net: Any) -> Spec:
    case = Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet")
    return case.spec(2, {"optim_spec": {"name": optimizer, "lr": 0.01}, **net})


def session(spec: Spec, heap: Heap, env_info: EnvInfo | None = None) -> Agent:
    return build_agent(spec, env_info or info(2), session_seeds(0, 0, 0), Clock(heap), heap=heap)


class Worker:
    """A Session that is driven until its next update, and not further."""

    def __init__(self, agent: Agent, seed: int, env_info: EnvInfo | None = None) -> None:
        self.agent, self.env = agent, ToyEnv(env_info or info(2), seed)
        self.obs_N, self.gathered = self.env.reset(), False

    def gather(self) -> None:
        while not self.gathered:
            out = self.agent.act(self.obs_N)
            step = self.env.step(out.action_N)
            self.agent.clock.tick(self.env.info.num_envs)
            self.agent.observe(self.obs_N, out, step)
            self.obs_N, self.gathered = step.obs_N, self.agent.ready()

    def update(self) -> Metrics:
        self.gather()
        self.gathered = False
        return self.agent.update()


def gradients(agent: Agent) -> list[torch.Tensor]:
    """Filled with each gradient that the agent steps by."""
    seen: list[torch.Tensor] = []
    trainer = agent.algorithm.trainer
    assert trainer is not None
    step = trainer._step

    def spy() -> None:
        seen.append(trainer.flat.grad.clone())
        step()

    trainer._step = spy  # type: ignore[method-assign]
    return seen


def flat(agent: Agent) -> Any:
    assert agent.algorithm.trainer is not None
    return agent.algorithm.trainer.flat


# ---- optimizers


@pytest.mark.parametrize(
    ("make", "torchs"),
    [
        (lambda p, g: FlatAdam(p, g, 0.01, weight_decay=0.1), lambda p: torch.optim.Adam([p], 0.01, weight_decay=0.1, fused=True)),
        (lambda p, g: FlatRMSprop(p, g, 0.01), lambda p: torch.optim.RMSprop([p], 0.01)),
        (
            lambda p, g: FlatRMSprop(p, g, 0.01, momentum=0.9, centered=True),
            lambda p: torch.optim.RMSprop([p], 0.01, momentum=0.9, centered=True),
        ),
    ],
    ids=["adam", "rmsprop", "rmsprop centered"],
)
def test_processes_that_step_in_turn_are_one_optimizer(
    heaps: Heaps, make: Callable[[torch.Tensor, torch.Tensor], FlatOptimizer], torchs: Callable[[torch.nn.Parameter], torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    initial, grads = torch.randn(37), torch.randn(9, 37)
    sides = []
    for heap in heaps(3):
        param, grad = torch.from_numpy(heap.array(initial.numpy().copy())), torch.zeros(37)
        optimizer = make(param, grad)
        optimizer.share(heap)  # type: ignore[attr-defined]
        sides.append((optimizer, param, grad))
    alone = torch.nn.Parameter(initial.clone())
    reference = torchs(alone)
    for turn, gradient in enumerate(grads):
        optimizer, _, grad = sides[(turn * 2) % 3]
        grad.copy_(gradient)
        optimizer.step()
        alone.grad = gradient.clone()
        reference.step()
    for _, param, _ in sides:
        assert torch.equal(param, alone.detach())


# ---- gradients


def test_synced_gradients_are_applied_one_after_another(heaps: Heaps) -> None:
    """Both gradients are of the same old weights; the second is applied to what the first made, by the statistics in common."""
    workers = [Worker(session(a3c(), heap), seed) for seed, heap in enumerate(heaps())]
    alone = [Worker(session(a3c("Adam"), PRIVATE), seed) for seed in range(2)]
    grads = [gradients(worker.agent) for worker in alone]
    param = flat(alone[0].agent).param.clone()
    assert torch.equal(flat(workers[1].agent).param, param)  # drawn from the same seed

    for worker in (*workers, *alone):
        worker.gather()
    staleness = [worker.update().extra["staleness"] for worker in workers]
    for worker in alone:
        worker.update()

    grad = torch.zeros_like(param)
    by_hand = FlatAdam(param, grad, 0.01)
    for (gradient,) in grads:
        grad.copy_(gradient)
        by_hand.step()
    assert torch.equal(flat(workers[0].agent).master, param)
    assert torch.equal(flat(workers[1].agent).param, param)  # pulled
    assert not torch.equal(flat(workers[0].agent).param, param)  # has not pulled since its own
    assert staleness == [0.0, 1.0]


def test_within_a_rollout_a_synced_policy_does_not_change(heaps: Heaps) -> None:
    one, other = (Worker(session(a3c(), heap), seed) for seed, heap in enumerate(heaps()))
    obs_N = one.env.reset()
    before = one.agent.policy.net.actor(torch.from_numpy(obs_N)).detach().clone()  # type: ignore[union-attr]
    acts = one.agent.policy._fast(obs_N)  # type: ignore[misc]
    other.update()
    assert torch.equal(one.agent.policy.net.actor(torch.from_numpy(obs_N)), before)  # type: ignore[union-attr]
    one.update()
    assert not np.array_equal(one.agent.policy._fast(obs_N), acts)  # type: ignore[misc]
    assert torch.equal(flat(one.agent).param, flat(other.agent).master)


def test_every_read_of_a_shared_net_is_of_the_latest(heaps: Heaps) -> None:
    one, other = (Worker(session(a3c(), heap), seed) for seed, heap in enumerate(heaps(synced=False)))
    obs_N = one.env.reset()
    reads: dict[str, Callable[[Agent], Any]] = {
        "act": lambda agent: (agent.act(obs_N), agent.policy._fast(obs_N))[1],  # type: ignore[misc]
        "evaluator": lambda agent: (agent.evaluator(), agent.policy._fast(obs_N))[1],  # type: ignore[misc]
        "state_dict": lambda agent: agent.state_dict()["algorithm"]["trainer"]["param"].numpy(),
    }
    for name, read in reads.items():
        before = read(one.agent)
        metrics = other.update()
        assert not np.array_equal(read(one.agent), before), name
        assert np.array_equal(read(one.agent), read(other.agent)), name
        assert metrics.extra["staleness"] == 0.0  # it read the latest, and nobody came in between


def test_weights_to_keep_are_those_that_were_evaluated(heaps: Heaps) -> None:
    """What others do during an evaluation is no part of what it has judged."""
    one, other = (Worker(session(a3c(), heap), seed) for seed, heap in enumerate(heaps(synced=False)))
    other.update()
    one.agent.evaluator()
    judged = {name: weight.clone() for name, weight in other.agent.weights().items()}
    other.update()
    for name, weight in one.agent.weights().items():
        assert torch.equal(weight, judged[name]), name


def test_a_shared_gradient_is_that_of_one_net(heaps: Heaps) -> None:
    """What another Session steps between the forward and the backward pass has no part in it."""
    one, other = (Worker(session(a3c(), heap), seed) for seed, heap in enumerate(heaps(synced=False)))
    alone = Worker(session(a3c(), PRIVATE), 0)
    grads, expected = gradients(one.agent), gradients(alone.agent)
    trainer = one.agent.algorithm.trainer
    assert trainer is not None
    backward = trainer.backward

    def late(loss: torch.Tensor) -> None:
        other.update()
        backward(loss)

    trainer.backward = late  # type: ignore[method-assign]
    metrics = one.update()
    alone.update()
    assert torch.equal(grads[0], expected[0])
    assert metrics.extra["staleness"] == 1.0


def test_gradients_of_actor_and_critics_are_of_the_latest_shared_nets(heaps: Heaps) -> None:
    """Whenever another Session comes in between: what it did is no longer news to the step that follows."""
    case = Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)
    one, other = (Worker(session(case.spec(), heap, case.info()), seed, case.info()) for seed, heap in enumerate(heaps(synced=False)))
    algorithm = one.agent.algorithm
    assert isinstance(algorithm, SoftActorCritic)
    staleness = []
    trainers = {"_critic_step": algorithm.trainer, "_actor_step": algorithm.actor_trainer}

    def late(name: str) -> Callable[..., Any]:
        step, common = getattr(algorithm, name), trainers[name].common
        assert common is not None

        def wrapped(*args: Any) -> Any:
            other.update()
            result = step(*args)
            staleness.append(common.report["staleness"])
            return result

        return wrapped

    for name in trainers:
        setattr(algorithm, name, late(name))
    one.update()
    assert staleness == [0.0] * 4  # training_iter 2


def test_statistics_of_other_optimizers_are_the_sessions_own(heaps: Heaps) -> None:
    workers = [Worker(session(a3c("Adam"), heap), seed) for seed, heap in enumerate(heaps())]
    alone = Worker(session(a3c("Adam"), PRIVATE), 0)
    workers[0].update(), workers[1].update(), alone.update()
    for worker in workers:
        optimizer = worker.agent.algorithm.trainer.groups[0].optimizer  # type: ignore[union-attr]
        assert float(optimizer.statistics["step"]) == 1.0  # type: ignore[attr-defined]
    assert not torch.equal(flat(workers[0].agent).master, flat(alone.agent).param)  # the second one's step is in it too


def test_optimizers_that_look_at_shapes_step_the_global_net(heaps: Heaps) -> None:
    workers = [Worker(session(a3c("Adafactor"), heap), seed) for seed, heap in enumerate(heaps())]
    before = flat(workers[0].agent).master.clone()
    workers[0].update()
    assert not torch.equal(flat(workers[1].agent).master, before)
    assert torch.equal(flat(workers[1].agent).param, before)
    workers[1].update()
    assert torch.equal(flat(workers[1].agent).param, flat(workers[0].agent).master)


@pytest.mark.parametrize("synced", [False, True], ids=["shared", "synced"])
@pytest.mark.parametrize("algorithm", ["ActorCritic", "DQN", "SoftActorCritic"])
def test_what_is_not_finite_stays_out_of_the_global_net(
    heaps: Heaps, algorithm: str, synced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(algorithm, "OnPolicyBatchReplay" if algorithm == "ActorCritic" else "Replay", "MLPNet")
    spec = case.spec(2, {"optim_spec": {"name": "GlobalAdam", "lr": 0.01}})
    sick, well = (Worker(session(spec, heap, case.info()), seed, case.info()) for seed, heap in enumerate(heaps(synced=synced)))
    before = flat(well.agent).master.clone()
    step = sick.env.step
    sick.env.step = lambda action_N: step(action_N)._replace(reward_N=np.full(2, np.nan, np.float32))  # type: ignore[method-assign]
    for _ in range(3):
        sick.update()
    assert torch.equal(flat(well.agent).master, before)
    if isinstance(well.agent.algorithm, SoftActorCritic):
        assert well.agent.algorithm.actor_trainer.flat.master.isfinite().all()
        assert well.agent.algorithm.temperature.log_alpha.isfinite().all()
    assert [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    well.update()
    assert flat(sick.agent).master.isfinite().all()
    assert not torch.equal(flat(sick.agent).master, before)


# ---- what else is global


def test_schedules_and_the_learning_rate_count_the_frames_of_all(heaps: Heaps) -> None:
    spec = a3c(lr_scheduler_spec={"name": "LinearToZero", "frame": 100})
    one, other = (Worker(session(spec, heap), seed) for seed, heap in enumerate(heaps()))
    other.update()
    other.update()
    assert other.agent.clock.global_frame == 40
    one.update()  # 20 frames of its own
    assert one.agent.clock.frame == 20
    assert one.agent.clock.global_frame == 60
    assert one.agent.lr == pytest.approx(0.01 * 0.4)


def test_centred_rmsprop_stands_another_in_between() -> None:
    """As where a process has shrunk the mean square, and not yet taken in its gradient."""
    param, grad = torch.zeros(1), torch.ones(1)
    optimizer = FlatRMSprop(param, grad, 0.01, centered=True)
    for _ in range(2000):
        optimizer.step()
    optimizer.statistics["square"].mul_(0.9)
    grad.fill_(0.5)
    optimizer.step()
    assert param.isfinite().all()


def test_a_new_process_is_not_stale(heaps: Heaps) -> None:
    first, second = heaps()
    one, other = (Worker(session(a3c(), heap), seed) for seed, heap in enumerate((first, second)))
    for _ in range(5):
        one.update(), other.update()
    again = Worker(session(a3c(), CommonHeap(second.fd, 1, 2, synced=True, fresh=False)), 7)
    assert torch.equal(flat(again.agent).param, flat(one.agent).master)
    assert again.update().extra["staleness"] == 0.0


def test_a_session_goes_on_from_the_count_of_the_one_before(heaps: Heaps) -> None:
    first, second = heaps()
    clock, other = Clock(first), Clock(second)
    clock.begin()
    clock.tick(8)
    other.tick(4)
    after = Clock(CommonHeap(first.fd, 0, 2, synced=True, fresh=False))
    after.begin()
    assert (after.frame, after.prev_frame, after.global_frame) == (8, 8, 12)
    assert after.wall_t >= clock.wall_t - 0.01


def test_a_new_process_leaves_the_global_net_as_it_is(heaps: Heaps) -> None:
    case = Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)
    spec = case.spec(2, {"optim_spec": {"name": "GlobalAdam", "lr": 0.01}})
    first, second = heaps(synced=False)
    workers = [Worker(session(spec, heap, case.info()), seed, case.info()) for seed, heap in enumerate((first, second))]
    for _ in range(4):
        for worker in workers:
            worker.update()
    trained = workers[0].agent.state_dict()["algorithm"]
    again = session(spec, CommonHeap(second.fd, 1, 2, synced=False, fresh=False), case.info())
    state = again.state_dict()["algorithm"]
    for part in ("trainer", "actor_trainer", "critics", "temperature"):
        assert str(state[part]) == str(trained[part]), part


@pytest.mark.parametrize("update_type", ["replace", "polyak"])
def test_target_nets_follow_once_for_all(heaps: Heaps, update_type: str) -> None:
    case = Case("DQN", "Replay", "MLPNet")
    spec = case.spec(2, {"update_type": update_type, "update_frequency": 16, "polyak_coef": 0.5})
    one, other = (session(spec, heap, case.info()).algorithm for heap in heaps())
    assert one.target is not None
    assert other.target is not None
    assert one.trainer is not None
    zero = one.target.flat.param.clone()
    one.trainer.flat.master.add_(1.0)
    one.target.follow(15)
    assert torch.equal(other.target.flat.param, zero)
    one.target.follow(16)
    other.target.follow(17)
    other.target.follow(31)
    expected = zero + (1.0 if update_type == "replace" else 0.5)
    assert torch.allclose(one.target.flat.param, expected)
    assert torch.equal(other.target.flat.param, one.target.flat.param)
    assert (one.target.followed, other.target.followed) == (1, 1)
    other.target.follow(64)
    assert torch.allclose(one.target.flat.param, zero + (1.0 if update_type == "replace" else 1.0 - 0.5**4))


def test_alpha_is_global(heaps: Heaps) -> None:
    case = Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)
    one, other = (Worker(session(case.spec(), heap, case.info()), seed, case.info()) for seed, heap in enumerate(heaps()))
    one.update()
    assert isinstance(one.agent.algorithm, SoftActorCritic)
    assert isinstance(other.agent.algorithm, SoftActorCritic)
    assert other.agent.algorithm.temperature.value(0) == one.agent.algorithm.temperature.value(0) != 1.0
    assert float(other.agent.algorithm.temperature.optimizer.statistics["step"]) == 2.0  # training_iter of the one


def test_batch_norm_statistics_are_global(heaps: Heaps) -> None:
    spec = a3c(batch_norm=True)
    one, other = (Worker(session(spec, heap), seed) for seed, heap in enumerate(heaps()))
    before = flat(other.agent).buffer.clone()
    one.update()
    after = flat(one.agent).buffer.clone()
    assert not torch.equal(after, before)
    assert torch.equal(flat(other.agent).master_buffer, after)
    assert torch.equal(flat(other.agent).buffer, before)  # its policy stays as it is within a rollout
    other.update()
    assert torch.equal(flat(one.agent).master_buffer, flat(other.agent).buffer)
    assert not torch.equal(flat(other.agent).buffer, after)


@pytest.mark.parametrize("synced", [True, False])
def test_batch_statistics_are_the_mean_over_sessions(synced: bool, heaps: Heaps) -> None:
    """By hand: of three updates that began from the same statistics, each stale one adds its change divided by their number so far."""
    agents = [session(a3c(batch_norm=True), heap) for heap in heaps(3, synced=synced)]
    nets = [agent.algorithm.trainer.common for agent in agents]  # type: ignore[union-attr]
    base = flat(agents[0]).master_buffer.clone()
    changes = [torch.full_like(base, value) for value in (0.5, -0.25, 1.0)]
    for net in nets:
        assert net is not None
        net.refresh()
    for net, change in zip(nets, changes, strict=True):
        assert net is not None
        net.flat.buffer.add_(change)
        net.push(lambda: None, 1.0)
        assert torch.equal(net.flat.buffer, net.flat.master_buffer), "pulled"
    expected = base + 0.5 - 0.25 / 2 + 1.0 / 3
    assert torch.allclose(flat(agents[0]).master_buffer, expected)


def test_stale_batch_statistics_stay_within_bounds(heaps: Heaps) -> None:
    """A variance that all workers see as small does not become negative, however stale their updates are."""
    agents = [session(a3c(batch_norm=True), heap) for heap in heaps(16)]
    nets = [agent.algorithm.trainer.common for agent in agents]  # type: ignore[union-attr]
    for _ in range(20):
        for net in nets:
            assert net is not None
            net.flat.buffer.lerp_(torch.full_like(net.flat.buffer, 1e-3), 0.1)  # as batch norm does, from the statistics of its last pull
        for net in nets:
            assert net is not None
            net.push(lambda: None, 1.0)
            assert (net.flat.master_buffer > -1e-6).all()
    assert (flat(agents[0]).master_buffer < 0.5).all()


def test_batch_statistics_that_are_not_finite_stay_out(heaps: Heaps) -> None:
    sick, well = (Worker(session(a3c(batch_norm=True), heap), seed) for seed, heap in enumerate(heaps(synced=False)))
    sick.gather()
    memory = sick.agent.algorithm.memory
    rollout = memory.rollout()  # type: ignore[union-attr]
    rollout.obs_TN[2] = torch.nan
    before = flat(well.agent).master_buffer.clone()
    assert not math.isfinite(sick.agent.algorithm.learn(rollout).loss)
    assert torch.equal(flat(well.agent).master_buffer, before)
    assert torch.equal(flat(sick.agent).buffer, before)
    assert math.isfinite(well.update().loss)


def test_normaliser_statistics_are_those_of_all_samples(heaps: Heaps) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(3.0, 2.0, (5, 4)) for _ in range(7)]
    sides = [RunningStats((4,), heap) for heap in heaps(3)]
    alone = RunningStats((4,))
    for index, batch in enumerate(batches):
        sides[index % 3].update(batch)
        alone.update(batch)
    sides[0].update(np.full((1, 4), np.nan))
    for stats in sides:
        assert stats.count == 35
        np.testing.assert_array_equal(stats.mean, alone.mean)
        np.testing.assert_array_equal(stats.m2, alone.m2)
    np.testing.assert_array_equal(sides[0].inv_std, alone.inv_std)  # it took in the last batch


def test_scales_of_returns_are_global(heaps: Heaps) -> None:
    first, second = heaps()
    one, other, alone = RunningScale(first), RunningScale(second), RunningScale()
    valid = torch.ones(4, 2, dtype=torch.bool)
    for index in range(6):
        returns = torch.full((4, 2), float(index)) + torch.arange(2)
        (one, other)[index % 2].update(returns, valid)
        alone.update(returns, valid)
    one.update(torch.full((4, 2), torch.inf), valid)
    assert one.state_dict() == other.state_dict() == alone.state_dict()
    assert (one.mean, one.std) == (alone.mean, alone.std)
    sides = PercentileScale(first), PercentileScale(second)
    sides[0](torch.ones(3), torch.arange(100.0))
    sides[1](torch.ones(3), torch.full((5,), torch.inf))
    assert sides[1].range == sides[0].range == pytest.approx(89.1)


def test_the_annealing_of_the_target_entropy_ends_with_the_frames_of_all(heaps: Heaps) -> None:
    case = Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)
    agents = [session(case.spec(), heap, case.info()) for heap in heaps()]
    assert isinstance(agents[0].algorithm, SoftActorCritic)
    assert agents[0].algorithm.temperature.max_frame == 2 * case.info().max_frame
    agents[1].clock.frame = 4096
    agents[1].clock.tick(4)
    agents[0].clock.tick(4)
    assert agents[0].algorithm._frames()[-1] == 4104
