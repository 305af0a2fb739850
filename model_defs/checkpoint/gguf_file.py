"""A GGUF file as a checkpoint in Hugging Face form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from artifacts.errors import UnsupportedModelError
from model_defs.checkpoint.gguf_header import GgufHeader, read_gguf_header
from model_defs.checkpoint.gguf_llama import StoredTensor, llama_from_gguf
from model_defs.checkpoint.interface import GgufTokenizer, TensorInfo, TokenizerSource

_ARCHITECTURES: Mapping[str, Callable[[GgufHeader], tuple[dict[str, object], dict[str, StoredTensor]]]] = {
    "llama": llama_from_gguf,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """A checkpoint in one GGUF file."""

    description: str
    header: GgufHeader
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    stored: Mapping[str, StoredTensor]
    tokenizer: TokenizerSource

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, dequantised to float32 where it is quantised; see Checkpoint."""
        return self.stored[name].read(self.header)


def open_gguf_file(path: Path, description: str) -> GgufFile:
    """Open a file; only its header is read.

    Args:
        path: where it is.
        description: the file as the user wrote it.

    Raises:
        CorruptCheckpointError: the file is cut, not GGUF, or contradicts itself.
        UnsupportedModelError: an architecture, or an option of one, that is not translated.
    """
    header = read_gguf_header(path, description)
    if header.count("split.count", 0, minimum=0) > 1:
        raise UnsupportedModelError(
            found=f"{description} is one of {header.count('split.count')} parts",
            expected="a GGUF file in one part",
            action="join the parts with `llama-gguf-split --merge`",
        )
    translate = _ARCHITECTURES.get(header.text("general.architecture"))
    if translate is None:
        raise UnsupportedModelError(
            found=f"{description} holds architecture {header.text('general.architecture')!r}",
            expected=f"one of {', '.join(_ARCHITECTURES)}",
            action="use the Hugging Face checkpoint of this model, or another model",
        )
    if header.text("general.type", "model") != "model":
        raise UnsupportedModelError(
            found=f"{description} holds general.type {header.text('general.type')!r}",
            expected="a model",
            action="merge the adapter into its model, or point model.source to the model",
        )
    config, stored = translate(header)
    return GgufFile(
        description=description,
        header=header,
        config=config,
        generation_config=_generation_config(header),
        tensors={
            name: TensorInfo(name=name, shape=one.tensor.shape, dtype=one.tensor.dtype) for name, one in stored.items()
        },
        stored=stored,
        tokenizer=GgufTokenizer(path=path) if "tokenizer.ggml.tokens" in header.metadata else None,
    )


def _generation_config(header: GgufHeader) -> dict[str, object]:
    """Token ids in the form of ``generation_config.json``; end of turn and end of message end a generation too."""

    def token_ids(*names: str) -> list[int]:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
        ids = [header.count(key, minimum=0) for key in keys if key in header.metadata]
        return list(dict.fromkeys(ids))

    ids = {
        "bos_token_id": token_ids("bos"),
        "eos_token_id": token_ids("eos", "eot", "eom"),
        "pad_token_id": token_ids("padding"),
    }
    return {key: values[0] if len(values) == 1 else values for key, values in ids.items() if values}
