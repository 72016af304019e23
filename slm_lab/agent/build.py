"""From a spec to an agent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.actor_critic import ActorCritic
from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.algorithm.dqn import QLearning, Sarsa
from slm_lab.agent.algorithm.ppo import PPO
from slm_lab.agent.algorithm.random import Random
from slm_lab.agent.algorithm.reinforce import Reinforce
from slm_lab.agent.algorithm.sil import PPOSIL, SIL
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic
from slm_lab.agent.policy.build import build_policy
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.spec import algorithm as specs
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.spec import Spec

ALGORITHMS: dict[type[specs.AlgorithmSpec], Callable[..., Algorithm]] = {
    specs.RandomSpec: Random,
    specs.ReinforceSpec: Reinforce,
    specs.ActorCriticSpec: ActorCritic,
    specs.PPOSpec: PPO,
    specs.SILSpec: SIL,
    specs.PPOSILSpec: PPOSIL,
    specs.SARSASpec: Sarsa,
    specs.VanillaDQNSpec: QLearning,
    specs.DQNSpec: QLearning,
    specs.DoubleDQNSpec: QLearning,
    specs.SoftActorCriticSpec: SoftActorCritic,
    specs.CrossQSpec: SoftActorCritic,
}


def build_agent(spec: Spec, info: EnvInfo, seeds: Seeds, clock: Clock, device: str = "cpu") -> Agent:
    """Build the agent of a spec for an env, its weights drawn from seeds.net.

    Raises SpecError if algorithm, net and env do not fit each other.
    """
    if device == "cpu" and spec.agent.net is not None and spec.agent.net.tf32:
        message = "invalid value true: the net computes on the CPU; set agent.net.gpu or remove it"
        raise SpecError("agent", [Problem("agent.net.tf32", message)])
    torch.manual_seed(seeds.net)
    model = spec.agent.algorithm
    policy = build_policy(spec.agent, info, np.random.default_rng(seeds.act), device)
    kind = ALGORITHMS.get(type(model)) or type(model).implementation()
    algorithm: Algorithm = kind(spec.agent, info, clock, seeds, policy, device)
    explores = model.action_policy in ("epsilon_greedy", "boltzmann")
    return Agent(policy, algorithm, clock, model.explore_var_spec if explores else None, seeds.eval_env)


def resolve_device(spec: Spec, session: int = 0) -> str:
    """Return the device of agent.net.gpu and cuda_id: "cpu" or "cuda:i". Raises SpecError if it does not exist."""
    net = spec.agent.net
    if net is None or net.gpu is False:
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if net.gpu == "auto":
            return "cpu"
        raise SpecError("agent", [Problem("agent.net.gpu", 'invalid value true: this machine has no CUDA device; allowed: false, "auto"')])
    if net.cuda_id is not None and net.cuda_id >= count:
        raise SpecError("agent", [Problem("agent.net.cuda_id", f"invalid device {net.cuda_id}; this machine has devices 0 to {count - 1}")])
    return f"cuda:{session % count if net.cuda_id is None else net.cuda_id}"
