"""Small HLO modules through jax, in normal form, for the tests of what comes after lowering."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from aot_compiler import xla
from aot_compiler.lowering.normal_form import normalise
from artifacts.signature import TensorSpec


def tensor(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def normal_module(
    function: Callable[..., Sequence[jax.Array]],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[str],
    aliases: Mapping[int, int] | None = None,
) -> bytes:
    """Lower a function of jax values and bring its module, called "small", into normal form."""
    raw = xla.lower_to_hlo(function, inputs)
    names = [spec.name for spec in inputs]
    return normalise(raw, name="small", parameter_names=names, output_names=outputs, aliases=aliases or {})


def all_reduce(x: jax.Array, groups: tuple[tuple[int, ...], ...]) -> jax.Array:
    """Sum over the ranks of each group, as one StableHLO operation."""
    result: jax.Array = _all_reduce.bind(x, groups=groups)
    return result


_all_reduce = Primitive("test_all_reduce")
_all_reduce.def_abstract_eval(lambda x, **_: jax.core.ShapedArray(x.shape, x.dtype))


def _emit(context: Any, x: Any, *, groups: tuple[tuple[int, ...], ...]) -> list[Any]:
    tensor_type = ir.RankedTensorType(x.type)
    numbers = ir.DenseIntElementsAttr.get(np.array(groups, np.int64))
    operation = stablehlo.AllReduceOp([tensor_type], [x], numbers)
    scalar = ir.RankedTensorType.get([], tensor_type.element_type)
    block = operation.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.AddOp(*block.arguments).result])
    return list(operation.results)


mlir.register_lowering(_all_reduce, _emit)
