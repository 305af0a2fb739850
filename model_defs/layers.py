"""Layers that several backbones share. Shape letters: see model_defs/step.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_defs.step import StepInputs

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""Activations by their name in ``transformers.activations.ACT2FN``."""


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467) with the variance in float32, as ``LlamaRMSNorm``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x_TH: Tensor) -> Tensor:
        """Normalise each row; input and output [T, H] in the model dtype."""
        x = x_TH.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(x_TH.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedContext:
    """What every full-attention layer of one step needs, computed once."""

    cos_T1E: Tensor  # E = D / 2
    sin_T1E: Tensor
    block_T: Tensor  # int32: cache block that each row is written to
    offset_T: Tensor  # int32: place in that block
    block_table_M: Tensor  # int32, M = B * C / S: cache blocks that are read, request after request
    visible_BRC: Tensor  # bool: key j is visible to a row iff j <= the row's position
    written_BC1: Tensor  # bool: keys that some row of the request sees; others may hold anything, NaN included


def paged_context(inputs: StepInputs, block_size: int, cos_TE: Tensor, sin_TE: Tensor) -> PagedContext:
    """Derive from one step's inputs where keys are written, which are read, and who sees which."""
    requests, blocks = inputs.block_table.shape
    block_T = torch.div(inputs.slot_mapping, block_size, rounding_mode="trunc")
    position_BR = inputs.positions.view(requests, -1)
    key_C = torch.arange(blocks * block_size, dtype=torch.int32)
    return PagedContext(
        cos_T1E=cos_TE[:, None],
        sin_T1E=sin_TE[:, None],
        block_T=block_T,
        offset_T=inputs.slot_mapping - block_T * block_size,
        block_table_M=inputs.block_table.reshape(-1),
        visible_BRC=key_C <= position_BR[:, :, None],
        written_BC1=(key_C <= position_BR.amax(1, keepdim=True))[:, :, None],
    )


def write_cache(cache_PKSD: Tensor, new_TKD: Tensor, context: PagedContext) -> Tensor:
    """Write one row per token. Slots of padding rows repeat (the null block), so indices are not unique."""
    index = [context.block_T, None, context.offset_T]
    return torch.ops.aten.index_put(cache_PKSD, index, new_TKD.to(cache_PKSD.dtype))  # type: ignore[no-any-return]


def read_cache(cache_PKSD: Tensor, context: PagedContext, requests: int) -> Tensor:
    """Gather each request's blocks: [B * K, C, D]."""
    _, heads, block_size, head_dim = cache_PKSD.shape
    gathered = torch.ops.aten.index(cache_PKSD, [context.block_table_M]).view(requests, -1, heads, block_size, head_dim)
    return gathered.transpose(1, 2).reshape(requests * heads, -1, head_dim)  # type: ignore[no-any-return]


def paged_attention(q_TND: Tensor, k_cache_PKSD: Tensor, v_cache_PKSD: Tensor, context: PagedContext) -> Tensor:
    """Grouped-query attention of every row over its request's cache blocks, after all rows were written: [T, N * D].

    Scores are masked by selection and values that no row sees are selected to zero, since a freed block may hold NaN
    and 0 x NaN is NaN. The division by the softmax's sum comes after the product with V, on the smaller tensor.
    """
    rows, heads, head_dim = q_TND.shape
    requests, per_request, keys = context.visible_BRC.shape
    kv_heads = k_cache_PKSD.shape[1]
    group = heads // kv_heads

    k_XCD = read_cache(k_cache_PKSD, context, requests).to(q_TND.dtype)  # X = B * K
    v_XCD = read_cache(v_cache_PKSD, context, requests).to(q_TND.dtype)
    v_BXCD = v_XCD.view(requests, kv_heads, keys, head_dim)
    v_XCD = torch.where(context.written_BC1[:, None], v_BXCD, 0.0).view(-1, keys, head_dim)

    q_XYD = (q_TND * head_dim**-0.5).view(requests, per_request, kv_heads, group, head_dim)
    q_XYD = q_XYD.transpose(1, 2).reshape(requests * kv_heads, per_request * group, head_dim)  # Y = R * G
    scores = torch.bmm(q_XYD, k_XCD.transpose(1, 2)).to(torch.float32)
    scores = scores.view(requests, kv_heads, per_request, group, keys)
    scores = torch.where(context.visible_BRC[:, None, :, None], scores, float("-inf")).view(
        -1, per_request * group, keys
    )
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out_XYD = torch.bmm(weights.to(q_TND.dtype), v_XCD) / weights.sum(-1, keepdim=True).to(q_TND.dtype)

    out = out_XYD.view(requests, kv_heads, per_request, group, head_dim).transpose(1, 2)
    return out.reshape(rows, heads * head_dim)
