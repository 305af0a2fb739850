"""What a backbone takes and gives in one step, whatever the model; the base of all backbones.

Shape letters, used in every file of this package:

    T  rows of the step: tokens of one prefill, or one token of each request of a decode
    B  requests of the step: 1 in prefill, T in decode
    R  rows of one request: T / B
    C  cache tokens that the step may read (the context bucket)
    P  blocks in the cache pool, S tokens in a block
    H  hidden width, I MLP width, V vocabulary
    N  query heads, K key/value heads, G = N / K, D width of a head
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """Inputs of one step, in the graph contract's order.

    ``inputs_embeds`` and ``is_token_ids`` are None only in the benchmark's variant without prompt embeddings.
    """

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    inputs_embeds: Tensor | None = None  # [T, H] model dtype
    is_token_ids: Tensor | None = None  # [T] bool
    slot_mapping: Tensor  # [T] int32
    block_table: Tensor  # [B, C / S] int32
    output_positions: Tensor | None = None  # [1] int32, prefill only


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneFacts:
    """What planning and running need to know of a backbone besides its modules."""

    vocab_size: int
    hidden_size: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    embedding: str
    """Name of the parameter whose rows are the embeddings."""
    redundant: tuple[str, ...]
    """Tensors that a checkpoint may hold and that the model does not use, such as the head of a tied model."""


class Backbone(nn.Module, ABC):
    """A language model as the compiler sees it: a prologue, layers, an epilogue.

    The compiler traces each kind of layer once. A layer is a module with an attribute ``kind`` (layers of one kind have
    the same parameters and the same computation) and a forward from ``(hidden [T, H], k_cache, v_cache [P, K, S, D],
    context)`` to ``(hidden, k_cache, v_cache)``, the caches as the layer leaves them.
    """

    facts: BackboneFacts

    @property
    @abstractmethod
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""

    @abstractmethod
    def prologue(self, inputs: StepInputs) -> tuple[Tensor, Any]:
        """Embed ids and merge the caller's rows, [T, H]; and a dataclass of the tensors that all layers share."""

    @abstractmethod
    def epilogue(self, hidden_TH: Tensor, output_positions: Tensor | None) -> Tensor:
        """Logits in float32 of the wanted rows: [1, V] in prefill, [B, V] in decode."""

    def forward(
        self, inputs: StepInputs, caches: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """One step in eager mode: logits, and the caches as this step leaves them."""
        hidden_TH, context = self.prologue(inputs)
        written = []
        for layer, (k_cache_PKSD, v_cache_PKSD) in zip(self.layers, caches, strict=True):
            hidden_TH, k_cache_PKSD, v_cache_PKSD = layer(hidden_TH, k_cache_PKSD, v_cache_PKSD, context)
            written.append((k_cache_PKSD, v_cache_PKSD))
        return self.epilogue(hidden_TH, inputs.output_positions), written


def merge_prompt_embeds(hidden: Tensor, inputs_embeds: Tensor | None, is_token_ids: Tensor | None) -> Tensor:
    """Take the token's embedding where ``is_token_ids`` is True, and the caller's row elsewhere.

    Supplied rows are the model's own embedding output: any embedding multiplier is already in them.

    Args:
        hidden: [T, H], rows looked up from ids.
        inputs_embeds: [T, H], cast to the dtype of ``hidden``; None returns ``hidden``.
        is_token_ids: [T] bool; None returns ``hidden``.
    """
    if inputs_embeds is None or is_token_ids is None:
        return hidden
    return torch.where(is_token_ids[:, None], hidden, inputs_embeds.to(hidden.dtype))
