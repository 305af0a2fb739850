"""Every private name of jax and jaxlib that this project uses is there and does what is relied on.

After an upgrade of jax these tests fail first, and say which name has moved and which module uses it.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import pytest
from jax import lax, monitoring
from jaxlib import _jax, xla_client

from aot_compiler import xla
from artifacts.hlo import entry_computation, instructions, parse_hlo
from artifacts.signature import TensorSpec
from runtime import pjrt
from tests.aot_compiler.small_modules import normal_module

USERS = ("aot_compiler/xla.py", "runtime/pjrt.py")
ROOTS = {"jax": jax, "monitoring": monitoring, "xc": xla_client, "_jax": _jax, "version": jaxlib.version}
"""What the names that those modules import stand for."""

X = TensorSpec(name="x", shape=(2, 3), dtype="float32")


def used_names() -> Iterator[tuple[str, str]]:
    """Every dotted name below one of the roots, with the module that uses it."""
    for user in USERS:
        tree = ast.parse((Path(__file__).parents[2] / user).read_text())
        dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for name in sorted(dotted):
            if name.split(".")[0] in ROOTS and name.replace(".", "").replace("_", "").isalnum():
                yield name, user


@pytest.mark.parametrize(("name", "user"), list(used_names()))
def test_name_exists(name: str, user: str) -> None:
    root, *path = name.split(".")
    found = ROOTS[root]
    for part in path:
        assert hasattr(found, part), f"{name}, used by {user}, is not in jax {jax.__version__}: {part} has moved"
        found = getattr(found, part)


def test_names_are_found() -> None:
    assert {("xc.make_cpu_client", user) for user in USERS} <= set(used_names())
    assert ("_jax.mlir.mlir_module_to_xla_computation", USERS[0]) in set(used_names())


def test_the_pinned_release_is_installed() -> None:
    pins = [
        line.split('"')[1]
        for line in (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines()
        if line.strip().startswith(('"jax==', '"jaxlib=='))
    ]
    assert pins == [f"jax=={jax.__version__}", f"jaxlib=={jaxlib.__version__}"]


# The compiler's use


def double(x: jax.Array) -> list[jax.Array]:
    return [lax.mul(x, np.float32(2))]


@functools.cache
def hlo() -> bytes:
    return xla.lower_to_hlo(double, [X])


@functools.cache
def program() -> bytes:
    return xla.compile_for_cpu(hlo(), 1)


def test_lowering_keeps_unused_inputs_and_returns_a_tuple() -> None:
    module = parse_hlo(xla.lower_to_hlo(lambda x, unused: double(x), [X, X]), "module")
    entry = entry_computation(module)
    assert sorted(each.parameter_number for each in entry.instructions if each.opcode == "parameter") == [0, 1]
    (root,) = [each for each in entry.instructions if each.id == entry.root_id]
    assert root.opcode == "tuple"


def test_lowering_does_not_depend_on_where_the_source_stands() -> None:
    elsewhere: dict[str, Any] = {}
    code = compile("\n" * 40 + "def double(x): return [lax.mul(x, np.float32(2))]", "/elsewhere/model.py", "exec")
    exec(code, {"lax": lax, "np": np}, elsewhere)
    assert normal_module(elsewhere["double"], [X], ["y"]) == normal_module(double, [X], ["y"])


def test_64_bit_types_are_off() -> None:
    """The lowering relies on jax narrowing what Python has as 64 bits."""
    assert not jax.config.jax_enable_x64
    types = {each.shape.element_type for each in instructions(parse_hlo(hlo(), "module"))}
    assert types == {11, 13}  # f32 and the root's tuple


def test_program_has_one_device_for_each_rank() -> None:
    for ranks in (1, 2):
        executable = pjrt.Devices(ranks).load(xla.compile_for_cpu(hlo(), ranks), "double")
        assert len(executable._loaded.local_devices()) == ranks


# The runtime's use


def test_program_travels_as_bytes() -> None:
    devices = pjrt.Devices(1)
    executable = devices.load(program(), "double")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    (result,) = executable.execute([devices.copy(x)])
    np.testing.assert_array_equal(np.asarray(result), 2 * x)


def test_clients_stand_beside_each_other_and_beside_jax() -> None:
    one, two = pjrt.Devices(1), pjrt.Devices(2)
    loaded = [devices.load(xla.compile_for_cpu(hlo(), ranks), "double") for ranks, devices in ((1, one), (2, two))]
    x = np.ones((2, 3), np.float32)
    (result,) = loaded[0].execute([one.copy(x)])
    np.testing.assert_array_equal(np.asarray(result), 2 * x)
    assert float(jax.numpy.float32(3)) == 3.0
    clients = [each._client for each in (one, two)]
    assert clients[0] is not clients[1]
    assert jax.devices()[0].client not in clients


def test_copied_buffer_does_not_follow_its_array() -> None:
    devices = pjrt.Devices(1)
    x = _aligned((2, 3))
    buffer = devices.copy(x)
    x[:] = 7
    np.testing.assert_array_equal(np.asarray(buffer), np.zeros((2, 3)))


def test_mapped_buffer_shares_aligned_memory() -> None:
    x = _aligned((2, 3))
    buffer = pjrt.Devices(1).map(x)
    assert buffer.unsafe_buffer_pointer() == x.ctypes.data


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros at an address that is a multiple of 64."""
    count = 4 * int(np.prod(shape))
    raw = np.zeros(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count].view(np.float32).reshape(shape)


def test_cost_analysis_counts() -> None:
    costs = pjrt.Devices(1).load(program(), "double").cost_analysis()
    assert costs["bytes accessed"] > 0


def test_jax_announces_compilations_before_they_start() -> None:
    """``compilation_forbidden`` can stop a compilation only because the event comes first, on the same thread."""
    events: list[str] = []

    def listener(event: str, value: float, **_: Any) -> None:
        events.append(event)

    monitoring.register_scalar_listener(listener)
    try:
        jax.jit(lambda x: x * 3).lower(jax.ShapeDtypeStruct((5,), np.float32)).compile()
    finally:
        monitoring.unregister_scalar_listener(listener)
    assert {event for event in events if event.startswith("/jax/core/compile/")} != set()
    assert len([event for event in events if "backend_compile" in event]) == 1


def test_bytes_that_are_no_program_raise_the_error_that_the_runtime_catches() -> None:
    client = xla_client.make_cpu_client(num_devices=1)
    devices = xla_client.DeviceList(tuple(client.devices()))
    with pytest.raises(xla_client.XlaRuntimeError):
        client.deserialize_executable(b"not a program", devices, xla._compile_options(1))
