"""Llama (``LlamaForCausalLM`` of Transformers), prefill and decode alike, in checkpoint names, top to bottom.

Shape letters: see model_defs/step.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from artifacts.errors import UnsupportedModelError
from model_defs.hf_config import HfConfig
from model_defs.layers import ACTIVATIONS, PagedContext, RMSNorm, paged_attention, paged_context, write_cache
from model_defs.rope import Rope, rope_from_hf, rotate
from model_defs.step import Backbone, BackboneFacts, StepInputs, merge_prompt_embeds

MOST_LAYERS = 1024
"""Most layers of a model: far above any, and a plan with more would take minutes to make."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Architecture of one Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: Rope

    @classmethod
    def from_hf(cls, config: HfConfig) -> "LlamaConfig":
        """Translate a Hugging Face ``config.json``, with its defaults.

        Raises:
            UnsupportedModelError: an option without an implementation, or a value out of its range.
        """
        if config.values.get("quantization_config") is not None:
            raise UnsupportedModelError(
                found=f"{config.origin}: quantization_config",
                expected="weights in a floating-point type",
                action="use the unquantised checkpoint",
            )
        hidden_size = config.positive("hidden_size")
        heads = config.positive("num_attention_heads")
        kv_heads = config.positive("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UnsupportedModelError(
                found=f"{config.origin}: {heads} attention heads, {kv_heads} key/value heads",
                expected="attention heads that are a multiple of key/value heads",
                action="correct num_key_value_heads",
            )
        head_dim = config.positive("head_dim", hidden_size // heads)
        return cls(
            vocab_size=config.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.positive("intermediate_size"),
            num_hidden_layers=config.positive("num_hidden_layers", largest=MOST_LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            hidden_act=config.choice(
                "hidden_act", "silu", tuple(ACTIVATIONS), "use a model with a supported activation"
            ),
            rms_norm_eps=config.positive_number("rms_norm_eps", 1e-6, largest=1.0),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            max_position_embeddings=config.positive("max_position_embeddings", 2048, largest=2**30),
            rope=rope_from_hf(config, head_dim),
        )


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width_q = config.num_attention_heads * config.head_dim
        width_kv = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width_q, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, width_kv, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, width_kv, bias=config.attention_bias)
        self.o_proj = nn.Linear(width_q, config.hidden_size, bias=config.attention_bias)

    def forward(
        self, x_TH: Tensor, k_cache_PKSD: Tensor, v_cache_PKSD: Tensor, context: PagedContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write this step's keys and values, then attend: output [T, H] and both caches."""
        rows = x_TH.shape[0]
        q_TND = rotate(self.q_proj(x_TH).view(rows, -1, self.head_dim), context.cos_T1E, context.sin_T1E)
        k_TKD = rotate(self.k_proj(x_TH).view(rows, -1, self.head_dim), context.cos_T1E, context.sin_T1E)
        v_TKD = self.v_proj(x_TH).view(rows, -1, self.head_dim)
        k_cache_PKSD = write_cache(k_cache_PKSD, k_TKD, context)
        v_cache_PKSD = write_cache(v_cache_PKSD, v_TKD, context)
        out = self.o_proj(paged_attention(q_TND, k_cache_PKSD, v_cache_PKSD, context))
        return out, k_cache_PKSD, v_cache_PKSD


class LlamaMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACTIVATIONS[config.hidden_act]

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x_TH)) * self.up_proj(x_TH))
        return out


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    kind = "full_attention"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden_TH: Tensor, k_cache_PKSD: Tensor, v_cache_PKSD: Tensor, context: PagedContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Advance one layer: hidden [T, H] and both caches."""
        attended, k_cache_PKSD, v_cache_PKSD = self.self_attn(
            self.input_layernorm(hidden_TH), k_cache_PKSD, v_cache_PKSD, context
        )
        hidden_TH = hidden_TH + attended
        return hidden_TH + self.mlp(self.post_attention_layernorm(hidden_TH)), k_cache_PKSD, v_cache_PKSD


class LlamaModel(nn.Module):
    """The part of the checkpoint under ``model.``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LlamaForCausalLM(Backbone):
    """A Llama as the compiler sees it: prologue, layers, epilogue."""

    def __init__(self, config: LlamaConfig, block_size: int) -> None:
        super().__init__()
        self.config = config
        self.block_size = block_size
        self.facts = BackboneFacts(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            embedding="model.embed_tokens.weight",
            redundant=("lm_head.weight",) if config.tie_word_embeddings else (),
        )
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        return self.model.layers

    def prologue(self, inputs: StepInputs) -> tuple[Tensor, PagedContext]:
        """Embed ids, merge the caller's rows, and derive what all layers share."""
        hidden_TH = merge_prompt_embeds(
            self.model.embed_tokens(inputs.input_ids), inputs.inputs_embeds, inputs.is_token_ids
        )
        cos_TE, sin_TE = self.config.rope.cos_sin(inputs.positions, hidden_TH.dtype)
        return hidden_TH, paged_context(inputs, self.block_size, cos_TE, sin_TE)

    def epilogue(self, hidden_TH: Tensor, output_positions: Tensor | None) -> Tensor:
        """Logits in float32 of the wanted rows: [1, V] in prefill, [B, V] in decode."""
        if output_positions is not None:
            hidden_TH = torch.ops.aten.index(hidden_TH, [output_positions])
        return self.lm_head(self.model.norm(hidden_TH)).to(torch.float32)  # type: ignore[no-any-return]
