"""Weights on disk: safetensors files whose tensors all start at a multiple of 64 bytes, so that they map without a copy.

The format (8 bytes of header length, a JSON header, the tensors back to back) allows no holes; alignment therefore comes
from a header padded with spaces and from ``__pad`` tensors after those of odd sizes. Any safetensors reader can read them.
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

_SAFETENSORS_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16"}
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
        tensor = np.ascontiguousarray(read(spec.name))
        assert (tensor.shape, tensor.dtype) == (spec.shape, spec.numpy_dtype), spec
        write(memoryview(tensor.reshape(-1).view(np.uint8)))
        write(bytes(padding))
    return FileRecord(size=size, sha256=digest.hexdigest())


def _header(specs: Iterable[TensorSpec]) -> tuple[bytes, list[int]]:
    entries: dict[str, _TensorEntry] = {}
    paddings = []
    offset = 0
    for spec in specs:
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
    """Map a weights file read-only and return a view of each expected tensor; no page is read but the header's.

    Raises:
        CorruptArtifactError: the header does not parse, or disagrees with what the manifest expects.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size > _HEADER_LENGTH_BYTES else b""
    start = _HEADER_LENGTH_BYTES + int.from_bytes(mapped[:_HEADER_LENGTH_BYTES], "little")
    try:
        if not _HEADER_LENGTH_BYTES < start <= size:
            raise ValueError("header length")
        entries = msgspec.json.decode(mapped[_HEADER_LENGTH_BYTES:start], type=dict[str, _TensorEntry])
        tensors = {}
        for spec in expected:
            entry = entries[spec.name]
            begin, end = entry.data_offsets
            described = (entry.dtype, entry.shape, end - begin)
            if described != (_SAFETENSORS_DTYPES[spec.dtype], spec.shape, spec.nbytes) or not 0 <= begin <= size - start:
                raise ValueError(spec.name)
            flat = np.frombuffer(mapped, spec.numpy_dtype, count=spec.nbytes // spec.numpy_dtype.itemsize, offset=start + begin)
            tensors[spec.name] = flat.reshape(spec.shape)
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise CorruptArtifactError(
            found=f"{path.name}: its header disagrees with the manifest ({error})",
            expected="the safetensors file that the manifest lists",
            action="restore the file or rebuild the artifact",
        ) from error
    return tensors
