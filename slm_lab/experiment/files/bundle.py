"""Read and write checkpoint files. The content of a checkpoint file is a dict, called bundle, of tensors and plain Python values.

A checkpoint file consists of a ZIP archive written by torch.save, a header and a seal. The file is written atomically, so that a reader
never sees a partially written file. `read_header` reads the header without the archive. The seal (`_SEAL`) contains the CRC-32 of all bytes
before the seal, since torch does not verify the checksums inside the archive. Programs that read ZIP archives, including torch.load, ignore
the bytes after the archive. The checkpoint of a named model, which was exported under a name, is a safetensors file (tensor_file.py).
"""

from __future__ import annotations

import base64
import json
import math
import os
import random
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeGuard

import numpy as np

from slm_lab.experiment.files import tensor_file
from slm_lab.experiment.files.storage import Location, StoredPath
from slm_lab.experiment.plan import UserError

VERSION = 6
"""Version of the layout of checkpoint dicts (bundles) and of the encoding of observations. A bundle of another version cannot be loaded."""

HEADER = (
    *("version", "frame", "frames", "wall_t", "done", "lost", "tables", "spec"),
    *("current_return", "current_return_se", "current_epi", "mode", "elo"),
)
"""Keys of a checkpoint dict (bundle). If the dict contains such a key, the value is also stored in the header of the checkpoint file."""

PLAYABLE = (
    *("version", "weights", "normalizers", "value_statistics", "spaces", "explore_var", "frame", "global_frame"),
    *("current_return", "current_return_se", "current_epi", "mode", "elo", "source", "policy"),
)
"""Keys of a checkpoint dict (bundle) that are needed to act with the saved agent and to describe the agent."""

ENOUGH_EPISODES = 5
"""Minimum number of training episodes in the mean `current_return` of saved weights. A mean over fewer episodes is too imprecise for
comparing weights."""

_SEAL = re.compile(rb"\nslm_lab crc32 ([0-9a-f]{8})\n")
_SEAL_BYTES = len("\nslm_lab crc32 01234567\n")
_HEADER_END = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{8})")
"""Regular expression for the last bytes of a header, which contain the size and the CRC-32 of the header."""
_HEADER_END_BYTES = len("01234567 01234567")
_HEADER_BYTES = 60_000
"""Maximum size of a header in bytes. A larger header is omitted, since programs that read ZIP archives search for the end of the archive
only in the last 64 KiB of a file."""
_CHUNK = 2**20
_IN_MEMORY = 2**28
"""Maximum size in bytes of a file at a URL that is copied to memory for reading. A larger file is copied to a temporary file."""


class BundleError(UserError):
    """Exception that is raised if a checkpoint cannot be used. The error message contains the path of the checkpoint and the reason."""


class DamagedError(BundleError):
    """Exception that is raised if a checkpoint file is damaged, or if a file is not a checkpoint."""


class _ChecksumWriter:
    """Writer of a checkpoint file, which computes the CRC-32 of the written bytes and ends the file with a header and a seal."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.crc = file, 0

    def write(self, data: bytes) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def write_header_and_checksum(self, header: dict[str, Any]) -> None:
        packed = base64.b64encode(zlib.compress(json.dumps(header).encode()))
        if len(packed) > _HEADER_BYTES:
            packed = b""
        self.write(packed + b"%08x %08x" % (len(packed), zlib.crc32(packed)))
        self.file.write(b"\nslm_lab crc32 %08x\n" % self.crc)


def save(path: Location, bundle: dict[str, Any]) -> None:
    """Write `bundle` (tensors and plain Python values) to the file `path` atomically. Raises OSError if writing fails.

    The bundle is first written to a hidden temporary file in the folder of `path`. The name of this file is not that of a checkpoint. If
    writing fails, the file `path` is left unchanged. A process that is killed while writing leaves the temporary file behind. The next call
    with the same `path` overwrites the temporary file.
    """
    if isinstance(path, StoredPath):
        path.replace(lambda file: _write(bundle, file))
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            _write(bundle, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is on disk
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write(bundle: dict[str, Any], file: IO[bytes]) -> None:
    writer = _ChecksumWriter(file)
    try:
        _import_torch().save(bundle, writer)
        writer.write_header_and_checksum(_header_of(bundle))
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None  # the disk is full, which torch.save reports as "unexpected pos"
        raise


def load(path: Location, *, mapped: bool = False) -> dict[str, Any]:
    """Return the bundle that a checkpoint file contains, with all tensors on the CPU.

    Raises BundleError if the file is missing or damaged, or if another program or another version of slm_lab wrote the file. All bytes are
    verified before torch reads the file, so that corrupted data is never used. After the verification, torch reads the file quickly, since
    the file is in the operating system's file cache.

    Args: mapped: whether tensors are memory-mapped, which means that a tensor is read from the file only when it is used. A memory-mapped
        file must not be overwritten in place (`save` replaces the file instead). `mapped` has no effect on a StoredPath.
    """
    if _is_tensor_file(path):
        with _bundle_errors(path):
            return _checked_bundle(tensor_file.load(path), path)
    import torch

    with _bundle_errors(path), _open_for_reading(path) as file:
        _check_integrity(file, path)
        mapped = mapped and not isinstance(path, StoredPath)
        bundle = torch.load(str(path) if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
    return _checked_bundle(bundle, path)


def read_header(path: Location, *, check: bool = False) -> dict[str, Any]:
    """Return those entries of a checkpoint that have a key in HEADER. The tensors of the checkpoint are not read, unless the file has no
    valid header.

    Raises BundleError under the same conditions as `load`.

    Args: check: whether to verify all bytes of the file, as `load` does.
    """
    if _is_tensor_file(path):
        with _bundle_errors(path):
            values = tensor_file.load(path) if check else tensor_file.load_values(path)
            return _header_of(_checked_bundle(values, path))
    with _bundle_errors(path), _open_for_reading(path) as file:
        if check:
            _check_integrity(file, path)
        header = _read_header(file)
    return _header_of(load(path)) if header is None else _checked_bundle(header, path)


def _is_tensor_file(path: Location) -> TypeGuard[Path]:
    return isinstance(path, Path) and path.suffix == tensor_file.SUFFIX


def _header_of(bundle: dict[str, Any]) -> dict[str, Any]:
    return {key: bundle[key] for key in HEADER if key in bundle}


def _read_header(file: IO[bytes]) -> dict[str, Any] | None:
    """Return the header of a checkpoint file, or None if the file has no header, or if its header is damaged."""
    end = file.seek(0, os.SEEK_END) - _SEAL_BYTES - _HEADER_END_BYTES
    file.seek(max(end, 0))
    numbers = _HEADER_END.fullmatch(file.read(_HEADER_END_BYTES))
    if numbers is None or not 0 < (size := int(numbers[1], 16)) <= end:
        return None
    file.seek(end - size)
    packed = file.read(size)
    if zlib.crc32(packed) != int(numbers[2], 16):
        return None
    header: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return header


@contextmanager
def _bundle_errors(path: Location) -> Iterator[None]:
    """Convert all errors that are raised while a checkpoint file is read in the with-block to BundleError."""
    try:
        yield
    except BundleError:
        raise
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}") from None
    except tensor_file.TensorFileError as error:
        raise BundleError(f"{path} {error}") from None
    except Exception as error:  # torch raises many types of errors for a file of another program
        raise DamagedError(f"{path} is damaged or not a checkpoint: {type(error).__name__}") from None


def _checked_bundle(bundle: Any, path: Location) -> dict[str, Any]:
    """Return `bundle` unchanged. Raises BundleError if `bundle` is neither a checkpoint dict nor the header of a checkpoint, or if its
    version is not VERSION."""
    if not isinstance(bundle, dict) or "version" not in bundle:
        raise BundleError(f"{path} is not an slm_lab checkpoint")
    if bundle["version"] != VERSION:
        mismatch = f"has version {bundle['version']} of the checkpoint format, and this slm_lab reads version {VERSION}"
        raise BundleError(f"{path} {mismatch}; use the version of slm_lab that wrote it, or train again")
    return bundle


@contextmanager
def _open_for_reading(path: Location) -> Iterator[IO[bytes]]:
    """Open a file for reading with random access. A file at a URL (StoredPath) is first copied to this machine, so that it is transferred
    only once."""
    if not isinstance(path, StoredPath):
        with path.open("rb") as file:
            yield file
        return
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as copy:
        with path.open_for_reading() as stored:
            shutil.copyfileobj(stored, copy, _CHUNK)
        yield copy


def _check_integrity(file: IO[bytes], path: Location) -> None:
    """Raise DamagedError if a checkpoint file has changed since `save` wrote the file. If the file is intact, set the file position to the
    beginning of the file.

    If the seal is missing or does not match the content, the checksums inside the ZIP archive are verified, to name the damaged member of
    the archive. Checkpoint files of old versions have no seal. A file without a seal passes this check if the archive is intact, and is
    rejected later because of its version.
    """
    size = max(file.seek(0, os.SEEK_END) - _SEAL_BYTES, 0)
    file.seek(size)
    seal = _SEAL.fullmatch(file.read())
    file.seek(0)
    if seal is None or _file_crc32(file, size) != int(seal[1], 16):
        damage = _describe_damaged_member(file) or ("" if seal is None else ": its content does not match its checksum (CRC-32)")
        if damage:
            raise DamagedError(f"{path} is damaged{damage}")
    file.seek(0)


def _file_crc32(file: IO[bytes], size: int) -> int:
    """Return the CRC-32 of the next `size` bytes of a file."""
    crc = 0
    while size and (chunk := file.read(min(size, _CHUNK))):
        crc, size = zlib.crc32(chunk, crc), size - len(chunk)
    return crc


def _describe_damaged_member(file: IO[bytes]) -> str | None:
    """Return the part of an error message that names the damaged member of a ZIP archive, or None if no member is damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
            # torch treats a member with external attributes as a folder
            bad = bad or next((info.filename for info in archive.infolist() if info.external_attr), None)
    except Exception as error:  # zipfile raises many types, also ValueError, NotImplementedError and RuntimeError
        return f" or not a checkpoint: it is not a complete ZIP archive ({str(error) or type(error).__name__})"
    return None if bad is None else f": its member '{bad}' does not match its checksum (CRC-32)"


def rng_state(device: str) -> dict[str, Any]:
    """Return the states of the global random number generators of Python, numpy and torch and, if `device` is a CUDA device, of that
    device."""
    import torch

    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest], "torch": torch.get_rng_state()}
    if device.startswith("cuda"):
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: str) -> None:
    """Set the global random number generators to the states that `rng_state` returned."""
    import torch

    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.startswith("cuda"):
        torch.cuda.set_rng_state(state["cuda"], device)


def to_tensors(tree: Any) -> Any:
    """Return nested dicts, lists and tuples with each numpy array converted to a tensor, since a checkpoint cannot contain numpy arrays."""
    return _convert_leaves(tree, np.ndarray, lambda array: _import_torch().from_numpy(array))


def to_arrays(tree: Any) -> Any:
    """Return nested dicts, lists and tuples with each tensor converted to a numpy array.

    A numpy array is sent to another process as bytes, while sending a tensor needs a file descriptor.
    """
    return _convert_leaves(tree, _import_torch().Tensor, lambda tensor: tensor.numpy().copy())


def _convert_leaves(tree: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    match tree:
        case dict():
            return {key: _convert_leaves(value, kind, convert) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(_convert_leaves(value, kind, convert) for value in tree)
    return convert(tree) if isinstance(tree, kind) else tree


def _import_torch() -> Any:
    import torch

    return torch


def weights_sort_key(weights: Mapping[str, Any] | None) -> tuple[int, float]:
    """Return a sort key for saved weights. Better weights have a greater key.

    The first element of the key is 3 for weights with an Elo rating (in self-play, the rating of the newest snapshot), 2 for weights whose
    current return was measured by evaluation, 1 for weights whose current return was measured over at least ENOUGH_EPISODES training
    episodes, and 0 for all other weights. The second element of the key is the Elo rating or the current return of the weights.

    Args: weights: a checkpoint dict, or the header of a checkpoint. None, and weights that were saved before the end of the first episode,
        have the lowest key.
    """
    elo = None if weights is None else weights.get("elo")
    if elo is not None and math.isfinite(elo):
        return 3, float(elo)
    if weights is None or (value := weights.get("current_return")) is None or not math.isfinite(value):
        return 0, -math.inf
    return 2 if weights["mode"] == "eval" else int(weights["current_epi"] >= ENOUGH_EPISODES), float(value)
