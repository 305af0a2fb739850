"""What a checkpoint offers to the compiler, whatever its format on disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, known without reading its data."""

    name: str  # in Hugging Face form, "model.layers.0.self_attn.q_proj.weight"
    shape: tuple[int, ...]
    dtype: torch.dtype  # of what Checkpoint.read gives


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTokenizerFiles:
    """Tokenizer files of a Hugging Face folder."""

    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTokenizer:
    """A tokenizer in the metadata of a GGUF file."""

    path: Path


TokenizerSource = HfTokenizerFiles | GgufTokenizer | None
"""What the compiler's tokenizer step reads; None where the checkpoint has no tokenizer."""


class Checkpoint(Protocol):
    """A readable checkpoint in Hugging Face terms: its names, its configuration keys, its order of rows."""

    @property
    def description(self) -> str:
        """The source as the user wrote it, for messages."""

    @property
    def config(self) -> Mapping[str, object]:
        """The architecture in the form of a Hugging Face ``config.json``."""

    @property
    def generation_config(self) -> Mapping[str, object]:
        """Token ids as in ``generation_config.json``: ``eos_token_id`` an int or a list; empty if there are none."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor under its Hugging Face name."""

    @property
    def tokenizer(self) -> TokenizerSource:
        """Where the tokenizer is."""

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, of the shape and dtype that ``tensors[name]`` tells.

        Where the format permits, the data is a private mapping of the file. It lasts as long as the tensor,
        so that memory is bounded by the tensors held, not by those read.

        Raises:
            KeyError: no tensor of this name.
            CorruptCheckpointError: the file changed since it was opened.
        """
