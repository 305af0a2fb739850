"""Which architectures there are, by the name that a checkpoint's ``architectures`` bears."""

from collections.abc import Callable, Mapping

import torch

from artifacts.errors import UnsupportedModelError
from model_defs.hf_config import HfConfig
from model_defs.llama import LlamaConfig, LlamaForCausalLM
from model_defs.step import Backbone

ARCHITECTURES: Mapping[str, Callable[[HfConfig, int], Backbone]] = {
    "LlamaForCausalLM": lambda config, block_size: LlamaForCausalLM(LlamaConfig.from_hf(config), block_size),
}
"""Architecture to what builds its backbone from a Hugging Face configuration and the cache's block size."""


def build_backbone(values: Mapping[str, object], origin: str, block_size: int) -> Backbone:
    """Build the backbone that a Hugging Face ``config.json`` describes, on the meta device: shapes without memory.

    Args:
        values: the parsed configuration.
        origin: where it came from, for messages.
        block_size: tokens in a cache block.

    Raises:
        UnsupportedModelError: an architecture, or an option of one, without an implementation.
    """
    config = HfConfig(values, origin)
    names = values.get("architectures")
    found = str(names[0]) if isinstance(names, list) and names else ""
    if found not in ARCHITECTURES:
        raise UnsupportedModelError(
            found=f"{origin}: architecture {found}" if found else f"{origin}: no architectures",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            action="use a model of a supported architecture",
        )
    with torch.device("meta"):
        return ARCHITECTURES[found](config, block_size)
