import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.signature import EntrySignature, entry_signature
from runtime.batch import CachedSequence, StepBuilder
from runtime.blocks import BlockPool
from runtime.prompts import Prompt

BLOCK = 4


def entries(prefill: list[int], decode: list[int], context: list[int]) -> list[EntrySignature]:
    sizes = {"block_size": BLOCK, "hidden_size": 3, "vocab_size": 50, "dtype": "float32"}
    made = [entry_signature("prefill", rows=T, context=C, **sizes) for T in prefill for C in context if T <= C]
    return made + [entry_signature("decode", rows=B, context=C, **sizes) for B in decode for C in context]


@st.composite
def builders(draw: st.DrawFn) -> tuple[StepBuilder, list[int], list[int], list[int]]:
    context = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=3)))
    context = [BLOCK * c for c in context]
    prefill = sorted(draw(st.sets(st.integers(1, context[-1]), min_size=1, max_size=3)))
    decode = sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=3)))
    return StepBuilder(entries(prefill, decode, context), BLOCK), prefill, decode, context


def prompt_of(length: int, mask: list[bool] | None = None) -> Prompt:
    is_token_ids = np.ones(length, np.bool_) if mask is None else np.array(mask)
    embeds = np.arange(1, length * 3 + 1, dtype=np.float32).reshape(length, 3)
    return Prompt(
        token_ids=np.where(is_token_ids, np.arange(1, length + 1) % 50, 0).astype(np.int32),
        is_token_ids=is_token_ids,
        embeds=None if mask is None else np.where(is_token_ids[:, None], 0, embeds),
        text=None,
    )


@settings(deadline=None)
@given(builder=builders(), data=st.data())
def test_chunks_cover_the_prompt_in_order_in_the_buckets_of_the_contract(
    builder: tuple[StepBuilder, list[int], list[int], list[int]], data: st.DataObject
) -> None:
    steps, prefill, _, context = builder
    length = data.draw(st.integers(1, context[-1]))
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
    blocks = data.draw(st.permutations(range(1, context[-1] // BLOCK + 1)))
    prompt = prompt_of(length, mask)
    sequence = CachedSequence(prompt, list(blocks))
    position = 0
    for step in steps.prefill(sequence):
        kind, T, C = parse(step.entry)
        rows = min(T, length - position)
        assert kind == "prefill"
        assert (prefill[-1] if length - position >= prefill[-1] else min(t for t in prefill if t >= rows)) == T
        assert min(c for c in context if c >= position + rows and c >= T) == C
        at = np.arange(position, position + rows)
        np.testing.assert_array_equal(step.inputs["input_ids"][:rows], prompt.token_ids[at])
        np.testing.assert_array_equal(step.inputs["positions"][:rows], at)
        np.testing.assert_array_equal(
            step.inputs["slot_mapping"][:rows], [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in at]
        )
        used = min(C // BLOCK, len(blocks))
        np.testing.assert_array_equal(step.inputs["block_table"][0, :used], blocks[:used])
        assert step.inputs["output_positions"].tolist() == [rows - 1]
        for name in ("input_ids", "positions", "slot_mapping"):
            assert not step.inputs[name][rows:].any()
        if prompt.is_token_ids[at].all():
            assert "inputs_embeds" not in step.inputs
        else:
            np.testing.assert_array_equal(step.inputs["inputs_embeds"][:rows], prompt.embeds[at])  # type: ignore[index]
            np.testing.assert_array_equal(step.inputs["is_token_ids"][:rows], prompt.is_token_ids[at])
            assert step.inputs["is_token_ids"][rows:].all()
            assert not step.inputs["inputs_embeds"][rows:].any()
        position += rows
    assert position == length


@settings(deadline=None)
@given(builder=builders(), data=st.data())
def test_decode_takes_the_smallest_entry_that_holds_the_batch(
    builder: tuple[StepBuilder, list[int], list[int], list[int]], data: st.DataObject
) -> None:
    steps, _, decode, context = builder
    count = data.draw(st.integers(1, decode[-1]))
    lengths = data.draw(st.lists(st.integers(1, context[-1] - 1), min_size=count, max_size=count))
    sequences = []
    for row, length in enumerate(lengths):
        blocks = range(1 + row * 100, 1 + row * 100 + -(-(length + 1) // BLOCK))
        sequences.append(CachedSequence(prompt_of(length), list(blocks), output_ids=[row + 7]))
    step = steps.decode(sequences)
    kind, B, C = parse(step.entry)
    assert kind == "decode"
    assert min(b for b in decode if b >= count) == B
    assert min(c for c in context if c >= max(lengths) + 1) == C
    for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        assert step.inputs["input_ids"][row] == row + 7
        assert step.inputs["positions"][row] == length
        assert step.inputs["slot_mapping"][row] == sequence.blocks[length // BLOCK] * BLOCK + length % BLOCK
        assert step.inputs["block_table"][row, length // BLOCK] == sequence.blocks[length // BLOCK]
    for name in ("input_ids", "positions", "slot_mapping", "block_table"):
        assert not step.inputs[name][count:].any()
    assert "inputs_embeds" not in step.inputs


def test_the_longest_sequence_is_the_largest_context_of_both_kinds() -> None:
    assert StepBuilder(entries([8], [1], [16, 32]), BLOCK).longest == 32


@given(st.lists(st.integers(0, 9), max_size=30))
def test_blocks_are_conserved_and_never_null(requests: list[int]) -> None:
    pool = BlockPool(20, BLOCK)
    held: list[list[int]] = []
    for count in requests:
        if count <= pool.free:
            held.append(pool.allocate(count))
        elif held:
            pool.release(held.pop(0))
        taken = [block for blocks in held for block in blocks]
        assert len(set(taken)) == len(taken)
        assert 0 not in taken
        assert pool.free + len(taken) == 19


def parse(entry: str) -> tuple[str, int, int]:
    kind, rows, context = entry.split("_")
    return kind, int(rows[1:]), int(context[1:])
