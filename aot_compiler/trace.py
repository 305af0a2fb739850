"""From a backbone to ATen graphs: the prologue, each kind of layer once, the epilogue.

A ``Segment`` is one traced piece; a ``TracedEntry`` says which segments run in which order on which values. Values are
known by name: the entry's inputs, ``layers.{i}.k`` and ``layers.{i}.v``, checkpoint names of parameters, ``hidden``,
and the fields of the context that all layers share.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta

from artifacts.signature import EntrySignature, TensorSpec
from model_defs.step import Backbone, StepInputs

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "bool": torch.bool,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One traced piece of the model."""

    kind: str
    """"prologue", "epilogue", or the kind of a layer."""
    graph: fx.GraphModule
    """Each node bears, as ``meta["custom"]["module"]``, the path of the submodule that called its operator."""
    inputs: tuple[str, ...]
    """Names of the placeholders, relative to the call's scope where they are parameters or caches of a layer."""
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One run of a segment."""

    segment: Segment
    scope: str
    """Path of the module that runs, such as "model.layers.3"; empty for prologue and epilogue."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedEntry:
    """One entry as ATen graphs over named values."""

    signature: EntrySignature
    caches: tuple[TensorSpec, ...]
    parameters: tuple[TensorSpec, ...]
    calls: tuple[Call, ...]


def trace(
    backbone: Backbone, signature: EntrySignature, caches: Sequence[TensorSpec], parameters: Sequence[TensorSpec]
) -> TracedEntry:
    """Trace ``backbone`` for one entry, on fake tensors: no weights are needed and nothing is computed.

    Args:
        backbone: the model, on any device, "meta" included.
        signature: fixes every shape.
        caches: ``layers.0.k``, ``layers.0.v``, ``layers.1.k``, ...
        parameters: the graph's parameters, in order.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(spec: TensorSpec) -> Tensor:
        with mode:
            return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])

    values: dict[str, Tensor] = {spec.name: fake(spec) for spec in (*signature.inputs, *caches, *parameters)}
    layer_scopes = _layer_scopes(backbone)
    outer = [spec.name for spec in parameters if not spec.name.startswith(tuple(f"{scope}." for scope in layer_scopes))]
    step_names = [spec.name for spec in signature.inputs]
    context_type: list[type] = []

    def prologue(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden, context = backbone.prologue(StepInputs(**{name: named[name] for name in step_names}))
        context_type.append(type(context))
        return {"hidden": hidden, **{f"context.{f.name}": getattr(context, f.name) for f in fields(context)}}

    first = _segment("prologue", backbone, prologue, outer, {name: values[name] for name in (*step_names, *outer)})
    values.update(_outputs(first))
    calls = [Call(segment=first, scope="", inputs=first.inputs, outputs=first.outputs)]
    context_names = [name for name in first.outputs if name.startswith("context.")]

    layer_segments: dict[str, Segment] = {}
    for i, (scope, layer) in enumerate(zip(layer_scopes, backbone.layers, strict=True)):
        own = [spec.name.removeprefix(f"{scope}.") for spec in parameters if spec.name.startswith(f"{scope}.")]
        outside = {name: f"{scope}.{name}" for name in own} | {name: f"layers.{i}.{name}" for name in ("k", "v")}
        kind: str = layer.kind  # type: ignore[assignment]

        def run_layer(named: Mapping[str, Tensor], layer: nn.Module = layer) -> dict[str, Tensor]:
            context = context_type[0](**{name.removeprefix("context."): named[name] for name in context_names})
            hidden, k, v = layer(named["hidden"], named["k"], named["v"], context)
            return {"hidden": hidden, "k": k, "v": v}

        if kind not in layer_segments:
            names = ("hidden", "k", "v", *context_names, *own)
            arguments = {name: values[outside.get(name, name)] for name in names}
            layer_segments[kind] = _segment(kind, layer, run_layer, own, arguments)
        segment = layer_segments[kind]
        calls.append(
            Call(
                segment=segment,
                scope=scope,
                inputs=tuple(outside.get(name, name) for name in segment.inputs),
                outputs=tuple(outside.get(name, name) for name in segment.outputs),
            )
        )

    def epilogue(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": backbone.epilogue(named["hidden"], named.get("output_positions"))}

    last_names = ["hidden", *(name for name in step_names if name == "output_positions"), *outer]
    last = _segment("epilogue", backbone, epilogue, outer, {name: values[name] for name in last_names})
    calls.append(Call(segment=last, scope="", inputs=last.inputs, outputs=last.outputs))
    return TracedEntry(signature=signature, caches=tuple(caches), parameters=tuple(parameters), calls=tuple(calls))


def _layer_scopes(backbone: Backbone) -> list[str]:
    paths = {id(module): path for path, module in backbone.named_modules()}
    return [paths[id(layer)] for layer in backbone.layers]


@contextmanager
def _noting_modules(module: nn.Module) -> Iterator[None]:
    """Note on every node traced meanwhile which submodule of ``module`` called its operator, as a path below it."""
    entered: list[ExitStack] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            entered.append(ExitStack())
            entered[-1].enter_context(annotate({"module": path}))

        return hook

    def leave(*_: object) -> None:
        entered.pop().close()

    with ExitStack() as handles, preserve_node_meta():
        for path, submodule in module.named_modules():
            handles.callback(submodule.register_forward_pre_hook(enter(path)).remove)
            handles.callback(submodule.register_forward_hook(leave, always_call=True).remove)
        yield


class _Bound(nn.Module):
    """Lets ``functional_call`` run any function of a module, not only its ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., object], *args: object) -> object:
        return function(*args)


def _segment(
    kind: str,
    module: nn.Module,
    function: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    parameters: Sequence[str],
    arguments: Mapping[str, Tensor],
) -> Segment:
    """Trace ``function`` of ``module``, whose ``parameters`` stand among the named ``arguments``."""
    bound = _Bound(module)
    outputs: list[str] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        named = dict(zip(arguments, tensors, strict=True))
        swapped = {f"module.{name}": named[name] for name in parameters}
        result = torch.func.functional_call(bound, swapped, (function, named), tie_weights=True)
        outputs[:] = result
        return list(result.values())

    with torch.no_grad(), _noting_modules(module):
        decompositions = core_aten_decompositions()
        graph = make_fx(run, decomposition_table=decompositions)(*arguments.values())  # type: ignore[arg-type]
    _restore_linear(graph)
    used = []
    for name, node in zip(arguments, graph.graph.find_nodes(op="placeholder"), strict=True):
        if node.users:
            used.append(name)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return Segment(kind=kind, graph=graph, inputs=tuple(used), outputs=tuple(outputs))


def _outputs(segment: Segment) -> dict[str, Tensor]:
    (nodes,) = segment.graph.graph.output_node().args
    assert isinstance(nodes, list | tuple)
    return {name: node.meta["val"] for name, node in zip(segment.outputs, nodes, strict=True)}


def _restore_linear(module: fx.GraphModule) -> None:
    """Put ``aten.linear`` back where tracing left a transposed weight and a product: one dot, no transpose in HLO."""
    aten = torch.ops.aten
    for node in module.graph.nodes:
        bias, args = ((), node.args) if node.target is aten.mm.default else (node.args[:1], node.args[1:])
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        x, weight = args
        if weight.target is aten.permute.default and weight.args[1] == [1, 0]:
            with module.graph.inserting_before(node):
                linear = module.graph.call_function(aten.linear.default, (x, weight.args[0], *bias))
            linear.meta = dict(node.meta)
            node.replace_all_uses_with(linear)
            module.graph.erase_node(node)
            if not weight.users:
                module.graph.erase_node(weight)
