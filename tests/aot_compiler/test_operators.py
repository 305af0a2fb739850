"""Every handler of the lowering table against eager torch.

The cases of a group are lowered into one module, compiled once, and run by the runtime's own client: what is compared
has gone the way of a real entry.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from aot_compiler import xla
from aot_compiler.lowering.operators import HANDLERS, NUMPY_FROM_TORCH, Out
from artifacts.signature import DTYPES, TensorSpec
from runtime.pjrt import Devices

aten = torch.ops.aten
F32, BF16, I32, BOOL = torch.float32, torch.bfloat16, torch.int32, torch.bool
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operator."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    label: str
    group: str
    """Cases of one group are compiled together."""

    @property
    def name(self) -> str:
        return f"{self.operator}[{self.label}]"


CASES: list[Case] = []


def case(operator: Any, *args: Any, label: str, **kwargs: Any) -> None:
    CASES.append(Case(operator=operator, args=args, kwargs=kwargs, label=label, group=group))


_generator = torch.Generator().manual_seed(0)


def rows(*shape: int, dtype: torch.dtype = F32, scale: float = 2.0) -> Tensor:
    """Normal numbers; integers are small and of both signs."""
    if dtype == BOOL:
        return torch.randint(0, 2, shape, generator=_generator).to(BOOL)
    if dtype == I32:
        return torch.randint(-9, 10, shape, generator=_generator, dtype=I32)
    return (torch.randn(shape, generator=_generator) * scale).to(dtype)


def ids(values: Any) -> Tensor:
    return torch.tensor(values, dtype=I32)


# Elementwise

group = "unary"

ODD_VALUES = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 88.0, -100.0, INF, -INF, NAN])

for _op in (
    aten.abs, aten.ceil, aten.cos, aten.erf, aten.exp, aten.floor, aten.neg, aten.reciprocal, aten.relu, aten.sigmoid,
    aten.sin, aten.tanh, aten.log, aten.rsqrt, aten.sqrt,
):  # fmt: skip
    _positive = _op in (aten.log, aten.rsqrt, aten.sqrt)
    for _dtype in (F32, BF16):
        _x = rows(3, 5, dtype=_dtype)
        case(_op.default, _x.abs() + 0.1 if _positive else _x, label=str(_dtype).removeprefix("torch."))
    if _op not in (aten.cos, aten.sin):  # XLA and torch differ on the sign of NaN alone there
        case(_op.default, ODD_VALUES, label="zeros, infinities and NaN")
for _op in (aten.abs, aten.ceil, aten.floor, aten.neg, aten.relu):
    case(_op.default, rows(3, 5, dtype=I32), label="int32")
for _op in (aten.cos, aten.erf, aten.exp, aten.sigmoid, aten.sin, aten.tanh):
    case(_op.default, rows(3, 5, dtype=I32), label="int32 to float32")
case(aten.sqrt.default, rows(3, 5, dtype=I32).abs(), label="int32 to float32")
case(aten.reciprocal.default, rows(3, 5, dtype=I32), label="int32 with zeros to float32")
case(aten.cos.default, torch.linspace(-3000.0, 3000.0, 101), label="large angles")
case(aten.sin.default, torch.linspace(-3000.0, 3000.0, 101), label="large angles")

for _approximate in ("none", "tanh"):
    for _dtype in (F32, BF16):
        case(
            aten.gelu.default,
            torch.linspace(-6, 6, 49).to(_dtype),
            approximate=_approximate,
            label=f"{_approximate}, {str(_dtype).removeprefix('torch.')}",
        )
case(aten.gelu.default, rows(7), label="default form")

case(aten.bitwise_not.default, rows(7, dtype=BOOL), label="bool")
case(aten.bitwise_not.default, rows(7, dtype=I32), label="int32")
case(aten.logical_not.default, rows(7, dtype=BOOL), label="bool")
case(aten.logical_not.default, ids([0, 1, -1, 7]), label="int32")
case(aten.logical_not.default, ODD_VALUES, label="float32")

group = "arithmetic"

for _op in (aten.add, aten.sub, aten.mul, aten.div):
    case(_op.Tensor, rows(3, 4), rows(3, 4), label="equal shapes")
    case(_op.Tensor, rows(3, 1, 4), rows(5, 1), label="both broadcast")
    case(_op.Tensor, rows(2, 3, 1, 4), rows(4), label="leading dimensions")
    case(_op.Tensor, rows(1, 1), rows(3, 4), label="left of one element")
    case(_op.Tensor, rows(3, 4), torch.tensor(0.37), label="zero-dimensional tensor")
    case(_op.Tensor, rows(3, 4), 0.37, label="scalar")
    case(_op.Tensor, rows(3, 4, dtype=BF16), rows(4, dtype=BF16), label="bfloat16")
    case(_op.Tensor, rows(3, 4, dtype=BF16), rows(3, 4), label="bfloat16 with float32")
    case(_op.Tensor, rows(3, 4, dtype=BF16), torch.tensor(0.37), label="bfloat16 with zero-dimensional float32")
    case(_op.Tensor, rows(3, 4, dtype=BF16), 0.37, label="bfloat16 with scalar")
    case(_op.Tensor, rows(3, 4, dtype=I32), rows(4, dtype=I32).abs() + 1, label="int32")
    case(_op.Tensor, rows(3, 4, dtype=I32), 3, label="int32 with integer")
    case(_op.Tensor, rows(3, 4, dtype=I32), 0.37, label="int32 with float")
    case(_op.Tensor, rows(3, 4, dtype=I32), rows(4), label="int32 with float32")
    case(_op.Tensor, rows(3, 4), ids([1, 2, 3, 4]), label="float32 with int32")
    case(_op.Scalar, rows(3, 4), 3, label="scalar overload")
case(aten.add.Tensor, rows(3, 4, dtype=BOOL), rows(4, dtype=BOOL), label="bool")
case(aten.mul.Tensor, rows(3, 4, dtype=BOOL), rows(4, dtype=BOOL), label="bool")
case(aten.mul.Tensor, rows(3, 4), rows(4, dtype=BOOL), label="float32 with bool")
case(aten.add.Tensor, rows(3, 4), rows(4), alpha=-2.5, label="alpha")
case(aten.add.Scalar, rows(3, 4), 3, 2, label="alpha")
case(aten.sub.Tensor, rows(3, 4, dtype=I32), rows(4, dtype=I32), alpha=3, label="alpha, int32")
case(aten.sub.Scalar, rows(3, 4), 1.5, 2, label="alpha")
case(aten.div.Tensor, torch.tensor([1.0, -1.0, 0.0]), torch.tensor([0.0, 0.0, 0.0]), label="by zero")

NUMERATORS, DENOMINATORS = torch.meshgrid(torch.arange(-9, 10), torch.tensor([-4, -3, -1, 1, 3, 4]), indexing="ij")
FLOATS = torch.tensor([1.0, -1.0, 5.5, -5.5, 0.3, -0.0, 7.0])
for _mode in ("floor", "trunc", None):
    case(aten.div.Tensor_mode, NUMERATORS.to(I32), DENOMINATORS.to(I32), rounding_mode=_mode, label=f"int32, {_mode}")
    case(aten.div.Scalar_mode, rows(9, dtype=I32), -4, rounding_mode=_mode, label=f"int32 by integer, {_mode}")
    case(aten.div.Tensor_mode, rows(9, dtype=I32), -4, rounding_mode=_mode, label=f"int32 by integer, {_mode}")
    case(aten.div.Tensor_mode, rows(9, scale=9), rows(9), rounding_mode=_mode, label=f"float32, {_mode}")
    case(aten.div.Scalar_mode, FLOATS, 0.1, rounding_mode=_mode, label=f"float32 by 0.1, {_mode}")
    case(aten.div.Scalar_mode, FLOATS, -0.1, rounding_mode=_mode, label=f"float32 by -0.1, {_mode}")
    case(aten.div.Tensor_mode, ODD_VALUES, ODD_VALUES.flip(0), rounding_mode=_mode, label=f"odd values, {_mode}")
    case(
        aten.div.Tensor_mode,
        rows(9, dtype=BF16, scale=9),
        rows(9, dtype=BF16),
        rounding_mode=_mode,
        label=f"bfloat16, {_mode}",
    )

for _exponent in (2, 3, -1, 0, 0.5, -0.5, 2.0, 1.7):
    case(aten.pow.Tensor_Scalar, rows(9).abs() + 0.1, _exponent, label=f"{_exponent}")
case(aten.pow.Tensor_Scalar, rows(9), 3, label="negative base")
case(aten.pow.Tensor_Scalar, rows(9, dtype=I32), 3, label="int32")
case(aten.pow.Tensor_Scalar, rows(9, dtype=I32).abs(), 0.5, label="int32 to float32")
case(aten.pow.Tensor_Scalar, rows(9, dtype=BF16), 2, label="bfloat16")

case(aten.clamp.default, ODD_VALUES, -1.0, 0.7, label="odd values")
case(aten.clamp.default, rows(9), -0.5, label="low alone")
case(aten.clamp.default, rows(9), None, 0.5, label="high alone")
case(aten.clamp.default, rows(9), 1.0, -1.0, label="low above high")
case(aten.clamp.default, rows(9, dtype=I32), -2, 3, label="int32")
case(aten.clamp.default, rows(9, dtype=I32), -2.5, 3.5, label="int32 to float32")
case(aten.clamp.default, rows(9, dtype=BF16), -0.3, 0.3, label="bfloat16")

group = "comparison and selection"

for _op in (aten.maximum, aten.minimum):
    case(_op.default, rows(3, 1), rows(4), label="broadcast")
    case(_op.default, ODD_VALUES, torch.zeros(11), label="odd values")
    case(_op.default, rows(4, dtype=I32), rows(3, 1, dtype=I32), label="int32")
    case(_op.default, rows(4, dtype=BF16), rows(4), label="bfloat16 with float32")

for _op in (aten.bitwise_and, aten.bitwise_or):
    case(_op.Tensor, rows(3, 1, dtype=BOOL), rows(4, dtype=BOOL), label="bool, broadcast")
    case(_op.Tensor, rows(5, dtype=I32), rows(5, dtype=I32), label="int32")
    case(_op.Scalar, rows(5, dtype=I32), 6, label="int32 with scalar")
    case(_op.Scalar, rows(5, dtype=BOOL), True, label="bool with scalar")
for _op in (aten.logical_and, aten.logical_or):
    case(_op.default, rows(3, 1, dtype=BOOL), rows(4, dtype=BOOL), label="bool, broadcast")
    case(_op.default, ids([0, 1, 2, -1]), ids([0, 2, 0, 4]), label="int32")
    case(_op.default, torch.tensor([0.0, 0.5, NAN]), torch.tensor([0.0, 0.0, 1.0]), label="float32")

for _op in (aten.eq, aten.ne, aten.ge, aten.gt, aten.le, aten.lt):
    case(_op.Tensor, rows(3, 1, dtype=I32), rows(4, dtype=I32), label="int32, broadcast")
    case(_op.Tensor, ODD_VALUES[:, None], ODD_VALUES, label="odd values")
    case(_op.Tensor, rows(5, dtype=I32), torch.tensor([-2.5, 0.0, 1.5, 3.0, -3.0]), label="int32 with float32")
    case(_op.Tensor, torch.tensor([0.1, 0.3]).to(BF16), torch.tensor([0.1, 0.3]), label="bfloat16 with float32")
    case(_op.Tensor, torch.tensor([0.1, 0.3]).to(BF16), torch.tensor(0.1), label="bfloat16 with zero-dimensional")
    case(_op.Scalar, ids([-3, -2, 2, 3]), 2.5, label="int32 with float")
    case(_op.Scalar, torch.tensor([0.1, 0.3]).to(BF16), 0.1, label="bfloat16 with scalar")
    case(_op.Scalar, rows(4, dtype=BOOL), 1, label="bool with integer")

case(aten.where.self, rows(3, 1, dtype=BOOL), rows(3, 4), rows(4), label="broadcast")
case(aten.where.self, rows(4, dtype=BOOL), torch.tensor(-INF), rows(3, 4), label="zero-dimensional tensor")
case(aten.where.self, rows(2, 1, 3, dtype=BOOL), rows(5, 1), torch.tensor(0.0), label="all broadcast")
case(aten.where.self, rows(4, dtype=BOOL), rows(4, dtype=BF16), rows(4), label="bfloat16 with float32")
case(
    aten.where.self,
    torch.tensor([True, False]),
    torch.tensor([1.0, NAN]),
    torch.tensor([NAN, 2.0]),
    label="NaN not taken",
)
case(aten.where.self, rows(4, dtype=BOOL), rows(4, dtype=I32), rows(4, dtype=I32), label="int32")

case(aten._to_copy.default, rows(5), dtype=BF16, label="float32 to bfloat16")
case(aten._to_copy.default, rows(5, dtype=BF16), dtype=F32, label="bfloat16 to float32")
case(aten._to_copy.default, torch.tensor([2.7, -2.7, 0.0]), dtype=I32, label="float32 to int32")
case(aten._to_copy.default, torch.tensor([0.0, -0.0, NAN, 0.2]), dtype=BOOL, label="float32 to bool")
case(aten._to_copy.default, ids([0, 2, -1]), dtype=BOOL, label="int32 to bool")
case(aten._to_copy.default, rows(5, dtype=BOOL), dtype=F32, label="bool to float32")
case(aten.clone.default, rows(2, 3), memory_format=torch.contiguous_format, label="contiguous")
for _op in (aten.lift_fresh_copy, aten.alias, aten.detach):
    case(_op.default, rows(2, 3), label="float32")

# New tensors

group = "new tensors and shapes"

case(aten.arange.start_step, 0, 7, dtype=I32, label="from 0")
case(aten.arange.start_step, -3, 11, 4, dtype=I32, label="start and step")
case(aten.arange.start_step, 5, -4, -2, dtype=I32, label="downwards")
case(aten.arange.start_step, 1.0, 2.0, 0.25, dtype=F32, label="float32")
case(aten.full.default, [2, 3], 1.5, dtype=F32, label="float32")
case(aten.full.default, [2], -INF, dtype=BF16, label="bfloat16")
case(aten.full.default, [2], 3, dtype=I32, label="int32")
case(aten.full.default, [2], True, dtype=BOOL, label="bool")
case(aten.full.default, [], 1.5, dtype=F32, label="zero-dimensional")
case(aten.scalar_tensor.default, -INF, dtype=F32, label="float32")
case(aten.scalar_tensor.default, 3, dtype=I32, label="int32")
case(aten.full_like.default, rows(2, 3), 4.5, label="float32")
case(aten.full_like.default, rows(2, 3), 4, dtype=I32, label="to int32")

# Shapes

case(aten.view.default, rows(2, 6), [3, 4], label="explicit")
case(aten.view.default, rows(2, 6), [-1, 2, 2], label="inferred")
case(aten.view.default, rows(1), [], label="to zero dimensions")
case(aten.unsqueeze.default, rows(2, 3), 1, label="inside")
case(aten.unsqueeze.default, rows(2, 3), -1, label="negative")
case(aten.squeeze.dim, rows(2, 1, 3), 1, label="of one")
case(aten.squeeze.dim, rows(2, 1, 3), -2, label="negative")
case(aten.squeeze.dim, rows(2, 1, 3), 0, label="not of one")
case(aten.squeeze.dims, rows(1, 2, 1, 3), [0, 2], label="two")
case(aten.squeeze.dims, rows(1, 2, 1, 3), [-2], label="negative")
case(aten.expand.default, rows(3, 1), [2, 3, 4], label="leading and inner")
case(aten.expand.default, rows(3, 1), [-1, 5], label="kept by -1")
case(aten.expand.default, torch.tensor(2.5), [2, 2], label="zero-dimensional")
case(aten.permute.default, rows(2, 3, 4), [2, 0, 1], label="cycle")
case(aten.permute.default, rows(2, 3, 4), [0, -1, -2], label="negative")
case(aten.cat.default, [rows(2, 3), rows(4, 3)], label="default dimension")
case(aten.cat.default, [rows(2, 3), rows(2, 1)], -1, label="negative")
case(aten.cat.default, [rows(2, 3, dtype=I32), rows(2, 3)], 1, label="int32 with float32")
case(aten.cat.default, [rows(2, 3, dtype=BF16), rows(2, 3)], 1, label="bfloat16 with float32")
case(aten.slice.Tensor, rows(7, 3), 0, 2, 5, label="range")
case(aten.slice.Tensor, rows(7, 3), 0, -3, 9223372036854775807, label="last three")
case(aten.slice.Tensor, rows(7, 3), 0, 1, -1, label="negative end")
case(aten.slice.Tensor, rows(3, 8), 1, 1, 8, 3, label="step that leaves a rest")
case(aten.slice.Tensor, rows(3, 8), -1, 0, 7, 2, label="step on a negative dimension")
case(aten.slice.Tensor, rows(3, 8), 1, -100, 100, label="ends beyond the edges")
case(aten.slice.Tensor, rows(3, 8), label="defaults")
case(aten.split_with_sizes.default, rows(7, 3), [2, 1, 4], label="default dimension")
case(aten.split_with_sizes.default, rows(3, 6), [4, 2], -1, label="negative")
case(aten.select.int, rows(3, 4), 0, 2, label="first dimension")
case(aten.select.int, rows(3, 4), -1, -2, label="negative dimension and index")

# Reductions

group = "reductions"

for _name, _op in (("sum", aten.sum.dim_IntList), ("mean", aten.mean.dim)):
    case(_op, rows(2, 3, 4), [1], label="one dimension")
    case(_op, rows(2, 3, 4), [-1, 0], label="two, negative")
    case(_op, rows(2, 3, 4), [-1], True, label="kept")
    case(_op, rows(2, 3, 4), None, label="all, by None")
    case(_op, rows(2, 3, 4), [], label="all, by an empty list")
    case(_op, rows(3, 4, dtype=BF16), [1], label="bfloat16")
    case(_op, torch.full((4096,), 1.0078125, dtype=BF16), [0], label="bfloat16, long")
    case(_op, rows(3, 4, dtype=I32), [1], dtype=F32, label="int32 to float32")
case(aten.sum.dim_IntList, rows(3, 4, dtype=I32), [1], dtype=I32, label="int32")
case(aten.sum.dim_IntList, rows(3, 4, dtype=BOOL), [1], dtype=I32, label="bool to int32")
for _op in (aten.amax, aten.amin):
    case(_op.default, rows(2, 3, 4), [1], label="one dimension")
    case(_op.default, rows(2, 3, 4), [0, -1], True, label="two, kept")
    case(_op.default, rows(2, 3, 4), label="all")
    case(_op.default, rows(3, 4, dtype=I32), [1], label="int32")
    case(_op.default, rows(3, 4, dtype=BF16), [1], label="bfloat16")
    case(_op.default, rows(3, 4, dtype=BOOL), [1], label="bool")
    case(_op.default, torch.tensor([[-INF, -INF], [NAN, 1.0], [INF, -INF]]), [1], label="infinities and NaN")
    case(
        _op.default, torch.tensor([[-(2**31), -5], [2**31 - 1, 7]], dtype=I32), [1], label="smallest and largest int32"
    )
case(aten.any.dim, rows(3, 4, dtype=BOOL), 1, label="bool")
case(aten.any.dim, ids([[0, 0], [0, 3]]), -1, True, label="int32, kept")
case(aten.any.dim, torch.tensor([[0.0, -0.0], [0.0, NAN]]), 1, label="float32")
case(aten.any.dims, ids([[[0, 0], [0, 3]], [[0, 0], [0, 0]]]), [1, -1], label="two, negative")
case(aten.any.dims, ids([[0, 0], [0, 0]]), [0, 1], label="none true")

# Products

group = "products"

for _dtype in (F32, BF16):
    _label = str(_dtype).removeprefix("torch.")
    case(aten.linear.default, rows(3, 8, dtype=_dtype), rows(5, 8, dtype=_dtype), label=_label)
    case(
        aten.linear.default,
        rows(3, 8, dtype=_dtype),
        rows(5, 8, dtype=_dtype),
        rows(5, dtype=_dtype),
        label=f"{_label}, bias",
    )
    case(aten.mm.default, rows(3, 8, dtype=_dtype), rows(8, 5, dtype=_dtype), label=_label)
    case(aten.bmm.default, rows(2, 3, 8, dtype=_dtype), rows(2, 8, 5, dtype=_dtype), label=_label)
    case(aten.addmm.default, rows(5, dtype=_dtype), rows(3, 8, dtype=_dtype), rows(8, 5, dtype=_dtype), label=_label)
case(aten.linear.default, rows(8), rows(5, 8), rows(5), label="one row")
case(aten.linear.default, rows(2, 3, 8), rows(5, 8), label="three dimensions")
case(aten.addmm.default, rows(3, 1), rows(3, 8), rows(8, 5), label="broadcast bias")
case(aten.addmm.default, rows(3, 5), rows(3, 8), rows(8, 5), beta=0.5, alpha=-2, label="beta and alpha")

# Indexing

group = "indexing"

case(aten.embedding.default, rows(7, 3), ids([6, 0, 0, 3]), label="ids")
case(aten.embedding.default, rows(7, 3, dtype=BF16), ids([[6, 0], [2, 3]]), -1, label="two dimensions, padding index")

case(aten.index.Tensor, rows(5, 3), [ids([4, 0, 4])], label="leading, repeated")
case(aten.index.Tensor, rows(5, 3), [None, ids([2, 0])], label="inner")
case(aten.index.Tensor, rows(5, 3), [ids([[4, 0], [1, 1]])], label="index of two dimensions")
case(aten.index.Tensor, rows(5, 3), [ids([4, 0]), ids([2, 1])], label="every dimension")
case(aten.index.Tensor, rows(2, 5, 3, 4), [None, ids([4, 0]), ids([2, 1])], label="adjacent")
case(aten.index.Tensor, rows(2, 5, 3, 4), [None, ids([[4], [0]]), ids([2, 1, 1])], label="adjacent, broadcast")
case(aten.index.Tensor, rows(2, 5, 3, 4), [ids([1, 0, 1]), None, ids([2, 1, 0])], label="apart")
case(aten.index.Tensor, rows(2, 5, 3, 4), [None, ids([4, 1]), None, ids([3, 0])], label="apart, not leading")
case(aten.index.Tensor, rows(2, 5, 3, 4), [ids([[1], [0]]), None, None, ids([2, 1, 0])], label="apart, broadcast")
case(aten.index.Tensor, rows(5, 3, dtype=I32), [ids(3)], label="zero-dimensional index, int32")
case(aten.index.Tensor, rows(5, 3, dtype=BOOL), [ids([3, 3])], label="bool")

case(aten.index_put.default, rows(5, 3), [ids([4, 0])], rows(2, 3), label="leading")
case(aten.index_put.default, rows(5, 3), [None, ids([2, 0])], rows(5, 2), label="inner")
case(aten.index_put.default, rows(2, 5, 3, 4), [None, ids([4, 0]), ids([2, 1])], rows(2, 2, 4), label="adjacent")
case(
    aten.index_put.default,
    rows(4, 2, 8, 3),
    [ids([1, 3, 3]), None, ids([7, 0, 1])],
    rows(3, 2, 3),
    label="apart: the cache",
)
case(
    aten.index_put.default,
    rows(2, 5, 3, 4),
    [None, ids([4, 1]), None, ids([3, 0])],
    rows(2, 2, 3),
    label="apart, not leading",
)
case(aten.index_put.default, rows(5, 3), [ids([[4], [0]]), ids([2, 1])], rows(2, 2), label="broadcast indices")
case(aten.index_put.default, rows(5, 3), [ids([4, 0])], rows(3), label="broadcast values")
case(aten.index_put.default, rows(5, 3), [ids([4, 0])], torch.tensor(1.5), label="zero-dimensional value")
case(
    aten.index_put.default,
    rows(5, 3),
    [ids([2, 2, 1])],
    rows(1, 3).expand(3, 3).clone(),
    label="repeated, equal values",
)
case(
    aten.index_put.default,
    rows(4, 2, 8, 3),
    [ids([0, 0]), None, ids([0, 0])],
    torch.zeros(2, 2, 3),
    label="padding rows",
)
case(aten.index_put.default, rows(5, 3), [ids([2, 2, 1])], rows(3, 3), True, label="accumulate, repeated")
case(
    aten.index_put.default, rows(5, 3, dtype=I32), [ids([2, 2])], rows(2, 3, dtype=I32), True, label="accumulate, int32"
)
case(
    aten.index_put.default,
    rows(4, 2, 8, 3),
    [ids([1, 1]), None, ids([7, 7])],
    rows(2, 2, 3),
    True,
    label="accumulate, apart",
)
case(aten.index_put.default, rows(5, 3, dtype=BF16), [ids([4, 0])], rows(2, 3, dtype=BF16), label="bfloat16")
case(aten.index_put.default, rows(5, 3, dtype=BOOL), [ids([4, 0])], rows(2, 3, dtype=BOOL), label="bool")


def run(cases: Sequence[Case]) -> tuple[dict[str, list[np.ndarray]], list[str]]:
    """Lower the cases into one module, compile and run it: results by case, and what could not be lowered."""
    tensors: list[Tensor] = []
    places: dict[str, list[int]] = {}
    for each in cases:
        mine = [leaf for leaf in pytree.tree_leaves((each.args, each.kwargs)) if isinstance(leaf, Tensor)]
        places[each.name] = list(range(len(tensors), len(tensors) + len(mine)))
        tensors += mine
    names = {dtype: name for name, dtype in DTYPES.items()}
    specs = [
        TensorSpec(name=f"x{i}", shape=tuple(x.shape), dtype=names[NUMPY_FROM_TORCH[x.dtype]])
        for i, x in enumerate(tensors)
    ]
    counts: dict[str, int] = {}
    faults: list[str] = []

    def function(*arguments: jax.Array) -> list[jax.Array]:
        outputs = []
        for each in cases:
            supplied = iter([arguments[place] for place in places[each.name]])
            args, kwargs = pytree.tree_map(
                lambda leaf, supplied=supplied: next(supplied) if isinstance(leaf, Tensor) else leaf,
                (list(each.args), dict(each.kwargs)),
            )
            try:
                result = HANDLERS[each.operator](_expected_out(each), *args, **kwargs)
            except Exception as error:
                faults.append(f"{each.name}: {error!r}")
                continue
            mine = result if isinstance(result, list) else [result]
            counts[each.name] = len(mine)
            outputs += mine
        return outputs

    hlo = xla.lower_to_hlo(function, specs)
    devices = Devices(1)
    executable = devices.load(xla.compile_for_cpu(hlo, 1), "operators")
    outputs = iter(executable.execute([devices.copy(_to_numpy(x)) for x in tensors]))
    return {name: [np.asarray(next(outputs)) for _ in range(count)] for name, count in counts.items()}, faults


def _to_numpy(x: Tensor) -> np.ndarray:
    if x.dtype == BF16:
        return x.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return np.ascontiguousarray(x.numpy())


def _expected(each: Case) -> list[Tensor]:
    result = each.operator(*each.args, **each.kwargs)
    return list(result) if isinstance(result, list | tuple) else [result]


def _expected_out(each: Case) -> Any:
    outs = [Out(tuple(x.shape), NUMPY_FROM_TORCH[x.dtype]) for x in _expected(each)]
    return outs if len(outs) > 1 else outs[0]


@pytest.mark.parametrize("group", list(dict.fromkeys(each.group for each in CASES)))
def test_equals_eager_torch(group: str) -> None:
    cases = [each for each in CASES if each.group == group]
    results, faults = run(cases)
    for each in cases:
        for result, reference in zip(results.get(each.name, []), _expected(each), strict=each.name in results):
            try:
                assert result.dtype == NUMPY_FROM_TORCH[reference.dtype]
                # One unit in the last place of bfloat16 (8 bits), a few of float32; integers and booleans exactly.
                tolerance = {BF16: 2**-7, F32: 2e-6}.get(reference.dtype, 0)
                np.testing.assert_allclose(
                    result.astype(np.float64), reference.to(torch.float64).numpy(), rtol=tolerance, atol=tolerance
                )
            except AssertionError as error:
                faults.append(f"{each.name}: {error}")
    assert faults == [], "\n".join(faults)


def test_case_names_are_unique() -> None:
    assert len({each.name for each in CASES}) == len(CASES)


def test_every_handler_has_a_case() -> None:
    assert set(HANDLERS) - {each.operator for each in CASES} == set()


@pytest.mark.parametrize("operator", HANDLERS, ids=str)
def test_handler_takes_every_argument_of_its_operator(operator: Any) -> None:
    """A graph names only arguments that differ from their defaults: none may be unknown to the handler."""
    arguments = operator._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    keywords = {argument.name: None for argument in arguments if argument.kwarg_only}
    handler: Callable[..., Any] = HANDLERS[operator]
    inspect.signature(handler).bind(Out((), np.dtype(np.float32)), *positional, **keywords)
