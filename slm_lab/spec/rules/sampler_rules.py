"""Rules for meta.sampler (rollout workers), which concern the supported algorithms and the sizes of datasets and minibatches."""

from __future__ import annotations

from slm_lab.spec.models.algorithm import ALGORITHMS, EPOCHS, ActorCriticSpec
from slm_lab.spec.models.meta import SamplerSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Report
from slm_lab.spec.rules.keys import SAMPLER


def check_sampler(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    """Add a problem to `report` for each key of the spec that cannot be combined with meta.sampler, and for each contradiction between keys
    of meta.sampler."""
    algorithm, memory = spec.agent.algorithm, spec.agent.memory
    if spec.meta.distributed:
        report.add_problem(("meta", "distributed"), f"'{spec.meta.distributed}' cannot be combined with meta.sampler; remove one of them")
    if "num_envs" in spec.env.model_fields_set and spec.env.num_envs != sampler.num_envs:
        product = f"num_workers × num_envs_per_worker = {sampler.num_workers} × {sampler.num_envs_per_worker} = {sampler.num_envs}"
        report.add_problem(("env", "num_envs"), f"must be {product}, or absent, not {spec.env.num_envs}")
    if sampler.pbt is not None and sampler.pbt.perturb_min > sampler.pbt.perturb_max:
        report.add_problem(
            (*SAMPLER, "pbt", "perturb_min"), f"must be at most perturb_max ({sampler.pbt.perturb_max:g}), not {sampler.pbt.perturb_min:g}"
        )
    if sampler.pbt is not None and sampler.num_policies == 1:
        report.add_problem((*SAMPLER, "pbt"), "has no effect with one policy; set num_policies to 2 or more")
    elif sampler.pbt is not None and sampler.pbt.replaced_policies(sampler.num_policies) >= sampler.num_policies:
        fraction, most = sampler.pbt.replace_fraction, 1000 * (sampler.num_policies - 1) // sampler.num_policies / 1000
        why = "because the best policy is never replaced"
        message = f"must be at most {most:g} with {sampler.num_policies} policies, {why}, not {fraction:g}"
        report.add_problem((*SAMPLER, "pbt", "replace_fraction"), message)
    if sampler.inference == "central" and sampler.num_envs_per_worker % sampler.worker_num_splits:
        splits = [n for n in range(1, sampler.num_envs_per_worker + 1) if sampler.num_envs_per_worker % n == 0]
        best = min(splits, key=lambda n: abs(n - sampler.worker_num_splits))
        why = f"must divide num_envs_per_worker ({sampler.num_envs_per_worker}), not {sampler.worker_num_splits}; nearest: {best}"
        report.add_problem((*SAMPLER, "worker_num_splits"), why)
    if sampler.inference == "central" and getattr(spec.agent.net, "noisy", False):
        report.add_problem(
            (*SAMPLER, "inference"), "'central' is not supported with a noisy net, whose noise each worker draws; allowed: local"
        )
    if not algorithm.samplers:
        report.add_problem(SAMPLER, f"does not support {algorithm.name}; allowed: {_supported_algorithms()}")
    elif not algorithm.on_policy:
        _check_replay(spec, sampler, report)
    elif not memory.on_policy or memory.episodes:
        why = "rollout workers collect rollouts of a fixed length"
        report.add_problem(("agent", "memory", "name"), f"must be 'OnPolicyBatchReplay' ({why}), not '{memory.name}'")
    else:
        _check_dataset_sizes(spec, sampler, report)


def _supported_algorithms() -> str:
    """Return the names of the algorithms that support rollout workers, as text for a message."""
    both = [name for name, model in ALGORITHMS.items() if "sync" in model.samplers]
    only_async = [name for name, model in ALGORITHMS.items() if model.samplers == ("async",)]
    return f"{', '.join(both)}, and with async_rl {', '.join(only_async)}"


def _check_replay(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    name = spec.agent.algorithm.name
    if not sampler.async_rl and "sync" not in spec.agent.algorithm.samplers:
        report.add_problem((*SAMPLER, "async_rl"), f"must be true for {name}, which learns from a replay buffer")
    for key in ("num_policies", "num_batches_per_epoch"):
        if getattr(sampler, key) > 1:
            report.add_problem((*SAMPLER, key), f"must be 1 for {name}, which learns from a replay buffer, not {getattr(sampler, key)}")
    if spec.agent.net is not None and spec.agent.net.recurrent:
        why = "rollout workers send no hidden states to a replay buffer"
        report.add_problem(
            ("agent", "net", "name"), f"'{spec.agent.net.name}' cannot be combined with meta.sampler in {name}: {why}; remove one of them"
        )
    if sampler.max_policy_lag != SamplerSpec.model_fields["max_policy_lag"].default:
        report.add_problem(
            (*SAMPLER, "max_policy_lag"), f"has no effect: {name} learns from a replay buffer, which contains transitions of any age"
        )


def _check_dataset_sizes(spec: Spec, sampler: SamplerSpec, report: Report) -> None:
    """Check that the dataset of an update consists of complete rollouts and, in synchronous mode, of equally many rollouts of each env."""
    algorithm = spec.agent.algorithm
    if isinstance(algorithm, ActorCriticSpec) and sampler.num_batches_per_epoch > 1:
        why = "ActorCritic takes one gradient step on the rollouts of all workers together"
        report.add_problem((*SAMPLER, "num_batches_per_epoch"), f"must be 1 ({why}), not {sampler.num_batches_per_epoch}")
    if not isinstance(algorithm, EPOCHS):
        return
    rows, minibatch, batches = spec.worker_rollout_len, algorithm.minibatch_size, sampler.num_batches_per_epoch
    unit = dataset_unit(spec, sampler)
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
        report.add_problem((*SAMPLER, "num_batches_per_epoch"), f"{sizes}, which is not a multiple of {what}; nearest: {fits}")


def dataset_unit(spec: Spec, sampler: SamplerSpec) -> int:
    """Return the number of transitions that must divide the size of a dataset of PPO or PQN.

    The returned number is the length of a rollout or, in synchronous mode, the length of a rollout multiplied by the number of envs.
    """
    return spec.worker_rollout_len * (1 if sampler.async_rl and not sampler.serial_mode else sampler.num_envs)
