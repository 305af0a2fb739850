"""Prompt embeddings: which arrays are taken, and how their values come into the model dtype."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from artifacts.errors import PromptEmbedsError
from runtime.host_array import NotHostArrayError, borrow_array, declared_shape

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Dtypes of prompt embeddings; each is cast to the model's."""


def borrow_rows(value: object, hidden_size: int, check_count: Callable[[int], None]) -> np.ndarray:
    """View embeddings as rows [n, H] in their own dtype, without a copy where their library allows it.

    Args:
        value: a dense float array [n, H] or [1, n, H] in host memory, of numpy, torch, jax or any library with
            ``__array__`` or DLPack. Of a torch tensor that requires grad the values are taken and the gradient is not.
        hidden_size: H.
        check_count: raises where n rows are too few or too many. It is called before a value is read.

    Raises:
        PromptEmbedsError: another shape or dtype, not dense, or not in host memory.
    """
    shape = declared_shape(value)
    if shape is not None:
        check_count(_row_count(shape, hidden_size))
    try:
        array = borrow_array(value)
    except NotHostArrayError as error:
        raise PromptEmbedsError(
            found=f"prompt_embeds is {error}",
            expected=f"a dense float array in host memory, {_shapes(hidden_size)}",
            action="convert it first, as with .to_dense(), .dequantize(), .cpu() or np.asarray(rows, np.float32)",
        ) from error
    count = _row_count(array.shape, hidden_size)
    check_count(count)
    if array.dtype.name not in FLOAT_DTYPES:
        raise PromptEmbedsError(
            found=f"prompt_embeds of dtype {array.dtype.name}",
            expected=f"one of {', '.join(FLOAT_DTYPES)}",
            action="pass the rows that the model's embedding gives, in one of these",
        )
    return array.reshape(count, hidden_size)


def _row_count(shape: tuple[int, ...], hidden_size: int) -> int:
    rows = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(rows) != 2 or rows[1] != hidden_size:
        raise PromptEmbedsError(
            found=f"prompt_embeds of shape {list(shape)}",
            expected=_shapes(hidden_size),
            action=f"pass one row of {hidden_size} values, the hidden size, for each prompt token",
        )
    return rows[0]


def _shapes(hidden_size: int) -> str:
    return f"[n, {hidden_size}] or [1, n, {hidden_size}]"


def cast_rows(rows: np.ndarray, used: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Copy the used rows into the model dtype.

    Args:
        rows: [n, H] of one of ``FLOAT_DTYPES``.
        used: bool [n]; the other rows are not read, and are zeros in the result.
        dtype: model dtype.

    Raises:
        PromptEmbedsError: a value is NaN or infinite, or becomes infinite in the model dtype.
    """
    cast = np.zeros(rows.shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(cast, rows, casting="unsafe", where=used[:, None])
    # Only the copy is checked: the caller may be changing the original.
    finite = np.isfinite(cast)
    if not finite.all():
        row, column = np.argwhere(~finite)[0].tolist()
        value = float(rows[row, column])
        raise PromptEmbedsError(
            found=f"prompt_embeds holds {value:.8g} at row {row}, column {column}",
            expected=f"finite values of magnitude up to {_largest(dtype):.8g}, the largest of {dtype.name}",
            action="look for an overflow where the row was made",
        )
    return cast


def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
