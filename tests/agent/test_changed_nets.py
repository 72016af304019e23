"""Tests of nets that a user changed: every pass computes and learns the same as the changed modules with autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, prune

from slm_lab.agent.agent import Agent
from slm_lab.agent.net.passes import direct
from slm_lab.agent.ops import objective
from slm_lab.agent.ops.objective import reduction_gradient
from slm_lab.agent.optim import flat
from slm_lab.agent.policy import policy as acting
from slm_lab.lib.records import ActionSpace
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import CONTINUOUS, DISCRETE, ToyEnv, agent_of, drive, info

Change = Callable[[nn.Module, nn.Sequential], Any]
"""Function that changes a net, given the net and the user's part of it.

If its result has a method `remove`, the test calls it at the end.
"""


def _scaled(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else 0.3 * grad for grad in grads)


def _halve_grad(p: Tensor) -> None:
    p.grad.mul_(0.5)


def _own_forward(net: nn.Module, body: nn.Sequential) -> None:
    plain = body[0].forward
    body[0].forward = lambda x: 0.5 * plain(x)  # type: ignore[method-assign]


def _hidden(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 8


def _replace_data(net: nn.Module, body: nn.Sequential) -> None:
    body[0].weight.data = body[0].weight.data * 0.5
    body[2].bias.data = body[2].bias.data + 0.1


def _tie(net: nn.Module, body: nn.Sequential) -> None:
    body[2].bias = body[0].bias


def _replace_layer(net: nn.Module, body: nn.Sequential) -> None:
    body[1] = nn.ReLU()
    torch.manual_seed(5)
    body[2] = nn.Linear(8, 8)


def _replace_parameter(net: nn.Module, body: nn.Sequential) -> None:
    body[2].weight = nn.Parameter(body[2].weight.detach() * 0.5)


def _delete_layer(net: nn.Module, body: nn.Sequential) -> None:
    del body[3]


def _freeze_others(net: nn.Module, body: nn.Sequential) -> None:
    net.requires_grad_(False)
    body[0].weight.requires_grad_()


def _swap_class(net: nn.Module, body: nn.Sequential) -> None:
    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * super().forward(x)

    body[0].__class__ = Halved


CHANGES: dict[str, Change] = {
    "nothing": lambda net, body: None,
    "forward hook": lambda net, body: body[0].register_forward_hook(lambda m, x, out: 0.5 * out),
    "forward pre-hook": lambda net, body: body[2].register_forward_pre_hook(lambda m, x: (0.5 * x[0],)),
    "backward hook": lambda net, body: body[2].register_full_backward_hook(lambda m, grads, outs: _scaled(grads)),
    "backward pre-hook": lambda net, body: body[0].register_full_backward_pre_hook(lambda m, outs: _scaled(outs)),
    "legacy backward hook": lambda net, body: body[1].register_backward_hook(lambda m, grads, outs: _scaled(grads)),
    "hook of a tensor": lambda net, body: body[0].weight.register_hook(lambda grad: 0.3 * grad),
    "post-accumulate hook": lambda net, body: body[0].weight.register_post_accumulate_grad_hook(_halve_grad),
    "hook of the container": lambda net, body: body.register_forward_hook(lambda m, x, out: 0.5 * out),
    "backward hook of the container": lambda net, body: body.register_full_backward_pre_hook(lambda m, outs: _scaled(outs)),
    "hook of the net": lambda net, body: net.register_full_backward_pre_hook(lambda m, outs: _scaled(outs)),
    "global forward hook": lambda net, body: modules.register_module_forward_hook(lambda m, x, out: 0.5 * out if _hidden(m) else None),
    "global pre-hook": lambda net, body: modules.register_module_forward_pre_hook(lambda m, x: (0.5 * x[0],) if _hidden(m) else None),
    "global backward hook": lambda net, body: modules.register_module_full_backward_hook(
        lambda m, grads, outs: _scaled(grads) if _hidden(m) else None
    ),
    "global backward pre-hook": lambda net, body: modules.register_module_full_backward_pre_hook(
        lambda m, outs: _scaled(outs) if _hidden(m) else None
    ),
    "own forward": _own_forward,
    "another class": _swap_class,
    "frozen layer": lambda net, body: body[0].requires_grad_(False) and None,
    "frozen net": lambda net, body: net.requires_grad_(False) and None,
    "all frozen but one": _freeze_others,
    "tied": _tie,
    "weight_norm": lambda net, body: parametrizations.weight_norm(body[2]) and None,
    "spectral_norm": lambda net, body: parametrizations.spectral_norm(body[2]) and None,
    "orthogonal": lambda net, body: parametrizations.orthogonal(body[2]) and None,
    "old weight_norm": lambda net, body: nn.utils.weight_norm(body[2]) and None,
    "old spectral_norm": lambda net, body: nn.utils.spectral_norm(body[2]) and None,
    "pruned": lambda net, body: prune.l1_unstructured(body[0], "weight", 0.5) and None,
    "other data": _replace_data,
    "layer": _replace_layer,
    "parameter": _replace_parameter,
    "layer less": _delete_layer,
    "no gradients": lambda net, body: net.zero_grad(),
}

ON_POLICY = {"ActorCritic": {"lam": 0.9, "training_frequency": 8}, "PPO": {"time_horizon": 8, "minibatch_size": 12, "training_epoch": 2}}
REPLAY = {"training_frequency": 4, "training_start_step": 12}
OFF_POLICY = {
    "DoubleDQN": {"action_policy": "epsilon_greedy", "action_pdtype": "Argmax", "explore_var_spec": {"name": "no_decay", "start_val": 0.1}},
    "SoftActorCritic": {},
    "CrossQ": {},
}


def agent_to_change(name: str, optim: str = "Adam") -> tuple[Agent, ActionSpace]:
    net: dict[str, Any] = {"name": "tests.agent.user_net:UserNetSpec", "optim_spec": {"name": optim, "lr": 0.01}}
    action, memory = DISCRETE, {"name": "OnPolicyBatchReplay"}
    if name in OFF_POLICY:
        memory = {"name": "Replay", "batch_size": 8, "max_size": 200}  # type: ignore[dict-item]
        action = DISCRETE if name == "DoubleDQN" else CONTINUOUS
        net |= {"DoubleDQN": {"update_type": "replace", "update_frequency": 12}}.get(name, {})
    keys = ON_POLICY[name] if name in ON_POLICY else {**REPLAY, **OFF_POLICY[name]}
    agent = {"algorithm": {"name": name, **keys}, "memory": memory, "net": net}
    toy = {"name": "toy", "agent": agent, "env": {"name": "Toy-v0", "num_envs": 3, "max_frame": 1000}}
    return agent_of(Spec.model_validate(toy), info(3, action)), action


def nets_of(agent: Agent) -> list[nn.Module]:
    critics = getattr(agent.algorithm, "critics", None)
    return [agent.algorithm.net, *([] if critics is None else [critics])]


def user_parts(net: nn.Module) -> list[nn.Sequential]:
    return [module for module in net.modules() if type(module).__name__ == "UserNet"]  # type: ignore[misc]


@contextmanager
def changed(agent: Agent, change: Change) -> Iterator[None]:
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handles = [change(net, body) for net in nets_of(agent) for body in user_parts(net)[:1]]
    try:
        yield
    finally:
        for handle in handles:
            if hasattr(handle, "remove"):
                handle.remove()


def learned(name: str, change: Change, updates_before: int, plain: bool) -> list[Tensor]:
    """Update a net after a change; return how much each parameter moved. Before and after, compare acting with the modules."""
    with pytest.MonkeyPatch.context() as patch:
        for module, switch in (
            (direct, "DIRECT"),
            (acting, "NUMPY_ACTING"),
            (objective, "CLOSED_FORM"),
        ):
            patch.setattr(module, switch, not plain)
        agent, action = agent_to_change(name)
        env = ToyEnv(info(3, action))
        if updates_before:
            assert drive(agent, env, 8 * updates_before)
        with changed(agent, change), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_acting(agent)
            start = [p.detach().clone() for net in nets_of(agent) for p in net.parameters()]
            assert drive(agent, env, 8)
            check_acting(agent)
            return [p.detach() - before for p, before in zip((p for net in nets_of(agent) for p in net.parameters()), start, strict=True)]


def check_acting(agent: Agent) -> None:
    obs_N = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    with torch.no_grad():
        expected = agent.algorithm.net.actor(torch.from_numpy(obs_N)).numpy()
    numpy_actor = agent.policy._numpy_actor
    found = agent.policy.forward(obs_N, None)[0] if numpy_actor is None else numpy_actor(obs_N)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    values = getattr(agent.algorithm, "values", None)
    if values is not None:
        np.testing.assert_allclose(np.asarray(values(torch.from_numpy(obs_N))), expected, rtol=1e-4, atol=1e-6)


OTHERS = ["PPO", "DoubleDQN", "SoftActorCritic", "CrossQ"]
PAIRS = [
    *(("ActorCritic", change, index % 2) for index, change in enumerate(CHANGES)),
    *((OTHERS[index % 4], change, index // 4 % 2 * 2) for index, change in enumerate(CHANGES)),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("algorithm", "change", "after"), PAIRS)
def test_an_update_is_that_of_the_modules(algorithm: str, change: str, after: int) -> None:
    """Updates of a changed net equal those of its modules with autograd. `after` is the number of updates before the change."""
    found, expected = (learned(algorithm, CHANGES[change], after, plain) for plain in (False, True))
    scale = max(float(one.abs().max()) for one in expected)
    assert (scale > 1e-3) != (change == "frozen net")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * scale)


def test_acting_notices_hooks_at_once_and_all_else_soon() -> None:
    """Without an update in between, acting uses new hooks at once and other changes after at most CHECK_EVERY + 2 actions."""
    agent, _ = agent_to_change("ActorCritic")
    obs_N = np.random.default_rng(1).normal(size=(1, 4)).astype(np.float32)
    seen: list[np.ndarray] = []
    choose = agent.policy._choose
    agent.policy._choose = lambda params_NP: seen.append(params_NP.copy()) or choose(params_NP)  # type: ignore[func-returns-value]

    def acts_as_modules() -> bool:
        agent.act(obs_N)
        with torch.no_grad():
            return np.allclose(seen[-1], agent.algorithm.net.actor(torch.from_numpy(obs_N)).numpy(), rtol=1e-5)

    body = user_parts(agent.algorithm.net)[0]
    assert acts_as_modules()
    assert acts_as_modules()
    handle = body[0].register_forward_hook(lambda m, x, out: 0.5 * out)
    assert acts_as_modules()
    handle.remove()
    assert acts_as_modules()
    for change in (_replace_data, _own_forward, _delete_layer):
        change(agent.algorithm.net, body)
        for _ in range(acting.CHECK_EVERY + 2):
            acts_as_modules()
        assert all(acts_as_modules() for _ in range(acting.CHECK_EVERY + 2))
    out = agent.policy.act(obs_N, deterministic=True)
    assert out.action_N.shape == (1,)


def test_targets_are_by_the_modules_of_the_target_net() -> None:
    obs = torch.randn(8, 4)
    for change in CHANGES:
        agent, _ = agent_to_change("DoubleDQN")
        algorithm: Any = agent.algorithm
        target = algorithm.target.net
        algorithm.target_values(obs)
        if change in ("hook of a tensor", "post-accumulate hook"):
            continue  # a target net has no gradients
        torch.manual_seed(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = CHANGES[change](target, user_parts(target)[0])
            with torch.no_grad():
                expected = target.critic(obs)
            found = torch.as_tensor(np.asarray(algorithm.target_values(obs)))
        if hasattr(handle, "remove"):
            handle.remove()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rarely", [False, True])
def test_changes_that_updates_notice_at_once_or_within_some_updates(rarely: bool) -> None:
    for change in ("own forward", "another class", "layer", "parameter", "tied", "layer less"):
        agent, _ = agent_to_change("ActorCritic")
        trainer, net = agent._trainers[0], agent.algorithm.net
        agent.set_rare_checks(rarely)

        def valid_updates(limit: int, trainer: Any = trainer, net: Any = net) -> int:
            """Run at most `limit` updates; return the number of updates before the fast pass became invalid."""
            for count in range(limit):
                trainer.begin_update(0)
                valid = net.direct.get() is not None
                trainer.end_update()
                if not valid:
                    return count
            return limit

        assert valid_updates(100) == 100
        user_parts(net)[0].note = "an attribute that changes nothing"  # type: ignore[assignment]
        assert valid_updates(100) == 100
        handle = user_parts(net)[0][1].register_forward_hook(lambda m, x, out: out)
        assert valid_updates(1) == 0
        handle.remove()
        while not valid_updates(1):
            assert rarely  # with rare checks, the removal of hooks is not detected at once
        CHANGES[change](net, user_parts(net)[0])
        count = valid_updates(100)
        assert 0 < count < flat.UPDATES_BETWEEN_CHECKS if rarely else count == 0
        agent.set_rare_checks(False)
        assert valid_updates(1) == 0


def test_parameters_that_are_frozen_or_replaced_while_checks_are_rare() -> None:
    agent, _ = agent_to_change("ActorCritic")
    trainer = agent._trainers[0]
    agent.set_rare_checks(True)
    trainer.begin_update(0)
    trainer.end_update()
    first = trainer.flat.params[0]
    first.requires_grad_(False)
    for _ in range(flat.UPDATES_BETWEEN_CHECKS):
        trainer.begin_update(0)
        trainer.end_update()
    assert trainer.flat.frozen == (0,)


def doubled(kind: type, name: str) -> Callable[..., Any]:
    """Return a method that calls the overridden method and doubles its result."""

    def method(self: Any, *args: Any) -> Any:
        self.asked = True
        found = getattr(kind, name)(self, *args)
        return (
            found._replace(loss=2.0 * found.loss)
            if isinstance(found, objective.ObjectiveTerms)
            else tuple(2.0 * one for one in found)
            if isinstance(found, tuple)
            else 2.0 * found
        )

    return method


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ("PPO", "_objective"),
        ("PPO", "_value_loss"),
        ("PPO", "scale_values"),
        ("ActorCritic", "_objective"),
        ("ActorCritic", "_advantages_and_targets"),
        ("ActorCritic", "scale_values"),
    ],
)
@pytest.mark.parametrize("of_class", [True, False], ids=["subclass", "object"])
def test_a_method_in_place_of_which_the_loss_is_computed_in_closed_form_is_asked(algorithm: str, name: str, of_class: bool) -> None:
    after = []
    for closed_form, overridden in ((True, True), (False, True), (True, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(objective, "CLOSED_FORM", closed_form)
            agent, action = agent_to_change(algorithm, "SGD")
            own: Any = agent.algorithm
            kind = type(own)
            if overridden and of_class:
                own.__class__ = type("Own", (kind,), {name: doubled(kind, name)})
            elif overridden:
                method = doubled(kind, name)
                setattr(own, name, lambda *args, own=own, method=method: method(own, *args))
            drive(agent, ToyEnv(info(3, action)), 8)
            assert getattr(own, "asked", False) == overridden
            after.append(own.trainer.flat.param.clone())
    torch.testing.assert_close(after[0], after[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after[0], after[2], rtol=1e-3, atol=1e-4)


def test_an_own_loss_of_actor_critic_gets_tensors() -> None:
    agent, action = agent_to_change("ActorCritic")
    own: Any = agent.algorithm
    kinds = set()

    def add_loss(self: Any, batch: Any, weight: float) -> None:
        params_BP, value_B = batch.forward(self.net)
        kinds.update({type(params_BP), type(batch.advantage_B)})
        logp_B, entropy_B = self.distribution.evaluate(params_BP, batch.action_B)
        self.meter.add(-(logp_B * batch.advantage_B).mean() + self.value_loss(value_B, batch.target_B), weight, entropy=entropy_B.mean())

    own.__class__ = type("Own", (type(own),), {"_add_loss": add_loss})
    assert drive(agent, ToyEnv(info(3, action)), 16)
    assert kinds == {Tensor}


def test_an_own_reduction_of_critics_is_differentiated() -> None:
    agent, _ = agent_to_change("SoftActorCritic")
    algorithm: Any = agent.algorithm
    q_CB = torch.randn(2, 6)
    plain = reduction_gradient(algorithm.reduce, q_CB)
    algorithm.reduce = lambda q_CX: 0.5 * torch.minimum(*q_CX)
    torch.testing.assert_close(reduction_gradient(algorithm.reduce, q_CB), 0.5 * plain)
