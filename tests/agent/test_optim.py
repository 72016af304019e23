"""Tests of flat parameters, optimizers and learning rate schedules."""

from typing import Any

import pytest
import torch
from torch import nn

from slm_lab.agent.agent import Agent
from slm_lab.agent.net.layers import init_output
from slm_lab.agent.ops import device as devices
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.optimizers import SHAPED, TORCH, build_optimizer, make_optimizer
from slm_lab.agent.optim.schedule import SCHEDULERS, build_lr_schedule
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.spec.models.net import LEARNING_RATES, LRSchedulerSpec, MLPNetSpec, OptimSpec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import ToyEnv, agent_of, changed, drive, reloaded, steps_of
from tests.contract.combinations import Case


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def views_hold(flat: FlatParams) -> bool:
    """Return whether parameters, gradients and buffers are still views of the flat vectors."""
    start, end = flat.param.data_ptr(), flat.param.data_ptr() + 4 * flat.param.numel()
    params = all(start <= p.data_ptr() < end for p in flat.module.parameters())
    grads = all(p.grad is not None and p.grad.untyped_storage().data_ptr() == flat.grad.untyped_storage().data_ptr() for p in flat.params)
    begin, stop = flat.buffer.data_ptr(), flat.buffer.data_ptr() + 4 * flat.buffer.numel()
    return params and grads and all(begin <= b.data_ptr() < stop for b in flat.module.buffers() if b.is_floating_point())


def test_flat_keeps_values_and_views() -> None:
    plain, flattened = net(), net()
    flat = FlatParams(flattened)
    x = torch.randn(5, 3)
    assert torch.equal(plain(x), flattened(x))
    flattened(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(flat.grad, torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None]))
    flattened.load_state_dict(net().state_dict())
    assert views_hold(flat)
    flat.param.zero_()
    assert all(float(p.detach().abs().max()) == 0.0 for p in flattened.parameters())


def test_flat_clone_and_load() -> None:
    one, two = FlatParams(net()), FlatParams(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)))
    two.load(*one.copy_vectors())
    x = torch.randn(5, 3)
    assert torch.equal(one.module.eval()(x), two.module.eval()(x))
    with pytest.raises(ValueError, match="incompatible weights"):
        FlatParams(nn.Linear(2, 2)).load(*one.copy_vectors())


def test_groups_must_cover_all_parameters() -> None:
    module = net()
    with pytest.raises(ValueError, match="without an optimizer group"):
        FlatParams(module, [list(module[0].parameters())])


CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"betas": [0.8, 0.99], "eps": 1e-5, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("GlobalAdam", {"eps": 1e-5}),
    ("RMSprop", {}),
    ("RMSprop", {"alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True}),
    ("GlobalRMSprop", {"eps": 1e-5}),
    ("SGD", {"momentum": 0.9}),
    ("RAdam", {}),
    ("AdamW", {}),
    ("NAdam", {}),
]


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_optimizers_are_torchs(name: str, kwargs: dict[str, Any]) -> None:
    """Twenty steps on a flat vector equal those of torch's optimizer, bit for bit."""
    torch.manual_seed(1)
    param, grad = torch.randn(50), torch.zeros(50)
    reference = nn.Parameter(param.clone())
    reference.grad = torch.zeros(50)
    plain = name.removeprefix("Global")
    fused = {"fused": True} if plain in ("Adam", "AdamW", "SGD") else {}
    theirs = getattr(torch.optim, plain)(
        [reference], lr=0.01, **{k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}, **fused
    )
    ours = make_optimizer(name, [param], grad, 0.01, kwargs)
    for _ in range(20):
        grad.copy_(torch.randn(50))
        reference.grad.copy_(grad)
        ours.step()
        theirs.step()
    assert torch.equal(param, reference.detach())


def test_lookahead_by_hand() -> None:
    # SGD with gradient 1 and lr 1: fast is 0, −1, −2; after k = 2 steps slow = 0 + 0.5 (−2 − 0) = −1, and fast is set to slow
    param, grad = torch.zeros(1), torch.ones(1)
    ours = make_optimizer("Lookahead", [param], grad, 1.0, {"optimizer": "SGD", "k": 2, "alpha": 0.5})
    ours.step()
    assert float(param) == -1.0
    ours.step()
    assert float(param) == -1.0
    ours.step()
    ours.step()
    assert float(param) == -2.0


@pytest.mark.parametrize("name", sorted([*TORCH, "GlobalAdam", "GlobalRMSprop", "Lookahead"]))
def test_every_optimizer_resumes(name: str) -> None:
    """An optimizer whose state was saved and loaded continues identically."""

    def build() -> tuple[Any, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Linear(6, 4, bias=False)
        flat = FlatParams(module)
        flat.grad.normal_()
        params = flat.group_params(0) if name in SHAPED else [flat.param]
        return make_optimizer(name, params, flat.grad, 0.01, {}), flat.param, flat.grad

    straight, param, grad = build()
    for _ in range(3):
        straight.step()
    saved = reloaded({"optimizer": straight.state_dict(), "param": param})
    resumed, param2, grad2 = build()
    param2.copy_(saved["param"])
    grad2.copy_(grad)
    resumed.load_state_dict(saved["optimizer"])
    for _ in range(8):
        straight.step()
        resumed.step()
    assert torch.equal(param, param2)


def muon_net() -> nn.Sequential:
    torch.manual_seed(0)
    output = nn.Linear(5, 2)
    init_output(output, MLPNetSpec(name="MLPNet"), None)
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5), output)


def test_muon_is_for_hidden_weights_and_adamw_for_the_others() -> None:
    """Steps equal those of torch's optimizers on the single parameters, also after saving and loading the state."""
    net, reference = muon_net(), muon_net()
    flat = FlatParams(net)
    hidden = [p for p in reference.parameters() if p.dim() > 1 and p is not reference[-1].weight]
    matrices = [nn.Parameter(p.detach().reshape(len(p), -1)) for p in hidden]
    others = [p for p in reference.parameters() if not any(p is h for h in hidden)]
    theirs = [torch.optim.Muon(matrices, lr=0.01, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")]
    theirs.append(torch.optim.AdamW(others, lr=0.01, weight_decay=0.02))
    spec = OptimSpec(name="Muon", lr=0.01, weight_decay=0.02)
    ours = build_optimizer(spec, flat.group_params(0), flat.grad, "agent.net.optim_spec")
    before = [p.clone() for p in net.parameters()]
    for step in range(6):
        flat.grad.normal_()
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad.clone()
        for p, matrix in zip(hidden, matrices, strict=True):
            matrix.grad = p.grad.view_as(matrix)
        ours.step()
        for optimizer in theirs:
            optimizer.step()
        if step == 2:
            saved = reloaded(ours.state_dict())
            ours = build_optimizer(spec, flat.group_params(0), flat.grad, "agent.net.optim_spec")
            ours.load_state_dict(saved)
    for p, matrix in zip(hidden, matrices, strict=True):
        p.data = matrix.detach().view_as(p)
    for p, q, start in zip(net.parameters(), reference.parameters(), before, strict=True):
        torch.testing.assert_close(p, q)
        assert not torch.equal(p, start)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case", [Case("PPO", "OnPolicyBatchReplay", "ConvNet"), Case("SoftActorCritic", "Replay", "MLPNet", True)], ids=str
)
def test_agents_learn_by_muon_and_resume(case: Case) -> None:
    def build() -> Agent:
        return agent_of(case.spec(2, {"optim_spec": {"name": "Muon", "lr": 0.001}}), case.info())

    agent = build()
    assert drive(agent, ToyEnv(case.info()), 40)
    again = build()
    again.load_state_dict(reloaded(agent.state_dict()))
    assert all(torch.equal(value, again.weights()[name]) for name, value in agent.weights().items())
    before = agent.weights()
    drive(again, ToyEnv(case.info(), 1), 40)
    assert any(not torch.equal(value, before[name]) for name, value in again.weights().items())


def test_bad_optimizers_are_spec_errors() -> None:
    for spec, part in (
        (OptimSpec(name="Adam", lr=0.1, betas=[0.9, 1.5]), "betas"),
        (OptimSpec(name="SGD", speed=3), "speed"),
        (OptimSpec.model_validate({"name": "Lookahead", "optimizer": "Muon"}), "shapes"),
        (OptimSpec(name="Muon"), "hidden layer"),
    ):
        with pytest.raises(SpecError, match=part):
            build_optimizer(spec, [torch.zeros(2)], torch.zeros(2), "agent.net.optim_spec")


SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 7, "gamma": 0.5},
    "MultiStepLR": {"milestones": [5, 20], "gamma": 0.1},
    "ConstantLR": {"factor": 0.5, "total_iters": 9},
    "LinearLR": {"start_factor": 0.2, "total_iters": 30},
    "ExponentialLR": {"gamma": 0.97},
    "PolynomialLR": {"total_iters": 30, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 25, "eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {"T_0": 8, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 6, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 50, "cycle_momentum": False},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_schedules_equal_stepping_torch(name: str) -> None:
    """The rate computed for a frame equals the rate that torch reaches step by step."""
    base = 0.1
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=base)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULES[name])
    stepped = []
    for _ in range(45):
        stepped.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    schedule = build_lr_schedule(LRSchedulerSpec(name=name, **SCHEDULES[name]), base, "path")
    for frame in (0, 1, 6, 13, 14, 29, 44):
        assert schedule(frame) == pytest.approx(stepped[frame], rel=1e-6, abs=1e-9), frame


@pytest.mark.filterwarnings("ignore")
def test_one_cycle_ends_as_in_torch() -> None:
    """As in torch, the rate after the last step of the cycle is above the minimum. Later, where torch has no rate, it is the minimum."""
    keys = {"max_lr": 0.1, "total_steps": 20, "cycle_momentum": False}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **keys), build_lr_schedule(one_cycle(keys), 0.1, "path")
    for step in range(21):
        assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6), step
        optimizer.step()
        if step < 20:
            scheduler.step()
    assert schedule(20) > 1e-3
    assert schedule(21) == schedule(100) == schedule(19) < 1e-6
    linear = build_lr_schedule(one_cycle({**keys, "anneal_strategy": "linear"}), 0.1, "path")
    assert linear(20) == 0.0, "not negative"


def one_cycle(keys: dict[str, Any]) -> LRSchedulerSpec:
    return LRSchedulerSpec.model_validate({"name": "OneCycleLR", **keys})


def rates(agent: Agent, updates: int, seed: int = 1) -> list[tuple[float, int]]:
    """Return the learning rate and the frame of each of the next `updates` training calls."""
    found: list[tuple[float, int]] = []
    for _ in steps_of(agent, ToyEnv(agent.algorithm.info, seed)):
        if agent.ready():
            agent.update()
            found.append((float(agent.lr or 0.0), agent.clock.global_frame))
        if len(found) == updates:
            break
    return found


SCHEDULED = {"optim_spec": {"name": "Adam", "lr": 0.01}, "lr_scheduler_spec": {"name": "StepLR", "step_size": 2, "gamma": 0.5}}


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (Case("PPO", "OnPolicyBatchReplay", "MLPNet"), {"training_epoch": 3}),
        (Case("DQN", "Replay", "MLPNet"), {"training_iter": 3, "training_batch_iter": 2}),
        (Case("SoftActorCritic", "Replay", "MLPNet", True), {"training_iter": 3, "policy_delay": 2}),
        (Case("SIL", "OnPolicyReplay", "MLPNet"), {}),
    ],
    ids=str,
)
def test_torchs_schedulers_step_once_per_training_call(case: Case, change: dict[str, Any]) -> None:
    """A scheduler steps once per training call of any number of gradient steps and frames. A saved state keeps the count."""
    spec = changed(case.spec(2, SCHEDULED), algorithm=change)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    twin, expected = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        twin.step()
    agent = agent_of(spec, case.info())
    found = [rate for rate, _ in rates(agent, 5)]
    again = agent_of(spec, case.info())
    again.algorithm.load_state_dict(reloaded(agent.algorithm.state_dict()))
    assert found + [rate for rate, _ in rates(again, 3)] == pytest.approx(expected)


def test_schedulers_by_frames() -> None:
    case = Case("PPO", "OnPolicyBatchReplay", "MLPNet")
    for scheduler, rate in (
        ({"name": "StepLR", "step_size": 50, "gamma": 0.5, "unit": "frames"}, lambda frame: 0.01 * 0.5 ** (frame // 50)),
        ({"name": "LinearToZero", "frame": 50}, lambda frame: 0.01 * max(0.0, 1 - frame / 50)),  # the last frames are after its end
        ({"name": "LinearToMin", "frame": 50, "min_factor": 0.5}, lambda frame: 0.01 * max(0.5, 1 - 0.5 * frame / 50)),
    ):
        found = rates(agent_of(case.spec(2, SCHEDULED | {"lr_scheduler_spec": scheduler}), case.info()), 4)
        assert [one for one, _ in found] == pytest.approx([rate(frame) for _, frame in found])


@pytest.mark.parametrize(("name", "keys"), [("LinearToZero", {"frame": 0}), ("CosineAnnealingLR", {"T_max": 0}), ("StepLR", {"size": 3})])
def test_bad_schedules_are_spec_errors(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="lr_scheduler_spec"):
        build_lr_schedule(LRSchedulerSpec(name=name, **keys), 0.1, "agent.net.lr_scheduler_spec")


@pytest.mark.parametrize("on_device", [False, True])
def test_trainer_step_is_torch_by_hand(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping and Adam equal clip_grad_norm_ and torch.optim.Adam. A gradient contains nothing of earlier steps."""
    monkeypatch.setattr(devices, "ON_CPU", on_device)
    spec = MLPNetSpec(name="MLPNet", clip_grad_val=0.5, optim_spec=OptimSpec(lr=0.01))
    ours, theirs = nn.Linear(3, 1), nn.Linear(3, 1)
    theirs.load_state_dict(ours.state_dict())
    trainer = Trainer(FlatParams(ours), spec)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01, fused=True)
    for wanted in (5.0, 0.4, 0.75):  # 0.75: just above the bound
        x = torch.randn(8, 3)
        optimizer.zero_grad()
        theirs(x).square().mean().backward()
        scale = wanted / float(nn.utils.get_total_norm([p.grad for p in theirs.parameters() if p.grad is not None]))
        trainer.backward(ours(x).square().mean() * scale)
        norm = float(trainer.step())
        optimizer.zero_grad()
        (theirs(x).square().mean() * scale).backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert norm == pytest.approx(wanted, rel=1e-4)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-7)


def test_trainer_groups_have_their_own_rates_and_norms() -> None:
    spec = MLPNetSpec(
        name="MLPNet",
        use_same_optim=False,
        actor_optim_spec=OptimSpec(name="SGD", lr=1.0),
        critic_optim_spec=OptimSpec(name="SGD", lr=0.1),
        critic_lr_scheduler_spec=LRSchedulerSpec(name="LinearToZero", frame=10),
    )
    module = nn.ModuleDict({"actor": nn.Linear(1, 1, bias=False), "critic": nn.Linear(1, 1, bias=False)})
    trainer = Trainer(FlatParams(module, [list(module[part].parameters()) for part in ("actor", "critic")]), spec, ("actor", "critic"))
    with torch.no_grad():
        trainer.flat.param.zero_()
    trainer.begin_update(5)
    trainer.backward((3.0 * module["actor"].weight + 4.0 * module["critic"].weight).sum())
    norm = trainer.step()
    assert norm == pytest.approx(5.0)
    assert trainer.flat.param.tolist() == pytest.approx([-3.0, -0.05 * 4.0])


class OwnTrain(nn.Dropout):
    """Layer whose own `train` method does more than setting the mode."""

    def train(self, mode: bool = True) -> "OwnTrain":
        self.seen = mode
        return super().train(mode)


class OwnNoise(nn.Module):
    """Layer without buffers whose output depends on the mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x) if self.training else x


def test_layers_with_modes_are_switched() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.1)
    parts = [
        nn.Linear(2, 2),
        nn.BatchNorm1d(2),
        nn.Dropout(0.5),
        nn.Sequential(nn.Dropout1d(), nn.Tanh()),
        nn.GRU(2, 2),
        OwnTrain(),
        OwnNoise(),
    ]
    module = nn.Sequential(*parts, attention)
    trainer = Trainer(FlatParams(module), MLPNetSpec(name="MLPNet"))
    assert not any(m.training for m in module.modules())
    for mode in (True, False):
        trainer.set_train_mode(mode)
        assert [m.training for m in module] == [False, mode, mode, False, mode, mode, mode, mode]
        assert module[3][0].training == mode
        assert attention.out_proj.training == mode
        assert module[5].seen == mode


@pytest.mark.parametrize("name", [*LEARNING_RATES, "GlobalAdam", "GlobalRMSprop", "Lookahead"])
def test_absent_lr_is_torchs_default(name: str) -> None:
    """The default rate, and the parameters after three steps, equal those of torch's optimizer without arguments."""
    kind = getattr(torch.optim, {"Lookahead": "Adam"}.get(name, name.removeprefix("Global")))
    twin = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = kind([twin])
    assert OptimSpec(name=name).learning_rate == optimizer.param_groups[0]["lr"]
    if name in ("Muon", "Lookahead", "Adafactor"):  # their steps depend on shapes or interpolate
        return
    param, grad = torch.ones(6), torch.zeros(6)
    ours = build_optimizer(OptimSpec(name=name), [param], grad, "agent.net.optim_spec")
    for step in range(3):
        slope = torch.linspace(-1.0, 2.0, 6) + step
        grad.copy_(slope)
        twin.grad = slope.view(3, 2).clone()
        ours.step()
        optimizer.step()
    assert torch.allclose(ours.param, twin.detach().flatten(), atol=1e-6)


def test_lookahead_takes_the_rate_of_its_inner_optimizer() -> None:
    assert OptimSpec.model_validate({"name": "Lookahead", "optimizer": "RMSprop"}).learning_rate == 0.01
    assert OptimSpec.model_validate({"name": "RMSprop", "lr": 0.3}).learning_rate == 0.3
