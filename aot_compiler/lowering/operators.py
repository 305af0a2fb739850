"""The table of ATen operators: one small handler each, onto ``jax.lax``.

A handler takes ``out``, the shape and dtype that tracing found for the result, then the operator's own arguments,
tensors as jax values. The interpreter checks every result against ``out``, so that a handler cannot be quietly wrong in
either. Semantics are those of ``torch.ops.aten``; indices are in bounds and not negative by the graph contract.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

aten = torch.ops.aten

Scalar = bool | int | float
Value = jax.Array
Operand = jax.Array | Scalar


@dataclass(frozen=True, slots=True)
class Out:
    """Shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: np.dtype


HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Handler of each operator overload."""

_Handler = Callable[..., Any]


def lowers(*operators: Any) -> Callable[[_Handler], _Handler]:
    """Register a handler for one or more operator overloads."""

    def register(handler: _Handler) -> _Handler:
        for operator in operators:
            assert operator not in HANDLERS, operator
            HANDLERS[operator] = handler
        return handler

    return register


# Operands


def _broadcast(x: Value, shape: Sequence[int]) -> Value:
    """Broadcast as torch does: trailing dimensions match or are 1; those of 1 are dropped first, which HLO wants."""
    if x.shape == tuple(shape):
        return x
    lead = len(shape) - x.ndim
    kept = [dim for dim, extent in enumerate(x.shape) if extent != 1]
    return lax.broadcast_in_dim(lax.reshape(x, [x.shape[dim] for dim in kept]), tuple(shape), [lead + d for d in kept])


def _operand(x: Operand, shape: Sequence[int], dtype: Any) -> Value:
    if isinstance(x, bool | int | float):
        return lax.full(tuple(shape), x, dtype)
    return _broadcast(lax.convert_element_type(x, dtype), shape)


def _common_dtype(x: Operand, y: Operand) -> np.dtype:
    """Torch's promotion: tensors with dimensions outrank zero-dimensional ones, which outrank scalars."""
    probes: list[Any] = []
    for operand in (x, y):
        if isinstance(operand, bool | int | float):
            probes.append(operand)
        else:
            probes.append(torch.empty((1,) * operand.ndim, dtype=TORCH_FROM_NUMPY[np.dtype(operand.dtype)]))
    dtype = torch.result_type(*probes)
    # A bool against an integer scalar; tensors of 64-bit integers are refused where they are made.
    return NUMPY_FROM_TORCH[torch.int32 if dtype == torch.int64 else dtype]


NUMPY_FROM_TORCH: Mapping[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jax.numpy.bfloat16),
    torch.float64: np.dtype(np.float64),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.bool: np.dtype(np.bool_),
}
TORCH_FROM_NUMPY: Mapping[np.dtype, torch.dtype] = {v: k for k, v in NUMPY_FROM_TORCH.items()}


def _is_float(dtype: np.dtype) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.floating))  # numpy alone does not know bfloat16


# Elementwise


def _rounding(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    return lambda x: function(x) if _is_float(x.dtype) else x


def _unary(operator: Any, function: Callable[[Value], Value]) -> None:
    @lowers(operator)
    def handler(out: Out, x: Value) -> Value:
        return function(lax.convert_element_type(x, out.dtype))


for _operator, _function in {
    aten.abs.default: lax.abs,
    aten.ceil.default: _rounding(lax.ceil),
    aten.cos.default: lax.cos,
    aten.erf.default: lax.erf,
    aten.exp.default: lax.exp,
    aten.floor.default: _rounding(lax.floor),
    aten.log.default: lax.log,
    aten.neg.default: lax.neg,
    aten.rsqrt.default: lax.rsqrt,
    aten.sigmoid.default: lax.logistic,
    aten.sin.default: lax.sin,
    aten.sqrt.default: lax.sqrt,
    aten.tanh.default: lax.tanh,
}.items():
    _unary(_operator, _function)


@lowers(aten.bitwise_not.default, aten.logical_not.default)
def _not(out: Out, x: Value) -> Value:
    return lax.bitwise_not(lax.convert_element_type(x, out.dtype))


@lowers(aten.relu.default)
def _relu(out: Out, x: Value) -> Value:
    return lax.max(x, lax.full(out.shape, 0, out.dtype))


@lowers(aten.reciprocal.default)
def _reciprocal(out: Out, x: Value) -> Value:
    return lax.div(lax.full(out.shape, 1, out.dtype), lax.convert_element_type(x, out.dtype))


@lowers(aten.gelu.default)
def _gelu(out: Out, x: Value, approximate: str = "none") -> Value:
    """``torch.nn.functional.gelu``: x * Phi(x) by erf, or its tanh approximation (arXiv:1606.08415)."""
    x32 = lax.convert_element_type(x, np.float32)
    if approximate == "tanh":
        inner = (x32 + x32 * x32 * x32 * np.float32(0.044715)) * np.float32(math.sqrt(2 / math.pi))
        half = lax.tanh(inner)
    else:
        half = lax.erf(x32 * np.float32(math.sqrt(0.5)))
    return lax.convert_element_type(x32 * np.float32(0.5) * (half + np.float32(1)), out.dtype)


def _add_values(x: Value, y: Value) -> Value:
    return lax.bitwise_or(x, y) if x.dtype == np.bool_ else lax.add(x, y)


def _mul_values(x: Value, y: Value) -> Value:
    return lax.bitwise_and(x, y) if x.dtype == np.bool_ else lax.mul(x, y)


def _binary(operators: Sequence[Any], function: Callable[[Value, Value], Value]) -> None:
    @lowers(*operators)
    def handler(out: Out, x: Operand, y: Operand) -> Value:
        return function(_operand(x, out.shape, out.dtype), _operand(y, out.shape, out.dtype))


_binary((aten.mul.Tensor, aten.mul.Scalar), _mul_values)
_binary((aten.div.Tensor, aten.div.Scalar), lax.div)
_binary((aten.maximum.default,), lax.max)
_binary((aten.minimum.default,), lax.min)
_binary((aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.logical_and.default), lax.bitwise_and)
_binary((aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.logical_or.default), lax.bitwise_or)


def _scaled(x: Value, factor: Scalar) -> Value:
    return x if factor == 1 else lax.mul(x, lax.full(x.shape, factor, x.dtype))


@lowers(aten.add.Tensor, aten.add.Scalar)
def _add(out: Out, x: Operand, y: Operand, alpha: Scalar = 1) -> Value:
    return _add_values(_operand(x, out.shape, out.dtype), _scaled(_operand(y, out.shape, out.dtype), alpha))


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def _sub(out: Out, x: Operand, y: Operand, alpha: Scalar = 1) -> Value:
    return lax.sub(_operand(x, out.shape, out.dtype), _scaled(_operand(y, out.shape, out.dtype), alpha))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(out: Out, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    """Division rounded towards zero or down; XLA's integer division rounds towards zero."""
    x_, y_ = _operand(x, out.shape, out.dtype), _operand(y, out.shape, out.dtype)
    if rounding_mode == "floor":
        return _floor_divide(x_, y_)
    quotient = lax.div(x_, y_)
    if rounding_mode == "trunc" and _is_float(out.dtype):
        return lax.mul(lax.sign(quotient), lax.floor(lax.abs(quotient)))
    return quotient


def _floor_divide(x: Value, y: Value) -> Value:
    """Python's ``//``: for floats not the rounded-down quotient, which rounding may have lifted to the next integer."""
    zero, one = lax.full(x.shape, 0, x.dtype), lax.full(x.shape, 1, x.dtype)
    remainder = lax.rem(x, y)
    down = lax.bitwise_and(lax.ne(remainder, zero), lax.ne(lax.lt(remainder, zero), lax.lt(y, zero)))
    quotient = lax.div(lax.sub(x, remainder), y)  # whole, up to rounding
    quotient = lax.select(down, lax.sub(quotient, one), quotient)
    if not _is_float(x.dtype):
        return quotient
    whole = lax.round(quotient, lax.RoundingMethod.TO_NEAREST_EVEN)
    return lax.select(lax.eq(y, zero), lax.div(x, y), whole)


@lowers(aten.pow.Tensor_Scalar)
def _pow(out: Out, x: Value, exponent: Scalar) -> Value:
    x = lax.convert_element_type(x, out.dtype)
    if float(exponent).is_integer():
        return lax.integer_pow(x, int(exponent))
    return lax.pow(x, lax.full(out.shape, exponent, out.dtype))


@lowers(aten.clamp.default)
def _clamp(out: Out, x: Value, low: Scalar | None = None, high: Scalar | None = None) -> Value:
    x = lax.convert_element_type(x, out.dtype)
    if low is not None:
        x = lax.max(x, lax.full(out.shape, low, out.dtype))
    if high is not None:
        x = lax.min(x, lax.full(out.shape, high, out.dtype))
    return x


def _comparison(operators: Sequence[Any], function: Callable[[Value, Value], Value]) -> None:
    @lowers(*operators)
    def handler(out: Out, x: Operand, y: Operand) -> Value:
        dtype = _common_dtype(x, y)
        return function(_operand(x, out.shape, dtype), _operand(y, out.shape, dtype))


_comparison((aten.eq.Tensor, aten.eq.Scalar), lax.eq)
_comparison((aten.ne.Tensor, aten.ne.Scalar), lax.ne)
_comparison((aten.ge.Tensor, aten.ge.Scalar), lax.ge)
_comparison((aten.gt.Tensor, aten.gt.Scalar), lax.gt)
_comparison((aten.le.Tensor, aten.le.Scalar), lax.le)
_comparison((aten.lt.Tensor, aten.lt.Scalar), lax.lt)


@lowers(aten.where.self)
def _where(out: Out, condition: Value, x: Operand, y: Operand) -> Value:
    return lax.select(
        _broadcast(condition, out.shape), _operand(x, out.shape, out.dtype), _operand(y, out.shape, out.dtype)
    )


@lowers(aten._to_copy.default)
def _to_copy(out: Out, x: Value, **_: object) -> Value:
    return lax.convert_element_type(x, out.dtype)


@lowers(aten.clone.default, aten.lift_fresh_copy.default, aten.alias.default, aten.detach.default)
def _same(out: Out, x: Value, **_: object) -> Value:
    return x


# New tensors


@lowers(aten.arange.start_step)
def _arange(out: Out, start: Scalar, end: Scalar, step: Scalar = 1, **_: object) -> Value:
    steps = lax.iota(out.dtype, out.shape[0])
    if step != 1:
        steps = lax.mul(steps, lax.full(out.shape, step, out.dtype))
    return steps if start == 0 else lax.add(steps, lax.full(out.shape, start, out.dtype))


@lowers(aten.full.default)
def _full(out: Out, size: Sequence[int], value: Scalar, **_: object) -> Value:
    return lax.full(out.shape, value, out.dtype)


@lowers(aten.scalar_tensor.default)
def _scalar_tensor(out: Out, value: Scalar, **_: object) -> Value:
    return lax.full((), value, out.dtype)


@lowers(aten.full_like.default)
def _full_like(out: Out, x: Value, value: Scalar, **_: object) -> Value:
    return lax.full(out.shape, value, out.dtype)


# Shapes


@lowers(aten.view.default, aten.squeeze.dims, aten.squeeze.dim, aten.unsqueeze.default)
def _reshape(out: Out, x: Value, *_: object) -> Value:
    return lax.reshape(x, out.shape)


@lowers(aten.expand.default)
def _expand(out: Out, x: Value, size: Sequence[int], **_: object) -> Value:
    return _broadcast(x, out.shape)


@lowers(aten.permute.default)
def _permute(out: Out, x: Value, dims: Sequence[int]) -> Value:
    return lax.transpose(x, [dim % x.ndim for dim in dims])


@lowers(aten.cat.default)
def _cat(out: Out, tensors: Sequence[Value], dim: int = 0) -> Value:
    return lax.concatenate([lax.convert_element_type(x, out.dtype) for x in tensors], dim % len(out.shape))


@lowers(aten.slice.Tensor)
def _slice(out: Out, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    dim %= x.ndim
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    return lax.slice_in_dim(x, start, end, step, axis=dim)


@lowers(aten.split_with_sizes.default)
def _split_with_sizes(out: Sequence[Out], x: Value, sizes: Sequence[int], dim: int = 0) -> list[Value]:
    ends = np.cumsum(sizes)
    return [
        lax.slice_in_dim(x, int(end) - size, int(end), axis=dim % x.ndim) for size, end in zip(sizes, ends, strict=True)
    ]


@lowers(aten.select.int)
def _select(out: Out, x: Value, dim: int, index: int) -> Value:
    return lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


# Reductions


def _reduce(
    out: Out, x: Value, dims: Sequence[int] | None, initial: Scalar, combine: Callable[[Value, Value], Value]
) -> Value:
    axes = range(x.ndim) if not dims else [dim % x.ndim for dim in dims]
    return lax.reshape(lax.reduce(x, np.asarray(initial, x.dtype), combine, tuple(axes)), out.shape)


def _total(out: Out, x: Value, dims: Sequence[int] | None) -> Value:
    """Sum in float32 where the result is a shorter float, as torch does: bfloat16 alone stops growing at 256 ones."""
    dtype = np.dtype(np.float32) if _is_float(out.dtype) else out.dtype
    return _reduce(out, lax.convert_element_type(x, dtype), dims, 0, lax.add)


@lowers(aten.sum.dim_IntList)
def _sum(
    out: Out, x: Value, dims: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    return lax.convert_element_type(_total(out, x, dims), out.dtype)


@lowers(aten.mean.dim)
def _mean(
    out: Out, x: Value, dims: Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    count = math.prod(x.shape) // math.prod(out.shape)
    mean = lax.div(_total(out, x, dims), lax.full(out.shape, count, np.float32))
    return lax.convert_element_type(mean, out.dtype)


def _extreme(dtype: np.dtype, sign: int) -> Scalar:
    if dtype == np.bool_:
        return sign > 0
    if np.issubdtype(dtype, np.integer):
        return int(np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min)
    return sign * math.inf


@lowers(aten.amax.default)
def _amax(out: Out, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return _reduce(out, x, dims, _extreme(out.dtype, -1), lax.max)


@lowers(aten.amin.default)
def _amin(out: Out, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return _reduce(out, x, dims, _extreme(out.dtype, 1), lax.min)


@lowers(aten.any.dim, aten.any.dims)
def _any(out: Out, x: Value, dims: int | Sequence[int], keepdim: bool = False) -> Value:
    dims = [dims] if isinstance(dims, int) else dims
    return _reduce(out, lax.ne(x, lax.full(x.shape, 0, x.dtype)), dims, False, lax.bitwise_or)


# Products


@lowers(aten.linear.default)
def _linear(out: Out, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """``x @ weight.T + bias``: one dot over the last dimension of both, so that the weight stays [out, in]."""
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return y if bias is None else lax.add(y, _broadcast(bias, out.shape))


@lowers(aten.mm.default)
def _mm(out: Out, x: Value, y: Value) -> Value:
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())))


@lowers(aten.addmm.default)
def _addmm(out: Out, bias: Value, x: Value, y: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    product = lax.dot_general(x, y, (((1,), (0,)), ((), ())))
    return lax.add(_scaled(product, alpha), _scaled(_broadcast(bias, out.shape), beta))


@lowers(aten.bmm.default)
def _bmm(out: Out, x: Value, y: Value) -> Value:
    return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))


# Indexing: all indices are in bounds by the graph contract, so no clamping enters the graph


def _index_columns(x: Value, indices: Sequence[Value | None]) -> tuple[tuple[int, ...], Value, tuple[int, ...]]:
    """Indexed dimensions, the stacked index columns [..., n], and the common shape of the indices."""
    dims = tuple(dim for dim, index in enumerate(indices) if index is not None)
    tensors = [index for index in indices if index is not None]
    shape = np.broadcast_shapes(*(index.shape for index in tensors))
    columns = [lax.reshape(_broadcast(index, shape), (*shape, 1)) for index in tensors]
    return dims, lax.concatenate(columns, len(shape)) if len(columns) > 1 else columns[0], shape


def _window_dims(x: Value, dims: tuple[int, ...], index_ndim: int) -> tuple[int, ...]:
    """Where the dimensions that are not indexed stand in the result.

    Torch puts the index dimensions first when the indexed dimensions are apart, and in their place when adjacent.
    """
    adjacent = dims == tuple(range(dims[0], dims[0] + len(dims)))
    first = dims[0] if adjacent else 0
    return tuple(range(first)) + tuple(range(first + index_ndim, x.ndim - len(dims) + index_ndim))


def _gather(x: Value, indices: Sequence[Value | None]) -> Value:
    dims, columns, shape = _index_columns(x, indices)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=_window_dims(x, dims, len(shape)), collapsed_slice_dims=dims, start_index_map=dims
    )
    sizes = [1 if dim in dims else extent for dim, extent in enumerate(x.shape)]
    return lax.gather(x, columns, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@lowers(aten.embedding.default)
def _embedding(out: Out, weight: Value, ids: Value, *_: object) -> Value:
    return _gather(weight, [ids])


@lowers(aten.index.Tensor)
def _index(out: Out, x: Value, indices: Sequence[Value | None]) -> Value:
    return _gather(x, indices)


@lowers(aten.index_put.default)
def _index_put(out: Out, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    """Scatter; indices may repeat, as those of padding rows do, so uniqueness is never promised."""
    dims, columns, shape = _index_columns(x, indices)
    window = _window_dims(x, dims, len(shape))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=window, inserted_window_dims=dims, scatter_dims_to_operand_dims=dims
    )
    rest = [extent for dim, extent in enumerate(x.shape) if dim not in dims]
    full = list(shape)
    for position, extent in zip(window, rest, strict=True):
        full.insert(position, extent)
    scatter = lax.scatter_add if accumulate else lax.scatter
    updates = _broadcast(lax.convert_element_type(values, out.dtype), full)
    return scatter(x, columns, updates, numbers, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
