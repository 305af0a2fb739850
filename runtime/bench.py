"""Timing of a program's steps."""

import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from artifacts.signature import OPTIONAL_INPUTS, EntrySignature
from runtime.program import Program

_WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryTiming:
    """Wall time of one entry's steps, in milliseconds, logits on the host included."""

    entry: str
    rows: int
    context: int
    steps: int
    median_ms: float
    p95_ms: float


def measure(program: Program, entry: str, steps: int) -> EntryTiming:
    """Time steps of one entry, with every row real and the whole context visible."""
    signature = program.entries[entry]
    inputs = _full_inputs(signature, program.kv_cache.block_size, program.kv_cache.blocks)
    for _ in range(_WARMUP_STEPS):
        program.run(entry, **inputs)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        program.run(entry, **inputs)
        times.append((time.perf_counter() - started) * 1e3)
    return EntryTiming(
        entry=entry,
        rows=signature.rows,
        context=signature.context,
        steps=steps,
        median_ms=float(np.median(times)),
        p95_ms=float(np.percentile(times, 95)),
    )


def _full_inputs(signature: EntrySignature, block_size: int, blocks: int) -> dict[str, np.ndarray]:
    """Inputs of a step at the end of its context. Rows of a decode share blocks where the cache has too few."""
    inputs = {
        spec.name: np.zeros(spec.shape, spec.numpy_dtype)
        for spec in signature.inputs
        if spec.name not in OPTIONAL_INPUTS
    }
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


def print_timings(timings: list[EntryTiming], console: Console) -> None:
    """Print the table of ``aot-run bench``."""
    table = Table("entry")
    for heading in ("rows", "context", "median ms", "p95 ms", "rows/s"):
        table.add_column(heading, justify="right")
    for timing in timings:
        table.add_row(
            timing.entry,
            str(timing.rows),
            str(timing.context),
            f"{timing.median_ms:.2f}",
            f"{timing.p95_ms:.2f}",
            f"{timing.rows / timing.median_ms * 1e3:.0f}",
        )
    console.print(table)
