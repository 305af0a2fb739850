"""Weights from a checkpoint into the artifact: each tensor once, in the model dtype, one at a time in memory."""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from aot_compiler.trace import TORCH_DTYPES
from artifacts.manifest import WeightRecord
from artifacts.safetensors_file import write_tensors
from artifacts.signature import TensorSpec
from artifacts.writer import ArtifactWriter
from model_defs.checkpoint import Checkpoint, match_tensors
from model_defs.step import Backbone

MAX_FILE_BYTES = 4 * 2**30
"""A weights file is closed before it would grow above this."""


def check_weights(checkpoint: Checkpoint, backbone: Backbone, parameters: Sequence[TensorSpec]) -> None:
    """Compare a checkpoint's tensors with the model's parameters, by name and shape.

    Raises:
        CheckpointTensorError: names what is missing, unexpected or wrongly shaped.
    """
    match_tensors(
        {spec.name: spec.shape for spec in parameters},
        checkpoint.tensors,
        checkpoint.description,
        ignored=backbone.facts.redundant,
    )


def pack_weights(
    writer: ArtifactWriter, checkpoint: Checkpoint, parameters: Sequence[TensorSpec]
) -> dict[str, WeightRecord]:
    """Write every parameter and return where each one stands."""
    read = functools.partial(_read, checkpoint, {spec.name: spec for spec in parameters})
    records = {}
    for specs in _files(parameters):
        write = functools.partial(write_tensors, specs=specs, read=read)
        file = writer.add_stream("weights/{sha256}.safetensors", write)
        records.update({spec.name: WeightRecord(file=file, shape=spec.shape, dtype=spec.dtype) for spec in specs})
    return records


def _files(parameters: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Parameters by file, in order."""
    specs: list[TensorSpec] = []
    size = 0
    for spec in parameters:
        if specs and size + spec.nbytes > MAX_FILE_BYTES:
            yield specs
            specs, size = [], 0
        specs.append(spec)
        size += spec.nbytes
    yield specs


def _read(checkpoint: Checkpoint, specs: dict[str, TensorSpec], name: str) -> np.ndarray:
    """One tensor in its spec's dtype. Numpy has no bfloat16 of its own, so the bits travel as int16."""
    spec = specs[name]
    tensor = checkpoint.read(name).to(TORCH_DTYPES[spec.dtype]).contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(spec.numpy_dtype)
    return tensor.numpy()
