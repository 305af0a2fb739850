"""Llama in GGUF: its metadata, tensor names and order of rows, translated once to the Hugging Face form.

The counterpart is ``LlamaModel`` of llama.cpp's converter. Whatever it can write that changes the numbers
and is not translated here is refused, never dropped.
"""

import re
from dataclasses import dataclass

import torch

from artifacts.errors import UnsupportedModelError
from model_defs.checkpoint.gguf_header import GgufHeader, GgufTensor, read_gguf_tensor
from model_defs.checkpoint.llama3_scaling import llama3_parameters

_ROPE_FACTORS = "rope_freqs.weight"
_USE_HF = "use the Hugging Face checkpoint of this model"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_TRANSLATED_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
_NEUTRAL_VALUES = {  # keys that change nothing while they hold these values
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.finetuned": (True, False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of the file under its Hugging Face name."""

    tensor: GgufTensor
    rotary_heads: int  # heads whose rows are stored pair by pair; 0 where rows are in Hugging Face order

    def read(self, header: GgufHeader) -> torch.Tensor:
        """Read it with rows in Hugging Face order.

        GGUF keeps the rows 2i and 2i + 1 of a query or key head as the pair that the rotation mixes;
        Hugging Face keeps row i with row i + head_dim / 2.
        """
        values = read_gguf_tensor(header, self.tensor)
        if not self.rotary_heads:
            return values
        pairs = values.view(self.rotary_heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)


def llama_from_gguf(header: GgufHeader) -> tuple[dict[str, object], dict[str, StoredTensor]]:
    """Configuration in ``config.json`` form, and tensors by Hugging Face name (unknown ones keep their GGUF name).

    Raises:
        UnsupportedModelError: an option that the Hugging Face form of Llama, or this translation, does not have.
        CorruptCheckpointError: metadata is missing, mistyped or does not fit the tensors.
    """
    _refuse_other_keys(header)
    heads = header.count("llama.attention.head_count")
    kv_heads = header.count("llama.attention.head_count_kv", heads)
    tensors = {
        _hf_name(name): StoredTensor(tensor=tensor, rotary_heads=_rotary_heads(header, tensor, heads, kv_heads))
        for name, tensor in header.tensors.items()
        if name != _ROPE_FACTORS
    }
    if len(tensors) != len(header.tensors.keys() - {_ROPE_FACTORS}):
        raise header.fault("has two tensors for one Hugging Face name")
    if "model.embed_tokens.weight" not in tensors:
        raise header.fault("has no tensor token_embd.weight")
    hidden_size = header.count("llama.embedding_length")
    head_dim = _head_dim(header, hidden_size // heads)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": header.count("llama.feed_forward_length"),
        "num_hidden_layers": header.count("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": header.count("llama.vocab_size", tensors["model.embed_tokens.weight"].tensor.shape[0]),
        "max_position_embeddings": header.count("llama.context_length"),
        "rms_norm_eps": header.positive("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(header, head_dim),
        "attention_bias": any(name.endswith("_proj.bias") and ".self_attn." in name for name in tensors),
        "mlp_bias": any(name.endswith("_proj.bias") and ".mlp." in name for name in tensors),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    return config, tensors


def _refuse_other_keys(header: GgufHeader) -> None:
    for key, value in header.metadata.items():
        name = key.removeprefix("llama.")
        if name == key or name in _TRANSLATED_KEYS or value in _NEUTRAL_VALUES.get(name, ()):
            continue
        shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        raise UnsupportedModelError(
            found=f"{header.description} sets {key} to {shown}",
            expected="the metadata of a plain Llama, without experts, sliding windows or scales of its own",
            action=_USE_HF,
        )


def _hf_name(name: str) -> str:
    layer = _LAYER_TENSOR.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else name


def _rotary_heads(header: GgufHeader, tensor: GgufTensor, heads: int, kv_heads: int) -> int:
    layer = _LAYER_TENSOR.fullmatch(tensor.name)
    count = {"attn_q": heads, "attn_k": kv_heads}.get(layer[2], 0) if layer else 0
    if count and tensor.shape[0] % (2 * count):
        raise header.fault(f"has {tensor.shape[0]} rows in {tensor.name}, not an even number for each of {count} heads")
    return count


def _head_dim(header: GgufHeader, default: int) -> int:
    head_dim = header.count("llama.attention.key_length", default)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if header.count(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                found=f"{header.description} has heads of {head_dim} and {key} {header.count(key)}",
                expected="value heads of the same width, rotated whole",
                action=_USE_HF,
            )
    return head_dim


def _rope_parameters(header: GgufHeader, head_dim: int) -> dict[str, object]:
    """``rope_parameters`` of a config.json; as in llama.cpp, a factor without a type means linear scaling."""
    theta = header.positive("llama.rope.freq_base", 10000.0)
    has_factor = "llama.rope.scaling.factor" in header.metadata
    scaling = header.text("llama.rope.scaling.type", "linear" if has_factor else "none")
    if _ROPE_FACTORS in header.tensors:
        if scaling != "none":
            raise UnsupportedModelError(
                found=f"{header.description} has both {_ROPE_FACTORS} and rope scaling {scaling!r}",
                expected="one of them",
                action=_USE_HF,
            )
        table = read_gguf_tensor(header, header.tensors[_ROPE_FACTORS]).to(torch.float32).numpy()
        parameters = llama3_parameters(table, theta, head_dim)
        if parameters is None:
            raise UnsupportedModelError(
                found=f"{header.description} scales its rope frequencies by a {_ROPE_FACTORS} of its own",
                expected="the scaling of Llama 3.1, or none",
                action=_USE_HF,
            )
        return parameters
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModelError(
            found=f"{header.description} has rope scaling {scaling!r}",
            expected="one of none, linear, yarn",
            action=_USE_HF,
        )
    parameters = {
        "rope_type": scaling,
        "rope_theta": theta,
        "factor": header.positive("llama.rope.scaling.factor"),
    }
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = header.count("llama.rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if f"llama.rope.scaling.yarn_{name}" in header.metadata:
                parameters[name] = header.positive(f"llama.rope.scaling.yarn_{name}")
    return parameters
