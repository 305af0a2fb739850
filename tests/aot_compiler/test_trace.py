"""What tracing records: which operators, by whom they were called, and each kind of layer once."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from aot_compiler.lowering import lower
from aot_compiler.lowering.operators import HANDLERS
from aot_compiler.trace import TracedEntry, trace
from artifacts.errors import CompileError, UnsupportedOperatorError
from artifacts.signature import TensorSpec, entry_signature
from model_defs.registry import build_backbone
from model_defs.step import Backbone, BackboneFacts, StepInputs

WIDTH, VOCAB, BLOCK, BLOCKS = 4, 11, 8, 3
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the layers of the small backbone share."""

    positions: Tensor


class Inner(nn.Module):
    """A submodule that applies any function to its product."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.function = function

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.function(self.proj(x_TH))


class Layer(nn.Module):
    kind = "plain"

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.mixer = nn.ModuleList([Inner(lambda x: x), Inner(function)])

    def forward(self, hidden_TH: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        hidden_TH = hidden_TH + context.positions[:, None].to(torch.float32)
        return self.mixer[1](self.mixer[0](hidden_TH)), k, v


class SmallBackbone(Backbone):
    """Two layers, with a function of the test's choice inside the layers or in the epilogue."""

    def __init__(self, in_layer: Function = lambda x: x, in_epilogue: Function = lambda x: x) -> None:
        super().__init__()
        self.facts = BackboneFacts(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_key_value_heads=1,
            head_dim=2,
            max_position_embeddings=64,
            embedding="embed.weight",
            redundant=(),
        )
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.stack = nn.ModuleList([Layer(in_layer), Layer(in_layer)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.in_epilogue = in_epilogue

    @property
    def layers(self) -> nn.ModuleList:
        return self.stack

    def prologue(self, inputs: StepInputs) -> tuple[Tensor, Context]:
        return self.embed(inputs.input_ids), Context(positions=inputs.positions)

    def epilogue(self, hidden_TH: Tensor, output_positions: Tensor | None) -> Tensor:
        return self.head(self.in_epilogue(hidden_TH))


def traced(backbone: Backbone) -> TracedEntry:
    """Trace a decode of three rows."""
    facts = backbone.facts
    signature = entry_signature(
        "decode",
        rows=3,
        context=16,
        block_size=BLOCK,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        dtype="float32",
    )
    shape = (BLOCKS, facts.num_key_value_heads, BLOCK, facts.head_dim)
    caches = [
        TensorSpec(name=f"layers.{i}.{part}", shape=shape, dtype="float32")
        for i in range(len(backbone.layers))
        for part in "kv"
    ]
    parameters = [
        TensorSpec(name=name, shape=tuple(parameter.shape), dtype="float32")
        for name, parameter in backbone.named_parameters()
    ]
    return trace(backbone, signature, caches, parameters)


def llama() -> Backbone:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
    }
    return build_backbone(config, "config.json", BLOCK)


def test_error_names_operator_module_and_nearest_handled_operator() -> None:
    entry = traced(SmallBackbone(in_layer=lambda x: torch.cumprod(x, 0)))
    with pytest.raises(UnsupportedOperatorError) as caught:
        lower(entry)
    assert str(caught.value) == (
        "operator aten.cumprod.default, called by stack.0.mixer.1, has no lowering; "
        f"expected one of the {len(HANDLERS)} in aot_compiler/lowering/operators.py (nearest: aten.clamp.default); "
        "add a handler there, or write the model with operators that have one"
    )


def test_error_names_the_epilogue_where_no_submodule_called() -> None:
    entry = traced(SmallBackbone(in_epilogue=lambda x: torch.cumprod(x, 0)))
    with pytest.raises(UnsupportedOperatorError, match=r"^operator aten\.cumprod\.default, called by epilogue, has no"):
        lower(entry)


@pytest.mark.parametrize(
    ("function", "operator", "nearest"),
    [
        (lambda x: x.pow(x), "aten.pow.Tensor_Tensor", "aten.pow.Tensor_Scalar"),
        (lambda x: x.asin(), "aten.asin.default", "aten.sin.default"),
    ],
)
def test_nearest_is_by_name_before_overload(function: Function, operator: str, nearest: str) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        lower(traced(SmallBackbone(in_epilogue=function)))
    assert caught.value.found == f"operator {operator}, called by epilogue, has no lowering"
    assert caught.value.expected.endswith(f"(nearest: {nearest})")


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_64_bit_integers_are_refused_where_they_are_made() -> None:
    def positions_in_64_bits(x_TH: Tensor) -> Tensor:
        return x_TH + torch.arange(WIDTH)

    with pytest.raises(CompileError) as caught:
        lower(traced(SmallBackbone(in_layer=positions_in_64_bits)))
    assert str(caught.value) == (
        "aten.arange.start_step in stack.0.mixer.1 lowered to int32[4]; expected int64[4], as torch has it; "
        "use 32-bit integers in the model, or mend the operator's handler"
    )


def test_nodes_know_the_module_that_called_them() -> None:
    entry = traced(llama())
    layer = entry.calls[1].segment
    modules = [node.meta["custom"]["module"] for node in layer.graph.graph.nodes if node.op == "call_function"]
    linear = [
        node.meta["custom"]["module"]
        for node in layer.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    ]
    assert linear == [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    assert list(dict.fromkeys(modules)) == [
        "input_layernorm", *linear[:1], "self_attn", *linear[1:4], "", "post_attention_layernorm", *linear[4:5], "mlp",
        *linear[5:],
    ]  # fmt: skip


def test_modules_are_left_as_they_were() -> None:
    def failing(x_TH: Tensor) -> Tensor:
        raise LookupError("while tracing")

    succeeds, fails = SmallBackbone(), SmallBackbone(in_layer=failing)
    traced(succeeds)
    with pytest.raises(LookupError, match="while tracing"):
        traced(fails)
    for backbone in (succeeds, fails):
        for module in backbone.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
    # Nothing lingers from the trace that failed.
    entry = traced(SmallBackbone(in_epilogue=lambda x: x * 2))
    product = entry.calls[-1].segment.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert [node.meta.get("custom") for node in product] == [None]


def test_each_kind_of_layer_is_traced_once_and_called_as_often_as_there_are_layers() -> None:
    entry = traced(llama())
    assert [call.segment.kind for call in entry.calls] == ["prologue", *["full_attention"] * 3, "epilogue"]
    assert [call.scope for call in entry.calls] == ["", "model.layers.0", "model.layers.1", "model.layers.2", ""]
    assert entry.calls[1].segment is entry.calls[2].segment is entry.calls[3].segment
    second = entry.calls[2]
    assert second.outputs == ("hidden", "layers.1.k", "layers.1.v")
    own = [name for name in second.inputs if name.startswith("model.layers.")]
    assert own == [spec.name for spec in entry.parameters if spec.name.startswith("model.layers.1.")]
    assert "context.block_table_M" in second.inputs
    assert entry.calls[-1].inputs == ("hidden", "model.norm.weight", "lm_head.weight")


def test_each_product_with_a_weight_is_one_linear() -> None:
    """A weight is neither transposed nor copied on the way into its product."""
    for call in traced(llama()).calls:
        targets = [str(node.target) for node in call.segment.graph.graph.nodes]
        assert not [target for target in targets if re.match(r"aten\.(t|mm|addmm|transpose)\b", target)]
