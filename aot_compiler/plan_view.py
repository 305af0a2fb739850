"""A plan and the configuration's keys, as tables for people and JSON for programs."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from aot_compiler.config import KeyDoc
from aot_compiler.plan import CompilePlan


def print_plan(plan: CompilePlan, console: Console) -> None:
    """Print layouts, entries and bytes."""
    config, facts = plan.config, plan.backbone.facts
    console.print(
        f"{plan.architecture}: {len(plan.backbone.layers)} layers, hidden {facts.hidden_size}, "
        f"vocabulary {facts.vocab_size}, {config.model.dtype}, target {config.target.platform}",
        highlight=False,
    )
    for layout in plan.layouts:
        table = Table(title=f"layout {layout.name}: {len(layout.entries)} entries", title_justify="left")
        table.add_column("entry", no_wrap=True)
        table.add_column("rows", justify="right")
        table.add_column("context", justify="right")
        table.add_column("inputs")
        for entry in layout.entries:
            inputs = ", ".join(f"{spec.name}{list(spec.shape)}" for spec in entry.inputs)
            table.add_row(entry.name, str(entry.rows), str(entry.context), inputs)
        console.print(table)
    console.print(
        f"weights {decimal(plan.weight_bytes)} once, caches {decimal(plan.cache_bytes)} "
        f"({plan.blocks} blocks of {config.kv_cache.block_size} tokens), programs about {decimal(plan.program_bytes)}",
        highlight=False,
    )


def plan_as_json(plan: CompilePlan) -> str:
    """The plan as JSON: what ``aot-compile plan --json`` prints."""
    document = {
        "architecture": plan.architecture,
        "dtype": plan.config.model.dtype,
        "target": plan.config.target.platform,
        "bytes": {"weights": plan.weight_bytes, "caches": plan.cache_bytes, "programs_estimate": plan.program_bytes},
        "blocks": plan.blocks,
        "layouts": [
            {"name": layout.name, "ranks": layout.ranks, "caches": layout.caches, "entries": layout.entries}
            for layout in plan.layouts
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def print_keys(keys: Sequence[KeyDoc], console: Console) -> None:
    """Print every key of the configuration."""
    table = Table("key", "type", "default", "meaning")
    for key in keys:
        table.add_row(key.path, key.type, key.default, key.text)
    console.print(table)
