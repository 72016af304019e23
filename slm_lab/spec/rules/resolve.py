"""Resolve a valid spec to the values that a run uses: correct values that a run cannot use, reset keys that have no effect, and fill in
absent values.

If a function changes a value that the user has given, it usually reports the change with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slm_lab.spec.compat.env_ids import success_entry
from slm_lab.spec.models.algorithm import (
    ALGORITHMS,
    EPOCHS,
    ActorCriticSpec,
    EntropyAnneal,
    EpsilonGreedySpec,
    PPOSpec,
    PQNSpec,
    QLearningSpec,
    ReinforceSpec,
    ReplayActorCriticSpec,
    ReplayAlgorithmSpec,
    SARSASpec,
    SoftActorCriticSpec,
    VTraceSpec,
)
from slm_lab.spec.models.base import LinearDecay, constant_schedule
from slm_lab.spec.models.memory import PriorityKeys, SILReplayKeys
from slm_lab.spec.models.meta import SamplerSpec
from slm_lab.spec.models.net import NETS, LossSpec, NetSpec, RecurrentNetSpec
from slm_lab.spec.models.search import parse_search, redirect_search, walk_search_keys
from slm_lab.spec.models.spec import AgentSpec, Spec
from slm_lab.spec.report import CRITIC_NET, NET, KeyPath, Report, remove_v4_index, type_to_name_key
from slm_lab.spec.rules.check import spec_value_at
from slm_lab.spec.rules.keys import ALGORITHM, MEMORY, SAMPLER
from slm_lab.spec.rules.sampler_rules import dataset_unit
from slm_lab.spec.rules.torch_check import OPTIMIZER_KEYS, activation_class

_NAME: KeyPath = (*ALGORITHM, "name")
SEPARATE = ("actor_optim_spec", "actor_lr_scheduler_spec", "critic_optim_spec", "critic_lr_scheduler_spec")
"""Keys of agent.net that describe the separate optimizers and learning rate schedulers of actor and critic."""
DECIDES_OPTIMIZERS: tuple[KeyPath, ...] = ((*NET, "shared"), (*NET, "use_same_optim"), (*ALGORITHM, "name"))
"""Paths of the keys that determine which of the keys in SEPARATE have an effect."""
TARGET_NET = ("update_type", "update_frequency", "polyak_coef")
"""Keys of agent.net that describe the updates of target nets."""
CRITIC_KEYS = (*TARGET_NET, "loss_spec", "critic_optim_spec", "critic_lr_scheduler_spec", "critic_init_std", "critic_arc", "dropout")
"""Keys of agent.net that concern critics. These keys have no effect if the spec has agent.critic_net."""
ACTOR_KEYS = (
    "shared", "use_same_optim", "log_std_init", "actor_init_std", "actor_optim_spec", "actor_lr_scheduler_spec", "actor_arc",
    "out_layer_activation", "gpu", "cuda_id", "tf32", "seq_len",
)  # fmt: skip
"""Keys of nets that have no effect in agent.critic_net."""
TUNED_ALPHA = ("initial_alpha", "alpha_lr", "target_entropy", "target_entropy_ratio", "entropy_anneal", "log_alpha_min", "log_alpha_max")
"""Keys of agent.algorithm that concern the automatically tuned temperature of soft actor-critic."""


class _SpecDraft:
    """A spec to which `resolve_spec` applies its changes. Each change replaces one value of the spec, and can add a note to the report."""

    def __init__(self, spec: Spec, report: Report) -> None:
        self.spec, self.report = spec, report

    def set(self, path: KeyPath, value: Any, note: str = "", by: Sequence[KeyPath] = ()) -> None:
        """Replace the value at `path`, and add the note `note` to the report if the text is not empty.

        Args: by: paths of the keys that the new value depends on. If a hyperparameter search varies a key in `by`, the value is not
        replaced in this spec, but in the spec of each trial.
        """
        if self._is_left_to_trials(by):
            return
        if note.startswith("has no effect"):
            self.report.note_ineffective_key(path, note)
        elif note:
            self.report.note(path, note)
        for end in range(len(path) - 1, -1, -1):
            value = spec_value_at(self.spec, path[:end]).model_copy(update={str(path[end]): value})
        self.spec = value

    def reset_keys(self, location: KeyPath, keys: Iterable[str], why: str, by: Sequence[KeyPath] = ()) -> None:
        """Reset each of `keys` to its default value. For each key whose value is not the default, add a note with the reason `why`.

        Args: by: paths of the keys on which the reset depends (see `set`).
        """
        model = spec_value_at(self.spec, location)
        for key, field in type(model).model_fields.items():
            if key in keys and getattr(model, key) != field.default and not self._is_left_to_trials(by):
                self.set((*location, key), field.default, f"has no effect: {why}; ignored")
                spec_value_at(self.spec, location).model_fields_set.discard(key)  # model_fields_set belongs to a copy of the section

    def _is_left_to_trials(self, by: Sequence[KeyPath]) -> bool:
        return bool(by) and _is_searched(self.spec, *by)


def resolve_spec(spec: Spec, report: Report) -> Spec:
    """Return a copy of the spec with the values that a run will use, and add notes on the changes to `report`."""
    agent, draft = spec.agent, _SpecDraft(spec, report)
    _resolve_algorithm(draft)
    for key, net in agent.nets.items():
        _resolve_net(net, ("agent", key), draft)
    if agent.critic_net is not None and not agent.algorithm.own_critics:
        names = [name for name, model in ALGORITHMS.items() if model.own_critics]
        draft.set(CRITIC_NET, None, f"has no effect in {agent.algorithm.name}, only in {', '.join(names)}; ignored", by=[_NAME])
    if agent.algorithm.own_critics and not agent.algorithm.has_target:
        _note_missing_batch_norm(agent, report)
    _resolve_memory(draft)
    _resolve_meta(draft)
    if spec.search is not None:
        draft.set(("search",), _redirect_search(spec.search, agent.net, draft))
    return draft.spec


def _resolve_meta(draft: _SpecDraft) -> None:
    """Set meta.track_info, meta.sampler and env.num_envs to the values that a run will use, and add notes on the keys of distributed
    training."""
    agent, meta = draft.spec.agent, draft.spec.meta
    if "track_info" not in meta.model_fields_set and (success := success_entry(draft.spec.env.name)):
        draft.set(("meta", "track_info"), [success], by=[("env", "name"), ("meta", "track_info")])
    for key, net in agent.nets.items():
        _note_global_optimizers(net, ("agent", key), bool(meta.distributed), draft.report)
    if meta.sampler is not None:
        _resolve_sampler(meta.sampler, draft)
    if agent.algorithm.offline:
        why = f"{agent.algorithm.name} steps no env in training"
        draft.reset_keys(("env",), ["num_envs"], why, by=[_NAME])
    if meta.distributed and meta.max_session == 1:
        why = f"'{meta.distributed}' is the same as false with one session; set meta.max_session to 2 or more"
        draft.report.note(("meta", "distributed"), why)


def _note_global_optimizers(net: NetSpec, location: KeyPath, distributed: bool, report: Report) -> None:
    """Add a note for each Global optimizer (such as GlobalAdam) without distributed training, and for each other optimizer with distributed
    training. There is no note on optim_spec if other keys replace it for both actor and critic.

    In distributed training, all Sessions (training processes) share the statistics of a Global optimizer.
    """
    replaced = net.actor_optim_spec is not None and (net.use_same_optim or net.critic_optim_spec is not None)
    for key in OPTIMIZER_KEYS[1:] if replaced else OPTIMIZER_KEYS:
        optim = getattr(net, key)
        if optim is None or optim.name.startswith("Global") == distributed:
            continue
        if distributed:
            common = "GlobalRMSprop" if optim.name == "RMSprop" else "GlobalAdam"
            statistics = f"{optim.name} keeps separate statistics in each Session"
            report.note((*location, key), f"{statistics}; {common} shares them")
        else:
            report.note((*location, key), f"without meta.distributed {optim.name} is the same as {optim.name.removeprefix('Global')}")


def _note_missing_batch_norm(agent: AgentSpec, report: Report) -> None:
    """Add a note if the critics of an algorithm without target nets have no batch normalisation."""
    key = "net" if agent.critic_net is None else "critic_net"
    net = getattr(agent, key)
    arcs = (getattr(net, "critic_arc", None), getattr(net, "arc", None))
    if net is not None and not getattr(net, "batch_norm", False) and not any("Batch" in str(arc) for arc in arcs):
        missing = f"the critics have no batch normalisation, which {agent.algorithm.name} needs instead of target nets"
        report.note(("agent", key), f"{missing}; set batch_norm, or use LazyBatchRenorm1d in a TorchArcNet")


def _redirect_search(search: dict[str, Any], net: NetSpec | None, draft: _SpecDraft) -> dict[str, Any]:
    """Return the search section without search keys of optimizer specs that are not used, and of keys without effect in the algorithm.

    If the actor's optimizer spec has replaced the common optimizer spec, search keys of the actor's optimizer spec are changed to search
    keys of the common optimizer spec. All other search keys of optimizer specs that are not used are removed, with a note.
    """
    resolved = draft.spec.agent.net
    moved: dict[KeyPath, KeyPath | None] = {}
    if not _is_searched(draft.spec, _NAME):
        moved |= {(*ALGORITHM, key): None for key in draft.spec.agent.algorithm.unused_keys}
    for key in SEPARATE:
        if net is not None and getattr(net, key) is not None and getattr(resolved, key) is None:
            common = key.removeprefix("actor_")
            moved_to_common = common != key and getattr(resolved, common) == getattr(net, key)
            moved[(*NET, key)] = (*NET, common) if moved_to_common else None
            if moved_to_common and common in net.model_fields_set:  # the actor's spec has replaced the common spec
                moved[(*NET, common)] = None
    return redirect_search(search, moved, draft.report)


def _resolve_algorithm(draft: _SpecDraft) -> None:
    spec, algorithm = draft.spec, draft.spec.agent.algorithm
    if isinstance(algorithm, SoftActorCriticSpec):
        if algorithm.fixed_alpha is None:
            draft.reset_keys(ALGORITHM, ["alpha_anneal_frames"], "there is no fixed_alpha", by=[(*ALGORITHM, "fixed_alpha")])
        else:
            draft.reset_keys(ALGORITHM, TUNED_ALPHA, "fixed_alpha is given", by=[(*ALGORITHM, "fixed_alpha")])
        if isinstance(algorithm.entropy_anneal, EntropyAnneal) and algorithm.target_entropy != "auto":
            why = "target_entropy is given, and ratios belong to 'auto'"
            draft.reset_keys(ALGORITHM, ["entropy_anneal"], why, by=[(*ALGORITHM, "target_entropy")])
    for key, why in algorithm.unused_keys.items():
        draft.reset_keys(ALGORITHM, [key], why, by=[_NAME])
    if isinstance(algorithm, ReplayAlgorithmSpec) and algorithm.training_start_step is None and not spec.lacks_net:
        draft.set((*ALGORITHM, "training_start_step"), spec.agent.training_start, by=[_NAME, (*MEMORY, "batch_size")])
    if isinstance(algorithm, VTraceSpec):
        _note_vtrace(algorithm, draft)
    if isinstance(algorithm, ActorCriticSpec) and algorithm.lam is not None:
        draft.reset_keys(ALGORITHM, ["num_step_returns"], "lam is given (generalised advantage estimation)", by=[(*ALGORITHM, "lam")])
    if isinstance(algorithm, PPOSpec) and algorithm.clip_vloss and not _is_searched(spec, (*ALGORITHM, "clip_vloss")):
        draft.reset_keys(ALGORITHM, ["normalize_v_targets"], "clip_vloss compares values as they are")
        if spec.agent.net is not None and spec.agent.net.loss_spec != LossSpec():
            draft.report.note_ineffective_key(
                (*NET, "loss_spec"), "has no effect: the loss with clip_vloss is half the squared error; ignored"
            )
    if isinstance(algorithm, EPOCHS):
        _resolve_minibatch_size(algorithm, draft)
    if isinstance(algorithm, PPOSpec):
        given = algorithm.training_frequency not in (None, algorithm.time_horizon)
        why = f"has no effect: {algorithm.name} trains every time_horizon ({algorithm.time_horizon}) steps; ignored"
        draft.set((*ALGORITHM, "training_frequency"), None, why if given else "", by=[_NAME])


def _resolve_minibatch_size(algorithm: PPOSpec | PQNSpec, draft: _SpecDraft) -> None:
    """Reduce minibatch_size to the number of transitions of a rollout if minibatch_size is larger than this number."""
    spec, steps, rollout = draft.spec, algorithm.time_horizon, algorithm.time_horizon * draft.spec.env.num_envs
    sizes = [(*ALGORITHM, "time_horizon"), (*ALGORITHM, "minibatch_size"), ("env", "num_envs")]
    is_open = spec.lacks_net and "time_horizon" not in algorithm.model_fields_set  # `complete_short_spec` sets time_horizon later
    if algorithm.minibatch_size > rollout and spec.meta.sampler is None and not is_open:
        why = f"{algorithm.minibatch_size} is larger than the rollout of {steps} steps × {spec.env.num_envs} envs; {rollout} is used"
        draft.set((*ALGORITHM, "minibatch_size"), rollout, why if "minibatch_size" in algorithm.model_fields_set else "", sizes)


def _note_vtrace(algorithm: VTraceSpec, draft: _SpecDraft) -> None:
    if not algorithm.with_vtrace:
        return
    if algorithm.c_bar > algorithm.rho_bar:
        why = f"{algorithm.c_bar:g} is above rho_bar ({algorithm.rho_bar:g}); V-trace assumes c_bar ≤ rho_bar"
        draft.report.note((*ALGORITHM, "c_bar"), why)
    for key in ("rho_bar", "c_bar"):
        if (bound := getattr(algorithm, key)) < 1:
            draft.report.note((*ALGORITHM, key), f"{bound:g} is below 1, so even on-policy actions are weighted down")


def _resolve_memory(draft: _SpecDraft) -> None:
    """Set absent keys of prioritised replay in agent.memory, and remove those replay keys of an on-policy memory that have no effect.

    The replay keys of an on-policy memory have an effect only if the algorithm uses self-imitation learning.
    """
    location, memory, net = MEMORY, draft.spec.agent.memory, draft.spec.agent.net
    imitated = memory.sil_replay if isinstance(memory, SILReplayKeys) and draft.spec.agent.algorithm.self_imitation else None
    if isinstance(priorities := imitated or memory, PriorityKeys):
        sequences = net is not None and net.recurrent
        if priorities.beta is None and sequences:
            draft.set((*location, "beta"), constant_schedule(0.4), by=[(*NET, "name")])
        if priorities.initial_error is None:
            draft.set((*location, "initial_error"), "greatest" if sequences else 100_000.0, by=[(*NET, "name")])
    if not isinstance(memory, SILReplayKeys):
        return
    if draft.spec.agent.algorithm.self_imitation:
        if not isinstance(memory.sil_replay, PriorityKeys):
            draft.reset_keys(
                location, PriorityKeys.model_fields, "sil_replay_name names a uniform replay", by=[(*location, "sil_replay_name")]
            )
        return
    imitate = ", ".join(name for name, model in ALGORITHMS.items() if model.self_imitation)
    for key in SILReplayKeys.model_fields:
        if getattr(memory, key) is not None:
            draft.set((*location, key), None, f"has no effect in {memory.name} without self-imitation ({imitate}); ignored", by=[_NAME])


def _ignore_polyak_coef(net: NetSpec, location: KeyPath, draft: _SpecDraft) -> None:
    """Reset the key polyak_coef of a net with update_type="replace".

    Add a note if polyak_coef does not have its default value, or if the user has given polyak_coef without update_type.
    """
    by_default = "update_type" not in net.model_fields_set  # never in a saved spec, which contains the default values of all keys
    why = "update_type is 'replace'" + (" by default; set it to 'polyak'" if by_default else "")
    if by_default and "polyak_coef" in net.model_fields_set and net.polyak_coef == NetSpec.model_fields["polyak_coef"].default:
        draft.report.note_ineffective_key((*location, "polyak_coef"), f"has no effect: {why}; ignored")
    draft.reset_keys(location, ["polyak_coef"], why, by=[_NAME, (*location, "update_type")])


def _resolve_net(net: NetSpec, location: KeyPath, draft: _SpecDraft) -> None:
    agent, algorithm = draft.spec.agent, draft.spec.agent.algorithm
    if location == CRITIC_NET:
        draft.reset_keys(location, ACTOR_KEYS, "agent.critic_net is for the critics only")
    elif agent.critic_net is not None and algorithm.own_critics:
        draft.reset_keys(location, CRITIC_KEYS, "the critics use agent.critic_net and its keys")
    else:
        _resolve_optimizers(net, draft)
    if not algorithm.uses_loss_spec:
        note = f"has no effect: {algorithm.name} learns distributions with its own loss; ignored" if algorithm.has_critic else ""
        note = note if net.loss_spec != LossSpec() else ""
        draft.set((*location, "loss_spec"), LossSpec(), note, by=[_NAME])  # the name in the spec may not be a regression loss
    if algorithm.value_distribution() is not None:
        draft.reset_keys(location, ["loss_spec"], f"{algorithm.name} learns distributions with its own loss", by=[_NAME])
    if algorithm.learns and not algorithm.has_target:
        draft.reset_keys(location, TARGET_NET, f"{algorithm.name} has no target net", by=[_NAME])
    elif net.update_type == "replace":
        _ignore_polyak_coef(net, location, draft)
    else:
        why = "update_type is 'polyak', which updates with each gradient or vector step"
        draft.reset_keys(location, ["update_frequency"], why, by=[_NAME, (*location, "update_type")])
        if net.polyak_coef == 0.0 and draft.report.for_slm_lab:
            draft.report.note((*location, "polyak_coef"), "0: the target network never changes")
        if "polyak_coef" not in net.model_fields_set:
            message = f"absent: {net.polyak_coef:g} is used; with SLM Lab's default 0, the target network would never change"
            draft.report.note((*location, "polyak_coef"), message)
            draft.report.note_difference((*location, "polyak_coef"), "polyak_coef", message)
    for key in OPTIMIZER_KEYS if draft.spec.search is None else ():  # without a search, which may change the name of the optimizer
        current = getattr(spec_value_at(draft.spec, location), key)
        if current is not None and current.lr is None:
            draft.set((*location, key), current.model_copy(update={"lr": current.learning_rate}))
    for key in ("hid_layers_activation", "out_layer_activation"):
        word = getattr(net, key, None)
        if word is not None and "_" in word:
            draft.set((*location, key), activation_class(word))  # names in torch have no underscores, such as LeakyReLU for leaky_relu
    rollout = agent.rollout_len
    if isinstance(net, RecurrentNetSpec) and agent.memory.on_policy and not agent.memory.episodes and net.seq_len > rollout:
        draft.set((*location, "seq_len"), rollout)  # only a default value can be longer, because a longer value in the spec is an error


def _is_searched(spec: Spec, *paths: KeyPath) -> bool:
    """Return whether the search section varies a key at one of `paths`, or a section that contains such a key."""
    keys = [type_to_name_key(remove_v4_index(key.path)) for key, _ in walk_search_keys(parse_search(spec.search))]
    return any(path[: len(key)] == key for path in paths for key in keys)


def _resolve_optimizers(net: NetSpec, draft: _SpecDraft) -> None:
    """Set the keys for separate optimizers of actor and critic to the values that a run will use.

    The keys for separate optimizers have an effect only if actor and critic are separate nets and use_same_optim is false.
    """
    algorithm = draft.spec.agent.algorithm
    separate, one_net = [key for key in SEPARATE if getattr(net, key) is not None], net.shared and not algorithm.own_critics
    if not algorithm.learns or _is_searched(draft.spec, *DECIDES_OPTIMIZERS):
        return
    if algorithm.has_critic and not one_net:
        if not net.use_same_optim:
            return
        if separate and "use_same_optim" not in net.model_fields_set:
            draft.report.note((*NET, separate[0]), "actor and critic have their own specs: use_same_optim is set to false")
            draft.set((*NET, "use_same_optim"), False)
            return
    reason = "actor and critic are one net (shared)" if one_net else "use_same_optim is true"
    reason = reason if algorithm.has_critic else f"{algorithm.name} has no critic"
    if not net.use_same_optim:
        draft.set((*NET, "use_same_optim"), True, "" if separate else f"false has no effect: {reason}; ignored")
    for key in separate:
        common = key.removeprefix("actor_")
        given = common in net.model_fields_set
        replaces = algorithm.has_critic or not (given or draft.report.for_slm_lab)
        if common != key and replaces:  # as in SLM Lab, the actor's spec replaces the common spec and needs a critic
            draft.set((*NET, common), getattr(net, key))
            draft.set((*NET, key), None, "" if draft.report.for_slm_lab and not given else f"used as '{common}': {reason}")
        else:
            same = key.startswith("critic_") and getattr(net, key) == getattr(net, key.replace("critic_", "actor_"))
            draft.set((*NET, key), None, "" if same else f"has no effect: {reason}; ignored")


def derive_dataset_sizes(spec: Spec) -> Spec:
    """For PPO or PQN with rollout workers, return a spec in which minibatch_size and num_batches_per_epoch fit the number of envs.

    Only those of the two keys that the spec does not give are changed. With the new values, the dataset of an update consists of one
    rollout of each env. If the spec does not give minibatch_size, the minibatch size is the divisor of the dataset's size that is nearest
    to the default. Specs of other algorithms and specs without rollout workers are returned unchanged.
    """
    algorithm, sampler = spec.agent.algorithm, spec.meta.sampler
    if sampler is None or not isinstance(algorithm, EPOCHS):
        return spec
    minibatch, batches = algorithm.minibatch_size, sampler.num_batches_per_epoch
    given = ("minibatch_size" in algorithm.model_fields_set, "num_batches_per_epoch" in sampler.model_fields_set)
    if minibatch * batches % dataset_unit(spec, sampler) == 0 or all(given):
        return spec
    dataset = spec.worker_rollout_len * sampler.num_envs
    if given[1]:
        minibatch = dataset // batches
    elif not given[0]:
        minibatch = min((n for n in range(1, min(dataset, 4 * minibatch) + 1) if dataset % n == 0), key=lambda n: abs(n - minibatch))
    if minibatch == 0 or dataset % minibatch or (given[1] and dataset % batches):
        return spec  # check_rules reports the nearest valid sizes
    agent = spec.agent.model_copy(update={"algorithm": algorithm.model_copy(update={"minibatch_size": minibatch})})
    meta = spec.meta.model_copy(update={"sampler": sampler.model_copy(update={"num_batches_per_epoch": dataset // minibatch})})
    return spec.model_copy(update={"agent": agent, "meta": meta})


def _resolve_sampler(sampler: SamplerSpec, draft: _SpecDraft) -> None:
    """Resolve conflicts between keys of meta.sampler, and set env.num_envs to the total number of envs of all rollout workers."""
    spec, report = draft.spec, draft.report
    if sampler.num_policies > 1 and not sampler.async_rl:
        report.note((*SAMPLER, "async_rl"), "false: the amount of data per policy and round then varies at random")
    if sampler.pbt is not None and sampler.num_policies > 1 and sampler.pbt.start >= spec.env.max_frame:
        why = f"the first round would be at frame {sampler.pbt.start:,}, but training ends at frame {spec.env.max_frame:,} (env.max_frame)"
        report.note((*SAMPLER, "pbt", "start"), f"no policy will be replaced or perturbed: {why}")
    if sampler.serial_mode and sampler.async_rl:
        asked = "async_rl" in sampler.model_fields_set and report.is_from_set_argument((*SAMPLER, "async_rl"))
        (report.add_problem if asked else report.note)(
            (*SAMPLER, "async_rl"), "serial_mode collects and trains in turns, as with async_rl false"
        )
    if sampler.inference == "central" and (sampler.serial_mode or spec.agent.algorithm.action_policy == "random"):
        why = "serial_mode has one process" if sampler.serial_mode else "random actions need no net"
        draft.set((*SAMPLER, "inference"), "local", f"has no effect: {why}; each worker computes its own actions")
    ineffective = {"worker_num_splits": "inference is 'local'"} if sampler.inference == "local" else {}
    if sampler.serial_mode or not sampler.async_rl:
        why = "serial_mode is true" if sampler.serial_mode else "async_rl is false"
        ineffective["num_batches_to_accumulate"] = why
        if sampler.serial_mode:
            ineffective["worker_num_splits"] = why
        if sampler.num_policies == 1:  # with several policies, the data of one policy can become old while they wait for more data
            ineffective["max_policy_lag"] = why
    for key, why in ineffective.items():
        draft.reset_keys(SAMPLER, [key], why)
    draft.set(("env", "num_envs"), sampler.num_envs)


_POLICY = {"init_fn": "orthogonal_", "actor_init_std": 0.01, "critic_init_std": 1.0, "clip_grad_val": 0.5}
"""Recommended weight initialisation and gradient clipping for policy-gradient algorithms (Engstrom et al., 2020, arXiv:2005.12729)."""


def complete_short_spec(spec: Spec, images: bool, action_kind: str) -> Spec:
    """Return a copy of a spec without agent.net, to which a recommended net and recommended values of absent keys of agent.algorithm are
    added.

    If the spec has agent.net, or if its algorithm does not learn, return the spec unchanged.

    Args:
        images: whether the observations of the env are images or contain images.
        action_kind: kind of the env's action space (lib.records.ActionKind).
    """
    if not spec.lacks_net:
        return spec
    agent = spec.agent
    keys = _recommended_keys(spec, images)
    change = {key: value for key, value in keys.items() if key not in agent.algorithm.model_fields_set}
    net = _recommended_net(spec, images, action_kind)
    agent = agent.model_copy(update={"algorithm": agent.algorithm.model_copy(update=change), "net": net})
    return spec.model_copy(update={"agent": agent})


def _recommended_keys(spec: Spec, images: bool) -> dict[str, Any]:
    """Return a dict from keys of agent.algorithm to recommended values."""
    algorithm, frames = spec.agent.algorithm, spec.session_frames
    if isinstance(algorithm, PPOSpec):
        keys: dict[str, Any] = {
            "val_loss_coef": 0.5,
            "training_epoch": 4 if images else 10,
            "clip_eps_spec": constant_schedule(0.1 if images else 0.2),
        }
        if images:
            keys["entropy_coef_spec"] = constant_schedule(0.01)
        if spec.meta.sampler is None:  # with meta.sampler, the sizes of datasets determine time_horizon
            rollout = _power_of_2(min(1024 if images else 2048, frames // 10))
            horizon = max(1, rollout // spec.env.num_envs)
            given = algorithm.time_horizon if "time_horizon" in algorithm.model_fields_set else horizon
            keys |= {"time_horizon": horizon, "minibatch_size": min(256 if images else 64, given * spec.env.num_envs)}
        return keys
    if isinstance(algorithm, PQNSpec):
        horizon = max(1, _power_of_2(min(2048, frames // 10)) // spec.env.num_envs)
        given = algorithm.time_horizon if "time_horizon" in algorithm.model_fields_set else min(32, horizon)
        return {} if spec.meta.sampler is not None else {"time_horizon": given, "minibatch_size": min(64, given * spec.env.num_envs)}
    if isinstance(algorithm, ReinforceSpec):
        episodes = {"training_frequency": 4} if spec.agent.memory.episodes else {}
        return {"center_return": True, **episodes, "entropy_coef_spec": constant_schedule(0.01)}
    if isinstance(algorithm, QLearningSpec):
        return {"training_frequency": 4, "training_start_step": min(10_000 if images else 1_000, frames // 10)}
    if isinstance(algorithm, ReplayActorCriticSpec):
        return {"training_start_step": min(10_000 if images else 1_000, frames // 10)}
    if isinstance(algorithm, SARSASpec):
        if {"action_policy", "explore_var_spec"} & algorithm.model_fields_set:
            return {}
        explore = LinearDecay(name="linear_decay", start_val=1.0, end_val=0.05, end_step=0.2 * spec.env.max_frame)
        return {"action_pdtype": "Argmax", "action_policy": "epsilon_greedy", "explore_var_spec": explore}
    if algorithm.on_policy and algorithm.has_critic:  # ActorCritic, SIL
        keys = {"val_loss_coef": 0.5, "entropy_coef_spec": constant_schedule(0.01)}
        return keys if "num_step_returns" in algorithm.model_fields_set else keys | {"lam": 0.95}
    return {}


def _recommended_net(spec: Spec, images: bool, action_kind: str) -> NetSpec:
    """Return the recommended net for the algorithm and the env of a spec."""
    algorithm = spec.agent.algorithm
    on_values = isinstance(algorithm, EpsilonGreedySpec)
    width = 128 if on_values else 64 if algorithm.on_policy else 256 if algorithm.own_critics else 128
    net: dict[str, Any] = (
        {"name": "ConvNet", "normalize": True, "batch_norm": False} if images else {"name": "MLPNet", "hid_layers": [width, width]}
    )
    optim: dict[str, Any] = {"name": "Adam"}
    if isinstance(algorithm, ReplayAlgorithmSpec) or algorithm.values or algorithm.own_critics:
        optim["lr"] = 1e-4 if images else 3e-4 if algorithm.own_critics else 5e-4
        if algorithm.values:
            net |= {"clip_grad_val": 10.0} | ({} if algorithm.value_distribution() else {"loss_spec": {"name": "SmoothL1Loss"}})
        if isinstance(algorithm, QLearningSpec) and algorithm.has_target:
            # a slowly moving target net is more stable than a target net that is replaced
            net |= {"update_type": "replace", "update_frequency": 1_000} if images else _polyak_keys(0.01, spec.env.num_envs)
        if isinstance(algorithm, EpsilonGreedySpec):
            net["lr_scheduler_spec"] = {"name": "LinearToMin", "frame": spec.env.max_frame, "min_factor": 0.01}
            if not images or isinstance(algorithm, PQNSpec):
                net["layer_norm"] = True  # without LayerNorm some seeds collapse (CartPole: 2 of 4)
        if algorithm.offline and action_kind == "continuous":
            net["log_std_init"] = 0.0
        if algorithm.own_critics:
            # CrossQ's critics need batch norm instead of target nets
            net |= _polyak_keys(0.005) if algorithm.has_target else {"batch_norm": "before" if images else True}
    else:
        net |= _POLICY | {"hid_layers_activation": "relu" if images else "tanh", "shared": images and algorithm.has_critic}
        if not algorithm.has_critic:
            del net["critic_init_std"]
        optim |= {"lr": 2.5e-4 if images else 3e-4 if isinstance(algorithm, PPOSpec) else 1e-3, "eps": 1e-5}
        if getattr(algorithm, "adaptive_lr", None) is None:
            net["lr_scheduler_spec"] = {"name": "LinearToMin", "frame": spec.env.max_frame, "min_factor": 0.1}
        if action_kind in ("continuous", "hybrid"):
            net["log_std_init"] = 0.0
    net["gpu"] = False  # most of these nets are faster on the CPU
    if spec.meta.distributed:
        optim["name"] = "GlobalAdam"  # several Sessions train one net and share the optimizer's statistics
    return NETS[net["name"]].model_validate(net | {"optim_spec": optim})


def _polyak_keys(coef: float, times: int = 1) -> dict[str, Any]:
    """Return the keys of a net for Polyak updates of the target net.

    One update with the returned polyak_coef moves the target net as far as `times` updates with the coefficient `coef`.
    """
    return {"update_type": "polyak", "polyak_coef": round(1.0 - (1.0 - coef) ** times, 6)}


def _power_of_2(number: int) -> int:
    """Return the largest power of 2 that is at most `number`, or 1 if `number` is below 1."""
    return 1 << max(0, number.bit_length() - 1)
