"""The whole compiler, one call per stage: config, plan, trace, lower, compile, artifact."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from aot_compiler.backends.cpu import CompiledProgram, CpuBackend
from aot_compiler.config_file import LoadedConfig, dump_config
from aot_compiler.lowering import LoweredEntry, lower
from aot_compiler.plan import CompilePlan, LayoutPlan, make_plan
from aot_compiler.tokenizer import tokenizer_files
from aot_compiler.trace import trace
from aot_compiler.weights import check_weights, pack_weights
from artifacts.cpu import machine_architecture
from artifacts.folder import Artifact, open_artifact
from artifacts.manifest import (
    FORMAT_VERSION,
    EntryRecord,
    KvCacheRecord,
    LayoutRecord,
    Manifest,
    ModelRecord,
    ProgramRecord,
    TargetRecord,
    WeightRecord,
)
from artifacts.writer import ArtifactWriter

Stage = Literal["trace", "lower", "compile", "weights", "tokenizer", "write"]
TOOLCHAIN = ("aot-compiler", "torch", "jax", "jaxlib")
"""Distributions whose versions decide the bytes of graphs and programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One stage of the build has ended."""

    stage: Stage
    entry: str
    """Name of the entry; empty for stages of the whole artifact."""
    seconds: float
    bytes: int = 0
    """Size of what the stage made."""
    warning: str = ""


Report = Callable[[Progress], None]


def build(
    loaded: LoadedConfig,
    *,
    output: Path | None = None,
    with_weights: bool = True,
    workers: int | None = None,
    report: Report = lambda progress: None,
) -> Artifact:
    """Build the artifact of a configuration.

    Args:
        loaded: the configuration, from ``load_config``.
        output: folder of the artifact; None takes the configuration's.
        with_weights: False builds graphs and programs alone.
        workers: compile processes; None takes one per core.
        report: called after each stage, from this thread.

    Raises:
        AotError: one of its classes for each way to fail; nothing half-written is left to be taken for whole.
    """
    plan = make_plan(loaded, with_weights=with_weights)
    if with_weights and plan.checkpoint:
        check_weights(plan.checkpoint, plan.backbone, plan.layouts[0].parameters)
    target = plan.config.target
    cores = len(os.sched_getaffinity(0))
    with (
        ArtifactWriter(output or Path(plan.config.output)) as writer,
        CpuBackend(target.isa, workers or cores) as backend,
    ):
        lowered = [(layout, _lower_layout(layout, plan, writer, backend, report)) for layout in plan.layouts]
        weights = _pack_weights(plan, writer, report) if with_weights else None
        layouts = tuple(_finish_layout(layout, entries, writer, backend, report) for layout, entries in lowered)
        _add_tokenizer(plan, writer, report)
        started = time.perf_counter()
        writer.add_bytes("config.yaml", dump_config(plan.config).encode())
        writer.commit(_manifest(plan, layouts, weights, writer))
        report(Progress(stage="write", entry="", seconds=time.perf_counter() - started))
        return open_artifact(writer.output)


_Submitted = list[tuple[LoweredEntry, Future[CompiledProgram]]]


def _lower_layout(
    layout: LayoutPlan, plan: CompilePlan, writer: ArtifactWriter, backend: CpuBackend, report: Report
) -> _Submitted:
    """Trace and lower each entry here, while the workers compile those before it."""
    submitted = []
    for signature in layout.entries:
        started = time.perf_counter()
        traced = trace(plan.backbone, signature, layout.caches, layout.parameters)
        report(Progress(stage="trace", entry=signature.name, seconds=time.perf_counter() - started))
        started = time.perf_counter()
        entry = lower(traced)
        writer.add_bytes(f"graphs/{entry.sha256}.hlo.pb", entry.hlo)
        report(
            Progress(stage="lower", entry=signature.name, seconds=time.perf_counter() - started, bytes=len(entry.hlo))
        )
        submitted.append((entry, backend.submit(entry.hlo, layout.ranks, signature.name)))
    return submitted


def _finish_layout(
    layout: LayoutPlan, submitted: _Submitted, writer: ArtifactWriter, backend: CpuBackend, report: Report
) -> LayoutRecord:
    """Take in the programs as the workers finish them."""
    entries = []
    for lowered, future in submitted:
        name = lowered.signature.name
        compiled = backend.result(future, name)
        file = writer.add_program("cpu", CpuBackend.suffix, compiled.program)
        report(Progress(stage="compile", entry=name, seconds=compiled.seconds, bytes=len(compiled.program)))
        entries.append(
            EntryRecord(
                signature=lowered.signature,
                graph=f"graphs/{lowered.sha256}.hlo.pb",
                program=ProgramRecord(file=file, requires=compiled.requires),
            )
        )
    return LayoutRecord(
        name=layout.name,
        ranks=layout.ranks,
        caches=layout.caches,
        parameters=layout.parameters,
        entries=tuple(entries),
    )


def _pack_weights(plan: CompilePlan, writer: ArtifactWriter, report: Report) -> dict[str, WeightRecord]:
    assert plan.checkpoint is not None
    started = time.perf_counter()
    weights = pack_weights(writer, plan.checkpoint, plan.layouts[0].parameters)
    report(Progress(stage="weights", entry="", seconds=time.perf_counter() - started, bytes=plan.weight_bytes))
    return weights


def _add_tokenizer(plan: CompilePlan, writer: ArtifactWriter, report: Report) -> None:
    if plan.checkpoint is None:
        return
    started = time.perf_counter()
    tokenizer = tokenizer_files(plan.checkpoint.tokenizer)
    for name, data in tokenizer.files.items():
        writer.add_bytes(f"tokenizer/{name}", data)
    seconds = time.perf_counter() - started
    report(Progress(stage="tokenizer", entry="", seconds=seconds, warning="; ".join(tokenizer.warnings)))


def _manifest(
    plan: CompilePlan,
    layouts: tuple[LayoutRecord, ...],
    weights: dict[str, WeightRecord] | None,
    writer: ArtifactWriter,
) -> Manifest:
    config, facts = plan.config, plan.backbone.facts
    return Manifest(
        format_version=FORMAT_VERSION,
        self_digest="",
        toolchain={name: version(name) for name in TOOLCHAIN},
        model=ModelRecord(
            architecture=plan.architecture,
            source=config.model.source or config.model.config or "",
            dtype=config.model.dtype,
            vocab_size=facts.vocab_size,
            hidden_size=facts.hidden_size,
            num_layers=len(plan.backbone.layers),
            max_position_embeddings=facts.max_position_embeddings,
            embedding=facts.embedding,
            eos_token_ids=plan.eos_token_ids,
        ),
        target=TargetRecord(
            platform=config.target.platform, architecture=machine_architecture(), isa=config.target.isa
        ),
        kv_cache=KvCacheRecord(block_size=config.kv_cache.block_size, blocks=plan.blocks, dtype=config.cache_dtype),
        layouts=layouts,
        weights=weights,
        files=dict(writer.files),
    )
