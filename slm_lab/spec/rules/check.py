"""Check the rules that concern several sections of a spec. Contradictions between keys, and names that do not exist, are reported."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from typing import Any, get_args

from slm_lab.spec.compat import env_ids
from slm_lab.spec.compat.migrate import OTHER_NAMES
from slm_lab.spec.models.algorithm import (
    ALGORITHMS,
    EPOCHS,
    EXPLORING,
    AlgorithmSpec,
    C51Spec,
    DistributionalSACSpec,
    PPOSpec,
    SoftActorCriticSpec,
    TQCSpec,
    VTraceSpec,
)
from slm_lab.spec.models.base import NoDecay, SpecModel, is_extension, schedule_order_problem
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.memory import (
    MEMORIES,
    SEQUENCE_MEMORIES,
    HindsightReplaySpec,
    MemorySpec,
    PriorityKeys,
    ReplayKeys,
    ReplaySpec,
    SILReplayKeys,
)
from slm_lab.spec.models.net import (
    NETS,
    NetSpec,
    RecurrentNetSpec,
)
from slm_lab.spec.models.spec import SECTION_KEYS, AgentSpec, Spec
from slm_lab.spec.report import KeyPath, Report, format_json, nearest_hint
from slm_lab.spec.rules.keys import ALGORITHM, SAMPLER, reject_non_defaults
from slm_lab.spec.rules.net_rules import check_global_nets, check_net_in_agent
from slm_lab.spec.rules.sampler_rules import check_sampler
from slm_lab.spec.rules.torch_check import check_torch_names


def check_rules(spec: Spec, report: Report, *, algorithm_known: bool = True, builds_env: bool = True) -> None:
    """Add a problem to `report` for each contradiction between keys of a spec. Each key must be valid on its own.

    Args:
        algorithm_known: whether the name of the algorithm is valid. If the name was guessed, the rules of its algorithm are skipped.
        builds_env: whether the env will be created. If False, the id and the packages of the env are not checked, so that a trained policy
            can be loaded. For the same reason, SIL with normalize_reward, which earlier versions accepted, is not a problem.
    """
    if algorithm_known:
        _check_algorithm(spec, report)
    _check_schedules(spec.agent.algorithm, ALGORITHM, report)
    _check_schedules(spec.agent.memory, ("agent", "memory"), report)
    for key, net in spec.agent.nets.items():
        check_torch_names(net, ("agent", key), report, has_loss=spec.agent.algorithm.uses_loss_spec)
        check_net_in_agent(spec.agent, net, ("agent", key), report)
    _check_memory(spec.agent, report, algorithm_known=algorithm_known)
    _check_env(spec, report)
    if builds_env:
        _check_packages(spec.env, report)
    if builds_env and algorithm_known and spec.agent.algorithm.self_imitation and spec.env.normalize_reward:
        why = "values are compared with returns of past episodes, whose rewards were divided by older standard deviations"
        report.add_problem(("env", "normalize_reward"), f"must be false for {spec.agent.algorithm.name}: {why}; use env.reward_scale")
    _check_goals(spec, report)
    if algorithm_known:
        _check_demonstrations(spec, report)
    if spec.meta.distributed:
        check_global_nets(spec.agent, report)
    if algorithm_known:
        _check_meta(spec, report)
        _reject_ineffective_keys(spec, report)
    if spec.meta.sampler is not None and algorithm_known:
        check_sampler(spec, spec.meta.sampler, report)
    _check_agents(spec, report)


def _check_agents(spec: Spec, report: Report) -> None:
    """Check the keys for envs with several agents, which are agent.policies and meta.self_play."""
    policies, self_play = spec.agent.policies, spec.meta.self_play
    engine = "distributed" if spec.meta.distributed else "sampler" if spec.meta.sampler is not None else None
    if policies is not None and engine == "distributed":
        report.add_problem(
            ("agent", "policies"), "is not supported with meta.distributed, where all Sessions train one policy; remove one of them"
        )
    if policies is not None and spec.meta.sampler is not None and spec.meta.sampler.num_policies > 1:
        report.add_problem(
            (*SAMPLER, "num_policies"), "draws policies for each episode, but agent.policies assigns them to agents; remove one of the keys"
        )
    if self_play is not None and engine is not None:
        why = f"is not supported with meta.{engine}, only with envs that each Session steps itself; remove one of them"
        report.add_problem(("meta", "self_play"), why)
    if engine is None and spec.agent.algorithm.offline:
        for key, value in ((("agent", "policies"), policies), (("meta", "self_play"), self_play)):
            if value is not None:
                report.add_problem(
                    key, f"has no effect: {spec.agent.algorithm.name} learns from recorded episodes and steps no env; remove it"
                )
    if self_play is not None and policies is not None:
        report.add_problem(
            ("meta", "self_play"), "trains one policy against its own snapshots, and does not support agent.policies; remove one of them"
        )
    if self_play is not None and self_play.opponent == "latest" and "past_fraction" in self_play.model_fields_set:
        report.add_problem(("meta", "self_play", "past_fraction"), "has no effect with the opponent 'latest'; remove it")
    owners: dict[str, str] = {}
    for name, agents in (policies or {}).items():
        for i, agent in enumerate(agents):
            if agent in owners:
                report.add_problem(
                    ("agent", "policies", name, i), f"'{agent}' is also an agent of the policy '{owners[agent]}'; expected one policy"
                )
            owners[agent] = name


def fits_memory(algorithm: AlgorithmSpec, memory: MemorySpec) -> bool:
    """Return whether the algorithm can learn from the memory.

    A user-defined memory fits if its `on_policy` and `episodes` are equal to those of a built-in memory that the algorithm supports.
    """
    if memory.name in algorithm.memories or not is_extension(memory.name):
        return memory.name in algorithm.memories
    alike = [MEMORIES[name] for name in algorithm.memories if name in MEMORIES]
    return any((model.on_policy, model.episodes) == (memory.on_policy, memory.episodes) for model in alike)


def _one_of(names: Iterable[str]) -> str:
    *first, last = (f"'{name}'" for name in names)
    return f"{', '.join(first)} or {last}" if first else last


def _is_initial_alpha_given(algorithm: SoftActorCriticSpec, report: Report) -> bool:
    """Return whether initial_alpha differs from its default or was given by a --set argument.

    The default is allowed to be outside of the interval of α, because the spec that a run saves contains the defaults of absent keys.
    """
    is_default = algorithm.initial_alpha == type(algorithm).model_fields["initial_alpha"].default
    return not is_default or report.is_from_set_argument((*ALGORITHM, "initial_alpha"))


def _check_algorithm(spec: Spec, report: Report) -> None:
    algorithm = spec.agent.algorithm
    if isinstance(algorithm, SoftActorCriticSpec) and algorithm.log_alpha_min >= algorithm.log_alpha_max:
        report.add_problem(
            (*ALGORITHM, "log_alpha_min"), f"must be below log_alpha_max ({algorithm.log_alpha_max:g}), not {algorithm.log_alpha_min:g}"
        )
    if isinstance(algorithm, SoftActorCriticSpec) and algorithm.fixed_alpha is None and _is_initial_alpha_given(algorithm, report):
        least, most = (math.exp(min(bound, 700.0)) for bound in (algorithm.log_alpha_min, algorithm.log_alpha_max))  # exp must not overflow
        if not least <= algorithm.initial_alpha <= most:
            allowed = f"from exp(log_alpha_min) = {least:.4g} to exp(log_alpha_max) = {most:.4g}"
            report.add_problem((*ALGORITHM, "initial_alpha"), f"must be {allowed}, not {algorithm.initial_alpha:g}")
    if isinstance(algorithm, TQCSpec) and algorithm.num_quantiles < 2:
        report.add_problem((*ALGORITHM, "num_quantiles"), f"must be at least 2, not {algorithm.num_quantiles}")
    elif isinstance(algorithm, TQCSpec) and algorithm.dropped_quantiles >= algorithm.num_quantiles:
        why = f"must be below num_quantiles ({algorithm.num_quantiles}), not {algorithm.dropped_quantiles}"
        report.add_problem((*ALGORITHM, "dropped_quantiles"), why)
    if algorithm.explores and algorithm.explore_var_spec is None:
        report.add_problem((*ALGORITHM, "explore_var_spec"), f"missing; required by action_policy '{algorithm.action_policy}'", "missing")
    elif not (algorithm.explores or "explore_var_spec" in algorithm.unused_keys):
        policies = get_args(type(algorithm).model_fields["action_policy"].annotation)
        others = " or ".join(f"'{name}'" for name in policies if name in EXPLORING)
        why = f"action_policy is '{algorithm.action_policy}'; set it to {others}"
        reject_non_defaults(algorithm, ("explore_var_spec",), ALGORITHM, why, report)
    if algorithm.action_policy == "boltzmann" and algorithm.action_pdtype == "Argmax":
        why = "has no effect: Argmax takes the best action at every temperature, as in SLM Lab; set action_pdtype to 'Categorical'"
        report.note_ineffective_key((*ALGORITHM, "action_policy"), f"'boltzmann' {why}")
    if isinstance(algorithm, C51Spec | DistributionalSACSpec) and algorithm.num_atoms < 2:
        report.add_problem((*ALGORITHM, "num_atoms"), f"must be at least 2, not {algorithm.num_atoms}")
    if isinstance(algorithm, C51Spec | DistributionalSACSpec) and algorithm.v_min >= algorithm.v_max:
        report.add_problem((*ALGORITHM, "v_min"), f"must be below v_max ({algorithm.v_max:g}), not {algorithm.v_min:g}")
    if isinstance(algorithm, VTraceSpec) and not algorithm.with_vtrace:
        reject_non_defaults(algorithm, ("rho_bar", "c_bar"), ALGORITHM, "with_vtrace is false", report)
    if isinstance(algorithm, PPOSpec):
        _check_ppo(algorithm, report)


def _check_ppo(algorithm: PPOSpec, report: Report) -> None:
    if algorithm.normalize_values:
        reject_non_defaults(algorithm, ("normalize_v_targets", "symlog"), ALGORITHM, "normalize_values scales values and targets", report)
    if (adaptive := algorithm.adaptive_lr) is not None and adaptive.min_lr > adaptive.max_lr:
        report.add_problem((*ALGORITHM, "adaptive_lr", "min_lr"), f"must be at most max_lr ({adaptive.max_lr:g}), not {adaptive.min_lr:g}")


def _check_meta(spec: Spec, report: Report) -> None:
    """Add a problem for each key of the section meta that has no effect, or that cannot be combined with the algorithm or with other keys
    of meta."""
    algorithm, meta = spec.agent.algorithm, spec.meta
    if meta.distributed and getattr(algorithm, "reset_frequency", None) is not None:
        report.add_problem(
            (*ALGORITHM, "reset_frequency"), "cannot be combined with meta.distributed: each Session would reset the nets of all Sessions"
        )
    if meta.distributed and not algorithm.learns:
        report.add_problem(("meta", "distributed"), f"must be false for {algorithm.name}, which does not learn")
    if not meta.distributed:
        keys = ("hogwild_lock",) if meta.sampler is not None else ("hogwild_lock", "max_restart")
        reject_non_defaults(meta, keys, ("meta",), "meta.distributed is false", report)
    if meta.rigorous_eval and meta.eval_episodes not in ("auto", 0):
        report.add_problem(("meta", "eval_episodes"), "must be 0 or absent with meta.rigorous_eval, which has its own evaluations")
    if meta.rigorous_eval == 0:
        reject_non_defaults(meta, ("eval_deterministic",), ("meta",), "meta.rigorous_eval is 0", report)
    if algorithm.on_policy and not algorithm.self_imitation:
        reject_non_defaults(meta, ("save_replay",), ("meta",), f"{algorithm.name} has no replay buffer", report)


def _reject_ineffective_keys(spec: Spec, report: Report) -> None:
    """Add a problem for each key without effect that a --set argument gives. In a spec file, keys without effect are ignored, as in SLM
    Lab."""
    algorithm, meta = spec.agent.algorithm, spec.meta
    groups: list[tuple[KeyPath, Iterable[str], bool, str]] = [
        (("meta",), ("eval_frequency",), meta.rigorous_eval == 0, "meta.rigorous_eval is 0")
    ]
    location: KeyPath
    for key, net in spec.agent.nets.items():
        location = ("agent", key)
        groups.append((location, ("cuda_id",), net.gpu is False, "gpu is false"))
        if algorithm.learns and not algorithm.own_critics and not algorithm.has_critic:
            groups.append((location, ("shared", "use_same_optim", "critic_init_std"), True, f"{algorithm.name} has no critic"))
        groups.append((location, ("actor_init_std",), algorithm.values, f"{algorithm.name} has no actor"))
        why = f"{algorithm.name} learns distributions with its own loss" if algorithm.has_critic else f"{algorithm.name} has no critic"
        groups.append((location, ("loss_spec",), not algorithm.uses_loss_spec, why))
    section: SpecModel
    for section, location in ((algorithm, ALGORITHM), (spec.agent.memory, ("agent", "memory"))):
        constant = [key for key in type(section).model_fields if isinstance(getattr(section, key), NoDecay)]
        groups += [((*location, key), ("end_val", "start_step", "end_step"), True, "no_decay is constant") for key in constant]
    for location, keys, applies, why in groups:
        for key in keys:
            if applies and report.is_from_set_argument((*location, key)) and key in spec_value_at(spec, location).model_fields_set:
                report.add_problem((*location, key), f"has no effect: {why}")


def spec_value_at(spec: Spec, path: KeyPath) -> Any:
    """Return the section or value of a spec at `path`."""
    section: Any = spec
    for key in path:
        section = getattr(section, str(key))
    return section


def check_updates(spec: Spec, report: Report) -> None:
    """Add a problem if a Session (one training run) would end before the agent's first update."""
    algorithm, frames = spec.agent.algorithm, spec.session_frames
    if not algorithm.learns:
        return
    envs = spec.env.num_envs if spec.meta.sampler is None else spec.meta.sampler.num_envs
    steps = -(-frames // envs)
    found = _find_late_rollout(spec, steps) if algorithm.on_policy else _find_late_batch(spec, steps, envs)
    if found:
        path, what = found
        share = f", {frames} of them in each of {spec.meta.max_session} Sessions" if spec.meta.distributed else ""
        report.add_problem(path, f"{what}, but env.max_frame is {spec.env.max_frame}{share}: nothing would be learned")


def _find_late_rollout(spec: Spec, steps: int) -> tuple[KeyPath, str] | None:
    """Return a tuple (path of a key, reason) if the value of the key makes the first rollout longer than `steps` vector steps, else
    None."""
    algorithm, rows = spec.agent.algorithm, spec.agent.rollout_len
    keys = [key for key in ("time_horizon", "num_step_returns", "training_frequency") if getattr(algorithm, key, None) is not None]
    path = (*ALGORITHM, keys[0] if keys else "training_frequency")
    if spec.lacks_net and isinstance(algorithm, EPOCHS) and spec.meta.sampler is None and "time_horizon" not in algorithm.model_fields_set:
        return None  # complete_short_spec sets a time_horizon that is short enough
    if spec.agent.memory.episodes:
        late = rows > spec.session_frames
        return (path, f"trains after {rows} episodes, each of at least one frame") if late else None
    if spec.meta.sampler is not None and spec.rollouts_per_dataset * rows > spec.session_frames:
        return (*SAMPLER, "num_batches_per_epoch"), f"a dataset has {spec.rollouts_per_dataset * rows} frames"
    envs = spec.env.num_envs if spec.meta.sampler is None else spec.meta.sampler.num_envs
    return (path, f"a rollout has {rows} steps × {envs} envs = {rows * envs} frames") if rows > steps else None


def _find_late_batch(spec: Spec, steps: int, envs: int) -> tuple[KeyPath, str] | None:
    """Return a tuple (path of a key, reason) if the value of the key delays the first batch from the replay memory beyond `steps` vector
    steps, else None."""
    algorithm, memory = spec.agent.algorithm, spec.agent.memory
    absent, start = getattr(algorithm, "training_start_step", 0) is None, spec.agent.training_start
    every = getattr(algorithm, "training_frequency", 1)
    batch = getattr(memory, "batch_size", 1)
    if absent and (spec.lacks_net or start == batch):  # a spec without a net gets a training_start_step that is small enough
        start = 0
    if start >= spec.session_frames:
        return (*ALGORITHM, "training_start_step"), f"training starts after {start} transitions{' (the default)' if absent else ''}"
    if absent and batch > steps * envs:
        return ("agent", "memory", "batch_size"), f"training starts after a batch of {batch} transitions"
    if isinstance(spec.agent.net, RecurrentNetSpec) and isinstance(memory, ReplayKeys):
        sequences = memory.sequence_layout(spec.agent.net.seq_len)
        if sequences.count_sequences(steps) * envs < batch:
            what = f"of burn_in + seq_len = {sequences.window} transitions"
            return ("agent", "memory", "batch_size"), f"training starts after a batch of {batch} sequences {what}"
    first = max(1, -(-(max(start, batch) if absent else start) // envs))
    if first * envs // every == (first - 1) * envs // every:
        first = -(-(first * envs // every + 1) * every // envs)
    if first > steps:
        return (*ALGORITHM, "training_frequency"), f"the first training is after {first * envs} transitions"
    return None


def _check_schedules(section: SpecModel, location: KeyPath, report: Report) -> None:
    """Check that the schedules in a section of a spec do not end before they start, and that the schedules' values are in the allowed
    range."""
    for key in type(section).model_fields:
        schedule = getattr(section, key)
        if (problem := schedule_order_problem(schedule)) is not None:
            report.add_problem((*location, key, "end_step"), problem)
        for end in ("start_val", "end_val"):
            value = getattr(schedule, end, None)
            if value is not None and (value < 0 or (key == "beta" and value > 1)):
                allowed = "from 0 to 1" if key == "beta" else "≥ 0"
                report.add_problem((*location, key, end), f"must be a number {allowed}, not {value:g}")


def _check_memory(agent: AgentSpec, report: Report, *, algorithm_known: bool) -> None:
    """Check that the algorithm and the net can use the memory, and that a batch is not larger than the memory."""
    algorithm, memory, location = agent.algorithm, agent.memory, ("agent", "memory")
    if not algorithm.learns:
        return
    if algorithm_known and not fits_memory(algorithm, memory):
        allowed = _one_of(algorithm.memories)
        if isinstance(algorithm, EPOCHS):
            why = "learns from rollouts of time_horizon steps"
        else:
            why = (
                "learns on-policy"
                if algorithm.on_policy
                else f"learns from {'recorded episodes' if algorithm.offline else 'a replay buffer'}"
            )
        report.add_problem((*location, "name"), f"must be {allowed} ({algorithm.name} {why}), not '{memory.name}'")
    replay = memory.sil_replay if isinstance(memory, SILReplayKeys) else memory
    if isinstance(replay, ReplayKeys) and replay.batch_size > replay.max_size:
        report.add_problem((*location, "batch_size"), f"must be at most max_size ({replay.max_size}), not {replay.batch_size}")

    if isinstance(memory, HindsightReplaySpec) and memory.on_device:
        report.add_problem((*location, "on_device"), "must be false: HindsightReplay changes its batches in host memory")
    draws = algorithm.self_imitation or not algorithm.on_policy
    if draws and isinstance(replay, ReplayKeys) and agent.net is not None and agent.net.name in NETS:
        _check_sequences(agent.net, replay, location, report)
    single = is_extension(memory.name) or isinstance(memory, HindsightReplaySpec)
    if algorithm_known and not algorithm.on_policy and single and agent.net is not None and agent.net.recurrent:
        why = f"{agent.net.name} learns from sequences, which only {_one_of(SEQUENCE_MEMORIES)} hold"
        report.add_problem((*location, "name"), f"'{memory.name}' cannot be combined with {agent.net.name}: {why}")


def _check_sequences(net: NetSpec, replay: ReplayKeys, location: KeyPath, report: Report) -> None:
    """Add a problem for each replay key that concerns sequences if the net is not recurrent, because such a net learns from single
    transitions."""
    if net.recurrent:
        return
    for key, default in (("burn_in", None), ("eta", PriorityKeys.model_fields["eta"].default)):
        if getattr(replay, key, default) != default:
            report.add_problem((*location, key), f"has no effect: {net.name} is not recurrent and learns from single transitions")


def _check_env(spec: Spec, report: Report) -> None:
    algorithm = spec.agent.algorithm
    if spec.env.critic_keys is not None and algorithm.learns and not algorithm.has_critic:
        with_critic = ", ".join(name for name, model in ALGORITHMS.items() if model.has_critic)
        report.add_problem(("env", "critic_keys"), f"{algorithm.name} has no critic that reads these entries; allowed: {with_critic}")
    env = spec.env
    if env.backend == "ale" and not env.name.startswith("ALE/"):
        report.add_problem(("env", "backend"), f"'ale' supports ALE/… envs only, not {env.name}")
    if isinstance(env.clip_reward, list) and env.clip_reward[0] >= env.clip_reward[1]:
        report.add_problem(("env", "clip_reward"), f"must be [lo, hi] with lo below hi, not {format_json(env.clip_reward)}")
    for key in env.kwargs:
        other = OTHER_NAMES.get(key, "")
        if hint := f"; slm_lab calls it {other}" if other else nearest_hint(key, SECTION_KEYS[("env",)], cutoff=0.85):
            report.note(("env", key), f"is not a key of env, so it is passed to the env's constructor{hint}")


def _check_packages(env: EnvSpec, report: Report) -> None:
    """Add a problem if the id of the env is unknown, or if a package that the env or its backend needs is not installed."""
    name_problem = None if is_extension(env.backend) else env_ids.unavailable_reason(env.name)  # a user's backend checks its own env ids
    if name_problem is not None:
        report.add_problem(("env", "name"), name_problem)
    if env.backend == "envpool" and importlib.util.find_spec("envpool") is None:
        other = "" if name_problem is not None else "; or choose 'auto', which uses another backend"
        report.add_problem(("env", "backend"), f"needs the package envpool: pip install 'slm-lab[envpool]'{other}")
    if is_extension(env.backend) and (message := env_ids.missing_package_reason(env.backend)):
        report.add_problem(("env", "backend"), message)


def _check_goals(spec: Spec, report: Report) -> None:
    """Add a problem for each key that cannot be combined with HindsightReplay, which computes the rewards of stored transitions again for
    other goals.

    The rejected keys are num_step_returns above 1, and keys of the env that change stored goals, or rewards over time.
    """
    if isinstance(spec.agent.memory, HindsightReplaySpec):
        _require_one_step_returns(spec, "HindsightReplay, which changes the rewards of single transitions", report)
        if spec.env.schedule and spec.agent.memory.goal_threshold is None:
            why = "cannot be combined with HindsightReplay without goal_threshold: the env's compute_reward does not know scheduled values"
            report.add_problem(("env", "schedule"), why)
        why = "cannot be combined with HindsightReplay, which computes the rewards of stored goals"
        if spec.env.normalize_reward:
            report.add_problem(("env", "normalize_reward"), why)
        if spec.env.clip_obs is not None and not spec.env.normalize_obs:
            report.add_problem(("env", "clip_obs"), f"{why}, unless env.normalize_obs is true")


def _require_one_step_returns(spec: Spec, what: str, report: Report) -> None:
    """Add a problem if an off-policy algorithm uses n-step returns with n > 1.

    Args: what: name of the feature that supports only one-step returns.
    """
    if not spec.agent.algorithm.on_policy and getattr(spec.agent.algorithm, "num_step_returns", 1) > 1:
        report.add_problem((*ALGORITHM, "num_step_returns"), f"must be 1 with {what}")


def _check_demonstrations(spec: Spec, report: Report) -> None:
    """Check that the algorithm can learn from demonstrations if the spec gives meta.demonstrations, and that the spec of an offline
    algorithm gives this key."""
    algorithm, location = spec.agent.algorithm, ("meta", "demonstrations")
    memory = spec.agent.memory
    if spec.meta.demonstrations is None:
        if getattr(memory, "demonstration_fraction", None) is not None:
            report.add_problem(("agent", "memory", "demonstration_fraction"), "has no effect: meta.demonstrations is absent")
        if algorithm.offline:
            hint = "record some: slm-lab enjoy@{run folder} --record PATH"
            report.add_problem(location, f"missing; {algorithm.name} learns from recorded episodes alone ({hint})", "missing")
        return
    if algorithm.offline:
        why = f"{algorithm.name} learns from all of meta.demonstrations, and collects nothing"
        if isinstance(memory, ReplaySpec):
            reject_non_defaults(memory, ("max_size", "use_cer", "demonstration_fraction"), ("agent", "memory"), why, report)
    elif algorithm.on_policy or not algorithm.learns:
        learners = ", ".join(name for name, model in ALGORITHMS.items() if not model.on_policy)
        report.add_problem(location, f"{algorithm.name} does not learn from demonstrations; allowed: {learners}")
    else:
        _check_mixed_batches(spec, report)
    if spec.env.normalize_reward:
        report.add_problem(
            ("env", "normalize_reward"), "cannot be combined with meta.demonstrations, whose rewards have no running statistics"
        )


def _check_mixed_batches(spec: Spec, report: Report) -> None:
    """Check that the algorithm and the memory support batches that contain both demonstrations and transitions that the agent has
    collected."""
    memory, net = spec.agent.memory, spec.agent.net
    _require_one_step_returns(spec, "meta.demonstrations, which consists of single transitions", report)
    if not isinstance(memory, ReplaySpec):
        why = "with meta.demonstrations (batches from two buffers have no common priorities or goals)"
        report.add_problem(("agent", "memory", "name"), f"must be 'Replay' {why}, not '{memory.name}'")
    elif memory.demonstration_fraction in (0.0, 1.0):
        why = "; to learn from recorded episodes alone, use BC or IQL" if memory.demonstration_fraction else ""
        message = f"must be above 0 and below 1, not {memory.demonstration_fraction:g}{why}"
        report.add_problem(("agent", "memory", "demonstration_fraction"), message)
    elif memory.batch_size == 1:
        report.add_problem(
            ("agent", "memory", "batch_size"), "must be at least 2 with meta.demonstrations, which provides a part of each batch"
        )
    if net is not None and net.recurrent:
        report.add_problem(
            ("agent", "net", "name"), f"'{net.name}' learns from sequences, which cannot be combined with meta.demonstrations"
        )
