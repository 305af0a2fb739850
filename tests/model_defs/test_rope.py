"""Rotary frequencies, amplitude and rotation: equal to those of Transformers, bit for bit."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model_defs.hf_config import HfConfig
from model_defs.rope import rope_from_hf, rotate

FACTORS = st.floats(1.0, 64.0, width=32) | st.sampled_from([1, 8, 32])
LENGTHS = st.sampled_from([16, 64, 512, 8192])
NUMBERS = {
    "linear": {"factor": FACTORS},
    "llama3": {
        "factor": FACTORS,
        "low_freq_factor": st.floats(0.5, 2.0, width=32) | st.just(1),
        "high_freq_factor": st.floats(2.5, 8.0, width=32) | st.just(4),
    },
    "yarn": {"factor": FACTORS},
    "default": {},
}
OPTIONAL = {
    "llama3": {"original_max_position_embeddings": LENGTHS},
    "yarn": {
        "original_max_position_embeddings": LENGTHS,
        "attention_factor": st.floats(0.5, 2.0, width=32) | st.none(),
        "mscale": st.sampled_from([1.0, 0.707, 0, 0.5]),
        "mscale_all_dim": st.sampled_from([1.0, 0.707, 0, 2]),
        "beta_fast": st.sampled_from([32, 16.0, 4, None]),
        "beta_slow": st.sampled_from([1, 2.0, 0.5, None]),
        "truncate": st.booleans(),
    },
}


@st.composite
def configurations(draw: st.DrawFn, rope_type: str) -> dict[str, Any]:
    """``config.json`` keys that decide the rotation, in any of the forms that Transformers has written."""
    theta = draw(st.sampled_from([10000, 10000.0, 500000.0, 100.0]) | st.floats(2.0, 1e7, width=32))
    scaling = draw(st.fixed_dictionaries(NUMBERS[rope_type], optional=OPTIONAL.get(rope_type, {})))
    config: dict[str, Any] = {
        "head_dim": 2 * draw(st.integers(1, 64)),
        "max_position_embeddings": draw(st.sampled_from([64, 2048, 131072])),
    }
    form = draw(st.sampled_from(["rope_parameters", "rope_scaling", "rope_scaling with type", "theta outside"]))
    if form == "rope_parameters":
        config["rope_parameters"] = {"rope_type": rope_type, "rope_theta": theta, **scaling}
    elif form == "theta outside":
        config |= {"rope_theta": theta, "rope_parameters": {"rope_type": rope_type, **scaling}}
    else:
        key = "type" if form.endswith("type") else "rope_type"
        config |= {"rope_theta": theta, "rope_scaling": {key: rope_type, **scaling}}
    if rope_type in ("llama3", "yarn"):
        config |= draw(st.fixed_dictionaries({}, optional={"original_max_position_embeddings": LENGTHS}))
    return config


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_frequencies_and_amplitude_equal_transformers(rope_type: str) -> None:
    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=(HealthCheck.too_slow,),
    )
    @given(config=configurations(rope_type))
    def examples(config: dict[str, Any]) -> None:
        theirs = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(config)))
        ours = rope_from_hf(HfConfig(config), config["head_dim"])
        assert list(ours.inv_freq) == theirs.inv_freq.tolist()
        assert ours.attention_scaling == theirs.attention_scaling

    examples()


@pytest.mark.parametrize("config", [{}, {"rope_theta": 500000.0, "rope_scaling": None}, {"rope_parameters": None}])
def test_no_scaling_is_the_default(config: dict[str, Any]) -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, **config))
    ours = rope_from_hf(HfConfig(config), 64)
    assert list(ours.inv_freq) == theirs.inv_freq.tolist()
    assert ours.attention_scaling == theirs.attention_scaling == 1.0


@pytest.mark.parametrize("original", [16, 64])
def test_yarn_without_a_factor_takes_the_ratio_of_lengths(original: int) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": original}
    config = {"head_dim": 64, "max_position_embeddings": 64, "rope_parameters": rope}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(config)))
    ours = rope_from_hf(HfConfig(config), 64)
    assert list(ours.inv_freq) == theirs.inv_freq.tolist()
    assert ours.attention_scaling == theirs.attention_scaling


def test_the_old_form_outranks_the_new_one() -> None:
    """A file with both, as tools write that add the old keys for older readers."""
    config = {
        "head_dim": 64,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    }
    theirs = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(config)))
    assert list(rope_from_hf(HfConfig(config), 64).inv_freq) == theirs.inv_freq.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    """Queries at positions up to a million, with an amplitude."""
    config = {
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    }
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 77, 2047, 1_000_000], dtype=torch.int32)
    x_TND = torch.randn(6, 3, 16).to(dtype)
    cos, sin = rope_from_hf(HfConfig(config), 16).cos_sin(positions, dtype)
    found = rotate(x_TND, cos[:, None], sin[:, None])

    their_cos, their_sin = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(config)))(x_TND, positions[None].long())
    heads_first = x_TND.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, their_cos, their_sin)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=0, atol=0)
