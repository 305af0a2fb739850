import jax
import numpy as np
import pytest
from jax import lax

from aot_compiler import xla
from aot_compiler.backends.cpu_rewrites import put_weights_on_the_left
from aot_compiler.lowering.normal_form import normalise
from artifacts.hlo import instructions, parse_hlo
from artifacts.signature import TensorSpec
from runtime.pjrt import Devices


def two_products(rows: int) -> bytes:
    """(x @ w.T) @ v.T: two products with weights; and x @ x.T, which has none."""
    specs = [
        TensorSpec(name="x", shape=(rows, 24), dtype="float32"),
        TensorSpec(name="w", shape=(40, 24), dtype="float32"),
        TensorSpec(name="v", shape=(8, 40), dtype="float32"),
    ]

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())))

    raw = xla.lower_to_hlo(lambda x, w, v: (dot(dot(x, w), v), dot(x, lax.add(x, x))), specs)
    return normalise(raw, name="products", parameter_names=["x", "w", "v"], output_names=["y", "g"], aliases={})


def run(hlo: bytes, arrays: list[np.ndarray]) -> list[np.ndarray]:
    devices = Devices(1)
    executable = devices.load(xla.compile_for_cpu(hlo, 1), "test")
    return [np.asarray(result) for result in executable.execute([devices.copy(array) for array in arrays])]


@pytest.mark.parametrize(("rows", "rewritten"), [(1, 0), (2, 2), (64, 2), (65, 0)])
def test_products_of_few_rows_get_the_weight_on_the_left(rows: int, rewritten: int) -> None:
    hlo = two_products(rows)
    module = parse_hlo(put_weights_on_the_left(hlo), "products")
    opcodes = [instruction.opcode for instruction in instructions(module)]
    assert opcodes.count("opt-barrier") == rewritten
    assert opcodes.count("dot") == 3
    for instruction in instructions(module):
        if instruction.name.endswith(".swapped"):
            assert list(instruction.shape.dimensions) in ([40, rows], [8, rows])


@pytest.mark.parametrize("rows", [2, 7, 64])
def test_the_rewritten_module_computes_the_same(rows: int) -> None:
    rng = np.random.default_rng(rows)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((rows, 24), (40, 24), (8, 40))]
    x, w, v = (array.astype(np.float64) for array in arrays)
    hlo = two_products(rows)
    for module in (hlo, put_weights_on_the_left(hlo)):
        y, gram = run(module, arrays)
        np.testing.assert_allclose(y, x @ w.T @ v.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gram, 2 * x @ x.T, rtol=1e-4, atol=1e-4)


def test_a_module_without_such_products_keeps_its_instructions() -> None:
    hlo = two_products(1)
    before, after = parse_hlo(hlo, "a"), parse_hlo(put_weights_on_the_left(hlo), "b")
    assert before == after
