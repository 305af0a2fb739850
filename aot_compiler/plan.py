"""What a build will make, known before any work: layouts, entries, shapes, bytes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aot_compiler.config import CompileConfig
from aot_compiler.config_file import LoadedConfig, resolve_path
from artifacts.errors import CheckpointNotFoundError, PlanError, UnsupportedModelError
from artifacts.signature import EntrySignature, Kind, TensorSpec, entry_signature
from model_defs.checkpoint import Checkpoint, open_checkpoint
from model_defs.hf_config import HfConfig
from model_defs.registry import build_backbone
from model_defs.step import Backbone

BUILDABLE_LAYOUTS = ("tp1",)

_PROGRAM_BYTES = 60_000
_PROGRAM_BYTES_PER_LAYER = 48_000
"""An XLA:CPU program has about these sizes, measured from 1 to 32 layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPlan:
    """One layout: what each rank holds, and its entries."""

    name: str
    ranks: int
    caches: tuple[TensorSpec, ...]
    parameters: tuple[TensorSpec, ...]
    entries: tuple[EntrySignature, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilePlan:
    """Everything that a build will make."""

    config: CompileConfig
    architecture: str
    backbone: Backbone
    """On the meta device."""
    checkpoint: Checkpoint | None
    """None where only the architecture is known."""
    blocks: int
    """Cache blocks, the null block included."""
    eos_token_ids: tuple[int, ...]
    layouts: tuple[LayoutPlan, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, stored once whatever the number of layouts and entries."""
        return sum(spec.nbytes for spec in self.layouts[0].parameters)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of one rank."""
        return sum(spec.nbytes for spec in self.layouts[0].caches)

    @property
    def program_bytes(self) -> int:
        """Estimated bytes of all programs."""
        entries = sum(len(layout.entries) for layout in self.layouts)
        return entries * (_PROGRAM_BYTES + _PROGRAM_BYTES_PER_LAYER * len(self.backbone.layers))


def make_plan(loaded: LoadedConfig, *, with_weights: bool) -> CompilePlan:
    """Plan a build; reads the architecture and the headers of the checkpoint, and no weights.

    Args:
        loaded: the configuration and where its paths are looked for.
        with_weights: whether a checkpoint must be there.

    Raises:
        AotError: a configuration that cannot be built, a checkpoint that is missing or damaged, or an architecture
            without an implementation.
    """
    config = loaded.config
    checkpoint = _open_checkpoint(loaded, with_weights=with_weights)
    architecture, generation = _architecture(loaded, checkpoint)
    origin = config.model.config or config.model.source or ""
    backbone = build_backbone(architecture, origin, config.kv_cache.block_size)
    _check_layouts(config)
    _check_context(config, backbone)
    blocks = config.kv_cache.tokens // config.kv_cache.block_size + 1
    stated = architecture if generation.get("eos_token_id") is None else generation
    return CompilePlan(
        config=config,
        architecture=str(architecture["architectures"][0]),  # type: ignore[index]
        backbone=backbone,
        checkpoint=checkpoint,
        blocks=blocks,
        eos_token_ids=HfConfig(stated, origin).token_ids("eos_token_id", backbone.facts.vocab_size),
        layouts=tuple(_layout(name, config, backbone, blocks) for name in config.layouts),
    )


def _open_checkpoint(loaded: LoadedConfig, *, with_weights: bool) -> Checkpoint | None:
    model = loaded.config.model
    if model.source is None:
        if with_weights:
            raise CheckpointNotFoundError(
                found=f"{loaded.path}: no model.source",
                expected="a checkpoint to take the weights from",
                action="add model.source, or build with --no-weights",
            )
        return None
    try:
        return open_checkpoint(model.source, search=loaded.search)
    except CheckpointNotFoundError:
        if with_weights or (model.config is None and _config_beside_source(loaded) is None):
            raise
        return None


def _config_beside_source(loaded: LoadedConfig) -> Path | None:
    """The ``config.json`` of a source that is a folder, whether or not its weights are there."""
    folder = resolve_path(loaded.config.model.source or "", loaded.search)
    path = folder / "config.json" if folder else None
    return path if path and path.is_file() else None


def _architecture(
    loaded: LoadedConfig, checkpoint: Checkpoint | None
) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """The Hugging Face configuration, and the generation configuration beside it."""
    path = loaded.config.model.config
    if path is None and checkpoint is not None:
        return checkpoint.config, checkpoint.generation_config
    if path is None:
        beside = _config_beside_source(loaded)
        assert beside is not None  # _open_checkpoint has refused a source that gives no architecture
        return _folder_configs(beside, loaded.config.model.source or "")
    generation = checkpoint.generation_config if checkpoint else {}
    found = resolve_path(path, loaded.search)
    if found is None:
        raise CheckpointNotFoundError(
            found=f"model.config {path!r} is not in {' or '.join(str(folder) for folder in loaded.search)}",
            expected="a Hugging Face config.json",
            action="correct the path",
        )
    return _read_json(found, path), generation


def _folder_configs(config: Path, source: str) -> tuple[Mapping[str, object], Mapping[str, object]]:
    generation = config.with_name("generation_config.json")
    return (
        _read_json(config, f"{source}/{config.name}"),
        _read_json(generation, f"{source}/{generation.name}") if generation.is_file() else {},
    )


def _read_json(found: Path, origin: str) -> Mapping[str, object]:
    try:
        values = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(
            found=f"{origin} is not JSON ({error})", expected="a Hugging Face config.json", action="correct the file"
        ) from error
    if not isinstance(values, dict):
        raise UnsupportedModelError(
            found=f"{origin} holds a {type(values).__name__}",
            expected="a JSON object, as a Hugging Face config.json",
            action="correct the file",
        )
    return values


def _check_layouts(config: CompileConfig) -> None:
    for name in config.layouts:
        if name not in BUILDABLE_LAYOUTS:
            raise PlanError(
                found=f"layout {name}",
                expected=f"{', '.join(BUILDABLE_LAYOUTS)}, the only one of this version",
                action="set layouts to [tp1]",
            )


def _check_context(config: CompileConfig, backbone: Backbone) -> None:
    longest, limit = config.buckets.context[-1], backbone.facts.max_position_embeddings
    if longest > limit:
        raise PlanError(
            found=f"buckets.context holds {longest}",
            expected=f"at most {limit}, the model's max_position_embeddings",
            action="lower the context bucket",
        )


def _layout(name: str, config: CompileConfig, backbone: Backbone, blocks: int) -> LayoutPlan:
    facts, block_size = backbone.facts, config.kv_cache.block_size
    cache_shape = (blocks, facts.num_key_value_heads, block_size, facts.head_dim)
    caches = tuple(
        TensorSpec(name=f"layers.{i}.{part}", shape=cache_shape, dtype=config.cache_dtype)
        for i in range(len(backbone.layers))
        for part in ("k", "v")
    )
    parameters = tuple(
        TensorSpec(name=parameter, shape=tuple(tensor.shape), dtype=config.model.dtype)
        for parameter, tensor in backbone.named_parameters()
    )
    return LayoutPlan(
        name=name, ranks=1, caches=caches, parameters=parameters, entries=tuple(_entries(config, backbone))
    )


def entry_sizes(config: CompileConfig) -> Iterator[tuple[Kind, int, int]]:
    """Kind, rows and context of each entry of a layout: every prefill that fits its context, then every decode."""
    buckets = config.buckets
    for rows in buckets.prefill:
        yield from (("prefill", rows, context) for context in buckets.context if rows <= context)
    for rows in buckets.decode:
        yield from (("decode", rows, context) for context in buckets.context)


def _entries(config: CompileConfig, backbone: Backbone) -> Iterator[EntrySignature]:
    for kind, rows, context in entry_sizes(config):
        yield entry_signature(
            kind,
            rows=rows,
            context=context,
            block_size=config.kv_cache.block_size,
            hidden_size=backbone.facts.hidden_size,
            vocab_size=backbone.facts.vocab_size,
            dtype=config.model.dtype,
        )
