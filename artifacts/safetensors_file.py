"""Weights on disk: safetensors files whose tensors start at a multiple of 64 bytes, so that they map without a copy.

The format (8 bytes of header length, a JSON header, the tensors back to back) allows no holes; alignment therefore
comes from a header padded with spaces and from ``__pad`` tensors after those of odd sizes. Any safetensors reader can
read them.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from artifacts.errors import CorruptArtifactError
from artifacts.manifest import FileRecord
from artifacts.signature import TensorSpec

ALIGNMENT = 64
"""XLA:CPU takes a host buffer without a copy when it starts at a multiple of this."""

MAX_HEADER_BYTES = 100_000_000
"""A longer header is refused unread. The safetensors library has the same limit."""

_SAFETENSORS_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "bool": "BOOL"}
_HEADER_LENGTH_BYTES = 8
_PAD = "__pad"


class _TensorEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_tensors(file: BinaryIO, specs: Sequence[TensorSpec], read: Callable[[str], np.ndarray]) -> FileRecord:
    """Write tensors one at a time, so that memory holds one.

    Args:
        file: opened for writing, at its start.
        specs: names, shapes and dtypes, in the order on disk.
        read: gives each tensor by name, dense, in its dtype.

    Returns:
        Size and digest of what was written.
    """
    header, paddings = _header(specs)
    digest = hashlib.sha256()
    size = 0

    def write(data: bytes | memoryview) -> None:
        nonlocal size
        file.write(data)
        digest.update(data)
        size += len(data)

    write(header)
    for spec, padding in zip(specs, paddings, strict=True):
        tensor = np.asarray(read(spec.name), order="C")
        assert (tensor.shape, tensor.dtype) == (spec.shape, spec.numpy_dtype), spec
        write(tensor.reshape(-1).view(np.uint8).data)
        write(bytes(padding))
    return FileRecord(size=size, sha256=digest.hexdigest())


def _header(specs: Iterable[TensorSpec]) -> tuple[bytes, list[int]]:
    entries: dict[str, _TensorEntry] = {}
    paddings: list[int] = []
    offset = 0
    for spec in specs:
        if spec.name in entries:
            raise ValueError(f"tensor {spec.name} is given twice")
        end = offset + spec.nbytes
        entries[spec.name] = _TensorEntry(_SAFETENSORS_DTYPES[spec.dtype], spec.shape, (offset, end))
        padding = -end % ALIGNMENT
        if padding:
            entries[f"{_PAD}.{len(paddings)}"] = _TensorEntry("U8", (padding,), (end, end + padding))
        paddings.append(padding)
        offset = end + padding
    text = msgspec.json.encode(entries)
    text += b" " * (-(_HEADER_LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text, paddings


def map_tensors(path: Path, expected: Iterable[TensorSpec]) -> dict[str, np.ndarray]:
    """Map a weights file read-only and return a view of each expected tensor; no byte is read but the header's.

    Raises:
        CorruptArtifactError: the file cannot be read, its header does not parse or describes another file, or it
            disagrees with what the manifest expects.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, entries = _read_header(file, size)
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return {spec.name: _view(mapped, start, entries, spec) for spec in expected}
    except OSError as error:
        raise CorruptArtifactError(
            found=f"{path.name} cannot be read ({error.strerror or error})",
            expected="a weights file that this user may read",
            action="check its permissions and its disk, or restore the file",
        ) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptArtifactError(
            found=f"{path.name}: its header disagrees with the manifest ({error})",
            expected="the safetensors file that the manifest lists",
            action="restore the file or rebuild the artifact",
        ) from error


def _read_header(file: BinaryIO, size: int) -> tuple[int, dict[str, _TensorEntry]]:
    """Where the tensors start in the file, and the header's entries, which must cover the rest of it once."""
    length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
    start = _HEADER_LENGTH_BYTES + length
    if not 0 < length <= MAX_HEADER_BYTES or start > size or start % ALIGNMENT:
        raise ValueError(f"header of {length} bytes in a file of {size}")
    entries = msgspec.json.decode(file.read(length), type=dict[str, _TensorEntry])
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            raise ValueError(f"{name!r} is at {begin} to {end}, after one that ends at {position}")
        position = end
    if start + position != size:
        raise ValueError(f"tensors end at {start + position} in a file of {size} bytes")
    return start, entries


def _view(mapped: mmap.mmap, start: int, entries: Mapping[str, _TensorEntry], spec: TensorSpec) -> np.ndarray:
    entry = entries.get(spec.name)
    if entry is None:
        raise ValueError(f"no tensor {spec.name}")
    begin, end = entry.data_offsets
    if (entry.dtype, entry.shape, end - begin) != (_SAFETENSORS_DTYPES[spec.dtype], spec.shape, spec.nbytes):
        raise ValueError(f"{spec.name} is {entry.dtype} {list(entry.shape)} in {end - begin} bytes, not {spec}")
    if begin % ALIGNMENT:
        raise ValueError(f"{spec.name} starts at {begin}, no multiple of {ALIGNMENT}")
    count = spec.nbytes // spec.numpy_dtype.itemsize
    return np.frombuffer(mapped, spec.numpy_dtype, count=count, offset=start + begin).reshape(spec.shape)
