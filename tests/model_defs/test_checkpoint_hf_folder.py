"""Hugging Face folders: what save_pretrained writes is read back; damage is named, never shown as a traceback."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from artifacts.errors import AotError, CheckpointNotFoundError, CorruptCheckpointError, UnsupportedModelError
from model_defs.checkpoint import HfTokenizerFiles, open_checkpoint


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def write_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, folder / "model.safetensors")
    return folder


def open_at(folder: Path):
    """Open by a relative name, so that messages do not depend on the machine."""
    return open_checkpoint(folder.name, search=[folder.parent])


def fault_of(folder: Path, kind: type[AotError] = CorruptCheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_at(folder)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_what_save_pretrained_writes_is_read_back(tmp_path, dtype, max_shard_size):
    model = tiny_llama().to(dtype)
    model.save_pretrained(tmp_path / "tiny", max_shard_size=max_shard_size)
    assert (tmp_path / "tiny" / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")

    checkpoint = open_at(tmp_path / "tiny")

    expected = model.state_dict()
    assert checkpoint.description == "tiny"
    assert checkpoint.config == json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert set(checkpoint.tensors) == set(expected)
    for name, values in expected.items():
        info = checkpoint.tensors[name]
        assert (info.name, info.shape, info.dtype) == (name, tuple(values.shape), dtype)
        read = checkpoint.read(name)
        assert read.dtype == dtype
        assert torch.equal(read, values)


def test_generation_config_and_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "tiny", {"a": torch.ones(2)})
    assert open_at(folder).generation_config == {}
    assert open_at(folder).tokenizer is None

    GenerationConfig(eos_token_id=[7, 9], bos_token_id=1).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")

    assert open_at(folder).generation_config["eos_token_id"] == [7, 9]
    assert open_at(folder).generation_config["bos_token_id"] == 1
    assert open_at(folder).tokenizer == HfTokenizerFiles(folder=folder)


def test_each_stored_type_keeps_its_dtype(tmp_path):
    tensors = {
        str(dtype): torch.tensor([[0, 1], [1, 0]]).to(dtype)
        for dtype in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
        )
    }
    checkpoint = open_at(write_folder(tmp_path / "tiny", tensors))
    for name, values in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == checkpoint.tensors[name].dtype == values.dtype
        assert torch.equal(read.to(torch.float32), values.to(torch.float32))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tensor_is_a_private_mapping_that_goes_with_it(tmp_path):
    folder = write_folder(tmp_path / "tiny", {"a": torch.arange(4.0), "b": torch.ones(3)})
    file = str(folder / "model.safetensors")

    def is_mapped() -> bool:
        return file in Path("/proc/self/maps").read_text()

    checkpoint = open_at(folder)
    assert not is_mapped()
    values = checkpoint.read("a")
    assert is_mapped()
    values += 1
    assert torch.equal(checkpoint.read("a"), torch.arange(4.0))
    del values
    assert not is_mapped()


def test_no_config(tmp_path):
    (tmp_path / "tiny").mkdir()
    assert fault_of(tmp_path / "tiny", CheckpointNotFoundError) == (
        "tiny has no config.json; expected config.json beside model.safetensors or model.safetensors.index.json; "
        "point model.source to a folder that save_pretrained or `hf download` wrote"
    )


def test_a_folder_of_gguf_files(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "m.Q8_0.gguf").write_bytes(b"GGUF")
    assert fault_of(tmp_path / "tiny", CheckpointNotFoundError) == (
        "tiny has no config.json; expected config.json beside model.safetensors or model.safetensors.index.json; "
        f"set model.source to a file of it: {tmp_path / 'tiny' / 'm.Q8_0.gguf'}"
    )


def test_no_weights(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert fault_of(tmp_path / "tiny", CheckpointNotFoundError) == (
        "tiny has no weights; expected safetensors: model.safetensors or model.safetensors.index.json; "
        "add the weights, or point model.source to another folder"
    )


def test_pickled_weights_only(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    torch.save({"a": torch.ones(1)}, tmp_path / "tiny" / "pytorch_model.bin")
    (tmp_path / "tiny" / "consolidated.00.pth").touch()
    assert fault_of(tmp_path / "tiny", CheckpointNotFoundError) == (
        "tiny has its weights only in pickled form: consolidated.00.pth, pytorch_model.bin; "
        "expected safetensors: model.safetensors or model.safetensors.index.json; convert it with transformers: "
        "`m = AutoModelForCausalLM.from_pretrained(OLD); m.save_pretrained(NEW)`, and copy the tokenizer files"
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[1]", "is not a JSON object"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_bad_json(tmp_path, file, text, fault):
    folder = write_folder(tmp_path / "tiny", {"a": torch.ones(2)})
    (folder / file).write_text(text)
    assert fault_of(folder) == f"tiny/{file} {fault}; expected a JSON object; fetch it again"


# Damaged safetensors files


def damaged(tmp_path: Path, data: bytes) -> str:
    folder = write_folder(tmp_path / "tiny", {"a": torch.ones(2)})
    (folder / "model.safetensors").write_bytes(data)
    return fault_of(folder)


WHOLE_FILE = "expected a whole safetensors file; fetch or convert it again"


def test_file_without_a_header(tmp_path):
    assert damaged(tmp_path, b"abc") == f"tiny/model.safetensors is only 3 bytes long; {WHOLE_FILE}"


def test_file_of_another_kind(tmp_path):
    assert damaged(tmp_path, b"<html>not found</html>") == (
        f"tiny/model.safetensors does not start like a safetensors file; {WHOLE_FILE}"
    )


def test_git_lfs_pointer(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    assert damaged(tmp_path, pointer) == (
        "tiny/model.safetensors is a Git LFS pointer, not the file itself; expected a whole safetensors file; "
        "run `git lfs pull` in its folder"
    )


def test_file_cut_in_its_header(tmp_path):
    assert damaged(tmp_path, (400).to_bytes(8, "little") + b'{"a":') == (
        f"tiny/model.safetensors is 13 bytes long, but its header alone ends at 408; {WHOLE_FILE}"
    )


def test_file_cut_in_its_data(tmp_path):
    folder = write_folder(tmp_path / "tiny", {"a": torch.ones(2), "b": torch.ones(5)})
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4])
    assert fault_of(folder) == (
        f"tiny/model.safetensors is {len(data) - 4} bytes long, but its tensors end at {len(data)}; {WHOLE_FILE}"
    )


def test_header_that_contradicts_itself(tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'
    text = damaged(tmp_path, len(header).to_bytes(8, "little") + header + bytes(8))
    assert text.startswith("tiny/model.safetensors has a bad header (")
    assert text.endswith(f"); {WHOLE_FILE}")


def test_type_that_is_not_read(tmp_path):
    header = b'{"a":{"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]}}'
    folder = write_folder(tmp_path / "tiny", {"a": torch.ones(2)})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert fault_of(folder, UnsupportedModelError) == (
        "tiny/model.safetensors stores a as F8_E8M0; expected one of F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, "
        "I16, I8, U8, BOOL; use a checkpoint in another type"
    )


def test_every_cut_is_found(tmp_path):
    folder = write_folder(tmp_path / "tiny", {"a": torch.ones(2), "b": torch.ones(5).bfloat16()})
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError):
            open_at(folder)


def test_every_changed_header_byte_is_read_or_refused(tmp_path):
    folder = write_folder(tmp_path / "tiny", {"a": torch.ones(2), "b": torch.ones(5).bfloat16()})
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")

    @settings(max_examples=200, deadline=None)
    @given(st.integers(0, header_end - 1), st.integers(0, 255))
    def check(position, value):
        file.write_bytes(data[:position] + bytes([value]) + data[position + 1 :])
        try:
            checkpoint = open_at(folder)
        except (CorruptCheckpointError, UnsupportedModelError):
            return
        for name, info in checkpoint.tensors.items():
            assert tuple(checkpoint.read(name).shape) == info.shape

    check()


def test_file_that_changes_after_it_was_opened(tmp_path):
    folder = write_folder(tmp_path / "tiny", {"a": torch.ones(2)})
    checkpoint = open_at(folder)
    (folder / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(CorruptCheckpointError) as caught:
        checkpoint.read("a")
    assert caught.value.found.startswith("tiny/model.safetensors changed after it was opened (")
    assert str(caught.value).endswith(
        "expected a file that stays as it is while it is read; run again when the file is complete"
    )


# Shards


def write_shards(folder: Path, weight_map: object) -> Path:
    write_folder(folder, {"a": torch.ones(2)})
    shutil.move(folder / "model.safetensors", folder / "one.safetensors")
    save_file({"b": torch.zeros(3), "c": torch.ones(1)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_the_index_decides_which_tensors_there_are(tmp_path):
    folder = write_shards(tmp_path / "tiny", {"a": "one.safetensors", "b": "two.safetensors"})
    assert set(open_at(folder).tensors) == {"a", "b"}
    assert torch.equal(open_at(folder).read("b"), torch.zeros(3))


def test_one_file_goes_before_an_index(tmp_path):
    folder = write_shards(tmp_path / "tiny", {"a": "one.safetensors"})
    save_file({"d": torch.ones(1)}, folder / "model.safetensors")
    assert set(open_at(folder).tensors) == {"d"}


def test_absent_shards(tmp_path):
    weight_map = {"a": "one.safetensors"} | {f"t{i}": f"{i:02}.safetensors" for i in range(10)}
    assert fault_of(write_shards(tmp_path / "tiny", weight_map)) == (
        "tiny lacks 10 of the 11 files that model.safetensors.index.json names: 00.safetensors, 01.safetensors, "
        "02.safetensors, 03.safetensors, 04.safetensors, 05.safetensors, 06.safetensors, 07.safetensors and 2 more; "
        "expected every one of them beside the index; fetch or copy the absent files"
    )


def test_tensor_that_its_shard_lacks(tmp_path):
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"}
    assert fault_of(write_shards(tmp_path / "tiny", weight_map)) == (
        "tiny/one.safetensors lacks 2 tensors that model.safetensors.index.json places in it: b, c; "
        "expected an index and shards of the same checkpoint; fetch index and shards again"
    )


@pytest.mark.parametrize(
    ("weight_map", "fault"),
    [
        ({"a": "../one.safetensors"}, "places tensors in '../one.safetensors'"),
        ({"a": 3}, "places tensors in 3"),
        ({}, "has no weight_map"),
        (["a"], "has no weight_map"),
    ],
)
def test_bad_index(tmp_path, weight_map, fault):
    assert fault_of(write_shards(tmp_path / "tiny", weight_map)) == (
        f"tiny/model.safetensors.index.json {fault}; "
        "expected a weight_map from tensor names to file names of the same folder; fetch it again"
    )
