"""Tests of parameters that several processes share: each step is checked, with all processes simulated in one process."""

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
from slm_lab.agent.algorithm.value_scale import PercentileScale, ValueTargetDeviation
from slm_lab.agent.build import build_agent
from slm_lab.agent.net.passes.direct import GraphFreePass
from slm_lab.agent.optim.optimizers import FlatAdam, FlatOptimizer, FlatRMSprop, shared_statistics
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import EnvInfo, Metrics
from slm_lab.lib.rng import session_seeds
from slm_lab.lib.store import Arrays, Named, SharedArray, SharedArrays, create_shared_file
from slm_lab.spec.models.algorithm import EntropyAnneal
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import Acting, ToyEnv, changed, info
from tests.contract.combinations import Case

Stores = Callable[..., list[SharedArrays]]


@pytest.fixture
def stores() -> Iterator[Stores]:
    """Return a function: stores(n, synced=…) returns the views that n processes have of one new shared file."""
    files: list[int] = []

    def make(count: int = 2, synced: bool = True, **keys: Any) -> list[SharedArrays]:
        files.append(create_shared_file())
        return [SharedArrays(files[-1], index, count, synced=synced, **keys) for index in range(count)]

    yield make
    for fd in files:
        os.close(fd)


def a3c(optimizer: str = "GlobalAdam", **net: Any) -> Spec:
    case = Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet")
    return case.spec(2, {"optim_spec": {"name": optimizer, "lr": 0.01}, **net})


def session(spec: Spec, store: SharedArrays | None, env_info: EnvInfo | None = None) -> Agent:
    clock = Clock()
    agent = build_agent(spec, env_info or info(2), session_seeds(0, 0, 0), clock)
    if store is not None:
        store.attach({"agent": agent, "clock": clock})
    return agent


class Worker:
    """Session that is run up to its next update by `gather`, and through this update by `update`."""

    def __init__(self, agent: Agent, seed: int, env_info: EnvInfo | None = None) -> None:
        self.agent, self.env = agent, ToyEnv(env_info or info(2), seed)
        self.obs_N, self.gathered = self.env.reset(), False
        self.acting = Acting(agent, self.env.info.num_envs)

    def gather(self) -> None:
        while not self.gathered:
            out = self.acting.act(self.obs_N)
            step = self.env.step(out.action_N)
            self.agent.clock.tick(self.env.info.num_envs)
            self.acting.observe(self.obs_N, out, step)
            self.obs_N, self.gathered = step.obs_N, self.agent.ready()
            if not self.gathered:
                self.agent.end_step()

    def update(self) -> Metrics:
        self.gather()
        self.gathered = False
        metrics = self.agent.update()
        self.agent.end_step()
        return metrics


def gradients(agent: Agent) -> list[torch.Tensor]:
    """Return a list to which each gradient that the agent steps with is appended."""
    seen: list[torch.Tensor] = []
    trainer = agent.algorithm.trainer
    step = trainer._step

    def spy() -> None:
        seen.append(trainer.flat.grad.clone())
        step()

    trainer._step = spy  # type: ignore[method-assign]
    return seen


def flat(agent: Agent) -> Any:
    return agent.algorithm.trainer.flat


# ---- optimizers


class Stepped:
    """Parameter with an optimizer whose statistics are shared."""

    def __init__(self, param: torch.Tensor, make: Callable[[torch.Tensor, torch.Tensor], FlatOptimizer]) -> None:
        self.param, self.grad, self.make = param, torch.zeros_like(param), make
        self.optimizer = make(param, self.grad)

    def shared_arrays(self) -> Named:
        return {"param": SharedArray(self.param.numpy(), "step"), **shared_statistics(self.optimizer.statistics)}

    def attach(self, store: SharedArrays, arrays: Arrays) -> None:
        self.param = torch.from_numpy(arrays["param"])
        self.optimizer = self.make(self.param, self.grad)
        self.optimizer.use_statistics(arrays)


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
    stores: Stores,
    make: Callable[[torch.Tensor, torch.Tensor], FlatOptimizer],
    torchs: Callable[[torch.nn.Parameter], torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    initial, grads = torch.randn(37), torch.randn(9, 37)
    sides = []
    for store in stores(3):
        part = Stepped(initial.clone(), make)
        store.attach({"part": part})
        sides.append(part)
    alone = torch.nn.Parameter(initial.clone())
    reference = torchs(alone)
    for turn, gradient in enumerate(grads):
        part = sides[(turn * 2) % 3]
        part.grad.copy_(gradient)
        part.optimizer.step()
        alone.grad = gradient.clone()
        reference.step()
    for part in sides:
        assert torch.equal(part.param, alone.detach())


# ---- gradients


def test_synced_gradients_are_applied_one_after_another(stores: Stores) -> None:
    """Both gradients are computed from the same old weights. The second is applied to the result of the first, with shared statistics."""
    workers = [Worker(session(a3c(), store), seed) for seed, store in enumerate(stores())]
    alone = [Worker(session(a3c("Adam"), None), seed) for seed in range(2)]
    grads = [gradients(worker.agent) for worker in alone]
    param = flat(alone[0].agent).param.clone()
    assert torch.equal(flat(workers[1].agent).param, param)  # initialised with the same seed

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
    assert torch.equal(flat(workers[1].agent).param, param)  # worker 1 has pulled the latest parameters
    assert not torch.equal(flat(workers[0].agent).param, param)  # worker 0 has not pulled since its own update
    assert staleness == [0.0, 1.0]


def test_within_a_rollout_a_synced_policy_does_not_change(stores: Stores) -> None:
    one, other = (Worker(session(a3c(), store), seed) for seed, store in enumerate(stores()))
    obs_N = one.env.reset()
    before = one.agent.policy.net.actor(torch.from_numpy(obs_N)).detach().clone()  # type: ignore[union-attr]
    acts = one.agent.policy._numpy_actor(obs_N)  # type: ignore[misc]
    other.update()
    assert torch.equal(one.agent.policy.net.actor(torch.from_numpy(obs_N)), before)  # type: ignore[union-attr]
    one.update()
    assert not np.array_equal(one.agent.policy._numpy_actor(obs_N), acts)  # type: ignore[misc]
    assert torch.equal(flat(one.agent).param, flat(other.agent).master)


def test_every_read_of_a_shared_net_is_of_the_latest(stores: Stores) -> None:
    one, other = (Worker(session(a3c(), store), seed) for seed, store in enumerate(stores(synced=False)))
    obs_N = one.env.reset()
    reads: dict[str, Callable[[Agent], Any]] = {
        "act": lambda agent: (agent.act(obs_N), agent.policy._numpy_actor(obs_N))[1],  # type: ignore[misc]
        "evaluator": lambda agent: (agent.action_function(), agent.policy._numpy_actor(obs_N))[1],  # type: ignore[misc]
    }
    for name, read in reads.items():
        before = read(one.agent)
        metrics = other.update()
        assert not np.array_equal(read(one.agent), before), name
        assert np.array_equal(read(one.agent), read(other.agent)), name
        assert metrics.extra["staleness"] == 0.0  # no other update since it read the parameters


def test_weights_to_keep_are_those_that_were_evaluated(stores: Stores) -> None:
    """The weights to save are those that were evaluated, even if another process updates the net during the evaluation."""
    one, other = (Worker(session(a3c(), store), seed) for seed, store in enumerate(stores(synced=False)))
    other.update()
    one.agent.action_function()
    judged = {name: weight.clone() for name, weight in other.agent.weights().items()}
    other.update()
    for name, weight in one.agent.weights().items():
        assert torch.equal(weight, judged[name]), name


def test_a_shared_gradient_is_that_of_one_net(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of another Session between the forward and the backward pass does not affect the gradient."""
    one, other = (Worker(session(a3c(), store), seed) for seed, store in enumerate(stores(synced=False)))
    alone = Worker(session(a3c(), None), 0)
    grads, expected = gradients(one.agent), gradients(alone.agent)
    backward = GraphFreePass.backward

    def late(graph_free_pass: GraphFreePass, *grads: np.ndarray) -> None:
        monkeypatch.setattr(GraphFreePass, "backward", backward)
        other.update()
        backward(graph_free_pass, *grads)

    monkeypatch.setattr(GraphFreePass, "backward", late)
    metrics = one.update()
    alone.update()
    assert torch.equal(grads[0], expected[0])
    assert metrics.extra["staleness"] == 1.0


def test_gradients_of_actor_and_critics_are_of_the_latest_shared_nets(stores: Stores) -> None:
    """Each step of critics and actor starts from the latest shared nets, so an earlier update of another Session causes no staleness."""
    case = Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)
    one, other = (Worker(session(case.spec(), store, case.info()), seed, case.info()) for seed, store in enumerate(stores(synced=False)))
    algorithm = one.agent.algorithm
    assert isinstance(algorithm, SoftActorCritic)
    staleness = []
    trainers = {"_critic_step": algorithm.trainer, "_actor_step": algorithm.actor_trainer}

    def late(name: str) -> Callable[..., Any]:
        step, common = getattr(algorithm, name), trainers[name].shared

        def wrapped(*args: Any) -> Any:
            other.update()
            result = step(*args)
            staleness.append(common.report["staleness"])
            return result

        return wrapped

    for name in trainers:
        setattr(algorithm, name, late(name))
    one.update()
    assert staleness == [0.0] * 4  # two iterations (training_iter 2) of both steps


def test_a_gradient_of_weights_that_a_snapshot_has_replaced_is_not_stale(stores: Stores) -> None:
    """A parameter server restored from a snapshot may count fewer updates than its Sessions have pulled; the staleness is then 0."""
    (store,) = stores(1)
    trainer = session(a3c(), store).algorithm.trainer
    grad = np.ones(trainer.flat.size, np.float32)
    assert [trainer.step_with_remote_gradient(grad, [0.01], (), pulled) for pulled in (7, 1, 0, 1)] == [0.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize(("anneal", "frames"), [(EntropyAnneal(end_ratio=0.2, frames=80), 80), (True, 20_000)])
def test_the_target_entropy_of_a_shared_policy_is_annealed_over_global_frames(
    stores: Stores, anneal: EntropyAnneal | bool, frames: int
) -> None:
    """With two Sessions of 10,000 frames, annealing lasts all 20,000 frames by default, otherwise the number of frames in the spec."""
    case = Case("SoftActorCritic", "Replay", "MLPNet")
    spec = changed(case.spec(), algorithm={"entropy_anneal": anneal})
    temperature = session(spec, stores()[0], case.info()).algorithm.temperature
    begin, middle, end, later = (temperature.target_entropy(frame) for frame in (0, frames // 2, frames, 2 * frames))
    assert begin > middle == pytest.approx((begin + end) / 2)
    assert begin > end == later


def test_statistics_of_other_optimizers_are_the_sessions_own(stores: Stores) -> None:
    workers = [Worker(session(a3c("Adam"), store), seed) for seed, store in enumerate(stores())]
    alone = Worker(session(a3c("Adam"), None), 0)
    workers[0].update(), workers[1].update(), alone.update()
    for worker in workers:
        optimizer = worker.agent.algorithm.trainer.groups[0].optimizer  # type: ignore[union-attr]
        assert float(optimizer.statistics["step"]) == 1.0  # type: ignore[attr-defined]
    assert not torch.equal(flat(workers[0].agent).master, flat(alone.agent).param)  # it also contains the step of the second worker


def test_optimizers_that_look_at_shapes_step_the_global_net(stores: Stores) -> None:
    workers = [Worker(session(a3c("Adafactor"), store), seed) for seed, store in enumerate(stores())]
    before = flat(workers[0].agent).master.clone()
    workers[0].update()
    assert not torch.equal(flat(workers[1].agent).master, before)
    assert torch.equal(flat(workers[1].agent).param, before)
    workers[1].update()
    assert torch.equal(flat(workers[1].agent).param, flat(workers[0].agent).master)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("synced", [False, True], ids=["shared", "synced"])
@pytest.mark.parametrize("algorithm", ["ActorCritic", "DQN", "SoftActorCritic"])
def test_what_is_not_finite_stays_out_of_the_global_net(
    stores: Stores, algorithm: str, synced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(algorithm, "OnPolicyBatchReplay" if algorithm == "ActorCritic" else "Replay", "MLPNet")
    spec = case.spec(2, {"optim_spec": {"name": "GlobalAdam", "lr": 0.01}})
    sick, well = (Worker(session(spec, store, case.info()), seed, case.info()) for seed, store in enumerate(stores(synced=synced)))
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


# ---- other shared state


def test_schedules_and_the_learning_rate_count_the_frames_of_all(stores: Stores) -> None:
    spec = a3c(lr_scheduler_spec={"name": "LinearToZero", "frame": 100})
    one, other = (Worker(session(spec, store), seed) for seed, store in enumerate(stores()))
    other.update()
    other.update()
    assert other.agent.clock.global_frame == 40
    one.update()  # this worker has run 20 frames
    assert one.agent.clock.frame == 20
    assert one.agent.clock.global_frame == 60
    assert one.agent.lr == pytest.approx(0.01 * 0.4)


def test_centred_rmsprop_stands_another_in_between() -> None:
    """Steps stay finite if another process has decayed the mean square but not yet added its gradient to it."""
    param, grad = torch.zeros(1), torch.ones(1)
    optimizer = FlatRMSprop(param, grad, 0.01, centered=True)
    for _ in range(2000):
        optimizer.step()
    optimizer.statistics["square"].mul_(0.9)
    grad.fill_(0.5)
    optimizer.step()
    assert param.isfinite().all()


def test_a_new_process_is_not_stale(stores: Stores) -> None:
    first, second = stores()
    one, other = (Worker(session(a3c(), store), seed) for seed, store in enumerate((first, second)))
    for _ in range(5):
        one.update(), other.update()
    again = Worker(session(a3c(), SharedArrays(second.fd, 1, 2, synced=True, fresh=False)), 7)
    assert torch.equal(flat(again.agent).param, flat(one.agent).master)
    assert again.update().extra["staleness"] == 0.0


def test_a_session_goes_on_from_the_count_of_the_one_before(stores: Stores) -> None:
    first, second = stores()
    clock, other, after = Clock(), Clock(), Clock()
    first.attach({"clock": clock})
    second.attach({"clock": other})
    clock.begin()
    clock.tick(8)
    other.tick(4)
    SharedArrays(first.fd, 0, 2, synced=True, fresh=False).attach({"clock": after})
    after.begin()
    assert (after.frame, after.prev_frame, after.global_frame) == (8, 8, 12)
    assert after.wall_t >= clock.wall_t - 0.01
    after.advance_wall_time_to(50.0)
    assert 50.0 <= after.wall_t < 51.0
    after.advance_wall_time_to(10.0)
    assert after.wall_t >= 50.0


def test_a_new_process_leaves_the_global_net_as_it_is(stores: Stores) -> None:
    case = Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)
    spec = case.spec(2, {"optim_spec": {"name": "GlobalAdam", "lr": 0.01}})
    first, second = stores(synced=False)
    workers = [Worker(session(spec, store, case.info()), seed, case.info()) for seed, store in enumerate((first, second))]
    for _ in range(4):
        for worker in workers:
            worker.update()
    trained = workers[0].agent.state_dict()["algorithm"]
    again = session(spec, SharedArrays(second.fd, 1, 2, synced=False, fresh=False), case.info())
    state = again.state_dict()["algorithm"]
    for part in ("trainer", "actor_trainer", "target", "temperature"):
        assert str(state[part]) == str(trained[part]), part


def both_q_learners(stores: Stores, **net: Any) -> list[Any]:
    case = Case("DQN", "Replay", "MLPNet")
    return [session(case.spec(2, net), store, case.info()).algorithm for store in stores()]


def test_a_target_net_is_replaced_once_for_all(stores: Stores) -> None:
    one, other = both_q_learners(stores, update_type="replace", update_frequency=16)
    zero = one.target.flat.param.clone()
    one.trainer.flat.master.add_(1.0)
    for ticks, worker in enumerate([one, other] * 4):  # 4 frames each: the multiple 16 is crossed once
        assert torch.equal(one.target.flat.param, zero) == (4 * ticks < 16)
        worker.clock.tick(4)
        worker.end_step()
        one.target.pull_if_outdated()
        if ticks == 3:
            one.trainer.flat.master.add_(1.0)  # after the copy, so not part of it
        if ticks == 6:
            break
    assert torch.allclose(one.target.flat.param, zero + 1.0)
    other.target.pull_if_outdated()
    assert torch.equal(other.target.flat.param, one.target.flat.param)
    assert (one.target.updates_done, other.target.updates_done) == (1, 1)


def test_each_worker_moves_the_target_net_by_polyak(stores: Stores) -> None:
    one, other = both_q_learners(stores, update_type="polyak", polyak_coef=0.5)
    zero = one.target.flat.param.clone()
    one.trainer.flat.master.add_(1.0)
    for worker in (one, other, one):
        worker.end_step()
    other.target.pull_if_outdated()
    assert torch.allclose(one.target.flat.param, zero + 1.0 - 0.5**3)
    assert torch.equal(other.target.flat.param, one.target.flat.param)
    assert (one.target.updates_done, other.target.updates_done) == (3, 3)


def test_alpha_is_global(stores: Stores) -> None:
    case = Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)
    one, other = (Worker(session(case.spec(), store, case.info()), seed, case.info()) for seed, store in enumerate(stores()))
    one.update()
    assert isinstance(one.agent.algorithm, SoftActorCritic)
    assert isinstance(other.agent.algorithm, SoftActorCritic)
    assert other.agent.algorithm.temperature.value(0) == one.agent.algorithm.temperature.value(0) != 1.0
    assert float(other.agent.algorithm.temperature.optimizer.statistics["step"]) == 2.0  # two updates (training_iter 2) of the first worker


def test_batch_norm_statistics_are_global(stores: Stores) -> None:
    spec = a3c(batch_norm=True)
    one, other = (Worker(session(spec, store), seed) for seed, store in enumerate(stores()))
    before = flat(other.agent).buffer.clone()
    one.update()
    after = flat(one.agent).buffer.clone()
    assert not torch.equal(after, before)
    assert torch.equal(flat(other.agent).master_buffer, after)
    assert torch.equal(flat(other.agent).buffer, before)  # the policy does not change within a rollout
    other.update()
    assert torch.equal(flat(one.agent).master_buffer, flat(other.agent).buffer)
    assert not torch.equal(flat(other.agent).buffer, after)


@pytest.mark.parametrize("synced", [True, False])
def test_batch_statistics_are_the_mean_over_sessions(synced: bool, stores: Stores) -> None:
    """Three updates start from the same statistics. The change of the n-th update is divided by n before it is added."""
    agents = [session(a3c(batch_norm=True), store) for store in stores(3, synced=synced)]
    nets = [agent.algorithm.trainer.shared for agent in agents]  # type: ignore[union-attr]
    base = flat(agents[0]).master_buffer.clone()
    changes = [torch.full_like(base, value) for value in (0.5, -0.25, 1.0)]
    for net in nets:
        net.pull_if_outdated()
    for net, change in zip(nets, changes, strict=True):
        net.flat.buffer.add_(change)
        with net.update_context():
            pass
        assert torch.equal(net.flat.buffer, net.flat.master_buffer), "pulled"
    expected = base + 0.5 - 0.25 / 2 + 1.0 / 3
    assert torch.allclose(flat(agents[0]).master_buffer, expected)


def test_stale_batch_statistics_stay_within_bounds(stores: Stores) -> None:
    """If all workers see a small variance, the shared variance does not become negative, however stale their updates are."""
    agents = [session(a3c(batch_norm=True), store) for store in stores(16)]
    nets = [agent.algorithm.trainer.shared for agent in agents]  # type: ignore[union-attr]
    for _ in range(20):
        for net in nets:
            net.flat.buffer.lerp_(torch.full_like(net.flat.buffer, 1e-3), 0.1)  # as batch norm does, from the last pulled statistics
        for net in nets:
            with net.update_context():
                pass
            assert (net.flat.master_buffer > -1e-6).all()
    assert (flat(agents[0]).master_buffer < 0.5).all()


def test_batch_statistics_that_are_not_finite_stay_out(stores: Stores) -> None:
    sick, well = (Worker(session(a3c(batch_norm=True), store), seed) for seed, store in enumerate(stores(synced=False)))
    sick.gather()
    memory = sick.agent.algorithm.memory
    rollout = memory.rollout()  # type: ignore[union-attr]
    rollout.obs_TN[2] = torch.nan
    before = flat(well.agent).master_buffer.clone()
    assert not math.isfinite(sick.agent.algorithm.learn(rollout).loss)
    assert torch.equal(flat(well.agent).master_buffer, before)
    assert torch.equal(flat(sick.agent).buffer, before)
    assert math.isfinite(well.update().loss)


def test_scales_of_returns_are_global(stores: Stores) -> None:
    one, other, alone = ValueTargetDeviation(), ValueTargetDeviation(), ValueTargetDeviation()
    sides = PercentileScale(), PercentileScale()
    for store, scale, percentile in zip(stores(), (one, other), sides, strict=True):
        store.attach({"scale": scale, "percentile": percentile})
    for index in range(6):
        returns = torch.full((8,), float(index)) + torch.arange(8)
        (one, other)[index % 2].update(returns)
        alone.update(returns)
    one.update(torch.full((8,), torch.inf))
    assert one.numbers.tolist() == other.numbers.tolist() == alone.numbers.tolist()
    assert one.state_dict() == sides[0].state_dict() == {}, "saved with the shared arrays"
    assert one.std == alone.std > 2.0
    sides[0](torch.arange(100.0))
    sides[1](torch.full((5,), torch.inf))
    assert sides[1].percentile_range == sides[0].percentile_range == pytest.approx(0.01 * 89.1)


def test_the_annealing_of_the_target_entropy_ends_with_the_frames_of_all(stores: Stores) -> None:
    case = Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)
    agents = [session(case.spec(), store, case.info()) for store in stores()]
    assert isinstance(agents[0].algorithm, SoftActorCritic)
    assert agents[0].algorithm.temperature.anneal_frames == 2 * case.info().max_frame
    agents[1].clock.frame = 4096
    agents[1].clock.tick(4)
    agents[0].clock.tick(4)
    assert agents[0].clock.global_frame == 4104


def test_training_calls_of_all_workers_are_counted(stores: Stores) -> None:
    """A torch scheduler steps once per training call of any worker. A restarted worker continues from the shared count."""
    spec = a3c(lr_scheduler_spec={"name": "ExponentialLR", "gamma": 0.9})
    one, other = stores(2)
    workers = [Worker(session(spec, store), seed) for seed, store in enumerate((one, other))]
    found = []
    for turn in (0, 1, 1, 0, 1):
        workers[turn].gather()
        workers[turn].agent.update()
        workers[turn].gathered = False
        found.append(workers[turn].agent.lr)
    assert found == pytest.approx([0.01 * 0.9**count for count in range(5)])
    again = Worker(session(spec, SharedArrays(one.fd, 0, 2, synced=True, fresh=False)), 0)
    again.gather()
    again.agent.update()
    assert again.agent.lr == pytest.approx(0.01 * 0.9**5)
    assert not any(name.endswith("calls") for name in session(a3c(), None).shared_arrays())
