"""Build a policy from a spec: net, distribution and action rule."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.q_nets import QNet
from slm_lab.agent.ops.device import set_tf32
from slm_lab.agent.ops.distributions import (
    ACTOR_DISTRIBUTIONS,
    DEFAULT_DISTRIBUTION,
    DISTRIBUTIONS,
    MULTI_DISCRETE,
    ActionDistribution,
    Normal,
)
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.log import notice
from slm_lab.lib.records import ActionSpace, EnvInfo
from slm_lab.spec.models.algorithm import ALGORITHMS, AlgorithmSpec, EntropyAnneal, SoftActorCriticSpec
from slm_lab.spec.models.net import NetSpec
from slm_lab.spec.models.spec import AgentSpec
from slm_lab.spec.report import Problem, SpecError


def fits(algorithm: type[AlgorithmSpec], action: ActionSpace) -> bool:
    """Return whether an algorithm can act in an action space."""
    return action.kind in algorithm.action_kinds and (action.kind != "continuous" or action.bounded or not algorithm.bounded_only)


def algorithms_for(action: ActionSpace) -> str:
    """Return the names of the built-in algorithms that can learn in an action space."""
    return ", ".join(name for name, model in ALGORITHMS.items() if model.learns and fits(model, action))


def check_actions(algorithm: AlgorithmSpec, action: ActionSpace) -> None:
    """Raise SpecError if an algorithm cannot act in an action space."""
    if fits(type(algorithm), action):
        return
    kinds = {"discrete": "a discrete action", "continuous": f"{'bounded ' if algorithm.bounded_only else ''}continuous actions"}
    needs = " or ".join(kinds.get(kind, f"{kind.replace('_', '-')} actions") for kind in algorithm.action_kinds)
    space = f"{'' if action.bounded else 'unbounded '}{action.kind.replace('_', '-')} actions"
    message = f"{algorithm.name!r} requires {needs}; this env has {space}; allowed: {algorithms_for(action)}"
    raise SpecError("agent", [Problem("agent.algorithm.name", message)])


def build_distribution(spec: AlgorithmSpec, action: ActionSpace) -> ActionDistribution:
    """Build the distribution that the spec names. Raises SpecError if it does not fit the action space."""
    name = DEFAULT_DISTRIBUTION[action.kind] if spec.action_pdtype == "default" else spec.action_pdtype
    kinds = DISTRIBUTIONS | MULTI_DISCRETE if action.kind == "multi_discrete" else DISTRIBUTIONS
    kind = kinds[name]
    if action.kind not in kind.kinds or (kind.needs_bounds and not action.bounded):
        fitting = [n for n, k in kinds.items() if action.kind in k.kinds and (action.bounded or not k.needs_bounds)]
        space = f"{'' if action.bounded else 'unbounded '}{action.kind.replace('_', '-')} actions"
        message = f"{name!r} is not supported for {space}; allowed: default, {', '.join(fitting)}"
        raise SpecError("agent", [Problem("agent.algorithm.action_pdtype", message)])
    if spec.action_policy in ("boltzmann", "epsilon_greedy") and action.kind == "continuous":
        message = f"{spec.action_policy!r} is not supported for continuous actions; allowed: default, random"
        raise SpecError("agent", [Problem("agent.algorithm.action_policy", message)])
    if name == "NormalTanh" and spec.action_policy == "random":
        message = "'random' is not supported with NormalTanh; allowed: default"
        raise SpecError("agent", [Problem("agent.algorithm.action_policy", message)])
    return kind(action)


def check_soft_actor_critic(spec: SoftActorCriticSpec, action: ActionSpace) -> None:
    """Raise SpecError naming every key of soft actor-critic that does not fit the env's actions; print notices for keys without effect."""
    discrete = action.kind == "discrete"
    problems = []
    names = ("default", "Categorical", "GumbelSoftmax") if discrete else ("default", "Normal")
    if spec.action_pdtype not in names:
        message = f"{spec.action_pdtype!r} is not supported by {spec.name} for {action.kind} actions; allowed: {', '.join(names)}"
        problems.append(Problem("agent.algorithm.action_pdtype", message))
    if discrete:
        problems += _entropy_problems(spec, action.nvec[0])
    if problems:
        raise SpecError("agent", problems)
    unused = {
        "entropy_penalty_coef": not discrete and spec.entropy_penalty_coef > 0,
        "entropy_anneal": not discrete and isinstance(spec.entropy_anneal, EntropyAnneal),
    }
    for key in [key for key, is_unused in unused.items() if is_unused]:
        notice(f"agent.algorithm.{key}: has no effect with {action.kind} actions; ignored")


def _entropy_problems(spec: SoftActorCriticSpec, actions: int) -> list[Problem]:
    """Return a problem for each target entropy that no policy over `actions` discrete actions can have."""
    greatest = math.log(actions)
    bounds = f"the entropy of {actions} discrete actions lies between 0 and ln {actions} = {greatest:.3g} nats"
    given = {"target_entropy": spec.target_entropy, "entropy_anneal": spec.entropy_anneal}
    automatic = {"target_entropy": "auto", "entropy_anneal": "true"}
    return [
        Problem(f"agent.algorithm.{key}", f"invalid value {value:g}: {bounds}; use a value in this range, or {automatic[key]}")
        for key, value in given.items()
        if isinstance(value, float) and not 0.0 <= value <= greatest
    ]


def build_policy(agent: AgentSpec, info: EnvInfo, rng: np.random.Generator, device: str = "cpu") -> Policy:
    """Build the policy of an agent, with weights drawn from torch's global generator.

    Args: rng: draws actions. device: device of the net. Raises SpecError if algorithm, net and env do not fit each other.
    """
    algorithm = agent.algorithm
    if not algorithm.learns:
        return Policy(info.action, rng)
    assert agent.net is not None  # checked by the rules of specs
    set_tf32(device, agent.net.tf32)
    check_actions(algorithm, info.action)
    net: ActorCriticNet | QNet
    if algorithm.values:
        net, distribution = QNet(agent.net, info.observation, info.action.nvec), build_distribution(algorithm, info.action)
    else:
        if isinstance(algorithm, SoftActorCriticSpec):
            check_soft_actor_critic(algorithm, info.action)
        distribution, log_std = _distribution(agent, agent.net, info.action)
        critic = algorithm.has_critic and not algorithm.soft
        net = ActorCriticNet(agent.net, info.observation, distribution.param_dim, log_std, critic)
    parts = optimizer_parts(agent)
    groups = [getattr(net, f"{part}_parameters")() for part in parts] if len(parts) > 1 else None
    flat = FlatParams(net, groups, device)
    net.eval()
    return Policy(info.action, rng, net, distribution, algorithm.action_policy, algorithm.needs_logp, flat)


def optimizer_parts(agent: AgentSpec) -> tuple[str, ...]:
    """Return the parts of the policy's net with separate optimizer keys; ("actor",): one optimizer, which may use the actor's keys."""
    assert agent.net is not None
    if not agent.algorithm.has_critic:
        return ()
    separate = not agent.algorithm.soft and not agent.net.shared and not agent.net.use_same_optim
    return ("actor", "critic") if separate else ("actor",)


def separate_gradients(net: nn.Module | None, flat: FlatParams) -> list[list[Tensor]] | None:
    """Return the gradients of actor and critic if their bodies are separate, else None."""
    if not isinstance(net, ActorCriticNet) or net.critic_body is None:
        return None
    return [[flat.grad[flat.span(parameters)]] for parameters in (net.actor_parameters(), net.critic_parameters())]


def _distribution(agent: AgentSpec, net: NetSpec, action: ActionSpace) -> tuple[ActionDistribution, nn.Parameter | None]:
    """Return the action distribution and its learned log standard deviation [D] (None if net.log_std_init is absent or has no effect)."""
    own = agent.algorithm.actor_distribution(action.kind)
    distribution = build_distribution(agent.algorithm, action) if own is None else ACTOR_DISTRIBUTIONS[own[0]](action, **own[1])
    if net.log_std_init is None:
        return distribution, None
    if not isinstance(distribution, Normal):
        notice(f"agent.net.log_std_init: has no effect with {type(distribution).__name__}, only with Normal; ignored")
        return distribution, None
    log_std = nn.Parameter(torch.full((action.dim,), net.log_std_init))
    return type(distribution)(action, log_std), log_std
