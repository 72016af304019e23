"""Data sets of recorded episodes.

The command `enjoy --record` writes a data set, and the spec key `meta.demonstrations` selects a data set.

A data set is a .npz file of numpy. The file contains an array for each field of Demonstrations, and the array `header`, which is JSON text
with the env and its spaces.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from slm_lab.env.agent_spaces import image_channels
from slm_lab.env.normalize import RewardNormalizer, normalizes_obs
from slm_lab.env.spaces import action_codec, box_scale, is_compatible_space, space_from_dict
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.training.minari_data import is_minari, read_minari
from slm_lab.lib.demonstrations import Demonstrations
from slm_lab.lib.files import replace_file
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

VERSION = 1
"""Version of the file format."""
KEY = "meta.demonstrations"
_ARRAYS = tuple(field.name for field in fields(Demonstrations))


def check_output_path(path: Path, replaces: bool) -> None:
    """Raise UserError if a data set cannot be written to `path`.

    Args: replaces: whether an existing file may be replaced.
    """
    if path.is_dir():
        raise UserError(f"--record {path} is a folder; expected a file, such as {path / 'demonstrations.npz'}")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"--record {path} is a symbolic link or a special file; expected the path of a regular file")
    if path.exists() and not replaces:
        raise UserError(f"--record {path} exists; choose another name, or add --replace to overwrite it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--record {path}: there is no folder {path.absolute().parent}")


def write(path: Path, data: Demonstrations, header: Mapping[str, Any]) -> None:
    """Write a data set to a compressed file, atomically. Raises UserError if the file cannot be written.

    Args: header: entries of the file's header, such as the env and its spaces.
    """
    content = io.BytesIO()
    full_header = {"version": VERSION, **header, "episodes": len(data.last_obs_E), "transitions": len(data)}
    arrays = {name: getattr(data, name) for name in _ARRAYS}
    np.savez_compressed(content, header=np.array(json.dumps(full_header)), **arrays)
    try:
        replace_file(path, content.getvalue(), sync=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read(path: Path) -> tuple[Demonstrations, dict[str, Any]]:
    """Read a data set. Returns (data set, header of the file).

    Raises OSError if the file cannot be read, and ValueError if the file is damaged or has another format.
    """
    with path.open("rb") as file_start:
        if file_start.read(4) != b"PK\3\4":  # np.load would advise to unpickle the file
            raise ValueError(f"{path} is damaged, or is not a data set of enjoy --record (a .npz file)")
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            data = Demonstrations(*(file[name] for name in _ARRAYS))
    except OSError:
        raise
    except Exception as error:  # damaged bytes raise errors of many kinds
        raise ValueError(f"{path} is damaged, or is not a data set of enjoy --record ({error})") from None
    if not isinstance(header, dict) or not {"version", "env", "spaces"} <= header.keys():
        raise ValueError(f"{path} is damaged: its header lacks version, env or spaces")
    if header.get("version") != VERSION:
        raise ValueError(f"{path} has version {header.get('version')} of the format; this slm_lab reads {VERSION}")
    rows = (data.obs_K, data.action_K, data.terminated_K, data.truncated_K)
    flags = {data.terminated_K.dtype, data.truncated_K.dtype}
    if not data.last_obs_E.ndim or any(item.shape[:1] != data.reward_K.shape for item in rows) or flags != {np.dtype(np.bool_)}:
        raise ValueError(f"{path} is damaged: its arrays have different lengths, or other types than those of enjoy --record")
    if len(data.end_E) != len(data.last_obs_E) or not len(data.end_E) or data.end_E[-1] != len(data) - 1:
        raise ValueError(f"{path} is damaged: its episodes are not complete")
    return data, header


def load_demonstrations(spec: Spec, info: EnvInfo) -> Demonstrations:
    """Load the data set of meta.demonstrations. Rewards are scaled and clipped as in training (env.reward_scale, env.clip_reward).

    Raises SpecError if the data set cannot be read, or if it was recorded in another env or with other spaces.
    """
    where = spec.meta.demonstrations
    assert where is not None
    try:
        data, header = read_minari(where, spec, info) if is_minari(where) else read(Path(where).expanduser())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _spec_error(spec, reason if where in reason else f"{where}: {reason}") from None
    _check_header(spec, info, where, header)
    if data.obs_K.shape[1:] != info.observation.shape or data.obs_K.dtype != info.observation.dtype:
        of_data, of_env = f"{data.obs_K.dtype} {list(data.obs_K.shape[1:])}", f"{info.observation.dtype} {list(info.observation.shape)}"
        raise _spec_error(
            spec, f"{where} has observations {of_data}; those of {spec.env.name} are {of_env}: env.wrappers or obs_keys differ"
        )
    _check_values(spec, info, where, data)
    rewards = RewardNormalizer(spec.env, len(data), spec.agent.algorithm.gamma)
    return replace(data, reward_K=rewards(data.reward_K))


def _check_values(spec: Spec, info: EnvInfo, where: str, data: Demonstrations) -> None:
    """Raise SpecError if a number of a data set is not finite, or if an action is not in the action space of `info`. Infinite numbers in
    observations are allowed if observations are clipped."""
    for name in ("obs_K", "last_obs_E", "action_K", "reward_K"):
        values = getattr(data, name)
        invalid = np.isnan(values) if "obs" in name and normalizes_obs(spec.env) else ~np.isfinite(values)
        if invalid.any():
            index = tuple(int(axis[0]) for axis in invalid.nonzero())
            raise _spec_error(spec, f"{where}: {name}{list(index)} is {values[index]}; expected a finite number")
    column = 0
    for part in info.action.parts:
        action_KD = data.action_K.reshape(len(data), -1)[:, column : column + part.dim]
        column += part.dim
        if part.kind == "continuous":
            continue
        highest_D = np.array(part.nvec or [2] * part.dim) - 1
        for row in np.flatnonzero(((action_KD < 0) | (action_KD > highest_D)).any(axis=1))[:1]:
            given, highest = (", ".join(f"{number:g}" for number in numbers) for numbers in (action_KD[row], highest_D))
            raise _spec_error(spec, f"{where}: the action of transition {row} is {given}; {spec.env.name} allows 0 to {highest}")


def _check_header(spec: Spec, info: EnvInfo, where: str, header: Mapping[str, Any]) -> None:
    """Raise SpecError if a data set was recorded in an env other than env.name, or with spaces other than the spaces of `info`.

    Args:
        where: value of meta.demonstrations, for the error message.
        header: header of the data set.
    """
    if header["env"] is not None and _plain_id(header["env"]) != _plain_id(spec.env.name):
        raise _spec_error(spec, f"{where} was recorded in {header['env']}; env.name is {spec.env.name}")
    assert info.spaces is not None
    for kind, compatible in (("observation", _make_observation_comparison(spec)), ("action", _compatible_actions)):
        recorded, of_env = space_from_dict(header["spaces"][kind]), space_from_dict(info.spaces[kind])
        if not compatible(recorded, of_env):
            raise _spec_error(spec, f"{where} has {kind}s {recorded}; those of {spec.env.name} are {of_env}")


def _plain_id(name: str) -> str:
    return name.removeprefix("envpool:").rpartition(":")[2]


def _make_observation_comparison(spec: Spec) -> Any:
    """Return a function that returns whether two observation spaces are compatible for the policy of a spec."""
    return lambda left, right: is_compatible_space(left, right, spec.agent.input, image_channels(spec.env))


def _compatible_actions(left: spaces.Space[Any], right: spaces.Space[Any]) -> bool:
    # recorded actions are scaled to the bounds, so that equal numbers mean equal actions only with equal bounds
    return is_compatible_space(left, right) and action_codec(left)[0] == action_codec(right)[0] and _bounds(left) == _bounds(right)


def _bounds(space: spaces.Space[Any]) -> list[Any]:
    """Return the bounds of all Box spaces in a space."""
    if isinstance(space, spaces.Dict):
        return [_bounds(inner) for inner in space.values()]
    if isinstance(space, spaces.Tuple):
        return [_bounds(inner) for inner in space]
    return [bound.astype(np.float32).tolist() for bound in box_scale(space)[:2]] if isinstance(space, spaces.Box) else []


def _spec_error(spec: Spec, message: str) -> SpecError:
    return SpecError(spec.name, [Problem(KEY, message)])
