"""Recovery of Llama 3.1's rope scaling, against transformers' own frequencies."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_defs.checkpoint.llama3_scaling import llama3_parameters


def scaled_frequencies(parameters: dict[str, object], head_dim: int) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=dict(parameters)
    )
    return ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]


def plain_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def table_of(parameters: dict[str, object], head_dim: int) -> np.ndarray:
    """The divisors as llama.cpp's converter defines them, in float32."""
    factor, low, high = (parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length = parameters["original_max_position_embeddings"]
    divisors = []
    for frequency in plain_frequencies(parameters["rope_theta"], head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            divisors.append(1)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors, dtype=torch.float32).numpy()


def llama3(theta=500000.0, factor=8.0, low=1.0, high=4.0, length=8192) -> dict[str, object]:
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "parameters", [llama3(), llama3(factor=32.0), llama3(factor=2.3), llama3(high=3.5, length=4096), llama3(1e6, 4.0)]
)
def test_parameters_come_back_exactly(parameters, head_dim):
    assert llama3_parameters(table_of(parameters, head_dim), parameters["rope_theta"], head_dim) == parameters


@pytest.mark.parametrize("parameters", [llama3(), llama3(factor=32.0), llama3(low=2.0, high=7.0, length=16384)])
def test_frequencies_are_those_of_transformers(parameters):
    """Also where the parameters are known only up to their common scale."""
    found = llama3_parameters(table_of(parameters, 128), parameters["rope_theta"], 128)
    torch.testing.assert_close(scaled_frequencies(found, 128), scaled_frequencies(parameters, 128), rtol=1e-6, atol=0)


def test_a_table_with_one_other_entry_is_no_such_scaling():
    table = table_of(llama3(), 128)
    for index in (0, 34, 63):
        changed = table.copy()
        changed[index] *= 1.001
        assert llama3_parameters(changed, 500000.0, 128) is None


@pytest.mark.parametrize(
    "table",
    [
        np.linspace(1, 8, 64, dtype=np.float32),
        np.full(64, 0.5, np.float32),
        np.full(64, np.nan, np.float32),
        np.full(64, np.inf, np.float32),
        np.ones(32, np.float32),
    ],
    ids=["ramp", "below one", "nan", "inf", "another length"],
)
def test_tables_of_another_kind(table):
    assert llama3_parameters(table, 500000.0, 128) is None


@pytest.mark.parametrize("theta", [1e-38, 1e300])
def test_base_out_of_all_proportion(theta):
    assert llama3_parameters(table_of(llama3(), 128), theta, 128) is None
