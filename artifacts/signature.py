"""The signature of an entry: what a caller passes, what the caches and parameters are, and what comes back.

Declared once, here: the compiler makes it, the manifest stores it, the runtime checks its inputs against it.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import ml_dtypes
import msgspec
import numpy as np

from artifacts.errors import CorruptArtifactError

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "bool": np.dtype(np.bool_),
}
"""Every dtype of a graph's boundary, by the name that manifests use."""

Positive = Annotated[int, msgspec.Meta(gt=0)]
"""An integer above zero; checked when a manifest is read."""


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that is not in ``DTYPES``.

    Raises:
        ValueError: names those that are.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")


def check_shape(shape: tuple[int, ...]) -> None:
    """Refuse a shape with an extent that is not positive.

    Raises:
        ValueError: shows the shape.
    """
    if any(extent <= 0 for extent in shape):
        raise ValueError(f"shape {list(shape)} has an extent that is not positive")


Kind = Literal["prefill", "decode"]
"""The two kinds of entries."""

OPTIONAL_INPUTS = ("inputs_embeds", "is_token_ids")
"""Inputs that a caller may leave out: a standing zero buffer and a standing all-True mask stand for them."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name, shape and dtype of one tensor at a graph's boundary."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_shape(self.shape)

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype as numpy knows it."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class EntrySignature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fixed-shape graph, as its caller sees it.

    The graph's parameters are ``inputs``, then the caches, then the weights, in the order that the layout lists them.
    Its outputs are ``outputs``, then the caches again, each aliased to its input.
    """

    name: str
    kind: Kind
    rows: Positive
    """Tokens of a prefill, or requests of a decode."""
    context: Positive
    """Cache tokens that the step may read."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def padding_inputs(self) -> dict[str, np.ndarray]:
        """Inputs of a step whose rows are all padding: id, position, slot and block table 0; optional ones left out.

        The arrays are new, so that real rows can be filled in.
        """
        return {
            spec.name: np.zeros(spec.shape, spec.numpy_dtype)
            for spec in self.inputs
            if spec.name not in OPTIONAL_INPUTS
        }

    def input(self, name: str) -> TensorSpec:
        """The input called ``name``."""
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise CorruptArtifactError(
            found=f"entry {self.name} has no input {name}",
            expected=f"one of {', '.join(spec.name for spec in self.inputs)}",
            action="rebuild the artifact",
        )


def entry_name(kind: Kind, rows: int, context: int) -> str:
    """Name of an entry: ``prefill_t{T}_c{C}`` or ``decode_b{B}_c{C}``."""
    return f"{kind}_{'t' if kind == 'prefill' else 'b'}{rows}_c{context}"


def entry_signature(
    kind: Kind,
    *,
    rows: int,
    context: int,
    block_size: int,
    hidden_size: int,
    vocab_size: int,
    dtype: str,
) -> EntrySignature:
    """The signature that the graph contract gives to an entry.

    Args:
        kind: prefill (one request, ``rows`` tokens) or decode (``rows`` requests, one token each).
        rows: T of a prefill, B of a decode.
        context: cache tokens that the step may read, a multiple of ``block_size``.
        block_size: tokens in a cache block.
        hidden_size: width of ``inputs_embeds``.
        vocab_size: width of ``logits``.
        dtype: model dtype, by its name in ``DTYPES``.
    """
    requests = 1 if kind == "prefill" else rows
    inputs = [
        TensorSpec(name="input_ids", shape=(rows,), dtype="int32"),
        TensorSpec(name="positions", shape=(rows,), dtype="int32"),
        TensorSpec(name="inputs_embeds", shape=(rows, hidden_size), dtype=dtype),
        TensorSpec(name="is_token_ids", shape=(rows,), dtype="bool"),
        TensorSpec(name="slot_mapping", shape=(rows,), dtype="int32"),
        TensorSpec(name="block_table", shape=(requests, context // block_size), dtype="int32"),
    ]
    if kind == "prefill":
        inputs.append(TensorSpec(name="output_positions", shape=(1,), dtype="int32"))
    return EntrySignature(
        name=entry_name(kind, rows, context),
        kind=kind,
        rows=rows,
        context=context,
        inputs=tuple(inputs),
        outputs=(TensorSpec(name="logits", shape=(requests, vocab_size), dtype="float32"),),
    )
