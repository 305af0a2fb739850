"""What an accelerator's compiler would refuse in an HLO module, found before it is asked.

Each rule is one line of ``RULES``; each has a failing example in tests/aot_compiler/test_lint.py. A code in a rule's
name is the one that AWS documents for it under "Neuron Compiler Error Codes" (SDK 2.32). Rules without a code rest on
other grounds: what ``neuronx-cc`` holds in 32 bits (ids), narrows without a word (64-bit integers), is reported to
refuse (``sort``), or has not been seen to accept (``call``, control flow, float64, random numbers).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.errors import LintError
from artifacts.hlo import MUST_ALIAS, element_types, entry_computation, instructions, parse_hlo

KNOWN_CUSTOM_CALLS: frozenset[str] = frozenset()
"""Custom-call targets that every target's compiler knows."""


_INTEGERS: frozenset[str] = frozenset({"s32", "u32", "s64", "u64"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One offence."""

    rule: str
    found: str


def _ids(module: Any) -> Iterator[str]:
    expected = 1
    for instruction in instructions(module):
        if instruction.id != expected:
            yield f"instruction {instruction.name} has id {instruction.id}, not {expected}"
            return
        expected += 1
    for number, computation in enumerate(module.computations, 1):
        if computation.id != number:
            yield f"computation {computation.name} has id {computation.id}, not {number}"
            return


def _types(forbidden: frozenset[str]) -> Callable[[Any], Iterator[str]]:
    def rule(module: Any) -> Iterator[str]:
        for instruction in instructions(module):
            for element_type in element_types(instruction.shape):
                if element_type in forbidden:
                    yield f"{instruction.opcode} {instruction.name} has type {element_type}"

    return rule


def _opcodes(*forbidden: str) -> Callable[[Any], Iterator[str]]:
    def rule(module: Any) -> Iterator[str]:
        for instruction in instructions(module):
            if instruction.opcode in forbidden:
                yield f"{instruction.opcode} {instruction.name}"

    return rule


def _integer_arithmetic(module: Any) -> Iterator[str]:
    """Products, scatters and sums over ranks that the accelerator computes in float32, exact only up to 2 ** 24."""
    for computation in module.computations:
        shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
        for instruction in computation.instructions:
            if instruction.opcode in ("dot", "scatter", "all-reduce", "reduce-scatter"):
                (element_type,) = element_types(shapes[instruction.operand_ids[0]])
                if element_type in _INTEGERS:
                    yield f"{instruction.opcode} {instruction.name} is of {element_type}"


def _dynamic_shapes(module: Any) -> Iterator[str]:
    for instruction in instructions(module):
        if any(instruction.shape.is_dynamic_dimension) or any(
            any(inner.is_dynamic_dimension) for inner in instruction.shape.tuple_shapes
        ):
            yield f"{instruction.opcode} {instruction.name} has a dynamic dimension"
        if instruction.opcode in ("set-dimension-size", "get-dimension-size", "dynamic-reshape"):
            yield f"{instruction.opcode} {instruction.name}"


def _custom_calls(module: Any) -> Iterator[str]:
    for instruction in instructions(module):
        if instruction.opcode == "custom-call" and instruction.custom_call_target not in KNOWN_CUSTOM_CALLS:
            yield f"custom-call {instruction.name} to {instruction.custom_call_target!r}"


def _metadata(module: Any) -> Iterator[str]:
    for instruction in instructions(module):
        if instruction.metadata:
            yield f"{instruction.opcode} {instruction.name} carries source metadata"
    if module.stack_frame_index:
        yield "the module carries stack frames"


def _replica_groups(module: Any) -> Iterator[str]:
    for instruction in instructions(module):
        if instruction.HasField("collective_device_list"):
            yield f"{instruction.opcode} {instruction.name} has its replica groups in the new field"


def _aliases(module: Any) -> Iterator[str]:
    entry = entry_computation(module)
    parameters = {i.parameter_number: i for i in entry.instructions if i.opcode == "parameter"}
    outputs = entry.program_shape.result.tuple_shapes
    for alias in module.input_output_alias.entries:
        parameter, output = parameters[alias.parameter_number], outputs[alias.output_shape_index[0]]
        if alias.kind != MUST_ALIAS:
            yield f"output {alias.output_shape_index[0]} may, and not must, alias {parameter.name}"
        if (parameter.shape.element_type, list(parameter.shape.dimensions)) != (
            output.element_type,
            list(output.dimensions),
        ):
            yield f"output {alias.output_shape_index[0]} aliases {parameter.name} of another shape"


def _names(module: Any) -> Iterator[str]:
    entry = entry_computation(module)
    for instruction in entry.instructions:
        keys = {attribute.key for attribute in instruction.frontend_attributes.map}
        if instruction.opcode == "parameter" and "neff_input_names" not in keys:
            yield f"parameter {instruction.parameter_number} has no name"
        if instruction.id == entry.root_id and "neff_output_names" not in keys:
            yield "the outputs have no names"


RULES: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "dense 32-bit ids from 1": _ids,
    "no 64-bit integers": _types(frozenset({"s64", "u64"})),
    "no float64": _types(frozenset({"f64"})),
    "no complex numbers (NCC_EVRF004)": _types(frozenset({"c64", "c128"})),
    "no integer dot, scatter, all-reduce or reduce-scatter (NCC_EVRF035, 060, 061, 063)": _integer_arithmetic,
    "no sort or topk": _opcodes("sort", "topk"),
    "no call": _opcodes("call"),
    "no control flow": _opcodes("while", "conditional"),
    "no host communication": _opcodes("infeed", "outfeed", "send", "recv"),
    "no random numbers": _opcodes("rng", "rng-bit-generator", "rng-get-and-update-state"),
    "static shapes (NCC_EMOD025)": _dynamic_shapes,
    "no unknown custom call (NCC_EVRF015, NCC_EHCA005)": _custom_calls,
    "no source metadata": _metadata,
    "replica groups in the old field": _replica_groups,
    "caches must alias, with equal shapes": _aliases,
    "names on every parameter and output": _names,
}
"""Every rule by what it demands."""


def findings(hlo: bytes, name: str) -> list[Finding]:
    """Every offence of a serialised module against every rule."""
    module = parse_hlo(hlo, name)
    return [Finding(rule, found) for rule, check in RULES.items() for found in check(module)]


def lint(hlo: bytes, name: str) -> None:
    """Refuse a module with findings.

    Raises:
        LintError: names the first finding and counts the others.
    """
    found = findings(hlo, name)
    if found:
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise LintError(
            found=f"{name}: {found[0].found}{others}",
            expected=found[0].rule,
            action="change the model so that the graph does without it",
        )
