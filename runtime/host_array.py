"""Arrays of other libraries as numpy arrays, without importing those libraries.

Only dense arrays in host memory are taken. Nothing is made dense, fetched from a device or computed on the way, so that
refusing an array costs nothing, whatever shape it declares.
"""

import sys
from typing import Any

import ml_dtypes
import numpy as np

_HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost of dlpack.h: memory that the host reads


class NotHostArrayError(Exception):
    """The value is no dense array in host memory; the text says what it is."""


def declared_shape(value: Any) -> tuple[int, ...] | None:
    """Shape that an array of any library states, before anything of it is read; None where it states none."""
    try:
        shape = value.shape
    except Exception:  # a property of foreign code
        return None
    return tuple(shape) if isinstance(shape, tuple) else None


def borrow_array(value: Any) -> np.ndarray:
    """View an array of numpy, torch, jax or any library with ``__array__`` or DLPack as a numpy array.

    Memory is shared where the library allows it: copy what must outlive the call. A torch tensor that requires grad is
    taken without its gradient, as nothing is differentiated here; bfloat16 becomes ``ml_dtypes.bfloat16``.

    Raises:
        NotHostArrayError: a list or another object that is no array; a sparse, nested, quantized or masked array; an
            array on another device.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise NotHostArrayError("a masked array")
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value, torch)
    if not hasattr(value, "__array__") and not hasattr(value, "__dlpack__"):
        raise NotHostArrayError(f"of type {type(value).__name__}")
    device = _dlpack_device(value)
    if device is not None and device not in _HOST_DEVICES:
        raise NotHostArrayError(f"a {type(value).__name__} in the memory of a device (DLPack type {device})")
    try:
        # jax exports no bfloat16 to numpy by DLPack, but knows it in __array__.
        return np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
    except Exception as error:  # foreign code: a deleted array, a tracer, a dtype that numpy lacks
        raise _unreadable(value, error) from error


def _from_torch(tensor: Any, torch: Any) -> np.ndarray:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise NotHostArrayError(f"a torch tensor of layout {'nested' if tensor.is_nested else tensor.layout}")
    if tensor.is_quantized:
        raise NotHostArrayError("a quantized torch tensor")
    if tensor.device.type != "cpu":
        raise NotHostArrayError(f"a torch tensor on device {tensor.device}")
    tensor = tensor.detach()
    try:
        if tensor.dtype is torch.bfloat16:  # unknown to numpy, and to its DLPack: its bits are passed
            return np.asarray(tensor.view(torch.uint16).numpy()).view(ml_dtypes.bfloat16)
        return np.asarray(tensor.resolve_neg().numpy())
    except Exception as error:  # fake tensors, float8, conjugates
        raise _unreadable(tensor, error) from error


def _dlpack_device(value: Any) -> int | None:
    try:
        return int(value.__dlpack_device__()[0])
    except Exception:  # not offered, or not for this array: such as one that is spread over several devices
        return None


def _unreadable(value: object, error: Exception) -> NotHostArrayError:
    return NotHostArrayError(f"a {type(value).__name__} that numpy cannot read ({' '.join(str(error).split())})")
