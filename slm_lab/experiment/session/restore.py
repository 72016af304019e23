"""Save and restore the state of a Session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from slm_lab.experiment.events import CheckpointWritten
from slm_lab.experiment.execute.heartbeat import BUILDING, SAVING, WAITING
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import find_weights
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import Position
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.session.resume import read_checkpoint
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.lib.log import logger, notice
from slm_lab.lib.store import is_shared
from slm_lab.lib.text import last_line

if TYPE_CHECKING:
    from slm_lab.experiment.session.session import Session


def _load_weights(learners: Sequence[PolicyLearner], names: Sequence[str | None], where: str, data_dir: Path) -> None:
    """Initialise policies with the weights, observation statistics and value statistics of checkpoints. Notices name the weights that
    are not used.

    Args:
        learners: the learners whose policies are initialised.
        names: name of each policy in agent.policies, or None for a policy without a name. A policy with a name is initialised from the
            policy of the checkpoint with the same name.
        where: a checkpoint file, or a run folder with a best checkpoint (see find.find_weights).

    Raises UserError if there is no such checkpoint, or if no weight matrix of the checkpoint matches a weight matrix of the net in name and
    shape.
    """
    for learner, name in zip(learners, names, strict=True):
        path, saved = find_weights(where, data_dir, name)
        statistics = saved["normalizers"] if "normalizers" in saved else saved["env"]
        own = learner.agent.weights()
        missing = learner.agent.copy_matching_weights(saved["weights"])
        if not any(value.dim() > 1 for name, value in own.items() if name not in missing):  # only biases match: a different net
            matrices = {name: value for name, value in own.items() if value.dim() > 1}
            raise UserError(
                f"meta.init_from: {path} has no weight matrix with the name and shape of one in this net: {_format_shapes(matrices)}"
            )
        if missing:
            shapes = _format_shapes({name: own[name] for name in missing})
            notice(f"meta.init_from: these weights are not in {where} and are initialised at random: {shapes}")
        if unused := {name: value for name, value in saved["weights"].items() if name not in own or name in missing}:
            notice(f"meta.init_from: these weights are not in this net and are not used: {_format_shapes(unused)}")
        if learner.agent.has_own_critics:
            notice("meta.init_from: the critics' separate net starts with random weights: these checkpoints contain the policy only")
        loads_critic = any("critic" in name for name in own if name not in missing)
        if loads_critic and not learner.agent.load_value_statistics(saved.get("value_statistics")):
            why = "agent.algorithm.normalize_values differs, or the checkpoint is from version 0.2.0, which did not save the scale"
            notice(f"meta.init_from: the critic of {where} predicts values on another scale: {why}")
        if not learner.normalizers.load_foreign_obs_statistics(statistics):
            notice(f"meta.init_from: the observation statistics of {where} do not fit; env.normalize_obs or the shape differs")


def _format_shapes(weights: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in weights.items())


@dataclass(frozen=True)
class PendingRestore:
    """The part of a continued Session's state that is restored when training begins.

    The state in a PendingRestore cannot be restored earlier, since the files of the run must be available and the envs must have been
    reset.
    """

    truncate_tables: bool = False
    """Whether to truncate the tables of the Session to the position `tables` or, if `tables` is None, to the frame of the clock."""
    tables: Position | None = None
    read_tables: bool = False
    """Whether to restore the row history of the observers from the rows in the table files. If the tables are truncated, the observers also
    forget all rows that are not in the files."""
    rng: dict[str, Any] | None = None
    """States of the process-wide random generators, or None to leave the generators unchanged."""


def state_dict(session: Session) -> dict[str, Any]:
    """Return the full state of a Session as tensors and plain Python objects. The function `load_session_state` loads the state."""
    assert session.sink is not None
    source, parts = session.source, session.parts
    collection = source.state_dict() if source.between_rounds and not session.blocked else None
    return {
        "version": state.VERSION,
        "frames": [learner.clock.frame for learner in session.learners],
        "wall_t": session.clock.wall_t,
        "policies": [learner.state_dict() for learner in session.learners],
        "source": collection,
        "population": None if parts.population is None else parts.population.state_dict(),
        "rng": state.rng_state(parts.device),
        "tables": session.sink.sync_and_get_positions(session.index),
        "lost": _inexact_reasons(session, collection),
        "spec": parts.dumped,
    }


def _inexact_reasons(session: Session, collection: dict[str, Any] | None) -> list[str]:
    """Return the reasons why a run that continues from the current state will differ from an uninterrupted run, or [] if both will be
    equal."""
    meta, lost = session.spec.meta, []
    if collection is None:
        lost.append("open episodes are dropped (the envs did not respond, or were in the middle of a rollout)")
    elif collection["open"] is None:
        lost.append(f"open episodes are dropped ({session.source.unsaved_episodes_reason})")
    elif meta.sampler is not None and meta.sampler.inference == "central":
        lost.append("central inference groups observations by the time at which they arrive")
    if session.agent.replay is not None and not meta.save_replay:
        lost.append("the replay buffer starts empty (meta.save_replay is false)")
    if is_shared(session.context.store):
        lost.append("sessions that share a net are not saved at the same moment")
    return lost


def save_session(session: Session, bundle: dict[str, Any] | None = None, *, done: bool = False) -> None:
    """Save the best weights and the state of a Session.

    Args:
        bundle: the state to save, as returned by `state_dict`, or None to save the current state.
        done: whether all frames have been collected and the last rows have been written.
    """
    assert session.sink is not None
    begin, store, timer = perf_counter(), session.context.store, session.parts.timer
    session.context.beat(SAVING)
    for learner in session.learners:  # first, since the state contains the rank of the best weights
        learner.checkpointer.save_best()
    ends = bundle is not None
    bundle = {**(bundle or state_dict(session)), "done": done}
    session.sink.save(session.learners[0].table, "last", bundle)
    if store is not None:
        with store.saving(None if ends else timer.interval / 2) as due:
            if due:
                session.sink.save_shared(_shared_bundle(session, bundle))
    for learner in session.learners:
        session.sink(CheckpointWritten(learner.table, learner.clock.frame))
    timer.restart(perf_counter() - begin)


def _shared_bundle(session: Session, bundle: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint of the shared arrays.

    If only one Session trains the net, the checkpoint also contains the state of this Session (`bundle`), so that the arrays and the state
    belong to the same moment of training.
    """
    store = session.context.store
    assert store is not None
    arrays = {name: torch.from_numpy(array) for name, array in store.snapshot().items()}
    frames = arrays["clock/frames"][:, 0].tolist()
    shared = {"version": state.VERSION, "arrays": arrays, "frames": frames, "spec": bundle["spec"], "session": None}
    if is_shared(store):
        return shared
    return {**shared, "session": bundle, **{name: bundle[name] for name in ("done", "lost", "wall_t")}}


def load_initial_weights(session: Session) -> None:
    """Initialise the policies of a Session with the weights of the checkpoint in meta.init_from, if the spec contains this key.

    Raises UserError if no weights of the checkpoint fit the nets.
    """
    if session.spec.meta.init_from is not None:
        policies = session.spec.agent.policies
        names = [None] * len(session.learners) if policies is None else list(policies)
        _load_weights(session.learners, names, session.spec.meta.init_from, session.plan.data_dir)
    if session.context.store is not None:
        session.context.store.publish()


def restore_session(session: Session, paths: RunPaths) -> None:
    """Restore a built Session from its last checkpoint. If there is no checkpoint, the Session starts from the beginning.

    Raises UserError if the checkpoint cannot be read or does not fit the spec. If a new process of the Session joins other Sessions that
    already train the net, an unreadable checkpoint only causes a notice, since the learned state is in the shared arrays.
    """
    index, trial, takes_over = session.index, session.trial, session.context.joins_running_sessions
    path = paths.checkpoint(index * session.spec.policies, "last", trial)
    shared = None
    session.context.beat(WAITING)  # reading a large file takes long, and no env runs
    try:
        bundle = read_checkpoint(paths, path, index, trial)
        if session.context.store is not None and not takes_over:
            shared = read_checkpoint(paths, paths.trial_checkpoint(trial), None, trial)
            bundle = None if shared is None else bundle
    except UserError as error:
        if not takes_over:
            raise
        notice(str(error))
        bundle = None
    session.context.beat(BUILDING)
    if bundle is None and shared is None and not takes_over:
        load_initial_weights(session)
        session.pending_restore = PendingRestore(truncate_tables=True)
        return
    try:
        load_session_state(session, bundle, shared)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = last_line(str(error)) or type(error).__name__
        raise UserError(f"{path} does not fit the spec of the run, {paths.spec}: {reason}") from error


def load_session_state(session: Session, bundle: dict[str, Any] | None, shared: dict[str, Any] | None = None) -> None:
    """Load the state from which a Session continues. This function must be called once, after `build` and before the first step.

    If a new process of the Session joins other Sessions that already train the net, only counters, observers and replay memory are loaded.
    A process that replaces a dead process uses new random streams and envs, since the saved random streams and envs could cause the same
    failure again.

    Args:
        bundle: the Session's last checkpoint, or None if the Session has no checkpoint although other Sessions have trained the net.
        shared: the last checkpoint of the shared arrays, or None to keep the arrays in the store.

    Raises ValueError, RuntimeError, KeyError or TypeError if a checkpoint does not fit the Session.
    """
    store, takes_over = session.context.store, session.context.joins_running_sessions
    if shared is not None:
        assert store is not None
        store.restore({name: tensor.numpy() for name, tensor in shared["arrays"].items()})
        bundle = shared["session"] or bundle
    if bundle is None:
        session.clock.load_unshared_state({}, session.spec.env.num_envs)
    else:
        for learner, saved in zip(session.learners, bundle["policies"], strict=True):
            (learner.load_counters if takes_over else learner.load_state_dict)(saved)
        if not takes_over:
            _restore_collection(session, bundle)
        if session.context.resumed is not None:
            _raise_best_ranks(session, session.context.resumed)
    if shared is not None:
        assert store is not None
        store.publish()
        session.agent.pull()
        session.learners[0].normalizers.pull()
    same_moment = bundle is not None and bundle["frames"][0] == session.clock.frame
    session.pending_restore = PendingRestore(
        truncate_tables=not takes_over,
        tables=bundle["tables"] if bundle is not None and same_moment else None,
        read_tables=takes_over or not same_moment,
        rng=None if takes_over or bundle is None else bundle["rng"],
    )


def _restore_collection(session: Session, bundle: dict[str, Any]) -> None:
    """Load the state of the envs or rollout workers, and the state of population-based training."""
    if bundle["source"] is not None and not session.source.load_state_dict(bundle["source"]):
        logger.info("open episodes are dropped; new ones begin")
    if session.parts.population is not None:
        session.parts.population.load_state_dict(bundle["population"])


def _raise_best_ranks(session: Session, paths: RunPaths) -> None:
    """Raise the best rank of each checkpointer to the rank of the best checkpoint on disk, which may be newer than the restored state.

    No weights are loaded.
    """
    for learner in session.learners:
        path = paths.checkpoint(learner.table, "best", session.trial)
        try:
            best = state.read_header(path) if path.exists() else None
        except state.BundleError as error:
            notice(str(error))
        except OSError as error:
            notice(f"{path} cannot be read: {error.strerror or error}")
        else:
            learner.checkpointer.raise_best_rank(best)
