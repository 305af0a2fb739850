"""Runs a traced entry on jax values, operator by operator, so that jax records it as one StableHLO function."""

import difflib
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import fx

from aot_compiler.lowering.operators import HANDLERS, NUMPY_FROM_TORCH, Out
from aot_compiler.trace import Call, TracedEntry
from artifacts.errors import CompileError, UnsupportedOperatorError


def run_entry(traced: TracedEntry, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    """Run every call of ``traced`` in order.

    Args:
        arguments: the entry's inputs, its caches and its parameters, in order.

    Returns:
        The entry's outputs, then the caches as the step leaves them.
    """
    specs = (*traced.signature.inputs, *traced.caches, *traced.parameters)
    values = {spec.name: argument for spec, argument in zip(specs, arguments, strict=True)}
    for call in traced.calls:
        results = _run_call(call, [values[name] for name in call.inputs])
        values.update(zip(call.outputs, results, strict=True))
    return [values[spec.name] for spec in (*traced.signature.outputs, *traced.caches)]


def _run_call(call: Call, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    """Interpret one segment's graph."""
    module = call.segment.graph
    supplied = iter(arguments)
    values: dict[fx.Node, Any] = {}

    def value_of(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        if isinstance(argument, list | tuple):
            return [value_of(item) for item in argument]
        return argument

    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(supplied)
        elif node.op == "get_attr":
            values[node] = _constant(getattr(module, node.target))
        elif node.op == "output":
            return list(value_of(node.args[0]))
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        else:
            handler = HANDLERS.get(node.target)
            if handler is None:
                raise _unsupported(node, call)
            kwargs = {key: value_of(item) for key, item in node.kwargs.items()}
            out = _expected(node)
            values[node] = _checked(handler(out, *value_of(node.args), **kwargs), out, node, call)
    raise AssertionError("graph without an output")


def _constant(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.numpy()


def _expected(node: fx.Node) -> Any:
    found = node.meta["val"]
    if isinstance(found, list | tuple):
        return [Out(tuple(each.shape), NUMPY_FROM_TORCH[each.dtype]) for each in found]
    return Out(tuple(found.shape), NUMPY_FROM_TORCH[found.dtype])


def _checked(result: Any, out: Any, node: fx.Node, call: Call) -> Any:
    """A result must have the shape and dtype that tracing found."""
    pairs = zip(result, out, strict=True) if isinstance(out, list) else [(result, out)]
    for value, expected in pairs:
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise CompileError(
                found=f"{node.target} in {_place(node, call)} lowered to {value.dtype}{list(value.shape)}",
                expected=f"{expected.dtype}{list(expected.shape)}, as torch has it",
                action="use 32-bit integers in the model, or mend the operator's handler",
            )
    return result


def _place(node: fx.Node, call: Call) -> str:
    inner = node.meta.get("custom", {}).get("module", "")
    return ".".join(part for part in (call.scope, inner) if part) or call.segment.kind


def _unsupported(node: fx.Node, call: Call) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        found=f"operator {node.target}, called by {_place(node, call)}, has no lowering",
        expected=f"one of the {len(HANDLERS)} in aot_compiler/lowering/operators.py (nearest: {_nearest(node.target)})",
        action="add a handler there, or write the model with operators that have one",
    )


def _nearest(target: object) -> str:
    """The handled operator most like ``target``: by name first, then by overload."""

    def likeness(handled: str) -> list[float]:
        pairs = zip(handled.split("."), str(target).split("."), strict=False)  # namespace, name, overload
        return [difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs]

    return max(sorted(map(str, HANDLERS)), key=likeness)
