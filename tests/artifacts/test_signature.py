import msgspec
import numpy as np
import pytest
from ml_dtypes import bfloat16

from artifacts.errors import CorruptArtifactError
from artifacts.signature import DTYPES, EntrySignature, TensorSpec, entry_name, entry_signature


def contract(kind: str, **changes: int | str) -> EntrySignature:
    facts = {"rows": 8, "context": 64, "block_size": 16, "hidden_size": 5, "vocab_size": 11, "dtype": "bfloat16"}
    return entry_signature(kind, **{**facts, **changes})  # type: ignore[arg-type]


def test_prefill_is_one_request() -> None:
    signature = contract("prefill")
    assert [str(spec) for spec in signature.inputs] == [
        "input_ids int32[8]",
        "positions int32[8]",
        "inputs_embeds bfloat16[8, 5]",
        "is_token_ids bool[8]",
        "slot_mapping int32[8]",
        "block_table int32[1, 4]",
        "output_positions int32[1]",
    ]
    assert [str(spec) for spec in signature.outputs] == ["logits float32[1, 11]"]
    assert (signature.name, signature.kind, signature.rows, signature.context) == ("prefill_t8_c64", "prefill", 8, 64)


def test_decode_is_a_row_for_each_request() -> None:
    signature = contract("decode")
    assert [str(spec) for spec in signature.inputs] == [
        "input_ids int32[8]",
        "positions int32[8]",
        "inputs_embeds bfloat16[8, 5]",
        "is_token_ids bool[8]",
        "slot_mapping int32[8]",
        "block_table int32[8, 4]",
    ]
    assert [str(spec) for spec in signature.outputs] == ["logits float32[8, 11]"]
    assert (signature.name, signature.kind, signature.rows, signature.context) == ("decode_b8_c64", "decode", 8, 64)


def test_names() -> None:
    assert entry_name("prefill", 512, 2048) == "prefill_t512_c2048"
    assert entry_name("decode", 1, 512) == "decode_b1_c512"


def test_an_input_is_found_by_its_name() -> None:
    assert contract("decode").input("block_table").shape == (8, 4)
    with pytest.raises(CorruptArtifactError) as caught:
        contract("decode").input("output_positions")
    assert str(caught.value) == (
        "entry decode_b8_c64 has no input output_positions; expected one of input_ids, positions, inputs_embeds, "
        "is_token_ids, slot_mapping, block_table; rebuild the artifact"
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (3, 5), 60),
        ("bfloat16", (3, 5), 30),
        ("int32", (), 4),
        ("bool", (7,), 7),
        ("float32", (2**40, 2**20), 2**62),
    ],
)
def test_bytes(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    spec = TensorSpec(name="x", shape=shape, dtype=dtype)
    assert spec.nbytes == nbytes
    if nbytes < 100:
        assert np.zeros(shape, spec.numpy_dtype).nbytes == nbytes


def test_dtypes_are_those_of_a_graphs_boundary() -> None:
    assert {name: dtype.type for name, dtype in DTYPES.items()} == {
        "float32": np.float32,
        "bfloat16": bfloat16,
        "int32": np.int32,
        "bool": np.bool_,
    }


@pytest.mark.parametrize(
    ("shape", "dtype", "fault"),
    [
        ((1,), "float64", "dtype 'float64' is none of float32, bfloat16, int32, bool"),
        ((1,), "F32", "dtype 'F32' is none of float32, bfloat16, int32, bool"),
        ((1, 0), "float32", r"shape \[1, 0\] has an extent that is not positive"),
        ((-1,), "float32", r"shape \[-1\] has an extent that is not positive"),
    ],
)
def test_what_is_no_tensor_of_a_graph(shape: tuple[int, ...], dtype: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        TensorSpec(name="x", shape=shape, dtype=dtype)


def test_signatures_are_values() -> None:
    assert contract("decode") == contract("decode")
    assert hash(contract("decode")) == hash(contract("decode"))
    assert contract("decode") != contract("decode", vocab_size=12)
    assert contract("decode") != contract("prefill")
    with pytest.raises(AttributeError):
        contract("decode").rows = 2  # type: ignore[misc]


def test_round_trip() -> None:
    for signature in (contract("decode"), contract("prefill")):
        assert msgspec.json.decode(msgspec.json.encode(signature), type=EntrySignature) == signature
