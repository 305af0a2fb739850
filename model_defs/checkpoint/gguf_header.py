"""The header of a GGUF file, read with every length checked, and its tensors as mappings of the file.

Format: the GGUF specification of ggml (docs/gguf.md), versions 2 and 3, little-endian. Types, block sizes and
dequantisation are those of the ``gguf`` package. Its reader is not used: it does not check lengths, so that a damaged
count makes it loop or slice past the end, and it takes about ten seconds for the metadata of a vocabulary of 50,000.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from artifacts.errors import CorruptCheckpointError, UnsupportedModelError
from model_defs.checkpoint.file_faults import corrupt_file, wrong_start

GgufValue = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

_KIND = "GGUF"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # GGML_MAX_DIMS
_CHUNK_VALUES = 1 << 20  # values dequantised at a time: the library holds several temporaries of this size

_SCALAR_CODES = {  # struct codes
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Where one tensor lies in the file."""

    name: str  # in GGUF form, "blk.0.attn_q.weight"
    shape: tuple[int, ...]  # slowest axis first, as in torch; the file lists the fastest first
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor once read: its own for F32, F16 and BF16, float32 for quantised types."""
        return _PLAIN_DTYPES.get(self.kind, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """Metadata and tensors of one file."""

    path: Path
    description: str
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]

    def fault(self, fault: str) -> CorruptCheckpointError:
        """Error for content that contradicts itself or lacks a part."""
        return corrupt_file(self.description, fault, kind=_KIND)

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata.

        Raises:
            CorruptCheckpointError: the key is absent and has no default, or holds another type.
        """
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.fault(f"has {value!r} under {key}, not a string")
        return value

    def count(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of the metadata that is at least ``minimum``; errors as for ``text``."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.fault(f"has {value!r} under {key}, not an integer of at least {minimum}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number of the metadata; errors as for ``text``.

        Floats are stored in 32 bits: the shortest decimal of that value is returned (1e-05, not 9.99999974e-06).
        """
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fault(f"has {value!r} under {key}, not a positive number")
        single = np.float32(value)
        return float(str(single)) if float(single) == value else float(value)

    def _value(self, key: str, default: GgufValue | None) -> GgufValue:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.fault(f"has no {key} in its metadata")
        return value


def read_gguf_header(path: Path, description: str) -> GgufHeader:
    """Read metadata and tensor list; no tensor data is touched.

    Strings of the metadata that are not UTF-8 keep their bytes by ``surrogateescape``.

    Args:
        path: the file.
        description: the file as the user wrote it, for messages.

    Raises:
        CorruptCheckpointError: the file is cut, not GGUF, or contradicts itself.
        UnsupportedModelError: a version, byte order or tensor type that is not read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(_MAGIC)) != _MAGIC:
                raise wrong_start(path, description, kind=_KIND)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, description), path, size)
    except OSError as error:
        raise corrupt_file(description, f"cannot be read ({error.strerror or error})", kind=_KIND) from None


def read_gguf_tensor(header: GgufHeader, tensor: GgufTensor) -> torch.Tensor:
    """Read one tensor: F32, F16 and BF16 as a private mapping of the file, quantised types as new float32 values.

    Raises:
        CorruptCheckpointError: the file changed since its header was read.
    """
    try:
        raw = np.memmap(header.path, np.uint8, "c", tensor.offset, (tensor.num_bytes,))
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(
            found=f"{header.description} changed after it was opened ({error})",
            expected="a file that stays as it is while it is read",
            action="run again when the file is complete",
        ) from None
    if tensor.kind in _PLAIN_DTYPES:
        return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)
    row_values = tensor.shape[-1]
    packed = raw.reshape(prod(tensor.shape[:-1]), -1)
    values = np.empty((len(packed), row_values), np.float32)
    step = max(1, _CHUNK_VALUES // row_values)
    for start in range(0, len(packed), step):
        values[start : start + step] = dequantize(packed[start : start + step], tensor.kind)
    return torch.from_numpy(values).view(tensor.shape)


class _Cursor:
    """A position in the header that never passes the end of the file."""

    def __init__(self, data: mmap.mmap, description: str) -> None:
        self.data = data
        self.description = description
        self.offset = len(_MAGIC)

    def fault(self, fault: str) -> CorruptCheckpointError:
        return corrupt_file(self.description, fault, kind=_KIND)

    def take(self, num_bytes: int) -> int:
        """Pass over bytes and return where they start."""
        start = self.offset
        if num_bytes > len(self.data) - start:
            raise self.fault(f"is {len(self.data)} bytes long and ends inside its header")
        self.offset = start + num_bytes
        return start

    def numbers(self, code: str, count: int) -> list[int] | list[float] | list[bool]:
        start = self.take(struct.calcsize(f"<{code}") * count)
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))

    def u32(self) -> int:
        start = self.take(4)
        return int.from_bytes(self.data[start : start + 4], "little")

    def u64(self) -> int:
        start = self.take(8)
        return int.from_bytes(self.data[start : start + 8], "little")

    def string_bytes(self) -> bytes:
        length = self.u64()
        start = self.take(length)
        return self.data[start : start + length]

    def string(self) -> str:
        return self.string_bytes().decode("utf-8", "surrogateescape")

    def name(self) -> str:
        """A key or tensor name."""
        try:
            return self.string_bytes().decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault("has a name in its header that is not UTF-8") from None

    def value(self) -> GgufValue:
        kind = self._value_kind()
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.numbers(_SCALAR_CODES[kind], 1)[0]
        kind, count = self._value_kind(), self.u64()
        if kind is GGUFValueType.ARRAY:
            raise self.fault("has an array of arrays in its metadata")
        if kind is GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        return self.numbers(_SCALAR_CODES[kind], count)

    def _value_kind(self) -> GGUFValueType:
        number = self.u32()
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.fault(f"has a value of unknown type {number} in its metadata") from None


def _parse(cursor: _Cursor, path: Path, size: int) -> GgufHeader:
    version = cursor.u32()
    if version not in _VERSIONS:
        big_endian = version & 0xFFFF == 0
        raise UnsupportedModelError(
            found=f"{cursor.description} is " + ("big-endian GGUF" if big_endian else f"GGUF of version {version}"),
            expected="little-endian GGUF of version 2 or 3",
            action="convert the model again with a current llama.cpp",
        )
    num_tensors, num_values = cursor.u64(), cursor.u64()
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_values):
        key = cursor.name()
        if key in metadata:
            raise cursor.fault(f"has {key} twice in its metadata")
        metadata[key] = cursor.value()
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.fault(f"has alignment {alignment!r}, not a power of two of at least 8")
    data_start = -(-cursor.offset // alignment) * alignment
    offset = end = 0  # from the start of the data; tensors follow each other, padded to the alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, stated_offset in entries:
        if name in tensors:
            raise cursor.fault(f"has tensor {name} twice")
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_values:
            raise cursor.fault(f"has {name} in rows of {shape[-1]}, not whole blocks of {block_values} ({kind.name})")
        if stated_offset != offset:
            raise cursor.fault(f"places {name} at {stated_offset} of its data, not at {offset} after the tensor before")
        num_bytes = prod(shape) // block_values * block_bytes
        tensors[name] = GgufTensor(name=name, shape=shape, kind=kind, offset=data_start + offset, num_bytes=num_bytes)
        end = offset + num_bytes
        offset = -(-end // alignment) * alignment
    if tensors and data_start + end > size:
        raise cursor.fault(f"is {size} bytes long, but its tensors end at {data_start + end}")
    return GgufHeader(path=path, description=cursor.description, metadata=metadata, tensors=tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Name, shape, type and offset from the start of the data."""
    name, num_dims = cursor.name(), cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fault(f"has tensor {name} with {num_dims} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dims)]))
    if 0 in shape:
        raise cursor.fault(f"has tensor {name} of shape {list(shape)}")
    number, offset = cursor.u32(), cursor.u64()
    readable = _readable_kinds()
    if number not in readable:
        known = {kind.value: kind.name for kind in GGMLQuantizationType}
        raise UnsupportedModelError(
            found=f"{cursor.description} stores {name} as {known.get(number, f'type {number}')}",
            expected=f"one of {', '.join(kind.name for kind in readable.values())}",
            action="quantise the model to one of them",
        )
    return name, shape, readable[number], offset


@cache
def _readable_kinds() -> Mapping[int, GGMLQuantizationType]:
    """Tensor types that the library turns into floats; it tells only when asked to."""
    readable = {}
    for kind in GGMLQuantizationType:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        readable[kind.value] = kind
    return readable
