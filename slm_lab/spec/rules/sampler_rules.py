"""Rules of meta.sampler: which algorithms and sizes it supports."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.models.algorithm import ALGORITHMS, ActorCriticSpec, PPOSpec
from slm_lab.spec.models.sampler import SamplerSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Path, Report

SAMPLER: Path = ("meta", "sampler")


def check_sampler(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    """Add a problem for everything that meta.sampler does not support."""
    algorithm, memory = spec.agent.algorithm, spec.agent.memory
    if spec.meta.distributed:
        report.fail(("meta", "distributed"), f"'{spec.meta.distributed}' cannot be combined with meta.sampler; remove one of them")
    if "num_envs" in spec.env.model_fields_set and spec.env.num_envs != sampler.num_envs:
        product = f"num_workers × num_envs_per_worker = {sampler.num_workers} × {sampler.num_envs_per_worker} = {sampler.num_envs}"
        report.fail(("env", "num_envs"), f"must be {product}, or absent, not {spec.env.num_envs}")
    if sampler.pbt is not None and sampler.pbt.perturb_min > sampler.pbt.perturb_max:
        report.fail(
            (*SAMPLER, "pbt", "perturb_min"), f"must be at most perturb_max ({sampler.pbt.perturb_max:g}), not {sampler.pbt.perturb_min:g}"
        )
    if sampler.pbt is not None and sampler.num_policies == 1:
        report.fail((*SAMPLER, "pbt"), "has no effect with one policy; set num_policies to 2 or more")
    if sampler.inference == "central" and sampler.num_envs_per_worker % sampler.worker_num_splits:
        splits = [n for n in range(1, sampler.num_envs_per_worker + 1) if sampler.num_envs_per_worker % n == 0]
        best = min(splits, key=lambda n: abs(n - sampler.worker_num_splits))
        why = f"must divide num_envs_per_worker ({sampler.num_envs_per_worker}), not {sampler.worker_num_splits}; nearest: {best}"
        report.fail((*SAMPLER, "worker_num_splits"), why)
    if not algorithm.samplers:
        report.fail(SAMPLER, f"does not support {algorithm.name}; allowed: {_supported()}")
    elif not algorithm.on_policy:
        _replay(spec, sampler, report)
    elif not memory.on_policy or memory.episodes:
        why = "rollout workers collect rollouts of a fixed length"
        report.fail(("agent", "memory", "name"), f"must be 'OnPolicyBatchReplay' ({why}), not '{memory.name}'")
    else:
        _sizes(spec, sampler, report)


def _supported() -> str:
    """Return the names of the algorithms that rollout workers can collect for."""
    both = [name for name, model in ALGORITHMS.items() if "sync" in model.samplers]
    only_async = [name for name, model in ALGORITHMS.items() if model.samplers == ("async",)]
    return f"{', '.join(both)}, and with async_rl {', '.join(only_async)}"


def _replay(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    name = spec.agent.algorithm.name
    if not sampler.async_rl and "sync" not in spec.agent.algorithm.samplers:
        report.fail((*SAMPLER, "async_rl"), f"must be true for {name}, which learns from a replay buffer")
    for key in ("num_policies", "num_batches_per_epoch"):
        if getattr(sampler, key) > 1:
            report.fail((*SAMPLER, key), f"must be 1 for {name}, which learns from a replay buffer, not {getattr(sampler, key)}")
    if spec.agent.net is not None and spec.agent.net.recurrent:
        why = "rollout workers send a replay buffer no hidden states"
        report.fail(("agent", "net", "name"), f"'{spec.agent.net.name}' cannot be combined with meta.sampler in {name}: {why}; remove one")
    if sampler.max_policy_lag != SamplerSpec.model_fields["max_policy_lag"].default:
        report.fail((*SAMPLER, "max_policy_lag"), f"has no effect: {name} learns from a replay buffer, from transitions of any age")


def _sizes(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    """Check that datasets consist of whole rollouts, in sync mode of whole rounds of all workers."""
    algorithm = spec.agent.algorithm
    if isinstance(algorithm, ActorCriticSpec) and sampler.num_batches_per_epoch > 1:
        why = "ActorCritic takes one gradient step on the rollouts of all workers together"
        report.fail((*SAMPLER, "num_batches_per_epoch"), f"must be 1 ({why}), not {sampler.num_batches_per_epoch}")
    if not isinstance(algorithm, PPOSpec):
        return
    rows, minibatch, batches = spec.rollout_rows, algorithm.minibatch_size, sampler.num_batches_per_epoch
    unit = _unit(spec, sampler)
    if unit == rows:
        what = f"rollouts of time_horizon = {rows} transitions"
    else:
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
        report.fail((*SAMPLER, "num_batches_per_epoch"), f"{sizes}, which is not a multiple of {what}; nearest: {fits}")


def derive_sizes(spec: Spec) -> Spec:
    """Return the spec with those of minibatch_size and num_batches_per_epoch that are absent, if PPO's defaults do not fit the workers.

    A dataset is then one rollout of every env, in minibatches of the given size, or else of the size nearest to the default.
    """
    algorithm, sampler = spec.agent.algorithm, spec.meta.sampler
    if sampler is None or not isinstance(algorithm, PPOSpec):
        return spec
    minibatch, batches = algorithm.minibatch_size, sampler.num_batches_per_epoch
    given = ("minibatch_size" in algorithm.model_fields_set, "num_batches_per_epoch" in sampler.model_fields_set)
    if minibatch * batches % _unit(spec, sampler) == 0 or all(given):
        return spec
    dataset = spec.rollout_rows * sampler.num_envs
    if given[1]:
        minibatch = dataset // batches
    elif not given[0]:
        minibatch = min((n for n in range(1, min(dataset, 4 * minibatch) + 1) if dataset % n == 0), key=lambda n: abs(n - minibatch))
    if minibatch == 0 or dataset % minibatch or (given[1] and dataset % batches):
        return spec  # check_sampler tells the nearest sizes that fit
    agent = spec.agent.model_copy(update={"algorithm": algorithm.model_copy(update={"minibatch_size": minibatch})})
    meta = spec.meta.model_copy(update={"sampler": sampler.model_copy(update={"num_batches_per_epoch": dataset // minibatch})})
    return spec.model_copy(update={"agent": agent, "meta": meta})


def _unit(spec: Spec, sampler: SamplerSpec) -> int:
    """Return the transitions of which a dataset of PPO is a multiple: one rollout, or in sync mode one of every env."""
    return spec.rollout_rows * (1 if sampler.async_rl and not sampler.serial_mode else sampler.num_envs)


def resolve_sampler(spec: Spec, sampler: SamplerSpec, report: Report) -> SamplerSpec:
    """Return meta.sampler with its conflicts resolved, one note for each."""
    change: dict[str, Any] = {}
    if sampler.num_policies > 1 and not sampler.async_rl:
        report.note((*SAMPLER, "async_rl"), "false: the amount of data per policy and round then varies at random")
    if sampler.serial_mode and sampler.async_rl:
        asked = "async_rl" in sampler.model_fields_set and report.is_set((*SAMPLER, "async_rl"))
        (report.fail if asked else report.note)((*SAMPLER, "async_rl"), "serial_mode collects and trains in turns, as with async_rl false")
    if sampler.inference == "central" and (sampler.serial_mode or spec.agent.algorithm.action_policy == "random"):
        why = "serial_mode has one process" if sampler.serial_mode else "random actions need no net"
        report.ineffective((*SAMPLER, "inference"), f"has no effect: {why}; each worker computes its own actions")
        change["inference"] = "local"
    for key, why in _inert(sampler).items():
        default = SamplerSpec.model_fields[key].default
        if getattr(sampler, key) != default:
            report.ineffective((*SAMPLER, key), f"has no effect: {why}; ignored")
            change[key] = default
    return sampler.model_copy(update=change)


def _inert(sampler: SamplerSpec) -> dict[str, str]:
    """Return the keys that have no effect, and why."""
    inert = {"worker_num_splits": "inference is 'local'"} if sampler.inference == "local" else {}
    if sampler.serial_mode or not sampler.async_rl:
        why = "serial_mode is true" if sampler.serial_mode else "async_rl is false"
        inert["num_batches_to_accumulate"] = why
        if sampler.serial_mode:
            inert["worker_num_splits"] = why
        if sampler.num_policies == 1:  # the data of one of several policies can wait for more
            inert["max_policy_lag"] = why
    return inert
