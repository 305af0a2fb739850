"""The normal form of an HLO module: what makes the same graph the same bytes, and old readers read them.

Ids are dense 32-bit numbers from 1 (XLA writes ``computation << 32 | local``, which a reader with 32-bit ids truncates
to colliding halves); replica groups stand in the old field; nothing tells of source files; caches must alias; and
parameters and outputs bear their names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from artifacts.hlo import MUST_ALIAS, entry_computation, instructions, parse_hlo


def normalise(
    raw: bytes,
    *,
    name: str,
    parameter_names: Sequence[str],
    output_names: Sequence[str],
    aliases: Mapping[int, int],
) -> bytes:
    """Bring a module into normal form.

    Args:
        raw: a serialised HloModuleProto as XLA writes it.
        name: the module's name.
        parameter_names: name of each parameter of the entry computation.
        output_names: name of each element of the root tuple.
        aliases: output index to the parameter index that it is updated in place of.
    """
    module = parse_hlo(raw, name)
    module.name = name
    module.ClearField("stack_frame_index")
    _name_boundary(module, parameter_names, output_names)
    for instruction in instructions(module):
        instruction.ClearField("metadata")
        if instruction.HasField("collective_device_list"):
            groups = instruction.collective_device_list.replica_groups
            assert groups or not instruction.collective_device_list.ByteSize(), "groups in a form not read here"
            instruction.replica_groups.extend(groups)
            instruction.ClearField("collective_device_list")
    module.ClearField("input_output_alias")
    for output, parameter in aliases.items():
        module.input_output_alias.entries.add(output_shape_index=[output], parameter_number=parameter, kind=MUST_ALIAS)
    _renumber(module)
    return bytes(module.SerializeToString(deterministic=True))


def _name_boundary(module: Any, parameter_names: Sequence[str], output_names: Sequence[str]) -> None:
    """Name parameters and outputs, in the module's shape and in the attributes that AWS's builders read."""
    entry = entry_computation(module)
    for instruction in entry.instructions:
        if instruction.opcode == "parameter":
            instruction.name = parameter_names[instruction.parameter_number]
            _set_attribute(instruction, "neff_input_names", instruction.name)
        if instruction.id == entry.root_id:
            _set_attribute(instruction, "neff_output_names", ",".join(output_names))
    for shape in (module.host_program_shape, entry.program_shape):
        shape.parameter_names[:] = parameter_names


def _set_attribute(instruction: Any, key: str, value: str) -> None:
    attributes = instruction.frontend_attributes.map
    found = next((each for each in attributes if each.key == key), None)
    attribute = attributes.add(key=key) if found is None else found
    attribute.value = value


def _renumber(module: Any) -> None:
    computations = {c.id: number for number, c in enumerate(module.computations, 1)}
    numbers: dict[tuple[int, int], int] = {}
    for computation in module.computations:
        for instruction in computation.instructions:
            numbers[computation.id, instruction.id] = len(numbers) + 1
    for computation in module.computations:
        old = computation.id
        for instruction in computation.instructions:
            instruction.id = numbers[old, instruction.id]
            instruction.operand_ids[:] = [numbers[old, id_] for id_ in instruction.operand_ids]
            instruction.control_predecessor_ids[:] = [numbers[old, id_] for id_ in instruction.control_predecessor_ids]
            instruction.called_computation_ids[:] = [computations[id_] for id_ in instruction.called_computation_ids]
        computation.root_id = numbers[old, computation.root_id]
        computation.id = computations[old]
    module.entry_computation_id = computations[module.entry_computation_id]
    module.id = 1
