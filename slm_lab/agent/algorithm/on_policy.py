"""What the policy-gradient algorithms share: how their net, memory and trainer are built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slm_lab.agent.rollout.minibatch import Values
from slm_lab.agent.algorithm.common.value_scale import RunningScale, SymlogScale, ValueScale
from slm_lab.agent.rollout.storage import OnPolicyBatchReplay, OnPolicyReplay, build_memory, slab_bytes
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.net.actor_critic import ActorCriticNet
from slm_lab.agent.net.fast import add_learning_twins
from slm_lab.agent.ops.distributions import DEFAULT_DISTRIBUTION, DISTRIBUTIONS, ActionDistribution, Normal
from slm_lab.agent.ops.losses import ValueLoss
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.heap import PRIVATE, Heap, Place
from slm_lab.lib.log import notice
from slm_lab.lib.machine import memory_bytes
from slm_lab.lib.records import ActionSpace, EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.spec.algorithm import AlgorithmSpec
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.memory import OnPolicyBatchReplaySpec
from slm_lab.spec.net import LossSpec, RecurrentNetSpec
from slm_lab.spec.spec import AgentSpec

LOSSES: dict[str, ValueLoss] = {
    "MSELoss": F.mse_loss,
    "SmoothL1Loss": F.smooth_l1_loss,
    "HuberLoss": F.huber_loss,
    "L1Loss": F.l1_loss,
}
"""Regression losses for values, by the names of torch.nn's modules."""


@dataclass(frozen=True)
class Parts:
    """Everything an algorithm is made of."""

    distribution: ActionDistribution
    net: ActorCriticNet
    policy: Policy
    memory: OnPolicyBatchReplay | OnPolicyReplay
    trainer: Trainer
    value_loss: ValueLoss
    seq_len: int
    rng: np.random.Generator
    """Orders the minibatches."""


def build_parts(agent: AgentSpec, info: EnvInfo, place: Place, seeds: Seeds, critic: bool) -> Parts:
    """Net, policy, memory and trainer of a policy-gradient algorithm. Raises SpecError where they do not fit each other or the env."""
    assert agent.net is not None  # the spec room refuses a learner without one
    distribution = build_distribution(agent.algorithm, info.action)
    log_std = None
    if agent.net.log_std_init is not None:
        if isinstance(distribution, Normal):
            log_std = nn.Parameter(torch.full((info.action.dim,), agent.net.log_std_init))
            distribution = Normal(info.action, log_std)
        else:
            notice(f"agent.net.log_std_init: no effect with {type(distribution).__name__}, only with Normal")
    net = ActorCriticNet(agent.net, info.observation, distribution.params, log_std, critic)
    separate = critic and not agent.net.use_same_optim
    trainer = Trainer(net, agent.net, {"actor": net.actor_parameters(), "critic": net.critic_parameters()} if separate else None, place)
    add_learning_twins(net)
    return Parts(
        distribution=distribution,
        net=net,
        # the policy comes after the trainer: its fast path holds views of the flat parameters
        policy=Policy(
            info.action, np.random.default_rng(seeds.act), net, distribution, agent.algorithm.action_policy, agent.algorithm.needs_logp
        ),
        memory=build_on_policy_memory(agent, info, net.state_size),
        trainer=trainer,
        value_loss=build_value_loss(agent.net.loss_spec),
        seq_len=agent.net.seq_len if isinstance(agent.net, RecurrentNetSpec) else 1,
        rng=np.random.default_rng(seeds.update),
    )


def build_on_policy_memory(agent: AgentSpec, info: EnvInfo, state_size: int) -> OnPolicyBatchReplay | OnPolicyReplay:
    """The memory that the spec names. Raises SpecError where it does not fit this machine."""
    if isinstance(agent.memory, OnPolicyBatchReplaySpec):
        _check_room(agent, info)
    return build_memory(agent.memory, info, agent.rollout_len, state_size)


def _check_room(agent: AgentSpec, info: EnvInfo) -> None:
    """Raise SpecError where a rollout and its shuffled copy do not fit this machine."""
    needed, there = 2 * slab_bytes(info, agent.rollout_len), memory_bytes()
    if needed > there:
        lengths = [key for key in ("time_horizon", "num_step_returns", "training_frequency") if getattr(agent.algorithm, key, None)]
        path = f"agent.algorithm.{lengths[0]}" if lengths else "env.num_envs"
        sizes = f"need {needed / 2**30:,.1f} GiB, this machine has {there / 2**30:,.1f}"
        message = f"rollouts of {agent.rollout_len} steps of {info.num_envs} envs {sizes}; shorten them, or take fewer envs"
        raise SpecError("agent", [Problem(path, message)])


def build_distribution(spec: AlgorithmSpec, action: ActionSpace) -> ActionDistribution:
    """The distribution that the spec names. Raises SpecError where it cannot serve the action space."""
    name = DEFAULT_DISTRIBUTION[action.kind] if spec.action_pdtype == "default" else spec.action_pdtype
    kind = DISTRIBUTIONS[name]
    if action.kind not in kind.kinds or (kind.needs_bounds and not action.bounded):
        fitting = [n for n, k in DISTRIBUTIONS.items() if action.kind in k.kinds and (action.bounded or not k.needs_bounds)]
        space = f"{'' if action.bounded else 'unbounded '}{action.kind.replace('_', '-')} actions"
        message = f"{name!r} cannot take this env's {space}; allowed: default, {', '.join(fitting)}"
        raise SpecError("agent", [Problem("agent.algorithm.action_pdtype", message)])
    if spec.action_policy in ("boltzmann", "epsilon_greedy") and action.kind == "continuous":
        message = f"{spec.action_policy!r} needs countable actions, this env's are continuous; allowed: default, random"
        raise SpecError("agent", [Problem("agent.algorithm.action_policy", message)])
    return kind(action)


def build_value_loss(spec: LossSpec) -> ValueLoss:
    """The loss that the spec names, with its arguments."""
    if spec.name not in LOSSES:
        raise SpecError("agent", [Problem("agent.net.loss_spec.name", f"{spec.name!r} is none of {', '.join(LOSSES)}")])
    arguments = {name: value for name, value in spec.kwargs.items() if name != "reduction"}
    loss = partial(LOSSES[spec.name], **arguments)
    try:
        loss(torch.zeros(1), torch.zeros(1))
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError("agent", [Problem("agent.net.loss_spec", f"{spec.name}: {error}")]) from error
    return loss


def value_scale(symlog: bool, normalize: bool, heap: Heap = PRIVATE) -> ValueScale:
    """The critic's scale by the keys symlog and normalize_v_targets."""
    if symlog and normalize:
        message = "symlog and normalize_v_targets exclude each other: leave one out"
        raise SpecError("agent", [Problem("agent.algorithm.symlog", message)])
    return SymlogScale() if symlog else RunningScale(heap) if normalize else ValueScale()


@torch.no_grad()
def log_ratio(distribution: ActionDistribution, rollout: Rollout, values: Values) -> Tensor:
    """log π(a|s) − log μ(a|s) [T, N] of a rollout's actions: the policy of `values.params_TNP` against the one that acted."""
    assert values.params_TNP is not None
    logp_B = distribution.log_prob(values.params_TNP.flatten(0, 1), rollout.action_TN.flatten(0, 1))
    log_ratio_TN = logp_B.view_as(rollout.logp_TN) - rollout.logp_TN
    # what stands in a row that is no transition may be anything, and NaN would spread even through a decay of 0; other ratios stay,
    # since a transition that is masked for its lag is invalid too, and what comes after it is corrected through it
    return torch.where(log_ratio_TN.isnan() & ~rollout.valid_TN, 0.0, log_ratio_TN)
