"""The normal form of HLO modules, and that what is normal still computes the same."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jaxlib import xla_client

from aot_compiler import xla
from aot_compiler.lowering.normal_form import normalise
from artifacts.hlo import MUST_ALIAS, entry_computation, instructions, parse_hlo
from runtime.pjrt import Devices
from tests.aot_compiler.small_modules import all_reduce, normal_module, tensor

INPUTS = [tensor("x", 2, 4), tensor("cache", 8, 4), tensor("w", 4, 3)]
OUTPUTS = ["y", "cache"]
ALIASES = {1: 1}
GROUPS = ((0, 2), (1, 3))


def step(x: jax.Array, cache: jax.Array, w: jax.Array) -> list[jax.Array]:
    """A product, a reduction with a computation of its own, and a cache update."""
    total = lax.reduce(lax.dot(x, w), np.float32(0), lax.add, (1,))
    return [total, lax.dynamic_update_slice(cache, x, (np.int32(2), np.int32(0)))]


@pytest.fixture(scope="module")
def raw() -> bytes:
    """The module as XLA writes it."""
    return xla.lower_to_hlo(step, INPUTS)


def normal(raw: bytes) -> bytes:
    names = [spec.name for spec in INPUTS]
    return normalise(raw, name="small", parameter_names=names, output_names=OUTPUTS, aliases=ALIASES)


@pytest.fixture(scope="module")
def module(raw: bytes) -> Any:
    return parse_hlo(normal(raw), "small")


def test_raw_module_needs_it(raw: bytes) -> None:
    """What XLA writes breaks the rules below: ids of more than 32 bits, metadata, no aliases, names of its own."""
    module = parse_hlo(raw, "raw")
    assert max(each.id for each in instructions(module)) > 2**32
    assert any(each.metadata for each in instructions(module))
    assert not module.input_output_alias.entries
    assert list(module.host_program_shape.parameter_names) == ["p0", "p1", "p2"]


def test_ids_are_dense_and_agree(module: Any) -> None:
    assert [each.id for each in instructions(module)] == list(range(1, len(list(instructions(module))) + 1))
    assert [each.id for each in module.computations] == [1, 2]
    assert module.id == 1
    assert module.entry_computation_id == 2
    for computation in module.computations:
        inside = {each.id for each in computation.instructions}
        assert computation.root_id in inside
        for each in computation.instructions:
            assert set(each.operand_ids) <= inside
    (reduce,) = [each for each in instructions(module) if each.opcode == "reduce"]
    assert list(reduce.called_computation_ids) == [1]


def test_operands_stay_the_same(raw: bytes, module: Any) -> None:
    before, after = (
        [
            [(each.opcode, [opcodes[id_] for id_ in each.operand_ids]) for each in computation.instructions]
            for computation in found.computations
            for opcodes in [{each.id: each.opcode for each in computation.instructions}]
        ]
        for found in (parse_hlo(raw, "raw"), module)
    )
    assert before == after


def test_names(module: Any) -> None:
    entry = entry_computation(module)
    names = [spec.name for spec in INPUTS]
    assert module.name == "small"
    assert list(module.host_program_shape.parameter_names) == names
    assert list(entry.program_shape.parameter_names) == names
    parameters = {each.parameter_number: each for each in entry.instructions if each.opcode == "parameter"}
    assert [parameters[i].name for i in range(3)] == names
    assert [attributes(parameters[i]) for i in range(3)] == [{"neff_input_names": name} for name in names]
    (root,) = [each for each in entry.instructions if each.id == entry.root_id]
    assert attributes(root) == {"neff_output_names": "y,cache"}


def attributes(instruction: Any) -> dict[str, str]:
    pairs = [(each.key, each.value) for each in instruction.frontend_attributes.map]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_aliases(module: Any) -> None:
    (alias,) = module.input_output_alias.entries
    assert (list(alias.output_shape_index), alias.parameter_number, alias.kind) == ([1], 1, MUST_ALIAS)


def test_nothing_tells_of_source(module: Any) -> None:
    assert not any(each.metadata for each in instructions(module))
    assert not module.stack_frame_index


def test_idempotent(raw: bytes) -> None:
    assert normal(normal(raw)) == normal(raw)


def test_unknown_fields_survive(raw: bytes) -> None:
    """A field that the schema does not declare: number 2047, holding the text "kept"."""
    field = bytes([0xFA, 0x7F, 4]) + b"kept"
    assert normal(raw + field).count(b"kept") == 1
    module = parse_hlo(raw, "raw")
    (dot,) = [each for each in instructions(module) if each.opcode == "dot"]
    dot.MergeFromString(field)
    assert normal(module.SerializeToString()).count(b"kept") == 1


def test_normal_module_computes_the_same(raw: bytes) -> None:
    generator = np.random.default_rng(0)
    x, cache, w = (generator.standard_normal(spec.shape, np.float32) for spec in INPUTS)
    devices = Devices(1)
    executable = devices.load(xla.compile_for_cpu(normal(raw), 1), "small")
    arguments = [devices.copy(each) for each in (x, cache, w)]
    total, updated = (np.asarray(each) for each in executable.execute(arguments))
    np.testing.assert_allclose(total, (x @ w).sum(1), rtol=1e-5)
    np.testing.assert_array_equal(updated, np.concatenate([cache[:2], x, cache[4:]]))
    assert [each.is_deleted() for each in arguments] == [False, True, False]


def test_replica_groups_move_to_the_old_field() -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        return [all_reduce(x, GROUPS)]

    raw = parse_hlo(xla.lower_to_hlo(function, [tensor("x", 3)]), "raw")
    (before,) = [each for each in instructions(raw) if each.opcode == "all-reduce"]
    assert before.HasField("collective_device_list")
    assert not before.replica_groups
    module = parse_hlo(normal_module(function, [tensor("x", 3)], ["y"]), "small")
    (after,) = [each for each in instructions(module) if each.opcode == "all-reduce"]
    assert not after.HasField("collective_device_list")
    assert [list(group.replica_ids) for group in after.replica_groups] == [[0, 2], [1, 3]]


def test_groups_in_a_form_not_read_are_not_lost_silently() -> None:
    """``IotaReplicaGroupListProto``, field 2 of ``CollectiveDeviceListProto``, in place of a list."""
    module = parse_hlo(xla.lower_to_hlo(lambda x: [all_reduce(x, GROUPS)], [tensor("x", 3)]), "raw")
    (collective,) = [each for each in instructions(module) if each.opcode == "all-reduce"]
    collective.collective_device_list.ParseFromString(bytes([0x12, 4, 8, 2, 16, 2]))
    with pytest.raises(AssertionError, match="groups in a form not read here"):
        normalise(module.SerializeToString(), name="small", parameter_names=["x"], output_names=["y"], aliases={})


def test_old_field_runs_on_four_ranks() -> None:
    """XLA reads the groups of the old field: ranks 0 and 2, and 1 and 3, sum."""
    program = xla.compile_for_cpu(
        normal_module(lambda x: [lax.mul(all_reduce(x, GROUPS), np.float32(2))], [tensor("x", 3)], ["y"]), 4
    )
    client = xla_client.make_cpu_client(num_devices=4)
    devices = client.devices()
    options = xla._compile_options(4)
    executable = client.deserialize_executable(program, xla_client.DeviceList(tuple(devices)), options)
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    mesh = jax.sharding.Mesh(np.array(devices), ("ranks",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    shards = [jax.device_put(rows[rank], device) for rank, device in enumerate(devices)]
    x = jax.make_array_from_single_device_arrays((12,), sharding, shards)
    ((*results,),) = executable.execute_sharded([x]).disassemble_into_single_device_arrays()
    sums = 2 * np.stack([rows[0] + rows[2], rows[1] + rows[3]] * 2)
    np.testing.assert_array_equal(np.stack([np.asarray(each) for each in results]), sums)
