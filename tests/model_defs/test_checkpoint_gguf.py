"""GGUF files of a tiny Llama: written as llama.cpp's converter does, read back in Hugging Face form."""

import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig as HfLlamaConfig
from transformers import LlamaForCausalLM

from artifacts.errors import AotError, CorruptCheckpointError, UnsupportedModelError
from model_defs.checkpoint import GgufTokenizer, open_checkpoint
from model_defs.checkpoint.gguf_header import read_gguf_header

HEADS, KV_HEADS = 4, 2
HF = "use the Hugging Face checkpoint of this model"
WHOLE_FILE = "expected a whole GGUF file; fetch or convert it again"

METADATA: dict[str, object] = {
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 80,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(**overrides: object) -> dict[str, torch.Tensor]:
    """State of a tiny Llama in Hugging Face form, biases random too."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 80,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    state = LlamaForCausalLM(HfLlamaConfig(**settings | overrides)).state_dict()
    return {name: torch.randn_like(values) for name, values in state.items()}


def converted(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Names and order of rows as llama.cpp's converter gives them."""
    tensors = {}
    for name, values in state.items():
        stem, suffix = name.rsplit(".", 1)
        array = values.numpy()
        for part, heads in ((".q_proj", HEADS), (".k_proj", KV_HEADS)):
            if stem.endswith(part):
                halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        if stem.startswith("model.layers."):
            layer, _, stem = stem.removeprefix("model.layers.").partition(".")
            tensors[f"blk.{layer}.{GGUF_NAMES[stem]}.{suffix}"] = array
        else:
            tensors[f"{GGUF_NAMES[stem]}.{suffix}"] = array
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    metadata: dict[str, object] | None = None,
    *,
    kind: Kind = Kind.F32,
    arch: str = "llama",
) -> Path:
    """Write a file with matrices of type ``kind`` and vectors in F32, as converters do; None leaves a key out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (METADATA | (metadata or {})).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, values in tensors.items():
        stored = kind if values.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_at(path: Path):
    """Open by a relative name, so that messages do not depend on the machine."""
    return open_checkpoint(path.name, search=[path.parent])


def fault_of(path: Path, kind: type[AotError] = CorruptCheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_at(path)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture
def tiny(tmp_path):
    """Writes tiny.gguf with other metadata or extra tensors."""

    def write(metadata: dict[str, object] | None = None, extra: dict[str, np.ndarray] | None = None, **how) -> Path:
        return write_gguf(tmp_path / "tiny.gguf", converted(tiny_llama()) | (extra or {}), metadata, **how)

    return write


# Tensors


def rounded(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """What a Hugging Face tensor is after storage: permuting rows and quantising along them commute."""
    if values.ndim == 1 or kind is Kind.F32:
        return values
    if kind is Kind.F16:
        return values.to(torch.float16)
    if kind is Kind.BF16:
        return values.to(torch.bfloat16)
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), kind), kind))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0])
def test_tensors_are_read_back_in_hugging_face_form(tmp_path, kind):
    state = tiny_llama(attention_bias=True, mlp_bias=True)
    checkpoint = open_at(write_gguf(tmp_path / "tiny.gguf", converted(state), kind=kind))

    assert set(checkpoint.tensors) == set(state)
    for name, values in state.items():
        expected = rounded(values, kind)
        info, read = checkpoint.tensors[name], checkpoint.read(name)
        assert info.name == name
        assert info.shape == tuple(read.shape) == tuple(expected.shape)
        assert info.dtype == read.dtype == expected.dtype
        assert torch.equal(read, expected)


def test_dequantised_in_chunks_as_in_one(tmp_path, monkeypatch):
    checkpoint = open_at(write_gguf(tmp_path / "tiny.gguf", converted(tiny_llama()), kind=Kind.Q8_0))
    whole = checkpoint.read("model.layers.1.mlp.down_proj.weight")
    monkeypatch.setattr("model_defs.checkpoint.gguf_header._CHUNK_VALUES", 3 * 96)  # 64 rows: not a multiple of 3
    assert torch.equal(checkpoint.read("model.layers.1.mlp.down_proj.weight"), whole)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_plain_tensor_is_a_private_mapping_that_goes_with_it(tiny):
    path = tiny()
    checkpoint = open_at(path)

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    assert not is_mapped()
    values = checkpoint.read("model.norm.weight")
    assert is_mapped()
    before = values.clone()
    values += 1
    assert torch.equal(checkpoint.read("model.norm.weight"), before)
    del values
    assert not is_mapped()


def test_a_tensor_without_a_translation_keeps_its_name(tiny):
    checkpoint = open_at(tiny(extra={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}))
    assert torch.equal(checkpoint.read("blk.0.attn_q_norm.weight"), torch.ones(16))


# Metadata


def test_configuration(tiny):
    checkpoint = open_at(tiny())
    assert checkpoint.description == "tiny.gguf"
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 80,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    assert checkpoint.generation_config == {}
    assert checkpoint.tokenizer is None


def test_keys_that_may_be_absent(tiny):
    absent = (
        "llama.vocab_size",
        "llama.rope.dimension_count",
        "llama.rope.freq_base",
        "llama.attention.head_count_kv",
    )
    config = open_at(tiny(dict.fromkeys(absent))).config
    assert config["vocab_size"] == 80
    assert config["head_dim"] == 16
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["num_key_value_heads"] == 4


def test_heads_of_their_own_width(tmp_path):
    state = tiny_llama(head_dim=32)
    path = write_gguf(
        tmp_path / "tiny.gguf",
        converted(state),
        {
            "llama.attention.key_length": 32,
            "llama.attention.value_length": 32,
            "llama.rope.dimension_count": 32,
        },
    )
    checkpoint = open_at(path)
    assert checkpoint.config["head_dim"] == 32
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(checkpoint.read(name), state[name])


def test_tied_head_and_biases(tmp_path):
    state = tiny_llama(attention_bias=True)
    del state["lm_head.weight"]
    config = open_at(write_gguf(tmp_path / "tiny.gguf", converted(state))).config
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (True, True, False)

    state = tiny_llama(mlp_bias=True)
    config = open_at(write_gguf(tmp_path / "tiny.gguf", converted(state))).config
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (False, False, True)


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            {"rope_type": "linear", "factor": 2.5},
        ),
        ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tiny, metadata, parameters):
    assert open_at(tiny(metadata)).config["rope_parameters"] == parameters | {"rope_theta": 10000.0}


def llama3_table(theta: float, head_dim: int) -> np.ndarray:
    """Divisors of Llama 3.1 (factor 8, low 1, high 4, 8192) as the converter writes them."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)


def test_llama3_scaling_comes_back_from_its_table(tiny):
    table = llama3_table(500000.0, 16)
    assert table.min() == 1
    assert table.max() == 8
    assert len(set(table.tolist())) > 2
    checkpoint = open_at(tiny({"llama.rope.freq_base": 500000.0}, {"rope_freqs.weight": table}))
    assert checkpoint.config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_token_ids_and_tokenizer(tiny):
    path = tiny({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 0})
    assert open_at(path).generation_config == {"eos_token_id": 0}
    assert open_at(path).tokenizer == GgufTokenizer(path=path)

    ids = {"bos": 1, "eos": 2, "eot": 5, "eom": 2, "padding": 3}
    path = tiny({f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()})
    assert open_at(path).generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 3}


def test_every_type_of_metadata_agrees_with_the_library(tiny):
    """The header reader is our own; the library's reads the same file."""
    path = tiny(
        {
            "a.bool": True,
            "a.float": 0.25,
            "a.text": "caf\u00e9",
            "a.ints": [1, -2, 3],
            "a.floats": [0.5, 1.5],
            "a.bools": [True, False],
            "a.texts": ["", "x", "\u20ac"],
        }
    )
    ours, theirs = read_gguf_header(path, "tiny.gguf"), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert [(one.name, one.kind, one.offset, one.num_bytes) for one in ours.tensors.values()] == [
        (one.name, one.tensor_type, one.data_offset, one.n_bytes) for one in theirs.tensors
    ]


# What is refused


def test_unsupported_architecture(tiny):
    assert fault_of(tiny(arch="qwen2"), UnsupportedModelError) == (
        "tiny.gguf holds architecture 'qwen2'; expected one of llama; " + HF + ", or another model"
    )


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (
            {"general.type": "adapter"},
            "tiny.gguf holds general.type 'adapter'; expected a model; "
            "merge the adapter into its model, or point model.source to the model",
        ),
        (
            {"split.count": 3},
            "tiny.gguf is one of 3 parts; expected a GGUF file in one part; "
            "join the parts with `llama-gguf-split --merge`",
        ),
        (
            {"llama.expert_count": 8},
            "tiny.gguf sets llama.expert_count to 8; expected the metadata of a plain Llama, "
            "without experts, sliding windows or scales of its own; " + HF,
        ),
        (
            {"llama.attention.window_of_each_layer": [4, 8]},
            "tiny.gguf sets llama.attention.window_of_each_layer to a list of 2; expected the metadata of a plain "
            "Llama, without experts, sliding windows or scales of its own; " + HF,
        ),
        (
            {"llama.rope.dimension_count": 8},
            "tiny.gguf has heads of 16 and llama.rope.dimension_count 8; "
            "expected value heads of the same width, rotated whole; " + HF,
        ),
        (
            {"llama.rope.scaling.type": "longrope"},
            "tiny.gguf has rope scaling 'longrope'; expected one of none, linear, yarn; " + HF,
        ),
    ],
)
def test_options_without_a_translation(tiny, metadata, text):
    assert fault_of(tiny(metadata), UnsupportedModelError) == text


def test_keys_that_change_nothing(tiny):
    path = tiny({"llama.expert_count": 0, "llama.expert_used_count": 0, "llama.attention.causal": True})
    assert open_at(path).config["hidden_size"] == 64


def test_rope_table_of_another_kind(tiny):
    path = tiny(extra={"rope_freqs.weight": np.linspace(1, 4, 8, dtype=np.float32)})
    assert fault_of(path, UnsupportedModelError) == (
        "tiny.gguf scales its rope frequencies by a rope_freqs.weight of its own; "
        "expected the scaling of Llama 3.1, or none; " + HF
    )


def test_rope_table_beside_another_scaling(tiny):
    path = tiny({"llama.rope.scaling.factor": 2.0}, {"rope_freqs.weight": np.ones(8, np.float32)})
    assert fault_of(path, UnsupportedModelError) == (
        "tiny.gguf has both rope_freqs.weight and rope scaling 'linear'; expected one of them; " + HF
    )


# Damage

A_TENSOR = {"token_embd.weight": np.zeros((80, 64), np.float32)}


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        ({"llama.block_count": None}, "has no llama.block_count in its metadata"),
        (
            {"llama.attention.head_count": [4, 4]},
            "has [4, 4] under llama.attention.head_count, not an integer of at least 1",
        ),
        ({"llama.block_count": 0}, "has 0 under llama.block_count, not an integer of at least 1"),
        ({"llama.rope.freq_base": 0.0}, "has 0.0 under llama.rope.freq_base, not a positive number"),
        ({"llama.rope.scaling.type": 3}, "has 3 under llama.rope.scaling.type, not a string"),
        (
            {"tokenizer.ggml.eos_token_id": "x"},
            "has 'x' under tokenizer.ggml.eos_token_id, not an integer of at least 0",
        ),
        ({"general.alignment": 24}, "has alignment 24, not a power of two of at least 8"),
    ],
)
def test_bad_metadata(tiny, metadata, fault):
    assert fault_of(tiny(metadata)) == f"tiny.gguf {fault}; {WHOLE_FILE}"


def test_no_embedding(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", {"output_norm.weight": np.ones(64, np.float32)})
    assert fault_of(path) == f"tiny.gguf has no tensor token_embd.weight; {WHOLE_FILE}"


def test_rows_that_are_no_heads(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", A_TENSOR | {"blk.0.attn_k.weight": np.zeros((6, 64), np.float32)})
    assert fault_of(path) == (
        f"tiny.gguf has 6 rows in blk.0.attn_k.weight, not an even number for each of 2 heads; {WHOLE_FILE}"
    )


def test_two_tensors_for_one_name(tmp_path):
    one = np.ones(64, np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", A_TENSOR | {"output_norm.weight": one, "model.norm.weight": one})
    assert fault_of(path) == f"tiny.gguf has two tensors for one Hugging Face name; {WHOLE_FILE}"


def raw_header(
    *, version: int = 3, values: list[bytes] = (), tensors: list[bytes] = (), num_values: int | None = None
) -> bytes:
    count = len(values) if num_values is None else num_values
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), count) + b"".join(values) + b"".join(tensors)


def raw_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def raw_tensor(name: bytes = b"t", dims=(32,), kind: int = 0, offset: int = 0) -> bytes:
    return raw_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_value(key: bytes, kind: int, value: bytes) -> bytes:
    return raw_string(key) + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "does not start like a GGUF file"),
        (b"<html>", "does not start like a GGUF file"),
        (b"GGUF\x03\0\0", "is 7 bytes long and ends inside its header"),
        (raw_header(num_values=2**63), "is 24 bytes long and ends inside its header"),
        (
            raw_header(values=[raw_value(b"k", 9, struct.pack("<IQ", 8, 2**62))]),
            "is 49 bytes long and ends inside its header",
        ),
        (raw_header(values=[raw_value(b"\xff", 0, b"1")]), "has a name in its header that is not UTF-8"),
        (raw_header(values=[raw_value(b"k", 13, b"1")]), "has a value of unknown type 13 in its metadata"),
        (
            raw_header(values=[raw_value(b"k", 9, struct.pack("<IQ", 9, 1))]),
            "has an array of arrays in its metadata",
        ),
        (raw_header(values=[raw_value(b"k", 0, b"1")] * 2), "has k twice in its metadata"),
        (raw_header(tensors=[raw_tensor(), raw_tensor(offset=128)]) + bytes(256), "has tensor t twice"),
        (raw_header(tensors=[raw_tensor(dims=())]), "has tensor t with 0 dimensions"),
        (raw_header(tensors=[raw_tensor(dims=(1,) * 5)]), "has tensor t with 5 dimensions"),
        (raw_header(tensors=[raw_tensor(dims=(4, 0))]), "has tensor t of shape [0, 4]"),
        (raw_header(tensors=[raw_tensor(dims=(33,), kind=8)]), "has t in rows of 33, not whole blocks of 32 (Q8_0)"),
        (
            raw_header(tensors=[raw_tensor(offset=32)]),
            "places t at 32 of its data, not at 0 after the tensor before",
        ),
        (raw_header(tensors=[raw_tensor(dims=(32, 2**60))]), f"is 65 bytes long, but its tensors end at {96 + 2**67}"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_damaged_header(tmp_path, data, fault):
    (tmp_path / "tiny.gguf").write_bytes(data)
    assert fault_of(tmp_path / "tiny.gguf") == f"tiny.gguf {fault}; {WHOLE_FILE}"


def test_git_lfs_pointer(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert fault_of(tmp_path / "tiny.gguf") == (
        "tiny.gguf is a Git LFS pointer, not the file itself; expected a whole GGUF file; "
        "run `git lfs pull` in its folder"
    )


@pytest.mark.parametrize(
    ("version", "name"), [(1, "GGUF of version 1"), (4, "GGUF of version 4"), (3 << 24, "big-endian GGUF")]
)
def test_other_versions(tmp_path, version, name):
    (tmp_path / "tiny.gguf").write_bytes(raw_header(version=version))
    assert fault_of(tmp_path / "tiny.gguf", UnsupportedModelError) == (
        f"tiny.gguf is {name}; expected little-endian GGUF of version 2 or 3; "
        "convert the model again with a current llama.cpp"
    )


@pytest.mark.parametrize(("kind", "name"), [(26, "I32"), (9999, "type 9999")])
def test_tensor_types_that_are_not_read(tmp_path, kind, name):
    (tmp_path / "tiny.gguf").write_bytes(raw_header(tensors=[raw_tensor(kind=kind)]))
    text = fault_of(tmp_path / "tiny.gguf", UnsupportedModelError)
    assert text.startswith(f"tiny.gguf stores t as {name}; expected one of F32, F16, Q4_0, Q4_1, ")
    assert text.endswith("; quantise the model to one of them")


def test_file_cut_in_its_data(tiny):
    path = tiny()
    header = read_gguf_header(path, "tiny.gguf")
    end = max(tensor.offset + tensor.num_bytes for tensor in header.tensors.values())
    data = path.read_bytes()
    path.write_bytes(data[: end - 1])
    assert fault_of(path) == f"tiny.gguf is {end - 1} bytes long, but its tensors end at {end}; {WHOLE_FILE}"
    path.write_bytes(data[:end])  # the padding after the last tensor may be absent
    assert open_at(path).config["hidden_size"] == 64


def test_every_cut_of_the_header_is_found(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", A_TENSOR, {"a.texts": ["x", "yz"], "a.ints": [1, 2]})
    data = path.read_bytes()
    header_end = read_gguf_header(path, "tiny.gguf").tensors["token_embd.weight"].offset
    for length in range(header_end):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError):
            open_at(path)


def test_every_changed_header_byte_is_read_or_refused(tmp_path):
    tensors = A_TENSOR | {"rope_freqs.weight": llama3_table(10000.0, 16)}
    path = write_gguf(tmp_path / "tiny.gguf", tensors, {"a.texts": ["x"], "tokenizer.ggml.eos_token_id": 1})
    data = path.read_bytes()
    header_end = read_gguf_header(path, "tiny.gguf").tensors["token_embd.weight"].offset

    @settings(max_examples=400, deadline=None)
    @given(st.integers(0, header_end - 1), st.integers(0, 255))
    def check(position, value):
        path.write_bytes(data[:position] + bytes([value]) + data[position + 1 :])
        try:
            checkpoint = open_at(path)
        except (CorruptCheckpointError, UnsupportedModelError):
            return
        for name, info in checkpoint.tensors.items():
            assert tuple(checkpoint.read(name).shape) == info.shape

    check()


def test_file_that_changes_after_it_was_opened(tiny):
    path = tiny()
    checkpoint = open_at(path)
    path.write_bytes(b"abc")
    with pytest.raises(CorruptCheckpointError) as caught:
        checkpoint.read("model.norm.weight")
    assert caught.value.found.startswith("tiny.gguf changed after it was opened (")
    assert str(caught.value).endswith(
        "expected a file that stays as it is while it is read; run again when the file is complete"
    )
