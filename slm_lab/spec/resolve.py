"""Resolve a valid spec: correct values that cannot be used as given, drop keys without effect, and note each change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slm_lab.spec.algorithm import ALGORITHMS, AlgorithmSpec, PPOSpec, ReplayAlgorithmSpec, SoftActorCriticSpec, VTraceSpec
from slm_lab.spec.base import SpecModel
from slm_lab.spec.memory import PriorityKeys, SILReplayKeys
from slm_lab.spec.meta import MetaSpec
from slm_lab.spec.net import NetSpec, RecurrentNetSpec
from slm_lab.spec.report import Path, Report
from slm_lab.spec.rules import ALGORITHM
from slm_lab.spec.sampler_rules import resolve_sampler
from slm_lab.spec.search import NET, redirect_search
from slm_lab.spec.spec import AgentSpec, Spec
from slm_lab.spec.torch_check import OPTIMIZER_KEYS, activation

CRITIC_NET: Path = ("agent", "critic_net")
SEPARATE = ("actor_optim_spec", "actor_lr_scheduler_spec", "critic_optim_spec", "critic_lr_scheduler_spec")
"""Specs of the actor's and the critic's own optimizers."""
TARGET_NET = ("update_type", "update_frequency", "polyak_coef")
"""Keys of target nets."""
OF_CRITICS = (*TARGET_NET, "loss_spec", "critic_optim_spec", "critic_lr_scheduler_spec", "critic_init_std", "critic_arc")
"""Keys of agent.net for critics, which have no effect if there is an agent.critic_net."""
OF_ACTOR = (
    "shared", "use_same_optim", "log_std_init", "actor_init_std", "actor_optim_spec", "actor_lr_scheduler_spec", "actor_arc",
    "out_layer_activation", "gpu", "cuda_id",
)  # fmt: skip
"""Keys that have no effect in agent.critic_net."""
GLOBAL_NET = ("hogwild_lock", "max_restart")
"""Keys of meta for a net that several Sessions train."""
TUNED_ALPHA = ("alpha_lr", "target_entropy", "entropy_anneal", "log_alpha_min", "log_alpha_max")
"""Keys of the automatic temperature."""


def resolve(spec: Spec, report: Report) -> Spec:
    """Return the spec as it will run, with a note for each change."""
    change: dict[str, Any] = {"algorithm": _resolved_algorithm(spec, report)}
    for key in ("net", "critic_net"):
        if (net := getattr(spec.agent, key)) is not None:
            change[key] = _resolved_net(net, ("agent", key), spec, report)
    if spec.agent.critic_net is not None and not spec.agent.algorithm.soft:
        change["critic_net"] = None
        soft = [name for name, model in ALGORITHMS.items() if model.soft]
        report.note(CRITIC_NET, f"has no effect in {spec.agent.algorithm.name}, only in {' and '.join(soft)}; ignored")
    if spec.agent.algorithm.soft and not spec.agent.algorithm.has_target:
        _batch_norm(spec.agent, report)
    change["memory"] = _resolved_memory(spec.agent, report)
    if spec.meta.save_replay and spec.agent.algorithm.on_policy and not spec.agent.algorithm.self_imitation:
        report.note(("meta", "save_replay"), f"has no effect: {spec.agent.algorithm.name} has no replay buffer")
    agent = spec.agent.model_copy(update=change)
    update: dict[str, Any] = {"agent": agent, "meta": _resolved_meta(spec, report), "search": _resolved_search(spec, agent, report)}
    if (sampler := spec.meta.sampler) is not None:
        update["env"] = spec.env.model_copy(update={"num_envs": sampler.num_envs})
    return spec.model_copy(update=update)


def _resolved_meta(spec: Spec, report: Report) -> MetaSpec:
    """Resolve keys of distributed training and rollout workers."""
    meta = spec.meta
    if meta.distributed and not spec.agent.algorithm.learns:
        report.note(("meta", "distributed"), f"has no effect: {spec.agent.algorithm.name} learns nothing; false is used")
        return meta.model_copy(update={"distributed": False})
    for key in ("net", "critic_net"):
        if (net := getattr(spec.agent, key)) is not None:
            _global_optimizers(net, ("agent", key), bool(meta.distributed), report)
    if meta.sampler is not None:
        sampler = resolve_sampler(spec, meta.sampler, report)
        dropped = _without_effect(meta, ("meta",), ["hogwild_lock"], "meta.distributed is false", report)
        return meta.model_copy(update={"sampler": sampler, **dropped})
    if not meta.distributed:
        return meta.model_copy(update=_without_effect(meta, ("meta",), GLOBAL_NET, "meta.distributed is false", report))
    if meta.max_session == 1:
        report.note(
            ("meta", "max_session"), f"1: only one Session trains the global net; '{meta.distributed}' needs 2 or more to be of use"
        )
    return meta


def _global_optimizers(net: NetSpec, place: Path, distributed: bool, report: Report) -> None:
    """Add a note for each local optimizer of a global net, and for each global optimizer without such a net."""
    for key in OPTIMIZER_KEYS:
        optim = getattr(net, key)
        if optim is None or optim.name.startswith("Global") == distributed:
            continue
        if distributed:
            common = "GlobalRMSprop" if optim.name == "RMSprop" else "GlobalAdam"
            statistics = f"{optim.name} keeps separate statistics in each Session"
            report.note((*place, key), f"{statistics}; {common} shares them")
        else:
            report.note((*place, key), f"without meta.distributed {optim.name} is the same as {optim.name.removeprefix('Global')}")


def _batch_norm(agent: AgentSpec, report: Report) -> None:
    """Add a note if critics without target nets do not normalise batches either."""
    key = "net" if agent.critic_net is None else "critic_net"
    net = getattr(agent, key)
    arcs = (getattr(net, "critic_arc", None), getattr(net, "arc", None))
    if net is not None and not getattr(net, "batch_norm", False) and not any("Batch" in str(arc) for arc in arcs):
        missing = f"the critics have no batch normalisation, which {agent.algorithm.name} needs instead of target nets"
        report.note(("agent", key), f"{missing}; set batch_norm, or use LazyBatchRenorm1d in a TorchArcNet")


def _resolved_search(spec: Spec, agent: AgentSpec, report: Report) -> dict[str, Any] | None:
    """Return the search with keys of an actor's optimizer redirected to the optimizer that replaces it."""
    if spec.search is None or spec.agent.net is None or agent.net is None:
        return spec.search
    moved: dict[Path, Path | None] = {}
    for key in SEPARATE:
        if getattr(spec.agent.net, key) is not None and getattr(agent.net, key) is None:
            common = key.removeprefix("actor_")
            moved_to_common = common != key and getattr(agent.net, common) == getattr(spec.agent.net, key)
            moved[(*NET, key)] = (*NET, common) if moved_to_common else None
    return redirect_search(spec.search, moved, report)


def _resolved_algorithm(spec: Spec, report: Report) -> AlgorithmSpec:
    algorithm = spec.agent.algorithm
    change: dict[str, Any] = {}
    if algorithm.explore_var_spec is not None and algorithm.action_policy in ("default", "random"):
        change["explore_var_spec"] = None
        report.note((*ALGORITHM, "explore_var_spec"), f"has no effect with the action_policy '{algorithm.action_policy}'; ignored")
    if isinstance(algorithm, SoftActorCriticSpec):
        if algorithm.fixed_alpha is None:
            change |= _without_effect(algorithm, ALGORITHM, ["alpha_anneal_frames"], "there is no fixed_alpha", report)
        else:
            change |= _without_effect(algorithm, ALGORITHM, TUNED_ALPHA, "fixed_alpha is given", report)
    if isinstance(algorithm, VTraceSpec):
        change |= _resolved_vtrace(algorithm, report)
    if isinstance(algorithm, ReplayAlgorithmSpec) and algorithm.training_start_step >= spec.env.max_frame:
        start = f"training starts after {algorithm.training_start_step} transitions"
        report.note((*ALGORITHM, "training_start_step"), f"{start}, but env.max_frame is {spec.env.max_frame}: nothing is learned")
    if isinstance(algorithm, PPOSpec):
        rollout = algorithm.time_horizon * spec.env.num_envs
        if algorithm.minibatch_size > rollout and spec.meta.sampler is None:
            change["minibatch_size"] = rollout
            report.note(
                (*ALGORITHM, "minibatch_size"),
                f"{algorithm.minibatch_size} is larger than the rollout of {algorithm.time_horizon} steps × {spec.env.num_envs} envs; "
                f"{rollout} is used",
            )
        if algorithm.training_frequency not in (None, algorithm.time_horizon):
            report.note(
                (*ALGORITHM, "training_frequency"),
                f"has no effect: {algorithm.name} trains every time_horizon ({algorithm.time_horizon}) steps; ignored",
            )
        change["training_frequency"] = None
    return algorithm.model_copy(update=change)


def _resolved_vtrace(algorithm: VTraceSpec, report: Report) -> dict[str, Any]:
    bounds = ("rho_bar", "c_bar")
    if not algorithm.with_vtrace:
        return _without_effect(algorithm, ALGORITHM, bounds, "with_vtrace is false", report)
    if algorithm.c_bar > algorithm.rho_bar:
        report.note((*ALGORITHM, "c_bar"), f"{algorithm.c_bar:g} is above rho_bar ({algorithm.rho_bar:g}); V-trace assumes c_bar ≤ rho_bar")
    for key in bounds:
        if getattr(algorithm, key) < 1:
            report.note((*ALGORITHM, key), f"{getattr(algorithm, key):g} is below 1, so even on-policy actions are weighted down")
    return {}


def _without_effect(model: SpecModel, place: Path, keys: Iterable[str], why: str, report: Report) -> dict[str, Any]:
    """Add a note for each of `keys` that is not at its default; return their defaults."""
    fields = type(model).model_fields
    given = [key for key in keys if key in fields and getattr(model, key) != fields[key].default]
    for key in given:
        report.note((*place, key), f"has no effect: {why}; ignored")
    return {key: fields[key].default for key in given}


def _resolved_memory(agent: AgentSpec, report: Report) -> Any:
    """Drop the replay keys of an on-policy memory unless the algorithm imitates itself."""
    memory = agent.memory
    if not isinstance(memory, SILReplayKeys):
        return memory
    if agent.algorithm.self_imitation:
        uniform = not isinstance(memory.sil_replay, PriorityKeys)
        keys = PriorityKeys.model_fields if uniform else ()
        return memory.model_copy(
            update=_without_effect(memory, ("agent", "memory"), keys, "sil_replay_name names a uniform replay", report)
        )
    imitate = [name for name, model in ALGORITHMS.items() if model.self_imitation]
    unused = [key for key in SILReplayKeys.model_fields if getattr(memory, key) is not None]
    for key in unused:
        report.note(("agent", "memory", key), f"has no effect in {memory.name} without self-imitation ({', '.join(imitate)}); ignored")
    return memory.model_copy(update=dict.fromkeys(unused))


def _target_net(net: NetSpec, place: Path, algorithm: AlgorithmSpec, report: Report) -> dict[str, Any]:
    """Drop keys of target nets that have no effect."""
    if algorithm.learns and not algorithm.has_target:
        return _without_effect(net, place, TARGET_NET, f"{algorithm.name} has no target net", report)
    keys = ["polyak_coef"] if net.update_type == "replace" else []
    return _without_effect(net, place, keys, "update_type is 'replace'", report)


def _resolved_net(net: NetSpec, place: Path, spec: Spec, report: Report) -> NetSpec:
    algorithm = spec.agent.algorithm
    change: dict[str, Any] = {}
    if place == CRITIC_NET:
        change |= _without_effect(net, place, OF_ACTOR, "agent.critic_net is for the critics only", report)
        change |= _target_net(net, place, algorithm, report)
    elif spec.agent.critic_net is not None and algorithm.soft:
        change |= _without_effect(net, place, OF_CRITICS, "the critics use agent.critic_net and its keys", report)
    else:
        change |= _resolved_optimizers(net, algorithm, report)
        change |= _target_net(net, place, algorithm, report)
    for key in ("hid_layers_activation", "out_layer_activation"):
        word = getattr(net, key, None)
        if word is not None and "_" in word:
            change[key] = activation(word)  # torch has no underscores: leaky_relu is LeakyReLU
    rollout = spec.agent.rollout_len
    if isinstance(net, RecurrentNetSpec) and spec.agent.memory.on_policy and not spec.agent.memory.episodes and net.seq_len > rollout:
        change["seq_len"] = rollout
        report.note((*place, "seq_len"), f"{net.seq_len} is longer than the rollout of {rollout} steps; {rollout} is used")
    return net.model_copy(update=change)


def _resolved_optimizers(net: NetSpec, algorithm: AlgorithmSpec, report: Report) -> dict[str, Any]:
    """Resolve actor_* and critic_* specs, which need use_same_optim false and a critic."""
    change: dict[str, Any] = {}
    separate = [key for key in SEPARATE if getattr(net, key) is not None]
    if not separate or not algorithm.learns:
        return change
    if algorithm.has_critic and "use_same_optim" not in net.model_fields_set:
        report.note((*NET, separate[0]), "actor and critic have their own specs: use_same_optim is set to false")
        return {"use_same_optim": False}
    if algorithm.has_critic and not net.use_same_optim:
        return change
    reason = "use_same_optim is true" if algorithm.has_critic else f"{algorithm.name} has no critic"
    for key in separate:
        common = key.removeprefix("actor_")
        change[key] = None
        if common != key and common not in net.model_fields_set:
            change[common] = getattr(net, key)
            report.note((*NET, key), f"used as '{common}': {reason}")
        else:
            report.note((*NET, key), f"has no effect: {reason}; ignored")
    return change
