"""From requests to the arrays of one step: which entry, which rows, which cache slots.

Shape letters: T rows of the step, B requests, C cache tokens read, S tokens in a cache block, H hidden width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from artifacts.signature import EntrySignature
from runtime.prompts import Prompt


@dataclass(slots=True)
class CachedSequence:
    """One request's tokens and the cache blocks that hold them."""

    prompt: Prompt
    blocks: list[int]
    output_ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output together."""
        return len(self.prompt.token_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ``Program.run``."""

    entry: str
    inputs: Mapping[str, Any]


class StepBuilder:
    """Chooses entries and fills their inputs.

    Args:
        entries: every entry of the layout.
        block_size: tokens in a cache block.
    """

    def __init__(self, entries: Iterable[EntrySignature], block_size: int) -> None:
        self.block_size = block_size
        self._by_kind: dict[str, list[EntrySignature]] = {"prefill": [], "decode": []}
        for entry in sorted(entries, key=lambda entry: (entry.rows, entry.context)):
            self._by_kind[entry.kind].append(entry)
        self.largest_prefill = self._by_kind["prefill"][-1].rows
        self.largest_decode = self._by_kind["decode"][-1].rows
        self.longest = min(max(entry.context for entry in entries) for entries in self._by_kind.values())
        """Longest sequence, prompt and output together."""

    def prefill(self, sequence: CachedSequence) -> list[Step]:
        """Steps that read a whole prompt: chunks of the largest bucket, then the smallest that holds the rest.

        The logits of the last step are those of the prompt's last row.
        """
        steps = []
        start, length = 0, len(sequence.prompt.token_ids)
        while start < length:
            end = min(start + self.largest_prefill, length)
            steps.append(self._chunk(sequence, start, end))
            start = end
        return steps

    def decode(self, sequences: Sequence[CachedSequence]) -> Step:
        """One step that reads the last output token of each sequence; rows beyond them are padding."""
        last_B = [sequence.length - 1 for sequence in sequences]
        entry = self._choose("decode", len(sequences), max(last_B) + 1)
        inputs = entry.padding_inputs()
        for row, (sequence, position) in enumerate(zip(sequences, last_B, strict=True)):
            inputs["input_ids"][row] = sequence.output_ids[-1]
            inputs["positions"][row] = position
            inputs["slot_mapping"][row] = self._slots(sequence, np.array([position]))[0]
            self._fill_table(inputs["block_table"][row], sequence)
        return Step(entry.name, inputs)

    def _chunk(self, sequence: CachedSequence, start: int, end: int) -> Step:
        prompt, rows = sequence.prompt, end - start
        entry = self._choose("prefill", rows, end)
        inputs = entry.padding_inputs()
        positions = np.arange(start, end)
        inputs["input_ids"][:rows] = prompt.token_ids[start:end]
        inputs["positions"][:rows] = positions
        inputs["slot_mapping"][:rows] = self._slots(sequence, positions)
        self._fill_table(inputs["block_table"][0], sequence)
        inputs["output_positions"][0] = rows - 1
        is_token_ids = prompt.is_token_ids[start:end]
        if prompt.embeds is not None and not is_token_ids.all():
            spec = entry.input("inputs_embeds")
            inputs["inputs_embeds"] = np.zeros(spec.shape, spec.numpy_dtype)
            inputs["inputs_embeds"][:rows] = prompt.embeds[start:end]
            inputs["is_token_ids"] = np.ones(entry.rows, np.bool_)
            inputs["is_token_ids"][:rows] = is_token_ids
        return Step(entry.name, inputs)

    def _choose(self, kind: str, rows: int, context: int) -> EntrySignature:
        """The entry of the fewest rows, then of the least context, that holds both."""
        return next(entry for entry in self._by_kind[kind] if entry.rows >= rows and entry.context >= context)

    def _slots(self, sequence: CachedSequence, positions: np.ndarray) -> np.ndarray:
        blocks = np.asarray(sequence.blocks, np.int32)
        slots: np.ndarray = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots

    def _fill_table(self, row: np.ndarray, sequence: CachedSequence) -> None:
        count = min(len(row), len(sequence.blocks))
        row[:count] = sequence.blocks[:count]
