"""Rules of meta.sampler: what it fits with, and which sizes."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.algorithm import ActorCriticSpec, PPOSILSpec, PPOSpec, ReplayAlgorithmSpec, SILSpec
from slm_lab.spec.memory import OnPolicyBatchReplaySpec
from slm_lab.spec.report import Path, Report
from slm_lab.spec.sampler import SamplerSpec
from slm_lab.spec.spec import Spec

SAMPLER: Path = ("meta", "sampler")


def check_sampler(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    """Add a problem for everything that a sampler cannot do."""
    algorithm = spec.agent.algorithm
    if spec.meta.distributed:
        report.fail(("meta", "distributed"), f"'{spec.meta.distributed}' and meta.sampler exclude each other; give one of them")
    if "num_envs" in spec.env.model_fields_set and spec.env.num_envs != sampler.num_envs:
        product = f"num_workers × num_envs_per_worker = {sampler.num_workers} × {sampler.num_envs_per_worker} = {sampler.num_envs}"
        report.fail(("env", "num_envs"), f"must be {product}, or absent, not {spec.env.num_envs}")
    if sampler.pbt is not None and sampler.pbt.perturb_min > sampler.pbt.perturb_max:
        report.fail(
            (*SAMPLER, "pbt", "perturb_min"), f"must be at most perturb_max ({sampler.pbt.perturb_max:g}), not {sampler.pbt.perturb_min:g}"
        )
    if sampler.inference == "central" and sampler.num_envs_per_worker % sampler.worker_num_splits:
        splits = [n for n in range(1, sampler.num_envs_per_worker + 1) if sampler.num_envs_per_worker % n == 0]
        best = min(splits, key=lambda n: abs(n - sampler.worker_num_splits))
        why = f"must divide num_envs_per_worker ({sampler.num_envs_per_worker}), not {sampler.worker_num_splits}; nearest: {best}"
        report.fail((*SAMPLER, "worker_num_splits"), why)
    if isinstance(algorithm, ReplayAlgorithmSpec):
        _replay(spec, sampler, report)
    elif isinstance(algorithm, (SILSpec, PPOSILSpec)) or not isinstance(algorithm, (PPOSpec, ActorCriticSpec)):
        allowed = "PPO, ActorCritic, and with async_rl VanillaDQN, DQN, DoubleDQN, SoftActorCritic, CrossQ"
        report.fail(SAMPLER, f"cannot collect for {algorithm.name}; allowed: {allowed}")
    elif not isinstance(spec.agent.memory, OnPolicyBatchReplaySpec):
        why = "rollouts of rollout workers have a fixed length"
        report.fail(("agent", "memory", "name"), f"must be 'OnPolicyBatchReplay' ({why}), not '{spec.agent.memory.name}'")
    else:
        _sizes(spec, sampler, report)


def _replay(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    name = spec.agent.algorithm.name
    if not sampler.async_rl:
        report.fail((*SAMPLER, "async_rl"), f"must be true for {name}, which learns from a replay memory")
    for key in ("num_policies", "num_batches_per_epoch"):
        if getattr(sampler, key) > 1:
            report.fail((*SAMPLER, key), f"must be 1 for {name}, which learns from a replay memory, not {getattr(sampler, key)}")


def _sizes(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    """Rollouts make up datasets without a rest, in sync mode whole rounds of all workers."""
    if isinstance(spec.agent.algorithm, ActorCriticSpec):
        if sampler.num_batches_per_epoch > 1:
            why = "ActorCritic takes one step on the rollouts of all workers together"
            report.fail((*SAMPLER, "num_batches_per_epoch"), f"must be 1 ({why}), not {sampler.num_batches_per_epoch}")
        return
    assert isinstance(spec.agent.algorithm, PPOSpec)
    rows, minibatch, batches = spec.rollout_rows, spec.agent.algorithm.minibatch_size, sampler.num_batches_per_epoch
    if sampler.async_rl and not sampler.serial_mode:
        unit, what = rows, f"rollouts of time_horizon = {rows} transitions"
    else:
        unit = rows * sampler.num_envs
        rounds = (
            f"num_workers × num_envs_per_worker × time_horizon = {sampler.num_workers} × {sampler.num_envs_per_worker} × {rows} = {unit}"
        )
        what = f"rounds of {rounds} transitions"
    dataset = minibatch * batches
    if dataset % unit:
        nearest = max(1, round(dataset / unit)) * unit
        fitting = [n for n in range(1, nearest + 1) if nearest % n == 0]
        by_batches = min(fitting, key=lambda n: (abs(n - batches), n))
        found = [(minibatch, nearest // minibatch)] if nearest % minibatch == 0 else []
        fits = " or ".join(f"{size} × {count}" for size, count in dict.fromkeys([*found, (nearest // by_batches, by_batches)]))
        sizes = f"minibatch_size × num_batches_per_epoch = {minibatch} × {batches} = {dataset} transitions"
        report.fail((*SAMPLER, "num_batches_per_epoch"), f"{sizes} are not whole {what}; nearest that are: {fits}")


def settled_sampler(spec: Spec, sampler: SamplerSpec, report: Report) -> SamplerSpec:
    """The sampler with what a rule decides, a note for each."""
    change: dict[str, Any] = {}
    if sampler.pbt is not None and sampler.num_policies == 1:
        report.note((*SAMPLER, "pbt"), "has no effect with one policy; dropped")
        change["pbt"] = None
    if sampler.num_policies > 1 and not sampler.async_rl:
        report.note((*SAMPLER, "async_rl"), "false: each policy then trains on what a round happens to give it")
    if sampler.serial_mode and sampler.async_rl:
        report.note((*SAMPLER, "async_rl"), "serial_mode collects and trains in turn, as with async_rl false")
    if sampler.inference == "central" and (sampler.serial_mode or spec.agent.algorithm.action_policy == "random"):
        why = "serial_mode has one process" if sampler.serial_mode else "random actions need no net"
        report.note((*SAMPLER, "inference"), f"{why}: each worker chooses its own actions")
        change["inference"] = "local"
    most = SamplerSpec.model_fields["max_policy_lag"].default
    if isinstance(spec.agent.algorithm, ReplayAlgorithmSpec) and sampler.max_policy_lag != most:
        name, change["max_policy_lag"] = spec.agent.algorithm.name, most  # as absent, so that a saved spec does not say so again
        report.note((*SAMPLER, "max_policy_lag"), f"has no effect: {name} learns from old transitions, whoever chose the actions")
    return sampler.model_copy(update=change)
