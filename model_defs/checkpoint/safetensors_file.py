"""One safetensors file: its tensors from the header alone, and each tensor as a mapping of the file."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from artifacts.errors import CorruptCheckpointError, UnsupportedModelError
from model_defs.checkpoint.file_faults import corrupt_file, wrong_start
from model_defs.checkpoint.interface import TensorInfo

_KIND = "safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def safetensors_infos(path: Path, label: str) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of the tensors of one file, in the order of their data.

    Args:
        path: the file.
        label: the file as the user knows it, for messages.

    Raises:
        CorruptCheckpointError: the header is bad, or describes other bytes than the file has.
        UnsupportedModelError: a tensor is of a type that this project does not read.
    """
    try:
        _check_size(path, label)
        with safe_open(path, framework="pt") as file:
            codes = {name: file.get_slice(name).get_dtype() for name in file.offset_keys()}
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in codes}
    except SafetensorError as error:
        raise corrupt_file(label, f"has a bad header ({error})", kind=_KIND) from None
    except OSError as error:
        raise corrupt_file(label, f"cannot be read ({error.strerror or error})", kind=_KIND) from None
    for name, code in codes.items():
        if code not in _DTYPES:
            raise UnsupportedModelError(
                found=f"{label} stores {name} as {code}",
                expected=f"one of {', '.join(_DTYPES)}",
                action="use a checkpoint in another type",
            )
    return {name: TensorInfo(name=name, shape=shapes[name], dtype=_DTYPES[codes[name]]) for name in codes}


def read_safetensors(path: Path, label: str, name: str) -> torch.Tensor:
    """Map one tensor.

    The file is opened anew for each tensor: the mapping then goes with the tensor, while a handle kept open
    would hold every page that was ever read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(
            found=f"{label} changed after it was opened ({error})",
            expected="a file that stays as it is while it is read",
            action="run again when the file is complete",
        ) from None


def _check_size(path: Path, label: str) -> None:
    """Compare the file's size with what its header needs: safetensors itself reports a cut file without the sizes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _LENGTH_BYTES:
            raise corrupt_file(label, f"is only {size} bytes long", kind=_KIND)
        header_end = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_end > _LENGTH_BYTES + _MAX_HEADER_BYTES:
            raise wrong_start(path, label, kind=_KIND)
        if header_end > size:
            raise corrupt_file(label, f"is {size} bytes long, but its header alone ends at {header_end}", kind=_KIND)
        header = file.read(header_end - _LENGTH_BYTES)
    try:
        entries = json.loads(header)
        data_end = max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
        cut = header_end + data_end > size
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return  # no tensors, or a header that safetensors refuses in its own words
    if cut:
        raise corrupt_file(label, f"is {size} bytes long, but its tensors end at {header_end + data_end}", kind=_KIND)
