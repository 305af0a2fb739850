"""A prompt of embeddings from a file: ``.npy`` or ``.safetensors``, never pickled.

Both formats state dtype and shape in a header. It is checked, and the stated size held against the file's own, before
anything is allocated: a small file that declares a huge array costs nothing.
"""

import difflib
import math
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from artifacts.errors import PromptEmbedsError
from runtime.prompt_embeds import FLOAT_DTYPES

KEY = "prompt_embeds"
"""Name of the rows in a safetensors file."""

_SAFETENSORS_DTYPES = {
    KEY: ("F16", "BF16", "F32", "F64"),
    "prompt_token_ids": ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"),
    "prompt_is_token_ids": ("BOOL",),
}
_DTYPE_RULES = {
    KEY: "float16, float32 or float64, or bfloat16 in a .safetensors file",
    "prompt_token_ids": "prompt_token_ids of integers",
    "prompt_is_token_ids": "prompt_is_token_ids of bool",
}
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_prompt_embeds(path: str | Path) -> dict[str, np.ndarray]:
    """Read a prompt in the dtypes and shapes of the file; ``parse_prompt`` checks them against the model.

    Args:
        path: a ``.npy`` file of rows; or a ``.safetensors`` file with ``prompt_embeds`` and, where rows and token ids
            are mixed, ``prompt_token_ids`` and ``prompt_is_token_ids``. Rows are of float16, float32, float64 or, in
            safetensors only, bfloat16.

    Returns:
        A prompt for ``LLM.generate``: what the file holds, by name.

    Raises:
        PromptEmbedsError: the file is missing, of another kind, damaged, pickled, of another dtype, or holds a tensor
            of another name.
    """
    path = Path(path)
    readers = {".npy": _read_npy, ".safetensors": _read_safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise PromptEmbedsError(
            found=f"{path} is of kind {path.suffix or '(none)'}",
            expected="a .npy or .safetensors file: other kinds may run code when they are read",
            action=f"convert it where you trust it: np.save('rows.npy', array), or "
            f"safetensors.torch.save_file({{'{KEY}': tensor}}, 'rows.safetensors')",
        )
    if not path.is_file():
        raise PromptEmbedsError(
            found=f"no file {path}", expected="a .npy or .safetensors file", action="correct the path"
        )
    try:
        return reader(path)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _read_npy(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        shape, fortran_order, dtype = _npy_header(path, file)
        if dtype.hasobject:
            raise _unreadable(path, "its array is pickled")
        if dtype.kind != "f" or dtype.name not in FLOAT_DTYPES:
            # numpy writes bfloat16 as two bytes of no type.
            raise _wrong_dtype(path, KEY, "bfloat16 or raw bytes" if dtype.str[1:] == "V2" else dtype.name)
        size = math.prod(shape) * dtype.itemsize
        rest = os.fstat(file.fileno()).st_size - file.tell()
        if size == rest:
            try:
                return {KEY: np.frombuffer(file.read(size), dtype).reshape(shape, order="F" if fortran_order else "C")}
            except (ValueError, OverflowError):  # extents that no array has, or a file that was cut meanwhile
                pass
    raise _unreadable(path, f"{dtype.name}{list(shape)} does not fit the {rest} bytes after the header")


def _npy_header(path: Path, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(file)
        return _NPY_HEADERS[version](file)
    except Exception as error:  # the header is a Python literal: on junk the parser raises whatever it likes
        raise _unreadable(path, "it has no .npy header of version 1 or 2") from error


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="numpy") as file:
            names = sorted(file.keys())
            _check_names(path, names)
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in _SAFETENSORS_DTYPES[name]:
                    raise _wrong_dtype(path, name, dtype)
            return {name: np.asarray(file.get_tensor(name)) for name in names}
    except SafetensorError as error:
        raise _unreadable(path, " ".join(str(error).split())) from error


def _check_names(path: Path, names: list[str]) -> None:
    for name in names:
        if name not in _SAFETENSORS_DTYPES:
            near = difflib.get_close_matches(name, _SAFETENSORS_DTYPES, n=1)
            raise PromptEmbedsError(
                found=f"{path} holds a tensor {' '.join(name.split())}",
                expected=f"{KEY} alone, or {', '.join(_SAFETENSORS_DTYPES)}",
                action=f"did you mean {near[0]}?" if near else "write the file without it",
            )
    if KEY not in names:
        raise _unreadable(path, f"it has no tensor {KEY}, but {', '.join(names) or 'none at all'}")


def _unreadable(path: Path, reason: str) -> PromptEmbedsError:
    return PromptEmbedsError(
        found=f"{path} cannot be read: {reason}",
        expected=f"an array of .npy, not pickled, or a .safetensors file with the key {KEY}",
        action="write it again with np.save or safetensors",
    )


def _wrong_dtype(path: Path, name: str, dtype: str) -> PromptEmbedsError:
    return PromptEmbedsError(
        found=f"{path} holds {dtype}" if name == KEY else f"{path} holds {name} of {dtype}",
        expected=_DTYPE_RULES[name],
        action="convert the array and write it again",
    )
