"""Timing of a program's steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from artifacts.signature import EntrySignature
from runtime.program import Program

_WARMUP_STEPS = 2
_LEAST_STEPS = 3  # of which a median can be taken
_SIZES = (4, 7, 5, 9, 7, 6)  # of the columns after the first, in characters


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryTiming:
    """Wall time of one entry's steps, in milliseconds, logits on the host included."""

    entry: str
    rows: int
    context: int
    steps: int
    median_ms: float
    p95_ms: float


def measure(program: Program, entry: str, steps: int, seconds: float) -> EntryTiming:
    """Time steps of one entry, with every row real and the whole context visible.

    Args:
        program: a loaded layout.
        entry: name of the entry.
        steps: steps to time.
        seconds: begin no further step after so long, once there are 3.
    """
    signature = program.entries[entry]
    inputs = _full_inputs(signature, program.kv_cache.block_size, program.kv_cache.blocks)
    times: list[float] = []
    for _ in range(_WARMUP_STEPS):
        program.run(entry, **inputs)
    end = time.perf_counter() + seconds
    while len(times) < steps and (len(times) < _LEAST_STEPS or time.perf_counter() < end):
        started = time.perf_counter()
        program.run(entry, **inputs)
        times.append((time.perf_counter() - started) * 1e3)
    return EntryTiming(
        entry=entry,
        rows=signature.rows,
        context=signature.context,
        steps=len(times),
        median_ms=float(np.median(times)),
        p95_ms=float(np.percentile(times, 95)),
    )


def _full_inputs(signature: EntrySignature, block_size: int, blocks: int) -> dict[str, np.ndarray]:
    """Inputs of a step at the end of its context. Rows of a decode share blocks where the cache has too few."""
    inputs = signature.padding_inputs()
    requests, table = inputs["block_table"].shape
    inputs["block_table"] = 1 + (np.arange(requests * table, dtype=np.int32) % (blocks - 1)).reshape(requests, table)
    first = signature.context - (signature.rows if signature.kind == "prefill" else 1)
    positions = np.arange(first, signature.context, dtype=np.int32)
    inputs["positions"][:] = positions
    blocks_of_rows = inputs["block_table"][:, positions // block_size].reshape(-1)
    inputs["slot_mapping"][:] = blocks_of_rows * block_size + np.resize(positions % block_size, signature.rows)
    if "output_positions" in inputs:
        inputs["output_positions"][0] = signature.rows - 1
    return inputs


def heading(entries: Sequence[str]) -> str:
    """First line of the table of these entries."""
    return _line(_width(entries), "entry", "rows", "context", "steps", "median ms", "p95 ms", "rows/s")


def line(timing: EntryTiming, entries: Sequence[str]) -> str:
    """One line of the table, which can be printed before the next entry is measured."""
    return _line(
        _width(entries),
        timing.entry,
        str(timing.rows),
        str(timing.context),
        str(timing.steps),
        f"{timing.median_ms:.2f}",
        f"{timing.p95_ms:.2f}",
        f"{timing.rows / timing.median_ms * 1e3:.0f}",
    )


def _width(entries: Sequence[str]) -> int:
    return max(len(name) for name in ("entry", *entries))


def _line(width: int, entry: str, *cells: str) -> str:
    return f"{entry:{width}}" + "".join(f"  {cell:>{size}}" for cell, size in zip(cells, _SIZES, strict=True))
