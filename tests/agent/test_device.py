"""Tests of the code paths for CUDA devices, run on the CPU: same results, and no waiting for the device within an update."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.base import check_rollout_memory
from slm_lab.agent.build import build_agent
from slm_lab.agent.net.normalization import BatchRenorm1d
from slm_lab.agent.ops import device as devices
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.replay.replay import check_replay_memory
from slm_lab.lib.clock import Clock
from slm_lab.lib.rng import session_seeds
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.spec.models.net import MLPNetSpec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import ToyEnv, agent_of, changed, drive, drive_on, info, reloaded, steps_of
from tests.agent.helpers import spec as toy_spec
from tests.contract.combinations import Case

ARC = {"modules": {"body": {"Sequential": [{"LazyBatchRenorm1d": {}}, {"LazyLinear": {"out_features": 7}}, {"Tanh": None}]}}}
ODD = {"hid_layers": [7]}
"""Layer sizes for which later parameters do not begin at multiples of 16 bytes."""
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "reinforce": (Case("Reinforce", "OnPolicyReplay", "MLPNet"), ODD),
    "a2c": (
        Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet"),
        ODD | {"clip_grad_val": 0.5, "optim_spec": {"name": "RMSprop", "lr": 0.01}},
    ),
    "ppo": (Case("PPO", "OnPolicyBatchReplay", "MLPNet", continuous=True), ODD | {"log_std_init": 0.0, "clip_grad_val": 0.1}),
    "ppo_two_optimizers": (Case("PPO", "OnPolicyBatchReplay", "MLPNet"), ODD | {"use_same_optim": False, "clip_grad_val": 0.1}),
    "ppo_recurrent": (Case("PPO", "OnPolicyBatchReplay", "RecurrentNet"), {"rnn_hidden_size": 5, "cell_type": "LSTM"}),
    "sil": (Case("SIL", "OnPolicyBatchReplay", "MLPNet"), ODD),
    "sarsa": (Case("SARSA", "OnPolicyBatchReplay", "RecurrentNet"), {"rnn_hidden_size": 5}),
    "dqn": (Case("DQN", "Replay", "MLPNet"), ODD),
    "dqn_images": (Case("DQN", "Replay", "ConvNet"), {"normalize": True, "optim_spec": {"name": "SGD", "lr": 0.1}}),
    "ddqn_per": (Case("DoubleDQN", "PrioritizedReplay", "DuelingMLPNet"), ODD | {"optim_spec": {"name": "AdamW", "lr": 0.01}}),
    "sac": (Case("SoftActorCritic", "Replay", "MLPNet", continuous=True), ODD | {"clip_grad_val": 0.5}),
    "sac_discrete": (Case("SoftActorCritic", "Replay", "MLPNet"), ODD),
    "crossq": (Case("CrossQ", "Replay", "TorchArcNet", continuous=True), {"arc": ARC}),
}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the code paths for CUDA devices."""
    monkeypatch.setattr(devices, "ON_CPU", True)


def build(name: str, on_device: bool = False) -> Agent:
    case, net = CASES[name]
    return agent_of(changed(case.spec(2, net), memory={"on_device": True} if on_device else {}), case.info())


def learn(agent: Agent, name: str, steps: int = 40, seed: int = 1) -> list[Any]:
    return drive(agent, ToyEnv(CASES[name][0].info(), seed), steps)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_updates_are_the_same_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update is equal on the CPU and with the code paths for CUDA devices.

    Each update starts from equal weights, because rounding differences grow along a trajectory by an amount that depends on the processor.
    """
    here = build(name)
    monkeypatch.setattr(devices, "ON_CPU", True)
    there = build(name, on_device=CASES[name][0].memory in ("Replay", "PrioritizedReplay"))
    drives = [drive_on(agent, ToyEnv(CASES[name][0].info(), 1)) for agent in (here, there)]
    updates = 0
    for _ in range(40):
        found = []
        for steps, on in zip(drives, (False, True), strict=True):
            monkeypatch.setattr(devices, "ON_CPU", on)
            found.append(next(steps))
        one, other = found
        if one is None:
            assert other is None
            continue
        updates += 1
        assert one.extra.keys() == other.extra.keys()
        a, b = ((m.loss, m.grad_norm, m.entropy or 0.0, *m.extra.values()) for m in (one, other))
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert all(isinstance(value, float) for value in b)
        for key, value in here.weights().items():
            assert torch.allclose(value, there.weights()[key], rtol=1e-5, atol=1e-5), key
        there.load_state_dict(here.state_dict())
    assert updates >= 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_go_there_and_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved state has the same shapes for every device, and an agent on another device can load it."""
    here = build(name)
    learn(here, name)
    saved = reloaded(here.state_dict())
    monkeypatch.setattr(devices, "ON_CPU", True)
    agent = build(name)
    agent.load_state_dict(saved)
    back = reloaded(agent.state_dict())
    assert shapes(back) == shapes(saved)
    monkeypatch.setattr(devices, "ON_CPU", False)
    again = build(name)
    again.load_state_dict(back)
    assert repr(again.state_dict()) == repr(here.state_dict())


def shapes(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: shapes(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [shapes(value) for value in state]
    return state.shape if isinstance(state, Tensor) else type(state)


class Waits(TorchDispatchMode):
    """Counts the operations for which the host waits: reading a scalar, and results whose shapes depend on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in flattened(args[1:]))
        if name in self.NAMES or (masks and args[0].dim() and not isinstance(args[-1], float)):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def flattened(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list | tuple):
            yield from flattened(item)
        else:
            yield item


def waits_of_update(agent: Agent, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the number of waits and of gradient steps of one update. `.numpy()` and `.cpu()` count as waits, also for host data."""
    learn(agent, name)
    next(None for _ in steps_of(agent, ToyEnv(CASES[name][0].info(), 3)) if agent.ready())
    before, copies = agent.clock.opt_step, 0

    def counted(method: Any) -> Any:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal copies
            copies += 1
            return method(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch, Waits() as waits:
        for method in ("numpy", "cpu"):
            patch.setattr(Tensor, method, counted(getattr(Tensor, method)))
        agent.update()
    return sum(waits.found.values()) + copies, agent.clock.opt_step - before


MINIBATCHES = {
    "ppo": "training_epoch",
    "ppo_two_optimizers": "training_epoch",
    "dqn": "training_iter",
    "sac": "training_iter",
    "sac_discrete": "training_iter",
    "crossq": "training_iter",
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", MINIBATCHES)
def test_the_number_of_waits_does_not_depend_on_the_number_of_minibatches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, steps = [], []
    for number in (2, 6):
        monkeypatch.setattr(devices, "ON_CPU", True)
        case, net = CASES[name]
        agent = agent_of(changed(case.spec(2, net), algorithm={MINIBATCHES[name]: number}), case.info())
        waits, taken = waits_of_update(agent, name, monkeypatch)
        counts.append(waits)
        steps.append(taken)
    assert steps[1] >= steps[0] + 4
    assert counts[0] == counts[1] <= 20


def test_the_cpu_waits_for_each_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check of the counter: an update on the CPU has more waits than one with the code paths for CUDA devices."""
    agent = build("sac")
    assert isinstance(agent.algorithm.trainer, Trainer)
    waits, _ = waits_of_update(agent, "sac", monkeypatch)
    monkeypatch.setattr(devices, "ON_CPU", True)
    assert waits > waits_of_update(build("sac"), "sac", monkeypatch)[0]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop", "SGD", "RAdam"])
def test_steps_that_are_not_finite_are_skipped(
    optimizer: str, there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that is not finite changes neither parameters nor buffers of layers nor the state of the optimizer."""
    monkeypatch.setattr(devices, "ON_CPU", there)
    net = nn.Sequential(nn.Linear(3, 3), BatchRenorm1d(3), nn.Linear(3, 1))
    keys = {"name": optimizer, "lr": 0.1} | ({"momentum": 0.5} if optimizer == "RMSprop" else {})
    trainer = Trainer(FlatParams(net), MLPNetSpec(name="MLPNet", optim_spec=keys, clip_grad_val=0.1))  # type: ignore[arg-type]  # validated

    def step(x: Tensor, factor: float = 1.0) -> None:
        trainer.begin_update(0)
        trainer.set_train_mode(True)
        trainer.backward(factor * net(x).square().mean())
        trainer.step()
        trainer.set_train_mode(False)
        trainer.end_update()

    step(torch.randn(4, 3))
    before = repr(trainer.state_dict())
    step(torch.full((4, 3), torch.nan))
    step(torch.randn(4, 3), factor=torch.inf)
    assert repr(trainer.state_dict()) == before
    assert trainer.skipped == 2
    assert len([record for record in caplog.records if "not finite" in record.getMessage()]) == 1
    step(torch.randn(4, 3))
    assert repr(trainer.state_dict()) != before


@pytest.mark.usefixtures("there")
def test_parameters_begin_at_multiples_of_16_bytes() -> None:
    torch.manual_seed(0)
    net, plain = (
        nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1), nn.Linear(1, 2)),
        nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1), nn.Linear(1, 2)),
    )
    plain.load_state_dict(net.state_dict())
    flat = FlatParams(net, [list(net[:2].parameters()), list(net[2].parameters())])
    assert [p.data_ptr() % 16 for p in flat.params] == [0] * 6
    assert all(p.grad is not None and p.grad.data_ptr() % 16 == 0 for p in flat.params)
    assert len(flat.param) > flat.size == sum(p.numel() for p in plain.parameters())
    assert torch.equal(flat.copy_vectors()[0], torch.cat([p.detach().flatten() for p in plain.parameters()]))
    gaps = torch.ones(len(flat.param), dtype=torch.bool)
    gaps[flat.param_indices] = False
    x = torch.randn(4, 3)
    trainer = Trainer(flat, MLPNetSpec(name="MLPNet"), ("actor", "critic"))
    for _ in range(3):
        trainer.begin_update(0)
        trainer.backward(net(x).square().mean())
        norm = torch.linalg.vector_norm(flat.grad)
        assert torch.isclose(norm, torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in flat.params if p.grad is not None])))
        trainer.step()
        assert not flat.param[gaps].any(), "else it would enter norms"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["a2c", "ppo_two_optimizers", "dqn", "sac"])
@pytest.mark.parametrize("optimizer", ["Adam", "GlobalAdam"])
def test_shared_arrays_have_no_gaps(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared arrays are the same for a Hogwild worker on a CUDA device and one on the CPU, because both train the same arrays."""
    case, net = CASES[name]

    def worker() -> Agent:
        return agent_of(case.spec(2, net | {"optim_spec": {"name": optimizer, "lr": 0.01}}), case.info())

    def trained() -> dict[str, np.ndarray]:
        agent, file = worker(), create_shared_file()
        try:
            store = SharedArrays(file, 0, 1, synced=False)
            store.attach({"agent": agent})
            learn(agent, name)
            return {key: value.copy() for key, value in store.snapshot().items()}
        finally:
            os.close(file)

    expected = trained()
    monkeypatch.setattr(devices, "ON_CPU", True)
    found = trained()
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in expected.items()}
    for key, value in expected.items():
        assert np.allclose(value, found[key], rtol=1e-4, atol=1e-5, equal_nan=True), key


@pytest.mark.usefixtures("there")
def test_recurrent_weights_stay_in_the_flat_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving a module does not call `flatten_parameters`, which would move the weights out of the flat vector for cuDNN.

    Unchanged torch modules call it on every move, even to the device on which they already are.
    """
    moved = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: moved.append(self))
    net = nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 5))
    flat = FlatParams(net)
    moved.clear()
    net.to("cpu")
    assert not moved
    begin, end = flat.param.data_ptr(), flat.param.data_ptr() + 4 * len(flat.param)
    assert all(begin <= p.data_ptr() < end for p in net.parameters())


class Elsewhere(TorchDispatchMode):
    """Uses the device "meta" in place of a CUDA device: values read from it are invented, and tensors of two devices must not meet."""

    MOVES = ("_to_copy", "to")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "_local_scalar_dense" and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1.0
        if name in self.MOVES and args[0].is_meta and torch.device("cpu") in [*args, *kwargs.values()]:
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0].fill_(1)
        if name not in (*self.MOVES, "copy_"):
            tensors = [item for item in flattened([args, kwargs.values()]) if isinstance(item, Tensor)]
            places = {tensor.device for tensor in tensors if tensor.dim() or tensor.is_meta}
            assert len(places) < 2, f"{name} of {places}"
        return func(*args, **kwargs)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", ["a2c", "ppo", "ppo_recurrent", "sil", "dqn", "dqn_images", "ddqn_per", "sac", "crossq"])
def test_tensors_of_two_devices_never_meet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, net = CASES[name]
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 2**30)
    toy = case.spec(2, net)
    if case.memory in ("Replay", "PrioritizedReplay"):
        toy = changed(toy, memory={"on_device": name != "dqn"})
    with Elsewhere():
        with torch.device("meta"):  # parameters cannot be moved to the meta device
            agent = build_agent(toy, case.info(), session_seeds(0, 0, 0), Clock(), "meta")
        assert learn(agent, name, 21)
        agent.load_state_dict(agent.state_dict())
        assert all(value.device.type == "cpu" for value in agent.weights().values())


def test_tf32_is_set_for_cuda_devices_alone() -> None:
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    try:
        for on in (True, False):
            devices.set_tf32("cuda:0", on)
            devices.set_tf32("cpu", not on)
            assert [flag.allow_tf32 for flag in flags] == [on, on]
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def test_what_needs_a_cuda_device_is_an_error_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("DQN", "Replay", "MLPNet")
    toy = case.spec(2, {"tf32": True})
    with pytest.raises(SpecError, match=r"agent\.net\.tf32: invalid value true"):
        agent_of(toy, case.info())
    with pytest.raises(SpecError, match=r"agent\.memory\.on_device: invalid value true"):
        build("dqn", on_device=True)
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 2**20)
    check_replay_memory(100, 2**19, device="cuda:1")
    with pytest.raises(
        SpecError, match=r"agent\.memory\.max_size: 100 transitions take 0\.0 GiB; this device \(cuda:1\) has .* at most 45"
    ):
        check_replay_memory(100, 2**21, device="cuda:1")
    with pytest.raises(SpecError, match=r"agent\.algorithm\.time_horizon: rollouts of 10000 steps .* this device \(cuda:0\)"):
        check_rollout_memory(toy_spec({"name": "PPO", "time_horizon": 10_000, "minibatch_size": 8}).agent, info(8), "cuda:0")
    monkeypatch.setattr(devices, "ON_CPU", True)
    with pytest.raises(SpecError, match=r"agent\.memory\.max_size: must be at least env\.num_envs \(60\) with on_device, not 50"):
        agent_of(changed(case.spec(60), memory={"on_device": True}), case.info(60))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", ["dqn", "dqn_images", "ddqn_per"])
def test_a_replay_buffer_there_holds_what_one_here_holds(name: str) -> None:
    """Buffers on the device and on the host have equal contents and batches, and each can load the contents of the other."""
    here, far = build(name), build(name, on_device=True)
    for agent in (here, far):
        learn(agent, name, 20)
    saved = [reloaded(agent.replay.contents()) for agent in (here, far) if agent.replay is not None]
    assert repr(saved[0]) == repr(saved[1])
    here.replay.load_contents(saved[1])  # type: ignore[union-attr]
    far.replay.load_contents(saved[0])  # type: ignore[union-attr]
    batches = [agent.replay.sample() for agent in (here, far) if agent.replay is not None]
    assert repr(batches[0]) == repr(batches[1])
