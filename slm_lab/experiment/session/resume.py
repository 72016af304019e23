"""Read a run that is to be continued: check its folder and the changed keys, and find the frame from which each Session continues."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import readable_checkpoint
from slm_lab.experiment.files.lock import ENDED
from slm_lab.experiment.files.paths import RunPaths, not_a_run_message, run_paths_in
from slm_lab.experiment.files.provenance import changed_versions, data_digest
from slm_lab.experiment.files.sink import is_damaged
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.spec.load.files import is_single_spec, spec_names
from slm_lab.spec.load.loader import dump_spec, load_spec, load_with_notices, log_notices
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import diff, flatten_leaves

_CHANGEABLE_KEYS = re.compile(
    r"env\.max_frame"
    r"|meta\.(?!random_seed$|distributed$|sampler\b|rigorous_eval$|track_info$|init_from$).*"
    r"|meta\.sampler\.(max_policy_lag|num_batches_to_accumulate)"
    r"|agent\.name"
    r"|agent\.algorithm\.(gamma|lam|\w*_coef(_spec\..*)?|clip_eps_spec\..*|explore_var_spec\..*|target_entropy(_ratio)?|entropy_anneal(\..*)?|alpha_lr"
    r"|training_epoch|training_iter|training_batch_iter|minibatch_size|policy_delay|log_alpha_\w+|rho_bar|c_bar)"
    r"|agent\.(net|critic_net)\.(\w*optim_spec\.lr|\w*lr_scheduler_spec.*|clip_grad_val|dtype|gpu|cuda_id|polyak_coef)"
)
"""Pattern of the spec keys that may be changed when a run is continued. The saved state and the columns of the tables do not depend on the
keys that may be changed."""
_NO_EFFECT = re.compile(
    r"env\.max_frame|agent\.name|meta\.(max_session|save_interval|checkpoint_frequency|stall_.*|max_restart|max_seconds|track)"
)
"""Pattern of the changeable spec keys whose values affect neither the training steps nor the rows of the tables. (For env.max_frame, see
also `_values_that_depend_on_max_frame`.)"""
_IGNORED = re.compile(r"meta\.run\b.*")
_SCHEDULE_END = re.compile(r"agent\.(.+\.)?(\w*lr_scheduler_spec\.frame|\w+_spec\.end_step)")
"""Pattern of the spec keys whose value is the frame at which a schedule ends."""


_MEMORY_MAP_BYTES = 2**30
"""File size in bytes above which the arrays of a checkpoint are memory-mapped from the file instead of loaded into memory."""


@dataclass(frozen=True)
class SessionStart:
    """Description of how a Session starts when its run is continued, and the frame that the Session has reached."""

    status: Literal["finished", "continues", "new"]
    frame: int = 0
    lost: tuple[str, ...] = ()
    """Reasons why the result will differ from the result of an uninterrupted run, or () if both results will be equal."""

    def to_dict(self) -> dict[str, Any]:
        """Return the description as a dict, which is saved in meta.run."""
        if self.status == "continues":
            return {"frame": self.frame, "exact": not self.lost} | ({"lost": list(self.lost)} if self.lost else {})
        return {"frame": self.frame, "status": self.status}


@dataclass(frozen=True)
class ContinuedRun:
    """Description of a run to continue: its files, its spec after the changes, and the starts of its Sessions."""

    paths: RunPaths
    spec: Spec
    history: list[dict[str, Any]]
    """Entries of meta.run from earlier starts of the run."""
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Path of a changed spec key → (previous value, new value)."""
    starts: dict[int, SessionStart] = field(default_factory=dict)
    """Index of a Session → description of how the Session continues."""

    @property
    def sessions_to_run(self) -> list[int]:
        """Indices of the Sessions to run: the unfinished Sessions.

        If the Sessions train one shared net and at least one Session is unfinished, all Sessions must run.
        """
        unfinished = [index for index, start in self.starts.items() if start.status != "finished"]
        return list(self.starts) if unfinished and self.spec.meta.distributed else unfinished


def read_run(paths: RunPaths, sets: Sequence[str] = (), trial: int | None = None) -> ContinuedRun:
    """Read a run that is to be continued, and apply `--set` overrides to its spec. No file is written.

    Args:
        sets: overrides of spec keys, each as "KEY=VALUE".
        trial: number of the trial if the folder belongs to a search, or None if the run is a single trial.

    Raises SpecError if the saved spec is invalid, and UserError if the run cannot be continued or if the overrides `sets` are not allowed.
    """
    name, t = paths.spec_name, trial or 0
    if trial is None and paths.has_several_trials:
        raise UserError(f"{paths.root} contains the trials of a search; continue it with search@{paths.root.name}")
    file = paths.spec if trial is None else paths.trial_spec(trial)
    loaded = load_with_notices(file, name, for_search=False)
    (saved,) = loaded.specs
    if sets:
        loaded = load_with_notices(file, name, sets, for_search=False)
        if longer := _schedule_overrides(saved, loaded.specs[0]):  # the last value of a key applies, so `sets` take precedence
            loaded = load_with_notices(file, name, [*longer, *sets], for_search=False)
    (spec,) = loaded.specs
    log_notices(loaded.notes)
    history = read_start_history(file)
    if history and history[0].get("mode") == "dev":
        raise UserError(f"{paths.root} is a run of mode dev, which cannot be continued; train its spec with: {paths.spec} {name} train")
    starts, begun_with = _read_session_starts(paths, saved, spec, t)
    changes = changed_keys(saved if begun_with is None else begun_with, spec)
    if begun_with is not None:
        _check_changes(changes, spec, paths)
    continued = ContinuedRun(paths, spec, history, changes, _add_inexact_reasons(starts, changes, history, spec))
    if begun_with is not None and changes and not continued.sessions_to_run:
        listed = "".join(f"\n  {path}: {_format_value(old)} → {_format_value(new)}" for path, (old, new) in changes.items())
        raise UserError(
            f"{paths.root}: all sessions are finished, so these changes have no effect:{listed}\nextend the run: --set env.max_frame=…"
        )
    _check_frames(continued)
    return continued


def _schedule_overrides(saved: Spec, spec: Spec) -> list[str]:
    """Return the `--set` arguments that extend the schedules of a run whose env.max_frame is increased.

    A schedule of `saved` that ends at the env.max_frame of `saved` is extended to the env.max_frame of `spec`.
    """
    before, now = saved.env.max_frame, spec.env.max_frame
    ended = [path for path, value in flatten_leaves(dump_spec(saved)[saved.name]) if _SCHEDULE_END.fullmatch(path) and value == before]
    return [f"{path}={now}" for path in ended if now > before]


def _read_session_starts(paths: RunPaths, saved: Spec, spec: Spec, trial: int) -> tuple[dict[int, SessionStart], Spec | None]:
    """Return (index of a Session → how the Session continues, spec with which the first checkpoint found was written).

    The returned spec is None if there is no checkpoint. Every byte of the checkpoints is verified.
    """
    # read the shared checkpoint regardless of the current meta.distributed, which may have been changed since the checkpoint was written
    shared = _read(paths, paths.trial_checkpoint(trial), None, trial, partial(state.read_header, check=True))
    starts: dict[int, SessionStart] = {}
    begun_with: Spec | None = None
    for index in range(max(spec.meta.max_session, saved.meta.max_session)):
        path = paths.checkpoint(index * paths.policies, "last", trial)
        header = _read(paths, path, index, trial, partial(state.read_header, check=True))
        if header is not None and shared is None:
            _check_tables(paths, header)
        starts[index] = _session_start(header, spec, shared, index)
        trained = header if shared is None else shared
        if trained is not None and begun_with is None:
            begun_with = trained_spec(trained, saved)
    if begun_with is None:
        starts = {index: start for index, start in starts.items() if index < spec.meta.max_session}
    return starts, begun_with


def _check_frames(continued: ContinuedRun) -> None:
    """Raise UserError if env.max_frame was changed to a value below the number of frames that a Session has already collected."""
    for index, start in continued.starts.items():
        if "env.max_frame" in continued.changes and start.frame > continued.spec.session_frames:
            limit = f"env.max_frame: {continued.spec.env.max_frame}"
            raise UserError(
                f"{continued.paths.root}: {limit}: session {index} has already trained {start.frame} frames; expected at least as many"
            )


def _add_inexact_reasons(
    starts: Mapping[int, SessionStart], changes: Mapping[str, Any], history: Sequence[dict[str, Any]], spec: Spec
) -> dict[int, SessionStart]:
    """Return `starts` with additional reasons for inexact results: changed spec keys, recorded episodes and package versions."""
    reasons = [f"{path} was changed" for path in changes if not _NO_EFFECT.fullmatch(path)]
    last = history[-1] if history else {}
    if "env.max_frame" in changes and (dependent := _values_that_depend_on_max_frame(spec, last)):
        reasons.append(f"env.max_frame was changed, which also changes {' and '.join(dependent)}")
    digest = None if "meta.demonstrations" in changes else last.get("demonstrations_sha256")
    if digest is not None and data_digest(spec.meta.demonstrations) != digest:
        reasons.append(f"meta.demonstrations: {spec.meta.demonstrations} has changed or cannot be read")
    versions = changed_versions(last)
    reasons += [
        f"{package} {before} is no longer installed" if now is None else f"{package} {before} is now {now}"
        for package, (before, now) in versions.items()
    ]
    return {
        index: replace(start, lost=(*start.lost, *reasons)) if start.status == "continues" else start for index, start in starts.items()
    }


def _values_that_depend_on_max_frame(spec: Spec, last: Mapping[str, Any]) -> list[str]:
    """Return descriptions of the values that are computed from env.max_frame in each start of a run, instead of being saved in its spec.

    Args:
        spec: spec of the continued run, with the changed env.max_frame.
        last: entry of meta.run that describes the previous start of the run.
    """
    self_play = spec.meta.self_play
    anneal = getattr(spec.agent.algorithm, "entropy_anneal", None)
    found = {
        "the frames of evaluations": _evaluations_depend_on_max_frame(spec, last),
        "the schedule of agent.algorithm.entropy_anneal": isinstance(anneal, int | float) and anneal is not False,
        "the default of meta.self_play.snapshot_frequency": self_play is not None and self_play.snapshot_frequency is None,
    }
    return [name for name, depends in found.items() if depends]


def _evaluations_depend_on_max_frame(spec: Spec, last: Mapping[str, Any]) -> bool:
    meta = spec.meta
    if meta.rigorous_eval or meta.eval_episodes == 0 or not meta.may_evaluate:
        return False
    if meta.eval_episodes != "auto":
        return True
    if last.get("eval_episodes") == 0 and "time_limit" in last:
        from slm_lab.experiment.training.evaluate import plan_evaluation

        return plan_evaluation(spec, spec.session_frames, last["time_limit"] or None) is not None
    return meta.self_play is None  # unknown, because version 0.2.0 did not record the time limit


def is_changeable_key(path: str) -> bool:
    """Return whether a run can be continued with a changed value of the spec key `path`."""
    return bool(_CHANGEABLE_KEYS.fullmatch(path))


def changed_keys(before: Spec, after: Spec) -> dict[str, tuple[Any, Any]]:
    """Return the spec keys whose values differ between two specs, as a dict: path of the key → (value in `before`, value in `after`).

    The value None stands for an absent key.
    """
    old, new = (dict(flatten_leaves(dump_spec(spec)[spec.name])) for spec in (before, after))
    return {path: pair for path, pair in diff(old, new).items() if not _IGNORED.fullmatch(path)}


def continuation_messages(continued: ContinuedRun, killed: str | None) -> list[str]:
    """Return the lines to print when a run is continued: how the last start ended, the changed keys, and how each Session continues.

    Args: killed: description of the last start if it was killed, else None.
    """
    lines = [] if killed is None else [f"the last start, {killed}, {ENDED}"]
    lines += [f"changed: {path}: {_format_value(old)} → {_format_value(new)}" for path, (old, new) in continued.changes.items()]
    if "env.max_frame" in continued.changes:
        old = continued.changes["env.max_frame"][0]
        kept = [
            path
            for path, value in flatten_leaves(dump_spec(continued.spec)[continued.spec.name])
            if value == old and not isinstance(value, bool)
        ]
        lines += [f"unchanged: {path}: {_format_value(old)}, the previous env.max_frame" for path in kept]
    for index, start in continued.starts.items():
        match start.status:
            case "finished":
                how = f"finished at frame {start.frame:,}"
            case "new":
                how = "starts at frame 0: it has no checkpoint"
            case _ if not start.lost:
                how = f"continues at frame {start.frame:,}; exact: the result will equal that of an uninterrupted run"
            case _:
                how = f"continues at frame {start.frame:,}; not exact: {'; '.join(start.lost)}"
        lines.append(f"session {index}: {how}")
    if not continued.sessions_to_run:
        lines.append("no session is left to run; --set env.max_frame=… extends the run, --set meta.max_session=… adds seeds")
    return lines


def read_checkpoint(paths: RunPaths, path: Location, session: int | None, trial: int) -> dict[str, Any] | None:
    """Read the checkpoint from which training continues. Returns None if the file does not exist.

    Args: session: index of the Session to which the checkpoint belongs, or None for the checkpoint of the arrays that all Sessions share.

    Raises UserError if the file cannot be read.
    """

    def load(path: Location) -> dict[str, Any]:
        return state.load(path, mapped=isinstance(path, Path) and path.stat().st_size > _MEMORY_MAP_BYTES)

    return _read(paths, path, session, trial, load)


def _read(
    paths: RunPaths, path: Location, session: int | None, trial: int, read: Callable[[Location], dict[str, Any]]
) -> dict[str, Any] | None:
    try:
        return read(path) if path.exists() else None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except state.BundleError as error:
        raise UserError(f"{error}; the run cannot be continued from it{_restore_advice(paths, session, trial)}") from None


def _restore_advice(paths: RunPaths, session: int | None, trial: int) -> str:
    """Return the end of an error message, which tells the user what to do if the last checkpoint cannot be used.

    Args: session: index of the Session to which the checkpoint belongs, or None if the checkpoint belongs to all Sessions.
    """
    whose = "its sessions" if session is None else f"session {session}"
    policies = paths.table_numbers(t=trial) if session is None else range(session * paths.policies, (session + 1) * paths.policies)
    readable = (readable_checkpoint(paths, index, trial) for index in policies)
    weights = next((path for path in readable if path is not None), None)
    usable = weights if isinstance(weights, Path) else paths.root
    start = "" if weights is None else f", or start a new run with the weights of another checkpoint: --set meta.init_from={usable}"
    return f": restore it, or delete it to start {whose} from the beginning{start}"


def _check_tables(paths: RunPaths, header: Mapping[str, Any]) -> None:
    """Raise UserError if rows in a table of a Session have been changed since the Session's checkpoint was saved.

    Args: header: header of the checkpoint.
    """
    for name in header["tables"] or ():
        path = paths.info_dir / name
        try:
            damaged = is_damaged(path, *header["tables"][name])
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        if damaged:
            why = "is damaged: its rows up to the last checkpoint do not match the checksum (CRC-32) in the checkpoint"
            raise UserError(f"{path} {why}; restore it, or delete it to continue without these rows")


def read_start_history(file: Path) -> list[dict[str, Any]]:
    """Return the entry meta.run of a saved spec file, a list with one dict for each start of the run.

    Raises UserError if the file belongs to a run of SLM Lab, which slm_lab cannot continue.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if is_single_spec(content):
        train = f"train its spec with: {file} {content['name']} train"
        raise UserError(f"{file.parent} is a run of SLM Lab, which cannot be continued; {train}")
    ((_, body),) = content.items()
    return list((body.get("meta") or {}).get("run") or [])


def _session_start(header: Mapping[str, Any] | None, spec: Spec, shared: Mapping[str, Any] | None, index: int) -> SessionStart:
    if spec.meta.distributed:
        if shared is None:
            return SessionStart("new")
        frames = [shared["frames"][index]]
        header = shared if "done" in shared else header
        if header is None:
            return SessionStart(
                "continues", frames[0], ("its own checkpoint was not written yet", "epi, t, wall_t and opt_step continue from its last row")
            )
    elif header is None:
        return SessionStart("new")
    else:
        frames = header["frames"]
    enough = min(frames) >= spec.session_frames or _out_of_time(header, spec)
    return SessionStart("finished" if header["done"] and enough else "continues", frames[0], tuple(header["lost"]))


def _out_of_time(header: Mapping[str, Any], spec: Spec) -> bool:
    limit = spec.meta.max_seconds
    return limit is not None and header["wall_t"] >= limit


def trained_spec(header: Mapping[str, Any], saved: Spec, builds_env: bool = True) -> Spec:
    """Return the spec with which a checkpoint was written. The spec file of the run may have been edited after the checkpoint was written.

    Args:
        header: header of the checkpoint.
        saved: spec in the spec file of the run, which is returned if the header contains no spec.
        builds_env: whether the env of the spec will be created (see `load_spec`).
    """
    for body in header["spec"].values():
        return load_spec({saved.name: body}, saved.name, builds_env=builds_env)
    return saved


def _check_changes(changes: Mapping[str, tuple[Any, Any]], after: Spec, paths: RunPaths) -> None:
    problems = []
    for path, (old, new) in changes.items():
        if path == "meta.max_session":
            if after.meta.distributed:
                problems.append(f"{path}: {old} → {new}: the sessions of one net share the frames of the run")
            elif new < old:
                problems.append(f"{path}: {old} → {new}: sessions can be added but not removed")
        elif not _CHANGEABLE_KEYS.fullmatch(path):
            problems.append(f"{path}: {_format_value(old)} → {_format_value(new)}")
    if problems:
        advice = "start a new run (meta.init_from takes over weights where they fit)"
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise UserError(f"{paths.root}: the run has begun and cannot be continued with another value of:{listed}\n{advice}")


def _format_value(value: Any) -> str:
    return "absent" if value is None else str(value)


def find_run(folder: str | Path) -> RunPaths:
    """Return the RunPaths of the run in a folder. Raises UserError if the folder is not a run folder."""
    paths = run_paths_in(Path(folder))
    if paths is None:
        raise UserError(not_a_run_message(folder))
    return RunPaths(paths.root.absolute(), spec_names(paths.spec)[0])  # an env may change the working directory
