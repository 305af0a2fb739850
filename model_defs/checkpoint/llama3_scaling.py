"""Llama 3.1's rope scaling, recovered from the table of divisors that llama.cpp's converter makes of it."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from model_defs.hf_config import HfConfig
from model_defs.rope import rope_from_hf

_PUBLISHED: Mapping[str, object] = {  # what all Llama 3 releases use
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TOLERANCE = 1e-5  # relative; float32 rounding of the blend, whose terms cancel in part
_LONGEST = 1 << 31


def llama3_parameters(table: npt.NDArray[np.float32], theta: float, head_dim: int) -> dict[str, object] | None:
    """``rope_parameters`` of a ``config.json`` whose frequencies are those of theta, divided by the table.

    The table fixes the parameters up to a common scale of original length, low and high factor, which cancels
    in the formula; Llama's own values are tried first, then a fit with low factor 1.
    A result counts only if it gives the table back.

    Args:
        table: divisor of each frequency, [head_dim / 2].
        theta: base of the frequencies.
        head_dim: width of a head.

    Returns:
        The parameters, or None where the table is no such scaling.
    """
    if table.shape != (head_dim // 2,) or not np.isfinite(table).all() or table.min() < 1:
        return None
    frequencies = _frequencies({"rope_theta": theta}, head_dim)
    if not np.isfinite(frequencies).all() or frequencies.min() <= 0:  # a base out of all proportion
        return None
    for shape in (_PUBLISHED, _fit(table.astype(np.float64), frequencies)):
        if shape is None:
            continue
        # float32 in the table, but a short decimal where it came from
        factor = float(str(table.max()))
        parameters: dict[str, object] = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **shape}
        divisors = frequencies / _frequencies(parameters, head_dim)
        if np.allclose(divisors, table, rtol=_TOLERANCE, atol=0):
            return parameters
    return None


def _fit(table: npt.NDArray[np.float64], frequencies: npt.NDArray[np.float64]) -> Mapping[str, object] | None:
    """Parameters from the table's blended part, where 1 / divisor is linear in the frequency.

    With s = (L / w - low) / (high - low) for wavelength w, and 1 / divisor = (1 - s) / factor + s, the line of
    s over 1 / w has slope L / (high - low) and intercept -low / (high - low).
    """
    factor = table.max()
    blended = (table > 1) & (table < factor)
    if np.count_nonzero(blended) < 2:
        return None
    blend = (1 / table[blended] - 1 / factor) / (1 - 1 / factor)
    slope, intercept = (float(one) for one in np.polyfit(frequencies[blended] / (2 * math.pi), blend, 1))
    if intercept >= 0 or not 0.5 <= -slope / intercept < _LONGEST:
        return None
    high = round(1 - 1 / intercept, 3)
    if high <= 1:
        return None
    return {
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": round(-slope / intercept),
    }


def _frequencies(parameters: Mapping[str, object], head_dim: int) -> npt.NDArray[np.float64]:
    return np.array(rope_from_hf(HfConfig({"rope_parameters": parameters}), head_dim).inv_freq)
