"""Every rule of the lint has modules that offend it, and it alone unless they say otherwise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aot_compiler.lowering.lint import RULES, findings, lint
from artifacts.errors import LintError
from artifacts.hlo import entry_computation, parse_hlo
from tests.aot_compiler.small_modules import all_reduce, normal_module, tensor


@dataclass(frozen=True, kw_only=True)
class Example:
    """A module with one offence."""

    rule: str
    make: Callable[[], bytes]
    found: str
    """Text of the rule's first finding."""
    also: tuple[str, ...] = ()
    """Other rules that XLA's rendering of the same function offends."""


EXAMPLES: list[Example] = []


def lowered(
    rule: str, found: str, *shape: int, dtype: str = "float32", x64: bool = False, also: tuple[str, ...] = ()
) -> Any:
    """Register the module of a function of one tensor, as XLA makes it."""

    def register(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
        def make() -> bytes:
            with jax.enable_x64(x64):
                return normal_module(lambda x: [function(x)], [tensor("x", *shape, dtype=dtype)], ["y"])

        EXAMPLES.append(Example(rule=rule, make=make, found=found, also=also))
        return function

    return register


def edited(rule: str, found: str) -> Any:
    """Register the good module with a change made to its proto, where XLA makes no such module from a function."""

    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        def make() -> bytes:
            module = parse_hlo(good_module(), "good")
            change(module)
            return bytes(module.SerializeToString(deterministic=True))

        EXAMPLES.append(Example(rule=rule, make=make, found=found))
        return change

    return register


def good_module() -> bytes:
    """A cache update, a product and a collective."""
    return normal_module(
        lambda x, cache, w: [
            all_reduce(lax.dot(x, w), ((0, 1),)),
            lax.dynamic_update_slice(cache, x, (np.int32(0), np.int32(0))),
        ],
        [tensor("x", 2, 4), tensor("cache", 8, 4), tensor("w", 4, 3)],
        ["y", "cache"],
        aliases={1: 1},
    )


def instruction(module: Any, opcode: str) -> Any:
    return next(each for each in entry_computation(module).instructions if each.opcode == opcode)


@lowered("no 64-bit integers", "iota iota.1 has type s64", 4, x64=True)
def _s64(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(lax.iota(np.int64, 4), np.float32)


@lowered("no 64-bit integers", "convert convert.2 has type u64", 4, dtype="int32", x64=True)
def _u64(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(lax.convert_element_type(x, np.uint64), np.float32)


@lowered("no float64", "convert convert.2 has type f64", 4, x64=True)
def _f64(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(lax.convert_element_type(x, np.float64), np.float32)


@lowered("no complex numbers (NCC_EVRF004)", "complex complex.1 has type c64", 4)
def _c64(x: jax.Array) -> jax.Array:
    complex_x = lax.complex(x, x)
    return lax.real(lax.mul(complex_x, complex_x))


_INTEGER_RULE = "no integer dot, scatter, all-reduce or reduce-scatter (NCC_EVRF035, 060, 061, 063)"


@lowered(_INTEGER_RULE, "dot dot.1 is of s32", 4, 4, dtype="int32")
def _integer_dot(x: jax.Array) -> jax.Array:
    return lax.dot(x, x)


@lowered(_INTEGER_RULE, "scatter scatter.1 is of s32", 4, dtype="int32")
def _integer_scatter(x: jax.Array) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(x, x[:, None], x, numbers, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@lowered(_INTEGER_RULE, "all-reduce all-reduce.1 is of s32", 4, dtype="int32")
def _integer_all_reduce(x: jax.Array) -> jax.Array:
    return all_reduce(x, ((0, 1),))


@lowered("no sort or topk", "sort sort.1", 4)
def _sort(x: jax.Array) -> jax.Array:
    return lax.sort(x)


@lowered("no sort or topk", "topk topk.1", 4)
def _topk(x: jax.Array) -> jax.Array:
    return lax.top_k(x, 2)[0]


@lowered("no call", "call call.2", 4)
def _call(x: jax.Array) -> jax.Array:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return lax.sin(x)

    return inner(inner(x))


@lowered("no control flow", "while while.1", 4)
def _while(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: lax.lt(x[0], jnp.float32(1)), lambda x: lax.add(x, x), x)


@lowered("no control flow", "conditional conditional.1", 4)
def _conditional(x: jax.Array) -> jax.Array:
    return lax.cond(lax.gt(x[0], jnp.float32(0)), lax.sin, lax.cos, x)


@lowered("no random numbers", "rng rng.1", 4, also=("no 64-bit integers",))
def _rng(x: jax.Array) -> jax.Array:
    return lax.rng_uniform(jnp.float32(0), jnp.float32(1), (4,))


@lowered("no random numbers", "rng-bit-generator rng-bit-generator.1", 4, dtype="int32", also=("no 64-bit integers",))
def _rng_bit_generator(x: jax.Array) -> jax.Array:
    return lax.rng_bit_generator(lax.bitcast_convert_type(x, np.uint32), (4,), np.uint32)[1]


@lowered("no unknown custom call (NCC_EVRF015, NCC_EHCA005)", "custom-call custom-call.1 to 'lapack_spotrf_ffi'", 4, 4)
def _custom_call(x: jax.Array) -> jax.Array:
    return lax.linalg.cholesky(x, symmetrize_input=False)


@lowered(
    "no unknown custom call (NCC_EVRF015, NCC_EHCA005)", "custom-call custom-call.1 to 'xla_ffi_python_cpu_callback'", 4
)
def _host_callback(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((4,), np.float32), x)


@edited("no host communication", "outfeed dot.1")
def _outfeed(module: Any) -> None:
    instruction(module, "dot").opcode = "outfeed"


@edited("dense 32-bit ids from 1", "instruction tuple.1 has id 8589934603, not 11")
def _packed_ids(module: Any) -> None:
    """As XLA writes them."""
    entry = entry_computation(module)
    root = next(each for each in entry.instructions if each.id == entry.root_id)
    root.id = entry.root_id = entry.id << 32 | root.id


@edited("dense 32-bit ids from 1", "computation main.2 has id 7, not 2")
def _computation_ids(module: Any) -> None:
    entry = entry_computation(module)
    entry.id = module.entry_computation_id = 7


@edited("static shapes (NCC_EMOD025)", "dot dot.1 has a dynamic dimension")
def _dynamic_dimension(module: Any) -> None:
    instruction(module, "dot").shape.is_dynamic_dimension[0] = True


@edited("static shapes (NCC_EMOD025)", "tuple tuple.1 has a dynamic dimension")
def _dynamic_in_tuple(module: Any) -> None:
    instruction(module, "tuple").shape.tuple_shapes[0].is_dynamic_dimension[0] = True


@edited("static shapes (NCC_EMOD025)", "set-dimension-size dynamic-update-slice.1")
def _set_dimension_size(module: Any) -> None:
    instruction(module, "dynamic-update-slice").opcode = "set-dimension-size"


@edited("no source metadata", "dot dot.1 carries source metadata")
def _metadata(module: Any) -> None:
    instruction(module, "dot").metadata = b"\x1a\x08/model.py"


@edited("no source metadata", "the module carries stack frames")
def _stack_frames(module: Any) -> None:
    module.stack_frame_index = b"\x0a\x08/model.py"


@edited("replica groups in the old field", "all-reduce all-reduce.1 has its replica groups in the new field")
def _new_field(module: Any) -> None:
    collective = instruction(module, "all-reduce")
    collective.collective_device_list.replica_groups.extend(collective.replica_groups)
    collective.ClearField("replica_groups")


@edited("caches must alias, with equal shapes", "output 1 may, and not must, alias cache")
def _may_alias(module: Any) -> None:
    module.input_output_alias.entries[0].kind = 1


@edited("caches must alias, with equal shapes", "output 1 aliases x of another shape")
def _alias_of_another_shape(module: Any) -> None:
    module.input_output_alias.entries[0].parameter_number = 0


@edited("names on every parameter and output", "parameter 0 has no name")
def _nameless_parameter(module: Any) -> None:
    instruction(module, "parameter").ClearField("frontend_attributes")


@edited("names on every parameter and output", "the outputs have no names")
def _nameless_outputs(module: Any) -> None:
    instruction(module, "tuple").ClearField("frontend_attributes")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.found)
def test_offends_one_rule(example: Example) -> None:
    found = findings(example.make(), "small")
    assert next(each.found for each in found if each.rule == example.rule) == example.found
    assert {each.rule for each in found} == {example.rule, *example.also}


def test_every_rule_has_an_example() -> None:
    assert {example.rule for example in EXAMPLES} == set(RULES)


def test_good_module_passes() -> None:
    assert findings(good_module(), "good") == []
    lint(good_module(), "good")


def test_error_names_one_finding_and_counts_the_others() -> None:
    hlo = normal_module(lambda x: [lax.sort(x)], [tensor("x", 4)], ["y"])
    with pytest.raises(LintError) as caught:
        lint(hlo, "decode_b1_c64")
    assert str(caught.value) == (
        "decode_b1_c64: sort sort.1; expected no sort or topk; change the model so that the graph does without it"
    )
    twice = normal_module(lambda x: [lax.sort(x), lax.sort(lax.neg(x))], [tensor("x", 4)], ["y", "z"])
    with pytest.raises(LintError) as caught:
        lint(twice, "decode_b1_c64")
    assert str(caught.value) == (
        "decode_b1_c64: sort sort.2 (and 1 more); expected no sort or topk; "
        "change the model so that the graph does without it"
    )
