"""Rotary position embedding: the frequencies of each rope type, and the rotation.

Frequencies are a short constant of the graph, [D / 2]; angles are computed in the graph from the positions.
Formulas follow ``transformers.modeling_rope_utils``, operation by operation, so that the float32 values are equal.
Shape letters: see model_defs/step.py.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from artifacts.errors import UnsupportedModelError
from model_defs.hf_config import HfConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Frequencies and amplitude of one rotary embedding."""

    inv_freq: tuple[float, ...]  # [D / 2], float32 values
    attention_scaling: float  # factor on cos and sin (YaRN), 1.0 elsewhere

    def cos_sin(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every row's angles, each [T, D / 2], computed in float32 and cast to ``dtype``."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32)
        angles = positions_T[:, None].to(torch.float32) * inv_freq
        return (
            (angles.cos() * self.attention_scaling).to(dtype),
            (angles.sin() * self.attention_scaling).to(dtype),
        )


def rotate(x_TND: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other, in the order of Hugging Face checkpoints; E = D / 2."""
    first, second = x_TND.chunk(2, dim=-1)
    return torch.cat((first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E), dim=-1)


def rope_from_hf(config: HfConfig, head_dim: int) -> Rope:
    """Read the rope parameters of a ``config.json``, in the old form (rope_theta, rope_scaling) or the new one.

    Raises:
        UnsupportedModelError: a type without an implementation, or a parameter out of its range.
    """
    parameters = config.section("rope_scaling") or config.section("rope_parameters") or HfConfig({}, config.origin)
    rope_type = parameters.optional("rope_type", str) or parameters.get("type", "default")
    if rope_type == "dynamic":
        raise UnsupportedModelError(
            found=f"{config.origin}: rope type 'dynamic'",
            expected=f"one of {', '.join(ROPE_TYPES)}",
            action="choose another type: dynamic scaling depends on the longest sequence of the batch, "
            "so that cached keys would change, which a fixed graph cannot do",
        )
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            found=f"{config.origin}: rope type {rope_type!r}",
            expected=f"one of {', '.join(ROPE_TYPES)}",
            action="choose a supported rope type",
        )
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0 or head_dim % 2:
        raise UnsupportedModelError(
            found=f"{config.origin}: partial_rotary_factor {partial:g} with head_dim {head_dim}",
            expected="factor 1 and an even head_dim",
            action="use a model that rotates whole heads",
        )
    theta = parameters.positive_number("rope_theta", config.positive_number("rope_theta", 10000.0))
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))
    if rope_type == "linear":
        inv_freq = inv_freq / _factor(parameters)
    elif rope_type == "llama3":
        inv_freq = _llama3(inv_freq, parameters, _original_length(config, parameters))
    elif rope_type == "yarn":
        original_length = _original_length(config, parameters)
        stretched = config.positive("max_position_embeddings", 2048, largest=2**30) / original_length
        inv_freq, scaling = _yarn(theta, head_dim, parameters, original_length, _factor(parameters, default=stretched))
        return Rope(inv_freq=tuple(inv_freq.tolist()), attention_scaling=scaling)
    return Rope(inv_freq=tuple(inv_freq.tolist()), attention_scaling=1.0)


def _factor(parameters: HfConfig, default: float | None = None) -> float:
    factor = parameters.require("factor", float) if default is None else parameters.get("factor", default)
    if not (factor >= 1.0 and math.isfinite(factor)):
        raise UnsupportedModelError(
            found=f"{parameters.origin}: factor is {factor:g}",
            expected="a number of at least 1",
            action="correct factor",
        )
    return factor


def _original_length(config: HfConfig, parameters: HfConfig) -> int:
    """Longest sequence of pretraining; a value beside the rope parameters outranks the one inside, as upstream."""
    key = "original_max_position_embeddings"
    fallback = config.positive("max_position_embeddings", 2048, largest=2**30)
    return config.positive(key, parameters.positive(key, fallback, largest=2**30), largest=2**30)


def _llama3(inv_freq: Tensor, parameters: HfConfig, original_length: int) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by the factor, short ones kept, a smooth passage between."""
    factor = _factor(parameters)
    low, high = parameters.require("low_freq_factor", float), parameters.require("high_freq_factor", float)
    if not high > low:
        raise UnsupportedModelError(
            found=f"{parameters.origin}: low_freq_factor {low:g}, high_freq_factor {high:g}",
            expected="high_freq_factor above low_freq_factor",
            action="correct the two factors",
        )
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original_length / low, inv_freq / factor, inv_freq)
    smooth = (original_length / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < original_length / high) & ~(wavelength > original_length / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(
    theta: float, head_dim: int, parameters: HfConfig, original_length: int, factor: float
) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): interpolated and extrapolated frequencies blended by a ramp over the dimensions."""
    beta_fast, beta_slow = parameters.get("beta_fast", 32.0) or 32.0, parameters.get("beta_slow", 1.0) or 1.0

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        """Dimension whose wavelength fits ``rotations`` times into the original length."""
        return (head_dim * math.log(original_length / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as upstream: keeps the ramp finite
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)

    frequencies = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    keep = 1 - ramp
    inv_freq = 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep

    scaling = parameters.optional("attention_factor", float)
    if scaling is None:
        weight, weight_all = parameters.get("mscale", 0.0), parameters.get("mscale_all_dim", 0.0)
        scaling = mscale(weight) / mscale(weight_all) if weight and weight_all else mscale()
    return inv_freq, scaling
