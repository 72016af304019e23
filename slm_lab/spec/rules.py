"""Rules across the sections of a spec: what contradicts."""

from __future__ import annotations

import importlib.util
from typing import Any

from slm_lab.spec import env_ids
from slm_lab.spec.algorithm import (
    ActorCriticSpec,
    AlgorithmSpec,
    PPOSILSpec,
    PPOSpec,
    QLearningSpec,
    RandomSpec,
    ReplayAlgorithmSpec,
    SARSASpec,
    SILSpec,
    SoftActorCriticSpec,
)
from slm_lab.spec.base import SpecModel
from slm_lab.spec.memory import OnPolicyBatchReplaySpec, PrioritizedReplaySpec, ReplaySpec, SILReplayKeys
from slm_lab.spec.net import (
    ConvNetSpec,
    DuelingConvNetSpec,
    DuelingMLPNetSpec,
    HydraMLPNetSpec,
    NetSpec,
    RecurrentNetSpec,
    TorchArcNetSpec,
)
from slm_lab.spec.report import Path, Report, nearest, show
from slm_lab.spec.sampler_rules import check_sampler
from slm_lab.spec.schedule import LinearDecay, PeriodicDecay, RateDecay
from slm_lab.spec.search import NET
from slm_lab.spec.spec import AgentSpec, Spec
from slm_lab.spec.torch_check import OPTIMIZER_KEYS, check_net
from slm_lab.spec.validate import SECTION_KEYS

ALGORITHM: Path = ("agent", "algorithm")


def check_rules(spec: Spec, report: Report, *, algorithm_known: bool = True) -> None:
    """Add a problem for everything in a valid spec that contradicts something else in it, or names something that does not exist.

    Without `algorithm_known` the algorithm's name is a guess, and what follows from it alone is no problem.
    """
    if algorithm_known:
        _algorithm(spec, report)
    _schedules(spec.agent.algorithm, ALGORITHM, report)
    _schedules(spec.agent.memory, ("agent", "memory"), report)
    for key in ("net", "critic_net"):
        if (net := getattr(spec.agent, key)) is not None:
            check_net(net, ("agent", key), report)
            _net(spec.agent, net, ("agent", key), report)
    _memory(spec.agent, report, algorithm_known=algorithm_known)
    _env(spec, report)
    if spec.meta.distributed:
        _global_nets(spec.agent, report)
    if spec.meta.sampler is not None and algorithm_known:
        check_sampler(spec, spec.meta.sampler, report)


def has_critic(algorithm: AlgorithmSpec) -> bool:
    """Whether it learns values beside its policy."""
    return isinstance(algorithm, (ActorCriticSpec, PPOSpec, SoftActorCriticSpec))


def _algorithm(spec: Spec, report: Report) -> None:
    algorithm, agent = spec.agent.algorithm, spec.agent
    if agent.net is None and not isinstance(algorithm, RandomSpec):
        report.fail(NET, f"missing; {algorithm.name} needs a net")
    if isinstance(algorithm, ActorCriticSpec) and algorithm.lam is not None and algorithm.num_step_returns is not None:
        report.fail((*ALGORITHM, "num_step_returns"), "excludes lam (generalised advantage estimation); give one of them")
    if isinstance(algorithm, SoftActorCriticSpec):
        if algorithm.action_policy not in ("default", "random"):
            report.fail(
                (*ALGORITHM, "action_policy"),
                f"must be 'default' or 'random', not '{algorithm.action_policy}': {algorithm.name} samples its own policy",
            )
        if algorithm.log_alpha_min >= algorithm.log_alpha_max:
            report.fail(
                (*ALGORITHM, "log_alpha_min"),
                f"must be below log_alpha_max ({algorithm.log_alpha_max:g}), not {algorithm.log_alpha_min:g}",
            )
    elif algorithm.action_policy in ("epsilon_greedy", "boltzmann") and algorithm.explore_var_spec is None:
        report.fail((*ALGORITHM, "explore_var_spec"), f"missing; the action_policy '{algorithm.action_policy}' needs it")


def _schedules(section: SpecModel, place: Path, report: Report) -> None:
    """A schedule runs forward, and its values make sense."""
    for key in type(section).model_fields:
        schedule = getattr(section, key)
        if isinstance(schedule, (LinearDecay, RateDecay, PeriodicDecay)) and schedule.end_step < schedule.start_step:
            report.fail((*place, key, "end_step"), f"must be at least start_step ({schedule.start_step:g}), not {schedule.end_step:g}")
        for end in ("start_val", "end_val"):
            value = getattr(schedule, end, None)
            if value is not None and (value < 0 or (key == "beta" and value > 1)):
                allowed = "from 0 to 1" if key == "beta" else "≥ 0"
                report.fail((*place, key, end), f"must be a number {allowed}, not {value:g}")


def _memory(agent: AgentSpec, report: Report, *, algorithm_known: bool) -> None:
    """The memory is of the algorithm's kind, and a batch fits into it."""
    algorithm, memory, place = agent.algorithm, agent.memory, ("agent", "memory")
    replays = isinstance(algorithm, ReplayAlgorithmSpec)
    if isinstance(algorithm, RandomSpec):
        return
    if algorithm_known and isinstance(algorithm, PPOSpec) and not isinstance(memory, OnPolicyBatchReplaySpec):
        why = f"{algorithm.name} learns from rollouts of time_horizon steps"
        report.fail((*place, "name"), f"must be 'OnPolicyBatchReplay' ({why}), not '{memory.name}'")
    elif algorithm_known and replays != isinstance(memory, (ReplaySpec, PrioritizedReplaySpec)):
        name = algorithm.name
        allowed = "'Replay' or 'PrioritizedReplay'" if replays else "'OnPolicyBatchReplay', 'OnPolicyReplay' or 'OnPolicyCrossEntropy'"
        why = "learns from old transitions drawn at random" if replays else "learns on-policy, from each transition once"
        if "memory" not in agent.model_fields_set:
            report.fail(place, f"missing; {name} {why} and needs {allowed}")
            return
        report.fail((*place, "name"), f"must be {allowed} ({name} {why}), not '{memory.name}'")
    replay = memory.sil_replay if isinstance(memory, SILReplayKeys) else memory
    if replay.batch_size > replay.max_size:
        report.fail((*place, "batch_size"), f"must be at most max_size ({replay.max_size}), not {replay.batch_size}")


def _net(agent: AgentSpec, net: NetSpec, place: Path, report: Report) -> None:
    if isinstance(net, TorchArcNetSpec):
        _arcs(agent, net, place, report)
    if isinstance(net, RecurrentNetSpec) and isinstance(agent.algorithm, ReplayAlgorithmSpec):
        report.fail(
            (*place, "name"), f"'RecurrentNet' needs steps in order, and {agent.algorithm.name} draws single ones; take MLPNet or ConvNet"
        )
    if isinstance(net, RecurrentNetSpec) and isinstance(agent.algorithm, (SILSpec, PPOSILSpec)):
        report.fail(
            (*place, "name"),
            f"'RecurrentNet' needs steps in order, and {agent.algorithm.name} imitates single ones; "
            "take MLPNet, ConvNet, HydraMLPNet or TorchArcNet",
        )
    if isinstance(net, (DuelingMLPNetSpec, DuelingConvNetSpec)) and not isinstance(agent.algorithm, (QLearningSpec, SARSASpec, RandomSpec)):
        plain = net.name.removeprefix("Dueling")
        name = agent.algorithm.name
        report.fail((*place, "name"), f"must be '{plain}', not '{net.name}': {name} has no action values to split; DQN and its kin have")
    if isinstance(net, HydraMLPNetSpec):
        _hydra(net, place, report)
    if isinstance(net, ConvNetSpec):
        for index, layer in enumerate(net.conv_hid_layers):
            for part, what in ((0, "channels"), (1, "a kernel"), (2, "a stride")):
                sizes = layer[part] if part < len(layer) else 1
                if 0 in (sizes if isinstance(sizes, list) else [sizes]) or sizes == []:
                    report.fail((*place, "conv_hid_layers", index, part), f"must be {what} above 0, not 0")


def _global_nets(agent: AgentSpec, report: Report) -> None:
    """Optimizers that several Sessions cannot use on one net."""
    for place in ("net", "critic_net"):
        for key in OPTIMIZER_KEYS:
            optim = getattr(getattr(agent, place), key, None)
            if optim is not None and optim.name == "Lookahead":
                why = "'Lookahead' would draw the global net back to one Session's own slow weights; take GlobalAdam"
                report.fail(("agent", place, key, "name"), why)


def _hydra(net: HydraMLPNetSpec, place: Path, report: Report) -> None:
    """hid_layers is [[units, …] of each head, [units] of the body, [units, …] of each tail]."""

    def units(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value)

    heads, body, tails = net.hid_layers
    for index, (part, what) in enumerate(((heads, "heads"), (tails, "tails"))):
        if not isinstance(part, list) or not all(units(item) for item in part) or (what == "heads" and not part):
            allowed = f"a list with the units of each of the {what}, as [[32], [32]]"
            report.fail((*place, "hid_layers", 2 * index), f"must be {allowed}, not {show(part)}")
    if not units(body):
        report.fail((*place, "hid_layers", 1), f"must be a list of units of the body, as [64], not {show(body)}")
    if isinstance(tails, list) and len(tails) > 2:
        report.fail((*place, "hid_layers", 2), f"must be at most two tails, the actor's and the critic's, not {len(tails)}")


def _arcs(agent: AgentSpec, net: TorchArcNetSpec, place: Path, report: Report) -> None:
    """`arc` for both, or one for each that the algorithm has."""
    if net.arc is not None or (place[-1] == "critic_net" and net.critic_arc is not None):
        return
    if place[-1] == "critic_net":
        report.fail((*place, "arc"), "missing; a TorchArcNet of the critics needs arc or critic_arc")
    elif net.actor_arc is None:
        report.fail((*place, "arc"), "missing; a TorchArcNet needs arc, or actor_arc and critic_arc")
    elif net.critic_arc is None and has_critic(agent.algorithm) and agent.critic_net is None:
        report.fail((*place, "critic_arc"), "missing; actor_arc is given, so critic_arc (or arc) is needed too")
    if net.shared and net.actor_arc is not None and net.critic_arc is not None:
        report.fail((*place, "shared"), "a shared body is one: give arc, not actor_arc and critic_arc")


def _env(spec: Spec, report: Report) -> None:
    env = spec.env
    if message := env_ids.problem(env.name):
        report.fail(("env", "name"), message)
    if env.backend == "ale" and not env.name.startswith("ALE/"):
        report.fail(("env", "backend"), f"'ale' steps the envs ALE/… only, not {env.name}")
    if env.backend == "envpool" and importlib.util.find_spec("envpool") is None:
        report.fail(("env", "backend"), "needs the package envpool: pip install 'slm-lab[envpool]'")
    for key in env.kwargs:
        if hint := nearest(key, SECTION_KEYS[("env",)], cutoff=0.85):
            report.note(("env", key), f"goes to the env's constructor{hint}")
