"""Save nested dicts of tensors and plain values as a safetensors file, which can be loaded without unpickling.

A safetensors file (https://huggingface.co/docs/safetensors) consists of the size of the header (8 bytes, little-endian), the header (JSON:
name of each tensor → dtype, shape, offsets), and the bytes of the tensors. The plain Python values, with placeholders for the tensors, are
stored as JSON in the entry "__metadata__" of the header.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slm_lab.lib.files import checked_content, replace_file, with_checksum

if TYPE_CHECKING:
    import torch

SUFFIX = ".safetensors"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Name of a data type in a safetensors file → name of the torch dtype."""
_LARGEST_HEADER = 2**24
_TENSOR = "$tensor"
"""Key of the placeholder for a tensor in nested dicts. The placeholder is the dict {"$tensor": name of the tensor}."""


class TensorFileError(ValueError):
    """Exception that is raised if a safetensors file is damaged or has another format. The error message completes a sentence that begins
    with the file name."""


def save(path: Path, tree: Mapping[str, Any]) -> None:
    """Write nested dicts and lists of tensors and JSON values to the file `path` atomically.

    If writing fails, OSError is raised, and an existing file is left unchanged.
    """
    tensors: dict[str, torch.Tensor] = {}
    values = _extract_tensors(tree, "", tensors)
    table, content, at = dict[str, Any](), [], 0
    for name, tensor in tensors.items():
        data = _tensor_bytes(tensor)
        table[name] = {"dtype": _dtype_name(tensor), "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        content.append(data)
        at += len(data)
    body = b"".join(content)
    values = with_checksum({"tree": values, "tensors_crc32": _crc(table, body)})
    header = json.dumps({"__metadata__": {"slm_lab": json.dumps(values)}, **table}).encode()
    header += b" " * (-len(header) % 8)
    replace_file(path, struct.pack("<Q", len(header)) + header + body, sync=True)


def load(path: Path) -> dict[str, Any]:
    """Verify every byte of a file that `save` has written, and return the nested dicts of the file. Raises TensorFileError if the file is
    damaged, and OSError if the file cannot be read."""
    data = path.read_bytes()
    header = _parse_header(data[:8], data[8:], len(data))
    table = {name: entry for name, entry in header.items() if name != "__metadata__"}
    values, size = _parse_values(header), struct.unpack("<Q", data[:8])[0]
    body = memoryview(data)[8 + size :]
    if values.get("tensors_crc32") != _crc(table, body):
        raise TensorFileError("is damaged: its tensors do not match their checksum (CRC-32)")
    tensors = {name: _read_tensor(name, entry, body) for name, entry in table.items()}
    return dict(_insert_tensors(values["tree"], tensors))


def load_values(path: Path) -> dict[str, Any]:
    """Return the nested dicts of a file without reading the tensors. Raises TensorFileError if the header of the file is damaged, and
    OSError if the file cannot be read.

    Each tensor is replaced by the placeholder {"$tensor": name}.
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        size = min(_header_size(prefix), _LARGEST_HEADER)
        return dict(_parse_values(_parse_header(prefix, file.read(size), path.stat().st_size))["tree"])


def _extract_tensors(tree: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return nested dicts and lists with each tensor replaced by a placeholder, and add the tensors to the dict `tensors`."""
    match tree:
        case dict():
            return {key: _extract_tensors(value, f"{path}.{key}" if path else str(key), tensors) for key, value in tree.items()}
        case list() | tuple():
            return [_extract_tensors(value, f"{path}.{index}", tensors) for index, value in enumerate(tree)]
        case None | bool() | int() | float() | str():
            return tree
    tensors[path] = tree
    return {_TENSOR: path}


def _insert_tensors(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match tree:
        case {"$tensor": str(name)}:
            if name not in tensors:
                raise TensorFileError(f"is damaged: it has no tensor '{name}'")
            return tensors[name]
        case dict():
            return {key: _insert_tensors(value, tensors) for key, value in tree.items()}
        case list():
            return [_insert_tensors(value, tensors) for value in tree]
    return tree


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _dtype_name(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return next(name for name, torch_name in _DTYPES.items() if torch_name == dtype)


def _read_tensor(name: str, entry: Any, body: memoryview) -> torch.Tensor:
    import torch

    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if kind in _DTYPES:
            dtype: torch.dtype = getattr(torch, _DTYPES[kind])
            is_valid_shape = all(isinstance(size, int) and size >= 0 for size in shape)
            if is_valid_shape and 0 <= begin <= end <= len(body) and end - begin == math.prod(shape) * dtype.itemsize:
                flat = torch.frombuffer(bytearray(body[begin:end]), dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
                return flat.reshape(shape)
    raise TensorFileError(f"is damaged: the entry of its tensor '{name}' is invalid")


def _header_size(prefix: bytes) -> int:
    """Return the size of the header in bytes, given the first 8 bytes of a file."""
    if len(prefix) < 8:
        raise TensorFileError("is not a safetensors file: it has fewer than 8 bytes")
    size: int = struct.unpack("<Q", prefix)[0]
    return size


def _parse_header(prefix: bytes, rest: bytes, total: int) -> dict[str, Any]:
    """Return the header of a file.

    Args:
        prefix: the first 8 bytes of the file, which contain the size of the header.
        rest: the following bytes of the file, at least up to the end of the header.
        total: size of the file in bytes.
    """
    size = _header_size(prefix)
    if size > min(_LARGEST_HEADER, total - 8):
        raise TensorFileError(f"is not a safetensors file: its header would have {size:,} bytes")
    try:
        header = json.loads(rest[:size])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise TensorFileError("is not a safetensors file: its header is not a JSON object")
    return header


def _parse_values(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values that `save` has stored in the header of a file."""
    try:
        content = json.loads(header["__metadata__"]["slm_lab"])
        values = checked_content({"crc32": None, **content})  # raises an error if the content has no checksum
    except (KeyError, TypeError):
        raise TensorFileError("was not written by slm_lab") from None
    except (ValueError, RecursionError, AttributeError):
        raise TensorFileError("is damaged: its header does not match its checksum (CRC-32)") from None
    if not isinstance(values.get("tree"), dict):
        raise TensorFileError("was not written by slm_lab")
    return values


def _crc(table: Mapping[str, Any], body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(json.dumps(table).encode()))
