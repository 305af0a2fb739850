"""Rewrites of a module that only XLA:CPU gains from, on its way into that compiler. The module in ``graphs/`` stays as
it is."""

from typing import Any

from artifacts.hlo import entry_computation, parse_hlo

FEWEST_ROWS, MOST_ROWS = 2, 64
"""Rows of the activation for which a weight on the left pays: 1.2 to 2.5 times on Zen 1 and Zen 3 with jaxlib 0.10.2.
One row is a matrix-vector product either way, and above these XLA's plain form is as fast or faster."""


def put_weights_on_the_left(hlo: bytes) -> bytes:
    """Turn ``x @ w.T`` into ``barrier(w @ x.T).T`` where ``x`` has few rows and ``w`` is a parameter.

    XLA:CPU's kernel for a product walks the rows of the left operand; a weight has many and a decode step's activation
    few. Without the barrier, XLA folds the transpose back into the product.
    """
    module = parse_hlo(hlo, "graph")
    computation = entry_computation(module)
    by_id = {instruction.id: instruction for instruction in computation.instructions}
    next_id = max(instruction.id for c in module.computations for instruction in c.instructions) + 1
    rewritten = []
    for instruction in computation.instructions:
        if _is_small_product_with_weight(instruction, by_id):
            rewritten.extend(_weight_on_the_left(instruction, next_id))
            next_id += 2
        else:
            rewritten.append(instruction)
    # Copied, because the old list owns the messages that are being put into the new one.
    kept = [type(instruction).FromString(instruction.SerializeToString()) for instruction in rewritten]
    del computation.instructions[:]
    computation.instructions.extend(kept)
    return bytes(module.SerializeToString(deterministic=True))


def _is_small_product_with_weight(instruction: Any, by_id: dict[int, Any]) -> bool:
    if instruction.opcode != "dot":
        return False
    activation, weight = (by_id[operand] for operand in instruction.operand_ids)
    numbers = instruction.dot_dimension_numbers
    return (
        weight.opcode == "parameter"
        and len(weight.shape.dimensions) == len(activation.shape.dimensions) == 2
        and list(numbers.lhs_contracting_dimensions) == [1]
        and list(numbers.rhs_contracting_dimensions) == [1]
        and FEWEST_ROWS <= activation.shape.dimensions[0] <= MOST_ROWS
    )


def _weight_on_the_left(dot: Any, next_id: int) -> list[Any]:
    """The swapped product, the barrier, and a transpose that takes the old product's id."""

    def derived(opcode: str, number: int) -> Any:
        made = type(dot)(opcode=opcode, name=f"{dot.name}.{opcode}", id=number)
        made.shape.CopyFrom(dot.shape)
        return made

    product = type(dot).FromString(dot.SerializeToString())
    product.id, product.name = next_id, f"{dot.name}.swapped"
    product.operand_ids[:] = reversed(dot.operand_ids)
    product.shape.dimensions[:] = reversed(dot.shape.dimensions)
    barrier = derived("opt-barrier", next_id + 1)
    barrier.shape.CopyFrom(product.shape)
    barrier.operand_ids.append(product.id)
    transpose = derived("transpose", dot.id)
    transpose.operand_ids.append(barrier.id)
    transpose.dimensions.extend([1, 0])
    return [product, barrier, transpose]
