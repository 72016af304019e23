"""Rules across the sections of a spec: what contradicts (problems), and what is settled by a rule (notes)."""

from __future__ import annotations

import importlib.util
from typing import Any

from slm_lab.spec import env_ids
from slm_lab.spec.algorithm import (
    ActorCriticSpec,
    AlgorithmSpec,
    CrossQSpec,
    DoubleDQNSpec,
    DQNSpec,
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
from slm_lab.spec.schedule import LinearDecay, PeriodicDecay, RateDecay
from slm_lab.spec.search import NET, redirect_search
from slm_lab.spec.spec import AgentSpec, Spec
from slm_lab.spec.torch_check import activation, check_net
from slm_lab.spec.validate import SECTION_KEYS

ALGORITHM: Path = ("agent", "algorithm")
SEPARATE = ("actor_optim_spec", "actor_lr_scheduler_spec", "critic_optim_spec", "critic_lr_scheduler_spec")
"""Specs of the actor's and the critic's own optimizers."""


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


def _has_critic(algorithm: AlgorithmSpec) -> bool:
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
    elif net.critic_arc is None and _has_critic(agent.algorithm) and agent.critic_net is None:
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


def settle(spec: Spec, report: Report) -> Spec:
    """The spec with what a rule decides written into it, a note for each."""
    change: dict[str, Any] = {"algorithm": _settled_algorithm(spec, report)}
    if spec.agent.net is not None:
        change["net"] = _settled_net(spec.agent.net, spec, report)
    if spec.agent.critic_net is not None and not isinstance(spec.agent.algorithm, SoftActorCriticSpec):
        change["critic_net"] = None
        name = spec.agent.algorithm.name
        report.note(("agent", "critic_net"), f"has no effect in {name}, only in SoftActorCritic and CrossQ; dropped")
    change["memory"] = _settled_memory(spec.agent, report)
    agent = spec.agent.model_copy(update=change)
    return spec.model_copy(update={"agent": agent, "search": _settled_search(spec, agent, report)})


def _settled_search(spec: Spec, agent: AgentSpec, report: Report) -> dict[str, Any] | None:
    """A search over the actor's optimizer goes on over that which has taken its place."""
    if spec.search is None or spec.agent.net is None or agent.net is None:
        return spec.search
    moved: dict[Path, Path | None] = {}
    for key in SEPARATE:
        if getattr(spec.agent.net, key) is not None and getattr(agent.net, key) is None:
            common = key.removeprefix("actor_")
            took_over = common != key and getattr(agent.net, common) == getattr(spec.agent.net, key)
            moved[(*NET, key)] = (*NET, common) if took_over else None
    return redirect_search(spec.search, moved, report)


def _settled_algorithm(spec: Spec, report: Report) -> AlgorithmSpec:
    algorithm = spec.agent.algorithm
    change: dict[str, Any] = {}
    if algorithm.explore_var_spec is not None and algorithm.action_policy in ("default", "random"):
        change["explore_var_spec"] = None
        report.note((*ALGORITHM, "explore_var_spec"), f"has no effect with the action_policy '{algorithm.action_policy}'; dropped")
    if isinstance(algorithm, SoftActorCriticSpec) and algorithm.alpha_anneal_frames is not None and algorithm.fixed_alpha is None:
        change["alpha_anneal_frames"] = None
        report.note((*ALGORITHM, "alpha_anneal_frames"), "has no effect without fixed_alpha; dropped")
    if isinstance(algorithm, PPOSpec):
        rollout = algorithm.time_horizon * spec.env.num_envs
        if algorithm.minibatch_size > rollout:
            change["minibatch_size"] = rollout
            report.note(
                (*ALGORITHM, "minibatch_size"),
                f"{algorithm.minibatch_size} is larger than the rollout of {algorithm.time_horizon} steps × {spec.env.num_envs} envs; "
                f"{rollout} is used",
            )
        if algorithm.training_frequency not in (None, algorithm.time_horizon):
            report.note((*ALGORITHM, "training_frequency"), f"PPO trains every time_horizon ({algorithm.time_horizon}) steps; dropped")
        change["training_frequency"] = None
    return algorithm.model_copy(update=change)


def _settled_memory(agent: AgentSpec, report: Report) -> Any:
    """The replay keys of an on-policy memory are for self-imitation."""
    memory = agent.memory
    if not isinstance(memory, SILReplayKeys) or isinstance(agent.algorithm, (SILSpec, PPOSILSpec)):
        return memory
    unused = [key for key in SILReplayKeys.model_fields if getattr(memory, key) is not None]
    for key in unused:
        report.note(("agent", "memory", key), f"has no effect in {memory.name}, but for SIL and PPOSIL; dropped")
    return memory.model_copy(update=dict.fromkeys(unused))


TARGET_NET = ("update_type", "update_frequency", "polyak_coef")
"""Keys of target nets."""


def _target_net(net: NetSpec, algorithm: AlgorithmSpec, report: Report) -> dict[str, Any]:
    """Notes on keys of target nets where there is none."""
    if isinstance(algorithm, CrossQSpec) or not isinstance(algorithm, (DQNSpec, DoubleDQNSpec, SoftActorCriticSpec, RandomSpec)):
        keys = [key for key in TARGET_NET if getattr(net, key) != NetSpec.model_fields[key].default]
        why = f"{algorithm.name} has no target net"
    else:
        keys = ["polyak_coef"] if net.update_type == "replace" and net.polyak_coef != NetSpec.model_fields["polyak_coef"].default else []
        why = "the update_type is 'replace'"
    for key in keys:
        report.note((*NET, key), f"has no effect, since {why}; dropped")
    return {key: NetSpec.model_fields[key].default for key in keys}


def _settled_net(net: NetSpec, spec: Spec, report: Report) -> NetSpec:
    change = _settled_optimizers(net, spec.agent.algorithm, report) | _target_net(net, spec.agent.algorithm, report)
    for key in ("hid_layers_activation", "out_layer_activation"):
        word = getattr(net, key, None)
        if word is not None and "_" in word:
            change[key] = activation(word)  # leaky_relu: torch has no underscores
    rollout = spec.agent.rollout_len
    if isinstance(net, RecurrentNetSpec) and isinstance(spec.agent.memory, OnPolicyBatchReplaySpec) and net.seq_len > rollout:
        change["seq_len"] = rollout
        report.note((*NET, "seq_len"), f"{net.seq_len} is longer than the rollout of {rollout} steps; {rollout} is used")
    return net.model_copy(update=change)


def _settled_optimizers(net: NetSpec, algorithm: AlgorithmSpec, report: Report) -> dict[str, Any]:
    """actor_* and critic_* specs need use_same_optim false, and a critic."""
    change: dict[str, Any] = {}
    separate = [key for key in SEPARATE if getattr(net, key) is not None]
    if not separate or isinstance(algorithm, RandomSpec):
        return change
    if _has_critic(algorithm) and "use_same_optim" not in net.model_fields_set:
        report.note((*NET, separate[0]), "actor and critic have specs of their own, so use_same_optim is read as false")
        return {"use_same_optim": False}
    if _has_critic(algorithm) and not net.use_same_optim:
        return change
    reason = "use_same_optim is true" if _has_critic(algorithm) else f"{algorithm.name} has no critic"
    for key in separate:
        common = key.removeprefix("actor_")
        change[key] = None
        if common != key and common not in net.model_fields_set:
            change[common] = getattr(net, key)
            report.note((*NET, key), f"read as '{common}', since {reason}")
        else:
            report.note((*NET, key), f"has no effect, since {reason}; dropped")
    return change
