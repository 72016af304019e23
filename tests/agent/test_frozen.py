"""Tests of parameters that require no gradient: optimizers do not change them, like torch's, even if they are frozen only temporarily."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slm_lab.agent.ops import device as devices
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.lib.store import SharedArrays
from slm_lab.spec.models.net import MLPNetSpec
from tests.agent.helpers import reloaded
from tests.agent.test_hogwild import Stores, stores  # noqa: F401  # a fixture

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True, "weight_decay": 0.1}),
    ("GlobalAdam", {}),
    ("GlobalRMSprop", {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1}),
    ("NAdam", {}),
    ("Adagrad", {}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adafactor", {}),
    ("Lookahead", {"optimizer": "AdamW"}),
    ("Muon", {"weight_decay": 0.1}),
]
FROZEN: list[tuple[str, ...]] = [("0.weight", "0.bias"), ("0.weight", "0.bias"), ("2.bias",), (), ("2.weight", "0.weight"), ("0.bias",), ()]
"""Parameters that are frozen in each step."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def freeze(module: nn.Module, names: tuple[str, ...]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names)


def trainer_of(name: str, kwargs: dict[str, Any], clip: float | None = 0.5) -> tuple[nn.Sequential, Trainer]:
    module = net()
    keys = {"name": "MLPNet", "optim_spec": {"name": name, "lr": 0.01, **kwargs}, "clip_grad_val": clip}
    return module, Trainer(FlatParams(module), MLPNetSpec.model_validate(keys))


def step(module: nn.Module, trainer: Trainer, frozen: tuple[str, ...], seed: int) -> float:
    freeze(module, frozen)
    trainer.begin_update(0)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    trainer.backward((module(x) - 1.0).square().mean())
    norm = float(trainer.step())
    trainer.end_update()
    return norm


@pytest.mark.sampled(7)
@pytest.mark.parametrize("on_device", [False, True], ids=["", "as on a device"])
@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_steps_are_torchs(name: str, kwargs: dict[str, Any], on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps equal those of torch's optimizer, also after saving and loading the state.

    For an optimizer that torch does not have, the test only checks that frozen parameters stay the same and the others change.
    """
    monkeypatch.setattr(devices, "ON_CPU", on_device)
    module, trainer = trainer_of(name, kwargs)
    twin, plain = net(), name.removeprefix("Global")
    kind = getattr(torch.optim, plain, None) if name != "Muon" else None
    theirs = None if kind is None else kind(twin.parameters(), lr=0.01, **kwargs)
    for seed, frozen in enumerate(FROZEN):
        if seed == 5:
            saved = reloaded(trainer.state_dict())
            module, trainer = trainer_of(name, kwargs)
            trainer.load_state_dict(saved)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        norm = step(module, trainer, frozen, seed)
        for one, p in module.named_parameters():
            assert torch.equal(p, before[one]) == (one in frozen), (seed, one)
        if theirs is None:
            continue
        freeze(twin, frozen)
        theirs.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        (twin(x) - 1.0).square().mean().backward()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(twin.parameters(), 0.5)), rel=1e-4)
        theirs.step()
        for ours, own in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["GlobalAdam", "GlobalRMSprop", "Adam", "RAdam"])
def test_processes_may_freeze_different_parameters(name: str, stores: Stores) -> None:  # noqa: F811
    """Two processes train one net in turn, and neither changes its own frozen parameters. A shared step count rises once per step."""
    sides = []
    for store in stores(2):
        module, trainer = trainer_of(name, {"weight_decay": 0.1} if "Adam" in name else {})
        assert isinstance(store, SharedArrays)
        store.attach({"trainer": trainer})
        sides.append((module, trainer))
    for turn in range(6):
        module, trainer = sides[turn % 2]
        frozen = ("0.weight", "2.bias") if turn % 2 else ("0.bias",)
        trainer.pull_if_outdated()
        before = {
            one: trainer.flat.master[part].clone()
            for one, part in zip(dict(module.named_parameters()), trainer.flat._packed_parts, strict=True)
        }
        step(module, trainer, frozen, turn)
        for (one, old), part in zip(before.items(), trainer.flat._packed_parts, strict=True):
            assert torch.equal(trainer.flat.master[part], old) == (one in frozen), (turn, one)
    if name == "GlobalAdam":
        assert float(sides[0][1].groups[0].optimizer.statistics["step"]) == 6.0


def test_a_server_leaves_alone_what_is_frozen_elsewhere() -> None:
    """A server does not change the parameters that are frozen in the process that sent the gradient."""
    module, trainer = trainer_of("AdamW", {})
    group, grad = trainer.groups[0], torch.randn(trainer.flat.size)
    before = trainer.flat.param.clone()
    group.set_frozen((0, 3))
    group.optimizer.step_with_gradient(grad)
    moved = trainer.flat.param != before
    assert [bool(moved[part].any()) for part in trainer.flat._parts] == [False, True, True, False]
    group.set_frozen(())
    group.optimizer.step_with_gradient(grad)
    assert all(bool((trainer.flat.param != before)[part].all()) for part in trainer.flat._parts)
    del module


def test_nothing_is_cut_where_nothing_was_frozen() -> None:
    module, trainer = trainer_of("Adam", {})
    step(module, trainer, (), 0)
    assert type(trainer.groups[0].optimizer).__name__ == "FlatAdam"


def test_data_of_another_size_are_refused() -> None:
    module, trainer = trainer_of("Adam", {})
    module[0].weight.data = torch.zeros(7, 3)
    with pytest.raises(ValueError, match=r"0\.weight.*21 numbers.*expected 15.*assign"):
        trainer.begin_update(0)


def test_data_that_were_replaced_are_trained() -> None:
    """Parameter data that a user replaced are trained, and copies of the weights contain the replaced data."""
    module, trainer = trainer_of("SGD", {}, clip=None)
    module[0].weight.data = torch.full((5, 3), 0.25)
    assert bool((trainer.flat.copy_vectors()[0][:15] == 0.25).all())
    module[0].weight.data = torch.full((5, 3), 0.5)
    module.zero_grad()
    step(module, trainer, (), 0)
    assert 0.0 < float((module[0].weight.detach() - 0.5).abs().max()) < 0.1
    assert module[0].weight.data_ptr() == trainer.flat.param.data_ptr()


def test_a_range_of_the_vector_has_the_frozen_parameters_inside_it() -> None:
    """A server of a divided net finds the slices of frozen parameters inside its range.

    The weights have 15, 5, 10 and 2 numbers, of which the server has the numbers 12 to 24.
    """
    flat = FlatParams(net())
    flat._keep_served_range(torch.zeros(12), slice(12, 24))
    assert flat.param_slices_in_group(0, (0, 1, 2, 3)) == [slice(0, 3), slice(3, 8), slice(8, 12)]
    assert flat.param_slices_in_group(0, (3,)) == []
    flat.sync_parameters()
    assert flat.frozen == ()
