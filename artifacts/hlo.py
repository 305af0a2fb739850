"""The HLO module on disk: the part of XLA's ``HloModuleProto`` that this project reads and writes.

Only the fields below are declared; all others survive a round trip as unknown fields. Field numbers are those of XLA's
``xla/service/hlo.proto`` and ``xla/xla_data.proto``, which are stable: releases exchange serialised modules.
"""

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from artifacts.errors import CorruptArtifactError

# message -> field -> (number, type); "[]" marks a repeated field.
_SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "Layout": {"minor_to_major": (1, "int64[]")},
    "Shape": {
        "element_type": (2, "int32"),
        "dimensions": (3, "int64[]"),
        "tuple_shapes": (4, "Shape[]"),
        "layout": (5, "Layout"),
        "is_dynamic_dimension": (6, "bool[]"),
    },
    "ProgramShape": {"parameters": (1, "Shape[]"), "result": (2, "Shape"), "parameter_names": (3, "string[]")},
    "ReplicaGroup": {"replica_ids": (1, "int64[]")},
    "CollectiveDeviceList": {"replica_groups": (1, "ReplicaGroup[]")},
    "FrontendAttribute": {"key": (1, "string"), "value": (2, "string")},
    "FrontendAttributes": {"map": (1, "FrontendAttribute[]")},
    "DotDimensionNumbers": {
        "lhs_contracting_dimensions": (1, "int64[]"),
        "rhs_contracting_dimensions": (2, "int64[]"),
        "lhs_batch_dimensions": (3, "int64[]"),
        "rhs_batch_dimensions": (4, "int64[]"),
    },
    "Instruction": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "Shape"),
        "metadata": (7, "bytes"),
        "literal": (8, "bytes"),
        "parameter_number": (9, "int64"),
        "dimensions": (14, "int64[]"),
        "channel_id": (26, "int64"),
        "custom_call_target": (28, "string"),
        "dot_dimension_numbers": (30, "DotDimensionNumbers"),
        "id": (35, "int64"),
        "operand_ids": (36, "int64[]"),
        "control_predecessor_ids": (37, "int64[]"),
        "called_computation_ids": (38, "int64[]"),
        "replica_groups": (49, "ReplicaGroup[]"),
        "frontend_attributes": (68, "FrontendAttributes"),
        "collective_device_list": (87, "CollectiveDeviceList"),
    },
    "Computation": {
        "name": (1, "string"),
        "instructions": (2, "Instruction[]"),
        "program_shape": (4, "ProgramShape"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
    },
    "AliasEntry": {
        "output_shape_index": (1, "int64[]"),
        "parameter_number": (2, "int64"),
        "parameter_shape_index": (3, "int64[]"),
        "kind": (4, "int32"),
    },
    "InputOutputAlias": {"entries": (1, "AliasEntry[]")},
    "Module": {
        "name": (1, "string"),
        "entry_computation_name": (2, "string"),
        "computations": (3, "Computation[]"),
        "host_program_shape": (4, "ProgramShape"),
        "id": (5, "int64"),
        "entry_computation_id": (6, "int64"),
        "input_output_alias": (8, "InputOutputAlias"),
        "stack_frame_index": (17, "bytes"),
    },
}

MUST_ALIAS = 2
"""``xla.Kind.MUST_ALIAS`` of an alias entry."""

ELEMENT_TYPES: dict[int, str] = {
    1: "pred",
    2: "s8",
    3: "s16",
    4: "s32",
    5: "s64",
    6: "u8",
    7: "u16",
    8: "u32",
    9: "u64",
    10: "f16",
    11: "f32",
    12: "f64",
    13: "tuple",
    14: "opaque",
    15: "c64",
    16: "bf16",
    17: "token",
    18: "c128",
}
"""``xla.PrimitiveType`` by number, in HLO's spelling."""

DTYPE_TO_ELEMENT_TYPE: dict[str, str] = {"float32": "f32", "bfloat16": "bf16", "int32": "s32", "bool": "pred"}
"""Dtypes of signatures in HLO's spelling."""


def _build_pool() -> descriptor_pool.DescriptorPool:
    """Build the message classes from the table above, in a pool of their own so that other XLA protos do not clash."""
    field = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "int32": field.TYPE_INT32,
        "int64": field.TYPE_INT64,
        "bool": field.TYPE_BOOL,
        "string": field.TYPE_STRING,
        "bytes": field.TYPE_BYTES,
    }
    file = descriptor_pb2.FileDescriptorProto(name="aot/hlo.proto", package="aot.hlo", syntax="proto3")
    for message_name, fields in _SCHEMA.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            base = kind.removesuffix("[]")
            label = field.LABEL_REPEATED if kind.endswith("[]") else field.LABEL_OPTIONAL
            if base in scalars:
                message.field.add(name=name, number=number, label=label, type=scalars[base])
            else:
                message.field.add(
                    name=name, number=number, label=label, type=field.TYPE_MESSAGE, type_name=f".aot.hlo.{base}"
                )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _build_pool()
HloModuleProto: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("aot.hlo.Module"))
"""Message class of a whole module."""


def parse_hlo(data: bytes, origin: str) -> Any:
    """Parse a serialised module.

    Args:
        data: the bytes.
        origin: file name, for messages.

    Raises:
        CorruptArtifactError: the bytes are not an HLO module.
    """
    try:
        module = HloModuleProto.FromString(data)
    except DecodeError as error:
        raise _not_a_module(origin) from error
    if not module.computations:
        raise _not_a_module(origin)
    return module


def _not_a_module(origin: str) -> CorruptArtifactError:
    return CorruptArtifactError(
        found=f"{origin} does not parse", expected="a serialised HloModuleProto", action="rebuild the artifact"
    )


def entry_computation(module: Any) -> Any:
    """The computation that a caller runs."""
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def instructions(module: Any) -> Iterator[Any]:
    """Every instruction of every computation."""
    for computation in module.computations:
        yield from computation.instructions


def element_types(shape: Any) -> Iterator[str]:
    """Element types of a shape, those inside tuples included."""
    if shape.tuple_shapes:
        for inner in shape.tuple_shapes:
            yield from element_types(inner)
    else:
        yield ELEMENT_TYPES.get(shape.element_type, f"type {shape.element_type}")
