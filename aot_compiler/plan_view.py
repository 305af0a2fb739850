"""A plan and the configuration's keys, for people and as JSON for programs."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from aot_compiler.config import KeyDoc

if TYPE_CHECKING:  # the keys are printed without torch
    from aot_compiler.plan import CompilePlan, LayoutPlan


def print_plan(plan: "CompilePlan", console: Console) -> None:
    """Print what is compiled and for what, its bytes, then each layout's entries and their inputs."""
    config, facts, cache = plan.config, plan.backbone.facts, plan.config.kv_cache
    _print_facts(
        {
            "model": f"{plan.architecture}: {len(plan.backbone.layers)} layers, hidden {facts.hidden_size}, "
            f"vocabulary {facts.vocab_size}, {config.model.dtype}",
            "source": _source(plan),
            "target": f"{config.target.platform}, isa {config.target.isa}",
            "cache": f"{cache.tokens} tokens ({plan.blocks - 1} blocks of {cache.block_size}, and the null block), "
            f"{config.cache_dtype}, {decimal(plan.cache_bytes)}",
            "longest": f"{config.buckets.context[-1]} tokens in one sequence, prompt and answer together",
            "weights": f"{decimal(plan.weight_bytes)}, stored once",
            "programs": f"about {decimal(plan.program_bytes)}",
            "output": config.output,
        },
        console,
    )
    for layout in plan.layouts:
        console.print()
        _print_layout(layout, console)


def _print_layout(layout: "LayoutPlan", console: Console) -> None:
    table = Table(title=f"layout {layout.name}: {len(layout.entries)} entries", title_justify="left")
    table.add_column("entry", no_wrap=True)
    table.add_column("rows", justify="right")
    table.add_column("context", justify="right")
    for entry in layout.entries:
        table.add_row(entry.name, str(entry.rows), str(entry.context))
    console.print(table)
    for kind in ("prefill", "decode"):
        entries = [entry for entry in layout.entries if entry.kind == kind]
        if entries:
            rest = f" (the other {kind} entries have the same, in their own sizes)" if len(entries) > 1 else ""
            _print(f"inputs of {entries[0].name}{rest}", console)
            for spec in entries[0].inputs:
                _print(f"  {spec.name:17} {spec.dtype}{list(spec.shape)}", console)


def _source(plan: "CompilePlan") -> str:
    model = plan.config.model
    if model.source is None:
        return f"none, architecture from {model.config}; builds with --no-weights"
    if plan.checkpoint is not None:
        return f"{model.source}, found"
    return f"{model.source}, no weights found; builds with --no-weights"


def plan_as_json(plan: "CompilePlan") -> str:
    """The plan as JSON: what ``aot-compile plan --json`` prints."""
    config = plan.config
    document = {
        "architecture": plan.architecture,
        "source": {"name": config.model.source, "found": plan.checkpoint is not None},
        "dtype": config.model.dtype,
        "target": config.target.platform,
        "isa": config.target.isa,
        "output": config.output,
        "bytes": {"weights": plan.weight_bytes, "caches": plan.cache_bytes, "programs_estimate": plan.program_bytes},
        "blocks": plan.blocks,
        "cache_dtype": config.cache_dtype,
        "longest_sequence": config.buckets.context[-1],
        "layouts": [
            {"name": layout.name, "ranks": layout.ranks, "caches": layout.caches, "entries": layout.entries}
            for layout in plan.layouts
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def print_keys(keys: Sequence[KeyDoc], console: Console) -> None:
    """Print every key of the configuration: its name and default, and below them its type and meaning."""
    for key in keys:
        default = key.default if key.default in ("required", "none") else f"default {key.default}"
        _print(f"{key.path} ({default})", console)
        for text in (key.type, key.text):
            for line in textwrap.wrap(text, console.width - 4, break_on_hyphens=False, break_long_words=False):
                _print(f"    {line}", console)


def _print_facts(facts: Mapping[str, str], console: Console) -> None:
    for name, fact in facts.items():
        _print(f"{name:10} {fact}", console)


def _print(line: str, console: Console) -> None:
    """One line as it is: no markup in it, and broken by the terminal alone, so that a pipe gets it whole."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
