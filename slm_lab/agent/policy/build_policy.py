"""From a spec to a policy: net, distribution and action rule."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.net.q_net import QNet
from slm_lab.agent.ops.device import set_tf32
from slm_lab.agent.ops.distributions import ActionDistribution, Categorical, Normal, SquashedNormal
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.policy.fit import build_distribution, check_actions, check_soft_actor_critic
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.log import notice
from slm_lab.lib.records import ActionSpace, EnvInfo
from slm_lab.spec.models.algorithm import SoftActorCriticSpec
from slm_lab.spec.models.net import NetSpec
from slm_lab.spec.models.spec import AgentSpec


def build_policy(agent: AgentSpec, info: EnvInfo, rng: np.random.Generator, device: str = "cpu") -> Policy:
    """Build the policy of an agent, its weights drawn from torch's global generator.

    Args: rng: draws actions. device: where the net computes. Raises SpecError if algorithm, net and env do not fit each other.
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
            check_soft_actor_critic(algorithm, agent.net, info.action)
        distribution, log_std = _distribution(agent, agent.net, info.action)
        critic = algorithm.has_critic and not algorithm.soft
        net = ActorCriticNet(agent.net, info.observation, distribution.param_dim, log_std, critic)
    parts = optimizer_parts(agent)
    groups = [getattr(net, f"{part}_parameters")() for part in parts] if len(parts) > 1 else None
    flat = FlatParams(net, groups, device)
    net.eval()
    return Policy(info.action, rng, net, distribution, algorithm.action_policy, algorithm.needs_logp, flat)


def optimizer_parts(agent: AgentSpec) -> tuple[str, ...]:
    """Return the parts of the policy's net that have an optimizer each; if it is one, its keys may be the actor's."""
    assert agent.net is not None
    if not agent.algorithm.has_critic:
        return ()
    separate = not agent.algorithm.soft and not agent.net.shared and not agent.net.use_same_optim
    return ("actor", "critic") if separate else ("actor",)


def separate_gradients(net: nn.Module | None, flat: FlatParams) -> list[list[Tensor]] | None:
    """Return the gradients of actor and critic if they share no body, else None."""
    if not isinstance(net, ActorCriticNet) or net.critic_body is None:
        return None
    return [[flat.grad[flat.span(parameters)]] for parameters in (net.actor_parameters(), net.critic_parameters())]


def _distribution(agent: AgentSpec, net: NetSpec, action: ActionSpace) -> tuple[ActionDistribution, nn.Parameter | None]:
    """Return the distribution of the policy, and its free parameters. That of soft actor-critic can be sampled with gradients."""
    discrete = agent.algorithm.soft and action.kind == "discrete"  # check_soft_actor_critic has reported log_std_init
    log_std = None if net.log_std_init is None or discrete else nn.Parameter(torch.full((action.dim,), net.log_std_init))
    if agent.algorithm.soft:
        return (Categorical(action) if action.kind == "discrete" else SquashedNormal(action, log_std)), log_std
    distribution = build_distribution(agent.algorithm, action)
    if log_std is None:
        return distribution, None
    if not isinstance(distribution, Normal):
        notice(f"agent.net.log_std_init: has no effect with {type(distribution).__name__}, only with Normal; ignored")
        return distribution, None
    return type(distribution)(action, log_std), log_std
